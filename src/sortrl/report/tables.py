"""The tables of the report as plain cells, for the page and for markdown alike."""

from __future__ import annotations

from dataclasses import dataclass

from sortrl.report.model import Run
from sortrl.report.words import NONE, decimals_of, fixed, number, percent, raw_rows, rounded_down, short


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
