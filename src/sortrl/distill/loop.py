"""Distillation: teach a certified policy the teacher's actions while widening its margins (the paper's Eq. pi_loss)."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sortrl.core import parallel
from sortrl.core.checkpoint import Checkpoint
from sortrl.core.errors import SortRLError
from sortrl.core.limits import require
from sortrl.core.normalizer import Normalizer
from sortrl.core.progress import Progress
from sortrl.core.records import Demonstrations
from sortrl.distill.config import PRESETS, DistillConfig
from sortrl.distill.losses import imitation_loss, judged
from sortrl.distill.ramps import Ramps, found_ramps
from sortrl.nets import BoundedConv, CertifiedPolicy, HybridPolicy, Ramp, SortPolicy

CONV_LEARNING_RATE = 0.001  # of bounded convolutions
RADII = 1024  # held-out states whose radii are looked for where that takes long


@dataclass(frozen=True)
class Distilled:
    """A trained, calibrated student, its training curve, and how it does on held-out episodes (if given)."""

    policy: CertifiedPolicy
    history: list[dict[str, Any]]
    held_out: dict[str, float] | None


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
    if config.scale is None:
        config = replace(config, scale=_one_over_spread(normalizer(demonstrations.obs)))
    generator = torch.Generator().manual_seed(seed)
    whole, ramps, narrow = normalizer, None, None
    if config.ramps:
        ramps = found_ramps(demonstrations.obs, normalizer, config.pool)
        demonstrations, normalizer, narrow = ramps.seen(demonstrations, normalizer)
    policy = _initial_policy(demonstrations, normalizer, config, generator, narrow)
    labels = torch.from_numpy(demonstrations.actions.astype(np.int64))
    teacher_logits = torch.from_numpy(demonstrations.logits.astype(np.float32))
    teacher_logits /= config.soft_temperature or temperature(teacher_logits)
    history = fit(
        policy,
        torch.from_numpy(np.ascontiguousarray(demonstrations.obs)),
        labels,
        config,
        teacher_logits=teacher_logits,
        theta=config.theta / (1.0 if narrow is None else narrow.width),
        out_dir=out_dir,
        seed=seed,
        generator=generator,
        progress=progress,
    )
    if ramps is not None:
        assert isinstance(policy, SortPolicy)
        policy = ramps.widened(policy, whole)
    return Distilled(policy, history, None if held_out is None else held_out_metrics(policy, held_out, config.eps))


def fit(
    policy: SortPolicy | HybridPolicy,
    inputs: Tensor,
    labels: Tensor,
    config: DistillConfig | None = None,
    *,
    teacher_logits: Tensor | None = None,
    theta: float | None = None,
    out_dir: str | Path | None = None,
    seed: int = 0,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Train a SortNet of any size to give ``inputs`` (n, *obs_shape; raw) their ``labels`` (n,), with margins wide enough for
    ``config.eps``; returns the training curve. The loop of :func:`distill`, for classes of any kind.

    Of the configuration the training counts: eps, steps, batch, learning rates, shares and weights; sizes are the policy's own. In
    the first part p is 8, then it rises to ``p_end`` while random masks stand for the mix (:meth:`SortPolicy.training_scores`);
    then it is infinite, and the last steps are those of the exact network. In the end the running means are calibrated.

    >>> inputs = torch.rand(512, 2) * 2 - 1
    >>> policy = SortPolicy((2,), 2, width=32, depth=2, rho=0.0)
    >>> curve = fit(policy, inputs, (inputs[:, 0] > 0).long(), DistillConfig(eps=0.1, steps=150, batch=128, lambda_end=1.0))
    >>> bool((policy.predict(inputs)[0] == (inputs[:, 0] > 0).numpy()).mean() > 0.9), curve[-1]["step"]
    (True, 150)
    """
    config = config or PRESETS["fast"]
    if len(inputs) != len(labels) or not len(labels) or tuple(inputs.shape[1:]) != policy.obs_shape:
        raise SortRLError(
            f"fit: inputs have shape {tuple(inputs.shape)} and labels {tuple(labels.shape)}, expected (n, "
            f"{', '.join(map(str, policy.obs_shape))}) and (n,) with n > 0."
        )
    if labels.is_floating_point() or not 0 <= int(labels.min()) <= int(labels.max()) < policy.n_actions:
        raise SortRLError(
            f"fit: labels are {labels.dtype} in {labels.min()}..{labels.max()}, expected whole numbers in 0..{policy.n_actions - 1}."
        )
    if config.soft_targets > 0 and teacher_logits is None:
        raise SortRLError("fit: soft_targets need teacher_logits, the scores that the labels come from. Give them.")
    generator = generator or torch.Generator().manual_seed(seed)
    theta = config.theta if theta is None else theta
    trunk = policy.trunk
    # Weights, their gradients and two moments; activations and their gradients, of masks and sums too.
    units = sum(layer.out_size for layer in trunk.layers)
    units += sum(math.prod(part.out_shape) for part in trunk.front if isinstance(part, BoundedConv))
    needed = 4 * (4 * sum(parameter.numel() for parameter in policy.parameters()) + 8 * config.batch * units)
    require(f"Training with batches of {config.batch}", needed, "lower batch, width or depth")
    with torch.no_grad():
        trunk.mu.fill_(config.mu_start or 0.5 / (max(config.eps, 0.005) * (config.scale or 1.0)))
    optimizer = _optimizer(policy, config)
    checkpoint = Checkpoint(
        out_dir, {"config": asdict(config), "seed": seed, "states": len(inputs), "labels": int(labels.sum())}
    )
    first, history = checkpoint.restore(policy, optimizer, generator)
    job = _Training(
        policy, inputs, labels, teacher_logits, config, theta, optimizer, generator, checkpoint, first, history
    )
    parallel.together(_train, job, progress)
    # Finished: whoever differentiates it from here on (an attack) wants gradients of the inputs alone.
    policy.eval().requires_grad_(False)
    every = -(-len(inputs) // _calibration_states(inputs[0].numel()))
    policy.calibrate(policy.normalize(inputs[::every]))
    return history


@dataclass(frozen=True)
class _Training:
    """All that the steps depend on, for each process that takes them; ``history`` is added to."""

    policy: SortPolicy | HybridPolicy
    inputs: Tensor
    labels: Tensor
    teacher_logits: Tensor | None
    config: DistillConfig
    theta: float
    optimizer: torch.optim.AdamW
    generator: torch.Generator
    checkpoint: Checkpoint
    first: int
    history: list[dict[str, Any]]


def _train(job: _Training, progress: Progress | None) -> None:
    policy, config, optimizer, generator = job.policy, job.config, job.optimizer, job.generator
    trunk, home = policy.trunk, policy.trunk.bias.device
    device = parallel.device() or home
    if device != home:
        policy.to(device)
        optimizer.load_state_dict(optimizer.state_dict())  # which takes what it remembers to where the weights are
    started = time.monotonic()

    policy.train().requires_grad_(True)
    for step in range(job.first, config.steps):
        trunk.p.fill_(config.p_at(step))
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * config.cosine(step)
        index = torch.randint(len(job.inputs), (config.batch,), generator=generator)
        index = parallel.own(index, trunk.mask_chunks(config.batch))
        target = job.labels[index].to(device)
        soft = None if job.teacher_logits is None else job.teacher_logits[index].to(device)
        unit = policy.normalize(job.inputs[index])
        optimizer.zero_grad(set_to_none=True)  # before the forward pass, which can use their memory
        exact = step >= config.steps * (1.0 - config.exact_share)
        outputs = trunk.exact_training_scores(unit) if exact else trunk.training_scores(unit, generator)
        found = judged(policy, outputs, target, config, job.theta * config.asked(step), step)
        lam = config.lambda_at(step)
        imitation = imitation_loss(found.logits, target, soft, config.soft_targets)
        loss = lam * imitation + found.robust
        loss.backward()  # type: ignore[no-untyped-call]
        parallel.average_gradients(policy.parameters())
        optimizer.step()

        done = step + 1
        if done % max(1, config.steps // 200) == 0 or done == config.steps:
            agreeing, proven = (found.margin >= 0).float().mean(), found.proven.float().mean()
            means = parallel.averaged(torch.stack([loss.detach(), imitation.detach(), agreeing, proven])).tolist()
            row: dict[str, Any] = {"step": done}
            row |= zip(("loss", "cross_entropy", "agreement", "certified"), means, strict=True)
            row |= {"p": min(float(trunk.p), 1e9), "lambda": lam}  # JSON has no infinity
            job.history.append(row)
            if progress is not None:
                seconds = (time.monotonic() - started) / (done - job.first)
                progress({**row, "total": config.steps, "seconds_left": seconds * (config.steps - done)})
        if done % max(1, config.steps // 10) == 0 or done == config.steps:
            parallel.check_same(policy)
            job.checkpoint.save(policy, optimizer, generator, done, job.history)
    if device != home:
        policy.to(home)


def _one_over_spread(unit: Tensor) -> float:
    """Of the sensors that move, the median one's."""
    spread = unit.flatten(1).std(0)
    moving = spread[spread > 0]
    return 1.0 / float(moving.median()) if len(moving) else 1.0


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
    names = ("width", "depth", "rho", "scale", "conv", "crop", "pool", "bounded_conv")
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
        groups += [{"params": convolutions, "weight_decay": 0.0, "peak": CONV_LEARNING_RATE}]
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
