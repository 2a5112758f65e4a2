"""Charts as inline SVG. Colours are CSS variables of the page, so one drawing serves light and dark."""

from __future__ import annotations

from html import escape

from sortrl.report.charts import Axis, Bars, Chart, Dots, Line, Panel, Rule

DASHES = ("", "7 4", "2 4", "10 4 2 4")
TOP, BETWEEN, BOTTOM, RIGHT = 24.0, 40.0, 40.0, 16.0


def draw(chart: Chart, width: float, height: float) -> str:
    """The chart for a place of ``width`` pixels: text scales with the drawing, so a phone needs one of its own."""
    left = 14 + 6.6 * max(len(text) for panel in chart.panels for _, text in panel.y.ticks or ((0.0, ""),))
    y, parts = TOP, []
    for index, panel in enumerate(chart.panels):
        frame = _Frame(panel, left, y, width - RIGHT, y + height * panel.height)
        parts.append(frame.draw(last=index == len(chart.panels) - 1))
        y = frame.bottom + BETWEEN
    total = y - BETWEEN + BOTTOM
    return (
        f'<svg viewBox="0 0 {width:g} {total:g}" role="img" aria-label="{escape(chart.summary)}">'
        f"<title>{escape(chart.title)}</title>{''.join(parts)}</svg>"
    )


def legend(chart: Chart) -> str:
    """The names of the curves as HTML, which wraps where an SVG cannot."""
    items = "".join(f"<li>{_key(item)}{escape(item.label)}</li>" for item in chart.legend)
    return f'<ul class="legend">{items}</ul>' if items else ""


def _key(item: Line | Dots | Bars) -> str:
    if isinstance(item, Line):
        drawn = f'<path class="line" d="M1 7H31"{_dash(item)}/>{_mark(item.mark, 16, 7)}'
    elif isinstance(item, Dots):
        drawn = '<path class="dots" d="M16 7h0"/>'
    else:
        drawn = '<rect class="bar" x="8" y="1" width="16" height="12"/>'
    return f'<svg class="key t-{item.tone}" width="32" height="14" viewBox="0 0 32 14" aria-hidden="true">{drawn}</svg>'


