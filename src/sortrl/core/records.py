"""What the stages hand to each other: small, frozen, validated on construction."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypedDict, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sortrl.core.errors import SortRLError
from sortrl.core.stats import iqm, iqm_interval

FloatArray = npt.NDArray[np.floating]
IntArray = npt.NDArray[np.integer]


@runtime_checkable
class Policy(Protocol):
    """What attacks and evaluation need of an agent; teachers and :class:`sortrl.SortPolicy` both have it.

    ``normalize`` maps raw observations to *unit space*: the agent's own input units, in which eps is stated.
    """

    @property
    def n_actions(self) -> int: ...

    @property
    def obs_shape(self) -> tuple[int, ...]: ...

    def normalize(self, obs: npt.ArrayLike | Tensor) -> Tensor:
        """Raw observations (batch, *obs_shape) -> unit space, float32."""
        ...

    def scores(self, unit: Tensor) -> Tensor:
        """Differentiable action scores (batch, n_actions); the policy plays their arg-max."""
        ...


@dataclass(frozen=True)
class Transitions:
    """What happened after each state of :class:`Demonstrations`, so that the episodes can be replayed or exported.

    ``played`` (n,) are the actions that were really played, which differ from the teacher's answer while exploring;
    ``rewards``, ``terminated`` and ``truncated`` (n,) what the environment returned; ``final_obs``
    (episodes, *obs_shape) the observation after the last state of each episode, in the order of the episode numbers;
    ``starts`` (episodes,) which of the task's starts each episode has, where the environment tells (``info["start"]``), else -1.
    Two starts may show the same picture at first.
    """

    played: IntArray
    rewards: FloatArray
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    final_obs: npt.NDArray[np.generic]
    starts: IntArray | None = None

    def __post_init__(self) -> None:
        if self.starts is not None and self.starts.shape != self.final_obs.shape[:1]:
            raise SortRLError(
                f"Transitions: starts has shape {self.starts.shape}, expected one for each of {len(self.final_obs)} final_obs."
            )
        shapes = {name: getattr(self, name).shape for name in ("played", "rewards", "terminated", "truncated")}
        if len(set(shapes.values())) != 1 or self.played.ndim != 1:
            raise SortRLError(f"Transitions: expected equal 1-d shapes, got {shapes}.")


@dataclass(frozen=True)
class Demonstrations:
    """States seen while acting, with the teacher's answer to each.

    ``obs`` are raw observations (n, *obs_shape); ``actions`` (n,) the teacher's greedy actions; ``logits``
    (n, n_actions) its scores; ``episodes`` (n,) the number of the episode each state comes from, so that
    validation can hold out whole episodes. The states of one episode are consecutive and in order of time.
    """

    env_id: str
    obs: npt.NDArray[np.generic]
    actions: IntArray
    logits: FloatArray
    episodes: IntArray
    transitions: Transitions | None = None

    def __post_init__(self) -> None:
        n = len(self.obs) if self.obs.ndim else 0
        if n == 0:
            raise SortRLError("Demonstrations: no states. Collect at least one.")
        for name, ndim in (("actions", 1), ("logits", 2), ("episodes", 1)):
            shape = getattr(self, name).shape
            if len(shape) != ndim or shape[0] != n:
                raise SortRLError(
                    f"Demonstrations: {name} has shape {shape}, expected {ndim} dimensions of length {n} "
                    f"like obs {self.obs.shape}."
                )
        if self.obs.ndim < 2 or not np.isfinite(self.logits).all():
            raise SortRLError(
                f"Demonstrations: obs has shape {self.obs.shape}, expected (n, *obs_shape), and logits must not be NaN or infinite."
            )
        if self.actions.min() < 0 or self.actions.max() >= self.logits.shape[1]:
            raise SortRLError(
                f"Demonstrations: actions range over {self.actions.min()}..{self.actions.max()}, "
                f"but logits have {self.logits.shape[1]} columns."
            )
        if np.issubdtype(self.obs.dtype, np.floating) and not np.isfinite(self.obs).all():
            raise SortRLError("Demonstrations: observations contain NaN or infinity. Drop those states.")
        if self.transitions is not None:
            after, final = self.transitions, (len(np.unique(self.episodes)), *self.obs.shape[1:])
            if len(after.played) != n or after.final_obs.shape != final:
                raise SortRLError(
                    f"Demonstrations: transitions have {len(after.played)} steps and final_obs "
                    f"{after.final_obs.shape}, expected {n} steps and final_obs {final}."
                )

    def __len__(self) -> int:
        return len(self.obs)

    @property
    def n_actions(self) -> int:
        return int(self.logits.shape[1])

    @property
    def n_distinct(self) -> int:
        """How many different observations there are: a greedy agent can sit in one state for hundreds of steps."""
        # Digests, because to sort images is to copy them.
        return len({hashlib.blake2b(np.ascontiguousarray(row).data, digest_size=16).digest() for row in self.obs})


@dataclass(frozen=True)
class Certificate:
    """Per observation: the action, the unit-space l_inf radius within which it cannot change, and the runner-up."""

    action: IntArray
    radius: FloatArray
    runner_up: IntArray

    def __post_init__(self) -> None:
        if not (self.action.shape == self.radius.shape == self.runner_up.shape) or self.action.ndim != 1:
            raise SortRLError(
                f"Certificate: action {self.action.shape}, radius {self.radius.shape} and runner_up "
                f"{self.runner_up.shape} must be equal 1-d shapes."
            )
        if not (self.radius >= 0).all():
            raise SortRLError("Certificate: a radius is negative or NaN.")

    def __len__(self) -> int:
        return len(self.action)

    def certified_at(self, eps_unit: float) -> npt.NDArray[np.bool_]:
        """Which actions provably survive every perturbation of l_inf size ``eps_unit`` (a tie is not certified)."""
        result: npt.NDArray[np.bool_] = self.radius > eps_unit
        return result


@dataclass(frozen=True)
class AttackResult:
    """Perturbed unit-space inputs, the actions before and after, and what the search cost (in states)."""

    perturbed: Tensor
    clean_action: IntArray
    action: IntArray
    queries: int
    gradients: int

    @property
    def changed(self) -> npt.NDArray[np.bool_]:
        """Where the action changed, judged after projection."""
        result: npt.NDArray[np.bool_] = self.clean_action != self.action
        return result


PROTOCOL = (
    "greedy; a fixed list of seeded episodes, each played to its end; all policies and attacks play the same seeds "
    "(first_seed and those that follow it); eps in the policy's input units"
)
SPREAD = {
    "sem": "standard error of the mean over episodes",
    "std": "sample standard deviation over episodes",
    "iqm_interval": "95 % bootstrap interval of the interquartile mean over episodes, 2000 resamples",
}


class EvalRow(TypedDict):
    """One evaluation as files have it: what :meth:`EvalResult.to_json` returns."""

    env_id: str
    policy: str
    attack: str
    eps: float
    mean: float
    sem: float
    std: float
    iqm: float
    iqm_interval: list[float]
    spread: dict[str, str]
    protocol: str
    timing: str
    attack_parameters: dict[str, object]
    episodes: int
    first_seed: int
    returns: list[float]
    steps: int
    changed_share: float
    attacked_share: float
    certified_share: float | None
    queries: int
    gradients: int
    seconds: float


@dataclass(frozen=True)
class EvalResult:
    """Returns of a fixed list of episodes, every one played to its end, and what happened on the way.

    ``changed_share`` and ``attacked_share`` are shares of the steps: where the action was changed, and where a search was
    made for a change (not on certified states, nor where ``timing`` held back). ``radii`` (steps of all episodes, in
    order) are None for a policy without certificates.
    """

    env_id: str
    policy: str
    attack: str
    eps_unit: float
    seeds: tuple[int, ...]
    returns: FloatArray
    lengths: IntArray
    changed_share: float
    radii: FloatArray | None
    queries: int
    gradients: int
    seconds: float
    attacked_share: float = 0.0
    timing: str = "every step"
    attack_parameters: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.seeds) == len(self.returns) == len(self.lengths) > 0:
            raise SortRLError(
                f"EvalResult: {len(self.seeds)} seeds, {len(self.returns)} returns and {len(self.lengths)} lengths; expected equal, at least 1."
            )
        if self.radii is not None and len(self.radii) != int(self.lengths.sum()):
            raise SortRLError(f"EvalResult: {len(self.radii)} radii for {int(self.lengths.sum())} steps.")

    @property
    def mean(self) -> float:
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        """Sample standard deviation over episodes."""
        return float(self.returns.std(ddof=1)) if len(self.returns) > 1 else 0.0

    @property
    def sem(self) -> float:
        """Standard error of the mean."""
        return self.std / float(np.sqrt(len(self.returns)))

    @property
    def iqm(self) -> float:
        """Interquartile mean: see :func:`sortrl.core.stats.iqm`."""
        return iqm(self.returns)

    @property
    def iqm_interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of the IQM over these episodes."""
        return iqm_interval([self.returns])

    @property
    def certified_share(self) -> float | None:
        """Share of the visited states whose action is certified at ``eps_unit``."""
        return None if self.radii is None else float((self.radii > self.eps_unit).mean())

    def to_json(self) -> EvalRow:
        """Everything but the radii, as plain JSON values. Versions belong to the document that a row is written into."""
        return {
            "env_id": self.env_id,
            "policy": self.policy,
            "attack": self.attack,
            "eps": self.eps_unit,
            "mean": self.mean,
            "sem": self.sem,
            "std": self.std,
            "iqm": self.iqm,
            "iqm_interval": list(self.iqm_interval),
            "spread": dict(SPREAD),
            "protocol": PROTOCOL,
            "timing": self.timing,
            "attack_parameters": dict(self.attack_parameters),
            "episodes": len(self.seeds),
            "first_seed": self.seeds[0],
            "returns": [round(float(value), 4) for value in self.returns],
            "steps": int(self.lengths.sum()),
            "changed_share": self.changed_share,
            "attacked_share": self.attacked_share,
            "certified_share": self.certified_share,
            "queries": self.queries,
            "gradients": self.gradients,
            "seconds": round(self.seconds, 3),
        }


