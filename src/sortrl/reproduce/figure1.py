"""The paper's figures, made again. Figure 1: return against eps under PGD-10 on the four classic tasks.

Two protocols, because the paper leaves the units of eps open. "paper": the published experts of the RL Baselines3 Zoo,
eps in their own input units (raw for CartPole and LunarLander, normalised for Acrobot and MountainCar).
"normalised": teachers with observation normalisation, eps in standard deviations.

The work is cut into units (protocol, task, agent, seed), each kept in a file of its own: a stopped reproduction
continues, and a finished one is only drawn again.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sortrl import attacks, provenance
from sortrl.certify import certified_shares
from sortrl.errors import SortRLError
from sortrl.evaluate import evaluate
from sortrl.files import atomic_path, read_json, write_json
from sortrl.pipeline import robustify
from sortrl.teachers import Teacher, load_teacher, teacher_preset, train_teacher

Scale = Literal["smoke", "cpu", "paper"]
PROTOCOLS = ("paper", "normalised")
TASKS = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "LunarLander-v3")
EPS_GRID = tuple(round(0.02 * k, 2) for k in range(11))
TEST_SEED = 1500  # settings were chosen on the episodes of other seeds

# Published agent and its statistics; None: the agent takes raw observations.
ZOO: dict[str, tuple[str, str | None]] = {
    "CartPole-v1": ("ppo-CartPole-v1.zip", None),
    "Acrobot-v1": ("ppo-Acrobot-v1.zip", "ppo-Acrobot-v1-vecnormalize.pkl"),
    "MountainCar-v0": ("ppo-MountainCar-v0.zip", "ppo-MountainCar-v0-vecnormalize.pkl"),
    "LunarLander-v3": ("ppo-LunarLander-v2.zip", None),
}

# What one student per task is trained for, where it differs from the task's defaults; chosen on validation episodes.
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("paper", "CartPole-v1"): {"eps": 0.01, "scale": 10.0, "mu_start": 8.0, "lambda_end": 1.0, "dagger_rounds": 3},
    ("paper", "Acrobot-v1"): {"eps": 0.15, "noise": 0.2},
    ("paper", "MountainCar-v0"): {"eps": 0.1, "scale": 2.0, "lambda_end": 0.03},
    ("paper", "LunarLander-v3"): {
        "eps": 0.02,
        "mu_start": 25.0,
        "lambda_end": 1.0,
        "dagger_rounds": 3,
        "dagger_states": 30_000,
    },
    ("normalised", "CartPole-v1"): {"eps": 0.1},
    ("normalised", "Acrobot-v1"): {"eps": 0.1, "noise": 0.2},
    ("normalised", "MountainCar-v0"): {"eps": 0.1, "scale": 2.0, "lambda_end": 0.03},
    ("normalised", "LunarLander-v3"): {"eps": 0.1, "dagger_rounds": 2, "dagger_states": 30_000},
}


@dataclass(frozen=True)
class Plan:
    """How much of the figure to compute."""

    episodes: int
    eps_grid: tuple[float, ...]
    seeds: int
    """Students of our recipe per task."""
    paper_seeds: int
    """Students of the recipe as printed (5 x 640) per task."""
    paper_episodes: int
    paper_eps_grid: tuple[float, ...]
    changes: tuple[tuple[str, Any], ...] = ()


COARSE = (0.0, 0.06, 0.1, 0.2)
PLANS: dict[str, Plan] = {
    "smoke": Plan(2, (0.0, 0.1), 1, 1, 2, (0.0, 0.1), (("steps", 20), ("width", 16), ("dagger_rounds", 0))),
    "cpu": Plan(50, EPS_GRID, 3, 1, 20, COARSE),
    "paper": Plan(50, EPS_GRID, 3, 3, 50, EPS_GRID),
}


@dataclass(frozen=True)
class Unit:
    """One agent to evaluate along the whole curve."""

    protocol: str
    task: str
    agent: Literal["expert", "ours", "paper"]
    seed: int

    @property
    def name(self) -> str:
        return f"{self.protocol}-{self.task}-{self.agent}-{self.seed}"


def units(plan: Plan, tasks: tuple[str, ...], protocols: tuple[str, ...] = PROTOCOLS) -> list[Unit]:
    """All units, the experts first because students wait for their teachers."""
    pairs = [(protocol, task) for protocol in protocols for task in tasks]
    experts = [Unit(protocol, task, "expert", 0) for protocol, task in pairs]
    ours = [Unit(protocol, task, "ours", seed) for seed in range(plan.seeds) for protocol, task in pairs]
    return (
        experts + ours + [Unit(protocol, task, "paper", s) for s in range(plan.paper_seeds) for protocol, task in pairs]
    )


def find_teachers(folder: Path | None) -> Path | None:
    """The folder of the published agents: as given, or named by SORTRL_TEACHERS."""
    chosen = folder or (Path(os.environ["SORTRL_TEACHERS"]) if "SORTRL_TEACHERS" in os.environ else None)
    if chosen is None:
        return None
    for candidate in (chosen, chosen / "sb3"):
        if (candidate / ZOO["CartPole-v1"][0]).exists():
            return candidate
    raise SortRLError(f"{chosen} does not hold the published agents (no {ZOO['CartPole-v1'][0]}). Name their folder.")


def expert(protocol: str, task: str, work: Path, published: Path | None) -> Teacher:
    """The expert of a protocol: published, or trained by us in the same way where the files are absent."""
    archive, statistics = ZOO[task]
    if protocol == "paper" and published is not None:
        vecnormalize = None if statistics is None else published / statistics
        return load_teacher(published / archive, task, vecnormalize=vecnormalize, allow_pickle=True)
    normalise = protocol == "normalised" or statistics is not None
    config = replace(teacher_preset(task), normalize_obs=normalise)
    return train_teacher(task, config, work / "teachers" / f"{task}-{'normalised' if normalise else 'raw'}")


def compute(unit: Unit, plan: Plan, work: Path, published: Path | None) -> dict[str, Any]:
    """Train (unless it is the expert) and evaluate one unit; the result is plain JSON."""
    torch.set_num_threads(1)  # units run side by side
    teacher = expert(unit.protocol, unit.task, work, published)
    settings = dict(SETTINGS[unit.protocol, unit.task])
    episodes, grid = plan.episodes, plan.eps_grid
    agent: Any = teacher
    if unit.agent == "paper":
        episodes, grid = plan.paper_episodes, plan.paper_eps_grid
        changes = {k: v for k, v in dict(plan.changes).items() if k != "dagger_rounds"}
        agent = robustify(teacher, unit.task, settings["eps"], preset="paper", seed=unit.seed, **changes)
    elif unit.agent == "ours":
        agent = robustify(teacher, unit.task, seed=unit.seed, **{**settings, **dict(plan.changes)})
    rows, shares = [], None
    for eps in grid:
        attack = attacks.PGD(10) if eps > 0 else None
        result = evaluate(agent, unit.task, attack, eps, episodes, TEST_SEED, name=unit.agent)
        if eps == 0 and result.radii is not None:
            shares = dict(zip(map(str, EPS_GRID), certified_shares(result, EPS_GRID), strict=True))
        rows.append(result.to_json())
    return {"unit": asdict(unit), "teacher": teacher.name, "settings": settings, "rows": rows, "acr": shares}


def fig1(
    scale: Scale = "cpu",
    task: str | None = None,
    out: Path = Path("results"),
    work: Path = Path("runs/fig1"),
    teachers: Path | None = None,
    jobs: int | None = None,
    progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Compute what is missing, then write ``fig1.json`` and ``fig1.png`` into ``out``."""
    if task is not None and task not in TASKS:
        raise SortRLError(f"Figure 1 has no task {task!r}; choose one of {', '.join(TASKS)}.")
    plan, published = PLANS[scale], find_teachers(teachers)
    folder = work / scale
    wanted = units(plan, (task,) if task else TASKS)
    todo = [unit for unit in wanted if not (folder / f"{unit.name}.json").exists()]
    progress(f"fig1: {len(wanted)} units, {len(wanted) - len(todo)} already done")
    for protocol, name in {(unit.protocol, unit.task) for unit in todo}:
        expert(protocol, name, work, published)  # trained once here, not by two workers at the same time
    arguments = [(unit, plan, work, published, folder) for unit in todo]
    with multiprocessing.get_context("spawn").Pool(max(1, min(jobs or os.cpu_count() or 1, len(todo) or 1))) as pool:
        for name in pool.imap_unordered(_compute_to_file, arguments):
            progress(f"fig1: {name} done")
    results = assemble(wanted, plan, folder, scale, published is not None)
    write_json(out / "fig1.json", results)
    draw(results, out / "fig1.png")
    return results


