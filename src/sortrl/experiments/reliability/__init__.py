"""Campaigns that try to break the package: damaged files, kills at random moments, attacks on what is certified, many threads and
processes at once."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from sortrl.core.errors import SortRLError
from sortrl.core.files import read_object, write_json
from sortrl.evaluate import provenance
from sortrl.experiments.reliability.crashes import crashes
from sortrl.experiments.reliability.fuzz import Main, fuzz
from sortrl.experiments.reliability.siege import siege
from sortrl.experiments.reliability.soak import soak

__all__ = ["FILE_NAME", "PARTS", "Main", "crashes", "fuzz", "reliability", "siege", "soak"]

FILE_NAME = "reliability.json"
PARTS = ("fuzz", "crashes", "siege", "soak")
Progress = Callable[[str], None]


def reliability(
    out: Path,
    work: Path,
    main: Main,
    part: str | None = None,
    *,
    cases: int = 100_000,
    kills: int = 200,
    decisions: int = 1_000_000,
    soak_seconds: float = 300.0,
    seed: int = 0,
    progress: Progress = print,
) -> dict[str, Any]:
    """Run the campaigns (or one ``part``) and write ``reliability.json`` into ``out``; other parts there are kept.

    ``main`` is the command line, which reads damaged files too. Finished pieces are kept in ``work``.
    """
    if part is not None and part not in PARTS:
        raise SortRLError(f"reliability: part is {part!r}, expected one of {', '.join(PARTS)}.")
    torch.set_num_threads(1)  # forked children must not inherit threads, and cases are counted by processor time
    campaigns: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "crashes": lambda: crashes(kills, seed, work),  # first: it forks, which is best done from a small process
        "fuzz": lambda: fuzz(cases, seed, main, work),
        "siege": lambda: siege(decisions, seed, work),
        "soak": lambda: iter([soak(soak_seconds, progress=progress)]),
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
    return read_object(out / FILE_NAME)


def _made_by() -> dict[str, Any]:
    """Command, versions and machine; and everything installed, since any of it may be what breaks."""
    installed = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    return {
        "command": " ".join(["sortrl", *sys.argv[1:]]),
        "versions": provenance.versions(),
        "machine": provenance.machine(),
        "installed": dict(sorted(installed.items(), key=lambda item: item[0].lower())),
    }
