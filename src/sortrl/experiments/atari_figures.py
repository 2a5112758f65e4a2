"""Figures 2 and 3: the Atari results of tables 1 and 3, drawn from their JSON files.

Figure 2 averages normalised scores over games: 0 is random play, 1 is human play or
the agent's own clean play, under PGD-10. Figure 3 has the returns of every game against eps: PGD-10 up to 5/255, the worst of four attacks
beyond. Rows that the paper prints are drawn thin.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sortrl.core.errors import SortRLError
from sortrl.core.files import read_object, write_json
from sortrl.evaluate import provenance
from sortrl.experiments import quoted
from sortrl.experiments.atari import AGENTS, AUTO, GAMES, MEMORY, OURS, QUANTIZED, ROUNDED, STICKY, STUDENT, TEACHER
from sortrl.report.figures import panels, save

STYLES = {
    STUDENT: ("#d55e00", "s"),
    ROUNDED: ("#a50f15", "v"),
    MEMORY: ("#000000", "^"),
    TEACHER: ("#0072b2", "o"),
    QUANTIZED: ("#cc79a7", "D"),
}
QUOTED_COLOURS = {
    "DQN": "#7f7f7f",
    "A3C": "#c7c7c7",
    "RS-DQN": "#bcbd22",
    "SA-DQN": "#e69f00",
    "WocaR-DQN": "#8c564b",
    "RADIAL-DQN": "#56b4e9",
    "RADIAL-A3C": "#9edae5",
    "BCL-MOS-AT": "#9467bd",
    "BCL-RADIAL": "#7f3c8d",
    "BCL-RADIAL+AT": "#e377c2",
    "SortRL-DQN": "#009e73",
    "SortRL-RADIAL": "#66c2a5",
}
NORMALISED_BY = ("human", "nominal")
SOURCE = "random and human play: DQN Zoo (Quan and Ostrovski 2020), episodes after 1 to 30 idle steps"

Points = dict[int, tuple[float, float | None]]
"""eps in 255ths -> mean return and its standard error, if there is one."""
Curves = dict[tuple[str, str], Points]
"""Of (game, agent)."""


def normalised(score: float, floor: float, top: float) -> float:
    """The share of the way from random play to the top: 0 is random, 1 as good as the top.

    >>> normalised(-20.7, -20.7, 14.6), normalised(14.6, -20.7, 14.6)
    (0.0, 1.0)
    """
    return (score - floor) / (top - floor)


def fig2(out: Path = Path("results"), game: str | None = None) -> dict[str, Any]:
    """Write ``fig2.json`` and ``fig2.png``, from ``table1.json`` in the same folder."""
    table = _read(out, "table1")
    if table is None:
        raise _nothing_yet("fig2", out, "table1")
    levels, measured, printed = table["levels"], _measured(_entries(table)), _printed(table)
    # Of our students one will do; every agent that is shown has played all the games that are.
    games = [name for name in _chosen(game) if _has(measured, name, TEACHER, levels) and _ours(measured, name, levels)]
    if not games:
        raise SortRLError(
            f"fig2: {out / 'table1.json'} has no game with all its cells yet; {len(table['missing'])} are missing. "
            f"Run: sortrl reproduce table1 --scale {table['scale']}"
        )
    agents = [
        (agent, source)
        for source, names in ((measured, AGENTS), (printed, _agents(printed)))
        for agent in names
        if all(_has(source, name, agent, levels) for name in games)
    ]
    results = {
        "schema": 1,
        "figure": "fig2",
        "scale": table["scale"],
        "games": games,
        "normalisation": f"(return - random) / (top - random), mean over the games; {SOURCE}; top: human, or the agent's own "
        "clean return, taken as exact; attack: PGD-10",
        "random_and_human": {name: list(quoted.RANDOM_AND_HUMAN[name]) for name in games},
        "versions": provenance.versions(),
        "curves": {
            by: [
                {"agent": agent, "quoted": source is printed, "points": points}
                for agent, source in agents
                if (points := _scores(source, agent, games, levels, by)) is not None
            ]
            for by in NORMALISED_BY
        },
    }
    write_json(out / "fig2.json", results)
    draw_fig2(results, out / "fig2.png")
    return results


def fig3(out: Path = Path("results"), game: str | None = None) -> dict[str, Any]:
    """Write ``fig3.json`` and ``fig3.png``, from ``table1.json`` and ``table3.json`` in the same folder, or from one of them."""
    tables = [_read(out, name) for name in ("table1", "table3")]
    if not any(tables):
        raise _nothing_yet("fig3", out, "table1", "table3")
    weak, strong = ((_measured(_entries(t)), _printed(t)) if t else ({}, {}) for t in tables)
    parts = {"PGD-10": weak, "worst of four": strong}
    games = [name for name in _chosen(game) if any(key[0] == name for mine, _ in parts.values() for key in mine)]
    if not games:
        raise _nothing_yet("fig3", out, "table1", "table3")
    results = {
        "schema": 1,
        "figure": "fig3",
        "scale": {t["table"]: t["scale"] for t in tables if t},
        "versions": provenance.versions(),
        "games": {
            name: [
                {"agent": agent, "quoted": source is printed, "attack": attack, "points": _listed(points)}
                for attack, (mine, printed) in parts.items()
                for source in (mine, printed)
                for (where, agent), points in source.items()
                if where == name
            ]
            for name in games
        },
    }
    write_json(out / "fig3.json", results)
    draw_fig3(results, out / "fig3.png")
    return results


def _read(out: Path, table: str) -> dict[str, Any] | None:
    path = out / f"{table}.json"
    return read_object(path) if path.exists() else None


def _nothing_yet(figure: str, out: Path, *tables: str) -> SortRLError:
    files = " and ".join(f"{name}.json" for name in tables)
    commands = " or ".join(f"sortrl reproduce {name}" for name in tables)
    return SortRLError(
        f"{figure} is drawn from {files} in {out}, and there is nothing in it yet. Run first: {commands}"
    )


def _chosen(game: str | None) -> tuple[str, ...]:
    if game is not None and game not in GAMES:
        raise SortRLError(f"There is no game {game!r} in the figures; choose one of {', '.join(GAMES)}.")
    return (game,) if game else GAMES


def _entries(table: dict[str, Any]) -> list[dict[str, Any]]:
    """What a table reports under attacks: where it has several, the worst of them, once all were tried."""
    if "worst" not in table:
        return [entry for entry in table["cells"] if entry["cell"]["attack"] not in (STICKY, AUTO)]
    return [row for row in table["worst"] if row["attacks_tried"] == len(table["attacks"])]


def _measured(entries: list[dict[str, Any]]) -> Curves:
    curves: Curves = {}
    for entry in entries:
        where = entry.get("cell", entry)
        curves.setdefault((where["game"], where["agent"]), {})[where["level"]] = (entry["mean"], entry["sem"])
    return curves


def _printed(table: dict[str, Any]) -> Curves:
    return {
        (row["game"], row["agent"]): {
            level: (cell[0], cell[1]) for level, cell in zip(row["levels"], row["figures"], strict=True) if cell
        }
        for row in table["quoted"]
    }


def _agents(curves: Curves) -> list[str]:
    return list(dict.fromkeys(agent for _, agent in curves))


def _has(curves: Curves, game: str, agent: str, levels: list[int]) -> bool:
    return all(level in curves.get((game, agent), {}) for level in levels)


def _ours(measured: Curves, game: str, levels: list[int]) -> bool:
    return any(_has(measured, game, agent, levels) for agent in OURS)


def _scores(curves: Curves, agent: str, games: list[str], levels: list[int], by: str) -> list[dict[str, Any]] | None:
    """The mean of the normalised scores at every eps; None for an agent whose clean play is no better than random, because its
    score cannot be normalised."""
    points = []
    for level in levels:
        scores, errors = [], []
        for game in games:
            floor, human = quoted.RANDOM_AND_HUMAN[game]
            top = human if by == "human" else curves[game, agent][0][0]
            if top <= floor:
                return None
            mean, sem = curves[game, agent][level]
            scores.append(normalised(mean, floor, top))
            errors.append(math.nan if sem is None else sem / (top - floor))
        spread = math.hypot(*errors) / len(games)
        sem_of_mean = None if math.isnan(spread) else spread
        points.append({"level": level, "score": float(np.mean(scores)), "sem": sem_of_mean})
    return points


def _listed(points: Points) -> list[dict[str, Any]]:
    return [{"level": level, "mean": mean, "sem": sem} for level, (mean, sem) in sorted(points.items())]


def draw_fig2(results: dict[str, Any], path: Path) -> None:
    figure, axes = panels(1, len(NORMALISED_BY))
    for axis, by in zip(axes[0], NORMALISED_BY, strict=True):
        for curve in results["curves"][by]:
            _line(axis, curve, "score")
        axis.set_title(f"relative to {'human play' if by == 'human' else 'clean play'}", fontsize=9)
        axis.set_xlabel("ε · 255, PGD-10", fontsize=8)
    axes[0][0].set_ylabel("normalised score", fontsize=8)
    figure.suptitle(f"Mean of {', '.join(results['games'])}", fontsize=9)
    _legend(figure, axes[0])
    save(figure, path)


def draw_fig3(results: dict[str, Any], path: Path) -> None:
    figure, axes = panels(1, len(results["games"]))
    for axis, (game, curves) in zip(axes[0], results["games"].items(), strict=True):
        for curve in curves:
            _line(axis, curve, "mean", dotted=curve["attack"] != "PGD-10")
        axis.set_title(game, fontsize=9)
        axis.set_xlabel("ε · 255 (dotted: worst of four attacks)", fontsize=8)
    axes[0][0].set_ylabel("return under attack (line: PGD-10)", fontsize=8)
    _legend(figure, axes[0])
    save(figure, path)


def _line(axis: Any, curve: dict[str, Any], key: str, dotted: bool = False) -> None:
    """One agent: thick and with its standard error if measured, thin if quoted."""
    agent, points, is_quoted = curve["agent"], curve["points"], curve["quoted"]
    level, mean = (np.array([point[name] for point in points], float) for name in ("level", key))
    colour, marker = (QUOTED_COLOURS[agent], ".") if is_quoted else STYLES[agent]
    axis.plot(
        level,
        mean,
        color=colour,
        marker=marker,
        markersize=3.5,
        fillstyle="none" if dotted else "full",
        linestyle=":" if dotted else "-",
        linewidth=0.8 if is_quoted else 1.6,
        label=f"{agent} (quoted)" if is_quoted else agent,
    )
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not is_quoted:
        sem = np.array([point["sem"] for point in points], float)
        axis.fill_between(level, mean - sem, mean + sem, color=colour, alpha=0.2, linewidth=0)


def _legend(figure: Figure, axes: Any) -> None:
    """One for all panels, beside them; of an agent with two lines, the first."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, line)
    figure.legend(handles.values(), handles, loc="outside right center", fontsize=7, frameon=False)
