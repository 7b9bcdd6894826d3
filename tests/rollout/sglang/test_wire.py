"""Bodies of the HTTP interface: what is sent, what is believed, and what each failure is called."""

import copy
import itertools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollout.sglang.captures import LIMITS, capture
from triage_jax.rollout import EngineError, Request, Sample, SamplingParams
from triage_jax.rollout.sglang import errors
from triage_jax.rollout.sglang.errors import (
    MESSAGE_LIMIT,
    BadResponse,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerGone,
    SglangError,
    StaleServer,
    Unauthorized,
    Unsupported,
    shorten,
)
from triage_jax.rollout.sglang.facts import read_facts
from triage_jax.rollout.sglang.reply import read_sample, read_scores
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


def body(
    ids: list[int], logprobs: list[float], finish: dict[str, Any], version: str = "step-4", **meta: Any
) -> dict[str, Any]:
    """A response as SGLang 0.5.23 words it."""
    return {
        "text": "",
        "output_ids": ids,
        "meta_info": {
            "id": RID,
            "finish_reason": finish,
            "prompt_tokens": 3,
            "weight_version": version,
            "output_token_logprobs": [[lp, i, None] for lp, i in zip(logprobs, ids, strict=True)],
            "completion_tokens": len(ids),
            "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
        }
        | meta,
    }


def read(answer: object, sampling: SamplingParams | None = None, limits: Limits = LIMITS) -> Sample:
    sampling = sampling or SamplingParams(max_new_tokens=3, stop_ids=(2,))
    return read_sample(answer, REQUEST, sampling, RID, limits, url=URL)


LENGTH = {"type": "length", "length": 3}
STOP = {"type": "stop", "matched": 2}
ABORT = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


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


@given(st.data())
def test_a_sound_response_is_read_back(data: st.DataObject) -> None:
    """Random ids, log-probabilities and version spans come back exactly; spans may be empty."""
    count = data.draw(st.integers(1, 12))
    ids = data.draw(st.lists(st.integers(0, 511).filter(lambda i: i != 2), min_size=count, max_size=count))
    floats = st.floats(-50.0, 0.0, width=32)
    logprobs = data.draw(st.lists(floats, min_size=count, max_size=count))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, count), max_size=3))), count]
    spans = [
        {"version": f"step-{number}", "start": start, "end": end}
        for number, (start, end) in enumerate(itertools.pairwise(cuts))
    ]
    answer = body(ids, logprobs, {"type": "length", "length": count}, weight_versions=spans)
    sample = read(answer, SamplingParams(max_new_tokens=count, stop_ids=(2,)))
    assert sample.token_ids.tolist() == ids
    assert sample.logprobs.tolist() == logprobs
    assert sample.weight_versions.tolist() == [
        number for number, span in enumerate(spans) for _ in range(span["end"] - span["start"])
    ]
    assert (sample.uid, sample.finish_reason) == ("problem/3", "length")


def test_dtypes_and_stop() -> None:
    sample = read(body([9, 2], [-0.5, 0.0], STOP))
    assert (sample.token_ids.dtype, sample.logprobs.dtype, sample.weight_versions.dtype) == (
        np.int32,
        np.float32,
        np.int32,
    )
    assert sample.finish_reason == "stop"
    assert sample.weight_versions.tolist() == [4, 4]


def test_a_stop_id_at_the_limit_completes_the_response() -> None:
    """SGLang calls it length; the in-process engine calls it stop."""
    assert read(body([9, 8, 2], [-1.0] * 3, LENGTH)).finish_reason == "stop"
    assert read(body([9, 8, 7], [-1.0] * 3, LENGTH)).finish_reason == "length"


def test_the_models_own_end_token_is_a_stop() -> None:
    """The server also stops at the ids of its generation config, which need not be among ours."""
    assert read(body([9, 0], [-1.0] * 2, {"type": "stop", "matched": 0})).finish_reason == "stop"


def test_a_server_without_spans_gives_its_one_label() -> None:
    answer = body([9, 8, 7], [-1.0] * 3, LENGTH, version="step-6")
    del answer["meta_info"]["weight_versions"]
    assert read(answer).weight_versions.tolist() == [6, 6, 6]


