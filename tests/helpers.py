"""What several test files share: hand-written CartPole controllers as cheap teachers, and the results of a made-up run."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from sortrl.core.normalizer import Normalizer
from sortrl.core.records import EvalResult
from sortrl.teachers import Architecture, Teacher


class Balancer(nn.Module):
    """Pushes towards where the pole falls: linear in the state, balances for 500 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([0.1, 0.5, 3.0, 1.5]))

    def forward(self, unit: Tensor) -> Tensor:
        push = 2.0 * (unit @ self.gain)
        return torch.stack([-push, push], dim=1)


def balancer() -> Teacher:
    scale = np.array([0.5, 0.5, 0.1, 0.5])
    body = Balancer()
    with torch.no_grad():
        body.gain.mul_(torch.from_numpy(scale).float())  # the controller is stated in raw units
    return Teacher(body, Normalizer(np.zeros(4), scale), 2, "balancer")


def restless() -> Teacher:
    """Balances the pole by its velocity above all, so that every push crosses the switching surface; a plain MLP."""
    architecture = Architecture(obs_shape=(4,), n_actions=2, hidden=(), activation="Tanh")
    weights = {"1.weight": torch.tensor([[0.0] * 4, [0.05, 0.3, 1.0, 1.0]]), "1.bias": torch.zeros(2)}
    unit = Normalizer(np.zeros(4), np.array([0.9, 0.5, 0.04, 0.3]))  # of the size of what a balanced pole shows
    return Teacher(architecture.build_with(weights, "weights"), unit, 2, "restless", "ppo", architecture)


def evaluation_row(policy, attack, eps, returns, radii=None, changed=0.0):
    """A row as evaluate writes it."""
    returns, steps = np.asarray(returns, dtype=float), np.full(len(returns), 100)
    return EvalResult(
        env_id="CartPole-v1",
        policy=policy,
        attack=attack,
        eps_unit=eps,
        seeds=tuple(range(len(returns))),
        returns=returns,
        lengths=steps,
        changed_share=changed,
        radii=None if radii is None else np.resize(radii, steps.sum()),
        queries=1000,
        gradients=1000,
        seconds=1.5,
    ).to_json()


def make_ladder():
    """Three rungs, of which the middle one was kept."""
    found = ((1, 0.05, 498.0, 431.0, 0.41), (2, 0.1, 492.0, 447.0, 0.62), (3, 0.2, 402.0, 377.0, 0.83))
    rungs = [
        {"rung": rung, "eps": eps, "clean": clean, "kept": (clean - 22) / 478, "error": 0.01}
        | {"certified": certified, "attacked": attacked, "attack": "MinQ-10"}
        for rung, eps, clean, attacked, certified in found
    ]
    known = {"eps": 0.1, "keep": 0.95, "episodes": 50, "random": 22.0, "teacher": 500.0, "teacher_attacked": 390.0}
    return {**known, "chosen": 2, "rungs": rungs}


def make_results(attacks=("PGD-10",)):
    """A results.json as ``sortrl robustify`` writes it, of numbers that are made up."""
    rng = np.random.default_rng(0)
    radii = np.clip(rng.gamma(4.0, 0.06, 4000), 0.0, 0.6)
    levels = [round(0.02 * index, 2) for index in range(16)]
    rows = [
        evaluation_row("teacher", "none", 0.0, [500.0] * 20),
        evaluation_row("student", "none", 0.0, 500 - rng.integers(0, 9, 20), radii),
    ]
    for index, attack in enumerate(attacks):
        for eps in (0.05, 0.1, 0.15, 0.2):
            fallen = 500 / (1 + (eps / 0.09) ** (3 - index)) * rng.uniform(0.6, 1.2, 20)
            rows.append(evaluation_row("teacher", attack, eps, np.minimum(500, fallen), changed=0.31))
            rows.append(
                evaluation_row("student", attack, eps, 500 - rng.integers(0, 10 + int(900 * eps**2), 20), radii, 0.0123)
            )
    training = []
    for step in range(8, 1501, 8):
        done = step / 1500
        training.append(
            {
                "step": step,
                "loss": 0.7 - 0.5 * done,
                "cross_entropy": 0.7 - 0.5 * done,
                "agreement": float(np.clip(0.97 - 0.4 * math.exp(-9 * done) + rng.normal(0, 0.008), 0, 1)),
                "certified": float(np.clip(0.9 / (1 + math.exp(-14 * (done - 0.4))) + rng.normal(0, 0.012), 0, 1)),
                "p": 1e9 if done > 0.85 else float(2 ** round(3 + 7 * min(1, max(0, (done - 0.1) / 0.75)))),
                "lambda": 0.01 ** min(1, max(0, (done - 0.1) / 0.75)),
            }
        )
    counts, edges = np.histogram(radii, bins=30, range=(0, 0.6))
    episode = np.clip(
        0.22 + 0.12 * np.sin(np.arange(500) / 9) * np.exp(-np.arange(500) / 300) + rng.normal(0, 0.03, 500), 0, 1
    )
    return {
        "schema": 1,
        "kind": "robustify",
        "sortrl": "0.1.0",
        "command": "sortrl robustify CartPole-v1 --eps 0.1",
        "seed": 7,
        "started": "2026-01-01T00:00:00Z",
        "stage_seconds": {"teacher": 40.1, "collect": 8.0, "distill": 60.0, "evaluate": 20.0},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "machine": {"cpu": "Some CPU", "cores": 2, "isa": "avx512", "threads": 2},
        "env": {
            "id": "CartPole-v1",
            "obs_names": ["cart position", "cart velocity", "pole angle", "pole angular velocity"],
            "unit_to_raw": [0.9, 0.51, 0.0973, 0.47],
            "n_actions": 2,
            "max_steps": 500,
        },
        "teacher": {"name": "PPO", "algorithm": "ppo", "source": "trained here"},
        "config": {
            "eps": 0.1,
            "preset": "fast",
            "collect": {"states": 50000},
            "distill": {"steps": 1500, "soft": None},
        },
        "ladder": make_ladder(),
        "data": {
            "states": 50000,
            "distinct": 49871,
            "dagger_states": 10000,
            "held_out_states": 5039,
            "agreement": 0.9712,
            "certified": 0.891,
        },
        "policy": {"parameters": 133000, "lipschitz": 1.0, "width": 256, "depth": 5, "rho": 0.3, "scale": 1.0},
        "training": training,
        "evaluation": rows,
        "certificate": {
            "eps": levels,
            "share": [float((radii > eps).mean()) for eps in levels],
            "radius_median": float(np.median(radii)),
            "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
            "episode": {"seed": 0, "return": 500.0, "radii": episode.tolist()},
            "fully_certified_episodes": 0.4,
        },
    }
