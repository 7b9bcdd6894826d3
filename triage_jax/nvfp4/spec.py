"""What to quantise how: settings that are data, never an environment variable."""

import dataclasses
import math
from typing import Literal, get_args

Tile = Literal["1x16", "16x16"]
Scope = Literal["tensor", "row", "static"]
Rule = Literal["te", "modelopt"]

BLOCK = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """One operand's quantiser.

    `tile`: what shares an E4M3 block scale, 16 elements of the contraction axis or a 16×16 tile of it and the axis
    before. `scope`: what shares the float32 global scale, the whole array, one row (all leading indices), or a
    calibrated maximum `static_amax` in the units of x. `rule`: "te" multiplies by reciprocals (Transformer Engine's
    exact quantiser; FlashInfer's agrees), "modelopt" divides and has no zero block scale (`NVFP4QTensor`).
    Raises ValueError on an unknown name, on "row" with "16x16", and on a `static_amax` that is missing, misplaced,
    not finite or not positive.
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
        if self.static_amax is not None and not (math.isfinite(self.static_amax) and self.static_amax > 0):
            raise ValueError(f"QuantSpec.static_amax must be finite and positive, got {self.static_amax!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotRecipe:
    """The quantisers of one product's two operands."""

    weight: QuantSpec
    activation: QuantSpec
