"""A fixed sequence that both sides score after each refit: the first place where broken weights show."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from triage_jax.model import ModelConfig, Numerics, Params, forward, head_of, logits_of, token_logprobs


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """Token ids, and the learner's log-probability of each but the first at temperature 1, nats."""

    ids: tuple[int, ...]
    logprobs: np.ndarray

    def gap(self, server: np.ndarray) -> np.ndarray:
        """Learner minus server, per token."""
        return self.logprobs - server


def make_probe(params: Params, config: ModelConfig, numerics: Numerics, length: int) -> Probe:
    """The learner's side under `numerics`, of ids that the learner itself draws, with the same noise at every call.

    Of random ids the gap would be mostly rounding noise: two correct BF16 forward passes differ by 0.02 nats where
    log-probabilities are near -8, and by a tenth of that on sampled text.
    """
    length = min(length, config.max_position_embeddings - 1)
    ids = _draw(params, config, numerics, length)
    scores = _score(params, ids, config, numerics)
    return Probe(ids=tuple(ids[0].tolist()), logprobs=np.asarray(scores, np.float32))


@partial(jax.jit, static_argnames=("config", "numerics", "length"))
def _draw(params: Params, config: ModelConfig, numerics: Numerics, length: int) -> Int[Array, "1 T"]:
    # Without the last id of the vocabulary, which a server (0.5.23) reports as 0 among a prompt's tokens.
    noise = jax.random.gumbel(jax.random.key(20), (length, config.vocab_size - 1))

    def step(at: Array, ids: Array) -> Array:
        hidden = forward(params, ids, jnp.ones(ids.shape, bool), config, numerics)
        logits = logits_of(params, lax.dynamic_index_in_dim(hidden[0], at, keepdims=False), numerics)
        return ids.at[0, at + 1].set(jnp.argmax(logits[:-1] + noise[at]))

    ids = jnp.zeros((1, length), jnp.int32).at[0, 0].set(jnp.argmax(noise[-1]))
    return lax.fori_loop(0, length - 1, step, ids)


@partial(jax.jit, static_argnames=("config", "numerics"))
def _score(
    params: Params, tokens: Int[Array, "1 T"], config: ModelConfig, numerics: Numerics
) -> Float[Array, "T-1"]:
    hidden = forward(params, tokens, jnp.ones(tokens.shape, bool), config, numerics)
    return token_logprobs(hidden[:, :-1], head_of(params), tokens[:, 1:]).logp[0]
