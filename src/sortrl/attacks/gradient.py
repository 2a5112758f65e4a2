"""White-box attacks that step along the sign of a gradient: FGSM, PGD and its targeted form, RI-FGSM and its 1000 starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sortrl.attacks import losses
from sortrl.attacks.base import Attack, Loss, Near, Target, like
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
    random too. ``surrogate_p`` takes gradients from the policy's smooth finite-p surrogate: the exact gradient of a
    max-distance unit is nonzero in a single coordinate.

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
    # What has no gradient stays where it is. (That of a smooth surrogate has no zeros.)
    near = target.near() if surrogate_p is None and steps >= FEW_STEPS else None
    if near is None:
        return _climb(target, x, loss, steps, step_share, surrogate_p)
    found, broken = _climb(near.target, near.of(x), loss, steps, step_share, None)
    return near.into(x, found), broken


def _climb(
    target: Target, x: Tensor, loss: Loss, steps: int, step_share: float, surrogate_p: float | None
) -> tuple[Tensor, Tensor]:
    found, broken = x, torch.zeros(len(target), dtype=torch.bool)
    step = step_share * target.eps
    for _ in range(steps):
        gradient, scores = target.counter.gradient_and_scores(x, loss, surrogate_p)
        if surrogate_p is not None:
            scores = target.counter.scores(x)  # success is judged on the policy itself, not on the surrogate
        found, broken = _keep_latest(found, broken, x, scores.argmax(1) != target.clean)
        x = target.project(x + step * gradient.sign())
    changed = target.changed(x)
    found, broken = _keep_latest(found, broken, x, changed)
    return torch.where(like(broken, x), found, x), broken


@dataclass(frozen=True)
class Targeted(Attack):
    """PGD towards each other action in turn, the runner-up first, on the states that are not yet broken.

    It raises the score of one action over the clean one, where the gradient of an untargeted loss mixes several directions.
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
        near = target.near()
        while done < self.starts and len(left) > 0:
            part = target.subset(left)
            # Doubling: most states that can be broken are broken by one of the first few starts.
            starts = min(self.starts - done, max(FIRST_STARTS, done), _at_once(part))
            take, actions = _many_steps(part, None if near is None else near.subset(left), starts)
            changed = actions != part.clean[:, None]
            broken = changed.any(1).nonzero().flatten()
            found[left[broken]] = take(broken, changed[broken].int().argmax(1))  # argmax: the first of them
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
        everyone, size, near = torch.arange(len(target)), _at_once(target), target.near()
        for done in range(0, self.starts, size):
            take, actions = _many_steps(target, near, min(size, self.starts - done))
            # Starts that do not change the action are ranked last, whatever their value.
            worth = values.gather(1, actions).masked_fill(actions == target.clean[:, None], math.inf)
            least, place = worth.min(1)
            better = least < lowest
            found = torch.where(like(better, found), take(everyone, place), found)
            lowest = torch.minimum(least, lowest)
        return found


def _random_step(target: Target, start: Tensor) -> Tensor:
    gradient = target.counter.gradient(start, losses.cross_entropy(target.clean))
    return _stepped(target, start, gradient.sign())


def _stepped(target: Target, start: Tensor, sign: Tensor | float) -> Tensor:
    return target.unit + (start - target.unit + RI_STEP * sign).clamp(-target.eps, target.eps)


Take = Callable[[Tensor, Tensor], Tensor]


def _many_steps(target: Target, near: Near | None, starts: int) -> tuple[Take, Tensor]:
    """RI-FGSM from several starts per state: their actions (states, starts), and what gives the projected inputs of some of
    them, one for each of some states."""
    shape = target.unit.shape[1:]
    # One draw per start, so that results do not depend on the number of starts per batch.
    draws = [target.rand(*shape) for _ in range(starts)]
    some = torch.stack(draws if near is None else [near.of(draw) for draw in draws], dim=1).flatten(0, 1)
    part = target if near is None else near.target
    repeated = part.subset(torch.arange(len(target)).repeat_interleave(starts))
    x = repeated.project(_random_step(repeated, repeated.unit + repeated.eps * (2 * some - 1)))
    actions = repeated.counter.scores(x).argmax(1).reshape(len(target), starts)
    ends = x.reshape(len(target), starts, *x.shape[1:])

    def take(states: Tensor, places: Tensor) -> Tensor:
        end = ends[states, places]
        if near is None:
            return end
        chosen = target.subset(states)  # where there is no gradient, a step leads nowhere
        drawn = [draws[place][state] for state, place in zip(states.tolist(), places.tolist(), strict=True)]
        begin = chosen.unit + chosen.eps * (2 * torch.stack(drawn) - 1) if drawn else chosen.unit
        return near.into(chosen.project(_stepped(chosen, begin, 0.0)), end)

    return take, actions


FEW_STEPS = 5  # from so many on, finding out which numbers of an input can matter costs less than it saves
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
