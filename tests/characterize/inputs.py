"""Random updates for the tests: gaps with a heavy tail, holes in the mask, garbage where masked."""

import numpy as np

from triage_jax.characterize import Dump


def random_dump(seed=0, responses=12, tokens=300, step=1, per_token=False, dtype=np.float64):
    rng = np.random.default_rng(seed)
    shape = (responses, tokens)
    gap = rng.laplace(0.0, 0.2, shape) - 7.0 * (rng.random(shape) < 0.01)
    gap[rng.random(shape) < 0.01] = 0.0
    sampler = -rng.exponential(1.0, shape) - 2.0
    learner = np.minimum(sampler + gap, 0.0)
    mask = (np.arange(tokens) < rng.integers(1, tokens + 1, (responses, 1))) & (rng.random(shape) < 0.97)
    advantages = rng.normal(size=shape if per_token else responses)
    advantages[rng.random(advantages.shape) < 0.2] = 0.0
    learner, sampler = (
        np.where(mask, x, rng.choice([np.nan, np.inf, 5.0], shape)) for x in (learner, sampler)
    )
    return Dump(
        step=step,
        learner_logp=learner.astype(dtype),
        sampler_logp=sampler.astype(dtype),
        mask=mask,
        advantages=advantages.astype(dtype),
        source=f"seed {seed}",
    )
