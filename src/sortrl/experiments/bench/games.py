"""The cases about Atari games, in as many processes as there are cores: steps per second with random actions, and of a training."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sortrl.envs import Fleet, ParallelFleet, describe
from sortrl.experiments.bench.timing import Contender, disagreements, take_turns
from sortrl.runs.tasks import teacher_preset
from sortrl.teachers import Architecture, PQNConfig
from sortrl.teachers.train_pqn import Rollout, Run

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
        "median_s": timing.median_s["ours"],
        "rivals": {"one process": best["one process"]},
        "limit_s": None,
        "wrong": sorted(wrong),
        "notes": [f"{games} games of {TASK} in {processes} processes, random actions", *timing.notes],
        "steps_per_s": {name: None if seconds is None else games / seconds for name, seconds in best.items()},
    }


class Training:
    """A call is one update of a teacher's training, with the games played for the next one; it returns the weights."""

    def __init__(self, games: int, processes: int, half: bool) -> None:
        # Small enough a share of the training that exploration does not change meanwhile.
        preset = teacher_preset(TASK)
        assert isinstance(preset, PQNConfig)
        config = replace(preset, n_envs=games, stagger=0, half=half)
        info, self.config = describe(TASK), config
        torch.manual_seed(0)
        network = Architecture(
            info.obs_shape, info.n_actions, config.hidden, "ReLU", "norm_cnn", channels=config.channels
        )
        self.body, self.player = network.build(), network.build()
        for one in (self.body, self.player):
            one.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.RAdam(self.body.parameters(), lr=config.learning_rate)
        self.generator, self.run = torch.Generator().manual_seed(0), Run(info, config, 0, {}, processes)
        one_thread: dict[str, Any] = {"initializer": torch.set_num_threads, "initargs": (1,)}
        self.thread = ThreadPoolExecutor(1, **one_thread) if processes > 1 else None
        self.rollout: Rollout | None = None

    def __call__(self) -> Tensor:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in trainings
        rollout = self.rollout or self.run.play(self.body, self.generator, 0)
        batches = torch.Generator().manual_seed(0)
        lesson = (self.body, self.optimizer, rollout, self.config, batches, 0)
        self.rollout = self.run.play_ahead(self.player, self.generator, lesson, self.thread)
        torch.set_num_threads(threads)
        return torch.cat([parameter.detach().flatten() for parameter in self.body.parameters()])

    def close(self) -> None:
        if self.thread is not None:
            self.thread.shutdown()
        self.run.fleet.close()


def teach_step(games: int, processes: int, repeats: int) -> dict[str, Any] | None:
    """Seconds for one update of a training, with its games; None without the emulator."""
    if importlib.util.find_spec("ale_py") is None:
        return None
    ours = Training(games, processes, half=True)
    rivals = {"one process": Training(games, 1, half=True), "one process, float32": Training(games, 1, half=False)}
    try:
        calls = {name: Contender(training) for name, training in rivals.items()}
        timing = take_turns(Contender(ours), calls, repeats)
    finally:
        for training in (ours, *rivals.values()):
            training.close()
    best, wrong = timing.best_s, disagreements(timing.first)
    wrong.pop("one process, float32", None)  # not the same arithmetic
    info, decisions = ours.run.fleet.info, games * ours.config.n_steps
    return {
        "op": "teach_step",
        "shape": [decisions, info.obs_size, info.n_actions],
        "p": None,
        "ours_s": best["ours"],
        "median_s": timing.median_s["ours"],
        "rivals": {name: best[name] for name in rivals},
        "limit_s": None,
        "wrong": sorted(wrong),
        "notes": [f"{games} games of {TASK} in {processes} processes, bfloat16", *timing.notes],
        "steps_per_s": {name: None if seconds is None else decisions / seconds for name, seconds in best.items()},
    }
