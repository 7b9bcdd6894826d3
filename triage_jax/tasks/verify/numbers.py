"""LaTeX clean-up, and plain numbers read exactly as fractions."""

import re
from dataclasses import dataclass
from fractions import Fraction

_THOUSANDS = re.compile(r"(?<=\d)(?:,\\!\s*|\{,\})(?=\d{3}(?!\d))")
_SPACING = re.compile(
    r"(?<!\\)\\[,;:! ]|\\q?quad\b|~|\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])"
    r"|\\(?:displaystyle|textstyle|tiny|small|large|Large|LARGE|huge|Huge|bf|rm|it)(?![A-Za-z])"
    r"|\\color\s*\{[^{}]*\}"
)
_SYNONYMS = (
    ("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\lbrace", "\\{"), ("\\rbrace", "\\}"),
    ("\\leq", "\\le"), ("\\geq", "\\ge"), ("\\leslant", "\\le"), ("\\geslant", "\\ge"),
    ("≤", "\\le "), ("≥", "\\ge "),
    ("−", "-"), ("×", "\\times "), ("·", "\\times "), ("∞", "\\infty "),
    ("°", ""), ("\\%", "%"), ("\\$", ""), ("$", ""), ("€", ""), ("£", ""),
    ("\\mathrm", "\\text"), ("\\textbf", "\\text"), ("\\textit", "\\text"), ("\\mbox", "\\text"),
    ("\\varnothing", "\\emptyset"), ("∅", "\\emptyset "), ("≈", "\\approx "), ("∪", "\\cup "), ("±", "\\pm "),
    ("π", "\\pi "), ("½", "\\frac{1}{2}"), ("¼", "\\frac{1}{4}"), ("¾", "\\frac{3}{4}"), ("²", "^2"), ("³", "^3"),
)  # fmt: skip
_FONT = re.compile(r"\\(?:(?:mathbf|boldsymbol|bm|mathit|mathsf|emph|underline)|textcolor\s*\{[^{}]*\})\s*\{")
_ROOT = re.compile(r"√\s*(\d+|[A-Za-z])")
_PREAMBLE = re.compile(r"\\approx(?![a-z])|(?:the )?(?:final )?answer(?: is)?[:\s]+", re.IGNORECASE)
_TEXT_PREAMBLE = re.compile(r"\\text\s*\{\s*(?:the )?(?:final )?answer(?: is)?:?\s*\}", re.IGNORECASE)
_AND = re.compile(r",?\s*(?:\\text\s*\{\s*(and|or)\s*\}|(?<=[\d\s})])(and|or)(?=\s))\s*")
_BINOMIAL = re.compile(r"\\[dt]?binom\s*(\d)\s*(\d)")
_REPEATING = re.compile(r"([+-]?)\s*(\d*)\.(\d*)\\overline\s*\{\s*(\d+)\s*\}")
_DECIMAL = r"(?:\d+\.?\d*|\.\d+)"
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d,])")
_UNIT = re.compile(
    r"(?<=[\d.}%])(?!.*(?:hundred|thousand|million|billion|trillion|dozen))"
    r"\s*(?:\\text\s*\{[^{}]*\}(?:\^\{?\d\}?)?|(?:\^\s*\{?\\circ\}?|\\degree)(?:\s*(?:\\text\s*\{[CF]\}|[CF]))?"
    r"|\s[A-Za-z]{3,}[A-Za-z .]*|\s(?:[A-Za-z]{1,4}/[A-Za-z]{1,4}|[ckm]m|kg|mg|ml|ft|mi|lbs?|oz|hr)(?:\^\{?\d\}?)?)$"
)
_SCIENTIFIC = re.compile(
    rf"([+-]?)\s*(?:({_DECIMAL})(?:[eE]([+-]?\d{{1,4}})|\s*(?:\\times|\*)\s*10\s*\^\s*(?:\{{\s*([+-]?\d{{1,4}})\s*\}}|(\d))))"
)
_RATIO = re.compile(
    rf"([+-]?)\s*(?:(\d+)\s*)?\\frac\s*(?:\{{\s*([+-]?{_DECIMAL})\s*\}}|(\d))\s*(?:\{{\s*({_DECIMAL})\s*\}}|(\d))"
    rf"|([+-]?)\s*(?:(\d+)\s+)?({_DECIMAL})\s*/\s*({_DECIMAL})"
)


