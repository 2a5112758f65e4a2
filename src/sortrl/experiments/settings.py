"""How the students of Figure 1 are made, and how much of the figure is computed at each scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sortrl.teachers import HardenConfig, SteadyConfig

PROTOCOLS = ("paper", "normalised")
TASKS = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "LunarLander-v3")
EPS_GRID = tuple(round(0.02 * k, 2) for k in range(11))

# Where students differ from the task's defaults, which are made for normalising teachers; chosen on validation episodes.
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("paper", "CartPole-v1"): {
        "eps": 0.05,
        "scale": 5.0,
        "smoothing": 0.2,
        "noise": 0.2,
        "lambda_end": 1.0,
        "dagger_rounds": 2,
    },
    ("paper", "Acrobot-v1"): {
        "eps": 0.15,
        "noise": 0.2,
        "smoothing": 0.0,
        "dagger_rounds": 1,
        "start_radius": 0.3,
        "candidates": 4,
        "choose_eps": (0.1,),  # where it is nearest to what is asked of it
        "choose_episodes": 200,
    },
    ("paper", "MountainCar-v0"): {
        "eps": 0.1,
        "scale": 2.0,
        "smoothing": 0.05,
        "noise": 0.15,
        "lambda_end": 0.03,
        "dagger_rounds": 2,
        "dagger_eps": 0.15,
    },
    ("paper", "LunarLander-v3"): {
        "eps": 0.04,
        "scale": 4.0,
        "smoothing": 0.03,
        "noise": 0.05,
        "lambda_end": 1.0,
        "steps": 3000,
        "dagger_rounds": 6,
        "dagger_states": 30_000,
        "dagger_eps": 0.15,
        "harden": HardenConfig(eps=0.2),
        "candidates": 3,
        "choose_episodes": 200,  # not attacked: what is gained under attack is paid for with clean return
    },
    # A steady teacher wants to be followed closely: neither averaged nor given up for wider margins.
    ("normalised", "CartPole-v1"): {
        "eps": 0.1,
        "smoothing": 0.0,
        "noise": 0.2,
        "lambda_end": 1.0,
        "steady": SteadyConfig(eps=0.12, eps_attack=0.2, generations=60),
    },
}

# The recipe as printed is trained for the eps of ours, but for those whose own has moved since with their teacher.
PRINTED_EPS = {"LunarLander-v3": 0.03}


@dataclass(frozen=True)
class Plan:
    """How much of the figure to compute."""

    episodes: int
    eps_grid: tuple[float, ...]
    seeds: int
    """Students of our recipe per task."""
    paper_seeds: int
    """Students of the recipe as printed (5 x 640) per task, in the paper's protocol."""
    paper_episodes: int
    paper_eps_grid: tuple[float, ...]
    suite_episodes: int
    suite_eps_grid: tuple[float, ...]
    """Where the expert and the first student also meet every attack there is."""
    suite_protocols: tuple[str, ...] = PROTOCOLS
    adversary_steps: int = 200_000
    """Environment steps in which an adversary learns against each of them."""
    changes: tuple[tuple[str, Any], ...] = ()
    suite: str | tuple[str, ...] = "full"
    """The attacks in question."""


COARSE = (0.0, 0.06, 0.1, 0.2)
TINY: tuple[tuple[str, Any], ...] = (
    ("steps", 20),
    ("width", 16),
    ("dagger_rounds", 0),
    ("harden", None),
    ("steady", None),
    ("candidates", 1),
)
PLANS: dict[str, Plan] = {
    "smoke": Plan(
        2, (0.0, 0.1), 1, 1, 2, (0.0, 0.1), 2, (0.1,), PROTOCOLS, 2_000, TINY, ("pgd-10", "fgsm", "noise", "learned")
    ),
    "cpu": Plan(50, EPS_GRID, 3, 1, 20, COARSE, 10, (0.1, 0.2), ("paper",), 60_000),
    "paper": Plan(50, EPS_GRID, 3, 3, 50, EPS_GRID, 50, EPS_GRID[1:]),
}
