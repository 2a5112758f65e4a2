"""What a chart shows, apart from how it is drawn: ``svg`` and ``figures`` draw the same :class:`Chart`."""

from __future__ import annotations

import math
from dataclasses import dataclass

Floats = tuple[float, ...]


@dataclass(frozen=True)
class Axis:
    """A range, its ticks (value, text) and what it measures. Logarithmic data come with their logarithm taken."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def share(self, value: float) -> float:
        """Where a value lies on the axis: 0 at its low end, 1 at its high end; what lies outside is put on the edge."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


@dataclass(frozen=True)
class Line:
    """A curve. ``low`` and ``high`` edge its band, ``dash`` numbers its style, ``mark`` is "", "circle" or "square"."""

    label: str
    tone: str
    x: Floats
    y: Floats
    low: Floats = ()
    high: Floats = ()
    dash: int = 0
    mark: str = ""
    tips: tuple[str, ...] = ()
    step: bool = False
    filled: bool = False
    thin: bool = False


@dataclass(frozen=True)
class Dots:
    label: str
    tone: str
    x: Floats
    y: Floats


@dataclass(frozen=True)
class Bars:
    label: str
    tone: str
    left: Floats
    right: Floats
    height: Floats


@dataclass(frozen=True)
class Rule:
    """A labelled reference line at a value of the x or y axis."""

    axis: str
    at: float
    label: str


@dataclass(frozen=True)
class Panel:
    x: Axis
    y: Axis
    lines: tuple[Line, ...] = ()
    dots: tuple[Dots, ...] = ()
    bars: tuple[Bars, ...] = ()
    rules: tuple[Rule, ...] = ()
    height: float = 1.0


@dataclass(frozen=True)
class Chart:
    """Panels from top to bottom. ``caption`` says how to read it, ``summary`` what it shows to who cannot see it."""

    key: str
    title: str
    panels: tuple[Panel, ...]
    caption: str
    summary: str

    @property
    def legend(self) -> tuple[Line | Dots | Bars, ...]:
        """One item per name."""
        items = [
            i for panel in self.panels for group in (panel.bars, panel.lines, panel.dots) for i in group if i.label
        ]
        return tuple({item.label: item for item in items}.values())


def axis(label: str, low: float, high: float, percent: bool = False, most: int = 6) -> Axis:
    """An axis from ``low`` to ``high`` with round ticks.

    >>> [text for _, text in axis("eps", 0.0, 0.3).ticks]
    ['0', '0.05', '0.1', '0.15', '0.2', '0.25', '0.3']
    >>> [text for _, text in axis("share", 0.0, 1.0, percent=True).ticks]
    ['0 %', '20 %', '40 %', '60 %', '80 %', '100 %']
    """
    if not high - low > 1e-9 * max(abs(low), abs(high), 1e-9):  # a single value still needs a range
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    rough = (high - low) / most
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= rough * 0.8)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    factor = 100 if percent else 1
    decimals = max(0, -math.floor(math.log10(step * factor) + 1e-9))
    texts = [(index * step, _fixed(index * step * factor, decimals)) for index in range(first, last + 1)]
    ticks = tuple((value, _tidy(text) + (" %" if percent else "")) for value, text in texts)
    return Axis(label, low, high, ticks)


def _fixed(value: float, decimals: int) -> str:
    return f"{value:,.{decimals}f}" if abs(value) < 1e6 and decimals < 6 else f"{value:.3g}"


def _tidy(text: str) -> str:
    text = text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text
    return "0" if text in ("-0", "0") else text.replace("-", "−")
