"""A fixed sequence that both sides score after each refit: the first place where broken weights show."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from triage_jax.model import ModelConfig, Numerics, Params, forward, head_of, token_logprobs


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """Token ids, and the learner's log-probability of each but the first at temperature 1, nats."""

    ids: tuple[int, ...]
    logprobs: np.ndarray

    def gap(self, server: np.ndarray) -> np.ndarray:
        """Learner minus server, per token."""
        return self.logprobs - server


def make_probe(params: Params, config: ModelConfig, numerics: Numerics, length: int) -> Probe:
    """The learner's side under `numerics`. The ids are random but the same in every run; none is drawn from the model.

    Improbable tokens are where numerics differ most, so this gap is larger than that of sampled text.
    """
    length = min(length, config.max_position_embeddings - 1)
    ids = np.random.default_rng(20).integers(0, config.vocab_size, length)
    scores = _score(params, jnp.asarray(ids[None], jnp.int32), config, numerics)
    return Probe(ids=tuple(ids.tolist()), logprobs=np.asarray(scores, np.float32))


@partial(jax.jit, static_argnames=("config", "numerics"))
def _score(
    params: Params, tokens: Int[Array, "1 T"], config: ModelConfig, numerics: Numerics
) -> Float[Array, "T-1"]:
    hidden = forward(params, tokens, jnp.ones(tokens.shape, bool), config, numerics)
    return token_logprobs(hidden[:, :-1], head_of(params), tokens[:, 1:]).logp[0]
