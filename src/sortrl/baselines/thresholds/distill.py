"""Distillation into a student that sees rounded pixels (:mod:`sortrl.nets.thresholds`): where to round, and the training.

Thresholds are put where the data leave room: of every pixel, between neighbours that are far apart among the values it takes. The
network behind them is an ordinary one and is trained in the ordinary way: where no answer changes, there is nothing to bound.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from sortrl.core.checkpoint import Checkpoint
from sortrl.core.errors import SortRLError
from sortrl.core.limits import require
from sortrl.core.normalizer import Normalizer
from sortrl.core.progress import Progress
from sortrl.core.records import Demonstrations
from sortrl.distill.loop import Distilled, held_out_metrics
from sortrl.distill.ramps import BYTES, gap_centres
from sortrl.nets.thresholds import UNUSED, ThresholdPolicy, ThresholdPolicyConfig
from sortrl.teachers.train_pqn import value_loss


@dataclass(frozen=True)
class ThresholdConfig:
    """How to train a student that sees rounded pixels."""

    gap: float = 10.5 / 255
    """Thresholds keep at least this distance from every value that their pixel takes: what is certified where nothing new is
    seen. Wider gaps are fewer, so a larger one leaves less to see."""
    levels: int = 2
    """Thresholds per pixel, at most: those that split its values most evenly."""
    rare: float = 2e-5
    """Values that a pixel takes in a smaller share of the states do not count."""
    conv: tuple[tuple[int, int, int], ...] = ThresholdPolicyConfig.conv
    """Channels, kernel and stride of the convolutions."""
    hidden: tuple[int, ...] = ThresholdPolicyConfig.hidden
    """Widths between the linear layers behind them."""
    norm: bool = False
    """Layer norm behind every layer, and learn the teacher's action values beside its choices: what a student needs that goes on by
    Q-learning (:mod:`sortrl.baselines.thresholds.polish`)."""
    steps: int = 10_000
    """Optimiser steps."""
    batch: int = 128
    """States per step."""
    learning_rate: float = 1e-3
    """Of Adam, rising over the first steps and falling to 0 along a cosine."""

    def __post_init__(self) -> None:
        for name in ("gap", "levels", "steps", "batch", "learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise SortRLError(f"ThresholdConfig: {name} is {getattr(self, name)}, expected a positive number.")
        if not 0 <= self.rare < 1:
            raise SortRLError(f"ThresholdConfig: rare is {self.rare}, expected a share below 1.")

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return self.learning_rate * min(1.0, (step + 1) / 100) * 0.5 * (1.0 + math.cos(math.pi * step / self.steps))


def gap_thresholds(obs: npt.NDArray[Any], gap: float, levels: int, rare: float = 0.0) -> npt.NDArray[np.float64]:
    """Thresholds (levels, *obs_shape) for images of bytes, in bytes.

    A threshold lies in the middle between two neighbouring values of its pixel that are at least ``2 * gap`` apart. Of those
    that a pixel offers, the ones that split its values most evenly are taken; where it offers fewer, the rest are infinite.

    >>> values = np.array([0, 0, 0, 100, 100, 110, 250], np.uint8).reshape(-1, 1, 1, 1)
    >>> gap_thresholds(values, gap=10, levels=3).ravel().tolist()
    [50.0, 180.0, inf]
    """
    if obs.dtype != np.uint8:
        raise SortRLError(f"gap_thresholds: observations are {obs.dtype}, expected images of bytes (uint8).")
    if not len(obs):
        raise SortRLError("gap_thresholds: no states; pass at least one observation.")
    flat, least = obs.reshape(len(obs), -1), max(1.0, rare * len(obs))
    thresholds = np.full((levels, flat.shape[1]), np.inf)
    for place in range(flat.shape[1]):
        middles = gap_centres(np.bincount(flat[:, place], minlength=BYTES), gap, levels, least)
        thresholds[: len(middles), place] = middles
    return thresholds.reshape(levels, *obs.shape[1:])


def distill_thresholds(
    demonstrations: Demonstrations,
    normalizer: Normalizer,
    config: ThresholdConfig,
    eps: float,
    *,
    held_out: Demonstrations | None = None,
    out_dir: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Distilled:
    """Train a student on demonstrations; ``eps`` is only what the certified share is reported at.

    As :func:`sortrl.distill.loop.distill`, it checkpoints in ``out_dir``, resumes from what it finds there, and equals an
    undisturbed run bit for bit.
    """
    generator = torch.Generator().manual_seed(seed)
    raw = _thresholds(demonstrations, normalizer, config)
    policy = _initial_policy(demonstrations, normalizer, config, raw, generator)
    # Bytes are compared with bytes: the same answers as of the policy, in a tenth of the time.
    whole = torch.from_numpy(np.where(np.isfinite(raw), np.floor(raw), BYTES - 1).astype(np.uint8))
    # Weights, their gradients and two moments; a batch of answers, and what the layers make of them, which is smaller.
    needed = 4 * (4 * policy.parameter_count + 8 * config.batch * policy.rounding.thresholds.numel())
    require(f"Training with batches of {config.batch}", needed, "lower batch")
    optimizer = torch.optim.Adam(policy.head.parameters(), lr=config.learning_rate, fused=True)
    states = torch.from_numpy(np.ascontiguousarray(demonstrations.obs))
    labels = torch.from_numpy(demonstrations.actions.astype(np.int64))
    values = torch.from_numpy(demonstrations.logits.astype(np.float32))
    identity = {"config": asdict(config), "seed": seed, "states": len(states), "labels": int(labels.sum())}
    checkpoint = Checkpoint(out_dir, identity)
    first, history = checkpoint.restore(policy, optimizer, generator)
    started = time.monotonic()
    policy.train()
    for step in range(first, config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.rate(step)
        index = torch.randint(len(states), (config.batch,), generator=generator)
        scores = policy.head((states[index][:, None] > whole).flatten(1, 2).float())
        loss = value_loss(scores, values[index]) if config.norm else functional.cross_entropy(scores, labels[index])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

        done = step + 1
        if done % max(1, config.steps // 200) == 0 or done == config.steps:
            agrees = scores.argmax(1) == labels[index]
            far = policy.rounding.distance(normalizer(states[index])) > eps
            row: dict[str, Any] = {"step": done, "loss": float(loss.detach())}
            row |= {"agreement": float(agrees.float().mean()), "certified": float((agrees & far).float().mean())}
            history.append(row)
            if progress is not None:
                seconds = (time.monotonic() - started) / (done - first)
                progress({**row, "total": config.steps, "seconds_left": seconds * (config.steps - done)})
        if done % max(1, config.steps // 10) == 0 or done == config.steps:
            checkpoint.save(policy, optimizer, generator, done, history)
    policy.eval().requires_grad_(False)
    return Distilled(policy, history, None if held_out is None else held_out_metrics(policy, held_out, eps))


def _thresholds(
    demonstrations: Demonstrations, normalizer: Normalizer, config: ThresholdConfig
) -> npt.NDArray[np.float64]:
    """In bytes, infinite where there is none."""
    obs = demonstrations.obs
    if obs.ndim != 4 or obs.dtype != np.uint8:
        raise SortRLError(
            f"A student that sees rounded pixels needs images of bytes, but observations are {obs.dtype} of shape {obs.shape[1:]}. "
            "Distil with another preset."
        )
    raw = gap_thresholds(obs, config.gap * float(normalizer.scale.max()), config.levels, config.rare)
    if not np.isfinite(raw).any():
        raise SortRLError(
            f"No pixel takes two values that are {2 * config.gap:.4g} apart, so nothing could be seen. Lower the gap."
        )
    return raw


def _initial_policy(
    demonstrations: Demonstrations,
    normalizer: Normalizer,
    config: ThresholdConfig,
    raw: npt.NDArray[np.float64],
    generator: torch.Generator,
) -> ThresholdPolicy:
    shape = demonstrations.obs.shape[1:]
    policy = ThresholdPolicy(
        shape, demonstrations.n_actions, config.levels, config.conv, config.hidden, normalizer, config.norm
    )
    with torch.no_grad():
        used = torch.from_numpy(np.isfinite(raw))
        unit = normalizer(np.where(np.isfinite(raw), raw, 0.0))
        policy.rounding.thresholds.copy_(torch.where(used, unit, UNUSED))
        for layer in policy.head.layers:
            fan_in = layer.weight[0].numel()  # type: ignore[index]
            torch.nn.init.normal_(layer.weight, 0.0, math.sqrt(2.0 / fan_in), generator=generator)  # type: ignore[arg-type]
            torch.nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return policy
