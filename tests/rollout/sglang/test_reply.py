"""What is believed of a response of /generate: every check, one damage at a time."""

import copy
import itertools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollout.sglang.captures import LIMITS, capture
from triage_jax.rollout import Request, Sample, SamplingParams
from triage_jax.rollout.sglang.errors import (
    BadResponse,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    SglangError,
    StaleServer,
)
from triage_jax.rollout.sglang.reply import read_sample, read_scores
from triage_jax.rollout.sglang.wire import (
    Limits,
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
