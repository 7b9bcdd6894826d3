"""The rotation of the weight gradient's operands: one signed Hadamard transform per 16 tokens."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float32

from triage_jax.nvfp4.spec import BLOCK

SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)
"""Transformer Engine's fixed signs (jax/quantize/hadamard.py)."""


def rotation() -> np.ndarray:
    """diag(SIGNS)·H₁₆/4, orthogonal, its entries ±¼ (exact in BF16); H₁₆ is Sylvester's."""
    hadamard = np.ones((1, 1), np.float32)
    while len(hadamard) < BLOCK:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    return SIGNS[:, None] * hadamard / 4


def rotate(x: Float[Array, "... T"]) -> BFloat16[Array, "... T"]:
    """BF16(x·R) for every run of 16 along the last axis, x taken in BF16, sums in float32.

    As R is orthogonal, rotating both operands of a product along its contraction leaves the product.
    Raises ValueError unless T is a multiple of 16.
    """
    if x.ndim == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"rotate: the last axis must be a multiple of {BLOCK}, got shape {x.shape}")
    # Numbers of BF16 in float32 arithmetic: every product is exact on any device, and XLA may not skip a rounding.
    # Runs stay along the axis that they come from, so that what is split over devices by tokens stays so.
    runs = _bf16(x.astype(jnp.float32)).reshape(*x.shape[:-1], -1, BLOCK)
    turned = lax.dot_general(runs, jnp.asarray(rotation()), (((x.ndim,), (0,)), ((), ())))
    return _bf16(turned).astype(jnp.bfloat16).reshape(x.shape)


def _bf16(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
