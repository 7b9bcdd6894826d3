"""Exact comparison rules that need no computer algebra, and the structure of lists, tuples, sets and
intervals.

Every rule answers True, False, or None for "cannot tell"; what stays None goes to the child process.
"""

import re
from collections.abc import Callable

from triage_jax.tasks.verify.numbers import alternatives, as_number, clean

Leaf = Callable[[str, str], bool | None]
_BASED = re.compile(r"(\d[0-9A-Za-z]*)\s*_\s*(?:\{\s*(?:\\text\{)?(\w+)\}?\s*\}|(\d))")
_CLOCK = re.compile(r"\d{1,2}:\d{2}(?:\s*[ap]\.?m\.?)?", re.IGNORECASE)
_WORDS = re.compile(r"\\text\s*\{([^{}]*)\}")
_VARIABLE = r"([A-Za-z]|\\(?!pi|infty)[a-z]+)"
_MEMBER = re.compile(rf"{_VARIABLE}\s*\\in(?![a-z])\s*(.+)")
_NAMES = r"[A-Za-z]\w*(?:\([A-Za-z]\))?|\(\s*[A-Za-z]\s*(?:,\s*[A-Za-z]\s*)+\)"
_ASSIGNED = re.compile(rf"(?:{_NAMES})\s*=\s*([^=]+)")
_TUPLE_ASSIGNED = re.compile(r"\(\s*[A-Za-z]\s*(?:,\s*[A-Za-z]\s*)+\)\s*=\s*([^=]+)")
_TURNED = re.compile(r"([^=]*\d[^=]*?)\s*=\s*[A-Za-z]")
_OUTWARD = re.compile(r"([\[\]])([^\[\]]*)([\[\]])")
_TWO_QUANTITIES = re.compile(r"\d\s*(?:\\text\s*\{[^{}]*[A-Za-z][^{}]*\}|[A-Za-z]{3,}[A-Za-z ]*)\s*\d")
"""As in `12\\text{ hours and }30\\text{ minutes}`, of which math-verify reads the 12"""
_LABEL = re.compile(r"\(\s*(\w)\s*\)")
_RELATION = re.compile(r"\\le(?![a-z])|\\ge(?![a-z])|<|>|\\lt(?![a-z])|\\gt(?![a-z])")
_CLOSES = {"(": ")", "[": "]", "{": "}"}
MAX_ELEMENTS = 16


def compare(gold: str, answer: str, leaf: Leaf) -> bool | None:
    """Is `answer` the gold answer? Structure first, then `leaf` on cleaned elements.

    Tuples and intervals compare in order with equal brackets; sets and bare lists compare without order,
    and a bare list stands for a set or a tuple. `a \\pm b` in a set or list is two elements.
    `x\\in[2,\\infty)` and `x\\ge 2` are the same interval.
    """
    gold, answer = clean(gold), clean(answer)
    if _squeeze(gold) == _squeeze(answer):
        return bool(gold) or None
    if _WORDS.fullmatch(gold):
        return leaf(gold, answer)
    if "=" not in gold and (found := _ASSIGNED.fullmatch(answer) or _TURNED.fullmatch(answer)):
        return compare(gold, found.group(1), leaf)
    if "\\approx" in answer:  # a rounded value behind the exact one, or behind a name
        left, _, right = answer.partition("\\approx")
        named = re.fullmatch(rf"\s*(?:{_NAMES})\s*", left)
        return compare(gold, right if named else left, leaf)
    if "=" not in answer and (values := _assigned_values(gold)):
        return compare(f"({','.join(values)})", answer, leaf)
    if "=" not in answer and (found := _TUPLE_ASSIGNED.fullmatch(gold)):
        return compare(found.group(1), answer, leaf)
    gold, answer = _joined(gold), _joined(answer)
    (gold_variable, gold_set), (variable, answer_set) = _as_interval(gold), _as_interval(answer)
    if _RELATION.search(gold_set) or _RELATION.search(answer_set):
        return leaf(gold, answer)  # an inequality that must be solved first
    if gold_variable and variable and gold_variable != variable:
        return False
    return _compare_structure(gold_set, answer_set, leaf)


