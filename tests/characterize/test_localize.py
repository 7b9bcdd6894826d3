"""Segments, their statistics, the permutation null and the order test."""

import itertools
import math

import numpy as np
import pytest

from tests.characterize.inputs import random_dump
from triage_jax.characterize import gap_of, localization, order_test, permutation_null, tail_segments
from triage_jax.characterize.localize import top_count


def segments_of(flags, mask=None, segment=4):
    """Segments whose tail tokens are the flags, of A < 0 responses."""
    flags = np.asarray(flags, bool)
    mask = np.ones_like(flags) if mask is None else np.asarray(mask, bool)
    gap = np.where(flags, -1.0, 0.0)
    return tail_segments(gap, np.full(len(flags), -1.0), mask, threshold=-0.5, segment=segment)


def test_segments_by_hand():
    flags = [[1, 0, 0, 0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 0, 1, 0, 0, 0]]
    mask = [[1, 1, 1, 1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1, 0]]
    found = segments_of(flags, mask)
    assert found.valid.tolist() == [4, 3, 1, 4]
    assert found.tail.tolist() == [1, 1, 1, 1]
    assert found.follows.tolist() == [False, True, True, False]
    assert found.starts.tolist() == [0, 3]
    assert found.ends.tolist() == [3, 4]


def test_only_responses_with_negative_advantage():
    gap, mask = np.full((3, 8), -1.0), np.ones((3, 8), bool)
    found = tail_segments(gap, np.array([1.0, 0.0, -1.0]), mask, threshold=-0.5, segment=8)
    assert found.tail.tolist() == [8]
    mixed = np.array([[2.0] * 4 + [-1.0] * 4, [1.0] * 2 + [-1.0] * 6, [0.0] * 8])  # means 0.5, -0.5, 0
    assert len(tail_segments(gap, mixed, mask, threshold=-0.5, segment=8).valid) == 1


def test_localisation_by_hand():
    flags = np.zeros((2, 40), bool)
    flags[0, :4] = flags[0, 4] = flags[1, 20] = True
    found = localization(segments_of(flags, segment=4), top_share=0.05)
    assert found.segments == 20
    assert found.tail_tokens == 6
    assert found.r_amp == 6 / 80
    assert found.heavy_share == 3 / 20
    assert found.concentration == 4 / 6  # the top 5 % of 20 segments is one
    assert found.adjacency == pytest.approx((1 / 3) / (2 / 18))


def test_ties_at_the_cut_rank_by_position():
    short = np.zeros((2, 10), bool)
    short[0, :2] = short[0, 8] = True  # 2 of 4, and 1 of the last 2
    found = segments_of(short[:1], segment=4)
    assert localization(found, top_share=1 / 3).concentration == 2 / 3
    reversed_order = segments_of([[1, 0, 0, 0, 0, 1, 1, 0]], [[1, 1, 0, 0, 1, 1, 1, 1]], segment=4)
    assert localization(reversed_order, top_share=0.5).concentration == 1 / 3


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_many_ties_rank_by_position(seed):
    """Short last segments tie with full ones at other counts: 1 of 2 with 2 of 4."""
    rng = np.random.default_rng(seed)
    found = segments_of(rng.random((300, 10)) < 0.4, segment=4)
    ranked = sorted(zip(found.tail.tolist(), found.valid.tolist(), strict=True), key=lambda s: -s[0] / s[1])
    for share in (0.05, 0.3, 0.5):
        top = sum(tail for tail, _ in ranked[: top_count(len(ranked), share)])
        assert localization(found, top_share=share).concentration == top / found.tail.sum()


@pytest.mark.parametrize(("segments", "expected"), [(0, 0), (1, 1), (20, 1), (21, 2), (100, 5), (23, 2)])
def test_the_top_share_is_rounded_up(segments, expected):
    assert top_count(segments) == expected


def test_exactly_a_tenth_is_not_heavy():
    flags = np.zeros((1, 60), bool)
    flags[0, [0, 10, 20, 21, 30, 40, 50]] = True
    found = segments_of(flags, segment=10)
    assert localization(found).heavy_share == 1 / 6
    null = permutation_null(found, draws=20)
    counts = null.table @ (np.arange(null.table.shape[1]) % 11 > 1)
    np.testing.assert_allclose(null.heavy_share(), counts / 6)


