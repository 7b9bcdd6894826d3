"""Every public file, whole where it is there, its first lines anyway."""

import json

import pytest

from tests.golden import DATA, shared_path
from triage_jax.evaluate.benchmarks import FORMATS, REPORTED, check_distinct, load_benchmark, read_benchmark
from triage_jax.evaluate.config import EvaluateConfig
from triage_jax.evaluate.subject import read_benchmarks
from triage_jax.tasks.jsonl import DataError

HEADS = DATA / "evaluate"
FIRST = {
    "aime24": ["204", "113", "371"],
    "aime25": ["70", "588", "16"],
    "math500": [r"\left( 3, \frac{\pi}{2} \right)", "p - q", r"\frac{14}{3}"],
    "amc23": ["27", "36", "45"],
    "gsm8k": ["18", "3", "70000"],
}


@pytest.mark.parametrize("name", REPORTED)
def test_first_lines(name):
    found = load_benchmark(name, HEADS)
    assert [problem.answer for problem in found.problems] == FIRST[name]
    assert [problem.uid for problem in found.problems] == [f"{name}:{n}" for n in (1, 2, 3)]
    assert found.known is False, "three lines are not the file"
    rows = [json.loads(line) for line in (HEADS / f"{name}_test.jsonl").read_text().splitlines()]
    for problem, row in zip(found.problems, rows, strict=True):
        question = row.get("problem", row.get("question"))
        assert problem.prompt == question.strip() + (
            "\nPlease reason step by step, and put your final answer within \\boxed{}."
        )


@pytest.mark.parametrize("name", FORMATS)
def test_whole_files(name):
    directory = shared_path("data/math")
    if directory is None:
        pytest.skip("3 MB of test sets are not copied here; runs with ../shared/data/math")
    found = load_benchmark(name, directory)
    assert found.known
    assert len(found.problems) == found.rows == FORMATS[name].rows
    assert len({problem.uid for problem in found.problems}) == found.rows
    assert [p.uid for p in load_benchmark(name, directory, limit=7).problems] == [
        p.uid for p in found.problems[:7]
    ]


def test_the_reported_five_in_their_order():
    config = EvaluateConfig(data=str(HEADS))
    assert [benchmark.name for benchmark in read_benchmarks(config)] == list(REPORTED)
    assert (config.samples, config.temperature, config.top_p, config.max_new_tokens) == (6, 0.7, 1.0, 20480)
    assert config.model.enable_thinking


def test_rows_that_repeat_are_kept(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "1+1", "answer": "2"}\n' * 2)
    config = EvaluateConfig()
    found = read_benchmark("own", file, config.own.fields, "math")
    assert [problem.uid for problem in found.problems] == ["own:1", "own:2"]
    assert found.known is None


def test_missing_files_and_equal_names(tmp_path):
    with pytest.raises(DataError, match=r"gsm8k_test.jsonl: no such file"):
        load_benchmark("gsm8k", tmp_path)
    one = load_benchmark("gsm8k", HEADS)
    with pytest.raises(DataError, match="called 'gsm8k', as that of"):
        check_distinct([one, one])