def _assigned_values(text: str) -> list[str] | None:
    """Values of `x=1, y=2`, where each name has one."""
    items = _top_level(text) or []
    found = [re.fullmatch(r"([A-Za-z])\s*=\s*([^=]+)", item) for item in items]
    pairs = [match.groups() for match in found if match]
    if len(pairs) < 2 or len(pairs) < len(items) or len({name for name, _ in pairs}) < len(pairs):
        return None
    return [value for _, value in pairs]


def _joined(text: str) -> str:
    """What `and` or `or` connects, as a list; of intervals the union or, of two rays, the intersection."""
    parts, words = alternatives(text)
    if len(parts) == 1 or not all(parts):
        return text
    if not all(_RELATION.search(part) or _MEMBER.fullmatch(part) for part in parts):
        return ",".join(parts)
    found = [_as_interval(part) for part in parts]
    variables, intervals = {variable for variable, _ in found}, [interval for _, interval in found]
    if len(variables) > 1 or None in variables:
        return text
    return "\\cup".join(intervals) if words == {"or"} else _between(intervals) or text


def _between(intervals: list[str]) -> str | None:
    """`(a,b)` for `(a,\\infty)` and `(-\\infty,b)`, in either order."""
    low = [i.removesuffix(",\\infty)") for i in intervals if i.endswith(",\\infty)")]
    high = [i.removeprefix("(-\\infty,") for i in intervals if i.startswith("(-\\infty,")]
    return f"{low[0]},{high[0]}" if len(low) == len(high) == 1 == len(intervals) / 2 else None


def _compare_structure(gold: str, answer: str, leaf: Leaf) -> bool | None:
    gold_kind, gold_items = _split(gold)
    kind, items = _split(answer)
    if not gold_kind and not kind and len(gold_items) == len(items) == 1:
        return leaf(gold, answer)
    if kind and gold_kind and kind != gold_kind:
        return False
    ordered = gold_kind not in ("", "{}")
    if kind and not gold_kind and kind != "{}":
        return False if len(gold_items) > 1 else leaf(gold, answer)
    if "\\cup" in gold or "\\cup" in answer:
        return leaf(gold, answer)
    if not ordered:
        gold_items, items = _expand_signs(gold_items), _expand_signs(items)
    if len(gold_items) != len(items):
        return False
    if len(items) > MAX_ELEMENTS:
        return None
    return _in_order(gold_items, items, leaf) if ordered else _in_any_order(gold_items, items, leaf)


def exact(gold: str, answer: str) -> bool | None:
    """The rules for single elements: identity, numbers as fractions, stated bases, clock times, words."""
    if _squeeze(gold) == _squeeze(answer):
        return True
    based, gold_based = _BASED.fullmatch(answer), _BASED.fullmatch(gold)
    if gold_based:
        return bool(based) and _digits_and_base(based) == _digits_and_base(gold_based)
    number, gold_number = as_number(answer), as_number(gold)
    if based and gold_number is not None:
        return _based_value(based) == gold_number.value
    if gold_number is not None and number is None and _TWO_QUANTITIES.search(answer):
        return False
    if number is not None and gold_number is not None:
        return number.matches(gold_number)
    if _CLOCK.fullmatch(gold) or _CLOCK.fullmatch(answer):
        return False
    words = _WORDS.fullmatch(gold)
    if (words and gold_number is None) or re.fullmatch(r"[A-Za-z]{4,}(?: [A-Za-z]+)*", gold):
        return _as_words(gold) == _as_words(answer) or _same_choice(gold, answer)
    return None


def _same_choice(gold: str, answer: str) -> bool:
    """Whether the gold is a label as `(B)`, and the answer that one label with something behind it."""
    wanted, words = _LABEL.fullmatch(_plain_words(gold)), _plain_words(answer)
    labels = _LABEL.findall(words)
    return wanted is not None and labels == [wanted.group(1)] and words.startswith("(")


def _digits_and_base(found: re.Match[str]) -> tuple[str, str]:
    return found.group(1).lower(), found.group(2) or found.group(3)


def _based_value(found: re.Match[str]) -> int | None:
    digits, base = _digits_and_base(found)
    try:
        return int(digits, int(base))
    except ValueError:
        return None


def _as_words(text: str) -> str:
    """Letters and digits of a text answer; `(C)` and `C` are the same choice."""
    plain = _plain_words(text)
    return plain[1:-1].strip() if _LABEL.fullmatch(plain) else plain


