import json
import re

import pytest

from tests.golden import DATA, shared_path
from triage_jax.tasks.jsonl import BOXED_INSTRUCTION, GSM8K_ANSWER, DataError, JsonlConfig, JsonlTask
from triage_jax.tasks.protocol import Task
from triage_jax.tasks.verify import MathVerifier

FORMATS = {
    "aime24": {"prompt_fields": ("problem",)},
    "aime25": {"prompt_fields": ("problem",), "answer_field": "expected_answer"},
    "amc23": {"prompt_fields": ("problem",), "coerce_numbers": True},
    "math500": {"prompt_fields": ("problem",)},
    "minerva_math": {"prompt_fields": ("problem",), "answer_field": "solution", "answer_boxed": True},
    "olympiadbench": {"prompt_fields": ("question",), "answer_field": "final_answer"},
    "gsm8k": {"prompt_fields": ("question",), "answer_pattern": GSM8K_ANSWER},
    "svamp": {"prompt_fields": ("Body", "Question"), "answer_field": "Answer", "coerce_numbers": True},
}
ROWS = {"aime24": 30, "aime25": 30, "amc23": 40, "math500": 500, "minerva_math": 272, "olympiadbench": 675,
        "gsm8k": 1319, "svamp": 1000}  # fmt: skip


@pytest.fixture(scope="module")
def verifier():
    with MathVerifier() as verifier:
        yield verifier


def write(path, *rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def numbered(path, count):
    return write(path, *({"prompt": f"What is {n}?", "answer": str(n)} for n in range(count)))


def check_gold_scores_itself(file, name, rows, verifier):
    task = JsonlTask(JsonlConfig(files=(str(file),), heldout_fraction=1.0, **FORMATS[name]), verifier)
    problems = task.heldout(10**6)
    assert len(problems) == rows
    verdicts = task.score_batch([(rf"Thus \boxed{{{problem.answer}}}.", problem) for problem in problems])
    assert [verdict.status for verdict in verdicts] == ["right"] * rows


@pytest.mark.parametrize("name", FORMATS)
def test_every_public_format_loads_and_scores(name, verifier):
    check_gold_scores_itself(DATA / "math" / f"{name}_test.head.jsonl", name, 20, verifier)


@pytest.mark.parametrize("name", FORMATS)
def test_whole_test_sets(name, verifier):
    file = shared_path(f"data/math/{name}_test.jsonl")
    if file is None:
        pytest.skip(
            "3 MB of test sets are not copied here (20 rows of each are); runs with ../shared/data/math"
        )
    check_gold_scores_itself(file, name, ROWS[name], verifier)


def test_gsm8k_training_files_and_their_thousands(verifier):
    files = [shared_path(f"data/math/gsm8k_train.part{part}.jsonl") for part in (1, 2)]
    if None in files:
        pytest.skip("4 MB of training files are not copied here; runs with ../shared/data/math")
    config = JsonlConfig(files=tuple(map(str, files)), heldout_fraction=0.02, **FORMATS["gsm8k"])
    task = JsonlTask(config, verifier)
    assert task.epoch_size + len(task.heldout(10**6)) + task.duplicates == 7473
    assert 100 < len(task.heldout(10**6)) < 200
    commas = [problem for problem in map(task.problem, range(task.epoch_size)) if "," in problem.answer]
    assert commas
    for problem in commas:
        assert task.score(rf"\boxed{{{problem.answer.replace(',', '')}}}", problem).reward == 1.0


def test_epochs_are_fresh_orders_of_all_problems(tmp_path, verifier):
    config = JsonlConfig(files=(numbered(tmp_path / "a.jsonl", 50),), heldout_fraction=0.3, seed=1)
    task = JsonlTask(config, verifier)
    assert isinstance(task, Task)
    size = task.epoch_size
    first, second = ([task.problem(e * size + i).uid for i in range(size)] for e in (0, 1))
    assert sorted(first) == sorted(second)
    assert first != second
    assert [JsonlTask(config, verifier).problem(i).uid for i in range(size)] == first
    heldout = task.heldout(100)
    assert len(heldout) + size == 50
    assert not {problem.uid for problem in heldout} & set(first)
    assert task.heldout(3) == heldout[:3]


def test_split_follows_the_text_not_the_file(tmp_path, verifier):
    one = JsonlTask(JsonlConfig(files=(numbered(tmp_path / "a.jsonl", 40),), heldout_fraction=0.5), verifier)
    more = JsonlTask(JsonlConfig(files=(numbered(tmp_path / "b.jsonl", 80),), heldout_fraction=0.5), verifier)
    assert {p.prompt for p in one.heldout(100)} <= {p.prompt for p in more.heldout(100)}


def test_duplicates_are_dropped_and_counted(tmp_path, verifier):
    first = write(tmp_path / "a.jsonl", {"prompt": "1+1", "answer": "2"}, {"prompt": "1+2", "answer": "3"})
    second = write(tmp_path / "b.jsonl", {"prompt": "1+1", "answer": "2"}, {"prompt": "1+2", "answer": "4"})
    task = JsonlTask(JsonlConfig(files=(first, second)), verifier)
    assert (task.epoch_size, task.duplicates, task.conflicts) == (2, 2, 1)
    assert {task.problem(i).answer for i in range(2)} == {"2", "3"}
    assert {task.problem(i).uid for i in range(2)} == {"a:1", "a:2"}


GOOD = {"prompt": "1+1", "answer": "2"}


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (
            [GOOD, {"question": "?", "answer": "2"}],
            {},
            r":2: no field 'prompt'; found \['answer', 'question'\], expected",
        ),
        ([GOOD, "", GOOD], {}, ":2: empty line"),
        (
            [GOOD, {"prompt": "1+1", "answer": 2}],
            {},
            ":2: field 'answer' is the number 2.*coerce_numbers=true",
        ),
        ([{"prompt": 7, "answer": "2"}], {"coerce_numbers": True}, ":1: field 'prompt' is the number 7"),
        ([{"prompt": "1", "answer": None}], {}, ":1: field 'answer' is a JSON NoneType"),
        ([{"prompt": "1", "answer": True}], {"coerce_numbers": True}, ":1: field 'answer' is a JSON bool"),
        ([{"prompt": "1", "answer": ["2", "3"]}], {}, ":1: field 'answer' is a JSON list"),
        ([{"prompt": " ", "answer": "2"}], {}, ":1: field 'prompt' is blank"),
        ([GOOD, "{"], {}, ":2: not JSON"),
        (["[1, 2]"], {}, ":1: a JSON list"),
        ([GOOD], {"answer_pattern": GSM8K_ANSWER}, ":1: answer_pattern .* does not match field 'answer'"),
        ([GOOD], {"answer_boxed": True}, r":1: no complete \\boxed"),
        ([], {}, "empty; expected"),
    ],
)
def test_errors_name_file_line_and_what_is_accepted(tmp_path, rows, settings, message, verifier):
    file = write(tmp_path / "bad.jsonl", *rows)
    with pytest.raises(DataError, match=re.escape(file) + ".*" + message):
        JsonlTask(JsonlConfig(files=(file,), **settings), verifier)


