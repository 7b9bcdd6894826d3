"""4-over-6: a block's scale puts its largest element on code 6 or on code 4, whichever errs less."""

from functools import reduce
from operator import add

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from triage_jax.nvfp4.formats import E2M1_MAX, e2m1_round, e4m3_round
from triage_jax.nvfp4.scales import (
    FLT_MAX,
    GlobalScales,
    by_tile,
    divide,
    element_scale,
    over_rows,
    scale_ratio,
    spread,
)
from triage_jax.nvfp4.spec import BLOCK, QuantSpec


def best_scale(
    x: Float[Array, "... K"], b: Float32[Array, "... blocks"], scope: GlobalScales, spec: QuantSpec
) -> Float32[Array, "... blocks"]:
    """Block scales on the E4M3 grid: s₆ = E4M3(r) or s₄ = E4M3(r·1.5) with r = (b/6)·S, ties to s₆.

    Source: TransformerEngine common/cast/nvfp4/quantize_4over6_nvfp4.cuh.
    """
    ratio = scale_ratio("division_first", b, scope)
    six, four = e4m3_round(ratio), e4m3_round(ratio * np.float32(1.5))
    take_four = block_error(x, four, scope, spec) < block_error(x, six, scope, spec)
    return jnp.where(take_four, four, six)


def block_error(
    x: Float[Array, "... K"], scale: Float32[Array, "... blocks"], scope: GlobalScales, spec: QuantSpec
) -> Float32[Array, "... blocks"]:
    """Σ|d − x| or Σ(d − x)² of each block, or tile, with d = ((q·s)·A)/(6·bound).

    Sixteen terms in order; a tile's rows in pairs eight, four, two, one apart. FlashInfer's quantiser of a
    whole tensor scores d = (q·s)·D, which can flip a near-tie.
    """
    x = x.astype(jnp.float32)
    codes = e2m1_round(x * spread(element_scale("reciprocal", scale, scope)))
    product = codes * spread(scale)
    if spec.rule == "flashinfer" and spec.scope != "row":
        back = _rounded(product * scope.decode)
    else:
        back = divide(product * scope.amax, np.float32(E2M1_MAX * spec.bound))
    off = back - x
    terms = jnp.abs(off) if spec.four_over_six == "mae" else _rounded(off * off)
    terms = terms.reshape(*terms.shape[:-1], -1, BLOCK)
    error = reduce(add, (terms[..., i] for i in range(BLOCK)))
    return error if spec.tile == "1x16" else _over_tile(error)


def _over_tile(error: Float32[Array, "... rows blocks"]) -> Float32[Array, "... rows blocks"]:
    tree = by_tile(error)
    while (half := tree.shape[-2] // 2) > 0:
        tree = tree[..., :half, :] + tree[..., half:, :]
    return over_rows(tree[..., 0, :], error.shape[-2])


def _rounded(product: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """A product that XLA cannot fuse with the addition after it into one rounding; infinite ones saturate."""
    clipped = jnp.where(product > FLT_MAX, FLT_MAX, product)
    return jnp.where(clipped < -FLT_MAX, -FLT_MAX, clipped)
