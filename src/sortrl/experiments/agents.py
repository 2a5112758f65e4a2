"""Does ``robustify`` keep the skill of agents that it has never seen? Agents of many kinds, each made into a student by the plain
command: none has a setting of its own."""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from sortrl.core.errors import MissingDependency, SortRLError, SortRLWarning
from sortrl.core.files import read_object, write_json
from sortrl.core.records import EvalRow
from sortrl.evaluate import provenance
from sortrl.experiments import navigation
from sortrl.experiments.cells import figure
from sortrl.experiments.experts import ZOO, find_teachers
from sortrl.experiments.figure1 import Scale
from sortrl.runs.config import robustify_config
from sortrl.runs.robustify import robustify
from sortrl.runs.stages import RUN_FILE
from sortrl.teachers import save_normalizer
from sortrl.teachers.load.vecnormalize import from_vecnormalize

CERTIFIED_AT = 0.1  # standard deviations
CERTIFIED = 0.5  # share of an agent's decisions
PASSING, CERTIFYING, HOLDING = 0.8, 1.0, 0.8  # what is asked for: the shares of agents that the page judges by
ASKED_TO_CERTIFY = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0")  # elsewhere good play is near switching surfaces
GRADES = 10  # times that a training grades its agent; the best is kept
GRADE_EPISODES = 10
# Where a training stops: what its agents are known to reach, not more.
TARGETS = {
    "CartPole-v1": 500.0,
    "Acrobot-v1": -80.0,
    "MountainCar-v0": -110.0,
    "LunarLander-v3": 220.0,
    navigation.ENV_ID: 9.5,
}


@dataclass(frozen=True)
class Agent:
    """One agent: published, or of our own making."""

    name: str
    env_id: str
    algorithm: str = ""
    """Of our own: the class of Stable-Baselines3 or sb3-contrib."""
    normalised: bool = False
    """Trained behind ``VecNormalize``."""
    steps: int = 0
    n_envs: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    """After those of RL Baselines3 Zoo; ``falling``: learning rate and clip range fall to zero."""
    falling: bool = False

    @property
    def published(self) -> bool:
        return not self.algorithm

    @property
    def folder(self) -> str:
        return "-".join(re.findall(r"\w+", self.name)).lower()


_WIDE = {"policy_kwargs": {"net_arch": [256, 256]}}
_CARTPOLE_Q = {
    "learning_rate": 2.3e-3,
    "batch_size": 64,
    "buffer_size": 100_000,
    "learning_starts": 1_000,
    "target_update_interval": 10,
    "train_freq": 256,
    "gradient_steps": 128,
    "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04,
    **_WIDE,
}
_ACROBOT_Q = {
    "learning_rate": 6.3e-4,
    "batch_size": 128,
    "buffer_size": 50_000,
    "learning_starts": 0,
    "target_update_interval": 250,
    "train_freq": 4,
    "gradient_steps": 4,
    "exploration_fraction": 0.12,
    "exploration_final_eps": 0.1,
    **_WIDE,
}
_MOUNTAINCAR_Q = {
    "learning_rate": 4e-3,
    "batch_size": 128,
    "buffer_size": 10_000,
    "learning_starts": 1_000,
    "gamma": 0.98,
    "target_update_interval": 600,
    "train_freq": 16,
    "gradient_steps": 8,
    "exploration_fraction": 0.2,
    "exploration_final_eps": 0.07,
    **_WIDE,
}
_CARTPOLE_PPO = {
    "n_steps": 32,
    "batch_size": 256,
    "gae_lambda": 0.8,
    "gamma": 0.98,
    "n_epochs": 20,
    "learning_rate": 1e-3,
    "clip_range": 0.2,
}
_ACROBOT_PPO = {"n_steps": 256, "gae_lambda": 0.94, "n_epochs": 4}
_NAVIGATION_PPO = {"n_steps": 128, "batch_size": 256, "gae_lambda": 0.95, "learning_rate": 1e-3}

