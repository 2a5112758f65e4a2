"""The table of tasks: what is known to work for each, so that one command needs no further option."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sortrl.baselines.memory.search import SearchConfig
from sortrl.data.collect import CollectConfig
from sortrl.teachers import continued


@dataclass(frozen=True)
class Task:
    """Defaults of one environment."""

    env_id: str
    summary: str
    eps: float = 0.1
    """Perturbation to train for, in the teacher's input units."""
    fast: dict[str, Any] = field(default_factory=dict)
    """Fields of ``RobustifyConfig`` and ``DistillConfig`` that differ from the ``fast`` preset's, for normalising teachers."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Likewise for the ``memory`` preset."""
    rounded: dict[str, Any] = field(default_factory=dict)
    """Likewise for the ``rounded`` preset, with the fields of ``RoundingConfig``."""
    paper: dict[str, Any] = field(default_factory=dict)
    """Likewise for the ``paper`` preset."""

    def settings(self, preset: str) -> dict[str, Any]:
        """What differs from a preset's defaults. What is measured at the end is the same however the student was made."""
        own: dict[str, Any] = getattr(self, preset, {})
        shared = {} if preset == "paper" else {name: self.fast[name] for name in MEASURED if name in self.fast}
        return {**shared, **own}


# Students of images: sort layers on pixels that are seen through ramps (docs/training.md says what each setting brought).
SEEN_THROUGH_RAMPS: dict[str, Any] = {
    "ramps": True,
    "noise": 0.0,  # it would fill the gaps between the values that a pixel takes
    "width": 256,
    "depth": 3,
    "rho": 0.0,
    "batch": 256,
    "learning_rate": 0.08,
    "scalar_learning_rate": 0.002,
    "mu_start": 2.0,
    "lambda_end": 1.0,
    "warm_share": 0.5,
    "p_end": 64.0,
    "final_share": 0.1,
    "exact_share": 0.0,
    "soft_targets": 0.5,
    "soft_temperature": None,
}
IMAGES: dict[str, Any] = {
    **SEEN_THROUGH_RAMPS,
    "dagger_rounds": 3,
    "dagger_states": 30_000,  # together as many as the teacher's own
    "steps": 2500,
    "theta_factor": 10.0,  # margins for 10/255 are widened
    "eps_grid": tuple(k / 255 for k in (0, 1, 2, 3, 5)),  # those of the tables, and the one that is trained for
    "suite": (),  # the tables have attacks enough
}
# As printed for video games: sort layers on the pixels, two linear layers behind them, 100,000 states of the teacher's own play.
PRINTED: dict[str, Any] = {
    "collect": CollectConfig(states=100_000, exploration=0.0, slots=64),
    "width": 1280,
    "depth": 6,
    "head": (256, 256),
    "theta_factor": 2.2,
}
PROCGEN: dict[str, Any] = {
    **IMAGES,
    # Greedy agents stand still for hundreds of steps; sampled ones show what there is to see.
    "collect": CollectConfig(states=100_000, exploration=1.0, random_actions=0.02, slots=64),
}
# Many tries from every level, as many again from those that were not yet solved twice, a search where all were lost; and of all
# that won only what the teacher would not have done by itself.
LEVELS: dict[str, Any] = {
    "collect": CollectConfig(states=200_000, exploration=1.0, focus=0.5, slots=64),
    "search": SearchConfig(steps=1_000_000, goal=10.0, straighten=True),
}
ATARI: dict[str, Any] = {
    **IMAGES,
    # A Q-learner is greedy, and a seed only draws 1 to 30 idle frames: random and repeated actions make the episodes differ.
    "collect": CollectConfig(states=100_000, exploration=0.5, random_actions=0.05, sticky=0.25, spread=True, slots=64),
    "episodes": 20,  # as the literature has it
}
# The teacher's own play from all thirty starts, and episodes in which it has to find its way back.
ATARI_ROUNDED: dict[str, Any] = {
    "collect": CollectConfig(states=130_000, exploration=0.5, random_actions=0.05, sticky=0.25, spread=True, slots=64),
    "dagger_rounds": 1,
    "dagger_states": 40_000,
    "noise": 0.0,
}

