"""Auto-PGD (Croce & Hein, 2020): momentum, and a step that is halved wherever it has stopped helping."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sortrl.attacks import losses
from sortrl.attacks.base import Attack, Loss, Target, like
from sortrl.core.errors import SortRLError

PULL = 0.75  # weight of the new step against the one before
ENOUGH_PROGRESS = 0.75  # share of the steps since the last checkpoint that must have increased the loss


@dataclass(frozen=True)
class APGD(Attack):
    """Auto-PGD on ``loss`` (``ce``, ``margin`` or ``dlr``) from a random start; ``restarts`` more for unbroken states.

    Steps start at 2 eps. At checkpoints, each state whose loss rose in too few steps, or whose best loss has stood still
    since the last one, halves its step and goes back to its best point.

    >>> APGD("dlr").name, APGD(steps=30, surrogate_p=32).name
    ('APGD-DLR', 'APGD-CE-30-p32')
    """

    loss: str = "ce"
    steps: int = 100
    restarts: int = 0
    surrogate_p: float | None = None

    def __post_init__(self) -> None:
        losses.check_name("APGD", self.loss)
        if self.steps < 1 or self.restarts < 0:
            raise SortRLError(
                f"APGD: steps={self.steps}, restarts={self.restarts}; expected at least 1 and at least 0."
            )

    @property
    def name(self) -> str:
        parts = [
            f"APGD-{self.loss.upper()}",
            "" if self.steps == 100 else f"{self.steps}",
            "" if self.surrogate_p is None else f"p{self.surrogate_p:g}",
            f"r{self.restarts}" if self.restarts else "",
        ]
        return "-".join(filter(None, parts))

    def search(self, target: Target) -> Tensor:
        found, left = target.unit.clone(), torch.arange(len(target))
        for _ in range(1 + self.restarts):
            part = target.subset(left)
            found[left], broken = self._run(part, losses.BY_NAME[self.loss](part.clean))
            left = left[~broken]
            if len(left) == 0:
                break
        return found

    def _run(self, target: Target, loss: Loss) -> tuple[Tensor, Tensor]:
        """One start: an input that changes the action where one was met (else the best met), and where that was."""
        ascent = _Ascent(target, loss, self.surrogate_p)
        checks = checkpoints(self.steps)
        for step in range(1, self.steps + 1):
            ascent.step()
            if step in checks:
                ascent.check()
        return torch.where(like(ascent.broken, ascent.best), ascent.found, ascent.best), ascent.broken


def checkpoints(steps: int) -> set[int]:
    """After which steps the progress is judged: first after 22 %, then ever sooner, at least 6 % apart.

    >>> sorted(checkpoints(100))
    [22, 41, 57, 70, 80, 87, 93, 99]
    """
    shares = [0.0, 0.22]
    while shares[-1] < 1:
        shares.append(shares[-1] + max(shares[-1] - shares[-2] - 0.03, 0.06))
    # Sums of decimals exceed the number they mean; a ceiling would take that for a whole step.
    return {math.ceil(round(share * steps, 9)) for share in shares[1:] if share <= 1}


class _Ascent:
    """The state of a run: where each state is and was, its best point, its step, and its progress since a checkpoint."""

    def __init__(self, target: Target, loss: Loss, surrogate_p: float | None) -> None:
        self.target, self.loss, self.surrogate_p = target, loss, surrogate_p
        self.size = 2 * target.eps
        self.x = self.found = target.project(target.uniform())
        self.before, self.pull = self.x, 1.0
        self.broken = torch.zeros(len(target), dtype=torch.bool)
        self.gradient, self.value = self._look()
        self.best, self.best_value, self.best_gradient = self.x, self.value, self.gradient
        self.value_at_check, self.halved = self.value, torch.zeros_like(self.broken)
        self.rises, self.taken = torch.zeros(len(target)), 0

    def step(self) -> None:
        """Three quarters of the way to where a plain signed step leads, and a quarter of the step before, if there was one."""
        z = self.target.project(self.x + self.size * self.gradient.sign())
        ahead = self.x + self.pull * (z - self.x) + (1 - self.pull) * (self.x - self.before)
        self.before, self.x, self.pull = self.x, self.target.project(ahead), PULL
        earlier = self.value
        self.gradient, self.value = self._look()
        self.rises, self.taken = self.rises + (self.value > earlier), self.taken + 1
        better = self.value > self.best_value
        self.best = torch.where(like(better, self.x), self.x, self.best)
        self.best_gradient = torch.where(like(better, self.x), self.gradient, self.best_gradient)
        self.best_value = torch.maximum(self.value, self.best_value)

    def check(self) -> None:
        """Halve the steps that do not help and go on from the best point."""
        too_few = self.rises < ENOUGH_PROGRESS * self.taken
        stands = ~self.halved & (self.best_value <= self.value_at_check)
        self.halved = too_few | stands
        back = like(self.halved, self.x)
        self.size = torch.where(back, self.size / 2, self.size)
        self.x = torch.where(back, self.best, self.x)
        self.gradient = torch.where(back, self.best_gradient, self.gradient)
        self.value = torch.where(self.halved, self.best_value, self.value)
        self.value_at_check = self.best_value
        self.rises, self.taken = torch.zeros_like(self.rises), 0

    def _look(self) -> tuple[Tensor, Tensor]:
        """Gradient and value of the loss here; notes the states that are broken here."""
        counter = self.target.counter
        gradient, scores = counter.gradient_and_scores(self.x, self.loss, self.surrogate_p)
        value = self.loss(scores)
        if self.surrogate_p is not None:
            scores = counter.scores(self.x)  # the surrogate is not what acts
        changed = scores.argmax(1) != self.target.clean
        self.found = torch.where(like(changed, self.x), self.x, self.found)
        self.broken = self.broken | changed
        return gradient, value
