"""Frozen protocols: for each family of tasks the tasks, the units of eps, seeds, episodes and attacks that every entry is measured by.

A protocol that has entries is never changed; another one gets the next number. Its ``mark`` is a hash of all it says, and stands in
every entry: an entry with another mark was measured in another way, and is not ranked beside the others.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

import numpy as np

from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.envs import EnvInfo
from sortrl.envs.registry import ATARI_GAMES, MINATAR_GAMES, NAMESPACE, PROCGEN_GAMES

CLEAN, VALUE_AWARE, LEARNED = "none", "value-aware", "learned"


@dataclass(frozen=True)
class Trial:
    """One condition that agents are played under."""

    attack: str
    """As :func:`sortrl.attacks.by_name` reads it; or ``none``, ``value-aware`` (MinQ on the action values of the agent's teacher or,
    where that is not known, on its own) or ``learned`` (an adversary trained by PPO against this agent)."""
    episodes: int
    only_answers: bool = False
    """Only for agents of which nothing but the answers is known: of others, ``auto`` has the same attack among its members."""


@dataclass(frozen=True)
class Task:
    """A task, and what eps means there: the same change of raw observations for every agent, whatever its own inputs are."""

    env_id: str
    eps: float
    """Of the attacks."""
    certified_at: tuple[float, ...]
    """At which the share of certified decisions is measured."""
    scale: tuple[float, ...] = ()
    """Of each sensor, what one unit of eps is in raw units. Of images nothing: a unit is the step from black to white."""

    def units(self, info: EnvInfo) -> Normalizer:
        """Raw observations -> units of eps."""
        if not self.scale:
            return Normalizer.from_pixels(info.obs_shape)
        return Normalizer(np.zeros(info.obs_shape), np.array(self.scale))


@dataclass(frozen=True)
class Protocol:
    """How the agents of a family of tasks are measured."""

    name: str
    tasks: tuple[Task, ...]
    trials: tuple[Trial, ...]
    seed: int
    """Chooses the episodes, as in ``sortrl evaluate``; a trial of n episodes plays the first n."""
    certify_states: int
    """Of the states of clean play, how many at most, evenly spread, are certified where eps is in sensors' units."""
    adversary_steps: int
    """Of the training of a learned adversary."""

    @property
    def mark(self) -> str:
        """A hash of everything above."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def task(self, env_id: str) -> Task:
        """The task of this id."""
        for task in self.tasks:
            if task.env_id == env_id:
                return task
        known = ", ".join(task.env_id for task in self.tasks)
        fitting = [other.name for other in PROTOCOLS.values() if env_id in {task.env_id for task in other.tasks}]
        hint = f" {env_id} belongs to {fitting[0]}." if fitting else ""
        raise SortRLError(f"{self.name} has no task {env_id!r}; it has {known}.{hint}")


_STANDARD_DEVIATIONS = {  # of each sensor in play, rounded
    "CartPole-v1": (0.7, 0.61, 0.052, 0.35),  # of a PPO agent while it learns: a trained one hardly moves
    "Acrobot-v1": (0.492, 0.672, 0.705, 0.684, 2.8, 3.68),  # of a published PPO agent, as in the next two
    "MountainCar-v0": (0.42, 0.0298),
    "LunarLander-v3": (0.154, 0.45, 0.174, 0.0888, 0.0782, 0.0549, 0.37, 0.373),
}
_CLASSIC_EPS = {"CartPole-v1": 0.2, "Acrobot-v1": 0.1, "MountainCar-v0": 0.1, "LunarLander-v3": 0.1}
_PIXELS = tuple(k / 255 for k in (1, 3, 5, 10, 15))

_EVERY_ATTACK = (
    Trial(CLEAN, 50),
    Trial("noise", 20),
    Trial("pgd-10", 20),
    Trial("square-300", 20, only_answers=True),
    Trial("auto", 20),
    Trial(VALUE_AWARE, 20),
    Trial(LEARNED, 20),
)

PROTOCOLS: dict[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        Protocol(
            name="classic-1",
            tasks=tuple(
                Task(env_id, _CLASSIC_EPS[env_id], (0.02, 0.05, 0.1, 0.2), scale)
                for env_id, scale in _STANDARD_DEVIATIONS.items()
            ),
            trials=_EVERY_ATTACK,
            seed=1700,
            certify_states=5_000,
            adversary_steps=50_000,
        ),
        Protocol(
            name="minatar-1",
            tasks=tuple(Task(f"{NAMESPACE}{game}10-v0", 0.15, (0.075, 0.15, 0.3)) for game in MINATAR_GAMES),
            trials=_EVERY_ATTACK,
            seed=1700,
            certify_states=5_000,
            adversary_steps=50_000,
        ),
        Protocol(  # episodes are those of the literature: seeds from 0 on
            name="atari84-1",
            tasks=tuple(Task(f"{NAMESPACE}{game}84-v0", 5 / 255, _PIXELS) for game in ATARI_GAMES),
            trials=(Trial(CLEAN, 20), Trial("noise", 5), Trial("pgd-10", 5), Trial(VALUE_AWARE, 5), Trial("auto", 1)),
            seed=0,
            certify_states=5_000,
            adversary_steps=0,
        ),
        Protocol(
            name="procgen-1",
            tasks=tuple(
                Task(f"{NAMESPACE}{game}-{levels}-v0", 5 / 255, _PIXELS)
                for game in PROCGEN_GAMES
                for levels in ("eval", "train")
            ),
            trials=(
                Trial(CLEAN, 200),
                Trial("noise", 50),
                Trial("pgd-10", 50),
                Trial(VALUE_AWARE, 50),
                Trial("auto", 10),
            ),
            seed=0,
            certify_states=5_000,
            adversary_steps=0,
        ),
    )
}


def protocol_of(name: str) -> Protocol:
    """The protocol of this name.

    >>> protocol_of("classic-1").task("CartPole-v1").eps
    0.2
    """
    if name not in PROTOCOLS:
        raise SortRLError(f"There is no protocol {name!r}; choose one of {', '.join(PROTOCOLS)}.")
    return PROTOCOLS[name]
