"""One update: partitions, devices, the ratio of the first update, skipping, the optimiser."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.tiny import tiny_config, tiny_params
from triage_jax.learner import (
    Learner,
    LearnerConfig,
    LearnerState,
    MeshConfig,
    OptimizerConfig,
    RolloutBatch,
    batch_sharding,
    init_state,
    make_mesh,
    make_optimizer,
    parameter_shardings,
    score,
    update,
)
from triage_jax.model import Numerics
from triage_jax.nvfp4 import QuantSpec
from triage_jax.objective import finalize

MODEL = tiny_config()
ROWS, PROMPT, RESPONSE = 16, 4, 10
LEARNER = Learner(
    model=MODEL,
    numerics=Numerics(execution="float32"),
    optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.0),
)
EMULATED = Numerics(activation=QuantSpec(scope="row"))


def _batch(seed: int = 0) -> RolloutBatch:
    rng = np.random.default_rng(seed)
    lengths, starts = rng.integers(1, RESPONSE + 1, ROWS), rng.integers(0, PROMPT, ROWS)
    columns = np.arange(PROMPT + RESPONSE)
    valid = (columns >= starts[:, None]) & (columns < PROMPT + lengths[:, None])
    return RolloutBatch(
        tokens=rng.integers(2, 32, valid.shape).astype(np.int32),
        valid=valid,
        mask=valid[:, PROMPT:],
        sampler_logp=rng.normal(-3, 0.7, (ROWS, RESPONSE)).astype(np.float32),
        advantages=rng.choice([-1.0, 0.5, 2.0], ROWS).astype(np.float32),
    )


def _state(learner: Learner) -> LearnerState:
    return init_state(learner, tiny_params(MODEL))


def _step(learner: Learner, batch: RolloutBatch, state: LearnerState | None = None):
    state = _state(learner) if state is None else state
    # One program at a time: two with collectives in flight at once can lock up virtual CPU devices.
    scores = jax.block_until_ready(score(learner, state.params, batch))
    return jax.block_until_ready(update(learner, state, batch, scores.logp))


def _leaves(tree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_the_ratio_of_the_first_update_is_one():
    """The scoring pass and the pass under the gradient are the same program: W4A4 would magnify any difference."""
    learner = replace(LEARNER, numerics=EMULATED)
    _, report = _step(learner, _batch())
    values = finalize(report.metrics)
    assert float(values["ppo/ratio/token"]) == pytest.approx(1.0, abs=1e-6)
    assert abs(float(values["ppo/approx_kl/token"])) < 1e-9


def test_score_is_the_same_for_every_partition():
    batch = _batch()
    whole = score(LEARNER, tiny_params(MODEL), batch)
    for size in (1, 2, 8):
        learner = replace(LEARNER, settings=LearnerConfig(micro_batch=size))
        parts = score(learner, tiny_params(MODEL), batch)
        np.testing.assert_allclose(parts.logp, whole.logp, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(parts.entropy, whole.entropy, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("reduction", ["response", "token", "fixed"])
def test_micro_batches_change_neither_loss_nor_gradient(size, reduction):
    learner = replace(LEARNER, objective=replace(LEARNER.objective, reduction=reduction))
    parts = replace(learner, settings=LearnerConfig(micro_batch=size))
    _, whole = _step(learner, _batch())
    _, split = _step(parts, _batch())
    np.testing.assert_allclose(split.loss, whole.loss, rtol=2e-5)
    np.testing.assert_allclose(split.grad_norm, whole.grad_norm, rtol=2e-5)
    one, other = finalize(whole.metrics), finalize(split.metrics)
    for key in one:
        np.testing.assert_allclose(other[key], one[key], rtol=1e-3, atol=1e-5, err_msg=key)


def _gradient(learner: Learner, batch: RolloutBatch, mesh: MeshConfig):
    """Loss and parameters after a step of plain descent, which shows the gradient itself."""
    learner = replace(learner, settings=replace(learner.settings, mesh=mesh))
    grid = make_mesh(mesh)
    state = _state(learner)
    state = jax.device_put(state, parameter_shardings(state, grid))
    batch = jax.device_put(batch, batch_sharding(grid))
    after, report = _step(learner, batch, state)
    return after, report


@pytest.mark.parametrize(
    ("mesh", "micro"),
    [
        (MeshConfig(data=8), 0),
        (MeshConfig(data=2, fsdp=4), 0),
        (MeshConfig(data=2, fsdp=4), 8),
        (MeshConfig(fsdp=8), 8),
    ],
)
def test_eight_devices_give_the_loss_and_gradient_of_one(mesh, micro):
    learner = replace(LEARNER, settings=LearnerConfig(micro_batch=micro))
    one, single = _gradient(learner, _batch(), MeshConfig())
    eight, sharded = _gradient(learner, _batch(), mesh)
    np.testing.assert_allclose(sharded.loss, single.loss, rtol=2e-5)
    np.testing.assert_allclose(sharded.grad_norm, single.grad_norm, rtol=2e-5)
    # Adam's first moment after one step is (1 - beta1) times the clipped gradient.
    for ours, theirs in zip(_leaves(eight.opt_state[1][0].mu), _leaves(one.opt_state[1][0].mu), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-6)
    for key, value in finalize(single.metrics).items():
        np.testing.assert_allclose(finalize(sharded.metrics)[key], value, rtol=1e-3, atol=1e-5, err_msg=key)


def test_fsdp_really_splits_parameters_and_moments():
    grid = make_mesh(MeshConfig(data=2, fsdp=4))
    state = _state(LEARNER)
    state = jax.device_put(state, parameter_shardings(state, grid))
    after, _ = _step(LEARNER, jax.device_put(_batch(), batch_sharding(grid)), state)
    for tree in (after.params, after.opt_state[1][0].mu):
        gate = tree.layers.gate
        assert gate.addressable_shards[0].data.size == gate.size // 4


def test_emulated_numerics_do_not_depend_on_the_devices_with_scales_per_row():
    learner = replace(LEARNER, numerics=EMULATED)
    grid = make_mesh(MeshConfig(data=8))
    alone = score(learner, tiny_params(MODEL), _batch())
    sharded = score(learner, tiny_params(MODEL), jax.device_put(_batch(), batch_sharding(grid)))
    # Shapes differ, so summation order does, and W4A4 magnifies single flips; most tokens agree closely.
    difference = np.abs(np.asarray(alone.logp) - np.asarray(sharded.logp))[_batch().mask]
    assert np.median(difference) < 5e-3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_changes_nothing_but_the_counters(bad):
    learner = replace(LEARNER, numerics=Numerics(execution="float32"))
    state, _ = _step(learner, _batch())
    before, moments = _leaves(state.params), _leaves(state.opt_state)
    poisoned = _batch(1).replace(advantages=np.full(ROWS, bad, np.float32))
    state, report = _step(learner, poisoned, state)
    assert not bool(report.applied)
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (2, 1, 1)
    for kept, old in zip(_leaves(state.params) + _leaves(state.opt_state), before + moments, strict=True):
        np.testing.assert_array_equal(kept, old)
    state, report = _step(learner, _batch(2), state)
    assert bool(report.applied)
    assert (int(state.skipped), int(state.skipped_in_a_row)) == (1, 0)


def test_nothing_valid_gives_no_gradient():
    empty = _batch().replace(mask=np.zeros((ROWS, RESPONSE), bool))
    state, report = _step(LEARNER, empty)
    assert bool(report.applied)
    assert float(report.loss) == float(report.grad_norm) == 0.0
    for after, before in zip(_leaves(state.params), _leaves(tiny_params(MODEL)), strict=True):
        np.testing.assert_array_equal(after, before)


def test_the_update_raises_the_probability_of_what_was_rewarded():
    batch = _batch()
    before = score(LEARNER, tiny_params(MODEL), batch).logp
    state, _ = _step(LEARNER, batch.replace(sampler_logp=np.asarray(before)))
    after = score(LEARNER, state.params, batch).logp
    moved = np.where(batch.mask, np.asarray(after) - np.asarray(before), 0).sum(axis=1)
    assert moved[batch.advantages > 1].mean() > 0 > moved[batch.advantages < 0].mean()


def test_weight_decay_spares_the_norms():
    config = OptimizerConfig(learning_rate=0.5, weight_decay=0.1, max_grad_norm=1.0)
    params = tiny_params(MODEL)
    optimizer = make_optimizer(config)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    after = optax.apply_updates(params, updates)
    np.testing.assert_allclose(after.layers.gate, params.layers.gate * (1 - 0.5 * 0.1), rtol=1e-6)
    np.testing.assert_array_equal(after.layers.q_norm, params.layers.q_norm)
    np.testing.assert_array_equal(after.final_norm, params.final_norm)


def test_warm_up_is_linear_and_then_constant():
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.4, warmup_steps=4, weight_decay=0.0))
    # Adam's step on a constant gradient is the rate itself, so each step shows it.
    params = tiny_params(MODEL)
    gradient = jax.tree.map(lambda leaf: jnp.full_like(leaf, 1e-4), params)
    state, sizes = optimizer.init(params), []
    for _ in range(6):
        updates, state = optimizer.update(gradient, state, params)
        sizes.append(-float(updates.final_norm[0]))
    np.testing.assert_allclose(sizes, [0.1, 0.2, 0.3, 0.4, 0.4, 0.4], rtol=1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MeshConfig(data=0), "at least 1 each"),
        (lambda: make_mesh(MeshConfig(data=4, fsdp=4)), "needs 16 devices; this process sees 8"),
        (lambda: OptimizerConfig(beta1=1.0), "betas"),
        (lambda: OptimizerConfig(learning_rate=-1.0), "must not be negative"),
        (lambda: LearnerConfig(max_skipped=0), "max_skipped"),
        (
            lambda: score(
                replace(LEARNER, settings=LearnerConfig(micro_batch=3)), tiny_params(MODEL), _batch()
            ),
            "micro_batch = 3 does not divide the 16 rows",
        ),
    ],
)
def test_bad_settings_say_what_is_accepted(make, message):
    with pytest.raises(ValueError, match=message):
        make()
