"""The in-process engine: a jitted JAX sampler with a KV cache and serving numerics of its own."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import batched

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from triage_jax.model import (
    KVCache,
    ModelConfig,
    Numerics,
    Params,
    forward_cached,
    served,
    serving_params,
    step_logits,
)
from triage_jax.nvfp4.experts import check_count
from triage_jax.rollout.protocol import (
    Capabilities,
    Progress,
    Request,
    Sample,
    SamplingParams,
    refuse_truncated_distribution,
)
from triage_jax.rollout.sampling import draw, greedy, row_uniforms


@dataclass(frozen=True, kw_only=True)
class LocalEngineConfig:
    """Shapes of the in-process sampler; every (batch, prompt, length) bucket is compiled once."""

    batch_size: int = 256
    """Rows decoded together; more requests run in several batches, fewer are padded up"""
    prompt_bucket: int = 16
    """Prompts are left-padded to a multiple of this many tokens"""
    parallel_batches: int = 1
    """Batches decoded at the same time, each by a thread of its own: a small model leaves all but one core of a CPU
    idle. One at a time where the weights lie on several devices; the samples are the same"""

    def __post_init__(self) -> None:
        for name in ("batch_size", "prompt_bucket", "parallel_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; accepted: at least 1")


@struct.dataclass
class _State:
    """Carry of the decode loop."""

    step: Int[Array, ""]
    cache: KVCache
    done: Bool[Array, "B"]
    tokens: Int[Array, "B N"]
    logprobs: Float[Array, "B N"]
    lengths: Int[Array, "B"]


class LocalEngine:
    """Samples with the weights last handed to `update_weights`, quantised by the sampler's numerics once per refit."""

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        settings: LocalEngineConfig | None = None,
    ) -> None:
        """Raises ValueError where `numerics` have calibrated scales of experts that the model does not have."""
        check_count(numerics.expert_scopes, config.num_experts)
        self._config = config
        self._numerics = numerics
        self._settings = settings or LocalEngineConfig()
        self._weights: Params | None = None
        self._version = -1
        self._at_once = 1

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            logprobs_follow_temperature=True,
            deterministic=True,
            overlaps=False,
            description=f"local JAX sampler, {self._numerics.describe()}",
        )

    @property
    def weight_version(self) -> int:
        return self._version

    def update_weights(self, params: Params, version: int) -> None:
        arrays = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
        devices = max((len(array.devices()) for array in arrays), default=1)
        # On the devices of one host two programs with collectives wait for each other for ever.
        self._at_once = self._settings.parallel_batches if devices == 1 else 1
        if isinstance(params.layers, tuple):  # read from a quantised checkpoint
            self._weights = served(params, self._numerics)
        else:
            self._weights = jax.block_until_ready(_prepare(params, self._numerics))
        self._version = version

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[Sample]:
        """Draw one sample per request.

        Raises RuntimeError before the first `update_weights`, ValueError for an empty prompt, one that does not fit
        the model's context, token ids outside the vocabulary, or top-p/top-k truncation.
        """
        if self._weights is None:
            raise RuntimeError("the local engine has no weights yet: call update_weights first")
        refuse_truncated_distribution(sampling)
        if sampling.routed_experts and not self._config.num_experts:
            raise ValueError("routed_experts: the model is dense; accepted: False")
        for request in requests:
            self._check(request, sampling)
        samples: list[Sample] = []
        run = partial(self._run_batch, self._weights, sampling)
        for drawn in self._mapped(run, batched(requests, self._settings.batch_size)):
            samples += drawn
            if progress is not None:
                progress(len(samples), sum(len(sample.token_ids) for sample in samples))
        return samples

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._weights = None

    def _check(self, request: Request, sampling: SamplingParams) -> None:
        ids, limit = request.prompt_ids, self._config.max_position_embeddings
        if not ids:
            raise ValueError(f"request {request.uid}: the prompt is empty; at least one token is needed")
        if min(ids) < 0 or max(ids) >= self._config.vocab_size:
            raise ValueError(
                f"request {request.uid}: token ids from {min(ids)} to {max(ids)}; "
                f"accepted: 0 to {self._config.vocab_size - 1}"
            )
        if len(ids) + sampling.max_new_tokens > limit:
            raise ValueError(
                f"request {request.uid}: {len(ids)} prompt tokens + {sampling.max_new_tokens} new tokens; "
                f"the model's context holds {limit}"
            )

    def _mapped[T](
        self, run: Callable[[Sequence[Request]], T], batches: Iterable[Sequence[Request]]
    ) -> Iterator[T]:
        """`map` with as many threads as batches may be decoded at once; in the caller's own thread if that is one."""
        if self._at_once == 1:
            yield from map(run, batches)
            return
        with ThreadPoolExecutor(self._at_once) as pool:
            yield from pool.map(run, batches)

    def _run_batch(
        self, weights: Params, sampling: SamplingParams, requests: Sequence[Request]
    ) -> list[Sample]:
        rows, bucket = self._settings.batch_size, self._settings.prompt_bucket
        width = -(-max(len(request.prompt_ids) for request in requests) // bucket) * bucket
        tokens = np.zeros((rows, width), np.int32)
        valid = np.zeros((rows, width), bool)
        seeds = np.zeros(rows, np.uint32)
        for row in range(rows):
            # Rows past the last request repeat it: their samples are dropped, and no amax ever sees foreign values.
            request = requests[min(row, len(requests) - 1)]
            tokens[row, width - len(request.prompt_ids) :] = request.prompt_ids
            valid[row, width - len(request.prompt_ids) :] = True
            seeds[row] = request.seed & 0xFFFFFFFF
        state = _generate(
            weights,
            jnp.asarray(tokens),
            jnp.asarray(valid),
            jnp.asarray(seeds),
            config=self._config,
            numerics=self._numerics,
            limit=sampling.max_new_tokens,
            temperature=sampling.temperature,
            stop_ids=sampling.stop_ids or self._config.eos_token_ids,
        )
        drawn, logprobs, lengths, done = jax.device_get(
            (state.tokens, state.logprobs, state.lengths, state.done)
        )
        routes = None
        if sampling.routed_experts:
            routes = np.stack(jax.device_get(state.cache.routes), axis=2)
        return [
            Sample(
                uid=request.uid,
                token_ids=drawn[row, : lengths[row]],
                logprobs=logprobs[row, : lengths[row]],
                finish_reason="stop" if done[row] else "length",
                weight_versions=np.full(lengths[row], self._version, np.int32),
                # The last token drawn is never fed back; the prompt is padded on the left.
                routed_experts=None
                if routes is None
                else routes[row, width - len(request.prompt_ids) : width + lengths[row] - 1],
            )
            for row, request in enumerate(requests)
        ]


_prepare = jax.jit(serving_params, static_argnames="numerics")


@partial(jax.jit, static_argnames=("config", "numerics", "limit", "temperature", "stop_ids"))
def _generate(
    weights: Params,
    tokens: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    seeds: UInt32[Array, "B"],
    *,
    config: ModelConfig,
    numerics: Numerics,
    limit: int,
    temperature: float,
    stop_ids: tuple[int, ...],
) -> _State:
    """Prefill, then decode until every row has drawn a stop id or `limit` tokens."""
    rows, width = tokens.shape
    stops = jnp.asarray(stop_ids, jnp.int32)
    uniforms = jax.vmap(lambda step: row_uniforms(seeds, step))(jnp.arange(limit))

    def append(state: _State, logits: Float[Array, "V B"]) -> _State:
        """Draw the next token of every row that is not done."""
        if temperature > 0.0:
            token, logprob = draw(logits / temperature, uniforms[state.step])
        else:
            token, logprob = greedy(logits)
        alive = ~state.done
        token, logprob = jnp.where(alive, token, 0), jnp.where(alive, logprob, 0.0)
        # Not `.at[:, step].set`, a scatter, which is a loop on a CPU.
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=state.step, axis=1)
        return replace(
            state,
            step=state.step + 1,
            done=state.done | (alive & jnp.any(token[:, None] == stops[None, :], axis=1)),
            tokens=put(state.tokens, token[:, None]),
            logprobs=put(state.logprobs, logprob[:, None]),
            lengths=state.lengths + alive,
        )

    def decode(state: _State) -> _State:
        token = jax.lax.dynamic_index_in_dim(state.tokens, state.step - 1, axis=1)
        hidden, cache = forward_cached(weights, token, ~state.done[:, None], state.cache, config, numerics)
        return append(replace(state, cache=cache), step_logits(weights, hidden[:, 0], numerics))

    stages = _stages(limit)
    cache = KVCache.empty(config, rows, width, numerics.compute_dtype)
    hidden, cache = forward_cached(weights, tokens, valid, cache, config, numerics)
    state = _State(
        step=jnp.zeros((), jnp.int32),
        cache=cache,
        done=jnp.zeros(rows, bool),
        tokens=jnp.zeros((rows, limit), jnp.int32),
        logprobs=jnp.zeros((rows, limit), jnp.float32),
        lengths=jnp.zeros(rows, jnp.int32),
    )
    state = append(state, step_logits(weights, hidden[:, -1], numerics))
    for end in stages:
        # The last token drawn is never fed back, so its slot is not needed.
        state = replace(state, cache=state.cache.grown_to(width + end - 1))
        state = jax.lax.while_loop(
            lambda state, end=end: (state.step < end) & ~jnp.all(state.done), decode, state
        )
    return state


def _stages(limit: int) -> tuple[int, ...]:
    """Response lengths at which the cache grows: 32, 64, 128, ... up to `limit`.

    Attention reads every slot of the cache, filled or not. With one loop per doubling it reads at most twice what is
    filled, for the price of compiling the decode step once per stage.
    """
    ends = [32]
    while ends[-1] < limit:
        ends.append(2 * ends[-1])
    return (*(end for end in ends if end < limit), limit)
