"""Wins where no try of the teacher won: a search that returns to where it has been, and goes on from there.

A task without chance can be played again up to any point. So a start that the teacher keeps losing need not be won in one go
(Ecoffet et al., 2021, *First return, then explore*): every try is added to an archive of places, a place being all pictures
that look alike when they are made very coarse, each with the shortest way there. A further try goes back to a place that was
seldom returned to, and plays on for a while, as the teacher with its choices made softer, or at random.

What is found must be worth remembering: an agent that sees pictures alone has to be able to play it. So a way counts only if it
is won again by answering every picture as the way did last (or first) when it came by there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sortrl.core.errors import SortRLError
from sortrl.core.progress import Progress
from sortrl.core.records import Demonstrations, Transitions
from sortrl.data.starts import start_name
from sortrl.envs import EnvSlots, describe
from sortrl.teachers.load.load import check_fit
from sortrl.teachers.teacher import Teacher

Frame = npt.NDArray[Any]
_DRAWS = 3000  # seeds, at most, among which those of lost starts are looked for
_SIDE, _SHADES = 4, 7  # places are told apart by pictures of 4 x 4 means in 7 shades
_AFRESH = 0.1  # share of the tries that begin at the start
_HORIZON = 120  # steps that a try plays on from where it returned to
_RANDOM_SHARE = 0.5  # of the tries, which play at random, in runs of one action; the others ask the teacher
_LONGEST_RUN = 30  # half of those runs have length 1, a third more than 2, a tenth more than 9, and so on up to this
_TEMPERATURES = (1.0, 2.0, 4.0)  # how much softer than its own the teacher's choices are; each try draws one


@dataclass(frozen=True)
class SearchConfig:
    """How long and how widely to search. Without steps there is no search."""

    steps: int = 0
    """Steps of the environment in all, those of the ways back included."""
    goal: float = 0.0
    """The return with which a start counts as won; the others are searched."""
    patience: int = 64
    """Give a start up after so many tries in a row that saw no new place."""
    slots: int = 32
    """Tries played side by side."""
    straighten: bool = False
    """Then put back what need not differ from the teacher's own answers (:mod:`sortrl.baselines.memory.straighten`)."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("patience", 1), ("slots", 1)):
            if getattr(self, name) < least:
                raise SortRLError(f"SearchConfig: {name} is {getattr(self, name)}, expected at least {least}.")


def search(
    teacher: Teacher,
    known: Demonstrations,
    config: SearchConfig,
    seed: int = 0,
    progress: Progress | None = None,
) -> Demonstrations | None:
    """Won episodes of starts that no episode in ``known`` has won, or that it has not met; None if none was found.

    They are recorded as :func:`sortrl.data.collect.collect` records: what was played, and the teacher's own answers beside it. The
    same seed gives the same episodes. ``progress`` is called with ``step``, ``total``, ``won`` and ``lost``.
    """
    info = describe(known.env_id)
    check_fit(teacher, info)
    if len(info.obs_shape) != 3 or min(info.obs_shape[1:]) < _SIDE or info.obs_dtype != np.uint8:
        raise SortRLError(
            f"search: {known.env_id} shows {info.obs_dtype} of shape {info.obs_shape}; places are told apart by pictures of bytes "
            f"(channels, height, width), {_SIDE} x {_SIDE} pixels at least."
        )
    with EnvSlots(known.env_id, config.slots) as slots:
        searching = _Search(teacher, slots, config, seed)
        searching.open = _lost_starts(slots, known, config.goal, seed)
        while searching.open and searching.steps < config.steps:
            searching.play()
            if progress is not None:
                done = min(searching.steps, config.steps)
                won, lost = len(searching.won), len(searching.open)
                progress({"step": done, "total": config.steps, "won": won, "lost": lost})
    return recorded(known.env_id, searching.won, teacher)


def place_of(frame: Frame) -> bytes:
    """What pictures have in common that count as one place.

    >>> frame = np.zeros((3, 64, 64), np.uint8)
    >>> frame[:, 5, 5] = 255  # a dot is too small to see
    >>> place_of(frame) == place_of(np.zeros((3, 64, 64), np.uint8)) != place_of(frame + 100)
    True
    """
    channels, height, width = frame.shape
    rows, columns = height // _SIDE, width // _SIDE
    blocks = frame[:, : rows * _SIDE, : columns * _SIDE].reshape(channels, _SIDE, rows, _SIDE, columns)
    shades: npt.NDArray[np.uint8] = (blocks.mean((2, 4)) * (_SHADES / 256)).astype(np.uint8)
    return shades.tobytes()


