"""Prompts, answers and verifiers. Free of JAX, so that the verifier's child process starts quickly."""
