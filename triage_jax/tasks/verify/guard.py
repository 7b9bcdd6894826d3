"""Which answers are too costly to hand to a computer algebra system."""

import re

MAX_CHARACTERS = 200
MAX_DEPTH = 20
_TOO_LARGE = re.compile(
    r"""
      \^\s*[{(][^{}^]*[\d)]\s*\^       # an exponent that is itself a power of a number; `e^{-x^2}` may pass
    | \^\s*\{\s*\{?\s*\d+\s*\}\s*\^
    | (?:\^|\*\*)\s*\d+\s*(?:\^|\*\*)
    | \*\*\s*\([^()]*\d\s*\*\*
    | (?:\^\s*\{?|\*\*)\s*[+-]?\d{5,}  # an exponent of more than four digits
    | \d[eE][+-]?\d{5,}
    | \d{5,}\s*[)}\]]?\s*!             # factorial of more than four digits
    | [({\[][^A-Za-z()]*[\^*!][^A-Za-z()]*[)}\]]\s*!  # of a group of numbers; not of (n-1)
    | !\s*!
    | \\[dt]?binom\s*\{?\s*\d{5,}
    """,
    re.VERBOSE,
)


def refusal(answer: str) -> str | None:
    """Why `answer` must not be evaluated, or None if it may be."""
    if len(answer) > MAX_CHARACTERS:
        return f"{len(answer)} characters, at most {MAX_CHARACTERS} are read"
    depth = deepest = 0
    for character in answer:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        return f"brackets nested {deepest} deep, at most {MAX_DEPTH} are read"
    if found := _TOO_LARGE.search(answer):
        return f"{found.group().strip()!r} may be astronomically large"
    return None
