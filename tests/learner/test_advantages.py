"""Group-relative advantages by hand, and the groups that go wrong elsewhere."""

import numpy as np
import pytest

from triage_jax.learner import group_advantages


def test_hand_worked():
    result = group_advantages(np.array([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]), 4)
    spread = np.sqrt(3 / 16) + 1e-6
    expected = [0.75 / spread, *[-0.25 / spread] * 3, *[0.5 / (0.5 + 1e-6)] * 2, *[-0.5 / (0.5 + 1e-6)] * 2]
    np.testing.assert_allclose(result.advantages, expected, rtol=1e-6)
    assert result.flat_groups == 0
    assert result.usable.all()


def test_without_the_standard_deviation():
    result = group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), 4, divide_by_std=False)
    np.testing.assert_allclose(result.advantages, [0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("value", [0.35, 0.1, 1.0, 1e-30, 1e30])
def test_equal_rewards_give_exact_zeros(value):
    result = group_advantages(np.full(8, value), 8)
    assert (result.advantages == 0).all()
    assert result.flat_groups == 1


def test_a_nan_reward_leaves_its_group_usable():
    rewards = np.array([1.0, np.nan, 0.0, 0.0, 0.0, np.inf, 1.0, 1.0])
    result = group_advantages(rewards, 4)
    assert result.usable.tolist() == [True, False, True, True, True, False, True, True]
    assert np.isfinite(result.advantages).all()
    assert (result.advantages[[1, 5]] == 0).all()
    clean = group_advantages(np.array([1.0, 0.0, 0.0]), 3).advantages
    np.testing.assert_array_equal(result.advantages[[0, 2, 3]], clean)


def test_a_group_without_any_usable_reward():
    result = group_advantages(np.full(3, np.nan), 3)
    assert (result.advantages == 0).all()
    assert not result.usable.any()


def test_every_group_sums_to_zero():
    rewards = np.random.default_rng(0).normal(size=160)
    sums = group_advantages(rewards, 16).advantages.reshape(-1, 16).sum(axis=1)
    np.testing.assert_allclose(sums, 0, atol=1e-5)


def test_rewards_that_do_not_divide():
    with pytest.raises(ValueError, match="do not divide into groups of 4"):
        group_advantages(np.zeros(6), 4)