@dataclass(frozen=True)
class Number:
    """An exact value; `percent` when it was written with a percent sign, which `value` already includes."""

    value: Fraction
    percent: bool = False

    def matches(self, gold: "Number") -> bool:
        """Equal values; where exactly one of the two has a percent sign, the sign may also be read as a
        mere unit.
        """
        if self.value == gold.value:
            return True
        return self.percent != gold.percent and self.value * (100 if self.percent else 1) == gold.value * (
            100 if gold.percent else 1
        )


def clean(answer: str) -> str:
    """Spacing, dollar signs, bold marks, synonyms and a final full stop removed; words and structure kept."""
    text = answer.strip().removeprefix("**").removesuffix("**")
    text = text.removeprefix("\\(").removesuffix("\\)") if text.startswith("\\(") else text
    text = re.sub(r"\\cdot(?![a-z])", r"\\times", _THOUSANDS.sub("", text))
    text = _SPACING.sub(lambda found: " " if found.group() in ("\\ ", "~") else "", text)
    for written, plain in _SYNONYMS:
        text = text.replace(written, plain)
    text = re.sub(r"\s+|\\newline(?![A-Za-z])", " ", text).strip()
    text = text.removesuffix("\\\\").removesuffix(".").strip()
    text = _BINOMIAL.sub(r"\\binom{\1}{\2}", _ROOT.sub(r"\\sqrt{\1}", _without_font(text)))
    for preamble in (_TEXT_PREAMBLE, _PREAMBLE):
        if (found := preamble.match(text)) and found.end() < len(text):
            text = text[found.end() :].strip()
    return "\\emptyset" if re.fullmatch(r"\\\{\s*\\\}", text) else text


def alternatives(text: str) -> tuple[list[str], set[str]]:
    """The parts of a cleaned `1 \\text{ and } 2` or `x<2 \\text{ or } x>3`, and the words between them."""
    parts = [part.strip() for part in _AND.split(text)[::3]]
    return parts, {found.group(1) or found.group(2) for found in _AND.finditer(text)}


def _without_font(text: str) -> str:
    """Without a font command that holds the whole."""
    while (found := _FONT.match(text)) and _closes_at_end(text, found.end() - 1):
        text = text[found.end() : -1].strip()
    return text


def _closes_at_end(text: str, start: int) -> bool:
    """Whether the brace at `start` is closed by the last character."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return position == len(text) - 1
    return False


def as_number(text: str) -> Number | None:
    """The value of a cleaned integer, decimal, ratio, mixed number or power-of-ten notation, with or without
    a unit.

    `1,234` is a thousands separator only in groups of three; a lone `\\text{...}` around the number is
    dropped.
    """
    text = _unwrap(text)
    text = _UNIT.sub("", text).strip()
    percent = text.endswith("%")
    text = _GROUPED.sub(lambda found: found.group().replace(",", ""), text.rstrip("% "))
    value = _plain(text)
    if value is None:
        return None
    return Number(value / 100, percent=True) if percent else Number(value)


def _plain(text: str) -> Fraction | None:
    if re.fullmatch(rf"[+-]?\s*{_DECIMAL}", text):
        return Fraction(text.replace(" ", ""))
    if found := _SCIENTIFIC.fullmatch(text):
        sign, mantissa, *exponents = found.groups()
        exponent = int(next(part for part in exponents if part is not None))
        value = Fraction(mantissa) * Fraction(10) ** exponent
        return -value if sign == "-" else value
    if found := _REPEATING.fullmatch(text):
        return _repeating(*found.groups())
    if found := _RATIO.fullmatch(text):
        sign, whole, top1, top2, bottom1, bottom2, slash_sign, slash_whole, *slash = found.groups()
        slash_top, slash_bottom = slash
        whole = whole or slash_whole
        top = Fraction(top1 or top2 or slash_top)
        bottom = Fraction(bottom1 or bottom2 or slash_bottom)
        if bottom == 0 or (whole and top < 0):
            return None
        value = int(whole or 0) + top / bottom
        return -value if "-" in (sign, slash_sign) else value
    return None


def _repeating(sign: str, whole: str, fixed: str, period: str) -> Fraction:
    """0.1666... written as `0.1\\overline{6}`."""
    scale = 10 ** len(fixed)
    value = int(whole or 0) + Fraction(int(fixed or 0), scale)
    value += Fraction(int(period), scale * (10 ** len(period) - 1))
    return -value if sign == "-" else value


def _unwrap(text: str) -> str:
    """Braces or `\\text` around the whole."""
    while found := re.fullmatch(r"(?:\\text\s*)?\{([^{}]*)\}", text):
        text = found.group(1).strip()
    return text
