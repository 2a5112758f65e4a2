"""Environments: what a task looks like (:func:`describe`) and how to play many episodes of it (:class:`EnvSlots`, :class:`Simulator`)."""

from __future__ import annotations

from sortrl.envs.info import EnvInfo, describe
from sortrl.envs.simulator import Simulator
from sortrl.envs.slots import EnvSlots, greedy_returns

__all__ = ["EnvInfo", "EnvSlots", "Simulator", "describe", "greedy_returns"]
