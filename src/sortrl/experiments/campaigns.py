"""The campaigns behind results/reliability.json, at three sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sortrl.experiments import reliability as campaigns
from sortrl.experiments.figure1 import Scale

# Damaged files, kills, attacked decisions, and seconds of load.
SIZES = {
    "smoke": (2_000, 5, 10_000, 5.0),
    "cpu": (100_000, 200, 1_000_000, 300.0),
    "paper": (1_000_000, 2_000, 10_000_000, 3600.0),
}


def reliability(
    main: campaigns.Main,
    scale: Scale = "cpu",
    part: str | None = None,
    out: Path = Path("results"),
    work: Path = Path("runs/reliability"),
    seconds: float | None = None,
    progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write ``reliability.json`` into ``out``: all campaigns, or one of fuzz, crashes, siege and soak."""
    cases, kills, decisions, soak_seconds = SIZES[scale]
    duration = soak_seconds if seconds is None else seconds
    return campaigns.reliability(
        out,
        work,
        main,
        part,
        cases=cases,
        kills=kills,
        decisions=decisions,
        soak_seconds=duration,
        progress=progress,
    )


def summary(results: dict[str, Any]) -> list[str]:
    """What was found, in a few lines."""
    lines = []
    if "fuzz" in results:
        found = results["fuzz"]
        lines.append(f"fuzz: {found['cases']} files, {found['outcomes']}, slowest {found['slowest_cpu_seconds']} s")
    if "crashes" in results:
        found = results["crashes"]
        lines.append(
            f"crashes: {found['kills']} kills {found['by_stage']}, {found['runs_that_ended_with_other_bits']} other results"
        )
    if "siege" in results:
        found = results["siege"]
        lines.append(
            f"siege: {found['decisions']} certified decisions attacked, {found['changed']} changed; of "
            f"{found['attacked_too_far']} at {found['radii_too_large_by']:g} times their radius, {found['changed_too_far']}"
        )
    if "soak" in results:
        found = results["soak"]
        lines.append(
            f"soak: {found['decisions']} decisions, {found['different_answers']} different, {found['largest_growth_mb']} MB growth"
        )
    return lines
