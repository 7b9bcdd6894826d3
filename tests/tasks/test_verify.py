"""Verdicts on answer strings, and where in a completion the answer is read."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triage_jax.tasks.verify import MathVerifier, extract_answer, last_boxed
from triage_jax.tasks.verify.compare import compare, exact
from triage_jax.tasks.verify.guard import refusal


@pytest.fixture(scope="module")
def verifier():
    with MathVerifier() as verifier:
        yield verifier


# Gold, completion, verdict. "policy" marks rows on which reasonable graders differ, with our reason.
TABLE = [
    ("025", r"\boxed{25}", "right"),
    ("27.0", r"\boxed{27}", "right"),
    (r"\frac{14}{3}", r"\boxed{4\frac{2}{3}}", "right"),
    (r"\frac{14}{3}", r"\boxed{4.6667}", "wrong"),  # policy: a rounded value is not the exact one
    ("(1,2)", r"\boxed{\{1,2\}}", "wrong"),
    ("1,2,3", r"\boxed{3,2,1}", "right"),
    (r"10\%", r"\boxed{0.1}", "right"),
    (r"10\%", r"\boxed{10}", "right"),  # policy: the percent sign may be read as a unit
    (r"11_2", r"\boxed{11}", "wrong"),  # policy: a gold with a base wants the base stated
    (r"11_2", r"\boxed{11_{2}}", "right"),
    ("4.5e33", r"\boxed{4.5\times10^{33}}", "right"),
    (r"\sqrt{1/n}", r"\boxed{\frac{1}{\sqrt{n}}}", "right"),
    (r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}", "wrong"),
    (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2006!}}", "wrong"),
    ("2x+4y-3=0", r"\boxed{y=-\frac12x+\frac34}", "right"),
    ("3*x-1*y+13=0", r"\boxed{3x + 4y + 14=0}", "wrong"),
    (r"x\in[2,\infty)", r"\boxed{x\ge 2}", "right"),
    (r"x\in[-2,7]", r"\boxed{-2\le x\le 7}", "right"),
    ("18", "The answer is 18 but also 19", "no_answer"),
    ("18", r"\boxed{18, 19}", "wrong"),
    ("18", r"\boxed{18} or \boxed{19}", "wrong"),
    ("18", r"\boxed{5}. Wait, wrong. So \boxed{18}.", "right"),
    ("18", "<think>maybe $18$</think> I do not know", "no_answer"),
    (r"\text{June 20}", r"\boxed{June\ 20}", "right"),
    (r"-\sqrt{3}", r"\boxed{-1.7320508}", "wrong"),  # policy, as for 14/3
    (r"\text{Evelyn}", r"\boxed{Evelyn}", "right"),
    (r"\text{Evelyn}", r"\boxed{\text{Carla}}", "wrong"),
    ("12:00", r"\boxed{1:00}", "wrong"),
    (r"\pm 2021", r"\boxed{2021}", "wrong"),
    (r"90^\circ", r"\boxed{90}", "right"),
    (r"\$18", r"\boxed{18}", "right"),
    ("18", r"\boxed{18\text{ dollars}}", "right"),
]
MORE = [
    ("10,\\!080", r"\boxed{10080}", "right"),
    ("70,000", r"\boxed{70000}", "right"),
    ("70000", r"\boxed{70,000}", "right"),
    ("1819", r"\boxed{18,19}", "wrong"),
    ("4", r"\boxed{\boxed{004}}", "right"),
    ("73", r"\boxed{**73**}", "right"),
    ("-5", r"\boxed{−5}", "right"),
    ("0.5", r"\boxed{\tfrac12}", "right"),
    ("5", r"\boxed{x=5}", "right"),
    ("x=5", r"\boxed{5}", "right"),
    ("(3,-1)", r"\boxed{(5,-2)}", "wrong"),
    ("(3,-1)", r"\boxed{3,-1}", "right"),
    ("(3,-1)", r"\boxed{(-1,3)}", "wrong"),
    ("1,-2", r"\boxed{\{-2, 1\}}", "right"),
    ("1,-2", r"\boxed{(1,-2)}", "wrong"),
    ("(3,4]", r"\boxed{(3,4)}", "wrong"),
    ("(3,4]", r"\boxed{3<x\leq 4}", "right"),
    ("(3,4]", r"\boxed{4 \ge y > 3}", "right"),
    (r"x\ge 2", r"\boxed{y\ge 2}", "wrong"),
    (r"(-\infty,0]", r"\boxed{x\le 0}", "right"),
    (r"\{1\pm\sqrt{5},-2\}", r"\boxed{-2,1+\sqrt5,1-\sqrt5}", "right"),
    (r"(0,9) \cup (9,36)", r"\boxed{(0,9)\cup(9,36)}", "right"),
    (r"(0,9) \cup (9,36)", r"\boxed{(0,36)}", "wrong"),
    (r"\sqrt{x^2}", r"\boxed{x}", "wrong"),
    (r"\frac{3\sqrt{3}}{4}", r"\boxed{\frac{9}{4\sqrt3}}", "right"),
    ("p - q", r"\boxed{-q+p}", "right"),
    ("6+9i", r"\boxed{9i+6}", "right"),
    ("2^{2001}", r"\boxed{2\cdot2^{2000}}", "right"),
    ("3^{2004}", r"\boxed{3^{2005}}", "wrong"),
    ("2^{1009}", r"\boxed{2^{1009}+1}", "wrong"),
    (r"2^{1009}\sqrt{2}", r"\boxed{2^{1009}\sqrt{2}+1}", "wrong"),
    (r"2^{1009}\sqrt{2}", r"\boxed{\frac{2^{1010}}{\sqrt{2}}}", "right"),
    (r"k \geqslant 2", r"\boxed{0+k \geqslant 2}", "right"),
    ("5", r"\boxed{__import__('os').getpid()}", "wrong"),
    ("e^{-x^2}", r"\boxed{\frac{1}{e^{x^2}}}", "right"),
    ("x^8 + x^7 + 1", r"\boxed{1 + x^7 + x^8}", "right"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", "right"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{\begin{pmatrix}1\\3\end{pmatrix}}", "wrong"),
    (r"\text{(C)}", r"\boxed{C}", "right"),
    ("18", r"<answer>18</answer>", "right"),
    ("18", r"\boxed{18} as asked.<|im_end|>\boxed{19}", "right"),
    ("18", r"\boxed{}", "no_answer"),
    ("3", r"\boxed{11_2}", "right"),
    ("live", r"\boxed{evil}", "wrong"),
    ("18", r"\boxed{18 million}", "wrong"),
]


@pytest.mark.parametrize(("gold", "completion", "status"), TABLE + MORE)
def test_verdicts(verifier, gold, completion, status):
    verdict = verifier.score(completion, gold)
    assert verdict.status == status, verifier.checker.last_error
    assert verdict.reward == (status == "right")


def test_batch_equals_singles_and_keeps_order(verifier):
    pairs = [(completion, gold) for gold, completion, _ in TABLE] * 2
    assert [verdict.status for verdict in verifier.score_batch(pairs)] == [status for *_, status in TABLE] * 2


NESTED = "(" * 200 + "1" + ")" * 200


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("9^{9^{9}}", "guarded"),
        ("10^{10^{10}}", "guarded"),
        ("9^9^9", "guarded"),
        ("9**9**9", "guarded"),
        ("2^{100000}", "guarded"),
        ("1e999999", "guarded"),
        ("(10^6)!", "guarded"),
        ("123456!", "guarded"),
        ("(9999!)!", "guarded"),
        (r"{10^{6}}!", "guarded"),
        (r"\binom{10000000}{1000000}", "guarded"),
        (NESTED, "guarded"),
        ("1" + "+1" * 3000, "guarded"),
        (r"\frac{1" * 40 + "}{2}" * 40, "guarded"),
        ("{" * 21 + "x" + "}" * 21, "guarded"),
    ],
)
def test_costly_answers_never_reach_the_child(answer, status):
    with MathVerifier() as fresh:
        started = time.monotonic()
        assert fresh.score(r"\boxed{" + answer + "}", "18").status == status
        assert time.monotonic() - started < 5.0
        assert fresh.checker.starts == 0


@pytest.mark.parametrize(
    "answer",
    ["x^2y^3", "x^{10}+x^9", "10^{-12}", "e^{-x^2}", "5!", "n!", "(n-1)!", "(2n+1)!", r"\binom{10}{3}"],
)
def test_the_guard_lets_ordinary_answers_pass(answer):
    assert refusal(answer) is None


def test_fast_path_needs_no_child():
    with MathVerifier() as fresh:
        pairs = [(rf"\boxed{{{n}}}", f"{n}.0") for n in range(2000)]
        started = time.monotonic()
        assert all(verdict.reward == 1.0 for verdict in fresh.score_batch(pairs))
        assert time.monotonic() - started < 20.0
        assert fresh.checker.starts == 0


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{a}", "a"),
        (r"\boxed{\frac{1}{2}} and \boxed{3", r"\frac{1}{2}"),  # the last one was cut off
        (r"\boxed {7}", "7"),
        (r"\fbox{7}", "7"),
        (r"{ \boxed{\{1,2\}} }", r"\{1,2\}"),
        (r"} \boxed{5}", "5"),
        (r"\boxed{5", None),
        (r"\boxed{a\boxed{5}}", "5"),
        ("no box", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


def test_extraction_is_linear():
    started = time.monotonic()
    assert extract_answer(r"\boxed{" * 100_000 + "<answer>" * 50_000) is None
    assert time.monotonic() - started < 20.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"<think>\boxed{1}</think> so \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> so", None),
        (r"<think>\boxed{1}", None),
        (r"\boxed{1}</think>\boxed{2}</think>\boxed{3}", "3"),
        ("<answer> 4 </answer><answer>5</answer>", "5"),
        (r"<answer>4</answer> \boxed{5}", "5"),
    ],
)
def test_extract_answer(completion, answer):
    assert extract_answer(completion) == answer


@settings(max_examples=200, deadline=None)
@given(st.integers(-(10**6), 10**6), st.integers(1, 999), st.integers(-(10**6), 10**6), st.integers(1, 999))
def test_fractions_compare_exactly(a, b, c, d):
    assert compare(rf"\frac{{{a}}}{{{b}}}", f"{c}/{d}", exact) == (a * d == b * c)
    assert compare(f"{a}/{b}", rf"\dfrac{{{7 * a}}}{{{7 * b}}}", exact) is True


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789.,+-/eE%\\{}()[]_^ $xfractimespm:=<>", max_size=40), st.text(max_size=20))
def test_comparison_never_raises(left, right):
    for gold, answer in ((left, right), (right, left), (left, left)):
        assert compare(gold, answer, exact) in (True, False, None)
        refusal(gold)
