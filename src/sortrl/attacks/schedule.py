"""When to attack: an adversary that may change only a few actions of an episode chooses the moments that hurt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl.core.errors import SortRLError
from sortrl.core.records import Policy
from sortrl.envs import Simulator

IntArray = npt.NDArray[np.int64]


class Moment(Protocol):
    """An episode at one of its steps: the seed it started from, the actions played so far, how many an attack changed."""

    seed: int
    actions: list[int]
    changed: int


class Choice(NamedTuple):
    """Which of the states to attack (their numbers, in order) and, for a targeted attack, the action to aim at in each."""

    states: IntArray
    aims: IntArray | None = None


Chooser = Callable[[Tensor, Sequence[Moment]], Choice]
"""Unit-space states and, for each, the moment it stands for -> the choice. Called once per step of the episodes."""


class Timing(Protocol):
    """Decides, step by step, which states are attacked.

    The budget ``steps`` counts changed actions per episode: an adversary who sees that an input does not change the action
    need not show it.
    """

    @property
    def name(self) -> str: ...

    def begin(self, policy: Policy, env_id: str) -> Chooser: ...


@dataclass(frozen=True)
class Strategic:
    """Strategically timed attack (Lin et al., 2017): where the policy is sure, a wrong action costs most.

    A state is attacked when the largest minus the smallest softmax of the scores exceeds ``threshold``. ``guide`` gives the
    scores, for example the teacher's where the student's have another scale; None: those of the policy itself.
    """

    threshold: float = 0.5
    steps: int = 25
    guide: Policy | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 1 or self.steps < 1:
            raise SortRLError(
                f"Strategic: threshold={self.threshold}, steps={self.steps}; expected a number in [0, 1) and at least 1."
            )

    @property
    def name(self) -> str:
        return f"strategic-{self.threshold:g}-{self.steps}"

    def begin(self, policy: Policy, env_id: str) -> Chooser:
        guide = self.guide or policy

        def choose(unit: Tensor, moments: Sequence[Moment]) -> Choice:
            with torch.no_grad():
                preference = guide.scores(unit).softmax(1)
            sure = (preference.amax(1) - preference.amin(1) > self.threshold).numpy()
            return Choice(np.flatnonzero(sure & _may_still(moments, self.steps)))

        return choose


@dataclass(frozen=True)
class CriticalPoints:
    """Critical point attack (after Sun et al., 2020): look ahead, and strike where wrong actions cost most.

    At each step every action is tried in a branch of the episode: played for ``strokes`` steps, then followed by the policy's
    own choices up to ``horizon`` steps in all. Where the worst of them collects at least ``damage`` less reward than the
    undisturbed policy, the state is attacked, aimed at that action. The published attack predicts the future with a
    learned model, tries all sequences of strokes and measures damage by a formula per task; here the simulator is the
    model, a sequence is one action held, and reward is the measure.
    """

    horizon: int = 30
    damage: float = 1.0
    steps: int = 25
    strokes: int = 5

    def __post_init__(self) -> None:
        if not 1 <= self.strokes <= self.horizon or self.steps < 1 or not self.damage > 0:
            raise SortRLError(
                f"CriticalPoints: horizon={self.horizon}, damage={self.damage}, steps={self.steps}, "
                f"strokes={self.strokes}; expected 1 <= strokes <= horizon, damage > 0 and at least 1 step."
            )

    @property
    def name(self) -> str:
        return f"critical-{self.horizon}-{self.damage:g}-{self.steps}-{self.strokes}"

    def begin(self, policy: Policy, env_id: str) -> Chooser:
        return _LookAhead(self, policy, env_id).choose


class _LookAhead:
    """Follows every episode in a simulator of its own, from which branches are forked."""

    def __init__(self, timing: CriticalPoints, policy: Policy, env_id: str) -> None:
        self.timing, self.policy, self.env_id = timing, policy, env_id
        self.simulators: dict[int, Simulator] = {}

    def choose(self, unit: Tensor, moments: Sequence[Moment]) -> Choice:
        able = np.flatnonzero(_may_still(moments, self.timing.steps))
        if len(able) == 0:
            return Choice(able, able)
        branches = [
            self._at(moments[place]).fork() for place in able.tolist() for _ in range(1 + self.policy.n_actions)
        ]
        undisturbed_first = [None, *range(self.policy.n_actions)] * len(able)
        collected = self._play_out(branches, undisturbed_first).reshape(len(able), -1)
        damage = collected[:, :1] - collected[:, 1:]
        critical = damage.max(1) >= self.timing.damage
        return Choice(able[critical], damage.argmax(1)[critical])

    def _at(self, moment: Moment) -> Simulator:
        """The simulator of this episode, brought to where the episode stands."""
        if moment.seed not in self.simulators:
            self.simulators[moment.seed] = Simulator(self.env_id, moment.seed)
        simulator = self.simulators[moment.seed]
        for action in moment.actions[simulator.length :]:
            simulator.step(action)
        return simulator

    def _play_out(self, branches: list[Simulator], held: Sequence[int | None]) -> npt.NDArray[np.float64]:
        """What each branch collects within the horizon when it holds its action (None: the policy's own) for the strokes."""
        before = np.array([branch.total for branch in branches])
        for step in range(self.timing.horizon):
            running = [(branch, action) for branch, action in zip(branches, held, strict=True) if not branch.done]
            if not running:
                break
            with torch.no_grad():
                unit = self.policy.normalize(np.stack([branch.obs for branch, _ in running]))
                own = self.policy.scores(unit).argmax(1).tolist()
            for (branch, action), chosen in zip(running, own, strict=True):
                branch.step(chosen if action is None or step >= self.timing.strokes else action)
        collected: npt.NDArray[np.float64] = np.array([branch.total for branch in branches]) - before
        for branch in branches:
            branch.close()
        return collected


def _may_still(moments: Sequence[Moment], steps: int) -> npt.NDArray[np.bool_]:
    return np.array([moment.changed < steps for moment in moments], dtype=bool)
