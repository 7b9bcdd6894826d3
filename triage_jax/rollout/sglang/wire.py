"""What is sent to an SGLang server (0.5.23): nothing that it would refuse, or that would kill it."""

import math
import re
from dataclasses import dataclass

import numpy as np

from triage_jax.rollout.protocol import Request, SamplingParams
from triage_jax.rollout.routing import RouteShape
from triage_jax.rollout.sglang.errors import RequestRefused
from triage_jax.rollout.sglang.status import Fields


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the server's model takes: ids below `vocab_size`, prompt and response within `context` tokens."""

    vocab_size: int
    context: int
    prompt: int | None = None
    """Longest prompt; None: what the context leaves"""
    routes: RouteShape | None = None
    """Of a mixture-of-experts model"""


def version_label(version: int) -> str:
    """Name under which the servers carry the weights of a version; raises ValueError below 0."""
    if version < 0:
        raise ValueError(f"version is {version}; accepted: 0 or more")
    return f"step-{version}"


def parse_label(label: str) -> int | None:
    """Version of a label; None for any other name, such as the "default" of a server that just started."""
    match = re.fullmatch(r"step-(0|[1-9][0-9]{0,8})", label)
    return int(match[1]) if match else None


def is_truncated(sampling: SamplingParams) -> bool:
    """Whether tokens are drawn from a renormalised part of the vocabulary."""
    return sampling.top_p != 1.0 or sampling.top_k != -1


def check_request(request: Request, sampling: SamplingParams, limits: Limits, *, url: str = "sglang") -> None:
    """Raise RequestRefused for what no server may be sent: some of it kills the server's whole process tree."""
    ids, room = request.prompt_ids, limits.context - sampling.max_new_tokens

    def accept(valid: bool, what: str) -> None:
        if not valid:
            raise RequestRefused(f"not sent: {what}", url=url, rid=request.uid)

    accept(len(ids) > 0, "the prompt is empty; at least one token is needed")
    for name, values in (("prompt_ids", ids), ("stop_ids", sampling.stop_ids)):
        check_ids(values, limits, name=name, url=url, rid=request.uid)
    accept(
        len(ids) <= room,
        f"{len(ids)} prompt tokens + {sampling.max_new_tokens} new tokens; the server's context holds {limits.context}",
    )
    accept(
        limits.prompt is None or len(ids) <= limits.prompt,
        f"{len(ids)} prompt tokens; the server accepts {limits.prompt}",
    )
    # Below 1e-6 the server goes greedy and reports the log-probabilities of temperature 1.
    greedy, hot = sampling.temperature == 0.0, 1e-6 <= sampling.temperature < math.inf
    accept(greedy or hot, f"temperature is {sampling.temperature}; accepted: 0 (greedy), or 1e-6 and above")
    accept(0.0 < sampling.top_p <= 1.0, f"top_p is {sampling.top_p}; accepted: above 0, at most 1")
    accept(
        sampling.top_k == -1 or sampling.top_k >= 1,
        f"top_k is {sampling.top_k}; accepted: -1 (all), or 1 and above",
    )
    accept(
        not sampling.routed_experts or limits.routes is not None,
        "routed_experts is asked of a dense model; accepted: False",
    )
    accept(0 <= request.seed < 2**63, f"seed is {request.seed}; accepted: 0 to 2^63 - 1")


def check_ids(ids: tuple[int, ...], limits: Limits, *, name: str, url: str, rid: str | None = None) -> None:
    """Raise RequestRefused unless all are integers of the vocabulary."""
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise RequestRefused(f"not sent: {name}[{position}] is {token!r}, no integer", url=url, rid=rid)
        if not 0 <= token < limits.vocab_size:
            what = f"not sent: {name}[{position}] is {token}; accepted: 0 to {limits.vocab_size - 1}"
            raise RequestRefused(what, url=url, rid=rid)


def generate_payload(request: Request, sampling: SamplingParams, rid: str) -> Fields:
    """Body of POST /generate for one sample.

    Every key that shapes the distribution is explicit: a missing one takes the server's --preferred-sampling-params.
    """
    payload: Fields = {
        "rid": rid,
        "input_ids": [int(token) for token in request.prompt_ids],
        "sampling_params": {
            "max_new_tokens": sampling.max_new_tokens,
            "min_new_tokens": 0,
            "temperature": float(sampling.temperature),
            "top_p": float(sampling.top_p),
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": [int(token) for token in sampling.stop_ids],
            # True would switch stop_token_ids off as well.
            "ignore_eos": False,
            "n": 1,
            "sampling_seed": request.seed,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_text_in_logprobs": False,
        "stream": False,
    }
    if sampling.routed_experts:
        payload |= {"return_routed_experts": True}
    if is_truncated(sampling):
        payload |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
    return payload


def score_payload(ids: tuple[int, ...], rid: str) -> Fields:
    """Body of POST /generate that draws nothing and returns the log-probability of each given token, at T = 1."""
    return {
        "rid": rid,
        "input_ids": [int(token) for token in ids],
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "return_text_in_logprobs": False,
        "stream": False,
    }


def spread_payload(ids: tuple[int, ...], temperature: float, rid: str) -> Fields:
    """Body of POST /generate that draws one token and asks for the eight likeliest at a temperature."""
    sampling: Fields = {"max_new_tokens": 1, "temperature": temperature, "top_p": 1.0, "top_k": -1}
    return score_payload(ids, rid) | {
        "sampling_params": sampling | {"min_p": 0.0, "ignore_eos": True},
        "logprob_start_len": -1,
        "top_logprobs_num": 8,
    }
