"""Pictures for papers and slides: every PNG of the package is drawn here or on the canvas that this module gives, by matplotlib
without its global state. The same content gives the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sortrl.core.files import atomic_path
from sortrl.report.chart import Chart, Panel

# Okabe and Ito's colours, which colour-blind readers can tell apart; the page has the same in its style sheet.
TONES = {
    "student": "#0072B2",
    "teacher": "#D55E00",
    "agreement": "#00805E",
    "below": "#C4609B",
    "faint": "#C9CED6",
    "ink": "#3A424D",
}
_DASHES = ("-", (0, (5, 2)), (0, (1, 2)), (0, (7, 2, 1, 2)))
_MARKS = {"": "", "circle": "o", "square": "s"}
_INK, _MUTED, _GRID = "#1D2228", "#5B6470", "#E6E8EC"
WIDTH, HEIGHT = 6.4, 2.7  # inches
_LONGEST = 48  # characters of a label


def canvas(width: float, height: float) -> Figure:
    """An empty white figure of that size in inches, which nothing but :func:`save` needs to know of."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def panels(rows: int, columns: int, **options: Any) -> tuple[Figure, Any]:
    """A figure and its axes (rows, columns), with a light grid and small numbers."""
    figure = canvas(3.3 * columns, 2.9 * rows)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
    return figure, axes


def save(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Write a figure as PNG, atomically."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=dpi, metadata={"Software": None})


def save_png(chart: Chart, path: Path, title: str) -> None:
    """Draw ``chart`` on white at 200 dots per inch; the same chart gives the same bytes."""
    ratios = [panel.height for panel in chart.panels]
    figure = canvas(WIDTH, HEIGHT * sum(ratios) + 0.75)
    grid = figure.add_gridspec(len(ratios), 1, height_ratios=ratios)
    axes = [figure.add_subplot(grid[index, 0]) for index in range(len(ratios))]
    for ax, panel in zip(axes, chart.panels, strict=True):
        draw_panel(ax, panel)
    for ax in axes[:-1]:
        ax.tick_params(labelbottom=False)
        ax.set_xlabel("")
    figure.suptitle(_plain(title), fontsize=10, color=_INK, fontweight="bold", x=0.01, ha="left", wrap=True)
    if chart.legend:
        # Above the plot, where no curve can run into it.
        handles, labels = _handles(axes)
        text = {"fontsize": 8, "labelcolor": _INK, "frameon": False, "borderaxespad": 0.2}
        columns = min(len(labels), 2)
        axes[0].legend(handles, labels, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, **text)
    save(figure, path, dpi=200)


def draw_panel(ax: Any, panel: Panel) -> None:
    """Draw the content and the axes of one panel."""
    for bars in panel.bars:
        widths = [right - left for left, right in zip(bars.left, bars.right, strict=True)]
        ax.bar(
            bars.left,
            bars.height,
            widths,
            align="edge",
            color=TONES[bars.tone],
            edgecolor="white",
            linewidth=0.4,
            label=_plain(bars.label),
        )
    for line in panel.lines:
        colour, label = TONES[line.tone], _plain(line.label)
        if line.low:
            ax.fill_between(line.x, line.low, line.high, color=colour, alpha=0.14, linewidth=0)
            below = [y - low for y, low in zip(line.y, line.low, strict=True)]
            above = [high - y for y, high in zip(line.y, line.high, strict=True)]
            ax.errorbar(line.x, line.y, [below, above], fmt="none", ecolor=colour, elinewidth=1, alpha=0.7)
        if line.filled:
            ax.fill_between(line.x, 0, line.y, color=colour, alpha=0.1, linewidth=0)
        style: dict[str, Any] = {
            "linestyle": _DASHES[line.dash % len(_DASHES)],
            "drawstyle": "steps-post" if line.step else "default",
        }
        style |= {
            "marker": _MARKS[line.mark],
            "markersize": 4,
            "clip_on": not line.mark,
        }  # marks on the frame stay whole
        ax.plot(line.x, line.y, color=colour, linewidth=0.8 if line.thin else 1.6, label=label, **style)
    for dots in panel.dots:
        ax.plot(
            dots.x,
            dots.y,
            linestyle="",
            marker="o",
            markersize=3.4 if dots.tone == "below" else 2.4,
            color=TONES[dots.tone],
            label=_plain(dots.label),
        )
    for index, rule in enumerate(panel.rules):
        _rule(ax, panel, rule.axis, rule.at, rule.label, index)
    ax.set(xlim=(panel.x.low, panel.x.high), ylim=(panel.y.low, panel.y.high))
    ax.set_xticks([value for value, _ in panel.x.ticks], [text for _, text in panel.x.ticks])
    ax.set_yticks([value for value, _ in panel.y.ticks], [text for _, text in panel.y.ticks])
    ax.set_xlabel(panel.x.label, fontsize=8.5, color=_MUTED, loc="right")
    ax.set_ylabel(panel.y.label, fontsize=8.5, color=_MUTED)
    ax.tick_params(labelsize=8, colors=_MUTED, left=False, color="#B5BBC4")
    ax.grid(axis="y", color=_GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color("#B5BBC4")


def _rule(ax: Any, panel: Panel, axis: str, at: float, label: str, index: int) -> None:
    style = {"color": _INK, "linewidth": 0.9, "linestyle": (0, (4, 2)) if index == 0 else (0, (1, 2))}
    text = {"fontsize": 8, "color": _INK, "bbox": {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8}}
    if axis == "y":
        ax.axhline(at, **style)
        ax.annotate(
            label,
            (1, at),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="right",
            **text,
        )
        return
    ax.axvline(at, **style)
    room = panel.x.share(at) < 0.75
    offset = (4 if room else -4, -9 - 13 * index)
    place = {"xycoords": ("data", "axes fraction"), "xytext": offset, "textcoords": "offset points"}
    ax.annotate(_plain(label), (at, 1), ha="left" if room else "right", **place, **text)


def _handles(axes: list[Any]) -> tuple[list[Any], list[str]]:
    found: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def _plain(text: str) -> str:
    """Text as it is, if it fits: matplotlib would read what stands between dollar signs as a formula."""
    return (text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…").replace("$", r"\$")
