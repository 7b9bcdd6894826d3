"""What the stability study computes, by hand."""

import math

import pytest

from scripts.study.statistics import Signs, collapse_step, interval, last_mean, signs, window_means


def test_interval_of_three_seeds():
    # Mean 2, standard deviation 1; 4.303 / sqrt(3).
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, found.count) == (2.0, 3)
    assert found.half == pytest.approx(4.303 / math.sqrt(3))
    assert str(found) == "2.000 ± 2.484"


def test_interval_of_one_seed_claims_no_bounds():
    assert str(interval([0.25])) == "0.250"


@pytest.mark.parametrize("count", [0, 14])
def test_interval_refuses_what_it_has_no_quantile_for(count):
    with pytest.raises(ValueError, match="accepted: 1 to 13"):
        interval([0.5] * count)


def test_collapse_is_the_third_low_update_in_a_row():
    rewards = [0.5, 0.1, 0.1, 0.2, 0.1, 0.05, 0.0, 0.0]
    passed = [1.0, 0.3125, 0.25, 0.25, 0.3125, 0.0, 0.0, 0.0]
    assert collapse_step(rewards, passed, [1.0] * 8) == 7


def test_low_reward_with_many_solved_prompts_is_no_collapse():
    assert collapse_step([0.0] * 5, [0.375] * 5, [1.0] * 5) is None


@pytest.mark.parametrize("norm", [None, math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_a_collapse(norm):
    assert collapse_step([0.5, 0.5], [1.0, 1.0], [1.0, norm]) == 2


def test_windows_leave_out_what_is_not_finite():
    means = window_means([1.0, None, 3.0, math.nan, None, 5.0], 2)
    assert means[0] == 1.0
    assert means[1] == 3.0
    assert means[2] == 5.0
    assert math.isnan(window_means([None, math.nan], 2)[0])
    assert last_mean([9.0, 1.0, 2.0], 2) == 1.5


def test_signs_by_hand():
    record = {
        "curves": {"gap": [0.1, 0.1, 0.1, 0.1, 0.2, 0.2], "reward": [0.4, 0.4, 0.6, 0.6, 0.42, 0.40]},
        "windows": {
            "width": 2,
            "rho_asym": [1.2, None, 1.5],
            "C_tok": [0.2, 0.3, None],
            "C_tok_null_high": [0.2, 0.29, 0.1],
            "q05": [-0.1, -0.2, -0.3],
        },
    }
    # 0.41 is below 0.7 of 0.6; a doubled tail counts, a tie of C_tok does not.
    assert signs(record) == Signs(rho_asym=3, concentration=2, tail=2, gap=3, reward=3)


def test_signs_that_never_come():
    record = {
        "curves": {"gap": [0.1, 0.19], "reward": [0.5, 0.36]},
        "windows": {
            "width": 1,
            "rho_asym": [1.0, 1.49],
            "C_tok": [0.1, 0.1],
            "C_tok_null_high": [0.2, 0.2],
            "q05": [0.0, 0.0],
        },
    }
    assert signs(record) == Signs(rho_asym=None, concentration=None, tail=None, gap=None, reward=None)
