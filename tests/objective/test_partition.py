"""The loss of an update does not depend on how it is split: micro-batches, order, padding, devices."""

from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from tests.objective.inputs import loss_and_grad, random_batch, rows, with_metrics
from triage_jax.objective import (
    GateConfig,
    RepairConfig,
    TokenBatch,
    Totals,
    TriageConfig,
    all_reduce,
    collapse,
    finalize,
    gate_weights,
    merge,
    triage_loss,
    update_totals,
)

CONFIGS = [
    TriageConfig(),
    TriageConfig(reduction="token", gate=GateConfig(scope="whole"), repair=RepairConfig(scope="whole")),
    TriageConfig(reduction="fixed", repair=RepairConfig(scope="q2")),
]


def prepared(config, dtype=np.float64):
    live, batch = random_batch(7, dtype=dtype)
    weights = gate_weights(batch.old_logp - batch.sampler_logp, batch.advantages, batch.mask, config)
    return live, batch, weights, update_totals(batch, weights, config)


def same_values(got, expected):
    got, expected = finalize(got), finalize(expected)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(got[key], value, rtol=1e-12, atol=1e-14, err_msg=key)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_micro_batches(config, parts):
    with jax.enable_x64(True):
        live, batch, weights, totals = prepared(config)
        loss, gradient = loss_and_grad(live, batch, config)
        losses, gradients = zip(
            *(
                loss_and_grad(live[part], rows(batch, part), config, totals, weights[part])
                for part in np.split(np.arange(8), parts)
            ),
            strict=True,
        )
        np.testing.assert_allclose(sum(losses), loss, rtol=1e-13)
        np.testing.assert_allclose(np.concatenate(gradients), gradient, rtol=1e-13, atol=0)


def test_totals_of_parts_add_up():
    config = CONFIGS[0]
    _, batch, weights, totals = prepared(config, np.float32)
    halves = [update_totals(rows(batch, half), weights[half], config) for half in (slice(0, 3), slice(3, 8))]
    assert jax.tree.leaves(halves[0] + halves[1]) == jax.tree.leaves(totals)
    assert all(jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in jax.tree.leaves(totals))


def test_metrics_of_parts_merge():
    """Pairwise, and along the axis of a scan."""
    config = CONFIGS[0]
    with jax.enable_x64(True):
        live, batch, weights, totals = prepared(config)
        expected = with_metrics(live, batch, config)[1]
        parts = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), (live, batch, weights))

        def one(carry, part):
            return carry, triage_loss(part[0], part[1], config, totals, part[2])[1]

        stacked = jax.jit(lambda parts: jax.lax.scan(one, None, parts)[1])(parts)
        same_values(collapse(stacked), expected)
        same_values(reduce(merge, (jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(4))), expected)


def partial_update(live, batch, weights, config, axis):
    """What one device does: loss, gradient and metrics of the whole update from its own rows."""
    totals = jax.tree.map(partial(jax.lax.psum, axis_name=axis), update_totals(batch, weights, config))
    (loss, metrics), gradient = jax.value_and_grad(triage_loss, has_aux=True)(
        live, batch, config, totals, weights
    )
    return jax.lax.psum(loss, axis), gradient, all_reduce(metrics, axis)


@pytest.mark.parametrize("config", CONFIGS)
def test_shard_map_over_eight_devices(config):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split, whole = PartitionSpec("data"), PartitionSpec()
    outputs = 3 if config is CONFIGS[0] else 2  # metrics, slow to compile, once
    with jax.enable_x64(True):
        live, batch, weights, _ = prepared(config)
        sharded = jax.jit(
            jax.shard_map(
                lambda *args: partial_update(*args, config, "data")[:outputs],
                mesh=mesh,
                in_specs=(split, TokenBatch(split, split, split, split), split),
                out_specs=(whole, split, whole)[:outputs],
            )
        )
        loss, gradient, *metrics = sharded(live, batch, weights)
        expected, expected_gradient = loss_and_grad(live, batch, config)
        np.testing.assert_allclose(loss, expected, rtol=1e-13)
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-13, atol=0)
        for got in metrics:
            same_values(got, with_metrics(live, batch, config)[1])


