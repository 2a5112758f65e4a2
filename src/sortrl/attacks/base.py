"""Base class of all attacks: subclasses only search; the base class projects, checks the budget and judges success."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl.core.errors import SortRLError
from sortrl.core.records import AttackResult, Policy
from sortrl.ops import backend_for

Loss = Callable[[Tensor], Tensor]
"""Scores (batch, actions) -> one number per state (batch,), which an attack increases."""

WITHOUT_GRADIENT = ("noise", "gaussian", "dropout", "salt-and-pepper", "square")
"""Names of the attacks that need no gradient, for messages."""


@dataclass(frozen=True)
class Budget:
    """Where a perturbed input may lie: within ``eps`` of the clean one in l_inf, and within the valid range."""

    lo: Tensor
    hi: Tensor

    @classmethod
    def around(cls, unit: Tensor, eps_unit: float | Tensor, low: Tensor | None, high: Tensor | None) -> Budget:
        """``eps_unit``: one number, or one per state (batch,)."""
        eps = per_state(eps_unit, unit)
        # Corners are rounded towards the clean input, so that |x' - x| <= eps holds in exact arithmetic.
        exact_lo, exact_hi = unit.double() - eps, unit.double() + eps
        lo, hi = exact_lo.float(), exact_hi.float()
        lo = torch.where(lo.double() < exact_lo, torch.nextafter(lo, unit), lo)
        hi = torch.where(hi.double() > exact_hi, torch.nextafter(hi, unit), hi)
        # A state outside the declared bounds may keep its own value.
        lo = lo if low is None else torch.maximum(lo, torch.minimum(low, unit))
        hi = hi if high is None else torch.minimum(hi, torch.maximum(high, unit))
        return cls(lo, hi)

    def project(self, x: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(x, self.lo), self.hi)

    def subset(self, index: Tensor) -> Budget:
        return Budget(self.lo[index], self.hi[index])


@dataclass
class Tally:
    """The cost of an attack, in states."""

    queries: int = 0
    gradients: int = 0


class Counter:
    """Access to the policy that counts the cost of an attack: score and gradient evaluations, in states."""

    def __init__(self, policy: Any, tally: Tally | None = None) -> None:
        """``policy``: has ``scores``, whatever else; ``tally``: where to count, if somebody counts already."""
        self.policy = policy
        self.tally = Tally() if tally is None else tally

    def scores(self, x: Tensor) -> Tensor:
        self.tally.queries += len(x)
        with torch.no_grad():
            scores: Tensor = self.policy.scores(x)
        return scores

    def gradient(self, x: Tensor, loss: Loss, p: float | None = None) -> Tensor:
        """Gradient of ``loss(scores(x))`` with respect to x; see :meth:`gradient_and_scores`."""
        return self.gradient_and_scores(x, loss, p)[0]

    def gradient_and_scores(self, x: Tensor, loss: Loss, p: float | None = None) -> tuple[Tensor, Tensor]:
        """Gradient of ``loss(scores(x))`` with respect to x, and the scores it was taken at, which come for free.

        With ``p``, both are those of the policy's smooth finite-p surrogate; a policy that has none ignores ``p``.
        """
        self.tally.gradients += len(x)
        x = x.detach().requires_grad_(True)
        surrogate = None if p is None else getattr(self.policy, "surrogate_scores", None)
        with torch.enable_grad():
            try:
                scores = self.policy.scores(x) if surrogate is None else surrogate(x, p)
            except SortRLError as error:
                raise SortRLError(f"{error} Attacks without gradient: {', '.join(WITHOUT_GRADIENT)}.") from error
            if not scores.requires_grad:
                raise _no_gradient(self.policy)
            (gradient,) = torch.autograd.grad(loss(scores).sum(), x)
        return gradient, scores.detach()


@dataclass(frozen=True)
class Target:
    """Input of a search: the states, their clean actions, the allowed inputs, and access to the policy.

    ``eps`` (batch, 1, ...) broadcasts against ``unit``. ``rows`` are the indices of these states in the attacked
    batch of ``batch`` states: :meth:`rand` and :meth:`randn` draw for the whole batch, so that the draws of a state do not
    depend on which other states are still being searched.
    """

    counter: Counter
    unit: Tensor
    clean: Tensor
    budget: Budget
    eps: Tensor
    generator: torch.Generator | None
    rows: Tensor
    batch: int

    def __len__(self) -> int:
        return len(self.unit)

    def subset(self, index: Tensor) -> Target:
        """The same target for some of its states; ``index``: their indices, or a mask."""
        return replace(
            self,
            unit=self.unit[index],
            clean=self.clean[index],
            budget=self.budget.subset(index),
            eps=self.eps[index],
            rows=self.rows[index],
        )

    def near(self) -> Near | None:
        """The search among the numbers of an input that can matter within eps of it; None where that saves nothing.

        It covers what :meth:`uniform` and :meth:`project` give. Scores are the same to the bit, and gradients of the others are 0.
        """
        find = getattr(self.counter.policy, "near", None)
        if find is None or backend_for(self.unit)[0] != "cpu":
            return None
        lo, hi = (
            torch.minimum(self.budget.lo, self.unit - self.eps),
            torch.maximum(self.budget.hi, self.unit + self.eps),
        )
        found = find(lo, hi)
        if found is None:
            return None
        columns, network = found
        cut = replace(
            self,
            counter=Counter(network, self.counter.tally),
            unit=self.unit.flatten(1)[:, columns],
            budget=Budget(self.budget.lo.flatten(1)[:, columns], self.budget.hi.flatten(1)[:, columns]),
            eps=self.eps.reshape(-1, 1),
        )
        return Near(cut, columns)

    def project(self, x: Tensor) -> Tensor:
        """The nearest allowed inputs."""
        return self.budget.project(x)

    def changed(self, x: Tensor) -> Tensor:
        """Which of the inputs ``x`` (one per state) change the action; counts as queries."""
        return self.counter.scores(x).argmax(1) != self.clean

    def rand(self, *shape: int) -> Tensor:
        """Uniform draws from [0, 1) of shape (states, *shape)."""
        return torch.rand(self.batch, *shape, generator=self.generator)[self.rows]

    def randn(self, *shape: int) -> Tensor:
        """Normal draws of shape (states, *shape)."""
        return torch.randn(self.batch, *shape, generator=self.generator)[self.rows]

    def uniform(self) -> Tensor:
        """One point per state, uniform in its eps ball; not yet projected to the valid range."""
        return self.unit + self.eps * (2 * self.rand(*self.unit.shape[1:]) - 1)


@dataclass(frozen=True)
class Near:
    """A target that has only some numbers of its inputs, flattened: those in ``columns``."""

    target: Target
    columns: Tensor

    def subset(self, index: Tensor) -> Near:
        return replace(self, target=self.target.subset(index))

    def of(self, x: Tensor) -> Tensor:
        """These numbers of whole inputs."""
        return x.flatten(1)[:, self.columns]

    def into(self, whole: Tensor, part: Tensor) -> Tensor:
        """Whole inputs with these numbers replaced."""
        flat = whole.flatten(1).clone()
        flat[:, self.columns] = part
        return flat.reshape(whole.shape)


class Attack(ABC):
    """Searches, state by state, for an input within eps that changes the policy's action."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name in tables and messages; a class attribute, or a property made from the parameters."""

    @property
    def needs_gradient(self) -> bool:
        """Whether the policy must be differentiable; a class attribute in those that do not need it."""
        return True

    def __call__(
        self,
        policy: Policy | Any,
        unit: Tensor,
        eps_unit: float | Tensor,
        low: Tensor | None = None,
        high: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> AttackResult:
        """Attack a batch of unit-space inputs (float32), each within ``eps_unit``: one number, or one per state.

        ``low`` and ``high`` bound the valid observations (unit space). An attack without gradient also takes any
        object with ``predict(obs)``; its raw observations then are the unit space.
        """
        agent = self._agent(policy, unit)
        eps = self._checked_eps(unit, eps_unit, agent.obs_shape)
        counter = Counter(agent)
        clean = counter.scores(unit).argmax(1)
        found = unit
        if len(unit) > 0 and bool((eps > 0).any()):
            budget = Budget.around(unit, eps_unit, low, high)
            with torch.no_grad():
                rows = torch.arange(len(unit))
                target = Target(counter, unit, clean, budget, eps.float(), generator, rows, len(unit))
                found = budget.project(self.search(target).detach())
        excess = (found.double() - unit.double()).abs() - eps
        if not bool((excess <= 0).all()):  # NaN must not pass
            raise SortRLError(f"{self.name}: a perturbation exceeds its budget by {float(excess.max())}; it is broken.")
        action = counter.scores(found).argmax(1)
        return AttackResult(found, clean.numpy(), action.numpy(), counter.tally.queries, counter.tally.gradients)

    @abstractmethod
    def search(self, target: Target) -> Tensor:
        """Propose perturbed inputs, one per state; the caller projects and judges them."""

    def _agent(self, policy: Policy | Any, unit: Tensor) -> Policy:
        if isinstance(policy, Policy):
            return policy
        if not callable(getattr(policy, "predict", None)):
            raise SortRLError(
                f"{self.name}: cannot attack a {type(policy).__name__}; expected a SortPolicy, a Teacher or any object "
                "with predict(obs). Wrap an agent with sortrl.teachers.load_teacher."
            )
        if self.needs_gradient:
            raise _no_gradient(policy)
        return OnlyActions(policy, tuple(unit.shape[1:]))

    def _checked_eps(self, unit: Tensor, eps_unit: float | Tensor, obs_shape: tuple[int, ...]) -> Tensor:
        """The budgets as float64 that broadcasts against ``unit``; refuses wrong inputs."""
        if tuple(unit.shape[1:]) != tuple(obs_shape) or unit.ndim == 0 or unit.dtype != torch.float32:
            raise SortRLError(
                f"{self.name}: inputs are {unit.dtype} of shape {tuple(unit.shape)}, expected (batch, "
                f"{', '.join(map(str, obs_shape))}) in torch.float32; policy.normalize(obs) gives them."
            )
        if isinstance(eps_unit, Tensor) and eps_unit.ndim > 0 and eps_unit.shape != unit.shape[:1]:
            raise SortRLError(
                f"{self.name}: eps has shape {tuple(eps_unit.shape)}, expected one number or shape ({len(unit)},)."
            )
        eps = per_state(eps_unit, unit)
        wrong = ~((eps >= 0) & torch.isfinite(eps))
        if bool(wrong.any()):
            raise SortRLError(
                f"{self.name}: eps is {float(eps[wrong][0])}, expected a finite number >= 0 in the policy's input units."
            )
        return eps


class OnlyActions:
    """Adapter: an object that only has ``predict`` as a policy. Unit space is the raw observation, scores are one-hot."""

    def __init__(self, agent: Any, obs_shape: tuple[int, ...]) -> None:
        self.agent = agent
        self.obs_shape = obs_shape
        self.n_actions = 2  # raised when a larger action is seen

    def normalize(self, obs: npt.ArrayLike | Tensor) -> Tensor:
        return torch.as_tensor(np.asarray(obs), dtype=torch.float32)

    def scores(self, unit: Tensor) -> Tensor:
        answer = self.agent.predict(unit.numpy())
        actions = np.asarray(answer[0] if isinstance(answer, tuple) else answer)  # Stable-Baselines3: (actions, state)
        if actions.shape != (len(unit),) or not np.issubdtype(actions.dtype, np.integer) or (actions < 0).any():
            raise SortRLError(
                f"{type(self.agent).__name__}.predict returned {actions.dtype} of shape {actions.shape} for {len(unit)} "
                f"observations; expected one action (0, 1, ...) each, shape ({len(unit)},)."
            )
        self.n_actions = max(self.n_actions, int(actions.max(initial=0)) + 1)
        return torch.nn.functional.one_hot(torch.from_numpy(actions.astype(np.int64)), self.n_actions).float()


def per_state(eps_unit: float | Tensor, unit: Tensor) -> Tensor:
    """Budgets as float64 of shape (batch, 1, ...), which broadcasts against ``unit``."""
    eps = torch.as_tensor(eps_unit, dtype=torch.float64)
    return eps.expand(len(unit)).reshape(-1, *[1] * (unit.ndim - 1))


def like(mask: Tensor, x: Tensor) -> Tensor:
    """A mask over states, shaped to broadcast against their inputs."""
    return mask.reshape(-1, *[1] * (x.ndim - 1))


def _no_gradient(policy: Any) -> SortRLError:
    return SortRLError(
        f"{type(policy).__name__} has no gradient: its scores cannot be differentiated. Use an attack that needs none "
        f"({', '.join(WITHOUT_GRADIENT)}), or give the agent as a torch module or a Stable-Baselines3 zip."
    )
