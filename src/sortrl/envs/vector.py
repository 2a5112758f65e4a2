"""One vector of environments: slots, each with an episode of its own seed. On top of it, fleets for training, in which an episode
that ends is followed by the next, and which can be stored, restored and shared out among processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sortrl.core.errors import SortRLError
from sortrl.envs.info import describe, make_env
from sortrl.envs.registry import STICKY

State = dict[str, npt.NDArray[np.int64]]


class EnvSlots:
    """``n`` plain environments stepped one by one; the caller batches the policy, not the physics.

    Gymnasium's vector environments restart an episode with a seed of their own choosing. An evaluation that is to be
    repeated, or compared with another one, needs every episode to start from a seed it names: hence slots.

    >>> with EnvSlots("CartPole-v1", 2) as slots:
    ...     obs = slots.reset(0, seed=7)
    ...     obs, reward, done = slots.step(0, 1)
    >>> reward, done
    (1.0, False)
    """

    def __init__(
        self,
        env_id: str,
        n: int,
        max_episode_steps: int | None = None,
        options: Callable[[int], Mapping[str, Any]] | None = None,
        continuous: bool = False,
    ) -> None:
        if n < 1:
            raise SortRLError(f"EnvSlots: n is {n}, expected at least one environment.")
        self.info = describe(env_id, continuous)
        of_slot = options or (lambda slot: {})
        self._envs = [make_env(env_id, max_episode_steps, **of_slot(slot)) for slot in range(n)]
        self._playing = [False] * n
        # How the last step of each slot ended: a terminated episode is over for good, a truncated one ran out of time.
        self.terminated = np.zeros(n, dtype=bool)
        self.truncated = np.zeros(n, dtype=bool)
        self.lives = np.zeros(n, dtype=int)  # that are left after the last step, where the environment tells
        self.starts = np.full(n, -1)  # which of the task's starts each slot's episode has, if the environment tells

    def __len__(self) -> int:
        return len(self._envs)

    def reset(self, slot: int, seed: int) -> npt.NDArray[Any]:
        """Start the episode that ``seed`` names; returns its first raw observation."""
        obs, info = self._envs[slot].reset(seed=seed)
        self._playing[slot], self.starts[slot] = True, info.get("start", -1)
        self.terminated[slot] = self.truncated[slot] = False
        return np.asarray(obs)

    def resume(self, slot: int, **options: Any) -> npt.NDArray[Any]:
        """Go on after an episode's end without a new seed: with the next life, or as ``options`` tell the environment."""
        obs, _ = self._envs[slot].reset(options=options or None)
        self._playing[slot] = True
        return np.asarray(obs)

    def begin(self, slots: Iterable[int], actions: Iterable[Any]) -> None:
        """Tell which steps come next. Environments with a thread of their own start them; ``step`` collects the results."""
        for slot, action in zip(slots, actions, strict=True):
            begin = getattr(self._envs[slot].unwrapped, "begin", None)
            if begin is not None:
                begin(self.info.played(action))

    def step(self, slot: int, action: Any) -> tuple[npt.NDArray[Any], float, bool]:
        """Play one action; returns the raw observation, the reward and whether the episode is over."""
        if not self._playing[slot]:
            raise SortRLError(f"EnvSlots: slot {slot} has no episode under way. Call reset(slot, seed) first.")
        obs, reward, terminated, truncated, info = self._envs[slot].step(self.info.played(action))
        done = bool(terminated or truncated)
        self.terminated[slot], self.truncated[slot], self._playing[slot] = terminated, truncated, not done
        self.lives[slot] = info.get("lives", 0)
        return np.asarray(obs), float(reward), done

    def close(self) -> None:
        """Close every environment. Safe to call twice."""
        while self._envs:
            self._envs.pop().close()

    def __enter__(self) -> EnvSlots:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Steps(NamedTuple):
    """What one step of every game gave. A terminated game is over for good, a truncated one ran out of time."""

    rewards: npt.NDArray[np.float32]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    returns: list[float]
    """Of the episodes that ended here."""


