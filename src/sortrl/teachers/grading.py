"""What trainings of every algorithm share: how an agent is graded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sortrl.envs import Predicts, greedy_returns
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