def test_pmap_over_eight_devices():
    config = CONFIGS[0]
    with jax.enable_x64(True):
        live, batch, weights, _ = prepared(config)
        stacked = jax.tree.map(lambda x: x[:, None], (live, batch, weights))
        update = jax.pmap(lambda *args: partial_update(*args, config, "data")[:2], axis_name="data")
        loss, gradient = update(*stacked)
        expected, expected_gradient = loss_and_grad(live, batch, config)
        np.testing.assert_allclose(loss, np.full(8, expected), rtol=1e-13)
        np.testing.assert_allclose(gradient[:, 0], expected_gradient, rtol=1e-13, atol=0)


@pytest.mark.parametrize("config", CONFIGS)
def test_order_of_responses_and_empty_ones_do_not_matter(config):
    with jax.enable_x64(True):
        live, batch, *_ = prepared(config)
        loss, gradient = loss_and_grad(live, batch, config)
        order = np.random.default_rng(0).permutation(8)
        shuffled, shuffled_gradient = loss_and_grad(live[order], rows(batch, order), config)
        np.testing.assert_allclose(shuffled, loss, rtol=1e-13)
        np.testing.assert_allclose(shuffled_gradient, gradient[order], rtol=1e-13, atol=0)

        filled = np.flatnonzero(np.asarray(batch.mask).any(axis=1))
        assert len(filled) < 8
        kept, kept_gradient = loss_and_grad(live[filled], rows(batch, filled), config)
        np.testing.assert_allclose(kept, loss, rtol=1e-13)
        np.testing.assert_allclose(kept_gradient, gradient[filled], rtol=1e-13, atol=0)


def poisoned(live, batch):
    """NaN and infinities wherever the mask is False, the advantages included."""
    poison = jnp.asarray([jnp.nan, jnp.inf, -jnp.inf], live.dtype)[jnp.arange(live.shape[1]) % 3]

    def spoil(x, shift):
        return jnp.where(batch.mask, x, jnp.roll(poison, shift)[None])

    advantages = spoil(jnp.broadcast_to(batch.advantages[:, None], live.shape), 2)
    old, sampler = spoil(batch.old_logp, 1), spoil(batch.sampler_logp, 0)
    return spoil(live, 0), TokenBatch(old, sampler, advantages, batch.mask)


@pytest.mark.parametrize("config", CONFIGS)
def test_what_stands_under_the_mask_does_not_matter(config):
    with jax.enable_x64(True):
        live, batch, *_ = prepared(config)
        loss, gradient = loss_and_grad(live, batch, config)
        got, got_gradient = loss_and_grad(*poisoned(live, batch), config)
        np.testing.assert_allclose(got, loss, rtol=1e-13)
        np.testing.assert_allclose(got_gradient, gradient, rtol=1e-13, atol=0)
        np.testing.assert_array_equal(np.asarray(got_gradient)[~np.asarray(batch.mask)], 0)
        if config is CONFIGS[0]:
            metrics = (with_metrics(*inputs, config)[1] for inputs in (poisoned(live, batch), (live, batch)))
            same_values(*metrics)


def test_padding_columns_change_nothing():
    config = CONFIGS[0]
    with jax.enable_x64(True):
        live, batch, *_ = prepared(config)

        def wider(x, fill=jnp.nan):
            return jnp.pad(x, ((0, 0), (0, 57)), constant_values=fill)

        old, sampler, mask = wider(batch.old_logp), wider(batch.sampler_logp), wider(batch.mask, False)
        loss, gradient = loss_and_grad(live, batch, config)
        got, got_gradient = loss_and_grad(
            wider(live), TokenBatch(old, sampler, batch.advantages, mask), config
        )
        np.testing.assert_allclose(got, loss, rtol=1e-13)
        np.testing.assert_allclose(got_gradient, wider(gradient, 0), rtol=1e-13, atol=0)


@pytest.mark.parametrize("config", CONFIGS)
def test_nothing_valid_at_all(config):
    with jax.enable_x64(True):
        live, batch, *_ = prepared(config)
        loss, gradient = loss_and_grad(live, batch.replace(mask=jnp.zeros_like(batch.mask)), config)
        assert loss == 0
        np.testing.assert_array_equal(gradient, 0)


def test_totals_hold_more_than_an_int32_of_hundredths():
    part = Totals(*(jnp.asarray(v, jnp.int32) for v in (1, 20_000_000, 20_000_000, 33, 1)))
    both = part + part
    assert int(both.weighted_whole) == 40_000_000
    np.testing.assert_allclose(both.weighted_tokens(jnp.float32), 40_000_000.66)