def test_aborted_with_and_without_tokens() -> None:
    partial = read(body([9], [-1.0], ABORT))
    assert (partial.finish_reason, partial.token_ids.tolist()) == ("abort", [9])
    queued = {
        "output_ids": [],
        "meta_info": {
            "id": RID,
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "weight_version": "default",
        },
    }
    nothing = read(queued)
    assert (nothing.finish_reason, len(nothing.token_ids), len(nothing.logprobs)) == ("abort", 0, 0)
    assert nothing.weight_versions.shape == (0,)


@pytest.mark.parametrize(("status", "kind"), [(400, RequestRefused), (503, ServerBusy), (500, ServerFailed)])
def test_an_abort_with_a_status_is_that_error(status: int, kind: type[SglangError]) -> None:
    answer = body([], [], {"type": "abort", "message": "The request queue is full.", "status_code": status})
    with pytest.raises(kind, match="The request queue is full"):
        read(answer)


def test_truncated_law_is_read_from_the_sampling_mask() -> None:
    recorded = capture("gen_sampled_mask_selected")
    answer = json.loads(recorded.body(RID))
    request = Request(uid="u", prompt_ids=recorded.prompt(), seed=0)
    sample = read_sample(answer, request, recorded.sampling(), RID, LIMITS, lambda label: 0, url=URL)
    # The truncated law gives each token more than the full softmax does.
    full = np.array([entry[0] for entry in recorded.meta["output_token_logprobs"]], np.float32)
    assert (sample.logprobs > full).all()
    assert sample.logprobs[0] == np.float32(-1.4729193449020386)


