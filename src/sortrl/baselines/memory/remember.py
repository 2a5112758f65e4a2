"""A student without training: it remembers the teacher's best episode from every start, and plays the nearest memory.

Where a task has few starts and no chance in between (the training levels of ProcGen, Atari without sticky actions), an
agent that never errs meets few states. Pictures of a game lie far apart in l_inf, because one pixel that differs is enough,
so a nearest neighbour among them has a wide margin. And the nearest neighbour in l_inf *is* a network of max layers:

    y_k = max_i |x_i - state_k,i|                     how far is memory k?
    z_a = max_k |y_k - v_a,k| = far - min over memories k of other actions of y_k
    score_a = -z_a

with v = far for memories of other actions and far / 3 for those of action a, where the term never counts. Its certificate is
the usual one: half the difference between the distances to the nearest memory of another action and to the nearest of all.

It says nothing about states that are unlike everything it remembers, and should be expected to play badly there.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.core.records import Demonstrations, IntArray, Transitions
from sortrl.data.dataset import select
from sortrl.data.starts import start_name
from sortrl.nets import SortPolicy


@dataclass(frozen=True)
class _Candidate:
    """An episode; one that was cut off may still be the best that is known of its start."""

    length: int
    total: float
    ended: bool
    accidents: int
    """Steps that are not the teacher's own play."""
    consistent: bool
    """Whether the same picture was always answered in the same way."""
    answers: dict[bytes, int]
    """The last answer to each picture."""
    last_rows: tuple[int, ...]
    """Where it was given, in the same order."""

    def rank(self, plain: bool) -> tuple[bool, float, int, int]:
        """The best comes first."""
        return not self.ended, -self.total, self.accidents if plain else 0, self.length


def best_episodes(demos: Demonstrations, plain: bool = False) -> Demonstrations:
    """Of each start, the episode with the highest return, and of those the shortest (with ``plain``: first the one that
    differs least from the teacher's own play); the answers are what was played. Episodes that were cut off come last.

    An episode that gives two answers to one observation cannot be played by any policy that sees nothing else, so the next
    best is taken; likewise one that contradicts those of other starts. (If there is none, the best adds what contradicts nobody,
    and of two answers of its own the last.) The teacher's own greedy episodes never contradict each other: where there are some,
    all begin with those, and then every start in turn takes a better one if it agrees with the others.
    """
    after = demos.transitions
    if after is None:
        raise SortRLError(
            "best_episodes: these demonstrations lack transitions (rewards and ends). Collect them again."
        )
    starts: dict[bytes, list[_Candidate]] = {}
    for index, rows in enumerate(np.split(np.arange(len(demos)), np.flatnonzero(np.diff(demos.episodes)) + 1)):
        number = -1 if after.starts is None else int(after.starts[index])
        starts.setdefault(start_name(demos.obs[rows[0]], number), []).append(_candidate(demos, after, rows))
    episodes = sum(map(len, starts.values()))
    if len(starts) > episodes / 2:
        raise SortRLError(
            f"best_episodes: {episodes} episodes from {len(starts)} different starts. Remembering needs a task with few starts, "
            "each met several times (training levels of ProcGen, Atari): collect more states, or distil."
        )
    ranked = {name: sorted(candidates, key=lambda one: one.rank(plain)) for name, candidates in starts.items()}
    taken = _Taken()
    chosen = {name: one for name, some in ranked.items() if (one := next((c for c in some if not c.accidents), None))}
    for one in chosen.values():
        taken.add(one)
    for name, some in ranked.items():
        if name in chosen:
            taken.remove(chosen[name])
            del chosen[name]
        agreeing = next((one for one in some if taken.agrees_with(one)), None)
        if agreeing is not None:
            chosen[name] = agreeing
            taken.add(agreeing)
    kept: dict[bytes, int] = {}
    for one in (*chosen.values(), *(some[0] for name, some in ranked.items() if name not in chosen)):
        for picture, row in zip(one.answers, one.last_rows, strict=True):
            kept.setdefault(picture, row)
    mask = np.zeros(len(demos), bool)
    mask[list(kept.values())] = True
    best = select(demos, mask)
    assert best.transitions is not None
    return Demonstrations(best.env_id, best.obs, best.transitions.played, best.logits, best.episodes, best.transitions)


def _candidate(demos: Demonstrations, after: Transitions, rows: IntArray) -> _Candidate:
    pictures = [hashlib.blake2b(demos.obs[row].tobytes(), digest_size=16).digest() for row in rows]
    played = after.played[rows]
    answers = dict(zip(pictures, played.tolist(), strict=True))
    return _Candidate(
        length=len(rows),
        total=float(after.rewards[rows].sum()),
        ended=bool(after.terminated[rows[-1]]),
        accidents=int((played != demos.actions[rows]).sum()),
        consistent=all(answers[picture] == action for picture, action in zip(pictures, played, strict=True)),
        answers=answers,
        last_rows=tuple(dict(zip(pictures, rows.tolist(), strict=True)).values()),
    )


class _Taken:
    """The answers of the episodes taken so far, each with the number of episodes that give it."""

    def __init__(self) -> None:
        self._answers: dict[bytes, Counter[int]] = {}

    def agrees_with(self, episode: _Candidate) -> bool:
        return episode.consistent and all(
            answer == action or not count
            for picture, action in episode.answers.items()
            for answer, count in self._answers.get(picture, {}).items()
        )

    def add(self, episode: _Candidate) -> None:
        for picture, action in episode.answers.items():
            self._answers.setdefault(picture, Counter())[action] += 1

    def remove(self, episode: _Candidate) -> None:
        for picture, action in episode.answers.items():
            self._answers[picture][action] -= 1


@torch.no_grad()
def remember(
    demos: Demonstrations, normalizer: Normalizer, pool: int = 1, crop: tuple[int, ...] = (0, 0, 0, 0)
) -> SortPolicy:
    """The policy that gives the answer of the nearest state, as seen after ``crop`` and ``pool``.

    >>> obs = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 4.0]], np.float32)
    >>> demos = Demonstrations("Any-v0", obs, np.array([0, 1, 2]), np.zeros((3, 3), np.float32), np.zeros(3, np.int64))
    >>> policy = remember(demos, Normalizer.identity((2,)))
    >>> policy.predict(np.array([[0.1, 0.0], [0.9, 0.1], [0.0, 3.0]]))[0].tolist()
    [0, 1, 2]
    >>> policy.certify(obs[:1]).radius.round(3).tolist()  # half the distance to the nearest other
    [0.5]
    """
    shape = tuple(demos.obs.shape[1:])
    policy = SortPolicy(shape, demos.n_actions, len(demos), 2, 0.0, crop=crop, pool=pool, normalizer=normalizer)
    states = torch.cat([seen_by(policy, part) for part in np.array_split(demos.obs, -(-len(demos) // 1024))])
    # No two memories are further apart than the box around all of them is wide.
    width = float((states.amax(0) - states.amin(0)).amax())
    own = torch.from_numpy(demos.actions)[None] == torch.arange(demos.n_actions)[:, None]
    policy.layers[0].weight.copy_(states)
    policy.layers[1].weight.copy_(torch.where(own, 0.5 * width, 1.5 * width))
    return policy


def seen_by(policy: SortPolicy, obs: npt.NDArray[np.generic]) -> Tensor:
    """What the front ends of a policy leave of raw observations, flat."""
    return policy.front(policy.normalize(obs)).flatten(1)
