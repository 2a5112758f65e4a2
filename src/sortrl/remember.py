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
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl.collect import select
from sortrl.errors import SortRLError
from sortrl.nets import SortPolicy
from sortrl.normalizer import Normalizer
from sortrl.records import Demonstrations, IntArray


@dataclass(frozen=True)
class _Candidate:
    """An episode; one that was cut off may still be the best that is known of its start."""

    rows: npt.NDArray[np.int64]
    total: float
    ended: bool
    pictures: tuple[bytes, ...]

    @property
    def rank(self) -> tuple[bool, float, int]:
        """The best comes first."""
        return not self.ended, -self.total, len(self.rows)


def best_episodes(demos: Demonstrations) -> Demonstrations:
    """Of each start, the episode with the highest return, and of those the shortest; the answers are what was played.
    Episodes that were cut off come last.

    An episode that gives two answers to one observation cannot be played by any policy that sees nothing else, so the next
    best is taken; likewise one that contradicts an episode taken before. (If there is none, the last answer counts.)
    """
    after = demos.transitions
    if after is None:
        raise SortRLError(
            "best_episodes: these demonstrations lack transitions (rewards and ends). Collect them again."
        )
    starts: dict[bytes, list[_Candidate]] = {}
    for rows in np.split(np.arange(len(demos)), np.flatnonzero(np.diff(demos.episodes)) + 1):
        pictures = tuple(hashlib.blake2b(demos.obs[row].tobytes(), digest_size=16).digest() for row in rows)
        ended, total = bool(after.terminated[rows[-1]]), float(after.rewards[rows].sum())
        starts.setdefault(pictures[0], []).append(_Candidate(rows, total, ended, pictures))
    episodes = sum(map(len, starts.values()))
    if len(starts) > episodes / 2:
        raise SortRLError(
            f"best_episodes: {episodes} episodes from {len(starts)} different starts. Remembering needs a task with few starts, "
            "each met several times (training levels of ProcGen, Atari): collect more states, or distil."
        )
    answers: dict[bytes, int] = {}
    kept: dict[bytes, int] = {}
    for candidates in starts.values():
        ranked = sorted(candidates, key=lambda one: one.rank)
        chosen = next((one for one in ranked if _consistent(one, after.played, answers)), ranked[0])
        for picture, row in zip(chosen.pictures, chosen.rows, strict=True):
            answers[picture], kept[picture] = int(after.played[row]), int(row)
    mask = np.zeros(len(demos), bool)
    mask[list(kept.values())] = True
    best = select(demos, mask)
    assert best.transitions is not None
    return Demonstrations(best.env_id, best.obs, best.transitions.played, best.logits, best.episodes, best.transitions)


def _consistent(episode: _Candidate, played: IntArray, answers: dict[bytes, int]) -> bool:
    own = dict(answers)
    return all(
        own.setdefault(picture, int(played[row])) == played[row]
        for picture, row in zip(episode.pictures, episode.rows, strict=True)
    )


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
