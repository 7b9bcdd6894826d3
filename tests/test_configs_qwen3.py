"""The two Qwen3 configurations against the recipe the paper reports (objective.md §1.3-1.8), and their baselines."""

import math
from pathlib import Path

import pytest

from triage_jax.cli import parse
from triage_jax.config import TrainConfig, flatten, to_dict
from triage_jax.model.quantized import check_storable

CONFIGS = Path(__file__).parent.parent / "configs"
REPORTED = {
    "rollout.prompts_per_step": 16,
    "rollout.samples_per_prompt": 16,
    "rollout.temperature": 1.0,
    "rollout.max_staleness": 0,
    "optimizer.learning_rate": 1e-6,
    "optimizer.warmup_steps": 0,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.98,
    "optimizer.epsilon": 1e-8,
    "optimizer.weight_decay": 0.1,
    "optimizer.max_grad_norm": 1.0,
    "objective.reduction": "response",
    "objective.clip.low": 0.2,
    "objective.clip.high": 0.28,
    "objective.tis.enabled": True,
    "objective.tis.low": 0.0,
    "objective.tis.high": 2.0,
    "objective.gate.enabled": True,
    "objective.gate.scope": "q3",
    "objective.gate.segment": 64,
    "objective.gate.mean_mild": -0.5,
    "objective.gate.mean_mild_weight": 0.3,
    "objective.gate.mean_severe": -1.5,
    "objective.gate.mean_severe_weight": 0.1,
    "objective.gate.deep": -6.0,
    "objective.gate.deep_count": 2,
    "objective.gate.floor": 0.1,
    "objective.repair.enabled": True,
    "objective.repair.scope": "adv_positive",
    "objective.repair.segment": 128,
    "objective.repair.target": -0.03,
    "objective.repair.coefficient": 0.015,
    "objective.repair.start_step": 0,
    "numerics.learner.layers": "mlp",
    "numerics.learner.weight.tile": "1x16",
    "numerics.sampler.layers": "mlp",
    "numerics.sampler.weight.tile": "1x16",
    "numerics.sampler.activation.scope": "row",
}
MODELS = {
    "qwen3_4b_nvfp4": {
        "steps": 600,
        "rollout.max_new_tokens": 16_384,
        "rollout.replay_routing": False,
        "numerics.learner.backward": "nvfp4",
        "numerics.learner.hadamard": True,
        "numerics.learner.stochastic_rounding": True,
    },
    "qwen3_30b_a3b_nvfp4": {"steps": 1700, "rollout.max_new_tokens": 20_480, "rollout.replay_routing": True},
}
GATE, REPAIR, TIS = (f"objective.{part}.enabled" for part in ("gate", "repair", "tis"))
LEARNER, SAMPLER = (f"numerics.{side}.execution" for side in ("learner", "sampler"))
BASELINES = {
    "bf16": {GATE: False, REPAIR: False, TIS: False, LEARNER: "bf16", SAMPLER: "bf16"},
    "nvfp4_naive": {GATE: False, REPAIR: False, TIS: False},
    "nvfp4_tis": {GATE: False, REPAIR: False},
}


def _resolved(*names: str) -> TrainConfig:
    files = [argument for name in names for argument in ("--config", str(CONFIGS / f"{name}.yaml"))]
    return parse(files).config


@pytest.mark.parametrize("model", MODELS)
def test_reported_recipe(model):
    config = _resolved(model)
    flat = flatten(to_dict(config))
    expected = REPORTED | MODELS[model]
    assert {key: flat[key] for key in expected} == expected
    assert math.isclose(config.objective.repair.beta**2, 0.0005, rel_tol=1e-12)
    assert config.rollout.rows == 256
    assert config.rollout.engine == "sglang"
    for side in (config.numerics.learner, config.numerics.sampler):
        assert side.quantized_names() == ("gate", "up", "down")
    check_storable(config.numerics.learner)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("model", MODELS)
def test_a_baseline_changes_what_it_says_and_nothing_else(model, baseline):
    before = flatten(to_dict(_resolved(model)))
    after = flatten(to_dict(_resolved(model, f"baselines/{baseline}")))
    changed = {key: value for key, value in after.items() if before[key] != value}
    # The layout of pushed weights follows the format that is served.
    changed.pop("rollout.sglang.checkpoint", None)
    assert changed == BASELINES[baseline]
