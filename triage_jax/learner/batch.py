"""From samples to the arrays of one update."""

from collections.abc import Sequence
from typing import Any, no_type_check

import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from triage_jax.rollout import Sample


@no_type_check  # leaves are also shapes, shardings or stacked micro-batches
@struct.dataclass
class RolloutBatch:
    """One update's responses, laid out as the sampler saw them: prompts left-padded, responses right-padded."""

    tokens: Int[Array, "B T"]
    """Prompt columns first, then the N response columns"""
    valid: Bool[Array, "B T"]
    mask: Bool[Array, "B N"]
    """Response tokens that enter the loss"""
    sampler_logp: Float[Array, "B N"]
    advantages: Float[Array, "B"]
    routes: Int[Array, "B T L k"] | None = None
    """Experts that the sampler's tokens went to, for the learner to follow; None: its own router decides"""


def pack_batch(
    prompts: Sequence[Sequence[int]],
    samples: Sequence[Sample],
    advantages: np.ndarray,
    usable: np.ndarray,
    *,
    prompt_width: int,
    response_width: int,
    replay_routing: bool = False,
) -> RolloutBatch:
    """Host arrays of fixed width for `samples[i]` drawn from `prompts[i]`.

    `usable[i]` False keeps the row (shapes stay fixed) and leaves it out of the loss. Raises ValueError if a prompt or
    response is wider than its columns, a sample's ids and log-probabilities differ in length, or its routes are to be
    replayed and missing.
    """
    rows = len(samples)
    # NumPy until they are placed on devices, which the fields' types do not tell.
    tokens: Any = np.zeros((rows, prompt_width + response_width), np.int32)
    valid: Any = np.zeros(tokens.shape, bool)
    mask: Any = np.zeros((rows, response_width), bool)
    sampler_logp: Any = np.zeros((rows, response_width), np.float32)
    for row, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        length = len(sample.token_ids)
        if len(prompt) > prompt_width or length > response_width or length != len(sample.logprobs):
            raise ValueError(
                f"sample {sample.uid}: prompt of {len(prompt)} tokens, {length} response ids and "
                f"{len(sample.logprobs)} log-probabilities; columns hold {prompt_width} + {response_width}"
            )
        start, end = prompt_width - len(prompt), prompt_width + length
        tokens[row, start:prompt_width] = prompt
        tokens[row, prompt_width:end] = sample.token_ids
        valid[row, start:end] = True
        mask[row, :length] = usable[row]
        sampler_logp[row, :length] = sample.logprobs
    routes: Any = (
        _pack_routes(prompts, samples, usable, prompt_width, tokens.shape) if replay_routing else None
    )
    used: Any = np.where(usable, advantages, 0.0).astype(np.float32)
    return RolloutBatch(
        tokens=tokens,
        valid=valid,
        mask=mask,
        sampler_logp=sampler_logp,
        advantages=used,
        routes=routes,
    )


def _pack_routes(
    prompts: Sequence[Sequence[int]],
    samples: Sequence[Sample],
    usable: np.ndarray,
    prompt_width: int,
    shape: tuple[int, int],
) -> np.ndarray:
    """int32 `[B, T, L, k]`; positions that nobody was routed at (padding, the last token) get experts 0 to k - 1."""
    given = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
    missing = [s.uid for s, used in zip(samples, usable, strict=True) if used and s.routed_experts is None]
    if missing or not given:
        raise ValueError(f"routed experts are missing, in sample {(missing or [samples[0].uid])[0]} first")
    layers, chosen = given[0].shape[1:]
    routes = np.broadcast_to(np.arange(chosen, dtype=np.int32), (*shape, layers, chosen)).copy()
    for row, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        if sample.routed_experts is not None:
            start = prompt_width - len(prompt)
            routes[row, start : start + len(sample.routed_experts)] = sample.routed_experts
    return routes
