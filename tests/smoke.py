"""Try an installed package: what a user does first. ``--kernels`` says that it must have compiled ones."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import sortrl
from sortrl.nets import zoo
from sortrl.ops.cpu import select


def main(kernels: bool) -> None:
    place = Path(sortrl.__file__).resolve()
    assert "site-packages" in place.parts, f"{place} is not an installed package"
    assert not kernels or select().module is not None, f"no compiled kernels: {select().reason}"
    sortrl_command = [sys.executable, "-m", "sortrl"]
    subprocess.run([*sortrl_command, "info"], check=True)

    torch.set_num_threads(1)
    policy = sortrl.load("zoo:cartpole")
    states = np.random.default_rng(0).normal(size=(100, 4)) * 0.1
    certificate = policy.certify(states)
    assert 0.1 < certificate.certified_at(0.1).mean() <= 1.0
    assert sortrl.evaluate(policy, "CartPole-v1", episodes=2, seed=0).mean > 400

    assert len(zoo.names()) >= 10, "every card is there"
    refused = []
    for name in zoo.names():
        try:
            sortrl.load(f"zoo:{name}")
        except sortrl.SortRLError as error:
            refused.append(str(error))
    assert all("--fetch" in reason for reason in refused), refused
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        short = {"states": 600, "steps": 30, "dagger_rounds": 0, "episodes": 1, "eps_grid": (0.0, 0.1), "suite": ()}
        sortrl.robustify(zoo.folder() / "cartpole" / "teacher", "CartPole-v1", 0.1, preset="fast", out=run, **short)
        assert (run / "report.html").stat().st_size > 10_000
    print(f"sortrl works from {place.parent}")


if __name__ == "__main__":
    main("--kernels" in sys.argv[1:])
