"""The product of a mixture of experts: every row has a weight matrix of its own, shared with its neighbours."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from triage_jax.nvfp4.backward import rounding_keys, whole
from triage_jax.nvfp4.experts import check_experts, sorted_amax, stacked_operand
from triage_jax.nvfp4.global_product import factor, joined
from triage_jax.nvfp4.hadamard import rotate
from triage_jax.nvfp4.operand import Operand, to_operand
from triage_jax.nvfp4.spec import BLOCK, DotRecipe
from triage_jax.nvfp4.split import split_of, split_sum

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
    operands with float32 accumulation. `recipe.experts` says which experts share a global scale: by default each
    expert's weight has its own, and the activations of all are one array, and so one scope "tensor"; in a gradient's
    products that quantise afresh that is so whatever the recipe says. Rows past the last group give zeros.
    `key` is for stochastic rounding, one per product and step.
    Raises ValueError on another execution, on "emulated" without a recipe, on scopes of experts that it would not
    follow, on stochastic rounding without a key where a gradient is taken, and on shapes that do not contract.
    """
    shape = w.values.shape if isinstance(w, Operand) else w.shape
    if len(shape) != 3 or x.ndim != 2 or x.shape[1] != shape[2] or group_sizes.shape != shape[:1]:
        raise ValueError(
            f"grouped_dot: x [M, K], w [E, N, K] and group_sizes [E] must agree; got {x.shape}, {shape} and "
            f"{group_sizes.shape}"
        )
    split_k = split_of(recipe, execution)
    if execution == "float32":
        return _plain(x, w, group_sizes)
    if execution not in ("bf16", "emulated"):
        raise ValueError(f"grouped_dot: execution is {execution!r}; accepted: float32, bf16, emulated")
    if execution == "emulated" and recipe is None:
        raise ValueError("grouped_dot: execution 'emulated' needs a DotRecipe")
    if recipe is not None:
        check_experts(recipe, execution)
    return _straight_through(x, w, group_sizes, key, recipe if execution == "emulated" else None, split_k)


def _plain(x: Array, w: Array | Operand, sizes: Array) -> Array:
    w = lax.stop_gradient(_dense(w)) if isinstance(w, Operand) else w
    dtype = jnp.promote_types(jnp.promote_types(x.dtype, w.dtype), jnp.float32)
    y = lax.ragged_dot_general(
        x.astype(dtype), w.astype(dtype), sizes, _FORWARD, precision=lax.Precision.HIGHEST
    )
    return y.astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _straight_through(
    x: Array, w: Array | Operand, sizes: Array, key: Array | None, recipe: DotRecipe | None, split_k: int
) -> Array:
    return _forward(x, w, sizes, key, recipe, split_k)[0]


type _Residuals = tuple[Array | Operand, Array | Operand, Array | None, Array, Array | None]
"""What the gradients are products of, an empty array of w's dtype (None: w has no gradient), the sizes, the key"""


def _forward(
    x: Array, w: Array | Operand, sizes: Array, key: Array | None, recipe: DotRecipe | None, split_k: int
) -> tuple[Array, _Residuals]:
    like_w = None if isinstance(w, Operand) else jnp.zeros(0, w.dtype)
    left, right = x, w
    if recipe is not None:
        amax = sorted_amax(recipe, sizes, len(x))
        left = to_operand(x, recipe.activation, scope_amax=amax, keep_encode=recipe.keeps_encode)
        right = w if isinstance(w, Operand) else stacked_operand(w, recipe)
    scale = _joined_scales(left, right, sizes, recipe)
    y = _split_product(_values(left), _values(right), sizes, split_k) * scale
    multiplied = recipe is not None and recipe.backward == "dequantized"
    kept = (left, right) if multiplied else (x, w)
    return y.astype(x.dtype), (kept[0], kept[1], like_w, sizes, key)


def _backward(
    recipe: DotRecipe | None, split_k: int, residuals: _Residuals, g: Array
) -> tuple[Array, Array | None, None, None]:
    x, w, like_w, sizes, key = residuals
    if like_w is None:
        dx = _product(g * _row_scales(w, sizes, len(g)), _values(w), sizes, _INPUT)
        return dx.astype(g.dtype), None, None, None
    if recipe is not None and recipe.backward == "nvfp4":
        dx, dw = _nvfp4_gradients(_values(x), _values(w), g, sizes, recipe, key)
    else:
        dx, dw = _product(g, _dense(w), sizes, _INPUT), _product(g, _dense(x), sizes, _WEIGHT)
    return dx.astype(g.dtype), dw.astype(like_w.dtype), None, None