class _Frame:
    """A panel placed on the page: left, top, right and bottom of its plot area."""

    def __init__(self, panel: Panel, left: float, top: float, right: float, bottom: float) -> None:
        self.panel, self.left, self.top, self.right, self.bottom = panel, left, top, right, bottom

    def x(self, value: float) -> float:
        return round(self.left + self.panel.x.share(value) * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        return round(self.bottom - self.panel.y.share(value) * (self.bottom - self.top), 1)

    def points(self, x: tuple[float, ...], y: tuple[float, ...]) -> list[tuple[float, float]]:
        return [(self.x(a), self.y(b)) for a, b in zip(x, y, strict=True)]

    def draw(self, last: bool) -> str:
        panel = self.panel
        return "".join(
            [
                self._axes(panel.x, panel.y, last),
                *map(self._bars, panel.bars),
                *map(self._line, panel.lines),
                *map(self._dots, panel.dots),
                *(self._rule(rule, index) for index, rule in enumerate(panel.rules)),
            ]
        )

    def _axes(self, x: Axis, y: Axis, last: bool) -> str:
        parts = [f'<text class="axis" x="0" y="{self.top - 11:g}">{escape(y.label)}</text>']
        for value, text in y.ticks:
            at = self.y(value)
            parts.append(f'<path class="grid" d="M{self.left:g} {at:g}H{self.right:g}"/>')
            parts.append(
                f'<text class="tick" x="{self.left - 7:g}" y="{at + 4:g}" text-anchor="end">{escape(text)}</text>'
            )
        parts.append(f'<path class="base" d="M{self.left:g} {self.bottom:g}H{self.right:g}"/>')
        for value, text in self._fitting(x) if last else ():
            at = self.x(value)
            parts.append(f'<path class="base" d="M{at:g} {self.bottom:g}v4"/>')
            middle = min(at, self.right + RIGHT - 3.8 * len(text))  # the last text stays on the drawing
            place = f'x="{middle:g}" y="{self.bottom + 17:g}" text-anchor="middle"'
            parts.append(f'<text class="tick" {place}>{escape(text)}</text>')
        if x.label and last:
            place = f'x="{self.right:g}" y="{self.bottom + 34:g}" text-anchor="end"'
            parts.append(f'<text class="axis" {place}>{escape(x.label)}</text>')
        return "".join(parts)

    def _fitting(self, x: Axis) -> tuple[tuple[float, str], ...]:
        """The ticks of the x axis, or every second one where their texts would touch."""
        crowded = sum(7.5 * len(text) + 14 for _, text in x.ticks) > self.right - self.left
        return x.ticks[::2] if crowded else x.ticks

    def _bars(self, bars: Bars) -> str:
        drawn = []
        for left, right, height in zip(bars.left, bars.right, bars.height, strict=True):
            x, width, y = self.x(left), self.x(right) - self.x(left), self.y(height)
            drawn.append(f"M{x:g} {self.bottom:g}V{y:g}h{max(0.4, width - 1):.1f}V{self.bottom:g}z")
        return f'<path class="bar t-{bars.tone}" d="{"".join(drawn)}"/>'

    def _line(self, line: Line) -> str:
        points, parts = self.points(line.x, line.y), []
        if line.low:
            low, high = self.points(line.x, line.low), self.points(line.x, line.high)
            parts.append(f'<path class="band" d="{_path(high)}L{_path(low[::-1])[1:]}z"/>')
            whiskers = "".join(f"M{x:g} {a:g}V{b:g}" for (x, a), (_, b) in zip(low, high, strict=True) if a != b)
            parts.append(f'<path class="whisker" d="{whiskers}"/>')
        if line.filled:
            parts.append(f'<path class="band" d="{_path(points)}V{self.bottom:g}H{points[0][0]:g}z"/>')
        kind = "line thin" if line.thin else "line"
        parts.append(f'<path class="{kind}" d="{_path(points, line.step)}"{_dash(line)}/>')
        tips = line.tips or ("",) * len(points)
        parts += [
            _mark(line.mark, x, y, _tip(line, tip)) for (x, y), tip in zip(points, tips, strict=True) if line.mark
        ]
        return f'<g class="t-{line.tone}">{"".join(parts)}</g>'

    def _dots(self, dots: Dots) -> str:
        drawn = "".join(f"M{x:g} {y:g}h0" for x, y in self.points(dots.x, dots.y))
        return f'<path class="dots t-{dots.tone}" d="{drawn}"/>'

    def _rule(self, rule: Rule, index: int) -> str:
        label = escape(rule.label)
        if rule.axis == "y":
            at = self.y(rule.at)
            text = f'<text class="mark" x="{self.right:g}" y="{at - 5:g}" text-anchor="end">{label}</text>'
            return f'<path class="rule" d="M{self.left:g} {at:g}H{self.right:g}"/>{text}'
        at, kind = self.x(rule.at), "rule" if index == 0 else "rule second"
        # Beside the line, on the side that has room; each further rule has its label one line lower.
        room = at + 8 + 6.6 * len(rule.label) < self.right
        x, anchor = (at + 5, "start") if room else (at - 5, "end")
        text = f'<text class="mark" x="{x:g}" y="{self.top + 4 + 15 * index:g}" text-anchor="{anchor}">{label}</text>'
        return f'<path class="{kind}" d="M{at:g} {self.top - 6:g}V{self.bottom:g}"/>{text}'


def _path(points: list[tuple[float, float]], step: bool = False) -> str:
    if step:
        (x, y), *rest = points
        return f"M{x:g} {y:g}" + "".join(f"H{a:g}V{b:g}" for a, b in rest)
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)


def _dash(line: Line) -> str:
    pattern = DASHES[line.dash % len(DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def _tip(line: Line, text: str) -> str:
    return escape(f"{line.label}, {text}" if line.label else text)


def _mark(kind: str, x: float, y: float, tip: str = "") -> str:
    title = f"<title>{tip}</title>" if tip else ""
    if kind == "square":
        return f'<rect class="dot" x="{x - 3.5:g}" y="{y - 3.5:g}" width="7" height="7">{title}</rect>'
    return f'<circle class="dot" cx="{x:g}" cy="{y:g}" r="3.6">{title}</circle>' if kind else ""
