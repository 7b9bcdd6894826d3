"""Equality of two answers with math-verify and sympy. Only the child process imports this.

math-verify rounds to 6 decimals, which makes 1/2^99 equal 1/2^98; so numbers and expressions are compared
here, and it is left with parsing, and with judging equations, sets and matrices.
"""

from collections.abc import Set

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Expr, Float, Rational, log

from triage_jax.tasks.verify.compare import compare, exact

MAX_DIGITS = 10_000
ENOUGH_POINTS = 3
# Points of either sign, at which no tidy coincidence is to be expected.
SAMPLES = tuple(Rational(n, 7) for n in (3, 9, 16, 23, 38, 5, -3, -9, -16, -23, -38, -5))


def equal(gold: str, answer: str) -> bool:
    """Whether `answer` is the gold answer; what cannot be told is not."""
    return compare(gold, answer, _single) is True


def _single(gold: str, answer: str) -> bool:
    """Equality of single elements, where structure has been dealt with."""
    decided = exact(gold, answer)
    if decided is not None:
        return decided
    # A timeout of 0 keeps math-verify from setting alarms of its own: the parent holds the deadline.
    # Only the LaTeX grammar: math-verify reads plain expressions with sympy's `parse_expr`, an `eval`.
    grammar = [LatexExtractionConfig()]
    parsed_gold, parsed = (
        parse(f"${text}$", extraction_config=grammar, parsing_timeout=0) for text in (gold, answer)
    )
    left, right = _expression(parsed_gold), _expression(parsed)
    if left is not None and right is not None:
        symbols = left.free_symbols | right.free_symbols
        decided = _agree_on_reals(left, right, symbols) if symbols else _agree(left, right)
        if decided is not None:
            return decided
    return bool(verify(parsed_gold, parsed, timeout_seconds=0))


def _expression(parsed: list[object]) -> Expr | None:
    """The parsed expression with its decimals made exact; None for sets, equations and text."""
    expression = parsed[0] if parsed else None
    if not isinstance(expression, Expr):
        return None
    exactly = expression.xreplace({number: Rational(str(number)) for number in expression.atoms(Float)})
    return exactly if isinstance(exactly, Expr) else None


def _agree(left: Expr, right: Expr) -> bool | None:
    """Rationals exactly; others to 40 digits of the value or after the point, whichever is more.

    None if either is not a finite number.
    """
    values = [value.doit() for value in (left, right)]
    if all(value.is_Rational for value in values):
        return values[0] == values[1]
    rough = [value.evalf(20) for value in values]
    if not all(value.is_number and value.is_finite for value in rough):
        return None
    size = max(abs(value) for value in rough)
    whole_digits = int(log(size, 10).evalf()) if size > 1 else 0
    exact_left, exact_right = (value.evalf(60 + min(whole_digits, MAX_DIGITS)) for value in values)
    return bool(abs(exact_left - exact_right) <= min(size, 1) * Rational(1, 10**40))


def _agree_on_reals(left: Expr, right: Expr, symbols: Set[Basic]) -> bool | None:
    """Agreement at every sample point at which both sides are real; None with too few such points.

    So sqrt(1/n) equals 1/sqrt(n), which at negative n, where both are imaginary, differ; sqrt(x^2) is not x.
    """
    ordered, usable = sorted(symbols, key=str), 0
    for shift in range(len(SAMPLES)):
        drawn = (SAMPLES[(shift + 5 * k) % len(SAMPLES)] for k in range(len(ordered)))
        point = list(zip(ordered, drawn, strict=True))
        values = [value.subs(point).doit() for value in (left, right)]
        rough = [value.evalf(20) for value in values]
        if not all(value.is_number and value.is_finite and value.is_real for value in rough):
            continue
        if _agree(*values) is False:
            return False
        usable += 1
    return True if usable >= ENOUGH_POINTS else None
