"""Returns of policies with continuous actions, clean and under attack, and how far their actions were moved beside what is certified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sortrl.attacks.continuous import ActionAttack, Moved
from sortrl.attacks.valid import valid_range
from sortrl.core.errors import SortRLError
from sortrl.core.progress import Progress
from sortrl.core.stats import iqm
from sortrl.envs import EnvSlots, Episode, play_episodes
from sortrl.evaluate.returns import episode_seeds
from sortrl.nets import ContinuousPolicy
from sortrl.teachers.continuous import ContinuousTeacher

Agent = ContinuousPolicy | ContinuousTeacher


@dataclass(frozen=True)
class ContinuousResult:
    """Returns of a fixed list of episodes, every one played to its end, and what happened to the actions on the way.

    ``moved`` (numbers,) is how far each number of an action was moved at most, in its own units; ``bound`` what is certified of that,
    over the same states, and ``beyond`` in how many of them an action was moved farther than its own bound (None without
    certificates)."""

    policy: str
    attack: str
    eps: float
    seeds: tuple[int, ...]
    returns: npt.NDArray[np.float64]
    steps: int
    moved: npt.NDArray[np.float64]
    mean_moved: npt.NDArray[np.float64]
    bound: npt.NDArray[np.float64] | None
    beyond: int | None

    @property
    def mean(self) -> float:
        return float(self.returns.mean())

    @property
    def sem(self) -> float:
        """Standard error of the mean."""
        return float(self.returns.std(ddof=1) / np.sqrt(len(self.returns))) if len(self.returns) > 1 else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "attack": self.attack,
            "eps": self.eps,
            "mean": self.mean,
            "sem": self.sem,
            "iqm": iqm(self.returns),
            "episodes": len(self.seeds),
            "first_seed": self.seeds[0],
            "returns": [round(float(value), 4) for value in self.returns],
            "steps": self.steps,
            "moved": self.moved.tolist(),
            "mean_moved": self.mean_moved.tolist(),
            "bound": None if self.bound is None else self.bound.tolist(),
            "beyond": self.beyond,
        }


def evaluate_continuous(
    policy: Agent,
    env_id: str,
    attack: ActionAttack | None = None,
    eps: float = 0.0,
    episodes: int = 20,
    seed: int = 0,
    *,
    name: str = "policy",
    slots: int = 64,
    progress: Progress | None = None,
) -> ContinuousResult:
    """Play ``episodes`` episodes, each observation perturbed by ``attack`` within ``eps`` (unit space).

    Of a policy with certificates every move is compared with its bound, so that an evaluation is also a hunt for a wrong one.

    >>> from sortrl.teachers import load_continuous
    >>> evaluate_continuous(load_continuous(lambda obs: -obs[:, 2:], "Pendulum-v1"), "Pendulum-v1", episodes=2).mean < -500
    True
    """
    if not 0 <= eps < float("inf"):
        raise SortRLError(f"evaluate: eps is {eps}, expected a finite number >= 0 in the policy's input units.")
    seeds = episode_seeds(seed, episodes)
    generator = torch.Generator().manual_seed(seed)
    tally = _Tally(policy, eps)
    finished = 0
    threads = torch.get_num_threads()

    def ended(_: Episode) -> None:
        nonlocal finished
        finished += 1
        if progress is not None:
            progress({"episodes": finished, "total": episodes})

    with EnvSlots(env_id, min(slots, episodes), continuous=True) as envs:
        box = envs.info.action_box
        assert box is not None
        low, high = valid_range(policy, envs.info)
        scale = torch.from_numpy(box.span / 2)

        def act(playing: Sequence[Episode]) -> npt.NDArray[Any]:
            unit = policy.normalize(np.stack([one.obs for one in playing]))
            if attack is None or eps == 0:
                clean = policy.actions(unit).detach()
                return tally.add(unit, Moved(unit, clean, clean))
            return tally.add(unit, attack(policy, unit, eps, low, high, scale, generator))

        try:
            torch.set_num_threads(1)  # networks so small that more threads would slow them down
            played = play_episodes(envs, seeds, act, Episode, ended)
        finally:
            torch.set_num_threads(threads)
    returns = np.array([one.total for one in played])
    attacked = attack.name if attack is not None and eps > 0 else "none"
    return ContinuousResult(
        name,
        attacked,
        float(eps),
        seeds,
        returns,
        sum(one.steps for one in played),
        np.max(tally.most, axis=0),
        np.sum(tally.sums, axis=0) / tally.states,
        None if not tally.bounds else np.max(tally.bounds, axis=0),
        None if not tally.bounds else tally.beyond,
    )


class _Tally:
    """How far actions moved, and how far they may."""

    def __init__(self, policy: Agent, eps: float) -> None:
        self.policy, self.eps, self.states, self.beyond = policy, eps, 0, 0
        self.most: list[npt.NDArray[np.float64]] = []
        self.sums: list[npt.NDArray[np.float64]] = []
        self.bounds: list[npt.NDArray[np.float64]] = []

    def add(self, unit: torch.Tensor, moved: Moved) -> npt.NDArray[Any]:
        """Note a batch; returns the actions to play."""
        distance, played = moved.distance.numpy(), moved.action.numpy()
        self.states += len(distance)
        self.most.append(distance.max(0))
        self.sums.append(distance.sum(0))
        if isinstance(self.policy, ContinuousPolicy):
            found = self.policy.certify_unit(unit, self.eps)
            self.bounds.append(found.moves.max(0))
            self.beyond += int(((played < found.low) | (played > found.high)).any(1).sum())
        return played
