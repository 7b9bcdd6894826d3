"""Every recorded exchange, played back through a socket, gets the reaction of the table; the document prints it."""

import json

import numpy as np
import pytest
from pytest_httpserver import HTTPServer

from tests.golden import shared_path
from tests.rollout.sglang import captures
from tests.rollout.sglang.captures import Capture, capture, load_all, played, react, recorded_sample, use
from tests.rollout.sglang.reactions import DOCUMENT, REACTIONS, STALE, Reaction, in_document, table
from triage_jax.rollout import Request, Sample, SamplingParams
from triage_jax.rollout.sglang.errors import (
    MESSAGE_LIMIT,
    RequestRefused,
    ServerGone,
    SglangError,
    StaleServer,
)
from triage_jax.rollout.sglang.reply import read_sample
from triage_jax.rollout.sglang.wire import check_request, parse_label


def row_of(recorded: Capture) -> Reaction:
    rows = [row for row in REACTIONS if row.covers(recorded.name)]
    assert len(rows) == 1, f"{recorded.name} is covered by {[row.answer for row in rows]}"
    return rows[0]


@pytest.mark.parametrize("recorded", load_all(), ids=lambda recorded: recorded.name)
def test_reaction(recorded: Capture, httpserver: HTTPServer) -> None:
    row = row_of(recorded)
    with played(httpserver, recorded) as url:
        result = react(url, recorded)
    httpserver.check()
    if isinstance(row.outcome, type):
        assert type(result) is row.outcome
        assert url in str(result)
        assert len(str(result)) < MESSAGE_LIMIT + 250
        return
    match row.outcome:
        case "sample" | "partial":
            assert_is_recorded(result, recorded, partial=row.outcome == "partial")
        case "true" | "false":
            assert result is (row.outcome == "true")
        case "done":
            assert not isinstance(result, SglangError | Sample)


def assert_is_recorded(result: object, recorded: Capture, *, partial: bool) -> None:
    assert isinstance(result, Sample), result
    ids, logprobs = recorded_sample(recorded)
    assert len(ids) > 0
    assert result.token_ids.tolist() == ids
    assert result.token_ids.dtype == np.int32
    np.testing.assert_array_equal(result.logprobs, logprobs)
    assert result.weight_versions.tolist() == [captures.ANY_VERSION] * len(ids)
    assert result.uid == "problem/0"
    assert result.finish_reason == recorded.meta["finish_reason"]["type"]
    assert partial == (result.finish_reason == "abort")


@pytest.mark.parametrize(
    "recorded",
    [recorded for recorded in load_all() if row_of(recorded).outcome in ("sample", "partial")],
    ids=lambda recorded: recorded.name,
)
def test_samples_of_weights_nobody_pushed(recorded: Capture, httpserver: HTTPServer) -> None:
    """With real labels, an exchange is a sample if every token is of a pushed version, else proof of a stale server."""
    with played(httpserver, recorded) as url:
        result = react(url, recorded, parse_label)
    assert type(result) is (StaleServer if STALE.covers(recorded.name) else Sample)


def test_the_small_set_shows_every_row() -> None:
    """A clone without the recordings beside it still plays one exchange per row."""
    small = {path.parent.name + "/" + path.stem for path in (captures.DATA / "sglang").glob("*/*.json")}
    missing = [row.answer for row in (*REACTIONS, STALE) if not any(map(row.covers, small))]
    assert not missing


@pytest.mark.skipif(
    shared_path("captures") is None,
    reason="runs with ../shared/captures; the copies in tests/data/sglang always do",
)
def test_all_recordings_are_there_and_the_copies_are_true() -> None:
    names = [recorded.name for recorded in load_all()]
    counts = {
        dialect: sum(name.startswith(dialect) for name in names)
        for dialect in (captures.SGLANG, captures.SGLANG_JAX, captures.VLLM)
    }
    assert counts == {captures.SGLANG: 190, captures.SGLANG_JAX: 23, captures.VLLM: 24}
    originals = {recorded.name: recorded for recorded in load_all()}
    for path in sorted((captures.DATA / "sglang").glob("*/*.json")):
        copy = captures.load(path)
        assert copy == originals[copy.name]


def test_document_prints_this_table() -> None:
    assert in_document(DOCUMENT.read_text()) == table()


SPANS = {
    "gen_across_plain_update": [(1, 60)],
    "gen_across_in_place_update": [(2, 8), (3, 52)],
    "gen_across_retract_update": [(3, 10), (4, 50)],
}


@pytest.mark.parametrize("name", SPANS)
def test_versions_of_tokens_across_a_refit(name: str) -> None:
    recorded = capture(name)
    expected = [version for version, count in SPANS[name] for _ in range(count)]
    assert read(recorded).weight_versions.tolist() == expected


@pytest.mark.parametrize(
    "name", ["gen_ids_logprob_default", "gen_across_pause_retract", "gen_aborted_nonstream"]
)
def test_weights_nobody_pushed_are_stale(name: str) -> None:
    with pytest.raises(StaleServer, match=r"weight_version: '(default|v-abort)'"):
        read(capture(name))


def test_unwanted_version_is_stale() -> None:
    """A label that parses is not enough where the caller admits only some versions."""
    recorded = capture("gen_across_in_place_update")
    with pytest.raises(StaleServer, match="'step-3'"):
        read(recorded, {"step-2": 2}.get)


def read(recorded: Capture, *version_of: object) -> Sample:
    body = json.loads(recorded.body("r" * 32))
    request = Request(uid="u", prompt_ids=recorded.prompt(), seed=0)
    return read_sample(body, request, recorded.sampling(), "r" * 32, captures.LIMITS, *version_of)


DEADLY_REQUESTS = ("err_ids_out_of_vocab", "err_empty_text_crash")
REFUSED_REQUESTS = (
    "err_empty_input_ids",
    "err_prompt_too_long",
    "err_prompt_equals_ctx",
    "err_prompt_plus_new_exceeds_ctx",
    "err_stream_error",
)


@pytest.mark.parametrize("name", [*DEADLY_REQUESTS, *REFUSED_REQUESTS])
def test_such_a_request_is_never_sent(name: str, httpserver: HTTPServer) -> None:
    """The ids that killed or annoyed the recorded server do not leave this process."""
    recorded = captures.load(captures.DATA / "sglang" / captures.SGLANG / f"{name}.json")
    assert (name in DEADLY_REQUESTS) == ("RemoteDisconnected" in recorded.client_error)
    given = recorded.payload
    ids = given.get("input_ids", [])  # a text that tokenises to nothing
    sampling = SamplingParams(max_new_tokens=given["sampling_params"]["max_new_tokens"])
    request = Request(uid="u", prompt_ids=tuple(ids), seed=0)
    with pytest.raises(RequestRefused, match="not sent"):
        check_request(request, sampling, captures.LIMITS)
    with pytest.raises(RequestRefused, match="not sent"):
        use(httpserver.url_for(""), lambda client: client.generate(request, sampling))
    assert not httpserver.log


def test_a_dead_server_is_gone_for_every_call(httpserver: HTTPServer) -> None:
    for name in ("err_ids_out_of_vocab", "ctl_after_drain"):
        dead = capture(name)
        for call in ("gen_ids_logprob_default", "w_disk_good", "ctl_pause_retract", "info_model_info"):
            asked = capture(call)
            with played(httpserver, Capture(name=call, request=asked.request, response=dead.response)) as url:
                assert type(react(url, asked)) is ServerGone
