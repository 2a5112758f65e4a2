"""The cases about whole policies: a training step against the same step with torch.cdist, and inference."""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sortrl import ops
from sortrl.distill import PRESETS, DistillConfig, imitation_loss, margins, robust_loss
from sortrl.experiments.bench.operators import Case
from sortrl.experiments.bench.rivals import CdistPolicy
from sortrl.experiments.bench.timing import Contender, disagreements, take_turns
from sortrl.nets import SortPolicy

INPUTS, ACTIONS = 8, 4
MEASURED = (8.0, 64.0, 1024.0, math.inf)  # the exponents that stand for the whole schedule


@dataclass(frozen=True)
class Size:
    """Of the policy and the batch it is trained with."""

    width: int = 640
    depth: int = 5
    batch: int = 512


class Step:
    """One optimiser step of distillation, forward, backward and AdamW; :meth:`restore` takes it back."""

    def __init__(self, policy: SortPolicy | CdistPolicy, p: float, size: Size) -> None:
        generator = torch.Generator().manual_seed(0)
        self.policy = policy
        self.policy.p.fill_(p)
        self.unit = torch.randn(size.batch, INPUTS, generator=generator)
        self.labels = torch.randint(ACTIONS, (size.batch,), generator=generator)
        self.config = DistillConfig()
        self.start = copy.deepcopy(policy.state_dict())
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=0.02, betas=(0.9, 0.99), eps=1e-10, fused=True)
        self.masks = torch.Generator()

    def restore(self) -> None:
        """Set the weights and the masks back, so that every step computes the same and no rival trains on its NaNs."""
        self.policy.load_state_dict(self.start)
        self.masks.manual_seed(0)

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        scores = self.policy.training_scores(self.unit, self.masks)
        imitation = imitation_loss(self.policy.mu * scores, self.labels, scores.detach(), 0.0)
        loss = imitation + robust_loss(margins(scores, self.labels), self.config.theta)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return scores.detach()


def make_policy(size: Size, seed: int = 0, inputs: int = INPUTS, actions: int = ACTIONS) -> SortPolicy:
    """A policy with reproducible random weights."""
    policy = SortPolicy((inputs,), actions, size.width, size.depth)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in policy.layers:
            layer.weight.normal_(generator=generator)
    return policy


def schedule_shares(config: DistillConfig) -> dict[float, float]:
    """The share of a training's steps for which each of ``MEASURED`` stands: the nearest in ratio; infinity for itself.

    >>> {p: round(share, 2) for p, share in schedule_shares(DistillConfig(steps=1000)).items()}
    {8.0: 0.24, 64.0: 0.43, 1024.0: 0.18, inf: 0.15}
    """
    finite = [p for p in MEASURED if math.isfinite(p)]

    def stand_in(p: float) -> float:
        return p if math.isinf(p) else min(finite, key=lambda q: abs(math.log(q / p)))

    count = Counter(stand_in(config.p_at(step)) for step in range(config.steps))
    return {p: count[p] / config.steps for p in MEASURED}


def train_step(size: Size, repeats: int) -> dict[str, Any]:
    """Seconds of a whole training step, averaged over the exponents as a training meets them."""
    policy, shares = make_policy(size), schedule_shares(PRESETS["paper"])
    by_p: dict[str, dict[str, Any]] = {}
    medians: dict[str, float] = {}
    wrong: set[str] = set()
    notes = [
        f"{size.depth} layers of {size.width} units, masks, forward, backward and AdamW; mean over the schedule of p"
    ]
    for p, share in shares.items():
        ours, rival = Step(copy.deepcopy(policy), p, size), Step(CdistPolicy(copy.deepcopy(policy)), p, size)
        timing = take_turns(Contender(ours, ours.restore), {"cdist": Contender(rival, rival.restore)}, repeats)
        seconds = timing.best_s
        by_p[f"{p:g}"] = {"share": share, "ours_s": seconds["ours"], "rivals": {"cdist": seconds["cdist"]}}
        medians[f"{p:g}"] = timing.median_s["ours"]
        different = disagreements(timing.first)
        wrong |= set(different)
        notes += [f"p = {p:g}: {note}" for note in timing.notes + [f"{a}: {b}" for a, b in different.items()]]
    failed = any(row["rivals"]["cdist"] is None for row in by_p.values())
    return {
        "op": "train_step",
        "shape": [size.batch, INPUTS, ACTIONS],
        "p": None,
        "ours_s": sum(row["share"] * row["ours_s"] for row in by_p.values()),
        "median_s": sum(by_p[p]["share"] * median for p, median in medians.items()),
        "rivals": {"cdist": None if failed else sum(row["share"] * row["rivals"]["cdist"] for row in by_p.values())},
        "limit_s": None,
        "wrong": sorted(wrong),
        "notes": notes,
        "by_p": by_p,
    }


def inference(size: Size, batch: int) -> Case:
    """From raw observations to actions, with our operators and with their plain torch definition."""
    policy = make_policy(size).eval().requires_grad_(False)  # as every trained or loaded policy is
    obs = np.random.default_rng(0).normal(size=(batch, INPUTS))

    def ours() -> Tensor:
        return torch.from_numpy(policy.predict(obs)[0])

    def reference() -> Tensor:
        with ops.use_backend("reference"):
            return ours()

    return Case("policy_infer", (batch, INPUTS, ACTIONS), None, ours, {"reference": reference})
