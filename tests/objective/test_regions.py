"""What every objective does to each region of (advantage, gap), worked out by hand.

One negative and one positive response, logp = old_logp: the entries are the weights of the tokens' policy gradient,
relative to GRPO's. Gaps of the negative response: Q3 large, Q3 small, Q4 small, Q4 large; of the positive: Q1 large, Q1
small, Q2 large, Q2 small.
"""

from math import exp

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden import load
from tests.objective.test_golden import batch_of
from triage_jax.objective import (
    OBJECTIVES,
    CalibrationConfig,
    TokenBatch,
    TriageConfig,
    update_inputs,
)

GAP = np.asarray([[-3, -0.05, 0.05, 0.6], [3, 0.05, -3, -0.05]])
SAMPLER = np.asarray([[0.9, 0.5, 0.5, 0.5], [0.04, 0.5, 0.9, 0.5]])

PLAIN = [1, 1, 1, 1, 1, 1, 1, 1]
TIS = [exp(-3), exp(-0.05), exp(0.05), exp(0.6), 2, exp(0.05), exp(-3), exp(-0.05)]
CONTRACTING_KEPT = [0, exp(-0.05), exp(0.05), exp(0.6), 0, exp(0.05), exp(-3), exp(-0.05)]
"""Only what is large and amplifying is dropped"""


def gated(damped, weights):
    """The two damped tokens of the negative response at a weight, the response renormalised to its mass."""
    scale = 4 / (2 + 2 * damped)
    return [scale * w * (damped if i < 2 else 1) for i, w in enumerate(weights[:4])] + weights[4:]


EXPECTED = {
    "grpo": PLAIN,
    "dr_grpo": PLAIN,
    "dapo": PLAIN,
    "gspo": PLAIN,
    "cispo": PLAIN,
    # TIS slows contraction in Q2 and enlarges Q1.
    "tis_token": TIS,
    # The sums of the gaps are -2.4 and 0: the second response's large gaps cancel.
    "tis_sequence": [exp(-2.4)] * 4 + [1] * 4,
    # IcePop drops large gaps of every region, contracting Q2 included.
    "icepop": [0, exp(-0.05), exp(0.05), exp(0.6), 0, exp(0.05), 0, exp(-0.05)],
    # Mean gaps -0.6 and 0.
    "geo_rejection": [0] * 4 + [exp(3), exp(0.05), exp(-3), exp(-0.05)],
    "k3_rejection": [0] * 8,
    # The negative response is dropped with its contracting tokens; a positive one is never looked at.
    "opsm": [0] * 4 + [1] * 4,
    "clip_sampler": CONTRACTING_KEPT,
    "dppo_tv": CONTRACTING_KEPT,
    "dppo_kl": CONTRACTING_KEPT,
    # Bounds (0.8, 2): neither the largest lower nor the largest upper one lifts 4.05 to 4.62.
    "bapo": CONTRACTING_KEPT,
    # Mean gap -0.6: the mild tier, 0.3, for both Q3 tokens; Q4 up-weighted by 4 / 2.6.
    "triage": gated(0.3, TIS),
    "triage_no_repair": gated(0.3, TIS),
    "triage_no_gate": TIS,
    "triage_no_tis": gated(0.3, PLAIN),
    # Halfway between the thresholds 0.2 and 1.
    "triage_calibrated": gated(0.55, TIS),
}
CALIBRATION = CalibrationConfig(thresholds=(2.0, 0.2, 1.0, 0.5, 0.9))


def hand_batch(dtype=np.float32):
    sampler = jnp.asarray(np.log(SAMPLER), dtype)
    old = sampler + jnp.asarray(GAP, dtype)
    return TokenBatch(old, sampler, jnp.asarray([-1.0, 1.0], dtype), jnp.ones((2, 4), bool))


def gradient_weights(name, config, batch):
    def loss(logp):
        return OBJECTIVES[name](logp, batch, config)[0]

    gradient = jax.jit(jax.grad(loss))(batch.old_logp)
    return np.asarray(-8 * gradient / batch.advantages[:, None]).ravel()


def test_every_objective_has_a_row():
    assert EXPECTED.keys() == OBJECTIVES.keys()


@pytest.mark.parametrize("name", list(EXPECTED))
def test_weight_of_every_region(name):
    config = TriageConfig(calibration=CALIBRATION)
    with jax.enable_x64(True):
        got = gradient_weights(name, config, hand_batch(np.float64))
    np.testing.assert_allclose(got, EXPECTED[name], rtol=1e-7, atol=1e-12)


def test_calibrated_gate_is_silent_during_its_reference_window():
    """Neither Gate nor Repair, whatever the gaps."""
    with jax.enable_x64(True):
        batch = hand_batch(np.float64)
        got = gradient_weights("triage_calibrated", TriageConfig(), batch.replace(advantages=jnp.ones(2)))
    np.testing.assert_allclose(got, np.minimum(np.exp(GAP), 2).ravel(), rtol=1e-7)


def test_share_of_tokens_without_gradient():
    removed = {"icepop": 3, "clip_sampler": 2, "opsm": 4, "k3_rejection": 8, "grpo": 0, "cispo": 0, "bapo": 2}
    batch = hand_batch()
    for name, count in removed.items():
        objective = OBJECTIVES[name]
        metrics = jax.jit(
            lambda b, f=objective: f(b.old_logp, b, TriageConfig())[1]["ppo/clip_fraction/token"]
        )
        np.testing.assert_allclose(metrics(batch).value(), count / 8)


GOLDEN = load("triage_golden.npz")


@pytest.mark.parametrize("reduction", ["response", "token", "fixed"])
def test_recorded_values(reduction):
    """`triage` is the recorded loss, `triage_no_repair` its policy part."""
    expected, policy, _ = GOLDEN[f"b11/{reduction}/q3/adv_positive/scalars"]
    with jax.enable_x64(True):
        logp, batch = batch_of("b11", np.float64)
        for name, value in {"triage": expected, "triage_no_repair": policy}.items():
            objective, config = OBJECTIVES[name], TriageConfig(name=name, reduction=reduction)
            run = jax.jit(lambda logp, batch, f=objective, c=config: f(logp, batch, c)[0])
            np.testing.assert_allclose(run(logp, batch), value, rtol=1e-12)


@pytest.mark.parametrize(("name", "kept"), [("triage", 1), ("triage_no_gate", 1), ("triage_no_repair", 0)])
def test_repair_can_be_left_out(name, kept):
    falling = hand_batch().replace(advantages=jnp.ones(2))  # the first response's mean gap is -0.6

    @jax.jit
    def repair(batch):
        metrics = OBJECTIVES[name](batch.old_logp, batch, TriageConfig())[1]
        return metrics["loss/repair"].value(), metrics["repair/loss"].value()

    counted, penalty = repair(falling)
    assert penalty > 0  # a diagnostic, whether or not it counts
    np.testing.assert_allclose(counted, 0.015 * penalty * kept, rtol=1e-6)


def test_gate_weights_can_be_laid_over_a_rival():
    batch = hand_batch()
    weights, _ = update_inputs(batch, TriageConfig())

    @jax.jit
    @jax.grad
    def gradient(logp):
        return OBJECTIVES["grpo"](logp, batch, TriageConfig(), weights=weights)[0]

    got = -8 * gradient(batch.old_logp) / batch.advantages[:, None]
    np.testing.assert_allclose(got.ravel(), gated(0.3, PLAIN), rtol=1e-6)
