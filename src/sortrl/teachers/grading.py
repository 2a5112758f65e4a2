"""What trainings of every algorithm share: how an agent is graded, and a training that leaves no trace in its caller."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from sortrl.envs import greedy_returns
from sortrl.envs.slots import Predicts
from sortrl.teachers.config import PQNConfig, TeacherConfig

Progress = Callable[[dict[str, Any]], None]
LOG_FILE = "training.json"  # how a teacher did in the course of its training


def grade(agent: Predicts, env_id: str, config: TeacherConfig, seed: int, segment: int) -> tuple[float, bool]:
    """Mean greedy return, and whether it reached the target on ``confirm_episodes`` fresh episodes too."""
    seeds = (
        np.random.SeedSequence([seed, 3, segment]).generate_state(config.eval_episodes + config.confirm_episodes) >> 1
    )
    first, fresh = np.split(seeds, [config.eval_episodes])
    limit = {"patience": config.patience} if isinstance(config, PQNConfig) and config.patience else {}
    score = float(greedy_returns(agent, env_id, first.tolist(), **limit).mean())
    if config.target_return is None or score < config.target_return:
        return score, False
    confirmation = float(greedy_returns(agent, env_id, fresh.tolist(), **limit).mean())
    return confirmation, confirmation >= config.target_return


@contextmanager
def generators_restored() -> Iterator[None]:
    """Leave the caller's global generators as they were."""
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(torch_state)


@contextmanager
def one_thread() -> Iterator[None]:
    """Networks this small train fastest on one thread, and then the result does not depend on the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
