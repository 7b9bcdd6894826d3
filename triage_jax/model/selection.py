"""Which weights of a checkpoint run in NVFP4, by their Hugging Face names alone: dense or mixture of experts."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

from triage_jax.model.config import ModelError
from triage_jax.nvfp4.spec import BLOCK

Group = tuple[str, ...]
"""Modules that a server multiplies as one, and whose weights therefore share a global scale"""

LAYERS = Literal["mlp", "experts", "linear"]
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
WEIGHT = ".weight"
_PROJECTION = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.(?P<block>self_attn|mlp)\.(?P<expert>experts\.\d+\.|shared_expert\.)?"
    r"(?P<name>[qkvo]_proj|gate_proj|up_proj|down_proj)"
)
_BLOCK = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_STACKED_EXPERTS = re.compile(r"mlp\.experts\.(gate_up_proj|gate_proj|up_proj|down_proj)(\.weight)?$")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What to quantise. Head, embedding, router and norms never are."""

    layers: LAYERS = "mlp"
    """mlp: gate, up and down, of experts too; experts: those of experts only; linear: attention projections as well"""
    exclude: tuple[str, ...] = ()
    """Globs over module names, such as 'model.layers.0.*'; what they match stays BF16"""
    high_precision_layers: int = 0
    """Last layers that stay in BF16"""

    def __post_init__(self) -> None:
        if self.layers not in get_args(LAYERS):
            raise ValueError(f"layers is {self.layers!r}; accepted: {', '.join(get_args(LAYERS))}")
        if self.high_precision_layers < 0:
            raise ValueError(f"high_precision_layers is {self.high_precision_layers}; accepted: 0 or more")

    def select(self, shapes: Mapping[str, tuple[int, ...]]) -> list[Group]:
        """Groups of modules to quantise among tensors of these names and shapes, in order.

        Raises ModelError for a glob that matches nothing, for a choice that splits what a server runs as one product
        (q/k/v, gate/up, the experts of a layer), for a weight that NVFP4 cannot hold, and if nothing is left.
        """
        if stacked := [name for name in shapes if _STACKED_EXPERTS.search(name)]:
            raise ModelError(
                f"{stacked[0]}: stacked experts; accepted is one tensor per expert and projection"
            )
        found = {name.removesuffix(WEIGHT): None for name in shapes if name.endswith(WEIGHT)}
        projections = {module: match for module in found if (match := _PROJECTION.fullmatch(module))}
        count = 1 + max((int(match["layer"]) for match in projections.values()), default=-1)
        for glob in self.exclude:
            if not any(fnmatchcase(module, glob) for module in projections):
                raise ModelError(f"exclude {glob!r}: matches no projection of this model")
        chosen = [module for module, match in projections.items() if self._takes(module, match, count)]
        if not chosen:
            raise ModelError(
                f"layers {self.layers!r}, exclude {list(self.exclude)}, high_precision_layers "
                f"{self.high_precision_layers}: nothing is left to quantise among {len(projections)} projections in "
                f"{count} layers"
            )
        _refuse_split_units(set(chosen), projections)
        for module in chosen:
            _check_shape(module, shapes[module + WEIGHT])
        return grouped(chosen)

    def _takes(self, module: str, match: re.Match[str], count: int) -> bool:
        if int(match["layer"]) >= count - self.high_precision_layers:
            return False
        if any(fnmatchcase(module, glob) for glob in self.exclude):
            return False
        if self.layers == "experts":
            return (match["expert"] or "").startswith("experts.")
        return self.layers == "linear" or match["block"] == "mlp"


def unit_of(module: str) -> str:
    """Name, as servers have it, of what they run as one: a fused product, or all experts of a layer."""
    head, experts, _ = module.partition(".experts.")
    return f"{head}.experts" if experts else _product(module)


def _product(module: str) -> str:
    """Name of the product that a server fuses this one into; its own name if it stays alone."""
    parent, dot, name = module.rpartition(".")
    return parent + dot + next((fused for fused, names in FUSED.items() if name in names), name)


def _refuse_split_units(chosen: set[str], projections: Iterable[str]) -> None:
    units: dict[str, list[str]] = defaultdict(list)
    for module in projections:
        units[unit_of(module)].append(module)
    for unit, members in units.items():
        out = [module for module in members if module not in chosen]
        if out and len(out) < len(members):
            raise ModelError(
                f"{unit}: {out[0]} would stay BF16 and {next(m for m in members if m in chosen)} would not, but "
                "servers run them as one product; exclude all of them or none"
            )


def _check_shape(module: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 2 or shape[1] % BLOCK:
        raise ModelError(
            f"{module}{WEIGHT} has shape {list(shape)}: NVFP4 needs a matrix whose columns are a multiple of {BLOCK}; "
            "exclude it to keep it in BF16"
        )


def grouped(modules: Sequence[str]) -> list[Group]:
    """Modules in order, those of one fused product together: q/k/v, gate/up (of each expert its own)."""
    members: dict[str, list[str]] = {}
    for module in modules:
        members.setdefault(_product(module), []).append(module)
    return [tuple(group) for group in members.values()]


def over_experts(groups: Iterable[Group]) -> list[Group]:
    """Groups that differ in the expert's number only, joined: what shares a scale where experts do."""
    members: dict[str, list[str]] = {}
    for group in groups:
        members.setdefault(_EXPERT.sub(".experts.", group[0]), []).extend(group)
    return [tuple(group) for group in members.values()]


def ignored_modules(shapes: Mapping[str, tuple[int, ...]], groups: Iterable[Group]) -> list[str]:
    """The matrices that stay as they are, as servers want them listed: `ignore` and `exclude_modules`.

    A block of a layer that stays as a whole is one pattern, `model.layers.0.self_attn*`; in others each module is
    named, and with it the product a server fuses it into. Embeddings are no linear layers and are not listed.
    """
    chosen = {module for group in groups for module in group}
    kept = [
        name.removesuffix(WEIGHT)
        for name, shape in shapes.items()
        if name.endswith(WEIGHT) and len(shape) == 2 and not name.endswith("embed_tokens.weight")
    ]
    used = {match[0] for module in chosen if (match := _BLOCK.match(module))}
    listed: dict[str, None] = {"lm_head": None}
    for module in kept:
        if module in chosen:
            continue
        block = _BLOCK.match(module)
        if block and block[0] not in used:
            listed[f"{block[0]}*"] = None
        elif ".experts." in module:
            listed[f"{unit_of(module)}*"] = None
        else:
            listed[module] = None
            if (unit := unit_of(module)) != module:
                listed[unit] = None
    return list(listed)
