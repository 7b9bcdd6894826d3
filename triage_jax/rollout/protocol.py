"""What every engine speaks: token ids in, token ids with per-token log-probabilities out. Never text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from triage_jax.model import Params

type FinishReason = Literal["stop", "length", "abort"]
type Progress = Callable[[int, int], None]
"""Called as `progress(samples_done, tokens_done)` while a generation runs."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample. The log-probabilities an engine returns belong to exactly this distribution."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy; the log-probabilities are then those of temperature 1."""
    top_p: float = 1.0
    top_k: int = -1
    stop_ids: tuple[int, ...] = ()
    routed_experts: bool = False
    """Also return which experts each token went to, for the learner to follow; mixture-of-experts models only"""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; accepted: at least 1")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; accepted: 0 (greedy) or a positive number")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sample to draw: prompt token ids, a seed of its own, and a name that comes back with the sample."""

    uid: str
    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One drawn response. `token_ids` includes the stop token, which has a log-probability like any other."""

    uid: str
    token_ids: np.ndarray
    """int32 `[n]`, n >= 1"""
    logprobs: np.ndarray
    """float32 `[n]`, nats, of the sampled tokens under the engine's own numerics"""
    finish_reason: FinishReason
    """stop: a stop id was drawn; length: the limit was hit, the response is truncated; abort: cut off by the engine"""
    weight_versions: np.ndarray
    """int32 `[n]`, version of the weights that drew each token; not constant where a refit fell into the response"""
    routed_experts: np.ndarray | None = None
    """int32 `[prompt + n - 1, L, k]`: experts of every position that was fed to the model, if they were asked for"""


class EngineError(RuntimeError):
    """The engine cannot go on: the message says which server, what it answered and what to do. Nothing is half done."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine's log-probabilities mean and what it can do; read by the trainer before the first step."""

    logprobs_follow_temperature: bool
    """True: log-softmax(logits / temperature); False: log-softmax(logits) whatever the temperature"""
    deterministic: bool
    """Same weights, requests and batch shape: the same bits"""
    overlaps: bool
    """`generate` may run in another thread while the caller computes, and `update_weights` may fall into it"""
    description: str


@runtime_checkable
class Engine(Protocol):
    """A sampler. Implementations never import the learner."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next sample is drawn with."""
        ...

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[Sample]:
        """Samples in the order of the requests; raises EngineError rather than return fewer."""
        ...

    def update_weights(self, params: Params, version: int) -> None:
        """Replace the weights; all later samples carry `version`."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counts and times since the last call, under keys of the form `engine/...`."""
        ...

    def close(self) -> None: ...


def refuse_truncated_distribution(sampling: SamplingParams) -> None:
    """Raise ValueError where the sampler would renormalise over a subset the learner does not know.

    Under top-p or top-k the sampler's log-probabilities belong to a truncated distribution, so that
    learner minus sampler is no numeric gap (objective.md §3).
    """
    if sampling.top_p != 1.0 or sampling.top_k != -1:
        raise ValueError(
            f"top_p={sampling.top_p}, top_k={sampling.top_k}: the sampler would renormalise over a part of the "
            "vocabulary and the gap to the learner would mean nothing; accepted: top_p=1.0 and top_k=-1"
        )
