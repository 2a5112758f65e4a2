"""The one loop over episodes: seeded, side by side, each played to its end.

Whoever plays gives two things: how to act in the states that the episodes are in, and, where returns are not enough, an
:class:`Episode` of its own that notes what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from sortrl.core.errors import SortRLError
from sortrl.envs.vector import EnvSlots

Obs = npt.NDArray[Any]


class Predicts(Protocol):
    """Anything with the Stable-Baselines3 ``predict``."""

    def predict(self, obs: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Any]: ...


class Episode:
    """One episode under way: its place in the list of seeds, what it shows now, and its return so far."""

    def __init__(self, number: int, seed: int, obs: Obs) -> None:
        self.number, self.seed = number, seed
        self.obs = obs.copy()  # the environment may write into its own
        self.total = 0.0
        self.steps = 0

    def see(self, obs: Obs, reward: float) -> None:
        """What a step gave."""
        self.obs = obs.copy()
        self.total += reward
        self.steps += 1

    def given_up(self) -> bool:
        """Whether to break the episode off here."""
        return False


E = TypeVar("E", bound=Episode)
Act = Callable[[list[E]], Sequence[int] | npt.NDArray[Any] | None]


def play_episodes(
    envs: EnvSlots,
    seeds: Iterable[int],
    act: Act[E],
    begin: Callable[[int, int, Obs], E],
    ended: Callable[[E], None] | None = None,
) -> list[E]:
    """Play the episode of every seed; returns those that ended, in the order of ``seeds``.

    ``act`` gives one action for each of the episodes under way, or None to stop where they are. ``begin`` makes the record
    of an episode from its number, seed and first observation (:class:`Episode` itself, or a class of the caller's that
    notes more). ``ended`` is called with each episode that is over. An episode that ends makes room for the next seed.

    >>> with EnvSlots("CartPole-v1", 2) as envs:
    ...     played = play_episodes(envs, range(3), lambda episodes: [1] * len(episodes), Episode)
    >>> [episode.number for episode in played], played[0].total == played[0].steps
    ([0, 1, 2], True)
    """
    waiting = enumerate(seeds)
    playing: dict[int, E] = {}
    finished: list[E] = []

    def start(slot: int) -> None:
        following = next(waiting, None)
        if following is not None:
            number, seed = following
            playing[slot] = begin(number, seed, envs.reset(slot, seed))

    for slot in range(len(envs)):
        start(slot)
    while playing:
        actions = act(list(playing.values()))
        if actions is None:
            break
        envs.begin(playing, actions)
        for (slot, episode), action in zip(list(playing.items()), actions, strict=True):
            obs, reward, done = envs.step(slot, action)
            episode.see(obs, reward)
            if done or episode.given_up():
                finished.append(playing.pop(slot))
                if ended is not None:
                    ended(episode)
                start(slot)
    return sorted(finished, key=lambda episode: episode.number)


def greedy_returns(
    policy: Predicts, env_id: str, seeds: Sequence[int], slots: int = 32, patience: int = 0
) -> npt.NDArray[np.float64]:
    """The undiscounted return of one clean greedy episode per seed, in the order of ``seeds``.

    Episodes that have gone ``patience`` steps without a reward are broken off; none is if that is 0.
    """
    if len(seeds) == 0:
        raise SortRLError("greedy_returns: no seeds given; name at least one episode.")

    class Patient(Episode):
        idle = 0

        def see(self, obs: Obs, reward: float) -> None:
            super().see(obs, reward)
            self.idle = 0 if reward else self.idle + 1

        def given_up(self) -> bool:
            return 0 < patience <= self.idle

    with EnvSlots(env_id, min(slots, len(seeds))) as envs:
        played = play_episodes(
            envs, seeds, lambda episodes: policy.predict(np.stack([one.obs for one in episodes]))[0], Patient
        )
    return np.array([episode.total for episode in played])
