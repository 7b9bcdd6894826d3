"""The child process: compares answers with math-verify and sympy, one JSON line in, one out.

Start as `python -m triage_jax.tasks.verify.worker`. A request is `{"id", "gold", "answer", "seconds"}`, a
reply `{"id", "equal": bool}` or `{"id", "error": str}`; the first line, `{"ready": true}`, comes once the
imports are done. The process ends at end of file on its input, and by its own alarm (default action, which
also ends a long C call) when a request outlives its seconds and nobody is left to kill it.
"""

import json
import logging
import os
import signal
import sys
from fractions import Fraction
from typing import TextIO

from triage_jax.tasks.verify.compare import compare, exact

MEMORY_BYTES = 4 * 2**30
SAMPLES = tuple(Fraction(n, 7) for n in (3, 9, 16, 23, 38, 5, -3, -9, -16, -23, -38, -5))


def main() -> None:
    replies = _private_stdout()
    _limit_memory()
    import math_verify  # noqa: F401  the slow part of starting

    logging.disable(logging.CRITICAL)
    _reply(replies, {"ready": True})
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for line in sys.stdin:
        request = json.loads(line)
        if hasattr(signal, "alarm"):
            signal.alarm(int(request["seconds"]) + 3)
        try:
            answer = {"equal": compare(request["gold"], request["answer"], algebra) is True}
        except (Exception, RecursionError) as error:  # any failure of the algebra is a reply
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        if hasattr(signal, "alarm"):
            signal.alarm(0)
        _reply(replies, {"id": request["id"], **answer})


def algebra(gold: str, answer: str) -> bool:
    """Equality of two single answers, where the exact rules cannot tell.

    Numbers without variables are equal if they agree to 40 digits. Expressions in variables are equal if
    they agree at all real sample points at which both are real, or, with fewer than three such points, if
    math-verify says so.
    """
    decided = exact(gold, answer)
    if decided is not None:
        return decided
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Expr

    # Only the LaTeX grammar: math-verify reads plain expressions with sympy's `parse_expr`: an `eval`.
    parsed_gold, parsed = (
        parse(f"${text}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None)
        for text in (gold, answer)
    )
    left, right = _expression(parsed_gold), _expression(parsed)
    if isinstance(left, Expr) and isinstance(right, Expr):
        symbols = left.free_symbols | right.free_symbols
        numeric = _agree(left, right) if not symbols else _agree_on_reals(left, right, symbols)
        if numeric is not None:
            return numeric
    return bool(verify(parsed_gold, parsed, timeout_seconds=None))


def _expression(parsed: list) -> object:
    """The parsed expression, decimals made exact; None where there is only text."""
    from sympy import Basic, Float, Rational

    expression = parsed[0] if parsed else None
    if not isinstance(expression, Basic):
        return None
    return expression.xreplace({number: Rational(str(number)) for number in expression.atoms(Float)})


def _agree(left, right) -> bool | None:
    """Two numbers to 40 digits, relative to the larger; None if either is not a finite number."""
    values = [value.doit().evalf(60) for value in (left, right)]
    if not all(value.is_number and value.is_finite for value in values):
        return None
    size = max(abs(value) for value in values)
    return bool(abs(values[0] - values[1]) <= size * 10**-40)


def _agree_on_reals(left, right, symbols) -> bool | None:
    """Agreement wherever both sides are real, on a fixed set of rational points of either sign."""
    from sympy import Rational

    ordered, usable = sorted(symbols, key=str), 0
    for shift in range(len(SAMPLES)):
        point = {
            symbol: Rational(*SAMPLES[(shift + 5 * k) % len(SAMPLES)].as_integer_ratio())
            for k, symbol in enumerate(ordered)
        }
        values = [value.subs(point).doit().evalf(60) for value in (left, right)]
        if not all(value.is_number and value.is_finite and value.is_real for value in values):
            continue
        if _agree(*values) is False:
            return False
        usable += 1
    return True if usable >= 3 else None


def _private_stdout() -> TextIO:
    """A stream of our own on file descriptor 1's target; whatever libraries print goes to standard error
    instead.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _limit_memory() -> None:
    """An address-space limit turns `9^{9^9}` into a MemoryError instead of a machine out of memory."""
    try:
        import resource
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _reply(replies: TextIO, message: dict) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
