"""Tokens that experts had no room for: counted over layers and micro-batches, and an update of them refused."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny import tiny_config, tiny_params
from triage_jax.learner import (
    Learner,
    LearnerConfig,
    MeshConfig,
    RolloutBatch,
    batch_sharding,
    init_state,
    make_mesh,
    parameter_shardings,
    update,
)
from triage_jax.model import Numerics
from triage_jax.objective import finalize

MODEL = tiny_config(
    architecture="qwen3_moe", num_experts=4, experts_per_token=2, norm_topk_prob=True, intermediate_size=32
)
ROWS, PROMPT, RESPONSE = 4, 40, 60
OVERFLOW = "moe/overflow_fraction"
LEARNER = Learner(model=MODEL, numerics=Numerics(execution="float32", expert_capacity=1.0))


def _batch(routes: np.ndarray, valid: np.ndarray) -> RolloutBatch:
    rng = np.random.default_rng()
    tokens = jnp.asarray(rng.integers(2, MODEL.vocab_size, (ROWS, PROMPT + RESPONSE)), jnp.int32)
    mask = jnp.asarray(valid[:, PROMPT:])
    return RolloutBatch(
        tokens=tokens,
        valid=jnp.asarray(valid),
        mask=mask,
        sampler_logp=jnp.full(mask.shape, -1.0),
        advantages=jnp.asarray(rng.standard_normal(ROWS), jnp.float32),
        routes=jnp.broadcast_to(jnp.asarray(routes, jnp.int32), (*tokens.shape, MODEL.num_layers, 2)),
    )


def _update(learner: Learner, batch: RolloutBatch):
    state = init_state(learner, tiny_params(MODEL))
    return jax.block_until_ready(update(learner, state, batch, batch.sampler_logp))


@pytest.mark.parametrize("allowed", [0.0, 0.5])
def test_what_finds_no_room_is_counted_and_refused(allowed):
    """Two micro-batches of 200 tokens each, 20 of them padding; layer 0 sends all to experts 0 and 1, layer 1 half.

    Each expert has room for 128 of 180 in layer 0, so that 104 of 360 pairs find none; in layer 1 for 90 of 90.
    """
    learner = replace(LEARNER, settings=LearnerConfig(micro_batch=2, max_overflow=allowed))
    valid = np.ones((ROWS, PROMPT + RESPONSE), bool)
    valid[:, :10] = False
    routes = np.zeros((ROWS, PROMPT + RESPONSE, 2, 2), int)
    routes[:, :, 0] = [0, 1]
    routes[:, ::2, 1], routes[:, 1::2, 1] = [0, 1], [2, 3]
    after, report = _update(learner, _batch(routes, valid))
    values = finalize(report.metrics)
    assert float(values[OVERFLOW]) == pytest.approx(104 / 720)
    assert bool(report.applied) == (allowed > 0)
    assert int(after.skipped) == (allowed == 0)
    kept = np.array_equal(after.params.layers.gate, tiny_params(MODEL).layers.gate)
    assert kept == (allowed == 0)


def test_room_for_all_overflows_nothing_and_no_limit_counts_nothing():
    valid = np.ones((ROWS, PROMPT + RESPONSE), bool)
    batch = _batch(np.array([0, 1]), valid)
    roomy = replace(LEARNER, numerics=replace(LEARNER.numerics, expert_capacity=2.0))
    _, report = _update(roomy, batch)
    assert float(finalize(report.metrics)[OVERFLOW]) == 0.0
    unlimited = replace(LEARNER, numerics=replace(LEARNER.numerics, expert_capacity=None))
    _, plain = _update(unlimited, batch)
    assert OVERFLOW not in plain.metrics
    np.testing.assert_allclose(report.loss, plain.loss, rtol=1e-5)
    np.testing.assert_allclose(report.grad_norm, plain.grad_norm, rtol=1e-4)


def test_an_impossible_share_is_refused():
    with pytest.raises(ValueError, match=r"max_overflow is 1\.5; accepted: a share, 0 to 1"):
        LearnerConfig(max_overflow=1.5)


def test_eight_devices_give_the_loss_and_gradient_of_one():
    """Every device fills its own part of each expert's buffer; weights are gathered, gradients summed."""
    batch = _batch(np.array([1, 3]), np.ones((ROWS, PROMPT + RESPONSE), bool))
    batch = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[::-1]]), batch.replace(routes=None))
    results = []
    for mesh in (MeshConfig(), MeshConfig(data=2, fsdp=4)):
        settings = LearnerConfig(mesh=mesh)
        learner = replace(LEARNER, numerics=replace(LEARNER.numerics, expert_capacity=4.0), settings=settings)
        grid = make_mesh(mesh)
        state = init_state(learner, tiny_params(MODEL))
        state = jax.device_put(state, parameter_shardings(state, grid))
        placed = jax.device_put(batch, batch_sharding(grid))
        results.append(jax.block_until_ready(update(learner, state, placed, placed.sampler_logp)))
    (one, single), (eight, sharded) = results
    assert float(finalize(sharded.metrics)[OVERFLOW]) == 0.0
    np.testing.assert_allclose(sharded.loss, single.loss, rtol=1e-4)
    np.testing.assert_allclose(sharded.grad_norm, single.grad_norm, rtol=1e-4)
    moments = (state.opt_state[1][0].mu.layers for state in (eight, one))
    for ours, theirs in zip(*map(jax.tree.leaves, moments), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-6)
