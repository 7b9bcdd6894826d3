"""Bodies of an SGLang server's HTTP interface (0.5.23): what is sent, and what is believed of what comes back.

Pure functions. A request that would be refused, or would kill the server (an id outside the vocabulary does), is
never built; a response is a sample only after every check.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx
import numpy as np

from triage_jax.rollout.protocol import FinishReason, Request, Sample, SamplingParams
from triage_jax.rollout.sglang.errors import (
    BadResponse,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerGone,
    SglangError,
    StaleServer,
    Unauthorized,
)

type Json = bool | int | float | str | list["Json"] | dict[str, "Json"] | None

LOGPROB_SLACK = 1e-3
"""A log-probability may exceed 0 by this much: rounding of the server's log-softmax."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the server's model takes: ids below `vocab_size`, prompt and response within `context` tokens."""

    vocab_size: int
    context: int


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
    # Below 1e-6 the server goes greedy and reports the log-probabilities of temperature 1.
    greedy, hot = sampling.temperature == 0.0, 1e-6 <= sampling.temperature < math.inf
    accept(greedy or hot, f"temperature is {sampling.temperature}; accepted: 0 (greedy), or 1e-6 and above")
    accept(0.0 < sampling.top_p <= 1.0, f"top_p is {sampling.top_p}; accepted: above 0, at most 1")
    accept(
        sampling.top_k == -1 or sampling.top_k >= 1,
        f"top_k is {sampling.top_k}; accepted: -1 (all), or 1 and above",
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


def generate_payload(request: Request, sampling: SamplingParams, rid: str) -> dict[str, Json]:
    """Body of POST /generate for one sample.

    Every key that shapes the distribution is explicit: a missing one takes the server's --preferred-sampling-params.
    """
    payload: dict[str, Json] = {
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
    if is_truncated(sampling):
        payload |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
    return payload


def score_payload(ids: tuple[int, ...], rid: str) -> dict[str, Json]:
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


def spread_payload(ids: tuple[int, ...], temperature: float, rid: str) -> dict[str, Json]:
    """Body of POST /generate that draws one token and asks for the eight likeliest at a temperature."""
    sampling: dict[str, Json] = {"max_new_tokens": 1, "temperature": temperature, "top_p": 1.0, "top_k": -1}
    return score_payload(ids, rid) | {
        "sampling_params": sampling | {"min_p": 0.0, "ignore_eos": True},
        "logprob_start_len": -1,
        "top_logprobs_num": 8,
    }


def read_spread(body: Json, rid: str, *, url: str = "sglang") -> float:
    """Likeliest minus least likely of the top log-probabilities of the one token drawn, nats."""
    reply = _Reply(body, url=url, rid=rid)
    tops = reply.meta.get("output_top_logprobs")
    entries = tops[0] if isinstance(tops, list) and tops else None
    values = (
        [entry[0] for entry in entries if isinstance(entry, list) and entry]
        if isinstance(entries, list)
        else []
    )
    if len(values) < 2:
        raise reply.bad("output_top_logprobs", "missing or fewer than two entries")
    numbers = [reply.logprob("output_top_logprobs", i, value) for i, value in enumerate(values)]
    return max(numbers) - min(numbers)


def read_sample(
    body: Json,
    request: Request,
    sampling: SamplingParams,
    rid: str,
    limits: Limits,
    version_of: Callable[[str], int | None] = parse_label,
    *,
    url: str = "sglang",
) -> Sample:
    """The sample in a decoded 200 response.

    `logprobs` are log_softmax(logits / temperature) at the drawn tokens (temperature 1 where greedy), before top-p and
    top-k; with either of them, those of the truncated distribution. An aborted response comes back with what was
    drawn, maybe nothing. `version_of` gives the version of a label, None for weights that are not wanted.

    Raises BadResponse naming the field, StaleServer for unwanted weights, or what an abort's status code stands for.
    """
    reply = _Reply(body, url=url, rid=rid)
    finish = reply.finish()
    tokens = reply.token_ids(limits)
    drawn = len(tokens)
    logprobs = reply.logprobs(tokens) if drawn else np.zeros(0, np.float32)
    if drawn and is_truncated(sampling):
        logprobs = reply.sampling_logprobs(drawn)
    reply.expect_count("completion_tokens", drawn, required=finish != "abort")
    reply.expect_count("prompt_tokens", len(request.prompt_ids), required=False)
    finish = _checked_finish(reply, finish, tokens, sampling)
    return Sample(
        uid=request.uid,
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason=finish,
        weight_versions=reply.versions(drawn, version_of),
    )


def _checked_finish(
    reply: "_Reply", finish: FinishReason, tokens: np.ndarray, sampling: SamplingParams
) -> FinishReason:
    """The finish reason, once it fits the tokens."""
    drawn, limit = len(tokens), sampling.max_new_tokens
    if drawn > limit:
        raise reply.bad("output_ids", f"{drawn} tokens; asked for at most {limit}")
    stops = np.flatnonzero(np.isin(tokens, sampling.stop_ids))
    if len(stops) and stops[0] < drawn - 1:
        raise reply.bad("output_ids", f"goes on after the stop id {tokens[stops[0]]} at position {stops[0]}")
    if finish == "abort":
        return finish
    if drawn == 0:
        raise reply.bad("output_ids", "empty in a finished response")
    if finish == "stop":
        reply.expect_stop(int(tokens[-1]))
        return finish
    if len(stops):
        # The server looks at the length first; a response whose last token is a stop id is complete.
        return "stop"
    if drawn < limit:
        raise reply.bad("finish_reason", f"length after {drawn} tokens; asked for {limit}")
    return "length"


def read_scores(
    body: Json, ids: tuple[int, ...], rid: str, *, label: str | None = None, url: str = "sglang"
) -> np.ndarray:
    """float32 `[n - 1]`: log-probability of each of `ids` but the first given those before, at temperature 1."""
    reply = _Reply(body, url=url, rid=rid)
    pairs = reply.pairs("input_token_logprobs")
    if [token for _, token in pairs] != [int(token) for token in ids]:
        raise reply.bad("input_token_logprobs", f"ids are not the {len(ids)} that were sent")
    if label is not None and reply.meta.get("weight_version") != label:
        raise reply.stale(reply.meta.get("weight_version"), f"expected {label!r}")
    return np.array(
        [reply.logprob("input_token_logprobs", i, pairs[i][0]) for i in range(1, len(pairs))], np.float32
    )


class _Reply:
    """Typed look-ups in a decoded response; every miss is a BadResponse that names the field."""

    def __init__(self, body: Json, *, url: str, rid: str) -> None:
        self._url = url
        self._rid = rid
        if not isinstance(body, dict):
            raise self.bad("body", f"a {type(body).__name__}; expected one object")
        meta = body.get("meta_info")
        if not isinstance(meta, dict):
            raise self.bad("meta_info", "missing or no object; is this SGLang's /generate?")
        self.body = body
        self.meta = meta
        if meta.get("id") != rid:
            raise self.bad("meta_info.id", f"{meta.get('id')!r:.60}; expected the request's own")

    def bad(self, name: str, what: str) -> BadResponse:
        return BadResponse(f"{name}: {what}", url=self._url, rid=self._rid)

    def stale(self, label: Json, what: str) -> StaleServer:
        return StaleServer(f"weight_version: {label!r:.60}; {what}", url=self._url, rid=self._rid)

    def finish(self) -> FinishReason:
        reason = self.meta.get("finish_reason")
        kind = reason.get("type") if isinstance(reason, dict) else None
        if not isinstance(reason, dict) or kind not in ("stop", "length", "abort"):
            raise self.bad("finish_reason", f"{reason!r:.60}; accepted: type stop, length or abort")
        status = reason.get("status_code")
        if kind == "abort" and isinstance(status, int):
            raise error_of(status, str(reason.get("message")), url=self._url, rid=self._rid)
        return kind  # pyright: ignore[reportReturnType]

    def expect_stop(self, last: int) -> None:
        reason = self.meta["finish_reason"]
        matched = reason.get("matched") if isinstance(reason, dict) else None
        if isinstance(matched, int) and matched != last:
            raise self.bad("finish_reason", f"matched {matched}, but the last token is {last}")

    def expect_count(self, name: str, expected: int, *, required: bool) -> None:
        count = self.meta.get(name)
        if count != expected and (required or count is not None):
            raise self.bad(name, f"{count!r:.60}; expected {expected}")

    def token_ids(self, limits: Limits) -> np.ndarray:
        ids = self.body.get("output_ids")
        if not isinstance(ids, list):
            raise self.bad("output_ids", "missing or no list")
        for position, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < limits.vocab_size:
                what = f"[{position}] is {token!r:.60}; accepted: 0 to {limits.vocab_size - 1}"
                raise self.bad("output_ids", what)
        return np.array(ids, np.int32)

    def pairs(self, name: str) -> list[tuple[Json, Json]]:
        entries = self.meta.get(name)
        if not isinstance(entries, list):
            raise self.bad(name, "missing or no list")
        pairs: list[tuple[Json, Json]] = []
        for position, entry in enumerate(entries):
            if not isinstance(entry, list) or len(entry) < 2:
                raise self.bad(name, f"[{position}] is {entry!r:.60}; expected [logprob, id, text]")
            pairs.append((entry[0], entry[1]))
        return pairs

    def logprob(self, name: str, position: int, value: Json) -> float:
        """One value, finite and at most 0; a server whose weights hold NaN sends null."""
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and -math.inf < value <= LOGPROB_SLACK
        ):
            return float(value)
        raise self.bad(name, f"[{position}] is {value!r:.60}; accepted: finite and at most 0")

    def logprobs(self, tokens: np.ndarray) -> np.ndarray:
        name = "output_token_logprobs"
        pairs = self.pairs(name)
        if [token for _, token in pairs] != tokens.tolist():
            raise self.bad(name, f"{len(pairs)} ids that are not the {len(tokens)} of output_ids")
        return np.array([self.logprob(name, i, value) for i, (value, _) in enumerate(pairs)], np.float32)

    def sampling_logprobs(self, drawn: int) -> np.ndarray:
        name = "output_token_sampling_logprobs"
        values = self.meta.get(name)
        if not isinstance(values, list) or len(values) != drawn:
            raise self.bad(name, f"missing or not {drawn} values; top-p and top-k need SGLang 0.5.23")
        return np.array([self.logprob(name, i, value) for i, value in enumerate(values)], np.float32)

    def versions(self, drawn: int, version_of: Callable[[str], int | None]) -> np.ndarray:
        """int32 `[drawn]` from the spans of the response, or from its one label where a server sends no spans."""
        whole: Json = [{"version": self.meta.get("weight_version"), "start": 0, "end": drawn}]
        spans = self.meta.get("weight_versions", whole)
        if not isinstance(spans, list):
            raise self.bad("weight_versions", "no list")
        versions, position = np.zeros(drawn, np.int32), 0
        for span in spans:
            label, start, end = _span(span)
            if label is None or start != position or not start <= end <= drawn:
                raise self.bad(
                    "weight_versions", f"{span!r:.80}; expected a label, from {position} to at most {drawn}"
                )
            if end > start:
                version = version_of(label)
                if version is None:
                    raise self.stale(label, "not the weights that were pushed")
                versions[start:end] = version
            position = end
        if position != drawn:
            raise self.bad("weight_versions", f"end at {position}; expected {drawn}")
        return versions


def _span(span: Json) -> tuple[str | None, int, int]:
    if not isinstance(span, dict):
        return None, -1, -1
    label, start, end = span.get("version"), span.get("start"), span.get("end")
    if not isinstance(label, str) or not isinstance(start, int) or not isinstance(end, int):
        return None, -1, -1
    return label, start, end


def classify(
    status: int | None,
    body: bytes | None,
    error: Exception | None,
    *,
    url: str,
    rid: str | None = None,
) -> SglangError | None:
    """What an exchange means: None for a 200 that may be read on, else the error to raise.

    Either `error`, what the HTTP client raised, or `status` and `body` are given.
    """
    if error is not None:
        return _transport_error(error, url=url, rid=rid)
    if status is None:
        return ServerGone("no response", url=url, rid=rid)
    message, code = read_error(body or b"")
    if status == 200 and (body or b"").lstrip().startswith(b"data:"):
        if code is None:
            return BadResponse("body: an event stream that was not asked for", url=url, rid=rid)
        return error_of(code, message, url=url, rid=rid)
    return None if status == 200 else error_of(status, message, url=url, rid=rid)


def error_of(status: int, message: str, *, url: str, rid: str | None = None) -> SglangError:
    """The error an HTTP status stands for."""
    kind: type[SglangError]
    if status in (401, 403):
        kind, what = Unauthorized, "the key is missing, wrong, or that of the other routes"
    elif status in (408, 429, 503):
        kind, what = ServerBusy, "busy, starting, draining or paused"
    elif 400 <= status < 500:
        kind, what = RequestRefused, "refused"
    elif status >= 500:
        kind, what = ServerFailed, "failed on this request"
    else:
        kind, what = BadResponse, "unexpected status"
    return kind(f"HTTP {status}, {what}", url=url, rid=rid, message=message)


def read_error(body: bytes) -> tuple[str, int | None]:
    """Message and code in any of the server's error bodies: five JSON shapes, the first server-sent event, or text."""
    text = body.decode("utf-8", errors="replace").strip()
    if text.startswith("data:"):
        text = text.partition("\n")[0].removeprefix("data:").strip()
    try:
        shape: Json = json.loads(text)
    except ValueError:
        return text, None
    if not isinstance(shape, dict):
        return text, None
    inner = shape.get("error", shape)
    if isinstance(inner, str):
        return inner, None
    aborted = _abort_reason(shape)
    fields = aborted if aborted is not None else inner if isinstance(inner, dict) else shape
    message = fields.get("message", fields.get("detail"))
    code = fields.get("status_code" if aborted is not None else "code")
    return text if message is None else str(message), code if isinstance(code, int) else None


def _abort_reason(shape: Mapping[str, Json]) -> dict[str, Json] | None:
    meta = shape.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    return reason if isinstance(reason, dict) and reason.get("type") == "abort" else None


def _transport_error(error: Exception, *, url: str, rid: str | None) -> SglangError:
    """The error for what the HTTP client raised; its text is left out where it may quote what was sent."""
    kind = type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return ServerGone(f"no connection ({kind})", url=url, rid=rid)
    if isinstance(error, httpx.TimeoutException | TimeoutError):
        return ServerGone(f"no answer in time ({kind})", url=url, rid=rid)
    if isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):
        return ServerGone(
            f"connection dropped ({kind}); if the server died, its weights are lost", url=url, rid=rid
        )
    if isinstance(error, httpx.DecodingError):
        return BadResponse(f"body: cannot be decoded ({kind})", url=url, rid=rid)
    return RequestRefused(f"could not be sent ({kind})", url=url, rid=rid)
