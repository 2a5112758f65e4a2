"""The one verified boundary of every attack: subclasses only search; this class projects, checks and judges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sortrl.errors import SortRLError
from sortrl.records import AttackResult, Policy


@dataclass(frozen=True)
class Budget:
    """Where a perturbed input may lie: within ``eps`` of the clean one in l_inf, and within the valid range."""

    lo: Tensor
    hi: Tensor

    @classmethod
    def around(cls, unit: Tensor, eps_unit: float, low: Tensor | None, high: Tensor | None) -> Budget:
        # Corners are rounded towards the clean input, so that |x' - x| <= eps holds in exact arithmetic.
        exact_lo, exact_hi = unit.double() - eps_unit, unit.double() + eps_unit
        lo, hi = exact_lo.float(), exact_hi.float()
        lo = torch.where(lo.double() < exact_lo, torch.nextafter(lo, unit), lo)
        hi = torch.where(hi.double() > exact_hi, torch.nextafter(hi, unit), hi)
        # A state outside the valid range (it can happen with declared bounds) may at least stay where it is.
        lo = lo if low is None else torch.maximum(lo, torch.minimum(low, unit))
        hi = hi if high is None else torch.minimum(hi, torch.maximum(high, unit))
        return cls(lo, hi)

    def project(self, x: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(x, self.lo), self.hi)


class Counter:
    """Counts what an attack costs: scores and gradients asked for, in states."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.queries = 0
        self.gradients = 0

    def scores(self, x: Tensor) -> Tensor:
        self.queries += len(x)
        return self.policy.scores(x)

    def gradient(self, x: Tensor, labels: Tensor) -> Tensor:
        """Gradient of the cross-entropy of the policy's own clean action with respect to the input."""
        self.gradients += len(x)
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            loss = functional.cross_entropy(self.policy.scores(x), labels, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, x)
        return gradient


@dataclass(frozen=True)
class Target:
    """What a search is given: the states, the actions to change, the room to do it in, and access to the policy."""

    counter: Counter
    unit: Tensor
    clean: Tensor
    budget: Budget
    eps_unit: float
    generator: torch.Generator | None


class Attack(ABC):
    """Searches, state by state, for an input within eps that changes the policy's action."""

    name: str

    def __call__(
        self,
        policy: Policy,
        unit: Tensor,
        eps_unit: float,
        low: Tensor | None = None,
        high: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> AttackResult:
        """Attack a batch of unit-space inputs. ``low`` and ``high`` bound the valid observations (unit space)."""
        if not eps_unit >= 0:
            raise SortRLError(f"{self.name}: eps is {eps_unit}, expected a number >= 0 in the policy's input units.")
        if unit.shape[1:] != policy.obs_shape:
            raise SortRLError(
                f"{self.name}: inputs have shape {tuple(unit.shape)}, expected (batch, {', '.join(map(str, policy.obs_shape))})."
            )
        counter = Counter(policy)
        with torch.no_grad():
            clean = counter.scores(unit).argmax(1)
            budget = Budget.around(unit, eps_unit, low, high)
            found = unit
            if eps_unit > 0 and len(unit) > 0:
                found = budget.project(self.search(Target(counter, unit, clean, budget, eps_unit, generator)))
            action = counter.scores(found).argmax(1)
        distance = (found.double() - unit.double()).abs().amax() if len(unit) else torch.zeros(())
        if not float(distance) <= eps_unit:
            raise SortRLError(
                f"{self.name}: a perturbation of {float(distance)} exceeds the budget {eps_unit}; the attack is broken."
            )
        return AttackResult(found, clean.numpy(), action.numpy(), counter.queries, counter.gradients)

    @abstractmethod
    def search(self, target: Target) -> Tensor:
        """Propose perturbed inputs, one per state; the caller projects them."""