def _plain_words(text: str) -> str:
    plain = _WORDS.sub(r" \1 ", text).replace("\\", " ")
    return re.sub(r"\s+", " ", plain).strip().casefold()


def _squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _as_interval(text: str) -> tuple[str | None, str]:
    """Variable and interval of `x \\in S`, `a \\le x < b` or `x \\ge a`; (None, text) where it is none of
    these.
    """
    if found := _MEMBER.fullmatch(text):
        return found.group(1), _as_interval(found.group(2).strip())[1]
    if text in ("\\mathbb{R}", "\\mathbb R", "\\R"):
        return None, "(-\\infty,\\infty)"
    parts = [part.strip() for part in _RELATION.split(text)]
    signs = [_relation(sign) for sign in _RELATION.findall(text)]
    if len(parts) == 2 and re.fullmatch(_VARIABLE, parts[1]) and not re.fullmatch(_VARIABLE, parts[0]):
        parts, signs = parts[::-1], [(-signs[0][0], signs[0][1])]
    if len(parts) == 2 and re.fullmatch(_VARIABLE, parts[0]):
        (way, closed), end = signs[0], parts[1]
        if way < 0:
            return parts[0], f"(-\\infty,{end}{']' if closed else ')'}"
        return parts[0], f"{'[' if closed else '('}{end},\\infty)"
    if len(parts) == 3 and re.fullmatch(_VARIABLE, parts[1]) and signs[0][0] == signs[1][0]:
        (low, high), (left, right) = (parts[0], parts[2]), (signs[0][1], signs[1][1])
        if signs[0][0] > 0:
            low, high, left, right = high, low, right, left
        return parts[1], f"{'[' if left else '('}{low},{high}{']' if right else ')'}"
    return None, text


def _relation(sign: str) -> tuple[int, bool]:
    """Direction (-1: left side is smaller) and whether equality is allowed."""
    return (-1 if sign in ("\\le", "<", "\\lt") else 1), sign in ("\\le", "\\ge")


def _split(text: str) -> tuple[str, list[str]]:
    """Outer brackets ("" for none) and the elements between top-level commas."""
    if found := _OUTWARD.fullmatch(text):  # ]0,1[ is (0,1)
        left, inner, right = found.groups()
        text = f"{'[' if left == '[' else '('}{inner}{']' if right == ']' else ')'}"
    plain = text.replace("\\{", "{").replace("\\}", "}")
    is_set = text.startswith("\\{") and text.endswith("\\}")
    if is_set or (plain[:1] in "([" and plain[-1:] in ")]" and len(plain) > 1):
        inner = text[2:-2] if is_set else text[1:-1]
        items = _top_level(inner)
        if items is not None and is_set:
            return "{}", list({_squeeze(item): item for item in items}.values())
        if items is not None and len(items) > 1:
            return plain[0] + plain[-1], items
    items = _top_level(text) if as_number(text) is None else None
    return "", items or [text]


def _top_level(text: str) -> list[str] | None:
    """Split at commas outside all brackets; None if the brackets do not nest (as in `1,2) \\cup (3,4`)."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                return None
        elif character in ",;" and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    parts.append(text[start:].strip())
    return parts if depth == 0 else None


def _expand_signs(items: list[str]) -> list[str]:
    expanded: list[str] = []
    for item in items:
        both = item.count("\\pm") == 1
        expanded += [item.replace("\\pm", "+").lstrip("+"), item.replace("\\pm", "-")] if both else [item]
    return expanded


def _in_order(gold: list[str], items: list[str], leaf: Leaf) -> bool | None:
    results = [compare(left, right, leaf) for left, right in zip(gold, items, strict=True)]
    return False if False in results else None if None in results else True


def _in_any_order(gold: list[str], items: list[str], leaf: Leaf) -> bool | None:
    """Pairs up equal elements; an undecided pair leaves the whole undecided unless all pair up without it."""
    left, undecided = list(items), False
    for element in gold:
        results = [compare(element, item, leaf) for item in left]
        if True in results:
            left.pop(results.index(True))
        elif None in results:
            undecided = True
        else:
            return False
    return None if undecided else True
