"""One product, several executions: y[..., n] = Σₖ x[..., k] · w[n, k]."""

from functools import partial
from typing import get_args, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Float32

from triage_jax.nvfp4.backward import bf16_gradients, nvfp4_gradients, operand_gradient
from triage_jax.nvfp4.operand import Operand, from_quantized
from triage_jax.nvfp4.product import Execution as Execution
from triage_jax.nvfp4.product import along_output, bf16_product, contract, dense, product, quantised
from triage_jax.nvfp4.quantize import QuantizedTensor
from triage_jax.nvfp4.spec import DotRecipe
from triage_jax.nvfp4.split import split_of
from triage_jax.nvfp4.te import te_dot

NVFP4: tuple[Execution, ...] = ("emulated", "scaled_matmul", "te")
"""Executions that quantise both operands."""


def quantized_dot(
    x: Float[Array, "... K"],
    w: Float[Array, "N K"] | Operand | QuantizedTensor,
    recipe: DotRecipe | None,
    execution: Execution,
    key: Array | None = None,
) -> Float[Array, "... N"]:
    """x · wᵀ in x's dtype; w lies output first, as Hugging Face stores it.

    execution
        "float32": the plain product in float32 (float64 if an operand is) at highest precision, with its own
        gradient.
        "bf16": operands cast to BF16, float32 accumulation, in `recipe.split_k` runs.
        "emulated": both operands quantised by `recipe` (a quantised weight is taken as it is), the BF16 product
        of code × block scale with float32 accumulation, in as many runs, then times fl(Dₓ·D_w) in float32, or what
        `recipe.global_product` says.
        "scaled_matmul": the same on `jax.nn.scaled_matmul`, native FP4 where the device has it; differs from
        "emulated" in the order of accumulation only.
        "te": forward and gradients by Transformer Engine, on Blackwell; refuses recipes that it would not follow.

    Gradients: of "bf16", straight through: dx = g·w, dw = gᵀ·x on operands cast to BF16, accumulated in
    float32; of the NVFP4 executions as `recipe.backward` says. `key` is a JAX random key for stochastic
    rounding, one per product and step. A quantised weight has no gradient and enters dx dequantised in BF16,
    whatever the recipe.
    Raises ValueError on an unknown execution, on an NVFP4 one without a recipe, on `split_k` with another than
    "bf16" and "emulated", on "scaled_matmul" with an `Operand` (whose codes are gone), on shapes that do not contract,
    and where a gradient is to be rounded stochastically without a key.
    """
    if execution not in get_args(Execution):
        raise ValueError(f"execution is {execution!r}; accepted: {', '.join(get_args(Execution))}")
    shape = _shape(w)
    if len(shape) != 2 or x.ndim == 0 or x.shape[-1] != shape[-1]:
        raise ValueError(f"quantized_dot: x [..., K] and w [N, K] must share K; got {x.shape} and {shape}")
    if execution in NVFP4 and recipe is None:
        raise ValueError(f"quantized_dot: execution {execution!r} needs a DotRecipe")
    if execution == "scaled_matmul" and isinstance(w, Operand):
        raise ValueError(
            "quantized_dot: execution 'scaled_matmul' needs w as a QuantizedTensor, not an Operand"
        )
    split_k = split_of(recipe, execution)
    if execution == "te":
        if recipe is None or isinstance(w, Operand | QuantizedTensor):
            raise ValueError("quantized_dot: execution 'te' quantises its weights itself; pass an array")
        return te_dot(x, w, recipe, key)
    if execution == "float32":
        return _plain(x, from_quantized(w) if isinstance(w, QuantizedTensor) else w)
    return _dot(x, w, key, recipe if execution in NVFP4 else None, execution, split_k)


def _shape(w: Array | Operand | QuantizedTensor) -> tuple[int, ...]:
    if isinstance(w, Operand):
        return w.values.shape
    return w.codes.shape if isinstance(w, QuantizedTensor) else w.shape


