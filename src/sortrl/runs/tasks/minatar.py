"""MinAtar."""

from __future__ import annotations

from sortrl.data.collect import CollectConfig
from sortrl.runs.tasks.images import SEEN_THROUGH_RAMPS
from sortrl.runs.tasks.task import Task
from sortrl.teachers import PQNConfig

_COLLECT = CollectConfig(states=20_000, exploration=0.7, random_actions=0.15)

TASKS = (
    Task(
        "sortrl/Breakout10-v0",
        "MinAtar's Breakout, 4 x 10 x 10 pixels; small enough to try images in a few minutes",
        eps=0.15,
        teachers={
            # Small enough for a test: few games and small batches learn most from each step.
            "pqn": PQNConfig(
                total_steps=500_000,
                target_return=20.0,
                eval_every=49_152,
                eval_episodes=20,
                n_envs=16,
                n_steps=16,
                batch_size=64,
                channels=(16,),
                hidden=(128,),
                learning_rate=1e-3,
                exploration_final_eps=0.02,
            )
        },
        fast={**SEEN_THROUGH_RAMPS, "collect": _COLLECT, "dagger_states": 5_000, "width": 128, "steps": 1000},
        thresholds={
            "collect": _COLLECT,
            "noise": 0.0,
            "dagger_states": 5_000,
            "gap": 0.4,  # its pixels are black or white
            "levels": 1,
            "conv": ((16, 3, 1),),
            "hidden": (128,),
            "steps": 1500,
        },
    ),
)
