"""Gradients of y = x·wᵀ: dx = g·w over the outputs, dw = gᵀ·x over the tokens, in three number formats."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Float32

from triage_jax.nvfp4.hadamard import rotate
from triage_jax.nvfp4.operand import Operand
from triage_jax.nvfp4.product import Execution, along_output, bf16_product, product, quantised
from triage_jax.nvfp4.spec import BLOCK, DotRecipe, QuantSpec

type Gradients = tuple[Float32[Array, "... K"], Float32[Array, "N K"]]


def bf16_gradients(x: Float[Array, "... K"], w: Float[Array, "N K"], g: Float[Array, "... N"]) -> Gradients:
    """Both products of operands cast to BF16, accumulated in float32."""
    dx = bf16_product(g, g.ndim - 1, w, 0)
    return dx, token_product(_rows(g), _rows(x))


def nvfp4_gradients(
    x: Float[Array, "... K"],
    w: Float[Array, "N K"],
    g: Float[Array, "... N"],
    recipe: DotRecipe,
    execution: Execution,
    key: Array | None,
) -> Gradients:
    """Both products of operands quantised afresh along their contraction: g and w by output, gᵀ and xᵀ by token.

    wᵀ and xᵀ keep their tile and arithmetic but have one global scale each. The contraction is filled up with
    zeros to a multiple of 16, which leaves every scale but that of a block of its own as it was. The two uses
    of g are rounded independently. Raises ValueError on stochastic rounding without a key.
    """
    for_outputs, for_tokens = rounding_keys(recipe, key)
    outputs = quantised(_fill(_rows(g)), recipe.gradient, execution, for_outputs)
    dx = product(outputs, quantised(_fill(w.T), whole(recipe.weight), execution))
    gradient, activation = _fill(_rows(g).T), _fill(_rows(x).T)
    if recipe.hadamard:
        gradient, activation = rotate(gradient), rotate(activation)
    tokens = quantised(gradient, recipe.gradient, execution, for_tokens)
    dw = product(tokens, quantised(activation, whole(recipe.activation), execution))
    return dx.reshape(x.shape), dw


def token_product(g: Float[Array, "rows N"], x: Float[Array, "rows K"]) -> Float32[Array, "N K"]:
    """gᵀ·x over the rows, operands cast to BF16, accumulated in float32.

    XLA:CPU widens both operands to float32 where the contraction comes first in each, five times slower than a copy of
    gᵀ in rows and the BF16 product (AMX); a GPU takes them as they lie.
    """
    g = g.astype(jnp.bfloat16)
    rows_first = Layout(major_to_minor=(0, 1))
    return lax.platform_dependent(
        g,
        x,
        cpu=lambda g, x: bf16_product(with_layout_constraint(g.T, rows_first), 1, x, 0),
        default=lambda g, x: bf16_product(g, 0, x, 0),
    )


def whole(spec: QuantSpec) -> QuantSpec:
    """The same arithmetic with one dynamic scale for the array."""
    return dataclasses.replace(spec, scope="tensor", static_amax=None, shards=None)


def rounding_keys(recipe: DotRecipe, key: Array | None) -> tuple[Array | None, Array | None]:
    """Keys of the gradient's two quantisations; Nones where it is rounded to nearest."""
    if not recipe.stochastic_rounding:
        return None, None
    if key is None:
        raise ValueError(
            "quantized_dot: DotRecipe.stochastic_rounding needs a key for the gradient; pass key=, or set it False"
        )
    first, second = jax.random.split(key)
    return first, second


def operand_gradient(g: Float[Array, "... N"], w: Operand) -> Float32[Array, "... K"]:
    """dx through a prequantised weight, in BF16."""
    last = g.ndim - 1
    # One scale leaves the sum afterwards; a scale per output enters it with g.
    if w.scale.ndim:
        return bf16_product(g * along_output(w.scale, g.ndim), last, w.values, 0)
    return bf16_product(g, last, w.values, 0) * w.scale


def _rows(x: Float[Array, "... K"]) -> Float[Array, "rows K"]:
    return x.reshape(-1, x.shape[-1])


def _fill(x: Float[Array, "rows K"]) -> Float[Array, "rows filled"]:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)))
