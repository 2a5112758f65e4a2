"""certificate.png: what ``sortrl certify`` found, in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sortrl.report.chart import Axis, Bars, Floats, Line, Panel, axis
from sortrl.report.figures import canvas, draw_panel, save


@dataclass(frozen=True)
class ReturnPoint:
    """Mean returns at one eps: under attack (with its standard error), and what is proven; None where nothing is."""

    eps_unit: float
    attacked: float | None
    sem: float
    proven: float | None


@dataclass(frozen=True)
class Scene:
    """A state to look at."""

    picture: npt.NDArray[np.uint8]
    caption: str


@dataclass(frozen=True)
class CertificateFigure:
    """Certified share against eps, the histogram of radii, returns against eps, and the least certain states."""

    title: str
    eps: Floats
    share: Floats
    edges: Floats
    counts: Floats
    attack: str
    clean: float
    returns: tuple[ReturnPoint, ...]
    scenes: tuple[Scene, ...]


def save_certificate(content: CertificateFigure, path: Path) -> None:
    """Draw ``content`` as a PNG."""
    panels = (_share_panel(content), _histogram_panel(content), _return_panel(content))
    scenes = content.scenes
    figure = canvas(12.0, 3.6 + (2.6 if scenes else 0.0))
    rows = figure.add_gridspec(2, 1, height_ratios=(1.3, 1.0)) if scenes else figure.add_gridspec(1, 1)
    above = rows[0].subgridspec(1, len(panels), wspace=0.08)
    for index, (panel, title) in enumerate(zip(panels, ("Certified share", "Radii", "Return"), strict=True)):
        ax = figure.add_subplot(above[index])
        draw_panel(ax, panel)
        ax.set_title(title, fontsize=10, loc="left")
        if any(line.label for line in panel.lines):
            ax.legend(fontsize=8, frameon=False)
    if scenes:
        below = rows[1].subgridspec(1, len(scenes), wspace=0.05)
        for index, scene in enumerate(scenes):
            ax = figure.add_subplot(below[index])
            ax.imshow(scene.picture)
            ax.set(xticks=[], yticks=[])
            ax.set_title(scene.caption, fontsize=8.5)
    figure.suptitle(content.title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    save(figure, path)


def _share_panel(content: CertificateFigure) -> Panel:
    line = Line("", "student", content.eps, content.share, filled=True)
    ticks = axis("", 0.0, 1.0, percent=True).ticks
    return Panel(
        axis("ε (unit space)", 0.0, content.eps[-1]), Axis("states certified", 0.0, 1.04, ticks), lines=(line,)
    )


def _histogram_panel(content: CertificateFigure) -> Panel:
    bars = Bars("", "student", content.edges[:-1], content.edges[1:], content.counts)
    top = max(*content.counts, 1.0) * 1.05
    return Panel(axis("certified radius", 0.0, content.edges[-1]), axis("states", 0.0, top, most=4), bars=(bars,))


def _return_panel(content: CertificateFigure) -> Panel:
    attacked = [p for p in content.returns if p.attacked is not None]
    lines = []
    if attacked:
        lines.append(_attacked_line(content, attacked))
    proven = [(p.eps_unit, p.proven) for p in content.returns if p.proven is not None]
    if proven:
        x, y = zip((0.0, content.clean), *proven, strict=True)
        lines.append(Line("proven: at least", "agreement", x, y, mark="square", dash=1))
    values = [content.clean, *(v for line in lines for v in (*line.y, *line.low, *line.high))]
    low, high = min(values), max(values)
    room = (high - low) * 0.08 or 1.0
    right = max(point.eps_unit for point in content.returns) * 1.04
    bottom = 0.0 if 0 <= low < 0.6 * high else low - room
    return Panel(axis("ε (unit space)", 0.0, right), axis("return", bottom, high + room, most=5), lines=tuple(lines))


def _attacked_line(content: CertificateFigure, points: Sequence[ReturnPoint]) -> Line:
    means = [content.clean, *(p.attacked for p in points if p.attacked is not None)]
    spreads = [0.0, *(p.sem for p in points)]
    return Line(
        f"under {content.attack}",
        "student",
        (0.0, *(p.eps_unit for p in points)),
        tuple(means),
        tuple(mean - sem for mean, sem in zip(means, spreads, strict=True)),
        tuple(mean + sem for mean, sem in zip(means, spreads, strict=True)),
        mark="circle",
    )
