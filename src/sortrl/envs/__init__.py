"""Environments: what a task looks like (:func:`describe`) and how to play many episodes of it, for an evaluation
(:class:`EnvSlots`), a training (:class:`Fleet`) or a search (:class:`Simulator`)."""

from __future__ import annotations

from sortrl.envs.branching import Simulator
from sortrl.envs.fleet import Fleet, ParallelFleet
from sortrl.envs.info import EnvInfo, describe
from sortrl.envs.player import Episode, Predicts, greedy_returns, play_episodes
from sortrl.envs.slots import EnvSlots

__all__ = [
    "EnvInfo",
    "EnvSlots",
    "Episode",
    "Fleet",
    "ParallelFleet",
    "Predicts",
    "Simulator",
    "describe",
    "greedy_returns",
    "play_episodes",
]
