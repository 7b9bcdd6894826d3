"""The calibrated Gate: thresholds of a reference window, the frozen state, the weights it gives."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.objective.inputs import random_batch
from triage_jax.objective import (
    BalanceConfig,
    CalibrationConfig,
    GateCalibration,
    GateConfig,
    ReferenceUpdate,
    TriageConfig,
    balance_advantages,
    calibrate,
    calibrated_gate_weights,
    calibration_from_json,
    update_inputs,
)

STATE = GateCalibration(
    deep=2.0, mean=0.5, mean_full=1.5, tail=0.25, tail_full=0.75, floor=0.1,
    segment=4, updates=20, segments=400, tail_fraction=0.04, triggered=0.05,
)  # fmt: skip
CONFIG = TriageConfig(name="triage_calibrated", gate=GateConfig(segment=4))


def one_update(depths, advantage=-1.0, tokens=4):
    """One response per depth, its gaps all minus that depth."""
    gap = np.repeat(-np.asarray(depths, float)[:, None], tokens, axis=1)
    return ReferenceUpdate(gap, np.full(len(gap), advantage), np.ones(gap.shape, bool))


def test_hand_worked_window():
    """Twenty segments of depth .1 to 2; one may trigger. No gap lies beyond the deepest, so the share is inactive."""
    found = calibrate([one_update(np.arange(1, 21) / 10)], CONFIG)
    assert (found.deep, found.tail, found.tail_full) == (2.0, 0.0, 0.0)
    assert (found.mean, found.mean_full) == (1.9, 2.0)
    assert (found.tail_fraction, found.triggered) == (
        0.1,
        0.05,
    )  # the .9 quantile, higher: 1.9, below 2 alone
    assert (found.segment, found.updates, found.segments, found.floor) == (4, 1, 20, 0.1)


def test_positive_responses_count_for_the_deep_quantile_only():
    window = [
        one_update(np.arange(1, 21) / 10),
        one_update([30.0] * 2, advantage=1.0),
        one_update([50.0], 0.0),
    ]
    found = calibrate(window, CONFIG)
    assert found.deep == 50
    assert (found.mean, found.mean_full, found.updates, found.segments) == (1.9, 2.0, 3, 20)


def exhaustive(window, config):
    """Thresholds by trying every tail, in plain loops."""
    settings, size = config.calibration, config.gate.segment

    def higher(values, quantile):
        values = sorted(values)
        return values[int(np.ceil(quantile * (len(values) - 1) - 1e-9))]

    rows = [
        (g, np.broadcast_to(a, g.shape), m)
        for update in window
        for g, a, m in zip(update.gap, update.advantages, update.mask, strict=True)
    ]
    deep = higher(
        [-x for g, _, m in rows for x, ok in zip(g, m, strict=True) if ok and x < 0], settings.deep_quantile
    )
    x1, x2 = [], []
    for g, a, m in rows:
        for start in range(0, len(g), size):
            inside = [t for t in range(start, min(start + size, len(g))) if m[t]]
            if inside and np.mean(a[inside]) < 0:
                x1.append(-np.mean(g[inside]))
                x2.append(np.mean(g[inside] < -deep))
    best = None
    for k in range(len(x1) + 1):
        t1, t2 = (higher(x, 1 - k / len(x1)) for x in (x1, x2))
        rate = np.mean([u > t1 or v > t2 for u, v in zip(x1, x2, strict=True)])
        if rate <= settings.trigger_rate:
            best = t1, t2, k / len(x1), rate
    full = [higher(x, settings.full_quantile) for x in (x1, x2)]
    return deep, *best, *full, len(x1)


@pytest.mark.parametrize("per_token", [False, True])
def test_random_windows_against_trying_every_tail(per_token):
    config = TriageConfig(
        gate=GateConfig(segment=16), calibration=CalibrationConfig(deep_quantile=0.9, trigger_rate=0.1)
    )
    window = []
    for seed in range(3):
        _, batch = random_batch(seed, tokens=70, dtype=np.float32, per_token=per_token)
        gap = np.where(batch.mask, batch.old_logp - batch.sampler_logp, np.nan)
        window.append(
            ReferenceUpdate(gap.astype(np.float64), np.asarray(batch.advantages), np.asarray(batch.mask))
        )
    found = calibrate(window, config)
    deep, mean, tail, fraction, rate, mean_full, tail_full, segments = exhaustive(window, config)
    np.testing.assert_allclose(found.thresholds, (deep, mean, mean_full, tail, tail_full), rtol=1e-12)
    np.testing.assert_allclose((found.tail_fraction, found.triggered), (fraction, rate))
    assert found.segments == segments
    assert 0 < rate <= 0.1
    assert tail_full > tail
    assert calibrate(
        [ReferenceUpdate(*(np.concatenate(x) for x in zip(*window, strict=True)))], config
    ).thresholds == (found.thresholds)


@pytest.mark.parametrize(("window", "words"), [
    ([one_update([-1.0] * 9)], "no negative gap"),
    ([one_update([1.0] * 9, advantage=1.0)], "no segment with a negative mean advantage"),
    ([one_update([1.0] * 9)], r"no feature of the 9 eligible segments has a tail: thresholds \[1\.0, 0\.0\]"),
    ([one_update([1.0]), one_update([np.nan])], "update 1 has a NaN or inf"),
    ([ReferenceUpdate(np.zeros((2, 3)), np.zeros(3), np.ones((2, 3)))], r"update 0 has gap \(2, 3\)"),
])  # fmt: skip
def test_refused_windows(window, words):
    with pytest.raises(ValueError, match=words):
        calibrate(window, CONFIG)


def test_json_is_exact():
    state = replace(STATE, deep=0.1 + 0.2, triggered=1 / 3)
    assert calibration_from_json(state.to_json()) == state


@pytest.mark.parametrize(("change", "words"), [
    ({"format": "other"}, "accepted: a JSON object with format 'triage_jax.gate_calibration.v1'"),
    ({"deep": 0.0}, "deep > 0"),
    ({"deep": None}, "deep is None; accepted: a finite number"),
    ({"deep": "2"}, "deep is '2'"),
    ({"mean": float("nan")}, "mean is nan; accepted: a finite number"),
    ({"mean_full": 0.5, "tail_full": 0.25}, "mean_full > mean or tail_full > tail"),
    ({"floor": 0.105}, r"floor is 0\.105; accepted: a multiple of 0\.01"),
    ({"segment": 4.0}, r"segment is 4\.0; accepted: an integer"),
    ({"segment": True}, "segment is True; accepted: an integer"),
    ({"updates": 0}, "updates is 0; accepted: an integer of at least 1"),
    ({"triggered": 1.5}, r"triggered is 1\.5"),
    ({"extra": 1}, r"fields \['extra'\] are missing or unknown"),
])  # fmt: skip
def test_refused_states(change, words):
    text = json.dumps(json.loads(STATE.to_json()) | change)
    with pytest.raises(ValueError, match=rf"^gate\.json: .*{words}"):
        calibration_from_json(text, "gate.json")


def test_refused_texts():
    for text, words in {"{": "not valid JSON", "[]": "not a Gate calibration"}.items():
        with pytest.raises(ValueError, match=words):
            calibration_from_json(text)
    data = json.loads(STATE.to_json())
    del data["tail"]
    with pytest.raises(ValueError, match=r"fields \['tail'\]"):
        calibration_from_json(json.dumps(data))


def test_freezing():
    config = STATE.freeze(TriageConfig(gate=GateConfig(segment=4), calibration=CalibrationConfig(floor=0.5)))
    assert config.calibration.thresholds == (2.0, 0.5, 1.5, 0.25, 0.75)
    assert config.calibration.floor == 0.1
    with pytest.raises(ValueError, match=r"gate\.segment is 64; accepted: 4, the segment of the calibration"):
        STATE.freeze(TriageConfig())


@pytest.mark.parametrize(("build", "words"), [
    (lambda: CalibrationConfig(updates=0), r"calibration\.updates is 0"),
    (lambda: CalibrationConfig(deep_quantile=1.0), r"calibration\.deep_quantile is 1\.0"),
    (lambda: CalibrationConfig(trigger_rate=0.0), r"calibration\.trigger_rate is 0\.0"),
    (lambda: CalibrationConfig(floor=0.105), r"calibration\.floor"),
    (lambda: CalibrationConfig(thresholds=(1.0, 2.0)), r"calibration\.thresholds is \(1\.0, 2\.0\); accepted: five"),
    (lambda: BalanceConfig(quantile=1.5), r"balance\.quantile is 1\.5"),
    (lambda: BalanceConfig(exponent=-1.0), r"balance\.exponent is -1\.0"),
    (lambda: BalanceConfig(floor=0.0), r"balance\.floor is 0\.0"),
])  # fmt: skip
def test_refused_settings(build, words):
    with pytest.raises(ValueError, match=words):
        build()


# Segments of four: gaps and the weight that their negative tokens get, with the thresholds of STATE.
SEGMENTS = [
    ([-0.5, -0.5, -0.5, -0.5], 1.0),  # depth at its threshold
    ([-1.0, -1.0, -1.0, -1.0], 0.55),  # half way
    ([-1.9, -1.9, -1.9, -1.9], 0.1),  # beyond full
    ([-3.0, 1.0, 1.0, 1.0], 1.0),  # one deep token of four: at the threshold
    ([-3.0, -3.0, 3.0, 3.0], 0.55),  # two of four
    ([-3.0, -3.0, -3.0, 9.0], 0.1),  # three: full
    ([-3.0, -3.0, 2.0, 2.6], 0.55),  # depth .35 below its threshold: the larger excess counts
    ([-0.637, -0.637, -0.637, -0.637], 0.88),  # 1 - .9 * .137 = .8767, rounded
]
weights_of = jax.jit(calibrated_gate_weights, static_argnums=3)


@pytest.mark.parametrize("scope", ["q3", "whole"])
def test_hand_worked_weights(scope):
    config = STATE.freeze(TriageConfig(gate=GateConfig(segment=4, scope=scope)))
    gap = np.asarray([gaps for gaps, _ in SEGMENTS])
    expected = np.asarray([[w if scope == "whole" or g < 0 else 1 for g in gaps] for gaps, w in SEGMENTS])
    got = weights_of(
        jnp.asarray(gap.reshape(1, -1), jnp.float32), -jnp.ones(1), jnp.ones((1, gap.size), bool), config
    )
    np.testing.assert_array_equal(np.asarray(got).reshape(-1, 4), np.float32(expected))


def test_masks_signs_and_the_short_last_segment():
    config = STATE.freeze(CONFIG)
    gap = jnp.asarray([[-1.0, -1.0, jnp.nan, jnp.inf, -1.0, -1.0]] * 3)
    mask = jnp.asarray([[1, 1, 0, 0, 1, 1]] * 3)
    got = weights_of(gap, jnp.asarray([-1.0, 1.0, 0.0]), mask, config)
    expected = np.ones((3, 6), np.float32)
    expected[0, [0, 1, 4, 5]] = 0.55
    np.testing.assert_array_equal(got, expected)


def test_an_inactive_feature_takes_no_part():
    config = replace(CONFIG, calibration=CalibrationConfig(thresholds=(2.0, 0.5, 1.5, 0.9, 0.9)))
    got = weights_of(jnp.asarray([[-3.0, -3.0, -3.0, 9.0]]), -jnp.ones(1), jnp.ones((1, 4)), config)
    np.testing.assert_array_equal(got, np.ones((1, 4)))


def test_weights_of_the_update_follow_the_state():
    _, batch = random_batch(4, tokens=40)
    gap = batch.old_logp - batch.sampler_logp
    before, _ = update_inputs(batch, CONFIG)
    np.testing.assert_array_equal(before, 1)
    after, totals = update_inputs(batch, STATE.freeze(CONFIG))
    np.testing.assert_array_equal(after, weights_of(gap, batch.advantages, batch.mask, STATE.freeze(CONFIG)))
    assert int(totals.weighted_whole) < int(totals.tokens)
    with pytest.raises(ValueError, match=r"calibration\.thresholds is \(\)"):
        calibrated_gate_weights(gap, batch.advantages, batch.mask, CONFIG)


def test_window_and_gate_agree_on_what_triggers():
    """Of the window itself, just the share that the calibration reports is damped."""
    rng = np.random.default_rng(3)
    gap = rng.laplace(-0.05, 0.3, (60, 32)).astype(np.float32)
    update = ReferenceUpdate(gap, -np.ones(60), np.ones(gap.shape, bool))
    config = replace(CONFIG, gate=GateConfig(segment=8, scope="whole"))
    state = calibrate([update], config)
    with jax.enable_x64(True):
        got = weights_of(
            jnp.asarray(gap, jnp.float64), -jnp.ones(60), jnp.ones(gap.shape), state.freeze(config)
        )
    damped = (np.asarray(got).reshape(60, -1, 8) < 1).all(axis=-1).mean()
    assert 0 < damped <= state.triggered <= 0.05
    assert state.triggered - damped < 0.02  # an excess below .0056 rounds to weight 1


class TestBalance:
    ON = BalanceConfig(enabled=True)

    def test_hand_worked_group(self):
        """Lengths 10, 10, 10, 160: L = 25, so the last is scaled by (25 / 160)^.25 = .629, cut at .7."""
        got = balance_advantages(np.asarray([1.0, 1, -1, -1]), np.asarray([10, 10, 10, 160]), 4, self.ON)
        np.testing.assert_allclose(got, np.asarray([1, 1, -1, -0.7]) - 0.075, rtol=1e-6)
        assert got.dtype == np.float32

    def test_scale_between_floor_and_one(self):
        got = balance_advantages(
            np.asarray([2.0, -2.0]), np.asarray([16, 32]), 2, BalanceConfig(enabled=True, quantile=0.0)
        )
        scaled = -2 * 0.5**0.25
        np.testing.assert_allclose(got, np.asarray([2, scaled]) - (2 + scaled) / 2, rtol=1e-6)

    def test_groups_are_centred_and_the_reference_length_is_the_updates(self):
        rng = np.random.default_rng(0)
        advantages, lengths = rng.normal(size=(6, 4)), rng.integers(1, 900, (6, 4))
        advantages -= advantages.mean(axis=1, keepdims=True)
        got = balance_advantages(advantages.ravel(), lengths.ravel(), 4, self.ON).reshape(6, 4)
        np.testing.assert_allclose(got.mean(axis=1), 0, atol=1e-7)
        reference = np.quantile(lengths, 0.7)
        untouched = np.where((advantages < 0) & (lengths > reference), np.nan, advantages)
        moved = got - advantages  # the same within a group, where nothing was scaled
        for row, left in zip(moved, untouched, strict=True):
            kept = row[np.isfinite(left)]
            np.testing.assert_allclose(kept, kept[:1].repeat(len(kept)), atol=1e-6)

    def test_empty_responses_take_no_part(self):
        got = balance_advantages(np.asarray([1.0, -1.0, 0.0]), np.asarray([4, 4, 0]), 3, self.ON)
        np.testing.assert_array_equal(got, np.float32([1, -1, 0]))

    def test_off_and_nothing_active(self):
        advantages, lengths = np.asarray([1.0, -1.0]), np.asarray([1, 500])
        np.testing.assert_array_equal(balance_advantages(advantages, lengths, 2, BalanceConfig()), advantages)
        np.testing.assert_array_equal(balance_advantages(advantages, 0 * lengths, 2, self.ON), advantages)

    @pytest.mark.parametrize(("advantages", "lengths", "size"), [(3, 3, 2), (4, 2, 2), (4, 4, 0)])
    def test_refused(self, advantages, lengths, size):
        with pytest.raises(ValueError, match=r"groups of 2|accepted: two of shape"):
            balance_advantages(np.zeros(advantages), np.ones(lengths, int), size, self.ON)