_PUBLISHED = {env_id: Agent(f"PPO {env_id.partition('-')[0]}, published", env_id) for env_id in ZOO}
AGENTS = (  # short episodes first
    Agent("PPO Navigation", navigation.ENV_ID, "PPO", True, 200_000, 8, _NAVIGATION_PPO),
    Agent("DQN Navigation", navigation.ENV_ID, "DQN", True, 40_000, settings=_ACROBOT_Q),
    Agent("DQN MountainCar", "MountainCar-v0", "DQN", steps=120_000, settings=_MOUNTAINCAR_Q),
    Agent("QR-DQN MountainCar", "MountainCar-v0", "QRDQN", steps=120_000, settings=_MOUNTAINCAR_Q),
    _PUBLISHED["MountainCar-v0"],
    Agent("PPO Acrobot", "Acrobot-v1", "PPO", True, 300_000, 16, _ACROBOT_PPO),
    Agent("DQN Acrobot", "Acrobot-v1", "DQN", True, 60_000, settings=_ACROBOT_Q),
    Agent("QR-DQN Acrobot", "Acrobot-v1", "QRDQN", steps=60_000, settings=_ACROBOT_Q),
    Agent("A2C Acrobot", "Acrobot-v1", "A2C", True, 300_000, 16),
    _PUBLISHED["Acrobot-v1"],
    Agent("PPO CartPole", "CartPole-v1", "PPO", True, 100_000, 8, _CARTPOLE_PPO, falling=True),
    Agent("A2C CartPole", "CartPole-v1", "A2C", steps=200_000, n_envs=8),
    Agent("DQN CartPole", "CartPole-v1", "DQN", steps=50_000, settings=_CARTPOLE_Q),
    Agent("QR-DQN CartPole", "CartPole-v1", "QRDQN", steps=50_000, settings=_CARTPOLE_Q),
    _PUBLISHED["CartPole-v1"],
    Agent("DQN LunarLander", "LunarLander-v3", "DQN", steps=100_000, settings=_ACROBOT_Q),
    _PUBLISHED["LunarLander-v3"],
)
ROW_FILE = "row.json"


class AgentRow(TypedDict):
    """What became of one agent."""

    agent: str
    env: str
    normalised: bool
    eps: float
    random: float
    teacher: float
    teacher_sem: float
    student: float
    student_sem: float
    kept: float | None
    """Share of the teacher's skill on the test episodes: 1 is its return, 0 that of random play."""
    passed: bool
    reason: str | None
    certified: float
    """Share of the decisions of clean play at .1 standard deviations."""
    teacher_worst: float
    teacher_worst_sem: float
    teacher_attack: str
    student_worst: float
    student_worst_sem: float
    student_attack: str
    rung: int
    rungs: int
    minutes: float
    """Of the student, beside other work."""
    cpu_minutes: float | None
    """None if it was made in several sittings."""
    training: dict[str, Any] | None
    """Of an agent of our own: steps and best grade."""


class Absent(TypedDict):
    agent: str
    why: str


class Judgement(TypedDict):
    """The shares of agents that the page judges by."""

    agents: int
    passed: float
    certified: float | None
    held: float | None


class AgentsDocument(TypedDict):
    """results/agents.json."""

    schema: int
    table: str
    scale: str
    judgement: Judgement
    versions: dict[str, str]
    machine: dict[str, Any]
    skipped: list[Absent]
    rows: list[AgentRow]


def agents_table(
    scale: Scale = "cpu",
    task: str | None = None,
    out: Path = Path("results"),
    work: Path = Path("runs/agents"),
    teachers: Path | None = None,
    progress: Callable[[str], None] = print,
    agent: str | None = None,
) -> AgentsDocument:
    """Write ``agents.json`` into ``out``, agent by agent; what is finished is kept in ``work``. Of ``smoke`` the figures mean nothing."""
    chosen = [one for one in AGENTS if task in (None, one.env_id) and agent in (None, one.name)]
    if not chosen:
        known = ", ".join(dict.fromkeys([*(one.env_id for one in AGENTS), *(one.name for one in AGENTS)]))
        raise SortRLError(f"agents: none is called {agent!r} with task {task!r}; choose of {known}.")
    published, folder = find_teachers(teachers), work / scale
    document = _document(scale, folder, out, [])
    skipped: list[Absent] = []
    for one in chosen:
        place = folder / one.folder
        try:
            if not (place / ROW_FILE).exists():
                write_json(place / ROW_FILE, _row(one, place, published, scale == "smoke"))
        except (MissingDependency, FileNotFoundError) as error:
            skipped.append({"agent": one.name, "why": str(error)})
            progress(f"agents: {one.name}: skipped, {error}")
        document = _document(scale, folder, out, skipped)
        progress(f"agents: {one.name}: {len(document['rows'])} of {len(AGENTS)} done")
    return document