def _meta(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda answer: answer["meta_info"].__setitem__(name, value)


def _top(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda answer: answer.__setitem__(name, value)


def _without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda answer: answer["meta_info"].__delitem__(name)


def _logprob(value: object) -> Callable[[dict[str, Any]], None]:
    return lambda answer: answer["meta_info"]["output_token_logprobs"][1].__setitem__(0, value)


def _spans(*spans: tuple[object, object, object]) -> Callable[[dict[str, Any]], None]:
    return _meta("weight_versions", [{"version": v, "start": s, "end": e} for v, s, e in spans])


DAMAGE = {
    "no meta_info": (_top("meta_info", None), "meta_info"),
    "another request": (_meta("id", "f" * 32), "meta_info.id"),
    "no ids": (_top("output_ids", None), "output_ids"),
    "float id": (_top("output_ids", [9, 8.0, 7]), "output_ids: [1] is 8.0"),
    "boolean id": (_top("output_ids", [9, True, 7]), "output_ids: [1] is True"),
    "id outside": (_top("output_ids", [9, 8, 512]), "output_ids: [2] is 512; accepted: 0 to 511"),
    "negative id": (_top("output_ids", [9, 8, -1]), "output_ids: [2] is -1"),
    "fewer ids": (_top("output_ids", [9, 8]), "output_token_logprobs: 3 ids that are not the 2"),
    "other ids": (_top("output_ids", [9, 8, 6]), "output_token_logprobs: 3 ids that are not"),
    "none drawn": (_top("output_ids", []), "completion_tokens: 3; expected 0"),
    "no logprobs": (_without("output_token_logprobs"), "output_token_logprobs: missing"),
    "bare logprobs": (_meta("output_token_logprobs", [-1.0] * 3), "expected [logprob, id, text]"),
    "null logprob": (_logprob(None), "output_token_logprobs: [1] is None"),
    "nan logprob": (_logprob(math.nan), "output_token_logprobs: [1] is nan"),
    "infinite logprob": (_logprob(-math.inf), "output_token_logprobs: [1] is -inf"),
    "positive logprob": (
        _logprob(0.01),
        "output_token_logprobs: [1] is 0.01; accepted: finite and at most 0",
    ),
    "boolean logprob": (_logprob(False), "output_token_logprobs: [1] is False"),
    "text logprob": (_logprob("-1.0"), "output_token_logprobs: [1] is '-1.0'"),
    "count": (_meta("completion_tokens", 2), "completion_tokens: 2; expected 3"),
    "no count": (_without("completion_tokens"), "completion_tokens: None; expected 3"),
    "prompt count": (_meta("prompt_tokens", 4), "prompt_tokens: 4; expected 3"),
    "no finish": (_meta("finish_reason", None), "finish_reason: None"),
    "unknown finish": (_meta("finish_reason", {"type": "tool"}), "finish_reason: {'type': 'tool'}"),
    "wrong stop": (_meta("finish_reason", STOP), "finish_reason: matched 2, but the last token is 7"),
    "spans no list": (_meta("weight_versions", "step-4"), "weight_versions: no list"),
    "span no object": (_meta("weight_versions", ["step-4"]), "weight_versions: 'step-4'"),
    "span gap": (_spans(("step-4", 0, 1), ("step-5", 2, 3)), "weight_versions"),
    "span overlap": (_spans(("step-4", 0, 2), ("step-5", 1, 3)), "weight_versions"),
    "span backwards": (_spans(("step-4", 0, 3), ("step-5", 3, 2)), "weight_versions"),
    "span short": (_spans(("step-4", 0, 2)), "weight_versions: end at 2; expected 3"),
    "span long": (_spans(("step-4", 0, 4)), "weight_versions"),
    "span label": (_spans((4, 0, 3)), "weight_versions"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str) -> None:
    damage, field = DAMAGE[name]
    answer = body([9, 8, 7], [-1.0, -2.0, -3.0], copy.deepcopy(LENGTH))
    assert read(copy.deepcopy(answer)).finish_reason == "length"
    damage(answer)
    with pytest.raises(BadResponse, match=re.escape(field)) as caught:
        read(answer)
    assert str(caught.value).startswith(f"{URL}, request {RID}: ")


@pytest.mark.parametrize(
    ("ids", "finish", "message"),
    [
        ([9, 8], LENGTH, "length after 2 tokens; asked for 3"),
        ([9, 8, 7, 6], LENGTH, "4 tokens; asked for at most 3"),
        ([9, 2, 7], LENGTH, "goes on after the stop id 2 at position 1"),
        ([2, 9], ABORT, "goes on after the stop id 2 at position 0"),
        ([], LENGTH, "empty in a finished response"),
    ],
)
def test_ends_that_do_not_fit(ids: list[int], finish: dict[str, Any], message: str) -> None:
    with pytest.raises(BadResponse, match=re.escape(message)):
        read(body(ids, [-1.0] * len(ids), finish))


@pytest.mark.parametrize("answer", [None, [], "x", 1])
def test_no_object(answer: object) -> None:
    with pytest.raises(BadResponse, match="expected one object"):
        read(answer)


def test_stale_labels() -> None:
    with pytest.raises(StaleServer, match="'default'"):
        read(body([9, 8, 7], [-1.0] * 3, LENGTH, version="default"))
    answer = body([9, 8, 7], [-1.0] * 3, LENGTH)
    _spans(("step-4", 0, 2), ("default", 2, 3))(answer)
    with pytest.raises(StaleServer, match="'default'"):
        read(answer)


def test_scores_of_a_recorded_sequence() -> None:
    answer = json.loads(capture("gen_score_only_max0").body(RID))
    ids = (5, 17, 42, 99, 260)
    expected = np.array(
        [-7.582442283630371, -9.254110336303711, -8.471916198730469, -3.962754964828491], np.float32
    )
    np.testing.assert_array_equal(read_scores(answer, ids, RID, url=URL), expected)
    assert read_scores(answer, ids, RID, label="default", url=URL).shape == (4,)
    with pytest.raises(StaleServer, match="expected 'step-3'"):
        read_scores(answer, ids, RID, label="step-3", url=URL)
    with pytest.raises(BadResponse, match="input_token_logprobs"):
        read_scores(answer, (*ids[:-1], 261), RID, url=URL)
    answer["meta_info"]["input_token_logprobs"][2][0] = None
    with pytest.raises(BadResponse, match=re.escape("[2] is None")):
        read_scores(answer, ids, RID, url=URL)


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
