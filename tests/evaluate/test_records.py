"""Samples on disk: what a crash leaves, what is refused."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triage_jax.evaluate.records import Record, RecordError, RecordFile, read_records, rewrite

RECORD = Record(
    problem="gsm8k:3",
    sample=2,
    seed=7,
    finish="stop",
    tokens=11,
    status="right",
    answer="18",
    response="so \\boxed{18}\u2028\n\ud7ff é",
)


def write(path, *records):
    file = RecordFile(path, lambda _: None)
    for record in records:
        file.append(record)
    file.close()


def test_round_trip(tmp_path):
    path = tmp_path / "samples.jsonl"
    records = [RECORD, replace(RECORD, sample=3, status="no_answer", answer=None, response=None)]
    write(path, *records)
    assert list(read_records(path)) == records
    assert RECORD.benchmark == "gsm8k"
    assert RECORD.right


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_any_cut_leaves_the_whole_lines(tmp_path_factory, place):
    path = tmp_path_factory.mktemp("cut") / "samples.jsonl"
    records = [replace(RECORD, sample=n) for n in range(3)]
    write(path, *records)
    content = path.read_bytes()
    cut = place % (len(content) + 1)
    path.write_bytes(content[:cut])
    whole = content[:cut].count(b"\n")
    seen = []
    file = RecordFile(path, seen.append)
    assert seen == records[:whole]
    assert file.repaired == cut - len(path.read_bytes())
    for record in records[whole:]:
        file.append(record)
    file.close()
    assert path.read_bytes() == content


def test_zeros_that_a_power_cut_left_are_cut_off(tmp_path):
    path = tmp_path / "samples.jsonl"
    write(path, RECORD)
    path.write_bytes(path.read_bytes() + bytes(100))
    write(path, replace(RECORD, sample=4))
    assert [record.sample for record in read_records(path)] == [2, 4]


GOOD = json.dumps(RECORD.__dict__)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, "{", GOOD], ":2: not JSON"),
        (["[1]"], ":1: not a sample"),
        ([json.dumps({"problem": "a:1"})], ":1: not a sample"),
        ([GOOD.replace('"right"', '"fine"')], ":1: status 'fine'; accepted: right"),
    ],
)
def test_errors_name_file_and_line(tmp_path, lines, message):
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(RecordError, match=re.escape(str(path)) + message):
        RecordFile(path, lambda _: None)


def test_rewrite_is_all_or_nothing(tmp_path):
    path = tmp_path / "samples.jsonl"
    write(path, RECORD, replace(RECORD, sample=3))
    before = path.read_bytes()

    def failing(record):
        if record.sample == 3:
            raise RuntimeError
        return replace(record, status="wrong")

    with pytest.raises(RuntimeError):
        rewrite(path, failing)
    assert path.read_bytes() == before
    rewrite(path, lambda record: replace(record, status="wrong"))
    assert [record.status for record in read_records(path)] == ["wrong", "wrong"]
