"""Whole jobs as a user starts them, in processes of their own: for the asking, because each takes minutes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from sortrl.core.errors import SortRLError


@dataclass(frozen=True)
class Job:
    """Commands of ``sortrl``, run one after the other in an empty directory."""

    op: str
    commands: tuple[tuple[str, ...], ...]


JOBS = (
    Job("robustify CartPole-v1", (("robustify", "CartPole-v1", "--out", "run"),)),
    Job(
        "demo",
        (
            ("robustify", "sortrl/Breakout10-v0", "--teacher", "zoo:breakout/teacher", "--out", "run"),
            ("watch", "run", "--beside-teacher"),
        ),
    ),
)


def timed(job: Job) -> dict[str, Any]:
    """Seconds from the first command to the last file."""
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        for command in job.commands:
            child = subprocess.run(
                [sys.executable, "-m", "sortrl", *command], cwd=directory, capture_output=True, text=True, check=False
            )
            if child.returncode != 0:
                raise SortRLError(
                    f"bench: sortrl {' '.join(command)} failed: {(child.stderr.strip().splitlines() or ['no message'])[-1]}"
                )
        seconds = time.perf_counter() - start
    return {
        "op": job.op,
        "shape": [],
        "p": None,
        "ours_s": seconds,
        "median_s": seconds,
        "rivals": {},
        "limit_s": None,
        "wrong": [],
        "notes": ["once: " + " && ".join(f"sortrl {' '.join(command)}" for command in job.commands)],
    }
