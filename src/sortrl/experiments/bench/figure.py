"""The picture of a run, or of several processors: measured points under their roofs, and how time grows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from sortrl.core import files
from sortrl.report.figures import panels, save

COLOURS = ("#0072B2", "#D55E00", "#00805E", "#C4609B")
MARKS = {"max_forward": "o", "sort_forward": "s", "sort_grad_x": "D", "lp_forward": "^", "lp_train": "v"}
ROOF_OF = {
    "max_forward": "maximum",
    "sort_forward": "maximum",
    "sort_grad_x": "maximum",
    "lp_forward": "p = 8",
    "lp_train": "p = 8, with gradients",
}
BYTES = 4


def intensity(shape: list[int]) -> float:
    """Distances of one coordinate per byte that must come from memory or go there once: x, w and y.

    >>> round(intensity([512, 640, 640]), 1)
    49.2
    """
    batch, fan_in, out = shape
    return batch * fan_in * out / (BYTES * (batch * fan_in + fan_in * out + batch * out))


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Roofs and growth, a row for every processor."""
    figure, axes = panels(len(results), 2)
    for (name, result), (left, right) in zip(results.items(), axes, strict=True):
        _roofline(left, result)
        _growth(right, result)
        left.set_title(f"{result['machine']['cpu']} ({name})", fontsize=8)
    save(figure, path)


def draw_all(json: Path) -> None:
    """The picture beside a file of measurements: of it, and of those of other processors, whose names go on after its own."""
    paths = [json, *sorted(json.parent.glob(f"{json.stem}-*.json"))]
    draw({path.stem: files.read_json(path) for path in paths}, json.with_suffix(".png"))


def _roofline(axis: Any, result: dict[str, Any]) -> None:
    cases = [case for case in result["cases"] if case["op"] in MARKS and case["limit_s"]]
    at = np.array([1.0, 1000.0])
    roofs: dict[str, float] = {}
    for case in cases:
        roofs.setdefault(ROOF_OF[case["op"]], math.prod(case["shape"]) / case["limit_s"])
    for (roof, rate), colour in zip(roofs.items(), COLOURS, strict=False):
        axis.plot(at, [rate / 1e9] * 2, color=colour, lw=1, label=f"registers, {roof}")
    memory = result.get("limits", {}).get("bytes_per_s")
    if memory is not None:
        axis.plot(at, at * memory / 1e9, color="#3A424D", lw=1, ls="--", label="memory")
    for case in cases:
        colour = COLOURS[list(roofs).index(ROOF_OF[case["op"]])]
        rate = math.prod(case["shape"]) / case["ours_s"] / 1e9
        axis.plot(intensity(case["shape"]), rate, MARKS[case["op"]], color=colour, ms=5)
        axis.annotate(
            case["op"], (intensity(case["shape"]), rate), fontsize=5, xytext=(3, -5), textcoords="offset points"
        )
    highest = max(roofs.values(), default=1e9) / 1e9
    axis.set(xscale="log", yscale="log")
    axis.set_xlabel("distances per byte", fontsize=8)
    axis.set_ylabel("10⁹ distances per second", fontsize=8)
    axis.set_ylim(highest / 50, 6 * highest)
    axis.legend(fontsize=6, frameon=False, loc="upper left")


def _growth(axis: Any, result: dict[str, Any]) -> None:
    lines = [(op, size, line) for op, sizes in result["scaling"].items() for size, line in sizes.items()]
    for number, (op, size, line) in enumerate(lines):
        cost = np.array(line["seconds_per_element"])
        steps = np.geomspace(1, 16, len(cost))
        style = ("-", "--", ":")[number // len(COLOURS) % 3]
        axis.plot(steps, cost / cost[0], style, color=COLOURS[number % len(COLOURS)], lw=1, label=f"{op}: {size}")
    axis.set(xscale="log")
    axis.set_xlabel("size, over the smallest", fontsize=8)
    axis.set_ylabel("seconds per unit, over the smallest", fontsize=8)
    axis.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    axis.set_ylim(bottom=0.0)
    axis.legend(fontsize=5, frameon=False, ncols=2)