@dataclass(eq=False)
class _Start:
    """A start that is still to be won: the shortest known way to each place that was seen, and how often it was taken."""

    seed: int
    number: int
    ways: list[bytes] = field(default_factory=lambda: [b""])
    taken: list[int] = field(default_factory=lambda: [0])
    index: dict[bytes, int] = field(default_factory=dict)
    tries: int = 0
    fruitless: int = 0
    """Tries since the last one that saw a new place."""

    def way(self, rng: np.random.Generator) -> bytes:
        """To a place that was seldom returned to; a byte is an action."""
        self.tries += 1
        self.fruitless += 1
        if rng.random() < _AFRESH:
            return b""
        weights = 1.0 / np.sqrt(1.0 + np.array(self.taken))
        chosen = int(rng.choice(len(weights), p=weights / weights.sum()))
        self.taken[chosen] += 1
        return self.ways[chosen]

    def reached(self, frame: Frame, way: bytes) -> None:
        at = self.index.setdefault(place_of(frame), len(self.ways))
        if at == len(self.ways):
            self.ways.append(way)
            self.taken.append(0)
            self.fruitless = 0
        elif len(way) < len(self.ways[at]):
            self.ways[at] = way


@dataclass(eq=False)
class _Try:
    """One try under way."""

    start: _Start
    way: bytearray
    total: float
    left: int
    temperature: float
    """Of the teacher's choices; 0 plays at random."""
    action: int = 0
    run: int = 0
    """How often the random action is to be repeated."""


@dataclass(frozen=True)
class Won:
    """An episode as it was played."""

    start: int
    obs: list[Frame]
    played: list[int]
    rewards: list[float]
    terminated: bool
    ended: bool
    """Terminated, or out of time."""
    final: Frame


class _Search:
    """The starts that are still open, and the tries under way."""

    def __init__(self, teacher: Teacher, slots: EnvSlots, config: SearchConfig, seed: int) -> None:
        self.teacher, self.slots, self.config = teacher, slots, config
        self.rng = np.random.default_rng([seed, 7])
        self.obs = np.zeros((len(slots), *slots.info.obs_shape), slots.info.obs_dtype)
        self.tries: list[_Try | None] = [None] * len(slots)
        self.open: list[_Start] = []
        self.won: list[Won] = []
        self.steps = 0

    def play(self) -> None:
        """One step of every try; those that are over make room for others."""
        for slot, one in enumerate(self.tries):
            if one is None or one.left == 0 or one.start not in self.open:
                self.tries[slot] = self._begun(slot)
        playing = {slot: one for slot, one in enumerate(self.tries) if one is not None}
        actions = self._actions(playing)
        self.slots.begin(playing, actions)
        for (slot, one), action in zip(playing.items(), actions, strict=True):
            self.obs[slot], reward, done = self.slots.step(slot, action)
            self.steps += 1
            one.way.append(action)
            one.total, one.left = one.total + reward, one.left - 1
            if not done:
                one.start.reached(self.obs[slot], bytes(one.way))
            else:
                one.left = 0
                if one.total >= self.config.goal and one.start in self.open:
                    self._keep(slot, one)

    def _begun(self, slot: int) -> _Try | None:
        """A try of the start that was tried least, taken back to where it is to go on; None if there is no start left."""
        self.open = [start for start in self.open if start.fruitless < self.config.patience]
        if not self.open:
            return None
        start = min(self.open, key=lambda one: one.tries)
        way = start.way(self.rng)
        self.obs[slot], total = self.slots.reset(slot, start.seed), 0.0
        for action in way:
            self.slots.begin([slot], [action])
            self.obs[slot], reward, _ = self.slots.step(slot, action)
            total += reward
        self.steps += len(way)
        at_random = self.rng.random() < _RANDOM_SHARE
        temperature = 0.0 if at_random else float(self.rng.choice(_TEMPERATURES))
        return _Try(start, bytearray(way), total, _HORIZON, temperature)

    def _actions(self, playing: dict[int, _Try]) -> list[int]:
        asked = [slot for slot, one in playing.items() if one.temperature > 0]
        softened = np.array([playing[slot].temperature for slot in asked])[:, None]
        answers: dict[int, int] = {}
        if asked:
            logits = scores_of(self.teacher, self.obs[asked])
            # The arg-max of logits plus Gumbel noise is a sample of their softmax.
            sampled = (logits / softened + self.rng.gumbel(size=logits.shape)).argmax(1)
            answers = dict(zip(asked, sampled.tolist(), strict=True))
        for slot, one in playing.items():
            if slot in answers:
                continue
            if one.run == 0:
                one.action = int(self.rng.integers(self.slots.info.n_actions))
                one.run = min(_LONGEST_RUN, int(1.0 / (1.0 - self.rng.random())))
            one.run -= 1
            answers[slot] = one.action
        return [answers[slot] for slot in playing]

    def _keep(self, slot: int, one: _Try) -> None:
        """Close the start, if the way to its end can be played from pictures."""
        episode, steps = from_pictures(self.slots, slot, one.start.seed, one.way, self.config.goal)
        self.steps += steps
        if episode is not None:
            self.won.append(episode)
            self.open.remove(one.start)


