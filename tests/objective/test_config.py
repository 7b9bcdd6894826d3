"""Settings and shapes: what is refused, and with which words."""

import jax.numpy as jnp
import pytest
import tyro

from tests.objective.inputs import one_row
from triage_jax.objective import (
    ClipConfig,
    GateConfig,
    RepairConfig,
    TisConfig,
    TriageConfig,
    triage_loss,
    update_totals,
)


def test_default_is_the_reported_configuration():
    config = TriageConfig()
    gate, repair = config.gate, config.repair
    assert config.reduction == "response"
    assert (gate.enabled, gate.scope, gate.segment) == (True, "q3", 64)
    assert (gate.mean_mild, gate.mean_mild_weight, gate.mean_severe, gate.mean_severe_weight) == (
        -0.5,
        0.3,
        -1.5,
        0.1,
    )
    assert (gate.deep, gate.deep_count, gate.floor) == (-6, 2, 0.1)
    assert (repair.enabled, repair.scope, repair.segment, repair.target) == (True, "adv_positive", 128, -0.03)
    assert (repair.beta, repair.coefficient, repair.start_step) == (pytest.approx(0.022360679775), 0.015, 0)
    assert (config.clip.low, config.clip.high) == (0.2, 0.28)
    assert (config.tis.enabled, config.tis.low, config.tis.high) == (True, 0, 2)


@pytest.mark.parametrize(("build", "words"), [
    (lambda: GateConfig(segment=0), r"gate\.segment is 0"),
    (lambda: GateConfig(floor=0.125), r"gate\.floor is 0\.125; accepted: a multiple of 0\.01"),
    (lambda: GateConfig(mean_mild_weight=1.1), r"gate\.mean_mild_weight is 1\.1"),
    (lambda: GateConfig(mean_severe=-0.4), r"mean_severe < mean_mild"),
    (lambda: GateConfig(mean_mild_weight=0.05), r"gate\.mean_severe_weight is 0\.1"),
    (lambda: GateConfig(deep=1.0), r"gate\.deep is 1\.0"),
    (lambda: GateConfig(deep_count=0), r"gate\.deep_count is 0"),
    (lambda: RepairConfig(segment=-1), r"repair\.segment"),
    (lambda: RepairConfig(target=0.1), r"repair\.target"),
    (lambda: RepairConfig(beta=0.0), r"repair\.beta"),
    (lambda: RepairConfig(coefficient=float("nan")), r"repair\.coefficient"),
    (lambda: RepairConfig(start_step=-1), r"repair\.start_step"),
    (lambda: ClipConfig(low=1.2), r"clip\.low is 1\.2; accepted: a value in \[0, 1\]"),
    (lambda: ClipConfig(high=-0.1), r"clip\.high"),
    (lambda: TisConfig(low=2.0, high=1.0), r"low < high"),
])  # fmt: skip
def test_refused_settings(build, words):
    with pytest.raises(ValueError, match=words):
        build()


@pytest.mark.parametrize(("config", "name", "words"), [
    (GateConfig(), "scope", r"gate\.scope is 'q4'; accepted: 'q3' or 'whole'"),
    (RepairConfig(), "scope", r"repair\.scope is 'q4'; accepted: one of"),
    (TriageConfig(), "reduction", r"reduction is 'q4'; accepted: one of"),
])  # fmt: skip
def test_refused_choices(config, name, words):
    object.__setattr__(config, name, "q4")  # past the type checks of the test process
    with pytest.raises(ValueError, match=words):
        config.__post_init__()


def test_command_line():
    arguments = ["--gate.scope", "whole", "--reduction", "token", "--repair.no-enabled"]
    assert tyro.cli(TriageConfig, args=arguments) == TriageConfig(
        gate=GateConfig(scope="whole"), reduction="token", repair=RepairConfig(enabled=False)
    )


def test_settings_have_a_help_text(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(TriageConfig, args=["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in ("Tokens of a flagged", "First update (inclusive)", "Largest weight"):
        assert words in text


@pytest.mark.parametrize(("change", "words"), [
    ({"old_logp": jnp.zeros((1, 4))}, r"old_logp has shape \(1, 4\); accepted: \(1, 3\)"),
    ({"sampler_logp": jnp.zeros((2, 3))}, r"sampler_logp has shape \(2, 3\)"),
    ({"advantages": jnp.zeros((1, 1))}, r"advantages has shape \(1, 1\); accepted: \(1,\)"),
    ({"mask": jnp.ones(3)}, r"mask has shape \(3,\); accepted: \[B, T\]"),
])  # fmt: skip
def test_refused_shapes(change, words):
    batch = one_row([0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match=words):
        triage_loss(batch.old_logp, batch.replace(**change), TriageConfig())


def test_refused_live_log_probabilities_and_weights():
    batch = one_row([0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match=r"logp has shape \(1, 2\)"):
        triage_loss(jnp.zeros((1, 2)), batch, TriageConfig())
    with pytest.raises(ValueError, match=r"weights has shape \(2, 3\)"):
        update_totals(batch, jnp.zeros((2, 3)), TriageConfig())
