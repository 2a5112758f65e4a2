"""What the report says in words: its headline and tables, the lines for the terminal, and report.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from sortrl.report.model import Row, Run, read_run
from sortrl.report.numbers import NONE, decimals_of, fixed, number, percent, plus_minus, rounded_down, seconds, short

LADDER_TITLE = "## What each certified radius costs"
LADDER_NOTE = "Students that were tried, on validation episodes. Skill: 0 is random play, 1 the teacher."
_NAMED_DIMENSIONS = 6  # more would not fit a terminal line


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


@dataclass(frozen=True)
class Table:
    """Headings and rows of text; the first ``named`` columns are words, the others numbers."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    named: int = 1


def evaluation_table(run: Run) -> Table:
    places = decimals_of(max(abs(row.mean) for row in run.evaluation))
    rows = tuple(
        (
            row.policy,
            row.attack,
            NONE if row.is_clean else short(row.eps),
            f"{fixed(row.mean, places)} ± {fixed(row.sem, places)}",
            fixed(row.std, places),
            NONE if row.is_clean else percent(row.changed_share),
            percent(row.certified_share),
            number(row.episodes),
        )
        for row in run.evaluation
    )
    return Table(
        ("policy", "attack", "ε", "return ± SEM", "std", "actions changed", "certified at ε", "episodes"),
        rows,
        2,
    )


def raw_table(run: Run) -> Table:
    """What eps and the median radius are in each dimension's own units."""
    median = run.certified.radius_median
    rows = tuple(
        (name, f"±{rounded_down(median * scale)}", f"±{rounded_down(run.eps * scale)}", short(scale))
        for name, scale in raw_rows(run)
    )
    return Table(("observation", "median radius", f"ε = {short(run.eps)}", "scale"), rows)


def ladder_table(run: Run) -> Table:
    """What each certified radius costs: the students that were tried, on validation episodes."""
    rows = tuple(
        (
            f"{rung.number}{', kept' if rung.chosen else ''}",
            short(rung.eps),
            number(rung.clean),
            NONE if rung.kept is None else percent(max(rung.kept, 0.0)),
            f"{number(rung.attacked)}" + ("" if rung.attack == "none" else f" ({rung.attack})"),
            percent(rung.certified),
        )
        for rung in run.ladder
    )
    headings = ("rung", "margins for ε", "return, clean", "skill kept", "worst of the quick checks")
    return Table((*headings, f"certified at ε = {short(run.eps)}"), rows)


def summary_lines(results: Mapping[str, Any]) -> list[str]:
    """The result of a run in about a dozen aligned lines, for the terminal."""
    run = read_run(results)
    data, median = run.data, run.certified.radius_median
    lines = [
        ("task", f"{run.env_id}, teacher {run.teacher}" + (f" ({run.teacher_source})" if run.teacher_source else "")),
        ("return, clean", _beside(run, "clean")),
        (_attack_name(run), _beside(run, "attacked")),
        (f"certified at eps {short(run.eps)}", _certified(run)),
        ("median radius", f"{rounded_down(median)} in unit space"),
    ]
    if run.unit_to_raw:
        shown = raw_rows(run, _NAMED_DIMENSIONS)
        lines.append(
            ("  in raw units", ", ".join(f"{name} ±{rounded_down(median * scale, 2)}" for name, scale in shown))
        )
    if run.certified.whole_episodes is not None:
        lines.append(("whole episodes", f"{percent(run.certified.whole_episodes)} certified from first to last step"))
    if data.agreement is not None:
        held_out = (
            f" of {number(data.held_out_states)} held-out states" if data.held_out_states else " of held-out states"
        )
        lines.append(("agreement", f"{percent(data.agreement)}{held_out}"))
    dagger = f", {number(data.dagger_states)} of them visited by the student" if data.dagger_states else ""
    lines.append(("data", f"{number(data.states)} states, {number(data.distinct)} distinct{dagger}"))
    stages = ", ".join(f"{name} {seconds(taken)}" for name, taken in run.stage_seconds)
    lines.append(
        ("time", f"{seconds(sum(taken for _, taken in run.stage_seconds))}" + (f" ({stages})" if stages else ""))
    )
    width = max(len(name) for name, _ in lines) + 2
    first = [] if (said := warning(run)) is None or run.gate is None else [said, run.gate.advice]
    rows = [f"{name:<{width}}{text}" for name, text in lines]
    return [*first, *(row.replace("−", "-").replace(NONE, "-") for row in (*rows, plainly(run)))]


def plainly(run: Run) -> str:
    """What came of it, in one sentence for someone who reads nothing else."""
    parts = []
    for policy in ("teacher", "student"):
        clean, attacked = run.clean(policy), run.attacked(policy)
        if clean is not None and attacked is not None:
            moved = f"{number(clean.mean)} to {number(attacked.mean)}"
            parts.append(f"{attacked.attack} takes the {policy} from {moved}")
    proven = f"{percent(run.certified_at_eps)} of the student's decisions are proven"
    return f"In short: {', '.join((*parts, proven))}."


def _certified(run: Run) -> str:
    row = run.attacked("student")
    under = "" if row is None or row.certified_share is None else f", {percent(row.certified_share)} under {row.attack}"
    return f"{percent(run.certified_at_eps)} of the visited states{under}"


def _attack_name(run: Run) -> str:
    row = run.attacked("student")
    return "under attack" if row is None else f"under {row.attack}, eps {short(run.eps)}"


def _beside(run: Run, which: str) -> str:
    parts = []
    own = None if which == "clean" else run.attacked("student")
    for policy in ("student", "teacher"):
        row = run.clean(policy) if which == "clean" else run.attacked(policy)
        other = "" if row is None or own is None or row.attack == own.attack else f" under {row.attack}"
        parts.append(f"{policy} {NONE if row is None else plus_minus(row.mean, row.sem)}{other}")
    return ", ".join(parts)


def markdown(results: Mapping[str, Any]) -> str:
    """The headline and the tables of the page, as GitHub-flavoured markdown."""
    run = read_run(results)
    parts = [
        f"# {as_shown(run.env_id)}: robustness report",
        *([f"**{as_shown(said)}** {as_shown(run.gate.advice)}"] if (said := warning(run)) and run.gate else []),
        as_shown(headline(run)),
        *([LADDER_TITLE, markdown_table(ladder_table(run)), LADDER_NOTE] if run.ladder else []),
        "## Evaluation",
        markdown_table(evaluation_table(run)),
        "Return: mean ± standard error over the episodes. Certified: share of the visited states whose action no "
        "perturbation of size ε can change; a dash where it does not apply.",
    ]
    if run.unit_to_raw:
        parts += ["## In raw units", markdown_table(raw_table(run)), "Radii are rounded down."]
    # Four spaces make a code block that no content can end: the command is a single line.
    parts += [
        "## Made by",
        f"    {run.command}",
        f"sortrl {as_shown(run.version)}, seed {run.seed}, {as_shown(run.started)}.",
    ]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    rule = ["---" if column < table.named else "---:" for column in range(len(table.headings))]
    rows = [table.headings, tuple(rule), *(tuple(map(as_shown, row)) for row in table.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def as_shown(text: str) -> str:
    """Text that markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", escape(text, quote=False))
