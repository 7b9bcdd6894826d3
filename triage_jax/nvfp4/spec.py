"""What to quantise how: settings that are data, never an environment variable."""

import dataclasses
from typing import Literal, get_args

import numpy as np

from triage_jax.nvfp4.rules import ROW_CHAINS, RULES, Arithmetic, Chain, Rule, ScaleFloor

Tile = Literal["1x16", "16x16"]
Scope = Literal["tensor", "row", "static", "shard"]
FourOverSix = Literal["mae", "mse"]
Bound = Literal[448, 256]
NaN = Literal["spread", "six", "minus_zero"]
Backward = Literal["bf16", "dequantized", "nvfp4"]
GlobalProduct = Literal["decode", "encode"]
Sharing = Literal["expert", "layer"]

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
    nan: what becomes of a NaN: "spread", it makes NaN all that shares a scale with it; else no maximum sees it, and its
        own code is "six", +6 as the hardware's conversion gives, or "minus_zero", −0 as ml_dtypes' gives.
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
    nan: NaN = "spread"

    def __post_init__(self) -> None:
        names = (("tile", Tile), ("scope", Scope), ("rule", Rule), ("bound", Bound), ("nan", NaN))
        for field, accepted in names:
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


def _check_name(field: str, value: str | int, accepted: object, kind: str = "QuantSpec") -> None:
    names = get_args(accepted)
    if value not in names:
        raise ValueError(f"{kind}.{field} is {value!r}; accepted: {', '.join(str(name) for name in names)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertScopes:
    """Which experts of a layer share a float32 global scale in the forward products; dense products have none of it.

    weight: "expert", each expert's matrix has its own; "layer", one of the largest magnitude of all experts.
    activation: "layer", the rows of all experts have one; "expert", the rows of each their own; None, as the execution
        has it: "te" each expert's, every other execution one. Scopes of rows know no experts.
    static_amax: calibrated largest magnitudes in units of x, one for each expert, in place of the spec's single one
        (scope "static"). Shared, the largest of them counts, as in servers whose kernels take one scale of all experts
        (SGLang's modelopt_quant.py with CUTLASS and TRT-LLM; its CuTe-DSL runner keeps each expert's).
    Raises ValueError on an unknown name and on a static_amax that is empty, not positive or not finite in float32.
    """

    weight: Sharing = "expert"
    activation: Sharing | None = None
    static_amax: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _check_name("weight", self.weight, Sharing, "ExpertScopes")
        if self.activation is not None:
            _check_name("activation", self.activation, Sharing, "ExpertScopes")
        if self.static_amax is None:
            return
        largest = float(np.finfo(np.float32).max)
        if not self.static_amax or not all(0 < amax <= largest for amax in self.static_amax):
            raise ValueError(
                f"ExpertScopes.static_amax is {self.static_amax}; accepted: for each expert one number, positive and "
                "finite in float32"
            )

    def check(self, weight: QuantSpec, activation: QuantSpec) -> None:
        """Raises ValueError where these scopes mean nothing beside the operands' own."""
        if self.weight == "layer" and weight.scope != "tensor":
            raise ValueError(
                f"ExpertScopes.weight is 'layer' with weight.scope {weight.scope!r}; accepted: 'tensor'"
            )
        if self.static_amax is not None and activation.scope != "static":
            raise ValueError(
                f"ExpertScopes.static_amax goes with activation.scope 'static', got {activation.scope!r}"
            )
        if self.activation != "expert":
            return
        if activation.scope == "static" and self.static_amax is None:
            raise ValueError(
                "ExpertScopes.activation is 'expert' with activation.scope 'static'; needs static_amax"
            )
        if activation.tile != "1x16":
            raise ValueError(
                "ExpertScopes.activation is 'expert' with activation.tile '16x16', whose rows may be of two experts; "
                "accepted: '1x16'"
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
    split_k: the forward's contraction is cut into as many runs of whole blocks (`split.chunks`), each accumulated in
        float32, and their sums are added in float32 in order; of "emulated" and "bf16", the others refuse it.
    global_product: what the forward's sum is multiplied by, in float32, D and S being the scales of `rules`: "decode",
        fl(D_x·D_w) (Transformer Engine; ModelOpt's input_scale·weight_scale_2); "encode", fl(1/fl(S_x·S_w))
        (compressed-tensors' 1/(G_x·G_w)).
    experts: which experts share a global scale.
    Raises ValueError on an unknown name, on a split_k below 1, on scopes of experts that the operands have no use for,
    and unless `gradient` has a scope "tensor" or "row" and no 4-over-6.
    """

    weight: QuantSpec
    activation: QuantSpec
    backward: Backward = "bf16"
    gradient: QuantSpec = dataclasses.field(default_factory=QuantSpec)
    stochastic_rounding: bool = True
    hadamard: bool = True
    split_k: int = 1
    global_product: GlobalProduct = "decode"
    experts: ExpertScopes = dataclasses.field(default_factory=ExpertScopes)

    def __post_init__(self) -> None:
        _check_name("backward", self.backward, Backward, "DotRecipe")
        _check_name("global_product", self.global_product, GlobalProduct, "DotRecipe")
        if self.split_k < 1:
            raise ValueError(f"DotRecipe.split_k is {self.split_k}; accepted: 1 or more")
        self.experts.check(self.weight, self.activation)
        if self.gradient.scope not in ("tensor", "row") or self.gradient.four_over_six:
            raise ValueError(
                f"DotRecipe.gradient needs scope 'tensor' or 'row' and no four_over_six, got {self.gradient}"
            )

    @property
    def keeps_encode(self) -> bool:
        """Whether the forward's operands carry S beside D."""
        return self.global_product == "encode"
