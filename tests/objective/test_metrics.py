"""Metrics: the documented table, hand-worked values, merging."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.objective.inputs import one_row, random_batch, with_metrics
from triage_jax.objective import (
    ClipConfig,
    GateConfig,
    Max,
    Mean,
    Min,
    RepairConfig,
    Sum,
    TisConfig,
    TokenBatch,
    TriageConfig,
    finalize,
    merge,
    metrics,
    mismatch_metrics,
)

ROWS = re.findall(r"^\| `([^`]+)` \| (\S+) \| (\w+) \| .+ \|$", metrics.__doc__, flags=re.MULTILINE)
KINDS = {"sum": Sum, "mean": Mean, "ratio": Mean, "max": Max, "min": Min, "ess": metrics.EffectiveSize}

EVERY_OTHER_SETTING = TriageConfig(
    gate=GateConfig(enabled=False, scope="whole", segment=32),
    repair=RepairConfig(enabled=False, scope="q2", segment=50),
    clip=ClipConfig(low=0.1, high=0.1),
    tis=TisConfig(enabled=False),
    reduction="fixed",
)


_mismatch = jax.jit(mismatch_metrics, static_argnums=1)


def values_of(batch, config=None):
    return {key: np.asarray(value) for key, value in finalize(_mismatch(batch, config)).items()}


@pytest.mark.parametrize("config", [TriageConfig(), EVERY_OTHER_SETTING])
def test_table_lists_exactly_the_keys(config):
    _, produced = with_metrics(*random_batch(0), config)
    assert sorted(produced) == sorted(key for key, _, _ in ROWS)
    for key, _, kind in ROWS:
        assert type(produced[key]) is KINDS[kind], key
        assert (kind == "mean") == key.endswith(("/token", "/segment", "/response")) or kind == "ess", key


def test_mismatch_metrics_are_the_keys_that_need_no_live_log_probabilities():
    live_only = ("loss", "ppo/", "repair/")
    assert sorted(values_of(random_batch(0)[1])) == sorted(k for k, *_ in ROWS if not k.startswith(live_only))


def test_divergences_of_one_token_in_both_directions():
    """A token at -15 for the learner and -5 for the sampler: 9 one way, 22,015 the other."""
    values = values_of(one_row([-10.0]))
    np.testing.assert_allclose(values["gap/k1/token"], 10)
    np.testing.assert_allclose(values["gap/k3_sampler_learner/token"], np.exp(-10) - 1 + 10, rtol=1e-6)
    np.testing.assert_allclose(values["gap/k3_learner_sampler/token"], np.exp(10) - 1 - 10, rtol=1e-6)
    np.testing.assert_allclose(values["gap/mult_prob_error/token"], np.exp(10), rtol=1e-6)
    rho = np.exp(-10.0)
    js = (rho * -10 - (1 + rho) * np.log((1 + rho) / 2)) / 2
    np.testing.assert_allclose(values["gap/js/token"], js, rtol=1e-5)


def test_small_gaps_keep_their_digits():
    values = values_of(one_row([1e-3, -1e-3]))
    np.testing.assert_allclose(values["gap/k3_sampler_learner/token"], 5e-7, rtol=1e-3)
    np.testing.assert_allclose(values["gap/k3_learner_sampler/token"], 5e-7, rtol=1e-3)
    np.testing.assert_allclose(values["gap/js/token"], 1.25e-7, rtol=1e-3)


def test_raw_extremes_are_reported_before_truncation():
    values = values_of(one_row([8.0, 0.0, -30.0, np.inf], mask=[1, 1, 1, 0]))
    np.testing.assert_allclose(values["tis/ratio_max"], np.exp(8), rtol=1e-6)
    assert values["gap/max_abs"] == 30
    assert values["gap/min"] == -30
    np.testing.assert_allclose(
        values["gap/mult_prob_error/token"], (np.exp(8) + 1 + np.exp(20)) / 3, rtol=1e-6
    )


def test_token_and_response_means_differ():
    gap = jnp.asarray([[0.1, 0.1, 0.1, 0.1], [0.5, 0, 0, 0], [9, 9, 9, 9]])
    mask = jnp.asarray([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    values = values_of(TokenBatch(gap, jnp.zeros_like(gap), jnp.ones(3), mask))
    np.testing.assert_allclose(values["gap/abs_mean/token"], 0.9 / 5, rtol=1e-6)
    np.testing.assert_allclose(values["gap/abs_mean/response"], (0.1 + 0.5) / 2, rtol=1e-6)
    assert values["batch/responses"] == 2
    assert values["batch/tokens"] == 5
    assert values["gap/within_0.05/token"] == 0


def test_regions():
    gap = jnp.asarray([[0.5, -0.5, 0.0, 0.0], [-2.0, 0.25, -0.5, 0.0]])
    batch = TokenBatch(gap, jnp.zeros_like(gap), jnp.asarray([2.0, -1.0]), gap == gap)
    values = values_of(batch)
    masses = [values[f"quadrant/q{i}/mass"] for i in (1, 2, 3, 4)]
    np.testing.assert_allclose(masses, [2, 2, 2, 1])
    np.testing.assert_allclose(values["rho_asym/raw"], 1)
    np.testing.assert_allclose(values["rho_asym/length_normalised"], 1)
    q3, q1 = np.exp(-2) + np.exp(-0.5), 2 * np.exp(0.5)
    np.testing.assert_allclose(values["rho_asym/effective"], q3 / q1, rtol=1e-6)
    # The second response's mean gap, -0.5625, is in the mild tier.
    np.testing.assert_allclose(values["rho_asym/gated"], 0.3 * q3 / q1, rtol=1e-6)


def test_ratio_without_amplifying_mass_is_nan():
    assert np.isnan(values_of(one_row([-1.0]))["rho_asym/raw"])


def test_gate_tiers_per_eligible_segment():
    segments = [[-0.6] * 64, [-2.0] * 64, [-7.0] + [1.0] * 63, [-7.0] * 2 + [1.0] * 62, [0.1] * 64]
    gap = jnp.asarray([np.concatenate(segments), np.full(320, -9.0)], jnp.float32)
    batch = TokenBatch(gap, jnp.zeros_like(gap), jnp.asarray([-1.0, 1.0]), gap == gap)
    values = values_of(batch)
    for tier in ("mean_mild", "mean_severe", "tail_one", "tail_full"):
        np.testing.assert_allclose(values[f"gate/trigger_rate/{tier}/segment"], 1 / 5)
    np.testing.assert_allclose(values["gate/eligible_fraction/segment"], 0.5)
    np.testing.assert_allclose(
        values["gate/segment_weight_mean/segment"], (0.3 + 0.1 + 0.55 + 0.1 + 1 + 5) / 10, rtol=1e-6
    )
    removed = 0.7 * 64 + 0.9 * 64 + 0.45 + 0.9 * 2
    np.testing.assert_allclose(values["gate/weight_mean/token"], 1 - removed / 640, rtol=1e-6)
    np.testing.assert_allclose(values["gate/damped_fraction/token"], 131 / 640, rtol=1e-6)
    assert values["gate/deep_tokens"] == 3 + 320
    off = values_of(batch, TriageConfig(gate=GateConfig(enabled=False)))
    assert off["gate/weight_mean/token"] == 1
    np.testing.assert_allclose(off["gate/trigger_rate/mean_mild/segment"], 1 / 5)


def test_tis_statistics():
    rho = np.asarray([0.5, 1.0, 1.5, 5.0])
    values = values_of(one_row(np.log(rho)))
    np.testing.assert_allclose(values["tis/ratio/token"], rho.mean(), rtol=1e-6)
    np.testing.assert_allclose(values["tis/abs/token"], np.abs(rho - 1).mean(), rtol=1e-6)
    np.testing.assert_allclose(values["tis/clip_fraction/token"], 0.25)
    np.testing.assert_allclose(values["tis/ess/token"], rho.sum() ** 2 / (4 * (rho**2).sum()), rtol=1e-6)


def test_repair_statistics():
    gap = jnp.asarray([[-0.2, 0.1], [0.1, 0.1], [-1.0, -1.0]])
    batch = TokenBatch(gap, jnp.zeros_like(gap), jnp.asarray([1.0, 1.0, -1.0]), gap == gap)
    values = finalize(with_metrics(gap, batch, TriageConfig())[1])
    np.testing.assert_allclose(values["repair/active_fraction/segment"], 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(values["repair/force_mean/segment"], 0.0149071 / 3, rtol=1e-5)
    np.testing.assert_allclose(values["repair/mean_gap/segment"], (-0.05 + 0.1 - 1) / 3, rtol=1e-6)
    np.testing.assert_allclose(values["repair/scope_token_fraction/token"], 4 / 6, rtol=1e-6)


def test_merge_refuses_other_keys():
    one = mismatch_metrics(one_row([0.1]))
    other = {key: value for key, value in one.items() if key != "gap/min"}
    with pytest.raises(ValueError, match="gap/min"):
        merge(one, other)
