"""How a student is trained: sizes, losses, and the schedule of the exponent p, the weight lambda and the step size."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sortrl.core.errors import SortRLError

# Exponents with short multiplication chains: the kernels need neither logarithm nor exponential for them.
EXPONENTS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True)
class DistillConfig:
    """How to train the student."""

    eps: float = 0.1
    """Perturbation to train for, in the policy's input units: margins up to 2 eps are widened."""
    steps: int = 1500
    """Optimiser steps."""
    batch: int = 512
    """States per step."""
    width: int = 640
    """Units per hidden layer."""
    depth: int = 5
    """Sort layers, the output layer among them."""
    rho: float = 0.3
    """Decay of the sorted mix."""
    scale: float | None = 1.0
    """Factor on the inputs (its Lipschitz constant is accounted for): above 1 helps where inputs vary little. None: one over their
    median spread in the data, because fresh weights are positions of spread 1."""
    learning_rate: float = 0.02
    """Of AdamW, decaying to 0 along a cosine."""
    lambda_end: float = 0.01
    """Weight of the cross-entropy at the end; it falls from 1, geometrically, with the rise of p."""
    warm_share: float = 0.1
    """Share of the steps at p = 8 before p rises."""
    final_share: float = 0.15
    """Share of the steps at p = infinity, at the end."""
    exact_share: float = 0.0
    """Share of the steps, the last of those at p = infinity, on the exact sort layers instead of sampled masks."""
    mu_start: float | None = None
    """First value of mu, which multiplies the scores in the cross-entropy. None: 0.5 / (eps * scale), so that margins of the size
    that is asked for matter from the first step on. (The paper starts at 1.)"""
    theta_factor: float = 2.0
    """The hinge ends at theta = theta_factor * eps * scale; with ramps, divided by their width."""
    eps_rise: float = 0.0
    """Share of the steps in which the margins that are asked for grow from 0 to those of eps, along a line: a curriculum as that of
    BCL. 0: they are those of eps from the first step on, as the paper has it."""
    soft_targets: float = 0.0
    """Share of the cross-entropy that is taken against the teacher's softmax instead of its action."""
    soft_temperature: float | None = 1.0
    """By which the teacher's scores are divided in that softmax. Action values (DQN, PQN) differ by little where it does not
    matter what is played; a temperature of the size of the differences that do matter tells the student so. None: a third of
    the median difference between the best and the second score in the data."""
    head: tuple[int, ...] | None = None
    """Linear layers after the sort layers, with these widths between them, bounded by intervals; None: sort layers alone."""
    head_learning_rate: float = 0.002
    """Of those linear layers."""
    conv: tuple[tuple[int, int, int], ...] = ()
    """Layers over the patches of images: (channels, kernel, stride) each."""
    crop: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Borders of images to leave out (top, bottom, left, right), before everything else."""
    pool: int = 1
    """Average pooling of images, after that."""
    bounded_conv: tuple[tuple[int, int, int], ...] = ()
    """Convolutions with bounded weights before the sort layers: (channels, kernel, stride) each."""
    ramps: bool = False
    """For images: see pixels, or the blocks that ``pool`` makes of them, through ramps (:mod:`sortrl.distill.ramps`), all constants of
    which are found in the data. eps stays in units of pixels; scale, conv, bounded_conv, crop and head then have no place."""
    p_end: float = 1024.0
    """The exponent that p rises to, before it is infinite."""
    scalar_learning_rate: float | None = None
    """Of mu and the output's bias; None: that of the sort layers."""
    worst_share: float = 0.0
    """With a head: share of the cross-entropy that is taken of the worst scores that intervals allow. If it is not 0, it takes
    the place of the hinge on the worst margin."""

    def __post_init__(self) -> None:
        positive = (
            "steps",
            "batch",
            "width",
            "depth",
            "scale",
            "learning_rate",
            "lambda_end",
            "theta_factor",
            "soft_temperature",
            "p_end",
            "scalar_learning_rate",
        )
        for name in positive:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise SortRLError(f"DistillConfig: {name} is {getattr(self, name)}, expected a positive number.")
        if not 0 <= self.eps < math.inf:
            raise SortRLError(f"DistillConfig: eps is {self.eps}, expected a number >= 0 in the policy's input units.")
        if not (self.warm_share >= 0 and self.final_share >= 0 and self.warm_share + self.final_share <= 1):
            raise SortRLError(
                f"DistillConfig: warm_share {self.warm_share} and final_share {self.final_share} must be shares that sum to at most 1."
            )
        if not 0 <= self.exact_share <= self.final_share:
            raise SortRLError(
                f"DistillConfig: exact_share is {self.exact_share}, expected at most final_share {self.final_share}."
            )
        for name in ("soft_targets", "worst_share", "eps_rise"):
            if not 0 <= getattr(self, name) <= 1:
                raise SortRLError(f"DistillConfig: {name} is {getattr(self, name)}, expected a share in [0, 1].")
        plain = self.scale == 1.0 and not any(self.crop)
        if self.ramps and not (plain and not self.conv and not self.bounded_conv and self.head is None):
            raise SortRLError(
                "DistillConfig: ramps are a front end of their own; leave scale, crop, conv, bounded_conv and head as they are."
            )
        if self.worst_share > 0 and self.head is None:
            raise SortRLError(
                "DistillConfig: worst_share needs a linear head; give head=() or widths of hidden layers."
            )

    @property
    def theta(self) -> float:
        """Margins beyond this are wide enough; scaled inputs need wider ones for the same radius."""
        return self.theta_factor * self.eps * (self.scale or 1.0)

    def rise(self, step: int) -> float:
        """How far p has risen at a step: 0 in the warm part, 1 at the end of the rise."""
        done = step / self.steps
        span = 1.0 - self.warm_share - self.final_share
        return min(1.0, max(0.0, (done - self.warm_share) / span)) if span > 0 else float(done >= self.warm_share)

    def asked(self, step: int) -> float:
        """The share of theta that margins are asked for at a step.

        >>> config = DistillConfig(steps=100, eps_rise=0.5)
        >>> [config.asked(step) for step in (0, 25, 50, 99)]
        [0.0, 0.5, 1.0, 1.0]
        """
        return min(1.0, step / (self.eps_rise * self.steps)) if self.eps_rise else 1.0

    def p_at(self, step: int) -> float:
        """The exponent at a step: 8, rising geometrically to ``p_end``, then infinity.

        >>> config = DistillConfig(steps=100)
        >>> [config.p_at(step) for step in (0, 40, 80, 90)]
        [8.0, 64.0, 768.0, inf]
        """
        if step >= self.steps * (1.0 - self.final_share):
            return math.inf
        wanted = 8.0 * (self.p_end / 8.0) ** self.rise(step)
        return float(min(EXPONENTS, key=lambda p: abs(math.log(p / wanted))))

    def lambda_at(self, step: int) -> float:
        """The weight of the cross-entropy at a step: from 1 to ``lambda_end``, geometrically, with the rise of p."""
        return float(self.lambda_end ** self.rise(step))

    def cosine(self, step: int) -> float:
        """What part of its learning rate a step has."""
        return 0.5 * (1.0 + math.cos(math.pi * step / self.steps))


PRESETS: dict[str, DistillConfig] = {
    "fast": DistillConfig(width=128, steps=1200, lambda_end=0.2, final_share=0.3, exact_share=0.2),
    # One student of the ladder: rho 0 spares the exact sort layers most of their time.
    "auto": DistillConfig(width=128, steps=1200, batch=256, rho=0.0, lambda_end=1.0, final_share=0.3, exact_share=0.2),
    "paper": DistillConfig(width=640, steps=2000, lambda_end=0.01, mu_start=1.0),  # as printed
}