def test_missing_file_and_bad_bytes(tmp_path, verifier):
    with pytest.raises(DataError, match="no such file"):
        JsonlTask(JsonlConfig(files=(str(tmp_path / "none.jsonl"),)), verifier)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9", "answer": "2"}')
    with pytest.raises(DataError, match="not UTF-8"):
        JsonlTask(JsonlConfig(files=(str(tmp_path / "latin.jsonl"),)), verifier)


def test_blank_lines_may_end_the_file_and_separators_stay_in_the_text(tmp_path, verifier):
    file = write(tmp_path / "a.jsonl", '{"prompt": "a\u2028b", "answer": "2"}\r', "", "")
    task = JsonlTask(JsonlConfig(files=(file,)), verifier)
    assert task.problem(0).prompt == "a\u2028b"


@pytest.mark.parametrize(("number", "gold"), [(27.0, "27"), (2, "2"), (0.5, "0.5"), (-3, "-3")])
def test_numbers_are_coerced_on_request(tmp_path, number, gold, verifier):
    file = write(tmp_path / "a.jsonl", {"prompt": "?", "answer": number})
    assert JsonlTask(JsonlConfig(files=(file,), coerce_numbers=True), verifier).problem(0).answer == gold


def test_prompt_text_keeps_other_braces(tmp_path, verifier):
    file = write(tmp_path / "a.jsonl", {"prompt": "1+1", "answer": "2"})
    task = JsonlTask(JsonlConfig(files=(file,), prompt=BOXED_INSTRUCTION), verifier)
    assert task.problem(0).prompt.startswith("1+1\n")
    assert task.problem(0).prompt.endswith(r"\boxed{}.")


def test_settings_and_empty_sides(tmp_path, verifier):
    file = numbered(tmp_path / "a.jsonl", 3)
    with pytest.raises(ValueError, match="raise it"):
        JsonlTask(JsonlConfig(files=(file,)), verifier).heldout(1)
    with pytest.raises(ValueError, match="no training problems"):
        JsonlTask(JsonlConfig(files=(file,), heldout_fraction=1.0), verifier).problem(0)
    with pytest.raises(ValueError, match="must contain"):
        JsonlConfig(files=(file,), prompt="Solve it.")
    with pytest.raises(ValueError, match="at least one path"):
        JsonlTask(JsonlConfig(), verifier)
    with pytest.raises(ValueError, match="at least one field"):
        JsonlConfig(files=(file,), prompt_fields=())