@dataclass(frozen=True)
class Lessons:
    """How games for training differ from those of the task. All but ``patience`` are for Atari games."""

    patience: int = 0
    """A game without a reward for so many steps counts as lost (0: never). Who waits for ever learns nothing."""
    retry: float = 0.0
    """Probability that a lost game goes back a little instead of starting anew: what comes late is then tried as often as what
    comes first."""
    sticky: float = 0.0
    """Share of the games that have sticky actions."""

    def options_of(self, game: int) -> dict[str, Any]:
        """Of the environment of one game; sticky games are spread evenly over the fleet."""
        options: dict[str, Any] = {"rewind": True} if self.retry else {}
        if int((game + 1) * self.sticky) > int(game * self.sticky):
            options["sticky"] = STICKY
        return options


class Fleet:
    """``n`` games played one after the other in this process. ``obs`` are what they show now.

    ``seed`` fixes everything. ``stagger`` random actions at most are played first, by each game its own share of them:
    games of equal length would else move in step for ever, and a batch would show one moment ``n`` times. ``options`` go
    to the environments, which differ from those of the task as ``lessons`` say; ``games`` are the numbers of the games played
    here, out of a larger fleet. With the ``state`` that :meth:`state` gave, the games go on from there.

    >>> fleet = Fleet("CartPole-v1", 3, seed=0)
    >>> fleet.step([0, 1, 0]).rewards
    array([1., 1., 1.], dtype=float32)
    """

    def __init__(
        self,
        env_id: str,
        n: int,
        seed: int,
        stagger: int = 0,
        options: Mapping[str, Any] | None = None,
        games: Sequence[int] | None = None,
        state: State | None = None,
        lessons: Lessons | None = None,
    ) -> None:
        if n < 1:
            raise SortRLError(f"Fleet: n is {n}, expected at least one game.")
        self.info, self.seed = describe(env_id), seed
        self.games = list(range(n)) if games is None else list(games)
        self.lessons = lessons or Lessons()
        self._slots = EnvSlots(
            env_id,
            len(self.games),
            options=lambda slot: {**(options or {}), **self.lessons.options_of(self.games[slot])},
        )
        self.obs = np.zeros((len(self.games), *self.info.obs_shape), self.info.obs_dtype)
        self._episode = np.zeros(len(self.games), np.int64)
        self._return = np.zeros(len(self.games))
        self._idle = np.zeros(len(self.games), np.int64)
        # States of games are not stored: each is the result of its seed and of the actions since.
        self._actions: list[list[int]] = [[] for _ in self.games]
        if state is not None:
            self._restore(state)
            return
        for slot, game in enumerate(self.games):
            self._start(slot, 0)
            for action in np.random.default_rng([seed, game]).integers(self.info.n_actions, size=game * stagger // n):
                self._step(slot, int(action))

    def __len__(self) -> int:
        return len(self.games)

    def step(self, actions: Sequence[int] | npt.NDArray[Any]) -> Steps:
        """Play one action in every game; ``obs`` then hold what follows, which is a new game's first where one ended."""
        n = len(self)
        steps = Steps(np.zeros(n, np.float32), np.zeros(n, bool), np.zeros(n, bool), [])
        for slot, action in enumerate(actions):
            reward, terminated, truncated, total = self._step(slot, int(action))
            steps.rewards[slot], steps.terminated[slot], steps.truncated[slot] = reward, terminated, truncated
            if terminated or truncated:
                steps.returns.append(total)
        return steps

    def _start(self, slot: int, episode: int) -> None:
        name = np.random.SeedSequence([self.seed, 5, self.games[slot], episode])
        self.obs[slot] = self._slots.reset(slot, int(name.generate_state(1)[0] >> 1))
        self._episode[slot], self._return[slot], self._idle[slot], self._actions[slot] = episode, 0.0, 0, []

    def _step(self, slot: int, action: int) -> tuple[float, bool, bool, float]:
        self.obs[slot], reward, _ = self._slots.step(slot, action)
        terminated, truncated = bool(self._slots.terminated[slot]), bool(self._slots.truncated[slot])
        self._actions[slot].append(action)
        self._return[slot] += reward
        total = float(self._return[slot])
        self._idle[slot] = 0 if reward else self._idle[slot] + 1
        stuck = not terminated and 0 < self.lessons.patience <= self._idle[slot]
        terminated = terminated or stuck
        if terminated and not stuck and self._slots.lives[slot] > 0:  # the game goes on with the next life
            self.obs[slot] = self._slots.resume(slot)
            self._return[slot] = self._idle[slot] = 0
        elif terminated and self._tries_again(slot):
            self.obs[slot] = self._slots.resume(slot, rewind=True)
            self._return[slot] = self._idle[slot] = 0
        elif terminated or truncated:
            self._start(slot, int(self._episode[slot]) + 1)
        return reward, terminated, truncated, total

    def _tries_again(self, slot: int) -> bool:
        """Drawn anew for every end of a game, and the same when it is played again."""
        if not self.lessons.retry:
            return False
        names = [self.seed, 6, self.games[slot], int(self._episode[slot]), len(self._actions[slot])]
        return bool(np.random.default_rng(names).random() < self.lessons.retry)

    def state(self) -> State:
        """What a new fleet needs to bring every game to this point."""
        return {
            "episodes": self._episode.copy(),
            "lengths": np.array([len(actions) for actions in self._actions], np.int64),
            "actions": np.array([action for actions in self._actions for action in actions], np.int64),
        }

    def _restore(self, state: State) -> None:
        """Play the games again up to the stored point."""
        ends = np.cumsum(state["lengths"])
        for slot, (episode, end, length) in enumerate(zip(state["episodes"], ends, state["lengths"], strict=True)):
            self._start(slot, int(episode))
            for action in state["actions"][end - length : end]:
                self._step(slot, int(action))

    def close(self) -> None:
        """Close every game. Safe to call twice."""
        self._slots.close()


class ParallelFleet:
    """A fleet in several processes: the same games, the same results. Emulators hold Python's lock, so threads would not do.

    Whole frames go through pipes: for 64 games that costs a hundredth of the time the games take.
    """

    def __init__(
        self,
        env_id: str,
        n: int,
        seed: int,
        stagger: int = 0,
        options: Mapping[str, Any] | None = None,
        state: State | None = None,
        lessons: Lessons | None = None,
        processes: int = 2,
    ) -> None:
        self.info = describe(env_id)
        self._parts = np.array_split(np.arange(n), min(n, processes))
        self._pipes: list[Connection] = []
        self._workers = []
        context = get_context("spawn")  # a forked child would inherit locks of torch's threads
        for games in self._parts:
            ours, theirs = context.Pipe()
            begun = None if state is None else _share(state, games)
            arguments = (env_id, n, seed, stagger, dict(options or {}), games.tolist(), begun, lessons)
            worker = context.Process(target=_serve, args=(theirs, *arguments), daemon=True)
            worker.start()
            self._pipes.append(ours)
            self._workers.append(worker)
        self.obs = np.concatenate([pipe.recv() for pipe in self._pipes])

    def __len__(self) -> int:
        return len(self.obs)

    def step(self, actions: Sequence[int] | npt.NDArray[Any]) -> Steps:
        """As :meth:`Fleet.step`."""
        chosen = np.asarray(actions)
        for pipe, games in zip(self._pipes, self._parts, strict=True):
            pipe.send(chosen[games])
        answers = [pipe.recv() for pipe in self._pipes]
        self.obs = np.concatenate([obs for obs, _ in answers])
        rewards, terminated, truncated = (np.concatenate([part[i] for _, part in answers]) for i in range(3))
        return Steps(rewards, terminated, truncated, [total for _, part in answers for total in part[3]])

    def state(self) -> State:
        """As :meth:`Fleet.state`; either kind of fleet goes on from it."""
        for pipe in self._pipes:
            pipe.send("state")
        parts: list[State] = [pipe.recv() for pipe in self._pipes]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        while self._pipes:
            self._pipes.pop().send(None)
            self._workers.pop().join()


def _share(state: State, games: npt.NDArray[np.int64]) -> State:
    """The part of the state that belongs to these consecutive games."""
    ends = np.append(0, np.cumsum(state["lengths"]))
    actions = state["actions"][ends[games[0]] : ends[games[-1] + 1]]
    return {"episodes": state["episodes"][games], "lengths": state["lengths"][games], "actions": actions}


def _serve(pipe: Connection, *arguments: Any) -> None:
    """The life of a worker: actions in, observations and steps out; None ends it."""
    fleet = Fleet(*arguments)
    pipe.send(fleet.obs)
    while (message := pipe.recv()) is not None:
        if isinstance(message, str):
            pipe.send(fleet.state())
        else:
            steps = fleet.step(message)
            pipe.send((fleet.obs, tuple(steps)))
    fleet.close()
