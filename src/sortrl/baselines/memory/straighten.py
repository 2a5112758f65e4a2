"""Episodes made plainer: whatever need not differ from the teacher's own answers is put back.

A sampled try that wins is full of accidents. Most of them do not matter, but a memory of it has to keep them all, and to tell
pictures apart that differ by a step. A task without chance can be played again, so each of them can be tried: stretch by
stretch, long ones first, the teacher's own answers are played instead, then the rest of the try as it was, and what wins is
kept. What remains is the teacher's play, but for the moments in which it would have lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sortrl.baselines.memory.search import from_pictures, recorded, rows_by_start, scores_of, seeds_of
from sortrl.core.records import Demonstrations
from sortrl.envs import EnvSlots
from sortrl.teachers.teacher import Teacher

Progress = Callable[[dict[str, Any]], None]
LONGEST = 16  # steps of a stretch at first; halved down to 1
TAIL = 40  # steps that the teacher may play on when the try has come to its end


def straightened(
    teacher: Teacher, known: Demonstrations, goal: float, seed: int = 0, progress: Progress | None = None
) -> Demonstrations | None:
    """For each start that ``known`` has won (return ``goal``), the won try that differs least from the teacher, made plainer;
    None if there is none. ``progress`` is called with ``step`` and ``total``, in starts."""
    by_start, after = rows_by_start(known), known.transitions
    assert after is not None
    tries = {}
    for name, some in by_start.items():
        won = [rows for rows in some if after.rewards[rows].sum() >= goal and after.terminated[rows[-1]]]
        if won:
            tries[name] = min(won, key=lambda rows: int((after.played[rows] != known.actions[rows]).sum()))
    found = []
    with EnvSlots(known.env_id, 1) as slots:
        seeds = seeds_of(slots, tries, seed)
        for number, (name, rows) in enumerate(tries.items(), 1):
            if name in seeds:
                way = _Way(bytes(after.played[rows].tolist()), bytes(known.actions[rows].tolist()))
                plain = _Straightener(teacher, slots, seeds[name][0], goal).plainest(way)
                episode, _ = from_pictures(slots, 0, seeds[name][0], plain.played, goal)
                found += [] if episode is None else [episode]
            if progress is not None:
                progress({"step": number, "total": len(tries)})
    return recorded(known.env_id, found, teacher)


@dataclass(frozen=True)
class _Way:
    """Actions from a start to its end, and what the teacher would have done in the same states."""

    played: bytes
    own: bytes

    @property
    def accidents(self) -> list[int]:
        """The steps that differ."""
        return [step for step, (one, two) in enumerate(zip(self.played, self.own, strict=True)) if one != two]


class _Straightener:
    """Changes of one way."""

    def __init__(self, teacher: Teacher, slots: EnvSlots, seed: int, goal: float) -> None:
        self.teacher, self.slots, self.seed, self.goal = teacher, slots, seed, goal

    def plainest(self, way: _Way) -> _Way:
        size = LONGEST
        while size >= 1:
            begin = 0
            while begin < len(way.played):
                if any(begin <= step < begin + size for step in way.accidents):
                    changed = self._changed(way, begin, begin + size)
                    if changed is not None and len(changed.accidents) < len(way.accidents):
                        way = changed
                begin += size
            size //= 2
        return way

    def _changed(self, way: _Way, begin: int, end: int) -> _Way | None:
        """The way with the teacher's own answers from ``begin`` to ``end`` and after its end, if that wins."""
        frame, total, played, frames = self.slots.reset(0, self.seed), 0.0, bytearray(), []
        for step in range(len(way.played) + TAIL):
            asked = begin <= step < end or step >= len(way.played)
            action = int(scores_of(self.teacher, frame[None]).argmax()) if asked else way.played[step]
            frames.append(frame.copy())
            frame, reward, done = self.slots.step(0, action)
            played.append(action)
            total += reward
            if done:
                if total < self.goal:
                    return None
                own = np.concatenate(
                    [
                        scores_of(self.teacher, np.stack(frames[k : k + 256])).argmax(1)
                        for k in range(0, len(frames), 256)
                    ]
                )
                return _Way(bytes(played), bytes(own.tolist()))
        return None
