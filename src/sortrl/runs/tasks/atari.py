"""Atari in protocol 84: one frame without memory. Targets of the teachers lie at or above what the published agents reach."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sortrl.data.collect import CollectConfig
from sortrl.runs.tasks.images import PRINTED, VIDEO_GAMES
from sortrl.runs.tasks.task import Task
from sortrl.teachers import PQNConfig

# A Q-learner is greedy, and a seed only draws 1 to 30 idle frames: random and repeated actions make the episodes differ.
_COLLECT = CollectConfig(states=60_000, exploration=0.5, random_actions=0.05, sticky=0.25, spread=True, slots=64)
_SORTRL: dict[str, Any] = {
    **VIDEO_GAMES,
    "collect": _COLLECT,
    "dagger_rounds": 2,
    "dagger_states": 20_000,
    "steps": 1500,
    "episodes": 20,  # as the literature has it
    "eps_grid": (0.0, 5 / 255),  # the tables have the sizes between them
}
# The teacher's own play from all thirty starts, and episodes in which it has to find its way back.
_THRESHOLDS: dict[str, Any] = {
    "collect": replace(_COLLECT, states=130_000),
    "dagger_rounds": 1,
    "dagger_states": 40_000,
    "noise": 0.0,
}
# Thirty starts, several times each: a Q-learner's own play, and tries with an accident now and then that may end better.
_MEMORY: dict[str, Any] = {
    "collect": CollectConfig(states=250_000, exploration=0.3, random_actions=0.01, focus=0.2, spread=True, slots=64)
}

FREEWAY = Task(
    "sortrl/Freeway84-v0",
    "Atari's Freeway in protocol 84; 34 is very good",
    eps=2 / 255,
    # Every game takes 2,048 steps, and the first reward about a hundred steps in one direction.
    teachers={
        "pqn": PQNConfig(
            target_return=33.0, clip_reward=True, stagger=2_000, longest_run=100, exploration_final_eps=0.003
        )
    },
    continued={"sticky": 0.5, "target_return": None},  # it plays by heart what it could play by sight
    fast=_SORTRL,
    memory=_MEMORY,
    thresholds=_THRESHOLDS,
    paper=PRINTED,
)
ROADRUNNER = Task(
    "sortrl/RoadRunner84-v0",
    "Atari's RoadRunner in protocol 84; about 44,000 is very good",
    eps=2 / 255,
    teachers={
        "pqn": PQNConfig(target_return=40_000.0, clip_reward=True, episodic_life=True, stagger=500, longest_run=30)
    },
    # It waits for ever before the first gap in the road of level 2.
    continued={
        "total_steps": 4_000_000,
        "exploration_final_eps": 0.01,
        "longest_run": 10,
        "patience": 250,
        "retry": 0.7,
        "sticky": 0.25,
    },
    fast=_SORTRL,
    # Four thousand steps a game: there is room for the teacher's own play alone.
    memory={"collect": CollectConfig(states=340_000, exploration=0.0, spread=True, slots=64)},
    thresholds=_THRESHOLDS,
    paper=PRINTED,
)
_PONG = Task(
    "sortrl/Pong84-v0",
    "Atari's Pong in protocol 84; 21 is perfect",
    eps=2 / 255,
    teachers={"pqn": PQNConfig(target_return=20.5, clip_reward=True, stagger=1_000)},
    continued={"sticky": 0.5, "exploration_final_eps": 0.002, "target_return": None},
    fast=_SORTRL,
    memory=_MEMORY,
    paper=PRINTED,
)
PONG = replace(
    _PONG,
    # Distilled only as a start; then such a student goes on with its teacher's answers to the states of its own play.
    thresholds={
        **_THRESHOLDS,
        "norm": True,
        "steps": 4000,
        "polish": replace(
            _PONG.going_on(), total_steps=200_000, eval_every=65_536, eval_episodes=20, exploration_final_eps=0.01
        ),
    },
)
BANKHEIST = Task(
    "sortrl/BankHeist84-v0",
    "Atari's BankHeist in protocol 84; about 1,300 is very good",
    eps=2 / 255,
    teachers={
        "pqn": PQNConfig(target_return=1_200.0, clip_reward=True, episodic_life=True, stagger=1_000, longest_run=10)
    },
    continued={"sticky": 0.25},
    fast=_SORTRL,
    memory=_MEMORY,
    thresholds={**_THRESHOLDS, "gap": 7.5 / 255},
    paper=PRINTED,
)

TASKS = (FREEWAY, ROADRUNNER, PONG, BANKHEIST)
