"""Attacks on policies with continuous actions: move the action as far as eps allows.

None of them knows values or a teacher: what is measured is how far an action can be moved, which is what is certified. How much return
that costs is seen by playing on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sortrl.attacks.base import Budget, per_state
from sortrl.core.errors import SortRLError


class Numbers(Protocol):
    """What these attacks need of an agent."""

    def actions(self, unit: Tensor) -> Tensor:
        """What is played (batch, numbers), float32."""
        ...

    def unclipped(self, unit: Tensor) -> Tensor:
        """The same before it is clipped, differentiable: at the ends of its range an action has no gradient."""
        ...


@dataclass(frozen=True)
class Target:
    """What is attacked: a policy at unit-space inputs (batch, sensors)."""

    policy: Numbers
    unit: Tensor
    eps: Tensor
    """(batch, 1), float32."""
    budget: Budget
    weight: Tensor
    """(numbers,): one over what each number of the action is measured in."""
    generator: torch.Generator | None

    def gradient(self, x: Tensor, goal: Callable[[Tensor], Tensor]) -> Tensor:
        """Of a goal that depends on the actions at ``x`` before they are clipped."""
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(goal(self.policy.unclipped(x)), x)
        return slope

    def step(self, x: Tensor, share: float, goal: Callable[[Tensor], Tensor]) -> Tensor:
        """A signed gradient step of ``share`` times eps, within the budget."""
        return self.budget.project(x + share * self.eps * self.gradient(x, goal).sign())

    def noise(self) -> Tensor:
        """Uniform within eps of the inputs, not yet within their valid range."""
        return self.unit + self.eps * (2 * torch.rand(self.unit.shape, generator=self.generator) - 1)


@dataclass(frozen=True)
class Moved:
    """Perturbed unit-space inputs, and the actions before and after (batch, numbers)."""

    perturbed: Tensor
    clean: Tensor
    action: Tensor

    @property
    def distance(self) -> Tensor:
        """How far each number moved, float64."""
        return (self.action.double() - self.clean.double()).abs()


class ActionAttack(ABC):
    """Searches, state by state, for an input within eps that moves the action far. Subclasses propose; this class projects, judges on
    the actions as they are played, and keeps the best proposal."""

    name: str

    @torch.no_grad()
    def __call__(
        self,
        policy: Numbers,
        unit: Tensor,
        eps_unit: float | Tensor,
        low: Tensor | None = None,
        high: Tensor | None = None,
        scale: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Moved:
        """Attack a batch of unit-space inputs (float32), each within ``eps_unit``: one number, or one per state.

        ``low`` and ``high`` bound the valid observations (unit space); ``scale`` (numbers,) is what each number of the action is
        measured in (default: its own units).
        """
        eps = per_state(eps_unit, unit)
        if unit.dtype != torch.float32 or unit.ndim != 2 or not bool(((eps >= 0) & torch.isfinite(eps)).all()):
            raise SortRLError(
                f"{self.name}: inputs are {unit.dtype} of shape {tuple(unit.shape)} and eps {eps_unit}; expected torch.float32 "
                "(batch, sensors), as policy.normalize gives them, and finite numbers >= 0."
            )
        clean = policy.actions(unit)
        weight = torch.ones(clean.shape[1]) if scale is None else 1.0 / scale
        budget = Budget.around(unit, eps_unit, low, high)
        best, best_action, most = unit, clean, torch.zeros(len(unit), dtype=torch.float64)
        for proposal in self.search(Target(policy, unit, eps.float(), budget, weight, generator)):
            found = budget.project(proposal.detach())
            action = policy.actions(found)
            moved = ((action.double() - clean.double()).abs() * weight).amax(1)
            better = moved > most
            best = torch.where(better[:, None], found, best)
            best_action = torch.where(better[:, None], action, best_action)
            most = torch.maximum(most, moved)
        if not bool(((best.double() - unit.double()).abs() <= eps).all()):  # NaN must not pass
            raise SortRLError(f"{self.name}: a perturbation exceeds its budget; it is broken.")
        return Moved(best, clean, best_action)

    @abstractmethod
    def search(self, target: Target) -> list[Tensor]:
        """Proposals: each a perturbed input per state."""


@dataclass(frozen=True)
class Farthest(ActionAttack):
    """Projected gradient ascent on the squared distance to the clean action, from random starts: at the state itself that has no
    gradient."""

    steps: int = 10
    step_share: float = 0.25
    restarts: int = 2

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"farthest-{self.steps}"

    def search(self, target: Target) -> list[Tensor]:
        clean, found = target.policy.unclipped(target.unit), []
        for _ in range(self.restarts):
            x = target.budget.project(target.noise())
            for _ in range(self.steps):
                x = target.step(x, self.step_share, lambda action: (((action - clean) * target.weight) ** 2).sum())
            found.append(x)
        return found


@dataclass(frozen=True)
class WorstDirection(ActionAttack):
    """Pushes each number of the action up, and down, by signed gradient steps from the state; the direction that leads farthest
    counts."""

    steps: int = 10
    step_share: float = 0.25

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"worst-direction-{self.steps}"

    def search(self, target: Target) -> list[Tensor]:
        found = []
        for number in range(len(target.weight)):
            for sign in (1.0, -1.0):
                x = target.unit
                for _ in range(self.steps):
                    x = target.step(x, self.step_share, lambda action, n=number, s=sign: s * action[:, n].sum())  # type: ignore[misc]
                found.append(x)
        return found


@dataclass(frozen=True)
class Push(ActionAttack):
    """Pushes all numbers of the action one way, always the same: errors of one sign add up over an episode."""

    sign: float = 1.0
    steps: int = 10
    step_share: float = 0.25

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"push-{'up' if self.sign > 0 else 'down'}-{self.steps}"

    def search(self, target: Target) -> list[Tensor]:
        x = target.unit
        for _ in range(self.steps):
            x = target.step(x, self.step_share, lambda action: self.sign * (action * target.weight).sum())
        return [x]


@dataclass(frozen=True)
class ActionNoise(ActionAttack):
    """Uniform noise: what no adversary chose. It needs no gradient."""

    name = "noise"

    def search(self, target: Target) -> list[Tensor]:
        return [target.noise()]


ACTION_ATTACKS: dict[str, ActionAttack] = {
    attack.name: attack for attack in (Farthest(), WorstDirection(), Push(1.0), Push(-1.0), ActionNoise())
}


def action_attack(name: str) -> ActionAttack:
    """The attack of that name."""
    if name not in ACTION_ATTACKS:
        raise SortRLError(f"No attack {name!r} on continuous actions; expected one of {', '.join(ACTION_ATTACKS)}.")
    return ACTION_ATTACKS[name]