def _plain(x: Float[Array, "... K"], w: Float[Array, "N K"] | Operand) -> Float[Array, "... N"]:
    if isinstance(w, Operand):
        w = lax.stop_gradient(w.values.astype(jnp.float32) * w.scale)
    dtype = jnp.promote_types(jnp.promote_types(x.dtype, w.dtype), jnp.float32)
    y = contract(x.astype(dtype), x.ndim - 1, w.astype(dtype), 1, dtype, lax.Precision.HIGHEST)
    return y.astype(x.dtype)


@no_type_check
@struct.dataclass
class _Unquantised:
    """What the gradients "bf16" and "nvfp4" start from."""

    x: Float[Array, "... K"]
    w: Float[Array, "N K"]
    key: Array | None


@no_type_check
@struct.dataclass
class _Multiplied:
    """What the gradient "dequantized" starts from, and no elements of w's dtype."""

    x: Operand | QuantizedTensor
    w: Operand | QuantizedTensor
    like_w: Float[Array, "0"]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _dot(
    x: Float[Array, "... K"],
    w: Float[Array, "N K"] | Operand | QuantizedTensor,
    key: Array | None,
    recipe: DotRecipe | None,
    execution: Execution,
    split_k: int,
) -> Float[Array, "... N"]:
    if recipe is not None:
        return _product(*_operands(x, w, recipe, execution), recipe).astype(x.dtype)
    right = from_quantized(w) if isinstance(w, QuantizedTensor) else w
    if isinstance(right, Operand):
        y = bf16_product(x, x.ndim - 1, right.values, 1, split_k) * along_output(right.scale, x.ndim)
    else:
        y = bf16_product(x, x.ndim - 1, right, 1, split_k)
    return y.astype(x.dtype)


def _product(
    a: Operand | QuantizedTensor, b: Operand | QuantizedTensor, recipe: DotRecipe
) -> Float32[Array, "... N"]:
    return product(a, b, split_k=recipe.split_k, form=recipe.global_product)


def _operands(
    x: Array, w: Array | Operand | QuantizedTensor, recipe: DotRecipe, execution: Execution
) -> tuple[Operand | QuantizedTensor, Operand | QuantizedTensor]:
    keep = recipe.keeps_encode
    left = quantised(x, recipe.activation, execution, keep_encode=keep)
    if isinstance(w, QuantizedTensor) and execution == "emulated":
        return left, from_quantized(w)
    if isinstance(w, Operand | QuantizedTensor):
        return left, w
    return left, quantised(w, recipe.weight, execution, keep_encode=keep)


def _forward(
    x: Array,
    w: Array | Operand | QuantizedTensor,
    key: Array | None,
    recipe: DotRecipe | None,
    execution: Execution,
    split_k: int,
) -> tuple[Array, _Unquantised | _Multiplied | Operand | QuantizedTensor]:
    if isinstance(w, Operand | QuantizedTensor):
        return _dot(x, w, key, recipe, execution, split_k), w
    if recipe is not None and recipe.backward == "dequantized":
        left, right = _operands(x, w, recipe, execution)
        return _product(left, right, recipe).astype(x.dtype), _Multiplied(left, right, jnp.zeros(0, w.dtype))
    return _dot(x, w, key, recipe, execution, split_k), _Unquantised(x, w, key)


def _backward(
    recipe: DotRecipe | None,
    execution: Execution,
    split_k: int,
    saved: _Unquantised | _Multiplied | Operand | QuantizedTensor,
    g: Array,
) -> tuple[Array, Array | None, None]:
    if isinstance(saved, QuantizedTensor):
        saved = from_quantized(saved)
    if isinstance(saved, Operand):
        return operand_gradient(g, saved).astype(g.dtype), None, None
    if isinstance(saved, _Multiplied):
        dx, dw = bf16_gradients(dense(saved.x), dense(saved.w), g)
        return dx.astype(g.dtype), dw.astype(saved.like_w.dtype), None
    if recipe is None or recipe.backward == "bf16":
        dx, dw = bf16_gradients(saved.x, saved.w, g)
    else:
        dx, dw = nvfp4_gradients(saved.x, saved.w, g, recipe, execution, saved.key)
    return dx.astype(g.dtype), dw.astype(saved.w.dtype), None


_dot.defvjp(_forward, _backward)
