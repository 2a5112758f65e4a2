"""Environments: what a task looks like (:func:`describe`) and how to play many episodes of it, for an evaluation
(:class:`EnvSlots`), a training (:class:`Fleet`) or a search (:class:`Simulator`)."""

from __future__ import annotations

from sortrl.envs.branching import Simulator
from sortrl.envs.given import env_id_of
from sortrl.envs.info import ActionBox, EnvInfo, describe, is_continuous
from sortrl.envs.player import Episode, Predicts, greedy_returns, play_episodes
from sortrl.envs.registry import register_tasks
from sortrl.envs.vector import EnvSlots, Fleet, ParallelFleet

__all__ = [
    "ActionBox",
    "EnvInfo",
    "EnvSlots",
    "Episode",
    "Fleet",
    "ParallelFleet",
    "Predicts",
    "Simulator",
    "describe",
    "env_id_of",
    "greedy_returns",
    "is_continuous",
    "play_episodes",
]

register_tasks()  # names only, as packages of environments do: ``gymnasium.make("sortrl.envs:sortrl/Pong84-v0")``
