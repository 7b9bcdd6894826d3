"""Gate weights: hand-worked segments, strict thresholds, bounds."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.objective import reference
from tests.objective.inputs import one_row, random_batch
from triage_jax.objective import GateConfig, TriageConfig, gate_weights

Q3 = TriageConfig()
WHOLE = TriageConfig(gate=GateConfig(scope="whole"))


def weights(gap, advantage=-1.0, mask=None, config=Q3):
    batch = one_row(gap, advantage, mask)
    return np.asarray(gate_weights(batch.old_logp, batch.advantages, batch.mask, config)[0])


def test_mild_tier():
    gap = [-1.2, -1.2, 0.1, 0.1]
    np.testing.assert_array_equal(weights(gap), np.float32([0.3, 0.3, 1, 1]))
    np.testing.assert_array_equal(weights(gap, config=WHOLE), np.float32([0.3, 0.3, 0.3, 0.3]))


@pytest.mark.parametrize(
    ("advantage", "expected"), [(-1.0, [0.1, 0.1, 1, 1]), (1.0, [1] * 4), (0.0, [1] * 4)]
)
def test_severe_tier_needs_a_negative_advantage(advantage, expected):
    np.testing.assert_array_equal(weights([-4, -4, 0, 0], advantage), np.float32(expected))


def test_masked_positions_are_no_part_of_the_mean():
    got = weights([-2, 0, -100, -100], mask=[1, 1, 0, 0])
    np.testing.assert_array_equal(got, np.float32([0.3, 1, 1, 1]))


@pytest.mark.parametrize(
    ("deep", "rest", "weight"), [(0, 0.1, 1.0), (1, 0.1, 0.55), (2, 0.2, 0.1), (3, 0.4, 0.1)]
)
def test_tail_ramp(deep, rest, weight):
    got = weights([-6.1] * deep + [rest] * (64 - deep))
    np.testing.assert_array_equal(got, np.float32([weight] * deep + [1.0] * (64 - deep)))


@pytest.mark.parametrize(
    ("count", "ramp"),
    [(1, [1, 0.1]), (3, [1, 0.7, 0.4, 0.1]), (7, [1, 0.87, 0.74, 0.61, 0.49, 0.36, 0.23, 0.1])],
)
def test_other_tail_counts_round_to_hundredths(count, ramp):
    config = TriageConfig(gate=GateConfig(deep_count=count, scope="whole"))
    for deep, weight in enumerate(ramp):
        got = weights([-6.1] * deep + [1.0] * (64 - deep), config=config)
        np.testing.assert_array_equal(got, np.full(64, weight, np.float32))


@pytest.mark.parametrize(("gap", "weight"), [(-0.5, 1.0), (-0.5000001, 0.3), (-1.5, 0.3), (-1.5000001, 0.1)])
def test_mean_thresholds_are_strict(gap, weight):
    np.testing.assert_array_equal(weights([gap] * 64), np.full(64, weight, np.float32))


def test_deep_threshold_is_strict():
    assert weights([-6.0] + [0.5] * 63)[0] == 1
    assert weights([-6.000001] + [0.5] * 63)[0] == np.float32(0.55)


def test_zero_gap_is_not_damped():
    np.testing.assert_array_equal(weights([-3.0, 0.0, -0.0, 1e-30]), np.float32([0.3, 1, 1, 1]))


def test_segments_are_cut_by_position():
    """64 positions make one segment, whatever is masked; the short last segment is kept."""
    gap = [-2.0] * 64 + [0.4] * 64 + [-2.0] * 2
    got = weights(gap, mask=[1] + [0] * 63 + [1] * 66)
    expected = np.ones(130, np.float32)
    expected[[0, 128, 129]] = 0.1
    np.testing.assert_array_equal(got, expected)


def test_per_token_advantages_count_by_their_segment_mean():
    gap = [-2.0] * 128
    advantage = [-1.0] * 40 + [1.0] * 24 + [-1.0] * 24 + [1.0] * 40
    expected = np.float32([0.1] * 64 + [1.0] * 64)
    np.testing.assert_array_equal(weights(gap, advantage), expected)


def test_disabled_gate_is_all_ones():
    off = TriageConfig(gate=GateConfig(enabled=False))
    np.testing.assert_array_equal(weights([-9.0] * 70, config=off), np.ones(70))


@pytest.mark.parametrize("mask_dtype", [jnp.bool_, jnp.int32, jnp.float32])
def test_mask_of_any_number_type(mask_dtype):
    mask = jnp.asarray([[1, 1, 0, 0]], mask_dtype)
    got = gate_weights(jnp.asarray([[-2.0, 0, jnp.nan, -jnp.inf]]), jnp.asarray([-1.0]), mask, Q3)
    np.testing.assert_array_equal(got, np.float32([[0.3, 1, 1, 1]]))


@pytest.mark.parametrize(
    "config", [Q3, WHOLE, TriageConfig(gate=GateConfig(segment=37, floor=0.0, deep_count=5))]
)
@pytest.mark.parametrize("per_token", [False, True])
def test_random_batches_against_the_loop(config, per_token):
    _, batch = random_batch(3, tokens=300, per_token=per_token)
    gap = batch.old_logp - batch.sampler_logp
    got = jax.jit(gate_weights, static_argnums=3)(gap, batch.advantages, batch.mask, config)
    for row in range(gap.shape[0]):
        advantage = np.broadcast_to(np.asarray(batch.advantages[row], float), gap.shape[1:])
        expected = reference.gate(
            np.asarray(gap[row], float), advantage, np.asarray(batch.mask[row]), config.gate
        )
        np.testing.assert_array_equal(np.rint(100 * np.asarray(got[row])), np.rint(100 * expected))


def test_weights_carry_no_gradient():
    batch = one_row([-2.0, 0.3, -7.0])
    gradient = jax.grad(lambda gap: gate_weights(gap, batch.advantages, batch.mask, Q3).sum())(batch.old_logp)
    np.testing.assert_array_equal(gradient, np.zeros((1, 3)))


finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
jitted = jax.jit(gate_weights, static_argnums=3)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
    gap=hnp.arrays(np.float32, (2, 70), elements=finite),
    advantages=hnp.arrays(np.float32, 2, elements=finite),
    mask=hnp.arrays(bool, (2, 70)),
)
def test_weights_are_bounded_for_any_finite_input(gap, advantages, mask):
    got = np.asarray(jitted(jnp.asarray(gap), jnp.asarray(advantages), jnp.asarray(mask), Q3))
    assert got.min() >= np.float32(0.1)
    assert got.max() <= 1
    assert set(np.rint(100 * got).astype(int).ravel()) <= {10, 30, 55, 100}
    untouched = ~mask | (gap >= 0) | (advantages >= 0)[:, None]
    np.testing.assert_array_equal(got[untouched], 1)
