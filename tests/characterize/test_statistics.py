"""Regions, sums, sketch, dilution, remedies, audit, outliers: hand-worked, and against loops in float64."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import config as jaxtyping_config

from tests.characterize.inputs import random_dump
from triage_jax.characterize import (
    CLASSES,
    REMEDIES,
    dilution,
    gap_of,
    gap_sketch,
    gap_sums,
    outliers,
    regions,
    remedy_sums,
    sign_audit,
    tail_threshold,
)
from triage_jax.characterize.sketch import BINS, EDGES, gap_bins
from triage_jax.objective import TokenBatch, finalize, gate_weights, mismatch_metrics
from triage_jax.objective.config import TriageConfig

SEEDS = (1, 2, 3)


def parts(dump):
    return gap_of(dump.learner_logp, dump.sampler_logp, dump.mask), dump.advantages, dump.mask


def difference(dump):
    learner, sampler = (np.where(dump.mask, x, 0) for x in (dump.learner_logp, dump.sampler_logp))
    return np.exp(learner) - np.exp(sampler)


def token_batch(dump):
    arrays = (dump.learner_logp, dump.sampler_logp, dump.advantages)
    return TokenBatch(*(jnp.asarray(x, jnp.float32) for x in arrays), jnp.asarray(dump.mask))


def test_regions_by_hand():
    gap = np.array([[0.5, -0.5, 0.0, -1.0], [1.0, -2.0, 9.0, 9.0]])
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
    found = regions(gap, np.array([2.0, -3.0]), mask)
    assert found.count.tolist() == [1, 1, 1, 1]
    assert found.raw.tolist() == [2, 2, 3, 3]
    np.testing.assert_allclose(found.length_normalised, [2 / 3, 2 / 3, 3 / 2, 3 / 2])
    np.testing.assert_allclose(found.effective, [2 * math.exp(0.5), 2 * math.exp(-0.5), 3 * math.exp(-2), 6])
    assert found.rho_asym() == 1.5
    assert found.amplifying_share() == 0.5
    assert (found.tokens, found.without_advantage) == (5, 0)


def test_regions_without_mass():
    found = regions(np.ones((1, 3)), np.zeros(1), np.ones((1, 3), bool))
    assert math.isnan(found.rho_asym())
    assert math.isnan(found.amplifying_share())
    assert found.without_advantage == 3


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("per_token", [False, True])
def test_agrees_with_the_objectives_metrics(seed, per_token):
    dump = random_dump(seed, per_token=per_token)
    gap, advantages, mask = parts(dump)
    theirs = {key: float(value) for key, value in finalize(mismatch_metrics(token_batch(dump))).items()}
    found = regions(gap, advantages, mask)
    for weighing in ("raw", "length_normalised", "effective"):
        assert found.rho_asym(weighing) == pytest.approx(theirs[f"rho_asym/{weighing}"], rel=1e-4)
    ours = gap_sums(gap, mask, difference(dump)).means()
    shared = ours.keys() & theirs.keys()
    assert len(shared) == 9
    for key in shared:
        assert ours[key] == pytest.approx(theirs[key], rel=2e-4, abs=1e-6), key


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_of_parts_are_the_sums_of_the_whole(seed):
    dump = random_dump(seed)
    gap, advantages, mask = parts(dump)
    top, rest = slice(0, 5), slice(5, None)
    for whole, split in (
        (regions(gap, advantages, mask), [regions(gap[s], advantages[s], mask[s]) for s in (top, rest)]),
        (
            gap_sketch(gap, advantages, mask),
            [gap_sketch(gap[s], advantages[s], mask[s]) for s in (top, rest)],
        ),
    ):
        joined = split[0] + split[1]
        for name in whole.__annotations__:
            np.testing.assert_allclose(getattr(joined, name), getattr(whole, name), rtol=1e-12)
    sums = gap_sums(gap[top], mask[top]) + gap_sums(gap[rest], mask[rest])
    assert sums.lowest == gap[mask].min()
    assert sums.largest == gap[mask].max()
    assert sums.size == pytest.approx(np.abs(gap[mask]).sum(), rel=1e-12)


def test_gap_sums_over_nothing():
    means = gap_sums(np.zeros((1, 2)), np.zeros((1, 2), bool)).means()
    assert all(math.isnan(value) for value in means.values())


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1e-9, -1e-9, 3e-5, -3e-5, 0.05, -0.05, 1.0, -1.0, -6.1, 127.9, -1e4, 1e30]
)
def test_bins_hold_what_their_edges_say(value):
    place = int(gap_bins(np.array([[value]], np.float32))[0, 0])
    assert 0 <= place < BINS
    assert EDGES[place] <= np.float32(value) <= EDGES[place + 1]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("per_token", [False, True])
def test_sketched_quantiles(seed, per_token):
    dump = random_dump(seed, per_token=per_token)
    gap, advantages, mask = parts(dump)
    sketch = gap_sketch(gap, advantages, mask)
    assert sketch.counts.sum() == mask.sum()
    shares = [0.01, 0.05, 0.3, 0.7, 0.95]
    exact = np.quantile(gap[mask], shares)
    np.testing.assert_allclose(sketch.quantiles(shares), exact, rtol=0.05, atol=1e-3)
    assert tail_threshold(gap, mask) == exact[1]


def test_sketch_counts_by_advantage():
    gap = np.array([[0.1, -0.1, 0.2], [0.1, 0.1, 0.1]])
    sketch = gap_sketch(gap, np.array([1.0, 0.0]), np.array([[1, 1, 0], [1, 1, 1]], bool))
    filled = sketch.counts.sum(axis=1)
    assert filled[filled > 0].tolist() == [3, 2]  # A = 0 comes before A = 1
    np.testing.assert_array_equal(sketch.rebin(np.array([-10.0, 0.0, 10.0])).sum(axis=0), [1, 4])


def test_dilution_by_hand():
    gap = np.zeros((4, 128))
    gap[0, :7] = -0.5  # 7 of 64 are a tail: heavy; the mean of 128 hides it
    gap[1, :32] = -0.5  # heavy, mean -0.125
    gap[2, :6] = -0.5  # not heavy
    gap[3, :64] = -0.5  # A > 0
    gap[1, 64:96] = 0.5  # hidden from the mean by gaps above, not from the mean size
    advantages, mask = np.array([-1.0, -1.0, -1.0, 1.0]), np.ones((4, 128), bool)
    found = dilution(gap, advantages, mask, threshold=-0.1)
    assert (found.responses, found.hidden_by_mean, found.hidden_by_size) == (2, 2, 1)
    assert (found + found).shares() == found.shares()


def remedy_loop(gap, advantages, mask, probability, gate, threshold):
    """Weights by the table of the module, one token at a time."""
    mass, kept = np.zeros(len(CLASSES)), np.zeros((len(REMEDIES), len(CLASSES)))
    for i in range(len(gap)):
        n = max(mask[i].sum(), 1)
        mean = gap[i][mask[i]].sum() / n
        for t in np.flatnonzero(mask[i]):
            d, a, p = gap[i, t], np.broadcast_to(advantages.T, gap.T.shape).T[i, t], probability[i, t]
            if a == 0 or d == 0:
                continue
            c = {(-1, -1): 0 if d < threshold else 1, (1, 1): 2, (1, -1): 3, (-1, 1): 4}[
                np.sign(a), np.sign(d)
            ]
            rho = math.exp(min(max(d, -20), 20))
            weights = [
                min(rho, 2),
                rho if 0.5 <= rho <= 5 else 0,
                0 if (a > 0 and rho > 1.28) or (a < 0 and rho < 0.8) else 1,
                0 if (a > 0 and p > 0.2) or (a < 0 and p < -0.2) else 1,
                rho if 0.999 <= math.exp(mean) <= 1.002 else 0,
                0 if a < 0 and mean < -0.05 else 1,
                min(rho, 2) * gate[i, t],
            ]
            mass[c] += abs(a)
            kept[:, c] += abs(a) * np.array(weights)
    return mass, kept


@pytest.mark.parametrize("per_token", [False, True])
def test_remedies_against_a_loop_and_the_objectives_gate(per_token):
    dump = random_dump(4, responses=6, tokens=150, per_token=per_token)
    gap, advantages, mask = parts(dump)
    gap[:2] -= 0.8  # whole responses that the mean tiers catch
    advantages[:2] = -1.0
    batch = token_batch(dump)
    gate = gate_weights(jnp.asarray(gap, jnp.float32), batch.advantages, batch.mask, TriageConfig())
    gate = np.asarray(gate, float)
    mass, kept = remedy_loop(gap, advantages, mask, difference(dump), gate, -0.3)
    found = remedy_sums(gap, advantages, mask, difference(dump), threshold=-0.3)
    np.testing.assert_allclose(found.mass, mass, rtol=1e-12)
    np.testing.assert_allclose(found.kept, kept, rtol=1e-6)
    assert gate.min() == pytest.approx(0.1)


def test_sign_audit_by_hand():
    before = np.array([[-2.0, -0.5, -4.0, -0.2, 1.0, -7.0]])
    after = np.array([[-2.5, -0.4, -4.0, -0.3, 5.0, -9.0]])
    coefficient = np.array([[-1.0, -1.0, -2.0, 3.0, -1.0, -1.0]])
    everything, beyond_one, beyond_three, beyond_six = sign_audit(
        before, after, coefficient, np.ones((1, 6), bool)
    )
    # A < 0 and δ < 0 at positions 0, 1, 2 and 5: away, back, unmoved, away.
    assert (everything.tokens, everything.agreeing, everything.unmoved) == (4, 2, 1)
    assert everything.weighted_share == pytest.approx((2 + 7) / (2 + 0.5 + 8 + 7))
    assert [a.tokens for a in (beyond_one, beyond_three, beyond_six)] == [3, 2, 1]
    assert beyond_six.share == 1.0
    assert (everything + everything).share == 0.5


@pytest.fixture
def unchecked():
    """Without the test run's own shape checks, which would speak first."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("unchecked")
