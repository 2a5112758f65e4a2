"""Continuous actions: Stable-Baselines3 agents and their Lipschitz students, clean and attacked, with every bound hunted."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sortrl.core.errors import SortRLError
from sortrl.core.files import atomic_path, read_object, write_json
from sortrl.core.identity import plain
from sortrl.envs import describe
from sortrl.experiments.figure1 import Scale
from sortrl.report.continuous import bounds_table, read_continuous_results
from sortrl.report.numbers import number, percent
from sortrl.runs.continuous import continuous_settings, robustify_continuous

SEED = 0
EPISODES = {"smoke": 2, "cpu": 50, "paper": 200}


@dataclass(frozen=True)
class Agent:
    """How the teacher of a row is trained, by Stable-Baselines3."""

    algorithm: str
    task: str
    steps: int
    settings: dict[str, Any]
    copies: int = 1

    @property
    def name(self) -> str:
        return f"{self.algorithm.lower()}-{self.task.partition('-v')[0].lower()}"


AGENTS = (
    Agent(
        "SAC",
        "Pendulum-v1",
        12_000,
        {"learning_rate": 1e-3, "learning_starts": 500, "policy_kwargs": {"net_arch": [64, 64]}},
    ),
    Agent(
        "PPO",
        "Pendulum-v1",
        100_000,
        {"n_steps": 1024, "gamma": 0.9, "learning_rate": 1e-3, "use_sde": True, "sde_sample_freq": 4},
        copies=4,
    ),
    Agent(
        "PPO",
        "LunarLanderContinuous-v3",
        1_000_000,
        {
            "n_steps": 1024,
            "batch_size": 256,
            "gae_lambda": 0.98,
            "gamma": 0.999,
            "n_epochs": 4,
            "ent_coef": 0.01,
            "learning_rate": 5e-4,
        },
        copies=16,
    ),
)


def continuous_table(
    scale: Scale = "cpu",
    task: str | None = None,
    out: Path = Path("results"),
    work: Path = Path("runs/continuous"),
    teachers: Path | None = None,
    progress: Callable[[str], None] = print,
    agent: str | None = None,
) -> dict[str, Any]:
    """Robustify every agent with no setting of its own and write ``continuous.json`` after each; continues where it was stopped."""
    names = [one.name for one in AGENTS]
    chosen = [one for one in AGENTS if task in (None, one.task) and agent in (None, one.name)]
    if not chosen:
        raise SortRLError(
            f"reproduce continuous: no agent {agent or ''} of {task or 'any task'}; there are {', '.join(names)}."
        )
    path = out / "continuous.json"
    rows = {row["agent"]: row for row in read_object(path)["rows"]} if path.exists() else {}
    for one in chosen:
        file = _teacher(one, scale, work, teachers, progress)
        progress(f"{one.name}: distilling and measuring")
        small = {
            "states": 500,
            "steps": 20,
            "dagger_rounds": 0,
            "dagger_states": 100,
            "choose_episodes": 2,
            "quick": True,
        }
        settings = continuous_settings(episodes=EPISODES[scale], **(small if scale == "smoke" else {}))
        _, found = robustify_continuous(
            file,
            describe(one.task, continuous=True),
            settings,
            work / one.name,
            seed=SEED,
            command=f"sortrl reproduce continuous --agent {one.name}",
            quiet=True,
        )
        found["teacher"]["source"] = file.name
        rows[one.name] = {"agent": one.name, "task": one.task, "training": plain(one), "results": found}
        write_json(path, {"scale": scale, "rows": [rows[name] for name in names if name in rows]})
    return read_object(path)


def _teacher(agent: Agent, scale: Scale, work: Path, teachers: Path | None, progress: Callable[[str], None]) -> Path:
    """The agent's zip: the one in the folder given, or else trained now."""
    file = (teachers or work / "teachers") / f"{agent.name}.zip"
    if file.exists():
        return file
    if teachers is not None:
        raise SortRLError(f"No {file}. Without --teachers, teachers are trained.")
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env

    steps = 600 if scale == "smoke" else agent.steps
    progress(f"{agent.name}: training the teacher, {steps} steps")
    envs = make_vec_env(agent.task, agent.copies, seed=SEED)
    model = getattr(stable_baselines3, agent.algorithm)(
        "MlpPolicy", envs, seed=SEED, device="cpu", **deepcopy(agent.settings)
    )
    model.learn(steps)
    with atomic_path(file) as temporary, temporary.open("wb") as stream:
        model.save(stream)
    envs.close()
    return file


def continuous_table_lines(results: dict[str, Any]) -> list[str]:
    """In Markdown: returns of both, clean and under the worst attack, and bounds beside what was found."""
    lines = [
        "| agent | policy | clean | worst attack at ε | of 2 ε | L | bound at ε | largest move found | of the range |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        run = read_continuous_results(row["results"])
        bounds = bounds_table(run).rows
        for policy in ("teacher", "student"):
            at = {eps: _worst(run.rows, policy, eps) for eps in (run.eps, 2 * run.eps)}
            clean = run.clean(policy)
            assert clean is not None
            cells = [f"{number(clean['mean'])} ± {number(clean['sem'], 1)}"]
            cells += [f"{number(one['mean'])} ({one['attack']})" for one in at.values()]
            moved = np.max(
                [one["moved"] for one in run.rows if (one["policy"], one["eps"]) == (policy, run.eps)], axis=0
            )
            own = policy == "student"
            cells += [", ".join(bound[place] for bound in bounds) if own else "" for place in (2, 3)]
            cells += [", ".join(bound[4 if own else 5] for bound in bounds)]
            cells += [percent(float(np.max(moved / np.array(run.ranges))))]
            lines.append(f"| {row['agent']} | {policy} | {' | '.join(cells)} |")
    return lines


def _worst(rows: list[Any], policy: str, eps: float) -> Any:
    return min(
        (row for row in rows if row["policy"] == policy and row["eps"] == eps and row["attack"] != "none"),
        key=lambda row: float(row["mean"]),
    )
