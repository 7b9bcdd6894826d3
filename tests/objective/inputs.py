"""Batches for the objective's tests."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from triage_jax.objective import TokenBatch, triage_loss


def _loss(logp, batch, config, totals=None, weights=None):
    return triage_loss(logp, batch, config, totals, weights)[0]


loss_and_grad = jax.jit(jax.value_and_grad(_loss), static_argnums=2)
with_metrics = jax.jit(triage_loss, static_argnums=2)


def one_row(gap, advantage=-1.0, mask=None, dtype=np.float32):
    """A batch of one response whose sampler is uniform: old_logp = gap, sampler_logp = 0."""
    gap = jnp.asarray(gap, dtype)[None]
    mask = jnp.ones(gap.shape, bool) if mask is None else jnp.asarray(mask, bool)[None]
    return TokenBatch(gap, jnp.zeros_like(gap), jnp.asarray(advantage, dtype)[None], mask)


def random_batch(seed, responses=8, tokens=200, dtype=np.float32, per_token=False):
    """Live log-probabilities and a batch with holes, an empty response, a zero advantage and deep gaps."""
    rng = np.random.default_rng(seed)
    shape = (responses, tokens)
    sampler = -rng.exponential(1.0, shape)
    gap = rng.laplace(-0.02, 0.2, shape) + rng.normal(-0.3, 0.5, (responses, 1))
    gap = np.where(rng.random(shape) < 0.01, -8.0, gap)
    old = sampler + gap
    live = old + rng.normal(0.0, 0.15, shape)
    advantages = rng.normal(size=shape if per_token else responses)
    advantages[0] = 0.0
    mask = (np.arange(tokens) < rng.integers(1, tokens + 1, (responses, 1))) & (rng.random(shape) < 0.95)
    mask[1] = False
    as_array = partial(jnp.asarray, dtype=dtype)
    batch = TokenBatch(as_array(old), as_array(sampler), as_array(advantages), jnp.asarray(mask))
    return as_array(live), batch


def rows(tree, chosen):
    """The given rows of every array."""
    return jax.tree.map(lambda x: x[chosen], tree)
