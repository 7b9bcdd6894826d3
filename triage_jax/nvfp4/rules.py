"""The arithmetic of each quantiser as data: four choices of order and rounding, and one table of who makes which.

A is the largest |x| of the scope, b of the block, R = 6·448 (4-over-6: 6·256 on request), S encodes (x to the
range R), D decodes (it is what a checkpoint stores), s is the block scale. Each line is one float32 rounding per
operation. Sources: TransformerEngine common/cast/nvfp4/core_nvfp4.cuh; FlashInfer quantization_utils.cuh;
Model-Optimizer qtensor/nvfp4_tensor.py; torchao nvfp4_tensor.py; compressed-tensors quantization/utils.
"""

import dataclasses
from typing import Literal

Rule = Literal["te", "modelopt", "flashinfer", "flashinfer_fast", "compressed_tensors", "torchao"]

Chain = Literal["encode", "decode", "encode_only", "decode_only", "reciprocal"]
"""S and D from A.
    encode: S = min(R/A, FLT_MAX), 1 where A or S is 0; D = A/R.
    decode: D = A/R; S = 1/D, 1 where A is 0.
    encode_only: S as "encode"; D = 1/S.
    decode_only: D = A·(1/R); S = 1/D, 1 where A is 0.
    reciprocal: S = R·(1/max(A, FLT_MIN)), 1 where infinite; D = 1/S.
"""

Ratio = Literal["folded", "sixth_first", "division_first", "decode", "two_divisions"]
"""The block scale before it meets E4M3 (D counts as 1 where it is 0).
    folded: b·(S·⅙).  sixth_first: S·(b·⅙).  division_first: S·(b/6).  decode: b/(6·D).  two_divisions: (b/6)/D.
"""

ScaleFloor = Literal["none", "modelopt", "compressed_tensors", "torchao"]
"""What small block scales become.
    none: as they round, 0 included.  modelopt: at least 2⁻⁹, and 1 where b is 0.
    compressed_tensors: 0.125 where s rounds to 0.  torchao: at least 2⁻⁶.
"""

Element = Literal["reciprocal", "divide_decode", "divide_encode", "two_reciprocals"]
"""What E2M1 rounds.
    reciprocal: x·min(1/(s·(1/S)), FLT_MAX).  divide_decode: x/(s·D).  divide_encode: x/(s/S).
    two_reciprocals: x·((1/D)/s).
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """One quantiser's choices; see the four literals."""

    chain: Chain
    ratio: Ratio
    scale_floor: ScaleFloor
    element: Element

    @property
    def divides(self) -> bool:
        """Whether E2M1 rounds a quotient rather than a product."""
        return self.element in ("divide_decode", "divide_encode")


RULES: dict[Rule, Arithmetic] = {
    "te": Arithmetic(chain="encode", ratio="folded", scale_floor="none", element="reciprocal"),
    "flashinfer": Arithmetic(chain="decode", ratio="folded", scale_floor="none", element="reciprocal"),
    "flashinfer_fast": Arithmetic(
        chain="decode", ratio="sixth_first", scale_floor="none", element="reciprocal"
    ),
    "modelopt": Arithmetic(chain="decode", ratio="decode", scale_floor="modelopt", element="divide_decode"),
    "compressed_tensors": Arithmetic(
        chain="reciprocal",
        ratio="division_first",
        scale_floor="compressed_tensors",
        element="divide_encode",
    ),
    "torchao": Arithmetic(
        chain="decode", ratio="two_divisions", scale_floor="torchao", element="two_reciprocals"
    ),
}

ROW_CHAINS: dict[Rule, Chain] = {"flashinfer": "encode_only", "flashinfer_fast": "decode_only"}
"""Chains of the kernels that scale per row, where they are others."""