# What is computed with when rows are read back, and the least that each can be.
_ROW_NUMBERS = {
    "eps": 0.0,
    "mean": -1e15,
    "sem": 0.0,
    "iqm": -1e15,
    "changed_share": 0.0,
    "queries": 0.0,
    "gradients": 0.0,
    "seconds": 0.0,
    "steps": 1.0,
}


def stored_rows(rows: Any, where: str | Path) -> list[EvalRow]:
    """Rows of :meth:`EvalResult.to_json`, read back from a file that may be damaged."""
    if not isinstance(rows, list):
        raise SortRLError(f"{where}: its rows are {type(rows).__name__}, expected a list. Delete it to measure again.")
    for index, row in enumerate(rows):
        known = row if isinstance(row, dict) else {}
        bad = [name for name in ("policy", "attack") if not isinstance(known.get(name), str)]
        for name, least in _ROW_NUMBERS.items():
            value = known.get(name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= 1e15:
                bad.append(name)
        if bad:
            raise SortRLError(f"{where}: row {index} lacks or garbles {', '.join(bad)}. Delete it to measure again.")
    return rows


@dataclass(frozen=True)
class Decision:
    """What a policy does, and how far that can be trusted: numpy scalars for one observation, arrays for a batch.

    ``radius`` is the unit-space l_inf distance within which no change of the observation changes ``action``;
    ``runner_up`` is the action it would change to first, as far as the scores tell.

    >>> Decision(np.int64(1), np.float64(0.2), np.int64(0)).certified_at(0.1)
    np.True_
    """

    action: IntArray | np.int64
    radius: FloatArray | np.float64
    runner_up: IntArray | np.int64

    def __post_init__(self) -> None:
        if not self.action.shape == self.radius.shape == self.runner_up.shape:
            raise SortRLError(
                f"Decision: action {self.action.shape}, radius {self.radius.shape} and runner_up "
                f"{self.runner_up.shape} must be equal shapes."
            )

    def certified_at(self, eps_unit: float) -> npt.NDArray[np.bool_] | np.bool_:
        """Whether no perturbation of l_inf size ``eps_unit`` can change the action (a tie is not certified)."""
        return self.radius > eps_unit


@dataclass(frozen=True)
class ActionBounds:
    """What a policy with continuous actions does, and between what bounds it stays: each (batch, numbers), or (numbers,) for one
    observation. ``low`` and ``high`` hold for every observation within the eps that was asked about, ``action`` for the one seen."""

    action: FloatArray
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        if not self.action.shape == self.low.shape == self.high.shape:
            raise SortRLError(
                f"ActionBounds: action {self.action.shape}, low {self.low.shape} and high {self.high.shape} must be equal shapes."
            )
        if not ((self.low <= self.action) & (self.action <= self.high)).all():
            raise SortRLError("ActionBounds: an action lies outside of its own bounds, or is NaN.")

    @property
    def moves(self) -> npt.NDArray[np.float64]:
        """By how much each number may move at most, in either direction."""
        moves: npt.NDArray[np.float64] = np.maximum(self.high - self.action, self.action - self.low)
        return moves
