import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden import ROOT
from triage_jax.tasks.arithmetic import CHAT_TEMPLATE, ArithmeticConfig, ArithmeticTask
from triage_jax.tasks.protocol import Problem, Task

settings_of_a_task = st.fixed_dictionaries(
    {
        "digits": st.integers(1, 3),
        "terms": st.integers(2, 4),
        "operations": st.sampled_from([("+",), ("+", "-"), ("+", "-", "*"), ("*",)]),
        "zero_pad": st.booleans(),
        "seed": st.integers(0, 3),
    }
)


@settings(max_examples=12, deadline=None)
@given(settings_of_a_task, st.integers(0, 10**6))
def test_answers_are_right_and_reproducible(chosen, index):
    config = ArithmeticConfig(**chosen)
    task = ArithmeticTask(config)
    problem = task.problem(index)
    operands = problem.prompt.removesuffix("=").replace("-", "+").replace("*", "+").split("+")
    assert len(operands) == config.terms
    without_zeros = "".join(
        f"{int(part)}" if part.isdigit() else part
        for part in problem.prompt[:-1].replace("+", " + ").replace("-", " - ").replace("*", " * ").split()
    )
    assert problem.answer == str(eval(without_zeros))
    assert ArithmeticTask(config).problem(index) == problem
    assert task.score(problem.answer, problem).status == "right"
    assert task.score(problem.answer + "1", problem).status == "wrong"


@settings(max_examples=6, deadline=None)
@given(settings_of_a_task)
def test_heldout_is_disjoint_from_training(chosen):
    task = ArithmeticTask(ArithmeticConfig(**chosen))
    heldout = {problem.prompt for problem in task.heldout(40)}
    assert heldout
    assert not heldout & {task.problem(index).prompt for index in range(400)}


def test_one_digit_sums_split_all_hundred():
    task = ArithmeticTask(ArithmeticConfig())
    heldout = {problem.prompt for problem in task.heldout(1000)}
    training = {task.problem(index).prompt for index in range(5000)}
    assert len(heldout) + task.epoch_size == 100
    assert len(heldout | training) == 100
    assert 10 <= len(heldout) <= 30
    assert task.heldout(5) == task.heldout(1000)[:5]


def test_large_spaces_are_not_enumerated():
    task = ArithmeticTask(ArithmeticConfig(digits=6, terms=5, operations=("+", "-", "*")))
    assert task.epoch_size is None
    assert len({problem.uid for problem in task.heldout(64)}) == 64
    assert isinstance(task, Task)


def test_another_process_draws_the_same_problems():
    script = (
        "from triage_jax.tasks.arithmetic import *; t = ArithmeticTask(ArithmeticConfig(digits=2));"
        "print([t.problem(i).prompt for i in range(20)], [p.prompt for p in t.heldout(20)])"
    )
    task = ArithmeticTask(ArithmeticConfig(digits=2))
    here = f"{[task.problem(i).prompt for i in range(20)]} {[p.prompt for p in task.heldout(20)]}"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.strip() == here


def test_show_sums_works_from_left_to_right():
    config = ArithmeticConfig(terms=4, operations=("+", "-"), show_sums=True, match="last_number")
    task = ArithmeticTask(config)
    for index in range(30):
        problem = task.problem(index)
        values = {eval(side) for side in f"{problem.prompt}{problem.answer}".split("=")}
        assert len(values) == 1
        assert problem.answer.count("=") == 2
        assert task.score(problem.answer, problem).status == "right"


@pytest.mark.parametrize(
    ("match", "completion", "status", "parsed"),
    [
        ("exact", "82", "right", "82"),
        ("exact", " 082 ", "right", " 082 ".strip()),
        ("exact", "82<|im_end|>17", "right", "82"),
        ("exact", "=82", "wrong", "=82"),
        ("exact", "", "no_answer", None),
        ("exact", "٨٢", "wrong", "٨٢"),
        ("exact", "8" * 5000, "wrong", "8" * 5000),
        ("last_number", "37+45 is 82.", "right", "82"),
        ("last_number", "82 or 83", "wrong", "83"),
        ("last_number", "It is 82.0", "right", "82.0"),
        ("last_number", "It is 0.82", "wrong", "0.82"),
        ("last_number", "It is -82", "wrong", "-82"),
        ("last_number", "1,082", "wrong", "1082"),
        ("last_number", "no idea", "no_answer", None),
    ],
)
def test_matching(match, completion, status, parsed):
    task = ArithmeticTask(ArithmeticConfig(digits=2, match=match))
    verdict = task.score(completion, Problem("37+45=", "82", "37+45"))
    assert (verdict.status, verdict.parsed) == (status, parsed)
    assert verdict.reward == (status == "right")


def test_chat_template_and_zero_padding():
    task = ArithmeticTask(
        ArithmeticConfig(digits=2, prompt=CHAT_TEMPLATE, zero_pad=True, match="last_number")
    )
    problem = task.problem(3)
    assert problem.prompt == f"What is {problem.uid}? Answer with only the number."
    assert len(problem.uid) == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"digits": 0}, "digits must be >= 1"),
        ({"operations": ()}, "one or more of"),
        ({"prompt": "sum="}, "must contain '{expression}'"),
        ({"heldout_fraction": 1.0}, r"\[0, 1\)"),
        ({"show_sums": True, "operations": ("*",)}, "'\\+' and '-' only"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ArithmeticConfig(**settings)


def test_no_heldout_without_a_fraction():
    with pytest.raises(ValueError, match="set it above 0"):
        ArithmeticTask(ArithmeticConfig(heldout_fraction=0.0)).heldout(3)
