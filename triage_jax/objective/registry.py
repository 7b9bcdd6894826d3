"""Objectives by name, all with the signature and the metric keys of `triage_loss`.

Below, ρ = exp(old_logp - sampler_logp). An objective of your own is a function with that signature, or a `Variant` with
your own token losses, named by its import path.

| name | token loss, in short | source |
| --- | --- | --- |
| `grpo` | PPO clip, mean per response | arXiv 2402.03300 |
| `dr_grpo` | PPO clip, sum per response over a constant | arXiv 2503.20783 |
| `dapo` | PPO clip, mean over tokens | arXiv 2503.14476 |
| `gspo` | PPO clip of the response's ratio | arXiv 2507.18071 |
| `cispo` | truncated ratio as a weight, mean over tokens | arXiv 2506.13585 |
| `clip_sampler` | PPO clip against the sampler | verl, bypass mode |
| `tis_token` | PPO clip · min(ρ, C) | fengyao.notion.site/off-policy-rl |
| `tis_sequence` | PPO clip · min(Πρ, C) | verl, TRL |
| `icepop` | PPO clip · ρ inside a band | arXiv 2510.18855 |
| `geo_rejection` | PPO clip · ρ, responses by geometric mean | NeMo-RL, verl |
| `k3_rejection` | PPO clip, responses by k3 | verl |
| `opsm` | PPO clip, negative responses by mean gap | DeepSeek-V3.2, arXiv 2512.02556 |
| `dppo_tv` | masked by change of probability and sign | arXiv 2602.04879 |
| `dppo_kl` | masked by binary KL and sign | arXiv 2602.04879 |
| `bapo` | clip bounds that balance the signs | arXiv 2510.18927 |
| `triage` | PPO clip · TIS under the Gate, plus Repair | arXiv 2610.07043 |
| `triage_calibrated` | the same with the calibrated Gate | TRIAGE docs/CALIBRATION.md |
| `triage_no_gate`, `triage_no_repair`, `triage_no_tis` | the same without one part | |
"""

import importlib
from typing import cast

from jaxtyping import Array, Float

from triage_jax.objective.batch import TokenBatch, Totals, update_totals
from triage_jax.objective.config import TriageConfig
from triage_jax.objective.gate import gate_weights
from triage_jax.objective.policy import ppo_tis_losses
from triage_jax.objective.variants import (
    BapoVariant,
    CalibratedVariant,
    Objective,
    RejectionVariant,
    Variant,
    bapo,
    cispo,
    clip_sampler,
    dppo_kl,
    dppo_tv,
    dr_grpo,
    geo_rejection,
    geo_rejection_keeps,
    grpo,
    gspo,
    icepop,
    icepop_keeps,
    k3_rejection,
    k3_rejection_keeps,
    opsm,
    tis_sequence,
)


def _triage(name: str, *keeps: str) -> Variant:
    return Variant(name=name, token_loss=ppo_tis_losses, keeps=frozenset(keeps))


_VARIANTS = (
    Variant(name="grpo", token_loss=grpo, reduction="response"),
    Variant(name="dr_grpo", token_loss=dr_grpo, reduction="response"),
    Variant(name="dapo", token_loss=grpo, reduction="token"),
    Variant(name="gspo", token_loss=gspo, reduction="response"),
    Variant(name="cispo", token_loss=cispo, reduction="token"),
    Variant(name="clip_sampler", token_loss=clip_sampler),
    _triage("tis_token", "tis"),
    Variant(name="tis_sequence", token_loss=tis_sequence),
    RejectionVariant(name="icepop", token_loss=icepop, keeps_tokens=icepop_keeps),
    RejectionVariant(name="geo_rejection", token_loss=geo_rejection, keeps_tokens=geo_rejection_keeps),
    RejectionVariant(name="k3_rejection", token_loss=k3_rejection, keeps_tokens=k3_rejection_keeps),
    Variant(name="opsm", token_loss=opsm),
    Variant(name="dppo_tv", token_loss=dppo_tv),
    Variant(name="dppo_kl", token_loss=dppo_kl),
    BapoVariant(name="bapo", token_loss=bapo),
    _triage("triage", "gate", "repair", "tis"),
    CalibratedVariant(
        name="triage_calibrated", token_loss=ppo_tis_losses, keeps=frozenset({"gate", "repair", "tis"})
    ),
    _triage("triage_no_gate", "repair", "tis"),
    _triage("triage_no_repair", "gate", "tis"),
    _triage("triage_no_tis", "gate", "repair"),
)

OBJECTIVES: dict[str, Objective] = {variant.name: variant for variant in _VARIANTS}
"""Every objective of the package."""


def objective_by_name(name: str) -> Objective:
    """An objective of `OBJECTIVES`, or a user's own by import path, `package.module:function`.

    Raises ValueError naming what is accepted where there is no such objective, module or function.
    """
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        known = ", ".join(OBJECTIVES)
        raise ValueError(f"objective {name!r} is not known; accepted: {known}, or package.module:function")
    try:
        found: object = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ValueError(f"objective {name!r}: module {module!r} cannot be imported: {error}") from error
    except AttributeError:
        raise ValueError(f"objective {name!r}: module {module!r} has no {attribute!r}") from None
    if not callable(found):
        raise ValueError(f"objective {name!r} is {type(found).__name__}; accepted: a function")
    return cast(Objective, found)


def update_inputs(batch: TokenBatch, config: TriageConfig) -> tuple[Float[Array, "B T"], Totals]:
    """Weights and totals of one update for the objective `config.name`, before it is split.

    The weights are the objective's own: those of the Gate, fixed or calibrated, where it has one, and else ones. A
    user's own objective gets the Gate's, as `config.gate` says. Raises ValueError for an unknown name.
    """
    objective = objective_by_name(config.name)
    if isinstance(objective, Variant):
        weights = objective.weights(batch, config)
    else:
        gap = batch.old_logp - batch.sampler_logp
        weights = gate_weights(gap, batch.advantages, batch.mask, config)
    return weights, update_totals(batch, weights, config)
