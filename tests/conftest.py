"""Shared fixtures. Threads: small problems on two cores are slower with more than one torch thread each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Two OpenMP runtimes spinning on few cores slow every test down; sleeping waits cost nothing here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def published_teachers() -> Path:
    """The folder of published agents; tests that need it are skipped where it is absent."""
    root = Path(os.environ.get("SORTRL_TEACHERS", Path(__file__).parents[2] / "shared" / "teachers"))
    if not (root / "sb3").is_dir():
        pytest.skip(f"published agents not found in {root}; set SORTRL_TEACHERS")
    return root


@pytest.fixture(scope="session")
def procgen() -> None:
    """For tests on the games themselves: skips, saying why, where envpool or Qt 5 is missing."""
    from sortrl.core.errors import MissingDependency
    from sortrl.envs.info import make_env

    try:
        make_env("sortrl/Jumper-train-v0").close()
    except MissingDependency as error:
        pytest.skip(str(error))
