"""What to quantise how: settings that are data, never an environment variable."""

import dataclasses
from typing import Literal, get_args

import numpy as np

Tile = Literal["1x16", "16x16"]
Scope = Literal["tensor", "row", "static"]
Rule = Literal["te", "modelopt"]

BLOCK = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """One operand's quantiser.

    tile: what shares an E4M3 block scale, 16 elements of the last axis (the contraction's) or 16×16 of the
        last two.
    scope: what shares the float32 global scale, the whole array or one row (a vector along the last axis);
        "static" takes a calibrated largest magnitude, `static_amax` in units of x, and saturates beyond it.
    rule: "te" multiplies by reciprocals (Transformer Engine's exact quantiser; FlashInfer's agrees),
        "modelopt" divides and has no zero block scale (Model-Optimizer's `NVFP4QTensor`).
    Raises ValueError on an unknown name, on "row" with "16x16", and on a `static_amax` that is missing,
    misplaced, not finite or not positive.
    """

    tile: Tile = "1x16"
    scope: Scope = "tensor"
    rule: Rule = "te"
    static_amax: float | None = None

    def __post_init__(self) -> None:
        for field, accepted in (("tile", Tile), ("scope", Scope), ("rule", Rule)):
            value = getattr(self, field)
            if value not in get_args(accepted):
                raise ValueError(f"QuantSpec.{field} is {value!r}; accepted: {', '.join(get_args(accepted))}")
        if self.tile == "16x16" and self.scope == "row":
            raise ValueError("QuantSpec: scope 'row' needs tile '1x16'; a 16x16 tile spans sixteen rows")
        if (self.scope == "static") != (self.static_amax is not None):
            raise ValueError(
                f"QuantSpec: static_amax goes with scope 'static' and only with it; "
                f"got scope {self.scope!r}, static_amax {self.static_amax!r}"
            )
        if self.static_amax is not None and not 0 < self.static_amax <= float(np.finfo(np.float32).max):
            raise ValueError(
                f"QuantSpec.static_amax must be positive and finite in float32, got {self.static_amax!r}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotRecipe:
    """The quantisers of one product's two operands."""

    weight: QuantSpec
    activation: QuantSpec
