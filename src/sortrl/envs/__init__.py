"""Environments: what a task looks like (:func:`describe`) and how to play many episodes of it, for an evaluation
(:class:`EnvSlots`), a training (:class:`Fleet`) or a search (:class:`Simulator`)."""

from __future__ import annotations

from sortrl.envs.fleet import Fleet, ParallelFleet
from sortrl.envs.info import EnvInfo, describe
from sortrl.envs.simulator import Simulator
from sortrl.envs.slots import EnvSlots, greedy_returns

__all__ = ["EnvInfo", "EnvSlots", "Fleet", "ParallelFleet", "Simulator", "describe", "greedy_returns"]
