"""Where in a completion the answer stands. Linear in the length of the completion, whatever it holds."""

import re
from collections.abc import Sequence

from triage_jax.tasks.protocol import cut_at_eos

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def extract_answer(completion: str, eos: Sequence[str] = ()) -> str | None:
    """The stated answer: the last complete `\\boxed{...}`, else the last `<answer>...</answer>`, else None.

    Looks only before the first end-of-sequence text and after the last `</think>`; a thought that was
    never closed holds no answer.
    """
    text = cut_at_eos(completion, eos)
    text = text[text.rfind("</think>") + len("</think>") :] if "</think>" in text else text
    text = text.partition("<think>")[0]
    boxed = last_boxed(text)
    if boxed is None:
        answers = _ANSWER.findall(text)
        boxed = answers[-1].strip() if answers else None
    return boxed or None


def last_boxed(text: str) -> str | None:
    """Content of the `\\boxed{...}` that closes last, boxes within it removed; None if no box is ever closed.

    One pass with a stack, so that a box cut off by the length limit costs nothing and does not hide an
    earlier one.
    """
    open_braces: list[int | None] = []
    content: str | None = None
    for found in _BRACES.finditer(text):
        token = found.group()
        if token == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None:
                content = text[start : found.start()]
        elif token == "{":
            open_braces.append(None)
        elif token.endswith("{") and len(token) > 2:
            open_braces.append(found.end())
    if content is None:
        return None
    inner = last_boxed(content)
    return content.strip() if inner is None else inner
