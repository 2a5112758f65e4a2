"""Numbers as a reader wants them. Radii and shares are rounded down: the text never promises more than the proof."""

from __future__ import annotations

import math
from decimal import ROUND_DOWN, Decimal

from sortrl.report.model import Row, Run

NONE = "–"


def number(value: float, decimals: int | None = None) -> str:
    """A return or the like: about four digits, thousands apart, a true minus sign.

    >>> number(497.26), number(500.0), number(-0.123), number(133000)
    ('497.3', '500', '−0.123', '133,000')
    """
    places = decimals_of(value) if decimals is None else decimals
    text = f"{value:,.{places}f}" if abs(value) < 1e12 else f"{value:.3e}"
    if "." in text and "e" not in text:
        text = text.rstrip("0").rstrip(".")
    return text.replace("-", "−") if text != "-0" else "0"


def plus_minus(mean: float, spread: float) -> str:
    """
    >>> plus_minus(497.26, 1.049)
    '497.3 ± 1'
    """
    return f"{number(mean)} ± {number(spread, decimals_of(mean))}"


def short(value: float) -> str:
    """An eps or a scale, as it would be typed.

    >>> short(0.1), short(0.30000000000000004), short(12)
    ('0.1', '0.3', '12')
    """
    return f"{value:.6g}".replace("-", "−")


def rounded_down(value: float, digits: int = 3) -> str:
    """A radius (>= 0) to three significant digits, never rounded up.

    >>> rounded_down(0.0209999), rounded_down(0.21), rounded_down(0.0), rounded_down(1234.5)
    ('0.0209', '0.21', '0', '1234')
    """
    if value == 0 or value >= 1e15:
        return f"{value:.3g}"
    exact = Decimal(repr(value))
    place = min(0, exact.adjusted() - digits + 1)
    text = exact.quantize(Decimal(1).scaleb(place), rounding=ROUND_DOWN) if place > -30 else exact
    return f"{float(text):.{digits}g}".replace("-", "−") if value < 1e-4 else f"{text.normalize():f}"


def percent(share: float | None) -> str:
    """A share, rounded down, with one decimal: 100 % means all of them.

    >>> percent(0.9349), percent(1.0), percent(0.99999), percent(0.0), percent(0.0004), percent(0.4), percent(None)
    ('93.4 %', '100 %', '99.9 %', '0 %', '< 0.1 %', '40 %', '–')
    """
    if share is None:
        return NONE
    if 0 < share < 0.001:
        return "< 0.1 %"
    tenths = math.floor(share * 1000 + 1e-9)
    return f"{tenths // 10} %" if tenths % 10 == 0 else f"{tenths / 10:.1f} %"


def seconds(value: float) -> str:
    """
    >>> seconds(8.04), seconds(192.0), seconds(7300)
    ('8.0 s', '3 min 12 s', '2 h 1 min')
    """
    if value < 59.95:
        return f"{value:.1f} s"
    whole = round(value)
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def headline(run: Run) -> str:
    """The key result in one sentence.

    "Certified at ε = 0.1 in 93.4 % of the visited states; return 499 clean and 497 under PGD-10 (teacher: 500 and
    212)."
    """
    share = run.certified_at_eps
    states = (
        f"in {percent(share)} of the visited states" if share is not None else "in an unmeasured share of the states"
    )
    student, teacher = _returns(run, "student"), _returns(run, "teacher")
    return f"Certified at ε = {short(run.eps)} {states}; return {student}" + (
        f" (teacher: {teacher})." if teacher else "."
    )


def _returns(run: Run, policy: str) -> str:
    clean, attacked = run.clean(policy), run.attacked(policy)
    parts = [] if clean is None else [f"{number(clean.mean)} clean" if policy == "student" else number(clean.mean)]
    if attacked is not None:
        same = (own := run.attacked("student")) is not None and own.attack == attacked.attack and clean is not None
        parts.append(
            number(attacked.mean)
            if policy == "teacher" and same
            else f"{number(attacked.mean)} under {attacked.attack}"
        )
    return " and ".join(parts)


def beside_teacher(row: Row | None, attack: str = "none") -> str:
    """The teacher's figure; where it is another attack's than the one beside it, with that one's name."""
    if row is None:
        return "no teacher row"
    return f"teacher {number(row.mean)}" + ("" if row.attack == attack else f" under {row.attack}")


def warning(run: Run) -> str | None:
    """What stands before everything else, if the student is not to be relied on."""
    if run.gate is None or run.gate.passed:
        return None
    return f"Do not rely on this student: {run.gate.reason}."


def raw_rows(run: Run, most: int = 24) -> list[tuple[str, float]]:
    """(name, raw units per unit of radius): every dimension, or of a large observation the extremes and the median."""
    rows = list(zip(run.obs_names, run.unit_to_raw, strict=False))
    if len(rows) <= most:
        return rows
    ordered = sorted(rows, key=lambda row: row[1])
    chosen = {"smallest scale": ordered[0], "median scale": ordered[len(ordered) // 2], "largest scale": ordered[-1]}
    return [(f"{name} ({which})", scale) for which, (name, scale) in chosen.items()]


def fixed(value: float, places: int) -> str:
    """A number of a column, in which all have as many decimals.

    >>> fixed(500.0, 1), fixed(-0.04, 1)
    ('500.0', '−0.0')
    """
    return f"{value:,.{places}f}".replace("-", "−")


def decimals_of(value: float) -> int:
    """Decimals that give a number of this size about four digits."""
    size = abs(value)
    return 0 if size >= 1000 else 1 if size >= 10 else 2 if size >= 1 else 3
