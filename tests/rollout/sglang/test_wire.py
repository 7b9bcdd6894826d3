"""What is sent, what each failure is called, and which servers are refused."""

import math
import re
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollout.sglang.captures import LIMITS
from triage_jax.rollout import EngineError, Request, SamplingParams
from triage_jax.rollout.sglang import errors
from triage_jax.rollout.sglang.errors import (
    MESSAGE_LIMIT,
    BadResponse,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerGone,
    SglangError,
    Unauthorized,
    Unsupported,
    shorten,
)
from triage_jax.rollout.sglang.facts import read_facts
from triage_jax.rollout.sglang.status import classify, read_error
from triage_jax.rollout.sglang.wire import (
    Limits,
    check_request,
    generate_payload,
    parse_label,
    score_payload,
    version_label,
)

URL, RID = "http://sampler:1", "0123456789abcdef0123456789abcdef"
REQUEST = Request(uid="problem/3", prompt_ids=(5, 17, 42), seed=2**40 + 1)


def test_payload_names_everything_that_shapes_the_distribution() -> None:
    sampling = SamplingParams(max_new_tokens=9, temperature=0.7, stop_ids=(2, 7))
    assert generate_payload(REQUEST, sampling, RID) == {
        "rid": RID,
        "input_ids": [5, 17, 42],
        "sampling_params": {
            "max_new_tokens": 9,
            "min_new_tokens": 0,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": [2, 7],
            "ignore_eos": False,
            "n": 1,
            "sampling_seed": 2**40 + 1,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_text_in_logprobs": False,
        "stream": False,
    }


@pytest.mark.parametrize(("top_p", "top_k"), [(0.9, -1), (1.0, 20), (0.9, 20)])
def test_truncation_asks_for_the_law_that_was_sampled(top_p: float, top_k: int) -> None:
    payload = generate_payload(REQUEST, SamplingParams(max_new_tokens=1, top_p=top_p, top_k=top_k), RID)
    assert payload["return_sampling_mask"] is True
    assert payload["sampling_logprobs_mode"] == "selected"


def test_a_score_draws_nothing() -> None:
    payload = score_payload((1, 2), RID)
    assert payload["sampling_params"] == {"max_new_tokens": 0, "temperature": 0.0}
    assert payload["logprob_start_len"] == 0


@pytest.mark.parametrize(
    ("ids", "sampling", "seed", "message"),
    [
        ((), {}, 0, "the prompt is empty"),
        ((1, 512), {}, 0, "prompt_ids[1] is 512; accepted: 0 to 511"),
        ((-1,), {}, 0, "prompt_ids[0] is -1"),
        ((True,), {}, 0, "prompt_ids[0] is True, no integer"),
        ((1,), {"stop_ids": (600,)}, 0, "stop_ids[0] is 600"),
        ((1,) * 505, {}, 0, "505 prompt tokens + 8 new tokens; the server's context holds 512"),
        ((1,), {"temperature": 1e-7}, 0, "temperature is 1e-07; accepted: 0 (greedy), or 1e-6 and above"),
        ((1,), {"top_p": 0.0}, 0, "top_p is 0.0; accepted: above 0, at most 1"),
        ((1,), {"top_p": 1.5}, 0, "top_p is 1.5"),
        ((1,), {"top_p": math.nan}, 0, "top_p is nan"),
        ((1,), {"top_k": 0}, 0, "top_k is 0; accepted: -1 (all), or 1 and above"),
        ((1,), {}, -1, "seed is -1; accepted: 0 to 2^63 - 1"),
        ((1,), {}, 2**63, "seed is 9223372036854775808"),
    ],
)
def test_never_sent(ids: tuple[int, ...], sampling: dict[str, Any], seed: int, message: str) -> None:
    request = Request(uid="problem/3", prompt_ids=ids, seed=seed)
    with pytest.raises(RequestRefused, match=re.escape(f"request problem/3: not sent: {message}")):
        check_request(request, SamplingParams(max_new_tokens=8, **sampling), LIMITS, url=URL)


def test_the_longest_request_is_sent() -> None:
    request = Request(uid="u", prompt_ids=(511,) * 504, seed=2**63 - 1)
    check_request(request, SamplingParams(max_new_tokens=8, temperature=0.0), LIMITS)


@given(st.integers(0, 10**9 - 1))
def test_label_of_a_version_reads_back(version: int) -> None:
    assert parse_label(version_label(version)) == version


@pytest.mark.parametrize(
    "label", ["default", "step-", "step-01", "step--1", "step-1\n", "Step-1", "step-1.0", ""]
)
def test_foreign_labels(label: str) -> None:
    assert parse_label(label) is None


def test_negative_version_has_no_label() -> None:
    with pytest.raises(ValueError, match="version is -1"):
        version_label(-1)


SHAPES = {
    b'{"error": {"message": "too long"}}': ("too long", None),
    b'{"error": "Unauthorized"}': ("Unauthorized", None),
    b'{"object": "error", "message": "bad", "type": "503", "param": null, "code": 503}': ("bad", 503),
    b'{"detail": "Not Found"}': ("Not Found", None),
    b'{"success": false, "message": "no such path"}': ("no such path", None),
    b'data: {"error": {"message": "late", "code": 400, "retryable": false}}\n\ndata: [DONE]\n\n': (
        "late",
        400,
    ),
    b"Flush cache failed.\n": ("Flush cache failed.", None),
    b"": ("", None),
    b"\xff\xfe{": ("\ufffd\ufffd{", None),
    b"[1]": ("[1]", None),
    b'{"other": 1}': ('{"other": 1}', None),
}


@pytest.mark.parametrize("content", SHAPES)
def test_error_shapes(content: bytes) -> None:
    assert read_error(content) == SHAPES[content]


STATUSES = {
    401: Unauthorized, 403: Unauthorized,
    400: RequestRefused, 404: RequestRefused, 405: RequestRefused, 413: RequestRefused, 422: RequestRefused,
    408: ServerBusy, 429: ServerBusy, 503: ServerBusy,
    500: ServerFailed, 502: ServerFailed, 504: ServerFailed,
    204: BadResponse, 302: BadResponse,
}  # fmt: skip


@pytest.mark.parametrize("status", STATUSES)
def test_statuses(status: int) -> None:
    failure = classify(status, b'{"error": {"message": "words"}}', None, url=URL, rid=RID)
    assert type(failure) is STATUSES[status]
    assert str(failure).startswith(f"{URL}, request {RID}: HTTP {status}")
    assert str(failure).endswith('the server said "words"')
    assert (failure.url, failure.rid, failure.message) == (URL, RID, "words")


def test_200_goes_on() -> None:
    assert classify(200, b"", None, url=URL) is None
    assert classify(200, b'{"success": false}', None, url=URL) is None


TRANSPORT = {
    httpx.ConnectError("refused"): ServerGone,
    httpx.ConnectTimeout(""): ServerGone,
    httpx.ReadTimeout(""): ServerGone,
    TimeoutError(): ServerGone,
    httpx.ReadError(""): ServerGone,
    httpx.WriteError(""): ServerGone,
    httpx.RemoteProtocolError("Server disconnected"): ServerGone,
    httpx.DecodingError("zip"): BadResponse,
    httpx.LocalProtocolError("Illegal header value b'Bearer sk-1'"): RequestRefused,
    httpx.UnsupportedProtocol(""): RequestRefused,
}


@pytest.mark.parametrize("error", TRANSPORT, ids=lambda error: type(error).__name__)
def test_transport_errors(error: Exception) -> None:
    failure = classify(None, None, error, url=URL, rid=RID)
    assert type(failure) is TRANSPORT[error]
    assert type(error).__name__ in str(failure)
    assert "sk-1" not in str(failure)


def test_what_may_be_retried() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SglangError)
    ]
    assert {kind for kind in kinds if kind.retryable} == {ServerBusy, ServerFailed, ServerGone}
    assert all(issubclass(kind, EngineError) for kind in kinds)


