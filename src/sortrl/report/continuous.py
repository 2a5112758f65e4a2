"""The report of a run with continuous actions: how far an action can be moved, what that costs, and what was found by attacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_UP, Decimal
from pathlib import Path
from typing import Any

from sortrl.core.checkpoint import damage_named
from sortrl.core.files import write_text
from sortrl.report.charts import Chart, Line, Panel, axis
from sortrl.report.model import clean
from sortrl.report.numbers import NONE, number, percent, plus_minus, rounded_down, short
from sortrl.report.text import Table, as_shown, markdown_table

CONTINUOUS = "continuous"  # the kind of such results
_MARKS = {"teacher": "square", "student": "circle"}


@dataclass(frozen=True)
class ContinuousRun:
    """The results of a run, read once."""

    env_id: str
    eps: float
    results: Mapping[str, Any]

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        rows: list[Mapping[str, Any]] = self.results["evaluation"]
        return rows

    @property
    def ranges(self) -> list[float]:
        env = self.results["env"]
        return [high - low for low, high in zip(env["action_low"], env["action_high"], strict=True)]

    def clean(self, policy: str) -> Mapping[str, Any] | None:
        return next((row for row in self.rows if (row["policy"], row["attack"]) == (policy, "none")), None)

    def worst(self, policy: str) -> Mapping[str, Any] | None:
        """The lowest return at eps."""
        rows = [
            row for row in self.rows if row["policy"] == policy and row["eps"] == self.eps and row["attack"] != "none"
        ]
        return min(rows, key=lambda row: float(row["mean"]), default=None)

    @property
    def warning(self) -> str | None:
        gate = self.results["gate"]
        return None if gate["passed"] else f"Do not rely on this student: {clean(gate['reason'])}."

    @property
    def headline(self) -> str:
        moves = ", ".join(
            f"{clean(name)} {_up(steep)} ε" for name, steep in zip(self.names, self.lipschitz, strict=True)
        )
        parts = [f"Within ε of an observation the action moves by at most {moves}"]
        own, teacher = self._returns("student"), self._returns("teacher")
        return f"{parts[0]}. Return {own} (teacher: {teacher})."

    def _returns(self, policy: str) -> str:
        at, worst = self.clean(policy), self.worst(policy)
        text = NONE if at is None else f"{number(at['mean'])} clean"
        return (
            text
            if worst is None
            else f"{text}, {number(worst['mean'])} under {worst['attack']} at ε = {short(self.eps)}"
        )

    @property
    def names(self) -> list[str]:
        names: list[str] = self.results["env"]["action_names"]
        return names

    @property
    def lipschitz(self) -> list[float]:
        constants: list[float] = self.results["policy"]["lipschitz"]
        return constants

    @property
    def about(self) -> tuple[str, ...]:
        teacher, policy = self.results["teacher"], self.results["policy"]
        return (
            f"Teacher: {clean(teacher['name'])} ({clean(teacher['algorithm'])})",
            f"Student: {clean(self.results['student']['network'])}, {number(policy['parameters'])} parameters",
            f"Seed {self.results['seed']}",
        )

    @property
    def proof(self) -> str:
        return clean(self.results["student"]["proof"])

    @property
    def command(self) -> str:
        return clean(self.results["command"])

    @property
    def version(self) -> str:
        return clean(self.results["sortrl"])


def is_continuous(results: Any) -> bool:
    """Whether these are the results of such a run, as far as their kind tells."""
    return isinstance(results, Mapping) and results.get("kind") == CONTINUOUS


def read_continuous_results(results: Mapping[str, Any]) -> ContinuousRun:
    return ContinuousRun(clean(results["env"]["id"]), float(results["config"]["eps"]), results)


def _up(value: float) -> str:
    """A bound (>= 0) to four digits, never rounded down.

    >>> _up(0.46171182), _up(3.50121), _up(2.0), _up(12.3449), _up(0.0)
    ('0.4618', '3.502', '2', '12.35', '0')
    """
    exact = Decimal(repr(value))
    if not exact or not exact.is_finite():
        return f"{value:g}"
    return f"{float(exact.quantize(Decimal(1).scaleb(exact.adjusted() - 3), rounding=ROUND_UP)):.6g}"


def bounds_table(run: ContinuousRun) -> Table:
    """Per number of the action: L, what it allows at eps, and what attacks reached."""
    student = [row for row in run.rows if row["policy"] == "student" and row["eps"] == run.eps and row["bound"]]
    teacher = [row for row in run.rows if row["policy"] == "teacher" and row["eps"] == run.eps]
    rows = []
    for index, name in enumerate(run.names):
        bound = max((row["bound"][index] for row in student), default=0.0)
        found, others = (max((row["moved"][index] for row in group), default=0.0) for group in (student, teacher))
        span = f"{short(run.results['env']['action_low'][index])} to {short(run.results['env']['action_high'][index])}"
        rows.append((clean(name), span, _up(run.lipschitz[index]), _up(bound), _up(found), _up(others)))
    at = f"at ε = {short(run.eps)}"
    return Table(("number", "range", "L", f"bound {at}", "largest move found", "the teacher's"), tuple(rows))


def evaluations_table(run: ContinuousRun) -> Table:
    rows = []
    for row in run.rows:
        attacked = row["attack"] != "none"
        moved = max(float(one) / span for one, span in zip(row["moved"], run.ranges, strict=True))
        held = (
            NONE if row["beyond"] is None or not attacked else "yes" if row["beyond"] == 0 else f"no: {row['beyond']}"
        )
        returns = plus_minus(row["mean"], row["sem"])
        eps = short(row["eps"]) if attacked else NONE
        rows.append((row["policy"], row["attack"], eps, returns, percent(moved) if attacked else NONE, held))
    return Table(("policy", "attack", "ε", "return ± SEM", "moved", "within its bound"), tuple(rows), 2)


def steepness_table(run: ContinuousRun) -> Table:
    ladder = run.results["ladder"]
    rows = tuple(
        (
            f"{short(rung['steepness'])}{', kept' if rung['rung'] == ladder['chosen'] else ''}",
            ", ".join(_up(constant) for constant in rung["lipschitz"]),
            number(rung["clean"]),
            percent(max(rung["kept"], 0.0)),
            f"{rung['error']:.3f}",
        )
        for rung in ladder["rungs"]
    )
    return Table(("steepness", "L", "return, clean", "skill kept", "error, in spreads of the action"), rows)


def sensors_table(run: ContinuousRun) -> Table:
    env = run.results["env"]
    rows = tuple(
        (clean(name), f"±{rounded_down(run.eps * scale)}", short(scale))
        for name, scale in zip(env["obs_names"], env["unit_to_raw"], strict=True)
    )
    return Table(("sensor", f"ε = {short(run.eps)}", "scale"), rows)


def returns_chart(run: ContinuousRun) -> Chart:
    attacks = list(dict.fromkeys(row["attack"] for row in run.rows if row["attack"] != "none")) or ["none"]
    lines = []
    for policy in ("teacher", "student"):
        for dash, attack in enumerate(attacks):
            rows = sorted(
                (row for row in run.rows if row["policy"] == policy and row["attack"] in ("none", attack)),
                key=lambda row: float(row["eps"]),
            )
            if not rows:
                continue
            x = tuple(float(row["eps"]) for row in rows)
            mean, sem = tuple(float(row["mean"]) for row in rows), tuple(float(row["sem"]) for row in rows)
            low, high = (tuple(m + sign * s for m, s in zip(mean, sem, strict=True)) for sign in (-1, 1))
            tips = tuple(f"{number(m)} at {short(eps)}" for eps, m in zip(x, mean, strict=True))
            name = f"{policy} under {attack}" if attack != "none" else f"{policy}, clean"
            lines.append(Line(name, policy, x, mean, low, high, dash=dash, mark=_MARKS[policy], tips=tips))
    lows, highs = [v for line in lines for v in line.low], [v for line in lines for v in line.high]
    room = (max(highs) - min(lows)) * 0.08 or 1.0
    panel = Panel(
        axis("ε of the attack (unit space)", 0.0, max(line.x[-1] for line in lines) * 1.04 or 1.0),
        axis("return", min(lows) - room, max(highs) + room, most=5),
        lines=tuple(lines),
    )
    return Chart(
        "return",
        "Return under attack",
        (panel,),
        "Mean return over the episodes when every observation may be shifted by up to ε; ε = 0 is clean play. Bands are ± one "
        f"standard error of the mean. Line styles tell the attacks apart ({', '.join(attacks)}).",
        "Return against eps. " + " ".join(f"{line.label}: {'; '.join(line.tips)}." for line in lines),
    )


def continuous_lines(results: Mapping[str, Any]) -> list[str]:
    """For the terminal."""
    with damage_named(Path("results.json"), "Make it again."):
        run = read_continuous_results(results)
        found = bounds_table(run)
        lines = [] if run.warning is None else [run.warning]
        lines.append(f"{run.env_id}: {run.headline}")
        lines += [
            f"{row[0]}: L {row[2]}, bound at eps {short(run.eps)} {row[3]}, largest move found {row[4]}"
            for row in found.rows
        ]
        beyond = sum(row["beyond"] or 0 for row in run.rows)
        lines.append(f"moved beyond its bound: {beyond} actions")
        return [line.replace("−", "-").replace("ε", "eps") for line in lines]


def continuous_markdown(run: ContinuousRun) -> str:
    parts = [
        f"# {as_shown(run.env_id)}: robustness report",
        *([f"**{as_shown(run.warning)}**"] if run.warning else []),
        as_shown(run.headline),
        "## How far an action can be moved",
        markdown_table(bounds_table(run)),
        "## Evaluation",
        markdown_table(evaluations_table(run)),
        "## What steepness costs",
        markdown_table(steepness_table(run)),
        "## In raw units",
        markdown_table(sensors_table(run)),
        "## Made by",
        f"    {run.command}",
    ]
    return "\n\n".join(parts) + "\n"


def render_continuous(results: Mapping[str, Any], out_dir: Path) -> Path:
    """Write report.html and report.md; return the path of the page."""
    from sortrl.report.page import drawings, style, template  # which knows this module

    with damage_named(Path(out_dir) / "results.json", "Make it again."):
        run = read_continuous_results(results)
        page = template("continuous.html.j2").render(
            run=run,
            css=style(),
            bounds=bounds_table(run),
            evaluations=evaluations_table(run),
            ladder=steepness_table(run),
            raw=sensors_table(run),
            drawn=drawings(returns_chart(run)),
        )
        text = continuous_markdown(run)
    write_text(Path(out_dir) / "report.md", text)
    path = Path(out_dir) / "report.html"
    write_text(path, page)
    return path
