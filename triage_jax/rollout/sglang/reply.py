"""What is believed of a 200 response of SGLang's /generate: a sample only after every check."""

import math
from collections.abc import Callable

import numpy as np

from triage_jax.rollout.protocol import FinishReason, Request, Sample, SamplingParams
from triage_jax.rollout.routing import RoutingError, decode_routes
from triage_jax.rollout.sglang.errors import BadResponse, StaleServer
from triage_jax.rollout.sglang.status import error_of
from triage_jax.rollout.sglang.wire import Limits, is_truncated, parse_label

LOGPROB_SLACK = 1e-3
"""A log-probability may exceed 0 by this much: rounding of the server's log-softmax."""


def read_sample(
    body: object,
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
        routed_experts=reply.routes(len(request.prompt_ids) + drawn - 1, sampling, limits),
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
    body: object,
    ids: tuple[int, ...],
    rid: str,
    *,
    vocab_size: int | None = None,
    label: str | None = None,
    url: str = "sglang",
) -> np.ndarray:
    """float32 `[n - 1]`: log-probability of each of `ids` but the first given those before, at temperature 1.

    Servers (0.5.23) report a prompt's token `vocab_size` - 1 as 0, with the right log-probability.
    """
    reply = _Reply(body, url=url, rid=rid)
    pairs = reply.pairs("input_token_logprobs")
    last = None if vocab_size is None else vocab_size - 1
    if len(pairs) != len(ids) or any(
        token != sent and not (sent == last and token == 0)
        for (_, token), sent in zip(pairs, map(int, ids), strict=True)
    ):
        raise reply.bad("input_token_logprobs", f"ids are not the {len(ids)} that were sent")
    if label is not None and reply.meta.get("weight_version") != label:
        raise reply.stale(reply.meta.get("weight_version"), f"expected {label!r}")
    return np.array(
        [reply.logprob("input_token_logprobs", i, pairs[i][0]) for i in range(1, len(pairs))], np.float32
    )


def read_spread(body: object, rid: str, *, url: str = "sglang") -> float:
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


class _Reply:
    """Typed look-ups in a decoded response; every miss is a BadResponse that names the field."""

    def __init__(self, body: object, *, url: str, rid: str) -> None:
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

    def stale(self, label: object, what: str) -> StaleServer:
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

    def pairs(self, name: str) -> list[tuple[object, object]]:
        entries = self.meta.get(name)
        if not isinstance(entries, list):
            raise self.bad(name, "missing or no list")
        pairs: list[tuple[object, object]] = []
        for position, entry in enumerate(entries):
            if not isinstance(entry, list) or len(entry) < 2:
                raise self.bad(name, f"[{position}] is {entry!r:.60}; expected [logprob, id, text]")
            pairs.append((entry[0], entry[1]))
        return pairs

    def logprob(self, name: str, position: int, value: object) -> float:
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

    def routes(self, positions: int, sampling: SamplingParams, limits: Limits) -> np.ndarray | None:
        """int32 `[positions, L, k]` where routes were asked for."""
        text = self.meta.get("routed_experts")
        if not sampling.routed_experts or limits.routes is None:
            return None
        if text is None and self.finish() == "abort":
            return None
        try:
            return decode_routes(text, positions, limits.routes)
        except RoutingError as error:
            raise self.bad("routed_experts", str(error)) from None

    def versions(self, drawn: int, version_of: Callable[[str], int | None]) -> np.ndarray:
        """int32 `[drawn]` from the spans of the response, or from its one label where a server sends no spans."""
        whole: object = [{"version": self.meta.get("weight_version"), "start": 0, "end": drawn}]
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


def _span(span: object) -> tuple[str | None, int, int]:
    if not isinstance(span, dict):
        return None, -1, -1
    label, start, end = span.get("version"), span.get("start"), span.get("end")
    if not isinstance(label, str) or not isinstance(start, int) or not isinstance(end, int):
        return None, -1, -1
    return label, start, end
