"""What ``tests/core/test_parallel.py`` runs by itself and, in two processes, under ``torchrun``: trainings whose curves must be the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from sortrl import SortPolicy
from sortrl.baselines.interval_q.car import CarDQN
from sortrl.baselines.interval_q.sa_dqn import SADQN
from sortrl.baselines.interval_q.training import TrainingConfig, fine_tune
from sortrl.core import parallel
from sortrl.distill import DistillConfig, fit
from sortrl.nets import HybridPolicy, IntervalPolicy

SORT = DistillConfig(eps=0.05, steps=60, batch=256, lambda_end=0.1, exact_share=0.1, soft_targets=0.3)
TUNING = TrainingConfig(0.05, decisions=400, learning_starts=100, batch=16, buffer=500, tests=1, test_episodes=1)


def networks():
    torch.manual_seed(1)
    yield "sort", SortPolicy((6,), 3, width=32, depth=3, rho=0.3, mask_chunk=64)  # four groups of masks
    yield "hybrid", HybridPolicy((6,), 3, width=24, depth=2, hidden=(8,))


def trained(folder: Path) -> dict[str, object]:
    """Curves and scores of short trainings."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(1024, 6, generator=generator) * 2 - 1
    labels = (inputs[:, 0] + inputs[:, 1] > 0).long() + (inputs[:, 2] > 0.3).long()
    scores = torch.nn.functional.one_hot(labels, 3) * 3.0
    found: dict[str, object] = {}
    for name, policy in networks():
        curve = fit(policy, inputs, labels, SORT, teacher_logits=scores, out_dir=folder / name)
        found[name] = {"curve": curve, "scores": policy.scores(inputs[:32]).tolist()}
    torch.manual_seed(2)
    start = IntervalPolicy((4,), 2, hidden=(16,))
    states = torch.randn(32, 4, generator=generator)
    found["start"] = {"scores": start.scores(states).tolist()}
    for method in (CarDQN(), SADQN("pgd")):
        tuned = fine_tune(start, "CartPole-v1", method, TUNING)
        found[type(method).__name__] = {"curve": tuned.history, "scores": tuned.policy.scores(states).tolist()}
    return found


def main(folder: Path) -> None:
    with parallel.joined() as leading:
        if leading:
            (folder / "found.json").write_text(json.dumps(trained(folder)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
