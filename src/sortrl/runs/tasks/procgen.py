"""ProcGen."""

from __future__ import annotations

from typing import Any

from sortrl.baselines.memory.search import SearchConfig
from sortrl.data.collect import CollectConfig
from sortrl.runs.tasks.images import PRINTED, VIDEO_GAMES
from sortrl.runs.tasks.task import Task
from sortrl.teachers import ImagePPOConfig

_SORTRL: dict[str, Any] = {
    **VIDEO_GAMES,
    "pool": 2,  # a quarter of the work, and painted backgrounds say as much
    "steps": 3000,
    "dagger_rounds": 2,
    "soft_temperature": 1.0,  # a third of the gap between action values; here the softmax is the agent's own play
    # Greedy agents stand still for hundreds of steps; sampled ones show what there is to see.
    "collect": CollectConfig(states=100_000, exploration=1.0, random_actions=0.02, slots=64),
}
# Many tries from every level, as many again from those that were not yet solved twice, a search where all were lost; and of all
# that won only what the teacher would not have done by itself.
_MEMORY: dict[str, Any] = {
    "collect": CollectConfig(states=200_000, exploration=1.0, focus=0.5, slots=64),
    "search": SearchConfig(steps=1_000_000, goal=10.0, straighten=True),
}

TASKS = (
    Task(
        "sortrl/Jumper-train-v0",
        "ProcGen's Jumper on its 200 training levels; 9.25 is the most there is",
        eps=2 / 255,
        teachers={"ppo": ImagePPOConfig(total_steps=25_034_752, target_return=8.0)},
        fast=_SORTRL,
        memory=_MEMORY,
        paper=PRINTED,
    ),
    Task(
        "sortrl/Coinrun-train-v0",
        "ProcGen's CoinRun on its 200 training levels; 10 is perfect",
        eps=2 / 255,
        # Grades of 40 episodes differ by one point by chance alone, too much to choose the best by.
        teachers={"ppo": ImagePPOConfig(total_steps=8_126_464, target_return=9.0, eval_episodes=100)},
        fast=_SORTRL,
        memory=_MEMORY,
        paper=PRINTED,
    ),
)