def _row(one: Agent, place: Path, published: Path | None, smoke: bool) -> AgentRow:
    source, training = (_published(one, published), None) if one.published else _trained(one, place / "agent", smoke)
    run = place / "run"
    fresh, started = not (run / RUN_FILE).exists(), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SortRLWarning)  # the row says it
        robustify(env=one.env_id, out=run, **source, **(_smoke(one.env_id) if smoke else {}))
    cpu = (time.process_time() - started) / 60 if fresh else None
    return _read(one, read_object(run / "results.json"), cpu, training)


def _smoke(env_id: str) -> dict[str, Any]:
    """To see that it works; the figures mean nothing. At the other scales no agent has a setting."""
    collect = replace(robustify_config(env_id, preset="auto").collect, states=600)
    measured = {"episodes": 2, "choose_episodes": 2, "suite_episodes": 2}
    return {"quick": True, "steps": 40, "collect": collect, "dagger_states": 200, **measured}


def _published(one: Agent, folder: Path | None) -> dict[str, Any]:
    archive, statistics = ZOO[one.env_id]
    if folder is None or not (folder / archive).exists():
        raise FileNotFoundError(f"{archive} is not here; name the folder of the published agents by SORTRL_TEACHERS")
    return {
        "teacher": folder / archive,
        "vecnormalize": None if statistics is None else folder / statistics,
        "allow_pickle": statistics is not None,
    }


