"""White-box attacks that step along the sign of a gradient: FGSM, PGD and its targeted form, RI-FGSM and its 1000 starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sortrl.attacks import losses
from sortrl.attacks.base import Attack, Loss, Target, like
from sortrl.core.errors import SortRLError
from sortrl.core.records import Policy


@dataclass(frozen=True)
class FGSM(Attack):
    """One step of size eps along the sign of the gradient of the cross-entropy."""

    name = "FGSM"

    def search(self, target: Target) -> Tensor:
        gradient = target.counter.gradient(target.unit, losses.cross_entropy(target.clean))
        return target.unit + target.eps * gradient.sign()


@dataclass(frozen=True)
class PGD(Attack):
    """Projected gradient descent: ``steps`` steps of ``step_share * eps``, from the clean state (the paper's adversary).

    The latest iterate that changes the action is returned, so more steps never break fewer states. With ``restarts``,
    states that are not yet broken are tried again from that many random starts; ``random_start`` makes the first start
    random too. ``surrogate_p`` takes gradients from the policy's smooth finite-p relative: those of sort layers follow
    one coordinate per unit.

    >>> PGD(30).name, PGD(10, loss="margin", surrogate_p=32, restarts=4).name
    ('PGD-30', 'PGD-10-margin-p32-r4')
    """

    steps: int = 10
    step_share: float = 0.1
    restarts: int = 0
    random_start: bool = False
    loss: str = "ce"
    surrogate_p: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.step_share > 0 or self.restarts < 0:
            raise SortRLError(
                f"PGD: steps={self.steps}, step_share={self.step_share}, restarts={self.restarts}; "
                "expected at least 1, more than 0 and at least 0."
            )
        losses.check_name("PGD", self.loss)

    @property
    def name(self) -> str:
        parts = [
            f"PGD-{self.steps}",
            "" if self.loss == "ce" else self.loss,
            "" if self.surrogate_p is None else f"p{self.surrogate_p:g}",
            "" if self.step_share == 0.1 else f"s{self.step_share:g}",
            "random" if self.random_start else "",
            f"r{self.restarts}" if self.restarts else "",
        ]
        return "-".join(filter(None, parts))

    def search(self, target: Target) -> Tensor:
        found, left = target.unit.clone(), torch.arange(len(target))
        for attempt in range(1 + self.restarts):
            part = target.subset(left)
            start = part.unit if attempt == 0 and not self.random_start else part.project(part.uniform())
            loss = losses.BY_NAME[self.loss](part.clean)
            found[left], broken = climb(part, start, loss, self.steps, self.step_share, self.surrogate_p)
            left = left[~broken]
            if len(left) == 0:
                break
        return found


def climb(
    target: Target, x: Tensor, loss: Loss, steps: int, step_share: float, surrogate_p: float | None = None
) -> tuple[Tensor, Tensor]:
    """``steps`` signed steps up a loss: the latest iterate that changes the action (else the last), and which do."""
    found, broken = x, torch.zeros(len(target), dtype=torch.bool)
    step = step_share * target.eps
    for _ in range(steps):
        gradient, scores = target.counter.gradient_and_scores(x, loss, surrogate_p)
        if surrogate_p is not None:
            scores = target.counter.scores(x)  # the surrogate is not what acts
        found, broken = _keep_latest(found, broken, x, scores.argmax(1) != target.clean)
        x = target.project(x + step * gradient.sign())
    changed = target.changed(x)
    found, broken = _keep_latest(found, broken, x, changed)
    return torch.where(like(broken, x), found, x), broken


@dataclass(frozen=True)
class Targeted(Attack):
    """PGD towards each other action in turn, the runner-up first, on the states that are not yet broken.

    It raises the score of one action over the clean one, where an untargeted loss may be torn between several.
    """

    steps: int = 10
    step_share: float = 0.1

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.step_share > 0:
            raise SortRLError(
                f"Targeted: steps={self.steps}, step_share={self.step_share}; expected at least 1 and more than 0."
            )

    @property
    def name(self) -> str:
        return f"Targeted-{self.steps}" + ("" if self.step_share == 0.1 else f"-s{self.step_share:g}")

    def search(self, target: Target) -> Tensor:
        ranking = target.counter.scores(target.unit).argsort(1, descending=True)
        found, left = target.unit.clone(), torch.arange(len(target))
        for rank in range(1, ranking.shape[1]):
            part = target.subset(left)
            loss = losses.towards(part.clean, ranking[left, rank])
            found[left], broken = climb(part, part.unit, loss, self.steps, self.step_share)
            left = left[~broken]
            if len(left) == 0:
                break
        return found


RI_STEP = 0.375  # absolute, in unit space: for images it exceeds every usual eps, so that the step ends in a corner


@dataclass(frozen=True)
class RIFGSM(Attack):
    """FGSM whose gradient is taken at a random start: d0 ~ U(-eps, eps), then clamp(d0 + 0.375 sign(gradient), -eps, eps)."""

    name = "RI-FGSM"

    def search(self, target: Target) -> Tensor:
        return _random_step(target, target.uniform())


@dataclass(frozen=True)
class RIFGSMMulti(Attack):
    """RI-FGSM from ``starts`` random starts: the first that changes the action, judged after projection."""

    starts: int = 1000

    def __post_init__(self) -> None:
        _check_starts("RIFGSMMulti", self.starts)

    @property
    def name(self) -> str:
        return "RI-FGSM-Multi" + ("" if self.starts == 1000 else f"-{self.starts}")

    def search(self, target: Target) -> Tensor:
        found, left, done = target.unit.clone(), torch.arange(len(target)), 0
        while done < self.starts and len(left) > 0:
            part = target.subset(left)
            # Doubling: most states that can be broken are broken by one of the first few starts.
            starts = min(self.starts - done, max(FIRST_STARTS, done), _at_once(part))
            x, actions = _many_steps(part, starts)
            changed = actions != part.clean[:, None]
            broken = changed.any(1).nonzero().flatten()
            found[left[broken]] = x[broken, changed[broken].int().argmax(1)]  # argmax: the first of them
            left, done = left[~changed.any(1)], done + starts
        return found


@dataclass(frozen=True)
class RIFGSMMultiT(Attack):
    """RI-FGSM from ``starts`` random starts: the one whose action is worth least at the clean state.

    ``values`` ranks the actions by its scores there (a Q-learning teacher's are action values). It is asked in the unit
    space of the policy under attack, which a student shares with its teacher.
    """

    values: Policy
    starts: int = 1000

    def __post_init__(self) -> None:
        _check_starts("RIFGSMMultiT", self.starts)

    @property
    def name(self) -> str:
        return "RI-FGSM-Multi-T" + ("" if self.starts == 1000 else f"-{self.starts}")

    def search(self, target: Target) -> Tensor:
        values = self.values.scores(target.unit)
        n_actions = target.counter.policy.n_actions
        if values.shape != (len(target), n_actions):
            raise SortRLError(
                f"{self.name}: values have shape {tuple(values.shape)}, expected ({len(target)}, {n_actions})."
            )
        found, lowest = target.unit.clone(), torch.full((len(target),), math.inf)
        everyone, size = torch.arange(len(target)), _at_once(target)
        for done in range(0, self.starts, size):
            x, actions = _many_steps(target, min(size, self.starts - done))
            # A start that changes nothing is worse than any that does, whatever the values say.
            worth = values.gather(1, actions).masked_fill(actions == target.clean[:, None], math.inf)
            least, place = worth.min(1)
            better = least < lowest
            found = torch.where(like(better, found), x[everyone, place], found)
            lowest = torch.minimum(least, lowest)
        return found


def _random_step(target: Target, start: Tensor) -> Tensor:
    gradient = target.counter.gradient(start, losses.cross_entropy(target.clean))
    return target.unit + (start - target.unit + RI_STEP * gradient.sign()).clamp(-target.eps, target.eps)


def _many_steps(target: Target, starts: int) -> tuple[Tensor, Tensor]:
    """RI-FGSM from several starts per state: projected inputs (states, starts, ...) and their actions (states, starts)."""
    shape = target.unit.shape[1:]
    repeated = target.subset(torch.arange(len(target)).repeat_interleave(starts))
    # One draw per start: a start is then the same however many are taken at once.
    draws = torch.stack([target.rand(*shape) for _ in range(starts)], dim=1).flatten(0, 1)
    begin = repeated.unit + repeated.eps * (2 * draws - 1)
    x = repeated.project(_random_step(repeated, begin))
    actions = target.counter.scores(x).argmax(1)
    return x.reshape(len(target), starts, *shape), actions.reshape(len(target), starts)


FIRST_STARTS = 8
CHUNK_STATES = 4096  # inputs that go through the policy at once ...
CHUNK_VALUES = 1 << 22  # ... and the numbers they may hold: some ten tensors of this size exist at a time


def _at_once(target: Target) -> int:
    """How many starts to take at a time, so that memory stays bounded."""
    states = min(CHUNK_STATES, CHUNK_VALUES // target.unit[0].numel())
    return max(1, states // len(target))


def _keep_latest(found: Tensor, broken: Tensor, x: Tensor, changed: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(like(changed, x), x, found), broken | changed


def _check_starts(owner: str, starts: int) -> None:
    if starts < 1:
        raise SortRLError(f"{owner}: starts={starts}, expected at least 1.")
