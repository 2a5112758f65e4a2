"""Shared fixtures. Threads: small problems on two cores are slower with more than one torch thread each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sortrl.nets import SortPolicy

# Two OpenMP runtimes spinning on few cores slow every test down; sleeping waits cost nothing here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes share the cores already


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


@pytest.fixture(scope="session")
def student() -> SortPolicy:
    """A small certified policy for CartPole-v1, distilled from :func:`helpers.balancer`; tests leave it as it is."""
    from helpers import balancer
    from sortrl.data.collect import CollectConfig, collect
    from sortrl.distill import DistillConfig, distill
    from sortrl.nets import SortPolicy

    data = collect(balancer(), "CartPole-v1", CollectConfig(states=4000), seed=0)
    config = DistillConfig(eps=0.05, steps=300, batch=256, width=48, depth=3, lambda_end=0.1)
    policy = distill(data, balancer().normalizer, config).policy
    assert isinstance(policy, SortPolicy)
    return policy