def _trained(one: Agent, folder: Path, smoke: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The agent of a finished training, which is one stage: a user's zip, and its statistics where there are any."""
    from stable_baselines3 import A2C, DQN, PPO
    from stable_baselines3.common.callbacks import (
        BaseCallback,
        CallbackList,
        EvalCallback,
        StopTrainingOnRewardThreshold,
    )
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    try:
        from sb3_contrib import QRDQN
    except ImportError as error:
        raise MissingDependency("needs a package that is not installed: pip install sb3-contrib") from error
    archive, statistics, log = folder / "best_model.zip", folder / "vecnormalize.json", folder / "training.json"

    class KeepStatistics(BaseCallback):
        """Beside every new best agent, what its observations were normalised by."""

        def _on_step(self) -> bool:
            if one.normalised:
                save_normalizer(statistics, from_vecnormalize(self.model.get_vec_normalize_env()))
            return True

    def made(seed: int, training: bool) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it cannot be drawn
            env = make_vec_env(one.env_id, one.n_envs if training else 1, seed=seed)
        return VecNormalize(env, training=training, norm_reward=training) if one.normalised else env

    if not log.exists():
        steps = 2_000 if smoke else one.steps
        settings = dict(one.settings)
        if one.falling:
            for name in ("learning_rate", "clip_range"):
                settings[name] = (lambda first: lambda left: first * left)(settings[name])
        kind = {"PPO": PPO, "A2C": A2C, "DQN": DQN, "QRDQN": QRDQN}[one.algorithm]
        model = kind("MlpPolicy", made(0, True), seed=0, device="cpu", **settings)
        target = TARGETS.get(one.env_id)
        then = [KeepStatistics(), *([] if target is None else [StopTrainingOnRewardThreshold(target)])]
        look = EvalCallback(
            made(1_000, False),
            callback_on_new_best=CallbackList(then),
            n_eval_episodes=GRADE_EPISODES,
            eval_freq=max(1, steps // GRADES // one.n_envs),
            best_model_save_path=str(folder),
            verbose=0,
        )
        model.learn(steps, callback=look)
        write_json(log, {"steps": int(model.num_timesteps), "grade": float(look.best_mean_reward)})
    source = {"teacher": archive, "vecnormalize": statistics if one.normalised else None}
    return source, read_object(log)


def _read(one: Agent, results: Mapping[str, Any], cpu: float | None, training: dict[str, Any] | None) -> AgentRow:
    """The row of a finished run."""
    eps, gate, ladder = results["config"]["eps"], results["gate"], results["ladder"]
    rows: dict[str, list[EvalRow]] = {
        who: [row for row in results["evaluation"] if row["policy"] == who and row["eps"] in (0.0, eps)]
        for who in ("teacher", "student")
    }
    clean = {who: next(row for row in found if row["attack"] == "none") for who, found in rows.items()}
    worst = {who: min(found, key=lambda row: row["mean"]) for who, found in rows.items()}
    shares = dict(zip(results["certificate"]["eps"], results["certificate"]["share"], strict=True))
    return {
        "agent": one.name,
        "env": one.env_id,
        "normalised": one.normalised if not one.published else ZOO[one.env_id][1] is not None,
        "eps": eps,
        "random": gate["random"],
        "teacher": clean["teacher"]["mean"],
        "teacher_sem": clean["teacher"]["sem"],
        "student": clean["student"]["mean"],
        "student_sem": clean["student"]["sem"],
        "kept": gate["kept_test"],
        "passed": gate["passed"],
        "reason": gate["reason"],
        "certified": shares[CERTIFIED_AT],
        "teacher_worst": worst["teacher"]["mean"],
        "teacher_worst_sem": worst["teacher"]["sem"],
        "teacher_attack": worst["teacher"]["attack"],
        "student_worst": worst["student"]["mean"],
        "student_worst_sem": worst["student"]["sem"],
        "student_attack": worst["student"]["attack"],
        "rung": ladder["chosen"],
        "rungs": len(ladder["rungs"]),
        "minutes": sum(results["stage_seconds"].values()) / 60,
        "cpu_minutes": cpu,
        "training": training,
    }


def _document(scale: Scale, folder: Path, out: Path, skipped: list[Absent]) -> AgentsDocument:
    """The table as far as it is computed, in the order of ``AGENTS``; before the first row there is none to write."""
    rows: list[Any] = []
    for one in AGENTS:
        path = folder / one.folder / ROW_FILE
        if path.exists():
            rows.append(read_object(path))
    document: AgentsDocument = {
        "schema": 1,
        "table": "agents",
        "scale": scale,
        "judgement": judged(rows),
        "versions": provenance.versions(),
        "machine": provenance.machine(),
        "skipped": skipped,
        "rows": rows,
    }
    if rows:
        write_json(out / "agents.json", document)
    return document


def judged(rows: list[AgentRow]) -> Judgement:
    """What is asked for, measured: the share of agents that pass and, of those, what is certified and what holds."""
    passed = [row for row in rows if row["passed"]]
    certifiable = [row["certified"] >= CERTIFIED for row in passed if row["env"] in ASKED_TO_CERTIFY]
    held = [row["student_worst"] >= row["teacher_worst"] for row in passed]
    return {
        "agents": len(rows),
        "passed": len(passed) / len(rows) if rows else math.nan,
        "certified": sum(certifiable) / len(certifiable) if certifiable else None,
        "held": sum(held) / len(held) if held else None,
    }


def table_lines(document: AgentsDocument) -> list[str]:
    """The table in Markdown."""
    lines = [
        "| agent | own VecNormalize | teacher | student | skill kept | gate | certified at 0.1 "
        "| teacher, worst attack | student, worst attack | CPU minutes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        kept = "" if row["kept"] is None else f"{row['kept']:.1%}"
        worst = [
            f"{figure(row[f'{who}_worst'], row[f'{who}_worst_sem'])} ({row[f'{who}_attack']})"  # type: ignore[literal-required]
            for who in ("teacher", "student")
        ]
        cells = (
            row["agent"],
            "yes" if row["normalised"] else "no",
            figure(row["teacher"], row["teacher_sem"]),
            figure(row["student"], row["student_sem"]),
            kept,
            "passed" if row["passed"] else "**fired**",
            f"{row['certified']:.1%}",
            *worst,
            "" if row["cpu_minutes"] is None else f"{row['cpu_minutes']:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def judgement_line(document: AgentsDocument) -> str:
    """The shares beside what is asked for, as one sentence of Markdown."""
    found = document["judgement"]
    parts = [
        f"{name} {'of none' if share is None else f'{share:.0%}'} (asked for: {least:.0%})"
        for name, share, least in (
            ("the gate passed", found["passed"], PASSING),
            (f"of those, at least {CERTIFIED:.0%} of the decisions are certified in", found["certified"], CERTIFYING),
            (
                "and the student returns at least as much as its teacher under the worst attack in",
                found["held"],
                HOLDING,
            ),
        )
    ]
    tasks = ", ".join(name.partition("-")[0] for name in ASKED_TO_CERTIFY)
    return (
        f"**{found['agents']} of {len(AGENTS)} agents are computed: {'; '.join(parts)}.** Certified shares are asked for on {tasks}, at "
        f"{CERTIFIED_AT} standard deviations in clean play."
    )
