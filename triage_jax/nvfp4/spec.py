"""What to quantise how: settings that are data, never an environment variable."""

import dataclasses
from typing import Literal, get_args

import numpy as np

from triage_jax.nvfp4.rules import ROW_CHAINS, RULES, Arithmetic, Chain, Rule, ScaleFloor

Tile = Literal["1x16", "16x16"]
Scope = Literal["tensor", "row", "static", "shard"]
FourOverSix = Literal["mae", "mse"]
Bound = Literal[448, 256]
Backward = Literal["bf16", "dequantized", "nvfp4"]

BLOCK = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """One operand's quantiser.

    tile: what shares an E4M3 block scale, 16 elements of the last axis (the contraction's) or 16×16 of the
        last two.
    scope: what shares the float32 global scale, the whole array or one row (a vector along the last axis);
        "shard" splits the rows (of all leading axes) into `shards` equal runs, as data parallelism does;
        "static" takes a calibrated largest magnitude, `static_amax` in units of x, and saturates beyond it.
    rule: whose arithmetic, an entry of `rules.RULES`: "te" multiplies by reciprocals (Transformer Engine's exact
        quantiser), "flashinfer" agrees but for the global scale's reciprocal, "flashinfer_fast" is its default
        mode with reciprocals rounded correctly; "modelopt" (Model-Optimizer) and "compressed_tensors" divide and
        have no zero block scale; "torchao" keeps block scales from 2⁻⁶ up.
    chain, scale_floor: one choice of the rule's made otherwise; None leaves it.
    four_over_six: scale each block to a largest code of 6 or 4, whichever errs less ("mae": Σ|x̂ − x|, "mse":
        Σ(x̂ − x)²); `bound` is then the largest block scale of the sixes, 256 leaving the fours room.
    Raises ValueError on an unknown name, on a scope of rows with "16x16", on `static_amax` or `shards` missing or
    misplaced, on a `static_amax` not finite or not positive, on 4-over-6 with a rule not of Transformer Engine's
    arithmetic or with another choice of the rule's, and on a `bound` without it.
    """

    tile: Tile = "1x16"
    scope: Scope = "tensor"
    rule: Rule = "te"
    static_amax: float | None = None
    shards: int | None = None
    chain: Chain | None = None
    scale_floor: ScaleFloor | None = None
    four_over_six: FourOverSix | None = None
    bound: Bound = 448

    def __post_init__(self) -> None:
        for field, accepted in (("tile", Tile), ("scope", Scope), ("rule", Rule), ("bound", Bound)):
            _check_name(field, getattr(self, field), accepted)
        for field, accepted in (
            ("chain", Chain),
            ("scale_floor", ScaleFloor),
            ("four_over_six", FourOverSix),
        ):
            if getattr(self, field) is not None:
                _check_name(field, getattr(self, field), accepted)
        if self.tile == "16x16" and self.scope in ("row", "shard"):
            raise ValueError(
                f"QuantSpec: scope {self.scope!r} needs tile '1x16'; a 16x16 tile spans sixteen rows"
            )
        self._check_companion("static", "static_amax")
        self._check_companion("shard", "shards")
        if self.static_amax is not None and not 0 < self.static_amax <= float(np.finfo(np.float32).max):
            raise ValueError(
                f"QuantSpec.static_amax must be positive and finite in float32, got {self.static_amax!r}"
            )
        if self.shards is not None and self.shards < 1:
            raise ValueError(f"QuantSpec.shards must be at least 1, got {self.shards}")
        if self.four_over_six is None and self.bound != 448:
            raise ValueError(f"QuantSpec.bound {self.bound} goes with four_over_six and only with it")
        if self.four_over_six and (
            self.rule not in ("te", "flashinfer") or self.scale_floor not in (None, "none")
        ):
            raise ValueError(
                f"QuantSpec: four_over_six goes with rule 'te' or 'flashinfer' and their scale_floor; got "
                f"rule {self.rule!r}, scale_floor {self.scale_floor!r}"
            )

    def _check_companion(self, scope: Scope, field: str) -> None:
        value = getattr(self, field)
        if (self.scope == scope) != (value is not None):
            raise ValueError(
                f"QuantSpec: {field} goes with scope {scope!r} and only with it; "
                f"got scope {self.scope!r}, {field} {value!r}"
            )

    @property
    def arithmetic(self) -> Arithmetic:
        """The rule's, with the choices that this spec makes otherwise."""
        own = RULES[self.rule]
        chain = ROW_CHAINS.get(self.rule, own.chain) if self.scope == "row" else own.chain
        return dataclasses.replace(
            own, chain=self.chain or chain, scale_floor=self.scale_floor or own.scale_floor
        )


def _check_name(field: str, value: str | int, accepted: object) -> None:
    names = get_args(accepted)
    if value not in names:
        raise ValueError(
            f"QuantSpec.{field} is {value!r}; accepted: {', '.join(str(name) for name in names)}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotRecipe:
    """The quantisers of one product and of its gradient.

    backward: "bf16" takes gradients straight through on the unquantised operands; "dequantized" on the operands
        that the forward multiplied; "nvfp4" quantises all operands afresh along each gradient's own contraction
        (Transformer Engine's recipe). The last takes the output's gradient by `gradient`, and where set
    stochastic_rounding: rounds that gradient at random, without bias (8 random bits an element);
    hadamard: rotates both operands of the weight's gradient along the tokens, in groups of 16.
    The two switches have no meaning for the other backwards.
    Raises ValueError on an unknown backward, and unless `gradient` has a scope "tensor" or "row" and no 4-over-6.
    """

    weight: QuantSpec
    activation: QuantSpec
    backward: Backward = "bf16"
    gradient: QuantSpec = dataclasses.field(default_factory=QuantSpec)
    stochastic_rounding: bool = True
    hadamard: bool = True

    def __post_init__(self) -> None:
        if self.backward not in get_args(Backward):
            raise ValueError(
                f"DotRecipe.backward is {self.backward!r}; accepted: {', '.join(get_args(Backward))}"
            )
        if self.gradient.scope not in ("tensor", "row") or self.gradient.four_over_six:
            raise ValueError(
                f"DotRecipe.gradient needs scope 'tensor' or 'row' and no four_over_six, got {self.gradient}"
            )
