"""NVFP4 W4A4 reinforcement learning of language models in JAX, with the TRIAGE objective (arXiv 2610.07043)."""

__version__ = "0.1.0"
