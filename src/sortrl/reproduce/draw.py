"""Pictures of the figures, from their results alone: the style of all of them, and Figure 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sortrl.files import atomic_path

STYLES = {
    "expert": ("#0072b2", "o", "expert (PPO)"),
    "ours": ("#d55e00", "s", "sortrl"),
    "paper": ("#009e73", "^", "recipe as printed"),
}


def panels(rows: int, columns: int, **options: Any) -> tuple[Figure, Any]:
    """A figure and its axes (rows, columns), with a light grid and small figures."""
    figure = Figure(figsize=(3.3 * columns, 2.9 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def draw(results: dict[str, Any], path: Path) -> None:
    """The figure: a row per protocol, a column per task, mean and standard error against eps."""
    curves = results["curves"]
    tasks = list(dict.fromkeys(task for protocol in curves.values() for task in protocol))
    figure, axes = panels(len(curves), len(tasks), sharey="col")
    for row, (protocol, by_task) in enumerate(curves.items()):
        for column, task in enumerate(tasks):
            axis = axes[row][column]
            for agent, (colour, marker, label) in STYLES.items():
                if agent not in by_task.get(task, {}):
                    continue
                points = by_task[task][agent]["curve"]
                eps, mean, sem = (np.array([point[key] for point in points]) for key in ("eps", "mean", "sem"))
                axis.plot(eps, mean, color=colour, marker=marker, markersize=3.5, linewidth=1.4, label=label)
                axis.fill_between(eps, mean - sem, mean + sem, color=colour, alpha=0.2, linewidth=0)
                worst = by_task[task][agent]["suites"].get("full")
                if worst:
                    eps, mean = (np.array([point[key] for point in worst]) for key in ("eps", "mean"))
                    axis.plot(
                        eps,
                        mean,
                        color=colour,
                        marker=marker,
                        markersize=4.5,
                        fillstyle="none",
                        linestyle=":",
                        linewidth=1.2,
                        label=f"{label}, worst of all attacks",
                    )
            axis.set_title(f"{task} · {protocol}", fontsize=9)
            if row == len(curves) - 1:
                axis.set_xlabel("ε (the agent's input units)", fontsize=8)
            if column == 0:
                axis.set_ylabel("return under attack (line: PGD-10)", fontsize=8)
    # Below the panels, where it covers no curve; each label once, whichever panels have it.
    shown = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    columns = max(1, len(shown))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    save(figure, path)
