"""Estimates against hand-worked values, brute force and simulation."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triage_jax.evaluate.stats import (
    Z95,
    Estimate,
    effective_size,
    mean_of,
    pass_at_k,
    share_over_problems,
    wilson,
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(samples, data):
    right = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    subsets = list(combinations([1] * right + [0] * (samples - right), k))
    assert pass_at_k(samples, right, k) == pytest.approx(np.mean([max(subset) for subset in subsets]))


def test_pass_at_k_by_hand_and_for_large_numbers():
    assert pass_at_k(6, 2, 3) == pytest.approx(1 - 4 / 20)
    assert pass_at_k(6, 2, 1) == pytest.approx(1 / 3)
    assert pass_at_k(5000, 1, 2500) == pytest.approx(0.5)
    assert [pass_at_k(6, c, 6) for c in (0, 1, 6)] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(("samples", "right", "k"), [(6, 2, 0), (6, 2, 7), (6, 7, 1), (6, -1, 1)])
def test_pass_at_k_refuses(samples, right, k):
    with pytest.raises(ValueError, match="accepted"):
        pass_at_k(samples, right, k)


def test_wilson_by_hand():
    # 8 of 10, z = 1.96: centre (0.8 + 0.19208) / 1.38416, half 1.96 / 1.38416 * sqrt(0.016 + 0.009604).
    found = wilson(0.8, 10.0, z=1.96)
    assert found.low == pytest.approx(0.49016, abs=1e-5)
    assert found.high == pytest.approx(0.94331, abs=1e-5)
    none = wilson(0.0, 10.0)
    assert (none.value, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(Z95**2 / (10 + Z95**2))
    assert wilson(1.0, 10.0).high == 1.0


@settings(max_examples=200, deadline=None)
@given(st.floats(0.0, 1.0), st.floats(0.5, 1e6))
def test_wilson_ends_solve_the_score_equation(share, count):
    found = wilson(share, count)
    assert 0.0 <= found.low <= share <= found.high <= 1.0
    for end in (found.low, found.high):
        if 1e-9 < end < 1 - 1e-9 and abs(end - share) > 1e-9:
            z = abs(share - end) / math.sqrt(end * (1 - end) / count)
            assert z == pytest.approx(Z95, rel=1e-5)


def test_wilson_refuses_no_trials():
    with pytest.raises(ValueError, match="more than 0"):
        wilson(0.5, 0.0)


def test_effective_size_between_problems_and_samples():
    alike = np.array([1.0, 0.0, 1.0, 0.0])  # six samples each, all alike: as good as one each
    assert effective_size(alike, 24.0) == 4.0
    assert effective_size(np.full(4, 0.5), 24.0) == 24.0
    assert effective_size(np.ones(4), 24.0) == 4.0
    # Means 1/3 and 2/3 twice each: p = 1/2, variance of the mean 1/27 / 4, so 0.25 * 108 = 27, held at 24.
    assert effective_size(np.array([1 / 3, 2 / 3, 1 / 3, 2 / 3]), 24.0) == 24.0
    # 0, 1/2, 1/2, 1: p = 1/2, variance 1/6 / 4, so 0.25 * 24 = 6.
    assert effective_size(np.array([0.0, 0.5, 0.5, 1.0]), 24.0) == pytest.approx(6.0)


def test_intervals_cover_where_samples_of_a_problem_are_alike():
    """40 problems, six samples: 1000 benchmarks with difficulties from Beta(0.5, 0.5), true mean 0.5."""
    rng = np.random.default_rng(0)
    difficulty = rng.beta(0.5, 0.5, (1000, 40))
    means = rng.binomial(6, difficulty) / 6
    covered = [e.low <= 0.5 <= e.high for e in (share_over_problems(list(row), 240.0) for row in means)]
    naive = [e.low <= 0.5 <= e.high for e in (wilson(float(row.mean()), 240.0) for row in means)]
    assert 0.93 < np.mean(covered) < 0.98
    assert np.mean(naive) < 0.85


def test_share_over_problems_refuses_nothing():
    with pytest.raises(ValueError, match="accepted"):
        share_over_problems([], 0.0)


def test_mean_of_adds_distances_in_squares():
    parts = [Estimate(value=0.5, low=0.2, high=0.6), Estimate(value=0.7, low=0.3, high=0.7)]
    found = mean_of(parts)
    assert found.value == pytest.approx(0.6)
    assert found.low == pytest.approx(0.6 - 0.5 / 2)
    assert found.high == pytest.approx(0.6 + 0.1 / 2)
    with pytest.raises(ValueError, match="at least one"):
        mean_of([])