def from_pictures(slots: EnvSlots, slot: int, seed: int, way: bytes | bytearray, goal: float) -> tuple[Won | None, int]:
    """The episode of an agent that answers each picture as a way did, the last time it came by there or the first, if it is
    won; and how many steps it took to find out."""
    frame, frames = slots.reset(slot, seed), []
    for action in way:
        frames.append(_key(frame))
        frame, _, _ = slots.step(slot, action)
    steps = len(way)
    forwards = list(zip(frames, way, strict=True))
    for answers in (dict(forwards), dict(forwards[::-1])):
        episode = _answered(slots, slot, seed, answers, 2 * len(way))
        steps += len(episode.played)
        if episode.ended and sum(episode.rewards) >= goal:
            return episode, steps
    return None, steps


def _answered(slots: EnvSlots, slot: int, seed: int, answers: dict[bytes, int], longest: int) -> Won:
    """What these answers play, up to a picture that has none."""
    frame, number = slots.reset(slot, seed).copy(), int(slots.starts[slot])
    obs: list[Frame] = []
    played: list[int] = []
    rewards: list[float] = []
    done = False
    while not done and len(played) < longest and (action := answers.get(_key(frame))) is not None:
        obs.append(frame)
        shown, reward, done = slots.step(slot, action)
        frame = shown.copy()
        played.append(action)
        rewards.append(reward)
    return Won(number, obs, played, rewards, bool(slots.terminated[slot]), bool(done), frame)


def scores_of(teacher: Teacher, obs: Frame) -> npt.NDArray[np.float32]:
    with torch.no_grad():
        scores: npt.NDArray[np.float32] = teacher.scores(teacher.normalize(obs)).float().cpu().numpy()
    return scores


def _key(frame: Frame) -> bytes:
    return hashlib.blake2b(frame.tobytes(), digest_size=16).digest()


def rows_by_start(known: Demonstrations) -> dict[bytes, list[npt.NDArray[np.int64]]]:
    """The rows of each episode, by the name of its start."""
    after = known.transitions
    if after is None:
        raise SortRLError("search: these demonstrations lack transitions (rewards and ends). Collect them again.")
    found: dict[bytes, list[npt.NDArray[np.int64]]] = {}
    for index, rows in enumerate(np.split(np.arange(len(known)), np.flatnonzero(np.diff(known.episodes)) + 1)):
        name = start_name(known.obs[rows[0]], -1 if after.starts is None else int(after.starts[index]))
        found.setdefault(name, []).append(rows)
    return found


def seeds_of(slots: EnvSlots, names: Iterable[bytes], seed: int) -> dict[bytes, tuple[int, int]]:
    """Seeds that lead to these starts, and their numbers; starts that are met on the way are there too."""
    missing = set(names)
    found: dict[bytes, tuple[int, int]] = {}
    for env_seed in np.random.SeedSequence([seed, 6]).generate_state(_DRAWS) >> 1:
        if not missing:
            break
        frame, number = slots.reset(0, int(env_seed)), int(slots.starts[0])
        name = start_name(frame, number)
        missing.discard(name)
        found.setdefault(name, (int(env_seed), number))
    return found


def _lost_starts(slots: EnvSlots, known: Demonstrations, goal: float, seed: int) -> list[_Start]:
    """Those that ``known`` has not won, with seeds that lead there, and those that it has not met."""
    by_start, after = rows_by_start(known), known.transitions
    assert after is not None
    won = {name for name, some in by_start.items() if max(after.rewards[rows].sum() for rows in some) >= goal}
    seeds = seeds_of(slots, by_start.keys() - won, seed)
    return [_Start(*place) for name, place in seeds.items() if name not in won]


def recorded(env_id: str, won: list[Won], teacher: Teacher) -> Demonstrations | None:
    """The episodes as demonstrations, with the teacher's answers beside what was played."""
    if not won:
        return None
    obs = np.concatenate([np.stack(one.obs) for one in won])
    logits = np.concatenate([scores_of(teacher, part) for part in np.array_split(obs, -(-len(obs) // 256))])
    lengths = [len(one.obs) for one in won]
    ends = np.cumsum(lengths) - 1
    terminated, truncated = np.zeros((2, len(obs)), bool)
    terminated[ends] = [one.terminated for one in won]
    truncated[ends] = ~terminated[ends]
    after = Transitions(
        np.array([action for one in won for action in one.played], np.int64),
        np.array([reward for one in won for reward in one.rewards], np.float32),
        terminated,
        truncated,
        np.stack([one.final for one in won]),
        np.array([one.start for one in won], np.int64),
    )
    return Demonstrations(env_id, obs, logits.argmax(1), logits, np.repeat(np.arange(len(won)), lengths), after)
