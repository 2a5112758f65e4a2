"""What the charts of a run show, apart from how they are drawn: ``svg`` and ``figures`` draw the same :class:`Chart`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sortrl.report.model import Row, Run
from sortrl.report.numbers import number, percent, plus_minus, rounded_down, short

MOST_POINTS = 500
KEYS = ("return", "certified_share", "radius_histogram", "episode", "training", "frontier")
_MARKS = {"teacher": "square", "student": "circle"}
Floats = tuple[float, ...]


@dataclass(frozen=True)
class Axis:
    """A range, its ticks (value, text) and what it measures. Logarithmic axes get log-transformed data."""

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
    """Panels from top to bottom. ``caption`` says how to read it, ``summary`` is the text alternative for screen readers."""

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


def charts(run: Run) -> list[Chart]:
    """Every chart for which the run has data, in the order of :data:`KEYS`."""
    made = (
        return_chart(run),
        share_chart(run),
        histogram_chart(run),
        episode_chart(run),
        training_chart(run),
        frontier_chart(run),
    )
    return [chart for chart in made if chart is not None]


def return_chart(run: Run) -> Chart:
    lines = tuple(
        line
        for policy in ("teacher", "student")
        for dash, attack in enumerate(run.curves or ("none",))
        if (line := _return_line(run, policy, attack, dash)) is not None
    )
    lows, highs = [v for line in lines for v in line.low], [v for line in lines for v in line.high]
    low, high = min(lows), max(highs)
    room = (high - low) * 0.08 or 1.0
    top = max([run.eps * 1.08, *(line.x[-1] * 1.04 for line in lines)])
    panel = Panel(
        axis("ε of the attack (unit space)", 0.0, top),
        axis("return", 0.0 if low >= 0 else low - room, high + room, most=5),
        lines=lines,
        rules=(Rule("x", run.eps, "trained ε"),),
    )
    styles = f" Line styles tell the attacks apart ({', '.join(run.curves)})." if len(run.curves) > 1 else ""
    others = [attack for attack in run.attacks if attack not in run.curves]
    styles += f" Run at one ε only, and listed in the table below: {', '.join(others)}." if others else ""
    return Chart(
        "return",
        "Return under attack",
        (panel,),
        "Mean return over the episodes when every observation may be shifted by up to ε; ε = 0 is clean play. "
        f"Bands and whiskers are ± one standard error of the mean.{styles} "
        "A curve that stays level is a policy the attack cannot move.",
        "Return against eps. " + " ".join(f"{line.label}: {'; '.join(line.tips)}." for line in lines),
    )


def _return_line(run: Run, policy: str, attack: str, dash: int) -> Line | None:
    rows = sorted((r for r in run.evaluation if (r.policy, r.attack) == (policy, attack)), key=lambda row: row.eps)
    clean = run.clean(policy)
    if attack != "none" and clean is not None and rows and rows[0].eps > 0:
        rows = [clean, *rows]
    if not rows and attack == (run.curves or ("none",))[0] and clean is not None:
        rows = [clean]  # a policy that was never attacked still has its clean return
    if not rows:
        return None
    at = [0.0 if row.is_clean else row.eps for row in rows]
    only_clean = all(row.is_clean for row in rows)
    return Line(
        f"{policy}, clean" if only_clean else f"{policy} under {attack}",
        policy,
        tuple(at),
        tuple(row.mean for row in rows),
        tuple(row.mean - row.sem for row in rows),
        tuple(row.mean + row.sem for row in rows),
        dash=dash,
        mark=_MARKS[policy],
        tips=tuple(_return_tip(row, eps) for row, eps in zip(rows, at, strict=True)),
    )


def _return_tip(row: Row, eps: float) -> str:
    return f"ε = {short(eps)}: {plus_minus(row.mean, row.sem)}"


def share_chart(run: Run) -> Chart:
    part = run.certified
    tips = tuple(f"ε = {short(eps)}: {percent(share)}" for eps, share in zip(part.eps, part.share, strict=True))
    line = Line("", "student", part.eps, part.share, mark="circle", tips=tips, filled=True)
    share = run.certified_at_eps
    mark = "trained ε" if share is None else f"trained ε: {percent(share)}"
    panel = Panel(
        axis("ε (unit space)", 0.0, max(part.eps[-1], run.eps * 1.08)),
        Axis("states certified", 0.0, 1.04, axis("", 0.0, 1.0, percent=True).ticks),
        lines=(line,),
        rules=(Rule("x", run.eps, mark),),
    )
    return Chart(
        "certified_share",
        "Certified share",
        (panel,),
        "Share of the visited states in which no perturbation of size ε, however it is found, can change the action. "
        "This is proven, not measured under an attack; it can only fall as ε grows.",
        f"Share of states certified against eps. {'; '.join(tips[:40])}.",
    )


def histogram_chart(run: Run) -> Chart | None:
    part, total = run.certified, sum(run.certified.counts)
    if total <= 0:
        return None
    shares = [count / total for count in part.counts]
    bins = list(zip(part.edges, part.edges[1:], shares, strict=False))
    # A bin across eps is drawn in two colours: its states lie on both sides.
    below = [(left, min(right, run.eps), h) for left, right, h in bins if left < run.eps and h > 0]
    above = [(max(left, run.eps), right, h) for left, right, h in bins if right > run.eps and h > 0]
    rules: tuple[Rule, ...] = (Rule("x", run.eps, f"ε = {short(run.eps)}"),)
    if part.radius_median <= part.edges[-1]:
        rules += (Rule("x", part.radius_median, "median"),)
    panel = Panel(
        axis("certified radius (unit space)", 0.0, max(part.edges[-1], run.eps * 1.08)),
        axis("states", 0.0, max(shares) * 1.12, percent=True, most=4),
        bars=tuple(
            filter(None, (_bars("not certified at ε", "below", below), _bars("certified at ε", "student", above)))
        ),
        rules=rules,
    )
    return Chart(
        "radius_histogram",
        "Certified radii",
        (panel,),
        "How many of the visited states have which certified radius. What lies right of ε is certified at ε; "
        f"half of the states have a radius of {rounded_down(part.radius_median)} or more.",
        f"Histogram of certified radii of {number(total)} states; median {rounded_down(part.radius_median)}, "
        f"{percent(run.certified_at_eps)} certified at eps {short(run.eps)}.",
    )


def _bars(label: str, tone: str, bins: list[tuple[float, float, float]]) -> Bars | None:
    if not bins:
        return None
    left, right, height = zip(*bins, strict=True)
    return Bars(label, tone, left, right, height)


def episode_chart(run: Run) -> Chart | None:
    episode = run.certified.episode
    if episode is None or not episode.radii:
        return None
    stride = math.ceil(len(episode.radii) / MOST_POINTS)
    steps = tuple(float(start) for start in range(0, len(episode.radii), stride))
    radii = episode.radii[::stride]
    points = list(zip(steps, radii, strict=True))
    kept, lost = [p for p in points if p[1] > run.eps], [p for p in points if p[1] <= run.eps]
    panel = Panel(
        axis("step of the episode", 0.0, float(max(1, len(episode.radii)))),
        axis("certified radius", 0.0, max(*radii, run.eps, 1e-9) * 1.12, most=4),
        lines=(Line("", "faint", steps, radii, thin=True),),
        dots=tuple(
            filter(None, (_dots("not certified at ε", "below", lost), _dots("certified at ε", "student", kept)))
        ),
        rules=(Rule("y", run.eps, f"ε = {short(run.eps)}"),),
    )
    share = sum(radius > run.eps for radius in episode.radii) / len(episode.radii)
    thinned = f" One decision in {stride} is drawn." if stride > 1 else ""
    return Chart(
        "episode",
        "Radius along one episode",
        (panel,),
        f"Every decision of one clean episode (seed {episode.seed}, return {number(episode.total)}). Dots above the "
        f"line are decisions that no perturbation up to ε can change: {percent(share)} of them.{thinned}",
        f"Certified radius over {len(episode.radii)} steps of one episode; {percent(share)} of them certified.",
    )


def _dots(label: str, tone: str, points: list[tuple[float, float]]) -> Dots | None:
    if not points:
        return None
    x, y = zip(*points, strict=True)
    return Dots(label, tone, x, y)


def training_chart(run: Run) -> Chart | None:
    if len(run.training) < 2:
        return None
    stride = math.ceil(len(run.training) / MOST_POINTS)
    points = [*run.training[:-1:stride], run.training[-1]]
    x = tuple(point.step for point in points)
    steps = axis("training step", 0.0, x[-1] or 1.0)
    curves = (
        Line("agreement with the teacher", "agreement", x, tuple(point.agreement for point in points), dash=1),
        Line("certified at ε", "student", x, tuple(point.certified for point in points)),
    )
    shares = Axis("batch share", 0.0, 1.04, axis("", 0.0, 1.0, percent=True, most=5).ticks)
    panels, caption = (
        [Panel(steps, shares, lines=curves)],
        (
            "Share of each batch on which the student plays the teacher's action, and on which that action is certified at ε, by the "
            "network being trained."
        ),
    )
    exponents = [point.p for point in points if point.p is not None]
    weights = [point.weight for point in points if point.weight is not None]
    if len(exponents) == len(weights) == len(points):
        panels += [_exponent_panel(steps, x, exponents), _weight_panel(steps, x, weights)]
        caption += (
            " Below: the exponent p of its norms, which rises to ∞ (only then is it the network that is certified), and the "
            "weight λ of the cross-entropy, which falls to make room for the margin."
        )
    return Chart(
        "training",
        "Training",
        tuple(panels),
        caption,
        f"Training over {number(x[-1])} steps: agreement ends at {percent(points[-1].agreement)}, "
        f"certified share at {percent(points[-1].certified)}.",
    )


def _exponent_panel(steps: Axis, x: tuple[float, ...], values: list[float]) -> Panel:
    """p on a scale of powers of two; infinity is a notch above the largest finite value."""
    finite = [math.log2(p) for p in values if p < math.inf] or [3.0]
    low, high = math.floor(min(finite)), math.ceil(max(finite))
    notch = high + max(1.0, (high - low) / 4)
    ticks = [(float(power), number(2.0**power)) for power in sorted({low, round((low + high) / 2), high})]
    if math.inf in values:
        ticks.append((notch, "∞"))
    y = tuple(notch if p == math.inf else math.log2(p) for p in values)
    shown = Axis("exponent p", low - 0.5, notch + 0.5, tuple(ticks))
    return Panel(steps, shown, lines=(Line("", "ink", x, y, step=True),), height=0.45)


def _weight_panel(steps: Axis, x: tuple[float, ...], values: list[float]) -> Panel:
    """Lambda on a scale of powers of ten."""
    smallest = min((value for value in values if value > 0), default=1.0)
    y = tuple(math.log10(max(value, smallest)) for value in values)
    low = math.floor(min(y) + 1e-9)
    high = max(low + 1, math.ceil(max(y) - 1e-9))
    stride = math.ceil((high - low) / 4)
    ticks = tuple((float(power), short(10.0**power)) for power in range(low, high + 1, stride))
    shown = Axis("weight λ", low - 0.15, high + 0.15, ticks)
    return Panel(steps, shown, lines=(Line("", "ink", x, y),), height=0.4)


def frontier_chart(run: Run) -> Chart | None:
    """What each certified radius costs: the students that were tried, by the share that they certify."""
    rungs = sorted(run.ladder, key=lambda rung: rung.certified)
    if len(rungs) < 2 or run.needed is None:
        return None
    x = tuple(rung.certified for rung in rungs)
    clean, attacked = tuple(rung.clean for rung in rungs), tuple(rung.attacked for rung in rungs)
    low, high = min(*clean, *attacked, run.needed), max(*clean, *attacked, run.needed)
    room = (high - low) * 0.12 or 1.0
    names = [f"rung {rung.number} (margins for ε = {short(rung.eps)})" for rung in rungs]
    lines = (
        Line(
            "clean",
            "student",
            x,
            clean,
            mark="circle",
            tips=tuple(f"{name}: {number(rung.clean)}" for name, rung in zip(names, rungs, strict=True)),
        ),
        Line(
            f"worst of the quick checks at ε = {short(run.eps)}",
            "below",
            x,
            attacked,
            dash=1,
            mark="square",
            tips=tuple(
                f"{name}: {number(rung.attacked)} ({rung.attack})" for name, rung in zip(names, rungs, strict=True)
            ),
        ),
    )
    kept = next((rung for rung in rungs if rung.chosen), None)
    rules = () if kept is None else (Rule("x", kept.certified, f"kept: rung {kept.number}"),)
    panel = Panel(
        axis(f"states certified at ε = {short(run.eps)}", max(0.0, min(x) - 0.02), max(x) + 0.02, percent=True),
        axis("return", low - room, high + room, most=5),
        lines=lines,
        rules=(*rules, Rule("y", run.needed, "least clean return that keeps the skill")),
    )
    return Chart(
        "frontier",
        "Skill against certified share",
        (panel,),
        "Each point is a student of the ladder, on validation episodes: to the right more is certified, further up more is earned. The "
        "one that is kept is the most certified of those that keep the skill and fall no deeper under attack than their teacher.",
        "Returns of the students that were tried against their certified share. "
        + " ".join(f"{line.label}: {'; '.join(line.tips)}." for line in lines),
    )