@given(st.text(max_size=600))
def test_messages_are_short_and_on_one_line(message: str) -> None:
    short = shorten(message)
    assert len(short) <= MESSAGE_LIMIT
    assert len(short.splitlines()) <= 1
    assert short == " ".join(message.split()) or short.endswith("...")


def facts_of(**changes: object) -> dict[str, Any]:
    return {
        "version": "0.5.23",
        "max_req_input_len": 506,
        "dtype": "bfloat16",
        "weight_version": "step-2",
    } | changes


def test_facts() -> None:
    facts = read_facts(facts_of(kv_cache_dtype="auto", quantization="modelopt_fp4"), url=URL)
    assert facts.description == "SGLang 0.5.23, dtype bfloat16, quantization modelopt_fp4"
    assert facts.weight_version == "step-2"
    assert not facts.deterministic
    assert read_facts(facts_of(enable_deterministic_inference=True), url=URL).deterministic
    assert read_facts(facts_of(version="0.10.0.dev3"), url=URL).version == "0.10.0.dev3"


def test_limits_are_the_narrower_ones() -> None:
    """A context of 512: the server shortens to 511 - prompt - 1 new tokens and refuses prompts of 506."""
    facts = read_facts(facts_of(), url=URL)
    assert (facts.context, facts.prompt) == (510, 505)
    assert facts.within(LIMITS) == Limits(vocab_size=512, context=510, prompt=505)
    assert facts.within(Limits(vocab_size=512, context=64, prompt=32)) == Limits(
        vocab_size=512, context=64, prompt=32
    )


def test_longest_prompt() -> None:
    limits = Limits(vocab_size=512, context=510, prompt=505)
    check_request(Request(uid="u", prompt_ids=(1,) * 505, seed=0), SamplingParams(max_new_tokens=5), limits)
    with pytest.raises(RequestRefused, match="506 prompt tokens; the server accepts 505"):
        check_request(
            Request(uid="u", prompt_ids=(1,) * 506, seed=0), SamplingParams(max_new_tokens=1), limits
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": None}, "version None; accepted: SGLang 0.5.23 or later"),
        ({"version": "0.5.22"}, "version '0.5.22'"),
        ({"version": "main"}, "version 'main'"),
        ({"preferred_sampling_params": '{"top_p": 0.9}'}, "preferred_sampling_params"),
        ({"watermark_default_enabled": True}, "watermark_default_enabled"),
        ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm 'EAGLE'"),
        ({"max_req_input_len": None}, "max_req_input_len"),
    ],
)
def test_unsupported_servers(changes: dict[str, object], message: str) -> None:
    with pytest.raises(Unsupported, match=re.escape(message)):
        read_facts(facts_of(**changes), url=URL)
