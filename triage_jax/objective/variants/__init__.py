"""Objectives to compare TRIAGE with, and TRIAGE without one of its parts; `registry.py` has them by name.

Token losses of one response are pure functions `(logp, response, config) -> TokenLosses`; a `Variant` makes an
objective of one.
"""

from triage_jax.objective.variants.bapo import BapoVariant, bapo
from triage_jax.objective.variants.base import Objective, Variant
from triage_jax.objective.variants.calibrated import CalibratedVariant
from triage_jax.objective.variants.clipping import cispo, clip_sampler, dr_grpo, grpo, gspo
from triage_jax.objective.variants.importance import (
    RejectionVariant,
    geo_rejection,
    geo_rejection_keeps,
    icepop,
    icepop_keeps,
    k3_rejection,
    k3_rejection_keeps,
    tis_sequence,
)
from triage_jax.objective.variants.masking import dppo_kl, dppo_tv, opsm

__all__ = [
    "BapoVariant",
    "CalibratedVariant",
    "Objective",
    "RejectionVariant",
    "Variant",
    "bapo",
    "cispo",
    "clip_sampler",
    "dppo_kl",
    "dppo_tv",
    "dr_grpo",
    "geo_rejection",
    "geo_rejection_keeps",
    "grpo",
    "gspo",
    "icepop",
    "icepop_keeps",
    "k3_rejection",
    "k3_rejection_keeps",
    "opsm",
    "tis_sequence",
]
