"""Robust training of ordinary networks beside its start and beside SortRL: every method from the same teacher, on the same episodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from torch import nn

from sortrl.attacks import PGD
from sortrl.baselines.interval_q.acr import acr
from sortrl.baselines.interval_q.making import NAMES, RECORD, make_baseline
from sortrl.baselines.interval_q.network import as_teacher
from sortrl.baselines.interval_q.starting import DistillationConfig, start_from
from sortrl.baselines.interval_q.training import TrainingConfig
from sortrl.core.files import locked, read_object, write_json
from sortrl.core.identity import fingerprint
from sortrl.core.pieces import Engine
from sortrl.core.progress import stage
from sortrl.evaluate.returns import evaluate
from sortrl.evaluate.suite import evaluate_suite
from sortrl.experiments.cells import CellTable, Facts, Found, TableDocument, figure, file_name
from sortrl.experiments.experts import expert, find_teachers
from sortrl.experiments.figure1 import Scale
from sortrl.nets import CertifiedPolicy, load_discrete, zoo
from sortrl.nets.base import FILE_NAME
from sortrl.nets.interval_policy import IntervalPolicy
from sortrl.runs.robustify import robustify
from sortrl.teachers import Teacher

# Whose agent, that of the zoo or the expert of a protocol of Figure 1, and which eps, in that agent's units. CartPole's expert of the
# paper's protocol sees raw observations, of which 0.2 is as much as the pole may lean at all.
TASKS: dict[str, tuple[Literal["zoo", "paper"], float]] = {"CartPole-v1": ("zoo", 0.1), "Acrobot-v1": ("paper", 0.1)}
ENTRIES = {"CartPole-v1": "cartpole"}
SEEDS = (0, 1, 2)
TEACHER, START = "teacher", "start"
SORTRL, SORTRL_BCL, SORTRL_RADIAL = "sortrl", "sortrl-bcl", "sortrl-radial"
STUDENTS = (SORTRL, SORTRL_BCL, SORTRL_RADIAL)
EPS_RISE = 0.5  # of the student with a curriculum
CLEAN, ATTACKED, WORST = "none", "PGD-10", "suite quick"
TITLES = {
    TEACHER: "PPO (teacher)",
    START: "Q-network distilled from it",
    "rs-dqn": "RS-DQN",
    "sa-dqn": "SA-DQN (convex)",
    "sa-dqn-pgd": "SA-DQN (PGD)",
    "radial-dqn": "RADIAL-DQN",
    "radial-ppo": "RADIAL-PPO",
    "wocar-dqn": "WocaR-DQN",
    "car-dqn": "CAR-DQN",
    "bcl-at": "BCL-AT",
    "bcl-mos-at": "BCL-MOS-AT",
    "bcl-radial": "BCL-RADIAL",
    "bcl-radial-at": "BCL-RADIAL+AT",
    SORTRL: "**SortRL** (student of the PPO teacher)",
    SORTRL_BCL: "**SortRL x BCL** (eps grows)",
    SORTRL_RADIAL: "**SortRL-RADIAL** (student of RADIAL-DQN)",
}


@dataclass(frozen=True)
class Size:
    """Of a scale: decisions of each training, episodes of each cell, how action values are distilled to start from, and what differs
    from the defaults when students are made."""

    decisions: int
    ppo_decisions: int
    episodes: int
    distillation: DistillationConfig
    students: dict[str, Any] = field(default_factory=dict)


SIZES = {
    "smoke": Size(
        400,
        1_024,
        2,
        DistillationConfig(decisions=800, updates=200),
        {"steps": 30, "states": 600, "dagger_rounds": 0},
    ),
    "cpu": Size(4_800, 24_576, 20, DistillationConfig(), {"states": 20_000, "dagger_states": 10_000}),
    "paper": Size(500_000, 2_000_000, 100, DistillationConfig()),
}


@dataclass(frozen=True)
class BaselineCell:
    """One agent under one condition."""

    game: str
    agent: str
    attack: str
    eps: float
    seed: int = 0

    @property
    def name(self) -> str:
        return file_name(self.game, self.agent, self.attack, self.seed)


def cells() -> list[BaselineCell]:
    """Of all tasks and seeds what PGD-10 does to every agent; then, of the first seed, what the whole suite does, which takes longest.
    The teacher is one."""
    rounds = [((CLEAN, ATTACKED), seed) for seed in SEEDS] + [((WORST,), SEEDS[0])]
    return [
        BaselineCell(task, agent, attack, 0.0 if attack == CLEAN else TASKS[task][1], seed)
        for attacks, seed in rounds
        for task in TASKS
        for agent in (TEACHER, START, *NAMES, *STUDENTS)
        if agent != TEACHER or seed == SEEDS[0]
        for attack in attacks
    ]


def baselines(
    scale: Scale = "cpu",
    task: str | None = None,
    out: Path = Path("results"),
    work: Path = Path("runs/baselines"),
    teachers: Path | None = None,
    progress: Callable[[str], None] = print,
    agent: str | None = None,
    engine: Engine | None = None,
) -> TableDocument:
    """Write ``baselines.json`` into ``out``, cell by cell; agents are trained into ``work`` where they are absent."""
    size, published = SIZES[scale], find_teachers(teachers)
    folder = work / scale
    facts: Facts = {"episodes": size.episodes, "eps": {name: eps for name, (_, eps) in TASKS.items()}}
    table = CellTable("baselines", scale, cells(), folder / "cells", out, facts)

    def teacher_of(cell: BaselineCell) -> Teacher:
        if TASKS[cell.game][0] == "zoo":
            return Teacher.load(zoo.entry(ENTRIES[cell.game]) / "teacher")
        return expert("paper", cell.game, work, published)

    def place_of(cell: BaselineCell) -> Path:
        return folder / "agents" / f"{cell.game}-{cell.agent}-{cell.seed}"

    def start_of(cell: BaselineCell) -> None:
        with stage(f"{TITLES[START]} on {cell.game}") as report:
            _values(teacher_of(cell), cell, folder, size.distillation, report)

    def agent_of(cell: BaselineCell) -> Teacher | CertifiedPolicy:
        eps, teacher, place = TASKS[cell.game][1], teacher_of(cell), place_of(cell)
        if cell.agent == TEACHER:
            return teacher
        if cell.agent == SORTRL_RADIAL:
            robust = agent_of(BaselineCell(cell.game, "radial-dqn", CLEAN, 0.0, cell.seed))
            assert isinstance(robust, IntervalPolicy)
            teacher = as_teacher(robust, f"RADIAL-DQN of {cell.game}")
        with locked(place, wait=True), stage(f"{TITLES[cell.agent]} on {cell.game}") as report:
            if cell.agent in STUDENTS:
                return _student(teacher, cell, eps, place, size.students)
            values = _values(teacher, cell, folder, size.distillation, report)
            if cell.agent == START:
                return values[0]
            decisions = size.ppo_decisions if cell.agent == "radial-ppo" else size.decisions
            return make_baseline(
                cell.agent, cell.game, teacher, eps, place, decisions, cell.seed, report, values, tests=0
            ).policy

    def compute(cell: BaselineCell, player: Teacher | CertifiedPolicy) -> Found:
        fields: Any = asdict(cell)
        if cell.attack == WORST:
            result = evaluate_suite(player, None, cell.game, "quick", (cell.eps,), size.episodes, cell.seed)
            worst = result.worst("student", cell.eps)
            return cast(Found, {**worst, "cell": fields, "worst_attack": worst["attack"]})
        attack = None if cell.attack == CLEAN else PGD(10)
        played = evaluate(player, cell.game, attack, cell.eps, size.episodes, cell.seed)
        found = cast(Found, {**played.to_json(), "cell": fields})
        if cell.attack == CLEAN and isinstance(player, CertifiedPolicy):
            eps = TASKS[cell.game][1]
            found["acr"] = acr(player, cell.game, eps, size.episodes, cell.seed)
            record = place_of(cell) / RECORD
            if record.exists():
                made = read_object(record)
                kept: Any = {
                    name: made[name] for name in ("start", "decisions", "minutes", "method", "config") if name in made
                }
                found |= kept
        return found

    def made_of(cell: BaselineCell, player: Teacher | CertifiedPolicy) -> dict[str, nn.Module]:
        return {f"{cell.agent} {cell.seed}": player}

    return table.fill(agent_of, compute, made_of, progress, task, agent, start_of=start_of, engine=engine)


def _values(
    teacher: Teacher,
    cell: BaselineCell,
    folder: Path,
    config: DistillationConfig,
    report: Callable[[dict[str, Any]], None],
) -> tuple[IntervalPolicy, str]:
    """The action values that all methods start from, distilled once for each teacher."""
    place = folder / "starts" / f"{cell.game}-{cell.seed}-{fingerprint(teacher)[:12]}"
    with locked(place, wait=True):
        if not (place / FILE_NAME).exists():
            start_from(teacher, cell.game, TrainingConfig.gamma, cell.seed, config, report)[0].save(place)
        return IntervalPolicy.load(place), "distilled from its play"


def _student(
    teacher: Teacher, cell: BaselineCell, eps: float, place: Path, settings: dict[str, Any]
) -> CertifiedPolicy:
    """A SortRL student by the preset ``fast``, kept with how long it took."""
    if not (place / FILE_NAME).exists():
        began, rise = time.monotonic(), EPS_RISE if cell.agent == SORTRL_BCL else 0.0
        made = robustify(teacher, cell.game, eps, preset="fast", seed=cell.seed, quiet=True, eps_rise=rise, **settings)
        write_json(
            place / RECORD, {"start": f"distilled from {teacher.name}", "minutes": (time.monotonic() - began) / 60}
        )
        made.save(place)
    return load_discrete(place)


def table_lines(results: TableDocument) -> list[str]:
    """The table in Markdown: means over seeds, and in brackets the lowest seed. Agents without a cell are left out."""
    lines = [
        "| task | ε | agent | seeds | clean | PGD-10 | worst of suite `quick` | certified (SortRL / SA-DQN / RADIAL) | decisions | minutes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    by_cell: dict[tuple[str, str, str], list[Found]] = {}
    for one in results["cells"]:
        by_cell.setdefault((one["cell"]["game"], one["cell"]["agent"], one["cell"]["attack"]), []).append(one)
    for task, eps in results["eps"].items():
        for agent, title in TITLES.items():
            clean, attacked, worst = (by_cell.get((task, agent, attack), []) for attack in (CLEAN, ATTACKED, WORST))
            if not clean:
                continue
            returns = [_of_seeds([found["mean"] for found in cells]) for cells in (clean, attacked, worst)]
            rates = [found["acr"] for found in clean if "acr" in found]
            shares = " / ".join(_rate([one[name] for one in rates]) for name in RATES) if rates else ""
            minutes = [found["minutes"] for found in clean if "minutes" in found]
            decisions = [found["decisions"] for found in clean if "decisions" in found]
            cost = f"{max(decisions):,}" if decisions else ""
            took = f"{np.mean(minutes):.1f}" if minutes else ""
            lines.append(
                f"| {task} | {eps:g} | {title} | {len(clean)} | {' | '.join(returns)} | {shares} | {cost} | {took} |"
            )
    return lines


RATES = ("SortRL", "SA-DQN", "RADIAL")


def _of_seeds(means: list[float]) -> str:
    """
    >>> _of_seeds([500.0, 470.0]), _of_seeds([500.0]), _of_seeds([])
    ('485.0 [470.0]', '500.0', '')
    """
    if not means:
        return ""
    return figure(float(np.mean(means))) + (f" [{figure(min(means))}]" if len(means) > 1 else "")


def _rate(shares: list[float]) -> str:
    return f"{np.mean(shares):.0%}" + (f" [{min(shares):.0%}]" if len(shares) > 1 else "")
