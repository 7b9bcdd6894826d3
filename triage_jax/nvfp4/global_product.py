"""What the sum of code products is multiplied by: the two operands' global scales, joined in one of two forms."""

from jax import lax
from jaxtyping import Array, Float32

from triage_jax.nvfp4.operand import Operand
from triage_jax.nvfp4.quantize import QuantizedTensor
from triage_jax.nvfp4.spec import GlobalProduct


def factor(operand: Operand | QuantizedTensor, form: GlobalProduct) -> Float32[Array, "..."]:
    """The operand's part: D, or S. An operand that kept no S was stored with D alone, and S is 1/D."""
    quantised = isinstance(operand, QuantizedTensor)
    decode = operand.global_scale if quantised else operand.scale
    if form == "decode":
        return decode
    encode = operand.encode_scale if quantised else operand.encode
    return 1 / decode if encode is None else encode


def joined(
    left: Float32[Array, "..."], right: Float32[Array, "..."], form: GlobalProduct
) -> Float32[Array, "..."]:
    """fl(D·D), or fl(1/fl(S·S)); 0 where S·S is beyond float32, as it is where an operand is zero."""
    if form == "decode":
        return left * right
    # Behind the barrier, lest XLA divide the sum by S·S: one rounding less.
    return lax.optimization_barrier(1 / (left * right))