_straight_through.defvjp(_forward, _backward)


def _nvfp4_gradients(
    x: Array, w: Array, g: Array, sizes: Array, recipe: DotRecipe, key: Array | None
) -> tuple[Float32[Array, "M K"], Float32[Array, "E N K"]]:
    """As `stacked.stacked_nvfp4_gradients`: blocks and rotations are of 16 rows of one expert.

    But a gradient's scope "row" spans the tokens of all experts in dw.
    """
    for_outputs, for_tokens = rounding_keys(recipe, key)
    outputs = to_operand(_filled(g), recipe.gradient, for_outputs)
    columns = _filled(jnp.swapaxes(w, 1, 2))
    turned = jax.vmap(lambda expert: to_operand(expert, whole(recipe.weight)))(columns)
    scale = outputs.scale * _row_scales(turned, sizes, len(x))
    dx = _product(outputs.values, turned.values, sizes, _FORWARD) * scale

    rows, aligned = _aligned_rows(sizes, len(x))
    gradient, activation = (
        jnp.where(rows[:, None] < len(x), array.at[rows].get(mode="clip"), 0).T for array in (g, x)
    )
    if recipe.hadamard:
        gradient, activation = rotate(gradient), rotate(activation)
    left = to_operand(gradient, recipe.gradient, for_tokens)
    right = to_operand(activation, whole(recipe.activation))
    left_scale = left.scale.reshape(1, -1, 1) if left.scale.ndim else left.scale
    dw = _product(left.values.T, right.values.T, aligned, _WEIGHT) * (left_scale * right.scale)
    return dx, dw


def _aligned_rows(sizes: Int[Array, "E"], rows: int) -> tuple[Int[Array, "slots"], Int[Array, "E"]]:
    """Rows with every expert's first at a multiple of 16, `rows` where there is none; and the sizes so filled."""
    filled = -(-sizes // BLOCK) * BLOCK
    ends = jnp.cumsum(filled)
    slots = jnp.arange(-(-rows // BLOCK) * BLOCK + BLOCK * len(sizes))
    expert = jnp.minimum(jnp.searchsorted(ends, slots, side="right"), len(sizes) - 1)
    within = slots - (ends - filled)[expert]
    row = (jnp.cumsum(sizes) - sizes)[expert] + within
    return jnp.where(within < sizes[expert], row, rows), filled


def _filled(x: Float[Array, "... N"]) -> Float[Array, "... filled"]:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % BLOCK)])


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


def _joined_scales(
    x: Array | Operand, w: Array | Operand, sizes: Array, recipe: DotRecipe | None
) -> Float32[Array, "..."] | float:
    """What each row's products are multiplied by; without a recipe x is no operand."""
    if recipe is None or not isinstance(x, Operand) or not isinstance(w, Operand):
        return _row_scales(w, sizes, len(_values(x)))
    form = recipe.global_product
    return joined(_of_rows(factor(w, form), sizes, len(x.values)), factor(x, form), form)


def _row_scales(w: Array | Operand, sizes: Array, rows: int) -> Float32[Array, "..."] | float:
    """What each row's expert scales its outputs with: [M, 1], [M, N], or 1."""
    return _of_rows(w.scale, sizes, rows) if isinstance(w, Operand) else 1.0


def _of_rows(scale: Float32[Array, "E *_"], sizes: Array, rows: int) -> Float32[Array, "M _"]:
    """Each row's own of every expert's scales."""
    expert = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=rows)
    return scale.reshape(len(sizes), -1)[expert]


def _split_product(a: Array, b: Array, sizes: Array, split_k: int) -> Float32[Array, "M N"]:
    """The forward's product in `split_k` runs of the contraction."""
    if split_k == 1:
        return _product(a, b, sizes, _FORWARD)
    return split_sum(lambda at: _product(a[:, at], b[..., at], sizes, _FORWARD), a.shape[1], split_k)


def _product(
    a: Array, b: Array, sizes: Array, numbers: lax.RaggedDotDimensionNumbers
) -> Float32[Array, "..."]:
    return lax.ragged_dot_general(
        a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), sizes, numbers, preferred_element_type=jnp.float32
    )