def _compute_to_file(argument: tuple[Unit, Plan, Path, Path | None, Path]) -> str:
    unit, plan, work, published, folder = argument
    write_json(folder / f"{unit.name}.json", compute(unit, plan, work, published))
    return unit.name


def assemble(wanted: list[Unit], plan: Plan, folder: Path, scale: str, published: bool) -> dict[str, Any]:
    """One document with every unit and, per curve, the mean over seeds."""
    found = [read_json(folder / f"{unit.name}.json") for unit in wanted]
    curves: dict[str, Any] = {}
    for unit in wanted:
        group = [entry for entry in found if _same_curve(entry["unit"], unit)]
        curve = [_mean_over_seeds([entry["rows"][i] for entry in group]) for i in range(len(group[0]["rows"]))]
        acr = [entry["acr"] for entry in group if entry["acr"]]
        curves.setdefault(unit.protocol, {}).setdefault(unit.task, {})[unit.agent] = {
            "curve": curve,
            "acr": {eps: float(np.mean([a[eps] for a in acr])) for eps in acr[0]} if acr else None,
        }
    return {
        "schema": 1,
        "figure": "fig1",
        "scale": scale,
        "protocol": "PGD-10 with steps of eps / 10 from the clean state, clipped to the declared range of observations; "
        f"{plan.episodes} episodes per point, greedy, seed {TEST_SEED}; spread: SEM over episodes of all seeds",
        "experts_of_paper_protocol": "RL Baselines3 Zoo (published)" if published else "trained here",
        "plan": asdict(plan),
        "versions": provenance.versions(),
        "machine": provenance.machine(),
        "curves": curves,
        "units": found,
    }


