"""The product of a mixture of experts: every row has a weight matrix of its own, shared with its neighbours."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from triage_jax.nvfp4.operand import Operand, to_operand
from triage_jax.nvfp4.spec import DotRecipe

# Contraction over the last axes, x · wᵀ; over the outputs, g · w; over each group's own rows, gᵀ · x.
_FORWARD = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
_INPUT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
_WEIGHT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def grouped_dot(
    x: Float[Array, "M K"],
    w: Float[Array, "E N K"] | Operand,
    group_sizes: Int[Array, "E"],
    recipe: DotRecipe | None,
    execution: str,
    key: Array | None = None,
) -> Float[Array, "M N"]:
    """y[m] = x[m] · w[e(m)]ᵀ in x's dtype, where the rows of x are sorted by expert e, `group_sizes` rows each.

    Executions and gradients as in `quantized_dot`: "float32", "bf16", and "emulated", a BF16 product of dequantised
    operands with float32 accumulation. Each expert's weight has its own scope; the activations of all experts are one
    array, and so one scope "tensor". Rows past the last group give zeros.
    Raises ValueError on another execution, on "emulated" without a recipe, on backward "nvfp4", whose gradient of the
    weights would quantise along the tokens of each expert, and on shapes that do not contract.
    """
    shape = w.values.shape if isinstance(w, Operand) else w.shape
    if len(shape) != 3 or x.ndim != 2 or x.shape[1] != shape[2] or group_sizes.shape != shape[:1]:
        raise ValueError(
            f"grouped_dot: x [M, K], w [E, N, K] and group_sizes [E] must agree; got {x.shape}, {shape} and "
            f"{group_sizes.shape}"
        )
    if execution == "float32":
        return _plain(x, w, group_sizes)
    if execution not in ("bf16", "emulated"):
        raise ValueError(f"grouped_dot: execution is {execution!r}; accepted: float32, bf16, emulated")
    if execution == "emulated" and recipe is None:
        raise ValueError("grouped_dot: execution 'emulated' needs a DotRecipe")
    if execution == "emulated" and recipe is not None and recipe.backward == "nvfp4":
        raise ValueError("grouped_dot: backward 'nvfp4' is not grouped; accepted: bf16, dequantized")
    return _straight_through(x, w, group_sizes, recipe if execution == "emulated" else None)


def stacked_operand(w: Float[Array, "E N K"], recipe: DotRecipe) -> Operand:
    """Every expert's weight quantised by itself; scales `[E]` or `[E, N, 1]`."""
    return jax.vmap(lambda expert: to_operand(expert, recipe.weight))(w)


def _plain(x: Array, w: Array | Operand, sizes: Array) -> Array:
    w = lax.stop_gradient(_dense(w)) if isinstance(w, Operand) else w
    dtype = jnp.promote_types(jnp.promote_types(x.dtype, w.dtype), jnp.float32)
    y = lax.ragged_dot_general(
        x.astype(dtype), w.astype(dtype), sizes, _FORWARD, precision=lax.Precision.HIGHEST
    )
    return y.astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _straight_through(x: Array, w: Array | Operand, sizes: Array, recipe: DotRecipe | None) -> Array:
    return _forward(x, w, sizes, recipe)[0]


type _Residuals = tuple[Array | Operand, Array | Operand, Array | None, Array]
"""What the gradients are products of, an empty array of w's dtype (None: w has no gradient), the group sizes"""


def _forward(
    x: Array, w: Array | Operand, sizes: Array, recipe: DotRecipe | None
) -> tuple[Array, _Residuals]:
    like_w = None if isinstance(w, Operand) else jnp.zeros(0, w.dtype)
    left, right = x, w
    if recipe is not None:
        left = to_operand(x, recipe.activation)
        right = w if isinstance(w, Operand) else stacked_operand(w, recipe)
    scale = _row_scales(right, sizes, len(x)) * (left.scale if isinstance(left, Operand) else 1.0)
    y = _product(_values(left), _values(right), sizes, _FORWARD) * scale
    multiplied = recipe is not None and recipe.backward == "dequantized"
    kept = (left, right) if multiplied else (x, w)
    return y.astype(x.dtype), (kept[0], kept[1], like_w, sizes)


def _backward(recipe: DotRecipe | None, residuals: _Residuals, g: Array) -> tuple[Array, Array | None, None]:
    x, w, like_w, sizes = residuals
    if like_w is None:
        dx = _product(g * _row_scales(w, sizes, len(g)), _values(w), sizes, _INPUT)
        return dx.astype(g.dtype), None, None
    dx = _product(g, _dense(w), sizes, _INPUT)
    dw = _product(g, _dense(x), sizes, _WEIGHT)
    return dx.astype(g.dtype), dw.astype(like_w.dtype), None


_straight_through.defvjp(_forward, _backward)


def _values(operand: Array | Operand) -> Array:
    return operand.values if isinstance(operand, Operand) else operand


def _dense(operand: Array | Operand) -> Array:
    """An operand's numbers in float32, every expert's scale on its own matrix."""
    if not isinstance(operand, Operand):
        return operand
    ndim = operand.values.ndim
    return operand.values.astype(jnp.float32) * operand.scale.reshape(
        operand.scale.shape + (1,) * (ndim - operand.scale.ndim)
    )


def _row_scales(w: Array | Operand, sizes: Array, rows: int) -> Float32[Array, "..."] | float:
    """What each row's expert scales its outputs with: [M, 1], [M, N], or 1."""
    if not isinstance(w, Operand):
        return 1.0
    expert = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=rows)
    return w.scale.reshape(len(sizes), -1)[expert]


def _product(
    a: Array, b: Array, sizes: Array, numbers: lax.RaggedDotDimensionNumbers
) -> Float32[Array, "..."]:
    return lax.ragged_dot_general(
        a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), sizes, numbers, preferred_element_type=jnp.float32
    )
