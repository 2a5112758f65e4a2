"""Attacks specific to RL: transfer from the teacher, on the best action's score, on action values, towards a chosen action."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl.attacks import losses
from sortrl.attacks.base import Attack, Counter, Loss, Target, like
from sortrl.attacks.gradient import climb
from sortrl.core.errors import SortRLError
from sortrl.core.records import Policy


@dataclass(frozen=True)
class Transfer(Attack):
    """Transfer attack (Papernot et al., 2016): ``inner`` searches on ``source``, and what it finds is shown to the policy.

    The search drives ``source`` (as a rule the teacher a student was distilled from) away from the action of the policy
    under attack. The policy itself gives no gradient, so it may be a black box. Its cost is counted on the source.
    """

    source: Policy
    inner: Attack
    needs_gradient = False

    @property
    def name(self) -> str:
        return f"transfer-{self.inner.name}"

    def search(self, target: Target) -> Tensor:
        _check_same_units(self.name, self.source, target.counter.policy)
        return self.inner.search(replace(target, counter=Counter(self.source, target.counter.tally)))


@dataclass(frozen=True)
class MinBest(Attack):
    """MinBest (Huang et al., 2017): PGD that lowers the score of the policy's own best action, whatever the others do.

    Lowering the *probability* of that action is PGD on the cross-entropy, since p and log p have gradients of equal signs;
    lowering its score alone is another direction, for Q-values the published one.
    """

    steps: int = 10
    step_share: float = 0.1
    surrogate_p: float | None = None

    def __post_init__(self) -> None:
        _check_steps("MinBest", self.steps, self.step_share)

    @property
    def name(self) -> str:
        return f"MinBest-{self.steps}" + ("" if self.surrogate_p is None else f"-p{self.surrogate_p:g}")

    def search(self, target: Target) -> Tensor:
        def loss(scores: Tensor) -> Tensor:
            return -scores.gather(1, target.clean[:, None])[:, 0]

        return climb(target, target.unit, loss, self.steps, self.step_share, self.surrogate_p)[0]


@dataclass(frozen=True)
class MinQ(Attack):
    """The critic attack of Pattanaik et al. (2018) for discrete actions, called MinQ by Sun et al. (2022).

    PGD that lowers ``sum_a softmax(scores(x'))_a values_a(x)``: the value, at the true state x, of what the policy does when
    shown x'. ``values`` gives its action values if it estimates them (a Q-learner) and else its log-probabilities, by
    which an actor-critic ranks actions too. The iterate whose action is worth least is kept, and the clean state where
    no iterate makes the policy do worse.
    """

    values: Policy
    steps: int = 10
    step_share: float = 0.1
    surrogate_p: float | None = None

    def __post_init__(self) -> None:
        _check_steps("MinQ", self.steps, self.step_share)

    @property
    def name(self) -> str:
        return f"MinQ-{self.steps}" + ("" if self.surrogate_p is None else f"-p{self.surrogate_p:g}")

    def search(self, target: Target) -> Tensor:
        _check_same_units(self.name, self.values, target.counter.policy)
        values = action_values(self.values, target.unit)
        if values.shape[1] != target.counter.policy.n_actions:
            raise SortRLError(
                f"{self.name}: values of {values.shape[1]} actions for a policy with {target.counter.policy.n_actions}."
            )
        found, lowest = target.unit, values.gather(1, target.clean[:, None])[:, 0]
        x = target.unit
        for _ in range(self.steps):
            gradient = target.counter.gradient(x, lambda scores: -(scores.softmax(1) * values).sum(1), self.surrogate_p)
            x = target.project(x + self.step_share * target.eps * gradient.sign())
            worth = values.gather(1, target.counter.scores(x).argmax(1, keepdim=True))[:, 0]
            found = torch.where(like(worth < lowest, x), x, found)
            lowest = torch.minimum(worth, lowest)
        return found


@dataclass(frozen=True)
class Aimed(Attack):
    """PGD towards one named action per state: the targeted step of strategically timed and critical-point attacks.

    ``at(actions)`` names them; without, each state's worst-scored action is the aim, as in Lin et al. (2017). A state that
    cannot be brought to its action is left as it is.
    """

    steps: int = 10
    step_share: float = 0.2
    surrogate_p: float | None = None
    aims: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_steps("Aimed", self.steps, self.step_share)

    @property
    def name(self) -> str:
        return f"aimed-{self.steps}" + ("" if self.surrogate_p is None else f"-p{self.surrogate_p:g}")

    def at(self, actions: npt.NDArray[np.integer] | Tensor) -> Aimed:
        """The same attack, aimed: one action per state of the batch it will be called with."""
        return replace(self, aims=tuple(int(action) for action in actions))

    def search(self, target: Target) -> Tensor:
        wanted = self._aims(target)
        found, left = target.unit.clone(), (wanted != target.clean).nonzero().flatten()
        x = found[left]
        for _ in range(self.steps):
            if len(left) == 0:
                break
            part = target.subset(left)
            gradient = part.counter.gradient(x, _lead(wanted[left]), self.surrogate_p)
            x = part.project(x + self.step_share * part.eps * gradient.sign())
            reached = part.counter.scores(x).argmax(1) == wanted[left]
            found[left[reached]] = x[reached]
            left, x = left[~reached], x[~reached]
        return found

    def _aims(self, target: Target) -> Tensor:
        if self.aims is None:
            return target.counter.scores(target.unit).argmin(1)
        if len(self.aims) != target.batch:
            raise SortRLError(f"{self.name}: {len(self.aims)} aims for {target.batch} states; name one per state.")
        return torch.tensor(self.aims)[target.rows]


def _lead(wanted: Tensor) -> Loss:
    """Score of a wanted action minus the best other: positive exactly where it is played."""
    behind = losses.margin(wanted)
    return lambda scores: -behind(scores)


def action_values(policy: Policy, unit: Tensor) -> Tensor:
    """What each action is worth: estimated values (batch, n_actions) where there are any, else log-probabilities."""
    estimate = getattr(policy, "values", None)
    with torch.no_grad():
        values: Tensor | None = None if estimate is None else estimate(unit)
        return policy.scores(unit).log_softmax(1) if values is None else values


def _check_steps(owner: str, steps: int, step_share: float) -> None:
    if steps < 1 or not step_share > 0:
        raise SortRLError(f"{owner}: steps={steps}, step_share={step_share}; expected at least 1 and more than 0.")


def _check_same_units(owner: str, source: Policy, policy: Policy) -> None:
    """A perturbation found in one unit space means nothing in another."""
    ours: Any = getattr(source, "normalizer", None)
    theirs: Any = getattr(policy, "normalizer", None)
    differ = ours is not None and theirs is not None and not _equal_normalizers(ours, theirs)
    if differ or source.obs_shape != policy.obs_shape:
        raise SortRLError(
            f"{owner}: the two policies see observations in different units or shapes, so eps has two meanings. "
            "Use the teacher that this policy was distilled from."
        )


def _equal_normalizers(one: Any, other: Any) -> bool:
    same = torch.equal(one.mean, other.mean) and torch.equal(one.scale, other.scale) and one.clip == other.clip
    return bool(same)
