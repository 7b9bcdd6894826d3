"""LaTeX clean-up, and plain numbers read exactly as fractions."""

import re
from dataclasses import dataclass
from fractions import Fraction

_THOUSANDS = re.compile(r"(?<=\d)(?:,\\!\s*|\{,\})(?=\d{3}(?!\d))")
_SPACING = re.compile(
    r"(?<!\\)\\[,;:! ]|\\q?quad\b|~|\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![A-Za-z])"
)
_SYNONYMS = (
    ("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\lbrace", "\\{"), ("\\rbrace", "\\}"),
    ("\\leq", "\\le"), ("\\geq", "\\ge"), ("\\leslant", "\\le"), ("\\geslant", "\\ge"),
    ("≤", "\\le "), ("≥", "\\ge "),
    ("−", "-"), ("×", "\\times "), ("·", "\\times "), ("∞", "\\infty "),
    ("°", ""), ("\\%", "%"), ("\\$", ""), ("$", ""),
    ("\\mathrm", "\\text"), ("\\textbf", "\\text"), ("\\textit", "\\text"), ("\\mbox", "\\text"),
)  # fmt: skip
_DECIMAL = r"(?:\d+\.?\d*|\.\d+)"
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d,])")
_UNIT = re.compile(
    r"(?<=[\d.}%])(?!.*(?:hundred|thousand|million|billion|trillion|dozen))"
    r"\s*(?:\\text\s*\{[^{}]*\}(?:\^\{?\d\}?)?|\^\s*\{?\\circ\}?|\\degree|\s[A-Za-z]{3,}[A-Za-z .]*)$"
)
_SCIENTIFIC = re.compile(
    rf"([+-]?)\s*(?:({_DECIMAL})(?:[eE]([+-]?\d{{1,4}})|\s*(?:\\times|\*)\s*10\s*\^\s*(?:\{{\s*([+-]?\d{{1,4}})\s*\}}|(\d))))"
)
_RATIO = re.compile(
    rf"([+-]?)\s*(?:(\d+)\s*)?\\frac\s*(?:\{{\s*([+-]?{_DECIMAL})\s*\}}|(\d))\s*(?:\{{\s*({_DECIMAL})\s*\}}|(\d))"
    rf"|([+-]?)\s*({_DECIMAL})\s*/\s*({_DECIMAL})"
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
    return re.sub(r"\s+", " ", text).strip().removesuffix(".").strip()


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
    if found := _RATIO.fullmatch(text):
        sign, whole, top1, top2, bottom1, bottom2, slash_sign, slash_top, slash_bottom = found.groups()
        top = Fraction(top1 or top2 or slash_top)
        bottom = Fraction(bottom1 or bottom2 or slash_bottom)
        if bottom == 0 or (whole and top < 0):
            return None
        value = int(whole or 0) + top / bottom
        return -value if "-" in (sign, slash_sign) else value
    return None


def _unwrap(text: str) -> str:
    """Braces or `\\text` around the whole."""
    while found := re.fullmatch(r"(?:\\text\s*)?\{([^{}]*)\}", text):
        text = found.group(1).strip()
    return text
