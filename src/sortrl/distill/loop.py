"""Distillation: teach a certified policy the teacher's actions while widening its margins (the paper's Eq. pi_loss)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sortrl.core.checkpoint import Checkpoint
from sortrl.core.errors import SortRLError
from sortrl.core.limits import require
from sortrl.core.normalizer import Normalizer
from sortrl.core.records import Demonstrations
from sortrl.distill.ramps import Ramps, found_ramps
from sortrl.nets import BoundedConv, CertifiedPolicy, HybridPolicy, Ramp, SortPolicy

Progress = Callable[[dict[str, Any]], None]

# Exponents with short multiplication chains: the kernels need neither logarithm nor exponential for them.
EXPONENTS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)

RADII = 1024  # held-out states whose radii are looked for where that takes long


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
    scale: float = 1.0
    """Factor on the inputs (its Lipschitz constant is accounted for): above 1 helps where inputs vary little."""
    learning_rate: float = 0.02
    """Of AdamW, decaying to 0 along a cosine."""
    lambda_start: float = 1.0
    """Weight of the cross-entropy at first."""
    lambda_end: float = 0.01
    """Weight of the cross-entropy at last; it falls geometrically with the rise of p."""
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
    soft_targets: float = 0.0
    """Share of the cross-entropy that is taken against the teacher's softmax instead of its action."""
    soft_temperature: float | None = 1.0
    """By which the teacher's scores are divided in that softmax. Action values (DQN, PQN) differ by little where it does not
    matter what is played; a temperature of the size of the differences that do matter tells the student so. None: a third of
    the median difference between the best and the second score in the data."""
    mask_chunk: int = 128
    """Samples that share one random mask."""
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
    conv_learning_rate: float = 0.001
    """Of those convolutions."""
    ramps: bool = False
    """For images: see pixels through ramps (:mod:`sortrl.distill.ramps`), all constants of which are found in the data. eps stays
    in units of pixels; scale, conv, bounded_conv, crop, pool and head then have no place."""
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
            "lambda_start",
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
        for name in ("soft_targets", "worst_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise SortRLError(f"DistillConfig: {name} is {getattr(self, name)}, expected a share in [0, 1].")
        plain = self.scale == 1.0 and not any(self.crop) and self.pool == 1
        if self.ramps and not (plain and not self.conv and not self.bounded_conv and self.head is None):
            raise SortRLError(
                "DistillConfig: ramps are a front end of their own; leave scale, crop, pool, conv, bounded_conv and head as they are."
            )
        if self.worst_share > 0 and self.head is None:
            raise SortRLError(
                "DistillConfig: worst_share needs a linear head; give head=() or widths of hidden layers."
            )

    @property
    def theta(self) -> float:
        """Margins beyond this are wide enough; scaled inputs need wider ones for the same radius."""
        return self.theta_factor * self.eps * self.scale

    def rise(self, step: int) -> float:
        """How far p has risen at a step: 0 in the warm part, 1 at the end of the rise."""
        done = step / self.steps
        span = 1.0 - self.warm_share - self.final_share
        return min(1.0, max(0.0, (done - self.warm_share) / span)) if span > 0 else float(done >= self.warm_share)

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
        return float(self.lambda_start * (self.lambda_end / self.lambda_start) ** self.rise(step))

    def cosine(self, step: int) -> float:
        """What part of its learning rate a step has."""
        return 0.5 * (1.0 + math.cos(math.pi * step / self.steps))


@dataclass(frozen=True)
class Distilled:
    """A trained, calibrated student, its training curve, and how it does on held-out episodes (if given)."""

    policy: CertifiedPolicy
    history: list[dict[str, Any]]
    held_out: dict[str, float] | None


PRESETS: dict[str, DistillConfig] = {
    "fast": DistillConfig(width=128, steps=1200, lambda_end=0.2, final_share=0.3, exact_share=0.2),
    "paper": DistillConfig(width=640, steps=2000, lambda_end=0.01, mu_start=1.0),  # as printed
}


def margins(scores: Tensor, labels: Tensor) -> Tensor:
    """Score of the label minus the best other score: positive where the arg-max agrees with the label."""
    own = scores.gather(1, labels[:, None]).squeeze(1)
    others = scores.scatter(1, labels[:, None], -math.inf).amax(1)
    return own - others


def robust_loss(margin: Tensor, theta: float) -> Tensor:
    """The paper's Eq. rob_loss: minus the margin where the student agrees and the margin is at most theta, else 0."""
    active = (margin >= 0) & (margin <= theta)
    return torch.where(active, -margin, torch.zeros_like(margin)).mean()


def imitation_loss(logits: Tensor, labels: Tensor, teacher_logits: Tensor, soft: float) -> Tensor:
    """Cross-entropy against the teacher's action, or partly against its softmax."""
    hard = functional.cross_entropy(logits, labels)
    if soft == 0.0:
        return hard
    return (1 - soft) * hard + soft * functional.cross_entropy(logits, teacher_logits.softmax(1))


def distill(
    demonstrations: Demonstrations,
    normalizer: Normalizer,
    config: DistillConfig | None = None,
    *,
    held_out: Demonstrations | None = None,
    out_dir: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Distilled:
    """Train a student on demonstrations. With ``out_dir`` it checkpoints there and resumes from what it finds.

    Every random number comes from one seeded generator, so a run is reproducible on one machine and thread count, and a
    resumed run equals an undisturbed one bit for bit.
    """
    config = config or PRESETS["fast"]
    if normalizer.obs_shape != demonstrations.obs.shape[1:]:
        raise SortRLError(
            f"distill: states have shape {demonstrations.obs.shape[1:]}, but the normalizer {normalizer.obs_shape}."
        )
    generator = torch.Generator().manual_seed(seed)
    whole, ramps, narrow = normalizer, None, None
    if config.ramps:
        ramps = found_ramps(demonstrations.obs, normalizer)
        demonstrations, normalizer, narrow = ramps.seen(demonstrations, normalizer)
    policy = _initial_policy(demonstrations, normalizer, config, generator, narrow)
    theta = config.theta / (1.0 if narrow is None else narrow.width)
    trunk = policy.trunk
    # Weights, their gradients and two moments; activations and their gradients, of masks and sums too.
    units = sum(layer.out_size for layer in trunk.layers)
    units += sum(math.prod(part.out_shape) for part in trunk.front if isinstance(part, BoundedConv))
    needed = 4 * (4 * sum(parameter.numel() for parameter in policy.parameters()) + 8 * config.batch * units)
    require(f"Training with batches of {config.batch}", needed, "lower batch, width or depth")
    optimizer = _optimizer(policy, config)
    states = torch.from_numpy(np.ascontiguousarray(demonstrations.obs))
    labels = torch.from_numpy(demonstrations.actions.astype(np.int64))
    teacher_logits = torch.from_numpy(demonstrations.logits.astype(np.float32))
    teacher_logits /= config.soft_temperature or temperature(teacher_logits)
    checkpoint = Checkpoint(
        out_dir, {"config": asdict(config), "seed": seed, "states": len(states), "labels": int(labels.sum())}
    )
    first, history = checkpoint.restore(policy, optimizer, generator)
    started, began_at = time.monotonic(), first

    policy.train()
    for step in range(first, config.steps):
        trunk.p.fill_(config.p_at(step))
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * config.cosine(step)
        index = torch.randint(len(states), (config.batch,), generator=generator)
        target = labels[index]
        unit = normalizer(states[index])
        optimizer.zero_grad(set_to_none=True)  # before the forward pass, which can use their memory
        exact = step >= config.steps * (1.0 - config.exact_share)
        outputs = trunk.exact_training_scores(unit) if exact else trunk.training_scores(unit, generator)
        judged = _judged(policy, outputs, target, config, theta, step)
        lam = config.lambda_at(step)
        imitation = imitation_loss(judged.logits, target, teacher_logits[index], config.soft_targets)
        loss = lam * imitation + judged.robust
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

        done = step + 1
        if done % max(1, config.steps // 200) == 0 or done == config.steps:
            row = {
                "step": done,
                "loss": float(loss.detach()),
                "cross_entropy": float(imitation.detach()),
                "agreement": float((judged.margin >= 0).float().mean()),
                "certified": float(judged.proven.float().mean()),
                "p": min(float(trunk.p), 1e9),  # JSON has no infinity
                "lambda": lam,
            }
            history.append(row)
            if progress is not None:
                seconds = (time.monotonic() - started) / (done - began_at)
                progress({**row, "total": config.steps, "seconds_left": seconds * (config.steps - done)})
        if done % max(1, config.steps // 10) == 0 or done == config.steps:
            checkpoint.save(policy, optimizer, generator, done, history)

    # Finished: whoever differentiates it from here on (an attack) wants gradients of the inputs alone.
    policy.eval().requires_grad_(False)
    every = -(-len(states) // _calibration_states(states[0].numel()))
    policy.calibrate(normalizer(states[::every]))
    if ramps is not None:
        assert isinstance(policy, SortPolicy)
        policy = ramps.widened(policy, whole)
    return Distilled(policy, history, None if held_out is None else held_out_metrics(policy, held_out, config.eps))


class _Judged(NamedTuple):
    """A batch as the losses see it."""

    logits: Tensor
    """For the cross-entropy."""
    margin: Tensor
    proven: Tensor
    """Whether the margin is wide enough for eps."""
    robust: Tensor
    """The rest of the loss."""


def _judged(
    policy: SortPolicy | HybridPolicy, outputs: Tensor, target: Tensor, config: DistillConfig, theta: float, step: int
) -> _Judged:
    if isinstance(policy, SortPolicy):
        margin = margins(outputs, target)
        wide = margin > 2 * config.eps * policy.lipschitz
        return _Judged(policy.mu * outputs, margin, wide, robust_loss(margin, theta))
    scores = policy.head(outputs)
    # The box grows with p, so that the head first learns what to separate, then how far.
    reach = 0.5 * theta * config.rise(step)
    leads = policy.head.leads_within(outputs, outputs.new_tensor(reach), target)
    worst, margin = leads.amin(1), margins(scores, target)
    if config.worst_share > 0:
        # lambda weighs the two parts of the cross-entropy together: what the worst scores have too much is taken back.
        own = functional.one_hot(target, scores.shape[1]).bool()
        behind = torch.where(own, torch.zeros_like(leads), -leads)
        hard, lam = functional.cross_entropy(behind, target), config.lambda_at(step)
        extra = config.worst_share * (hard - functional.cross_entropy(scores, target))
        return _Judged(scores, margin, worst > 0, lam * extra)
    hinge = torch.where(margin >= 0, functional.relu(1.0 - worst), torch.zeros_like(worst)).mean()
    return _Judged(scores, margin, worst > 0, hinge)


def temperature(scores: Tensor) -> float:
    """A third of the median difference between the best and the second score; 1 where most are equal."""
    best = scores.topk(2, dim=1).values
    third = float((best[:, 0] - best[:, 1]).median()) / 3
    return third if third > 0 else 1.0


def _calibration_states(obs_size: int) -> int:
    """How many states to take means over: as many as do some good, within some hundred megabytes of images."""
    return max(1024, min(16384, (1 << 25) // obs_size))


def _initial_policy(
    demonstrations: Demonstrations,
    normalizer: Normalizer,
    config: DistillConfig,
    generator: torch.Generator,
    ramps: Ramps | None = None,
) -> SortPolicy | HybridPolicy:
    kind: Any = SortPolicy
    names = ("width", "depth", "rho", "scale", "mask_chunk", "conv", "crop", "pool", "bounded_conv")
    shape = {name: getattr(config, name) for name in names}
    if config.head is not None:
        kind, shape = HybridPolicy, {**shape, "hidden": config.head}
    if ramps is not None:
        shape |= ramps.shape()
    policy: SortPolicy | HybridPolicy = kind(
        demonstrations.obs.shape[1:], demonstrations.n_actions, normalizer=normalizer, **shape
    )
    trunk = policy.trunk
    with torch.no_grad():
        for layer in trunk.layers:
            layer.weight.normal_(generator=generator)
        for part in trunk.front:
            if isinstance(part, BoundedConv):
                part.weight.normal_(generator=generator).pow_(3)
        if ramps is not None:
            ramps.put_into(trunk)
        trunk.mu.fill_(config.mu_start or 0.5 / (max(config.eps, 0.005) * config.scale))
        if isinstance(policy, HybridPolicy):
            _prepare_head(policy, normalizer(torch.from_numpy(demonstrations.obs[: config.batch])), generator)
    return policy


def _prepare_head(policy: HybridPolicy, unit: Tensor, generator: torch.Generator) -> None:
    """Linear layers learn from centred features; a fresh network's are all far below zero."""
    policy.trunk.calibrate(unit)
    policy.trunk.bias.add_(policy.trunk.scores(unit).mean(0))
    for layer in policy.head.layers:
        assert isinstance(layer, torch.nn.Linear)
        layer.weight.normal_(0.0, layer.weight.shape[1] ** -0.5, generator=generator)
        layer.bias.zero_()


def _optimizer(policy: SortPolicy | HybridPolicy, config: DistillConfig) -> torch.optim.AdamW:
    """AdamW; only mu and linear weights decay, because a sort layer's weights are positions and have no natural zero."""
    trunk = policy.trunk
    convolutions = [parameter for part in trunk.front for parameter in part.parameters()]
    scalars = [trunk.mu] if config.scalar_learning_rate is None else [trunk.mu, trunk.bias]
    known = {*map(id, scalars), *map(id, convolutions)}
    positions = [parameter for parameter in trunk.parameters() if id(parameter) not in known]
    others = [(list(policy.head.parameters()), config.head_learning_rate)] if isinstance(policy, HybridPolicy) else []
    others += [(scalars, config.scalar_learning_rate or config.learning_rate)]
    groups = [{"params": positions, "weight_decay": 0.0, "peak": config.learning_rate}]
    if convolutions:  # their sums are divided away: decay would do nothing
        groups += [{"params": convolutions, "weight_decay": 0.0, "peak": config.conv_learning_rate}]
    groups += [{"params": parameters, "weight_decay": 0.02, "peak": peak} for parameters, peak in others]
    # Fused: one pass over the weights and no temporary copies of them.
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.99), eps=1e-10, fused=True)


@torch.no_grad()
def held_out_metrics(policy: CertifiedPolicy, held_out: Demonstrations, eps: float) -> dict[str, float]:
    """Agreement with the teacher and certified share of the evaluation network on episodes it was not trained on."""
    actions = [policy.predict(held_out.obs[start : start + 4096])[0] for start in range(0, len(held_out), 4096)]
    action = np.concatenate(actions)
    # What boxes prove behind ramps takes as long as a hundred answers, so some of the states have to do.
    ramps = isinstance(policy, SortPolicy) and any(isinstance(part, Ramp) for part in policy.front)
    seen = held_out.obs[:: -(-len(held_out) // RADII)] if ramps else held_out.obs
    radius = np.concatenate([policy.certify(seen[start : start + 4096]).radius for start in range(0, len(seen), 4096)])
    return {
        "states": len(held_out),
        "agreement": float((action == held_out.actions).mean()),
        "certified": float((radius > eps).mean()),
    }
