"""Distillation of continuous actions: a Lipschitz student learns its teacher's numbers, as steep as it is allowed to be.

There are no margins to widen: how far an action can be pushed is the slope of the student's output, which is fixed before the training.
The smaller it is, the more the student has to smooth its teacher; :mod:`sortrl.runs.continuous` chooses it by measurement.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from sortrl.core.checkpoint import Checkpoint
from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.core.progress import Progress
from sortrl.data.continuous import Answers
from sortrl.distill.config import DistillConfig
from sortrl.distill.units import Restated
from sortrl.envs import ActionBox
from sortrl.nets import ContinuousPolicy
from sortrl.teachers.continuous import ContinuousTeacher

# Of the classifier's settings: sizes and schedules. Losses have their own.
REGRESSION = DistillConfig(
    width=128, steps=2000, batch=256, rho=0.0, learning_rate=0.05, final_share=0.5, exact_share=0.5
)
BEND = 0.1  # where the Huber loss turns linear, in standard deviations of the teacher's actions


def in_units_of(teacher: ContinuousTeacher, units: Normalizer) -> ContinuousTeacher:
    """The same agent with the mean and scale of ``units`` as its unit space."""
    own = teacher.normalizer
    if torch.equal(own.mean, units.mean) and torch.equal(own.scale, units.scale):
        return teacher
    free = Normalizer(units.mean, units.scale)
    body = Restated(teacher.body, own, free)
    return ContinuousTeacher(body, free, teacher.box, teacher.name, teacher.algorithm, teacher.squashed)


def distill_continuous(
    answers: Answers,
    normalizer: Normalizer,
    box: ActionBox,
    steepness: float,
    config: DistillConfig = REGRESSION,
    *,
    eps: float = 0.0,
    out_dir: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[ContinuousPolicy, list[dict[str, Any]]]:
    """A student whose actions move by at most ``steepness`` of their standard deviations per unit of the observation, and its
    training curve. With ``out_dir`` it checkpoints there and resumes from what it finds.

    The loss is Huber's, against the teacher's actions in units of their spread, also where the state is disturbed by up to ``eps`` (all
    sensors by the same size, each its own way): the answer is to be that of the state itself. The exponent p rises, then is
    infinite, and the last steps are those of the exact network, as for actions that are chosen.
    """
    if not 0 < steepness < float("inf") or normalizer.obs_shape != answers.obs.shape[1:]:
        raise SortRLError(
            f"distill: steepness is {steepness}, states {answers.obs.shape} and the normalizer {normalizer.obs_shape}; expected a "
            "positive number and states of the normalizer's shape."
        )
    generator = torch.Generator().manual_seed(seed)
    slope = tuple((steepness * answers.spread).tolist())
    policy = ContinuousPolicy(
        normalizer.obs_shape,
        tuple(box.low.tolist()),
        tuple(box.high.tolist()),
        slope,
        config.width,
        config.depth,
        config.rho,
        normalizer=normalizer,
    )
    trunk = policy.trunk
    with torch.no_grad():
        for layer in trunk.layers:
            layer.weight.normal_(generator=generator)
    optimizer = torch.optim.AdamW(
        [trunk.bias, *(layer.weight for layer in trunk.layers)],
        lr=config.learning_rate,
        betas=(0.9, 0.99),
        eps=1e-10,
        weight_decay=0.0,  # weights are positions and have no natural zero
        fused=True,
    )
    unit, wanted = policy.normalize(answers.obs), torch.from_numpy(answers.actions.astype(np.float64))
    spread = torch.from_numpy(answers.spread)
    identity = {"config": asdict(config), "seed": seed, "steepness": steepness, "eps": eps, "states": len(unit)}
    checkpoint = Checkpoint(out_dir, {**identity, "answers": float(wanted.sum())})
    first, history = checkpoint.restore(policy, optimizer, generator)
    # Means of a batch are noise, which a steep output would multiply.
    settled = round(config.steps * (1.0 - config.exact_share))
    policy.train().requires_grad_(True)
    trunk.mu.requires_grad_(False)  # has no part in this
    for step in range(first, config.steps):
        trunk.p.fill_(config.p_at(step))
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * config.cosine(step)
        rows = torch.randint(len(unit), (config.batch,), generator=generator)
        if step == settled:
            trunk.calibrate(unit)
        x = unit[rows]
        if eps > 0:
            sizes = eps * torch.rand(len(x), 1, generator=generator)
            x = x + sizes * torch.sign(torch.rand(x.shape, generator=generator) - 0.5)
        scores = trunk.settled_training_scores(x) if step >= settled else trunk.training_scores(x, generator)
        off = (policy.from_scores(scores) - wanted[rows]) / spread
        loss = functional.huber_loss(off, torch.zeros_like(off), delta=BEND) / BEND
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        done = step + 1
        if done % max(1, config.steps // 200) == 0 or done == config.steps:
            found = {"step": done, "loss": float(loss.detach()), "error": float(off.detach().abs().mean())}
            history.append({**found, "p": min(float(trunk.p), 1e9)})  # JSON has no infinity
            if progress is not None:
                progress({**history[-1], "total": config.steps})
        if done % max(1, config.steps // 10) == 0 or done == config.steps:
            checkpoint.save(policy, optimizer, generator, done, history)
    policy.eval().requires_grad_(False)
    return policy, history


def mean_error(policy: ContinuousPolicy, answers: Answers) -> float:
    """Mean distance from the teacher's actions, in their standard deviations."""
    parts = range(0, len(answers), 4096)
    off = [policy.predict(answers.obs[i : i + 4096])[0] - answers.actions[i : i + 4096] for i in parts]
    return float((np.abs(np.concatenate(off)) / answers.spread).mean())
