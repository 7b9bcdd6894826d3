"""Counts, scores and tables from made-up records; how a response is scored."""

import json
from pathlib import Path

import pytest

from triage_jax.evaluate.benchmarks import Benchmark
from triage_jax.evaluate.records import Record, RecordError
from triage_jax.evaluate.scores import make_result, markdown, problem_rows, to_json
from triage_jax.evaluate.scoring import Scorer
from triage_jax.evaluate.tally import Tally
from triage_jax.tasks.protocol import Problem


def benchmark(name, count, *, rows=None, matching="math"):
    problems = [Problem("?", "18", f"{name}:{n}") for n in range(1, count + 1)]
    return Benchmark(
        name=name,
        file=Path(f"{name}.jsonl"),
        problems=problems,
        rows=rows or count,
        sha256="0",
        matching=matching,
    )


def record(uid, sample, status, *, tokens=10, finish="stop"):
    return Record(
        problem=uid,
        sample=sample,
        seed=0,
        finish=finish,
        tokens=tokens,
        status=status,
        answer=None,
        response=None,
    )


BENCHMARKS = [benchmark("gsm8k", 3, rows=1319), benchmark("aime24", 1)]
RECORDS = [
    *(record("gsm8k:1", s, "right") for s in range(2)),
    *(record("gsm8k:2", s, status) for s, status in enumerate(("right", "timeout"))),
    record("gsm8k:3", 0, "no_answer", tokens=100, finish="length"),
    record("gsm8k:3", 1, "guarded"),
    *(record("aime24:1", s, status) for s, status in enumerate(("error", "wrong"))),
]


def tally_of(records):
    tally = Tally(BENCHMARKS, 2)
    tally.add_all(records)
    return tally


def test_scores_by_hand():
    result = make_result(BENCHMARKS, tally_of(RECORDS))
    gsm, aime = result.scores
    assert (gsm.accuracy.value, gsm.pass_at[2].value) == (pytest.approx(0.5), pytest.approx(2 / 3))
    assert gsm.pass_at[1] == gsm.accuracy
    assert gsm.statuses == {
        "right": 3, "wrong": 0, "no_answer": 1, "guarded": 1, "timeout": 1, "error": 0,
    }  # fmt: skip
    assert (gsm.truncated, gsm.mean_tokens) == (1, pytest.approx(25.0))
    assert (aime.accuracy.value, aime.statuses["error"]) == (0.0, 1)
    assert result.missing == 0
    assert result.mean is not None
    assert result.mean.value == pytest.approx(0.25)
    assert json.loads(to_json(result))["scores"][0]["pass_at"]["2"]["value"] == pytest.approx(2 / 3)


def test_the_table():
    lines = markdown(make_result(BENCHMARKS, tally_of(RECORDS))).splitlines()
    assert lines[0].split(" | ")[3:6] == ["accuracy (95 %)", "pass@2", "no answer"]
    cells = lines[2].strip("| ").split(" | ")
    assert cells[:3] == ["gsm8k", "3 of 1319", "6"]
    assert cells[3].startswith("50.00 (")
    assert cells[5:] == ["1", "1", "1", "1", "0", "25"]
    assert lines[4].startswith("| **mean** |  |  | 25.00 (")
    assert {line.count("|") for line in lines} == {12}


def test_what_is_incomplete_is_left_out_and_said():
    result = make_result(BENCHMARKS, tally_of(RECORDS[:-1]))
    assert [score.name for score in result.scores] == ["gsm8k"]
    assert (result.missing, result.mean) == (1, None)
    assert "Incomplete: 1 samples are missing" in markdown(result)
    nothing = make_result(BENCHMARKS, tally_of([]))
    assert (nothing.scores, nothing.missing) == ([], 8)
    assert "Incomplete: 8" in markdown(nothing)


def test_a_row_per_problem():
    rows = [json.loads(line) for line in problem_rows(BENCHMARKS, tally_of(RECORDS[:3]))]
    assert [(row["problem"], row["samples"], row["accuracy"]) for row in rows] == [
        ("gsm8k:1", 2, 1.0),
        ("gsm8k:2", 1, 1.0),
        ("gsm8k:3", 0, None),
        ("aime24:1", 0, None),
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (record("gsm8k:1", 1, "right"), "sample gsm8k:1/1: is there twice"),
        (record("gsm8k:4", 0, "right"), "sample gsm8k:4/0: not a part"),
        (record("svamp:1", 0, "right"), "sample svamp:1/0: not a part"),
        (record("gsm8k:1", 2, "right"), "sample gsm8k:1/2: not a part"),
    ],
)
def test_samples_that_do_not_belong(wrong, message):
    with pytest.raises(RecordError, match=message):
        tally_of([*RECORDS, wrong])


def test_each_file_is_scored_as_it_asks():
    scorer = Scorer([benchmark("math500", 1), benchmark("own", 1, matching="last_number")])
    try:
        assert scorer.score("math500:1", r"\boxed{018}").status == "right"
        assert scorer.score("math500:1", "It is 18").status == "no_answer"
        assert scorer.score("own:1", "It is 18").status == "right"
    finally:
        scorer.close()


def test_a_thought_that_the_limit_cut_off_holds_no_answer():
    scorer = Scorer([benchmark("math500", 1)])
    assert scorer.score("math500:1", r"<think>perhaps \boxed{18}").status == "no_answer"
    assert scorer.score("math500:1", r"<think>perhaps \boxed{17}</think>\boxed{18}").status == "right"
    scorer.close()