def test_shapes_that_do_not_agree():
    for advantages in (np.zeros(3), np.zeros((2, 3)), np.zeros((2, 4, 1))):
        with pytest.raises(ValueError, match="advantages has shape"):
            regions(np.zeros((2, 4)), advantages, np.ones((2, 4), bool))
    with pytest.raises(ValueError, match="mask"):
        gap_sketch(np.zeros((2, 4)), np.zeros(2), np.ones((2, 3), bool))


@pytest.mark.usefixtures("unchecked")
def test_sign_audit_refuses_shapes():
    with pytest.raises(ValueError, match="one shape"):
        sign_audit(np.zeros((1, 2)), np.zeros((1, 2)), np.zeros((1, 3)), np.ones((1, 2), bool))


def test_outliers_by_hand():
    gap = np.array([[0.1, -0.1, 0.0], [0.0, -3.0, 9.0], [0.2, 0.2, 0.2]])
    mask = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1]], bool)
    worst, second = outliers(gap, np.array([1.0, -1.0, 0.5]), mask, step=7, count=2)
    assert (worst.response, worst.tokens, worst.worst_gap, worst.worst_position) == (1, 2, -3.0, 1)
    assert worst.mean_size == 1.5
    assert worst.times_median == pytest.approx(7.5)
    assert worst.share == pytest.approx(3 / 3.8)
    assert (second.response, second.step) == (2, 7)
    assert outliers(gap, np.ones(3), np.zeros((3, 3), bool)) == []