def all_placements(sizes, tails):
    """Every equally likely set of places for the tail labels, as tails per segment."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    for places in itertools.combinations(range(sum(sizes)), tails):
        yield np.bincount(owner[list(places)], minlength=len(sizes))


def test_the_null_is_the_exact_permutation_distribution():
    flags = np.zeros((1, 10), bool)
    flags[0, :3] = True  # segments of 4, 4 and 2 with 3 tails: 120 placements
    found = segments_of(flags, segment=4)
    placements = [tuple(t) for t in all_placements([4, 4, 2], 3)]
    draws = 20_000
    null = permutation_null(found, draws=draws, seed=3)
    # Share of draws by tails of the short segment, whose key no full segment shares.
    for tails in range(3):
        expected = sum(t[2] == tails for t in placements) / len(placements)
        seen = (null.table[:, 2 * 5 + tails] > 0).mean()
        assert seen == pytest.approx(expected, abs=5 * math.sqrt(expected / draws))
    assert (null.table.sum(axis=1) == 3).all()
    n, k = np.divmod(np.arange(null.table.shape[1]), 5)
    assert (null.table @ k == 3).all()
    assert (null.table @ n == 10).all()


def test_the_null_keeps_every_response_to_itself():
    flags = np.zeros((2, 64), bool)
    flags[0] = True
    null = permutation_null(segments_of(flags, segment=8), draws=5)
    assert (null.table[:, 8 * 9 + 8] == 8).all()
    assert (null.table[:, 8 * 9] == 8).all()


@pytest.mark.parametrize("method", ["count", "marginals"])
def test_both_ways_to_draw_agree_in_the_mean(method, monkeypatch):
    from triage_jax.characterize import localize

    monkeypatch.setattr(localize, "MARGINAL_COST", 10**9 if method == "count" else 0)
    rng = np.random.default_rng(0)
    flags = rng.random((4, 640)) < 0.05
    found = segments_of(flags, segment=64)
    null = permutation_null(found, draws=4000, seed=1)
    k = np.arange(null.table.shape[1]) % 65
    total, places = flags.sum(axis=1), 10
    expected_square = sum(
        places * (64 * t / 640 * (1 - t / 640) * (640 - 64) / 639 + (t / 10) ** 2) if t else 0 for t in total
    )
    assert (null.table @ k**2).mean() == pytest.approx(expected_square, rel=0.02)


def test_the_null_repeats_and_streams_differ():
    dump = random_dump(5)
    gap = gap_of(dump.learner_logp, dump.sampler_logp, dump.mask)
    found = tail_segments(gap, dump.advantages, dump.mask, threshold=-0.2)
    first, again, other = (permutation_null(found, draws=9, seed=2, stream=s) for s in (0, 0, 1))
    np.testing.assert_array_equal(first.table, again.table)
    assert (first.table != other.table).any()


def test_chance_level_of_concentration_is_not_the_top_share():
    """The figures of the specification: 11.3 % at r = 4.9 %, 15.6 % at 2 %, for independent labels."""
    rng = np.random.default_rng(1)
    for rate, level in ((0.049, 0.113), (0.02, 0.156)):
        found = segments_of(rng.random((40, 64 * 100)) < rate, segment=64)
        assert permutation_null(found, draws=49).concentration().mean() == pytest.approx(level, abs=0.006)


def test_null_counts_of_two_updates_pool():
    flags = np.random.default_rng(2).random((3, 64)) < 0.2
    parts = [segments_of(flags[i : i + 1], segment=8) for i in range(3)]
    pooled = permutation_null(parts[0], draws=7) + permutation_null(parts[1], draws=7, stream=1)
    assert (pooled.table.sum(axis=1) == 16).all()
    assert (pooled.pairs[3] == 14).all()
    together = parts[0] + parts[1] + parts[2]
    whole = segments_of(flags, segment=8)
    for name in ("valid", "tail", "follows", "starts"):
        np.testing.assert_array_equal(getattr(together, name), getattr(whole, name))
    with pytest.raises(ValueError, match="cannot be pooled"):
        _ = whole + segments_of(flags, segment=16)


def test_order_test_against_all_orders():
    heavy = np.array([1, 1, 1, 0, 0, 0], bool)
    found = segments_of(np.repeat(heavy, 4)[None], segment=4)
    pairs = []
    for places in itertools.combinations(range(6), 3):
        row = np.zeros(6, bool)
        row[list(places)] = True
        pairs.append(np.count_nonzero(row[1:] & row[:-1]))
    test = order_test(found)
    assert (test.observed, test.expected) == (2, pytest.approx(np.mean(pairs)))
    assert test.z == pytest.approx((2 - np.mean(pairs)) / np.std(pairs))
    assert test.enrichment == pytest.approx(2 / np.mean(pairs))


def test_nothing_to_localise():
    found = tail_segments(np.zeros((2, 8)), np.ones(2), np.ones((2, 8), bool), threshold=-0.1, segment=8)
    empty = localization(found)
    assert empty.segments == 0
    assert math.isnan(empty.concentration)
    assert math.isnan(empty.r_amp)
    assert math.isnan(order_test(found).enrichment)
    null = permutation_null(found, draws=3)
    assert np.isnan(null.concentration()).all()
    assert np.isnan(null.heavy_share()).all()
