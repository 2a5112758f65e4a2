"""The report in plain text: lines for the terminal, and report.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from typing import Any

from sortrl.report.model import Run, read_run
from sortrl.report.tables import Table, evaluation_table, ladder_table, raw_table
from sortrl.report.words import (
    NONE,
    headline,
    number,
    percent,
    plus_minus,
    raw_rows,
    rounded_down,
    seconds,
    short,
    warning,
)

LADDER_TITLE = "## What each certified radius costs"
LADDER_NOTE = "Students that were tried, on validation episodes. Skill: 0 is random play, 1 the teacher."
_NAMED_DIMENSIONS = 6  # more would not fit a terminal line


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
    return [*first, *(f"{name:<{width}}{text}".replace("−", "-").replace(NONE, "-") for name, text in lines)]


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
        f"# {_plain(run.env_id)}: robustness report",
        *([f"**{_plain(said)}** {_plain(run.gate.advice)}"] if (said := warning(run)) and run.gate else []),
        _plain(headline(run)),
        *([LADDER_TITLE, _table(ladder_table(run)), LADDER_NOTE] if run.ladder else []),
        "## Evaluation",
        _table(evaluation_table(run)),
        "Return: mean ± standard error over the episodes. Certified: share of the visited states whose action no "
        "perturbation of size ε can change; a dash where it does not apply.",
    ]
    if run.unit_to_raw:
        parts += ["## In raw units", _table(raw_table(run)), "Radii are rounded down."]
    # Four spaces make a code block that no content can end: the command is a single line.
    parts += [
        "## Made by",
        f"    {run.command}",
        f"sortrl {_plain(run.version)}, seed {run.seed}, {_plain(run.started)}.",
    ]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    rule = ["---" if column < table.named else "---:" for column in range(len(table.headings))]
    rows = [table.headings, tuple(rule), *(tuple(map(_plain, row)) for row in table.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _plain(text: str) -> str:
    """Text that markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", escape(text, quote=False))
