"""The emulated product's operands: code × block scale in BF16, which holds the product exactly."""

from typing import no_type_check

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float32

from triage_jax.nvfp4.formats import e2m1_decode, e4m3_decode
from triage_jax.nvfp4.quantize import QuantizedTensor, block_scales, rounded
from triage_jax.nvfp4.scales import ScopeAmax, spread
from triage_jax.nvfp4.spec import QuantSpec


@no_type_check  # the same tree also carries shardings, shapes and masks
@struct.dataclass
class Operand:
    """x ≈ values · scale; an E2M1 code (2 significant bits) times an E4M3 scale (4) is exact in BF16 (8)."""

    values: BFloat16[Array, "... K"]
    scale: Float32[Array, "..."]
    encode: Float32[Array, "..."] | None = None
    """S of `rules`, where a product wants it: 1/S is not always `scale`'s very bits"""


def to_operand(
    x: Float[Array, "... K"],
    spec: QuantSpec,
    key: Array | None = None,
    scope_amax: ScopeAmax | None = None,
    *,
    keep_encode: bool = False,
) -> Operand:
    """Quantise straight to the product's form: equal to `from_quantized(quantize(...))` of the same, bit for bit.

    The sign of zero is the one exception (rounding to nearest, every zero is +0 here). Carries no gradient.
    """
    x = lax.stop_gradient(x)
    scales = block_scales(x, spec, scope_amax)
    values = rounded(x, scales, spec, key) * spread(scales.decode)
    return Operand(
        values=_exact_bf16(values),
        scale=scales.global_scale,
        encode=scales.encode_scale if keep_encode else None,
    )


def _exact_bf16(x: Float32[Array, "..."]) -> BFloat16[Array, "..."]:
    """BF16 of float32 that it holds exactly; a cast would cost twice for a rounding that never happens."""
    return lax.bitcast_convert_type(
        (lax.bitcast_convert_type(x, jnp.uint32) >> 16).astype(jnp.uint16), jnp.bfloat16
    )


def from_quantized(q: QuantizedTensor) -> Operand:
    """The operand of stored codes and scales."""
    values = e2m1_decode(q.codes) * spread(e4m3_decode(q.scales))
    return Operand(values=values.astype(jnp.bfloat16), scale=q.global_scale, encode=q.encode_scale)
