"""The case about Atari games: agent steps per second with random actions, in as many processes as there are cores."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sortrl.envs import Fleet, ParallelFleet
from sortrl.experiments.bench.timing import Contender, disagreements, take_turns

TASK = "sortrl/Freeway84-v0"  # the slowest of the four to emulate


class RandomPlay:
    """A call plays one random action in every game; it returns what the games then show."""

    def __init__(self, fleet: Fleet | ParallelFleet) -> None:
        self.fleet, self.rng = fleet, np.random.default_rng(0)

    def __call__(self) -> Tensor:
        self.fleet.step(self.rng.integers(self.fleet.info.n_actions, size=len(self.fleet)))
        return torch.from_numpy(self.fleet.obs.copy())


def random_play(games: int, processes: int, repeats: int) -> dict[str, Any] | None:
    """Seconds for one step of every game, in several processes and in one; None without the emulator."""
    if importlib.util.find_spec("ale_py") is None:
        return None
    together, alone = ParallelFleet(TASK, games, seed=0, processes=processes), Fleet(TASK, games, seed=0)
    try:
        timing = take_turns(Contender(RandomPlay(together)), {"one process": Contender(RandomPlay(alone))}, repeats)
    finally:
        together.close()
        alone.close()
    best, wrong = timing.best_s, disagreements(timing.first)
    return {
        "op": "random_play",
        "shape": [games, alone.info.obs_size, alone.info.n_actions],
        "p": None,
        "ours_s": best["ours"],
        "rivals": {"one process": best["one process"]},
        "limit_s": None,
        "wrong": sorted(wrong),
        "notes": [f"{games} games of {TASK} in {processes} processes, random actions", *timing.notes],
        "steps_per_s": {name: None if seconds is None else games / seconds for name, seconds in best.items()},
    }
