"""The arms of the stability study: what a trial changes in a regime, and for which question."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from triage_jax.config import TrainConfig, from_dict, laid_over, load_yaml
from triage_jax.run import resolve_model

REGIMES = ("falling", "learning")
"""Where BF16 learns and NVFP4 falls, and a lower rate where both learn; the file of each is `regime_path`"""
AT_A_LOWER_RATE = ("bf16", "naive", "tis", "triage")
"""Arms of `learning`"""
type Tree = dict[str, Any]
Group = Literal["ablation", "rivals", "sources", "variants"]

_BF16: Tree = {side: {"execution": "bf16"} for side in ("learner", "sampler")}
_OFF: Tree = {"enabled": False}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One line of a table."""

    name: str
    title: str
    group: Group
    changes: Tree = field(default_factory=dict)
    """Fields over the regime's, a tree like the YAML's"""


def _objective(name: str, title: str, group: Group, objective: str | None = None, **settings: Tree) -> Arm:
    return Arm(
        name=name, title=title, group=group, changes={"objective": {"name": objective or name} | settings}
    )


def _numerics(name: str, title: str, objective: str = "grpo", **sides: Tree | str) -> Arm:
    return Arm(
        name=name,
        title=title,
        group="sources",
        changes={"objective": {"name": objective}, "numerics": sides},
    )


def _variant(name: str, title: str, objective: str = "triage", **settings: Any) -> Arm:
    return Arm(
        name=name, title=title, group="variants", changes={"objective": {"name": objective} | settings}
    )


_ARMS = (
    Arm(
        name="bf16",
        title="BF16",
        group="ablation",
        changes={"objective": {"name": "grpo"}, "numerics": _BF16},
    ),
    _objective("naive", "NVFP4", "ablation", "grpo"),
    _objective("tis", "NVFP4 + TIS", "ablation", "tis_token"),
    _objective("triage", "TRIAGE, fixed thresholds", "ablation"),
    _objective("gate", "NVFP4 + Gate", "ablation", "triage", tis=_OFF, repair=_OFF),
    _objective("gate_tis", "NVFP4 + Gate + TIS", "ablation", "triage_no_repair"),
    _objective("repair", "NVFP4 + Repair", "ablation", "triage", tis=_OFF, gate=_OFF),
    _objective("icepop", "IcePop", "rivals"),
    _objective("opsm", "OPSM", "rivals"),
    _objective("dppo_tv", "DPPO-TV", "rivals"),
    _objective("bapo", "BAPO", "rivals"),
    _objective("calibrated", "TRIAGE, calibrated Gate", "ablation", "triage_calibrated"),
    _numerics("same_tiles", "1×16 weight tiles on both sides", learner={"weight": {"tile": "1x16"}}),
    _numerics(
        "same_scopes", "per-token activation scales on both sides", learner={"activation": {"scope": "row"}}
    ),
    _numerics(
        "same_recipe",
        "the sampler's tiles and scales on both sides",
        learner={"weight": {"tile": "1x16"}, "activation": {"scope": "row"}},
    ),
    _numerics("parity", "preset parity on both sides", learner="parity", sampler="parity"),
    _numerics("bf16_learner", "BF16 learner, NVFP4 sampler", learner={"execution": "bf16"}),
    _numerics("bf16_sampler", "NVFP4 learner, BF16 sampler", sampler={"execution": "bf16"}),
    _numerics(
        "weights_only",
        "W4A16 on both sides",
        learner={"quantize_activations": False},
        sampler={"quantize_activations": False},
    ),
    _variant("naive_token", "NVFP4, mean over tokens", "dapo"),
    _variant("triage_token", "TRIAGE, mean over tokens", reduction="token"),
    _variant("triage_fixed", "TRIAGE, fixed denominator", reduction="fixed"),
    _variant("triage_segment4", "TRIAGE, segments of 4", gate={"segment": 4}, repair={"segment": 4}),
    _variant("triage_segment16", "TRIAGE, segments of 16", gate={"segment": 16}, repair={"segment": 16}),
    _variant("triage_segment64", "TRIAGE, whole responses", gate={"segment": 64}, repair={"segment": 128}),
    _variant(
        "triage_deeper",
        "TRIAGE, thresholds twice as deep",
        gate={"mean_mild": -0.2, "mean_severe": -0.8, "deep": -3.0},
    ),
    _variant(
        "triage_published",
        "TRIAGE, the published thresholds",
        gate={"mean_mild": -0.5, "mean_severe": -1.5, "deep": -6.0},
    ),
)

ARMS: dict[str, Arm] = {arm.name: arm for arm in _ARMS}
"""Every arm, in the order in which a queue takes them"""


def belongs(arm: Arm, regime: str) -> bool:
    """Whether a regime asks for an arm: all of them where NVFP4 falls, a few at the lower rate."""
    return regime == "falling" or arm.name in AT_A_LOWER_RATE


def regime_path(regime: str) -> Path:
    """The configuration that all arms of a regime share."""
    return Path("configs/study") / f"{regime}.yaml"


def config_of(arm: Arm, base: Path, *, seed: int, out: Path) -> TrainConfig:
    """The configuration of a trial. Raises ConfigError for a field that does not exist."""
    tree = _stated(arm, base) | {"seed": seed, "out": str(out)}
    return from_dict(TrainConfig, tree, f"{base} with arm {arm.name}")


def fingerprint(arm: Arm, base: Path) -> str:
    """Of what base and arm state and of the model's weights, seed and place aside.

    The trainer's own defaults are not in it: a field that somebody adds does not make old records stale.
    """
    config = config_of(arm, base, seed=0, out=Path())
    weights = (resolve_model(config.model.path) / "model.safetensors").read_bytes()
    stated = {key: value for key, value in _stated(arm, base).items() if key not in ("seed", "out")}
    text = json.dumps(stated, sort_keys=True) + hashlib.sha256(weights).hexdigest()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _stated(arm: Arm, base: Path) -> Tree:
    return laid_over(load_yaml(base), arm.changes)