# Distilled only as a start; then such a student goes on with its teacher's answers to the states of its own play.
PONG_ROUNDED: dict[str, Any] = {
    **ATARI_ROUNDED,
    "norm": True,
    "steps": 4000,
    "polish": replace(
        continued("sortrl/Pong84-v0"),
        total_steps=200_000,
        eval_every=65_536,
        eval_episodes=20,
        exploration_final_eps=0.01,
        target_return=None,
    ),
}
# Thirty starts, several times each: a Q-learner's own play, and tries with an accident now and then that may end better.
ATARI_MEMORY: dict[str, Any] = {
    "collect": CollectConfig(states=250_000, exploration=0.3, random_actions=0.01, focus=0.2, spread=True, slots=64)
}
# Four thousand steps a game: there is room for the teacher's own play alone.
ROADRUNNER_MEMORY: dict[str, Any] = {"collect": CollectConfig(states=340_000, exploration=0.0, spread=True, slots=64)}
MEASURED = ("episodes", "eps_grid", "suite")  # what is measured at the end, however the student was made
TASKS: dict[str, Task] = {
    task.env_id: task
    for task in (
        Task(
            "CartPole-v1",
            "balance a pole on a cart; 500 is perfect",
            eps=0.2,
            fast={"smoothing": 0.3, "noise": 0.3, "lambda_end": 0.1, "dagger_rounds": 2},
        ),
        Task(
            "Acrobot-v1",
            "swing a two-link arm above a line; about -70 is very good",
            eps=0.15,
            fast={"smoothing": 0.1, "noise": 0.2, "dagger_rounds": 2},
        ),
        Task(
            "MountainCar-v0",
            "rock a car out of a valley; about -105 is very good",
            fast={"scale": 2.0, "lambda_end": 0.5, "dagger_rounds": 2},
        ),
        Task(
            "LunarLander-v3",
            "land softly between two flags; 200 is solved",
            eps=0.05,
            fast={
                # Its teacher switches engines every few steps: little can be certified, so nothing is given up for it.
                "scale": 2.0,
                "smoothing": 0.1,
                "noise": 0.1,
                "lambda_end": 1.0,
                "steps": 3000,
                "dagger_rounds": 6,
                "dagger_states": 30_000,
            },
        ),
        Task(
            "sortrl/Breakout10-v0",
            "MinAtar's Breakout, 4 x 10 x 10 pixels; small enough to try images in a few minutes",
            eps=0.15,
            fast={
                **SEEN_THROUGH_RAMPS,
                "collect": CollectConfig(states=20_000, exploration=0.7, random_actions=0.15),
                "dagger_states": 5_000,
                "width": 128,
                "steps": 1000,
            },
            rounded={
                "collect": CollectConfig(states=20_000, exploration=0.7, random_actions=0.15),
                "noise": 0.0,
                "dagger_states": 5_000,
                "gap": 0.4,  # its pixels are black or white
                "levels": 1,
                "conv": ((16, 3, 1),),
                "hidden": (128,),
                "steps": 1500,
            },
        ),
        Task(
            "sortrl/Jumper-train-v0",
            "ProcGen's Jumper on its 200 training levels; 9.25 is the most there is",
            eps=2 / 255,
            fast=PROCGEN,
            memory=LEVELS,
            paper=PRINTED,
        ),
        Task(
            "sortrl/Coinrun-train-v0",
            "ProcGen's CoinRun on its 200 training levels; 10 is perfect",
            eps=2 / 255,
            fast=PROCGEN,
            memory=LEVELS,
            paper=PRINTED,
        ),
        Task(
            "sortrl/Freeway84-v0",
            "Atari's Freeway in protocol 84; 34 is very good",
            2 / 255,
            ATARI,
            ATARI_MEMORY,
            ATARI_ROUNDED,
            PRINTED,
        ),
        Task(
            "sortrl/RoadRunner84-v0",
            "Atari's RoadRunner in protocol 84; about 44,000 is very good",
            2 / 255,
            ATARI,
            ROADRUNNER_MEMORY,
            ATARI_ROUNDED,
            PRINTED,
        ),
        Task(
            "sortrl/Pong84-v0",
            "Atari's Pong in protocol 84; 21 is perfect",
            2 / 255,
            ATARI,
            ATARI_MEMORY,
            PONG_ROUNDED,
            PRINTED,
        ),
        Task(
            "sortrl/BankHeist84-v0",
            "Atari's BankHeist in protocol 84; about 1,300 is very good",
            2 / 255,
            ATARI,
            ATARI_MEMORY,
            {**ATARI_ROUNDED, "gap": 7.5 / 255},
            PRINTED,
        ),
    )
}