def _same_curve(entry: dict[str, Any], unit: Unit) -> bool:
    return (entry["protocol"], entry["task"], entry["agent"]) == (unit.protocol, unit.task, unit.agent)


def _mean_over_seeds(rows: list[dict[str, Any]]) -> dict[str, Any]:
    returns = np.concatenate([row["returns"] for row in rows])
    return {
        "eps": rows[0]["eps"],
        "mean": float(returns.mean()),
        "sem": float(returns.std(ddof=1) / np.sqrt(len(returns))) if len(returns) > 1 else 0.0,
        "seeds": len(rows),
        "episodes": len(returns),
        "per_seed": [row["mean"] for row in rows],
        "changed_share": float(np.mean([row["changed_share"] for row in rows])),
    }


STYLES = {
    "expert": ("#0072b2", "o", "expert (PPO)"),
    "ours": ("#d55e00", "s", "sortrl"),
    "paper": ("#009e73", "^", "recipe as printed"),
}


def draw(results: dict[str, Any], path: Path) -> None:
    """The figure: a row per protocol, a column per task, mean and standard error against eps."""
    curves = results["curves"]
    tasks = list(dict.fromkeys(task for protocol in curves.values() for task in protocol))
    figure = Figure(figsize=(3.3 * len(tasks), 2.9 * len(curves)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(curves), len(tasks), squeeze=False)
    for row, (protocol, by_task) in enumerate(curves.items()):
        for column, task in enumerate(tasks):
            axis = axes[row][column]
            for agent, (colour, marker, label) in STYLES.items():
                if agent not in by_task.get(task, {}):
                    continue
                points = by_task[task][agent]["curve"]
                eps, mean, sem = (np.array([point[key] for point in points]) for key in ("eps", "mean", "sem"))
                axis.plot(eps, mean, color=colour, marker=marker, markersize=3.5, linewidth=1.4, label=label)
                axis.fill_between(eps, mean - sem, mean + sem, color=colour, alpha=0.2, linewidth=0)
            axis.set_title(f"{task} · {protocol}", fontsize=9)
            axis.grid(alpha=0.25)
            axis.tick_params(labelsize=8)
            if row == len(curves) - 1:
                axis.set_xlabel("ε (the agent's input units)", fontsize=8)
            if column == 0:
                axis.set_ylabel("return under PGD-10", fontsize=8)
    axes[0][0].legend(fontsize=7, frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
