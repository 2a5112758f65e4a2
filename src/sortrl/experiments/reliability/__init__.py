"""Reliability campaigns: fuzzed files, kills at random moments, attacks on certified decisions, and a soak test with many threads
and processes."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

import torch

from sortrl.core.errors import SortRLError
from sortrl.core.files import read_object, write_json
from sortrl.evaluate import provenance
from sortrl.experiments.figure1 import Scale
from sortrl.experiments.reliability.crashes import CrashesFound, crashes
from sortrl.experiments.reliability.fuzz import FuzzFound, Main, fuzz
from sortrl.experiments.reliability.siege import SiegeFound, siege
from sortrl.experiments.reliability.soak import SoakFound, soak

__all__ = ["FILE_NAME", "PARTS", "Main", "crashes", "fuzz", "reliability", "siege", "soak", "summary"]

FILE_NAME = "reliability.json"
PARTS = ("fuzz", "crashes", "siege", "soak")
# Damaged files, kills, attacked decisions, and seconds of load.
SIZES = {
    "smoke": (2_000, 5, 10_000, 5.0),
    "cpu": (100_000, 200, 1_000_000, 300.0),
    "paper": (1_000_000, 2_000, 10_000_000, 3600.0),
}


class MadeBy(TypedDict):
    """What a campaign ran on."""

    command: str
    versions: dict[str, str]
    machine: dict[str, Any]
    installed: dict[str, str]


class ReliabilityDocument(TypedDict, total=False):
    """results/reliability.json: every campaign with what it was ``made_by``; those that were not run are absent."""

    schema: int
    kind: str
    fuzz: FuzzFound
    crashes: CrashesFound
    siege: SiegeFound
    soak: SoakFound


def reliability(
    main: Main,
    scale: Scale = "cpu",
    part: str | None = None,
    out: Path = Path("results"),
    work: Path = Path("runs/reliability"),
    seconds: float | None = None,
    progress: Callable[[str], None] = print,
    seed: int = 0,
) -> ReliabilityDocument:
    """Run the campaigns (or one ``part``) and write ``reliability.json`` into ``out``; other parts there are kept.

    ``main`` is the command line, which reads damaged files too. Finished pieces are kept in ``work``. ``seconds`` is how long
    the soak test lasts, if not as long as at that scale.
    """
    if part is not None and part not in PARTS:
        raise SortRLError(f"reliability: part is {part!r}, expected one of {', '.join(PARTS)}.")
    cases, kills, decisions, soak_seconds = SIZES[scale]
    torch.set_num_threads(1)  # forked children must not inherit threads, and cases are counted by processor time
    campaigns: dict[str, Callable[[], Iterator[Mapping[str, Any]]]] = {
        "crashes": lambda: crashes(kills, seed, work),  # first: it forks, which is best done from a small process
        "fuzz": lambda: fuzz(cases, seed, main, work),
        "siege": lambda: siege(decisions, seed, work),
        "soak": lambda: iter([soak(soak_seconds if seconds is None else seconds, progress=progress)]),
    }
    for name, campaign in campaigns.items():
        if part in (None, name):
            made_by = _made_by()  # before it starts: what is committed meanwhile is not what runs
            for found in campaign():  # a campaign that is stopped has recorded what it did
                document = read_object(out / FILE_NAME) if (out / FILE_NAME).exists() else {}
                head = {"schema": 1, "kind": "reliability"}
                write_json(out / FILE_NAME, {**head, **document, name: {**found, "made_by": made_by}})
                counts = {key: found[key] for key in ("cases", "kills", "decisions", "wanted") if key in found}
                progress(f"{name}: {counts}")
    return cast(ReliabilityDocument, read_object(out / FILE_NAME))


def _made_by() -> MadeBy:
    """Command, versions and machine; and everything installed, since any of it may be what breaks."""
    installed = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    return {
        "command": " ".join(["sortrl", *sys.argv[1:]]),
        "versions": provenance.versions(),
        "machine": provenance.machine(),
        "installed": dict(sorted(installed.items(), key=lambda item: item[0].lower())),
    }


def summary(results: ReliabilityDocument) -> list[str]:
    """The results in a few lines, for the terminal."""
    lines = []
    if "fuzz" in results:
        files = results["fuzz"]
        lines.append(f"fuzz: {files['cases']} files, {files['outcomes']}, slowest {files['slowest_cpu_seconds']} s")
    if "crashes" in results:
        killed = results["crashes"]
        lines.append(
            f"crashes: {killed['kills']} kills {killed['by_stage']}, {killed['runs_that_ended_with_other_bits']} other results"
        )
    if "siege" in results:
        attacked = results["siege"]
        lines.append(
            f"siege: {attacked['decisions']} certified decisions attacked, {attacked['changed']} changed; of "
            f"{attacked['attacked_too_far']} at {attacked['radii_too_large_by']:g} times their radius, {attacked['changed_too_far']}"
        )
    if "soak" in results:
        asked = results["soak"]
        lines.append(
            f"soak: {asked['decisions']} decisions, {asked['different_answers']} different, {asked['largest_growth_mb']} MB growth"
        )
    return lines
