"""Robust training of ordinary networks beside its start: every method from the same teacher, on the same episodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from torch import nn

from sortrl.attacks import PGD
from sortrl.baselines.interval_q.acr import acr
from sortrl.baselines.interval_q.making import NAMES, RECORD, make_baseline
from sortrl.baselines.interval_q.starting import DistillationConfig, start_from
from sortrl.baselines.interval_q.training import TrainingConfig
from sortrl.core.files import locked, read_object
from sortrl.core.identity import fingerprint
from sortrl.core.pieces import Engine
from sortrl.core.progress import stage
from sortrl.evaluate.returns import evaluate
from sortrl.evaluate.suite import evaluate_suite
from sortrl.experiments.cells import CellTable, Facts, Found, TableDocument, figure, file_name
from sortrl.experiments.experts import expert, find_teachers
from sortrl.experiments.figure1 import Scale
from sortrl.nets.base import FILE_NAME
from sortrl.nets.interval_policy import IntervalPolicy
from sortrl.teachers import Teacher

# Whose units (as Figure 1 has them) and which eps. CartPole's expert of the paper's protocol sees raw observations, of which 0.2 is
# as much as the pole may lean at all.
TASKS = {"CartPole-v1": ("normalised", 0.2), "Acrobot-v1": ("paper", 0.1), "MountainCar-v0": ("paper", 0.1)}
TEACHER, START = "teacher", "start"
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
}


@dataclass(frozen=True)
class Size:
    """Of a scale: decisions of each training, episodes of each cell, and how action values are distilled to start from."""

    decisions: int
    ppo_decisions: int
    episodes: int
    distillation: DistillationConfig


SIZES = {
    "smoke": Size(400, 1_024, 2, DistillationConfig(decisions=800, updates=200)),
    "cpu": Size(12_000, 61_440, 20, DistillationConfig()),
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
    """Of all tasks: what PGD-10 does to every agent, then what the whole suite does, which takes longest."""
    return [
        BaselineCell(task, agent, attack, 0.0 if attack == CLEAN else eps)
        for task, (_, eps) in TASKS.items()
        for attacks in ((CLEAN, ATTACKED), (WORST,))
        for agent in (TEACHER, START, *NAMES)
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

    def start_of(cell: BaselineCell) -> None:
        teacher = expert(TASKS[cell.game][0], cell.game, work, published)
        with stage(f"{TITLES[START]} on {cell.game}") as report:
            _values(teacher, cell, folder, size.distillation, report)

    def agent_of(cell: BaselineCell) -> Teacher | IntervalPolicy:
        protocol, eps = TASKS[cell.game]
        teacher = expert(protocol, cell.game, work, published)
        if cell.agent == TEACHER:
            return teacher
        place = folder / "agents" / f"{cell.game}-{cell.agent}-{cell.seed}"
        with locked(place, wait=True), stage(f"{TITLES[cell.agent]} on {cell.game}") as report:
            values = _values(teacher, cell, folder, size.distillation, report)
            if cell.agent == START:
                return values[0]
            decisions = size.ppo_decisions if cell.agent == "radial-ppo" else size.decisions
            return make_baseline(
                cell.agent, cell.game, teacher, eps, place, decisions, cell.seed, report, values
            ).policy

    def compute(cell: BaselineCell, player: Teacher | IntervalPolicy) -> Found:
        fields: Any = asdict(cell)
        if cell.attack == WORST:
            result = evaluate_suite(player, None, cell.game, "quick", (cell.eps,), size.episodes, cell.seed)
            worst = result.worst("student", cell.eps)
            return cast(Found, {**worst, "cell": fields, "worst_attack": worst["attack"]})
        attack = None if cell.attack == CLEAN else PGD(10)
        played = evaluate(player, cell.game, attack, cell.eps, size.episodes, cell.seed)
        found = cast(Found, {**played.to_json(), "cell": fields})
        if cell.attack == CLEAN and isinstance(player, IntervalPolicy):
            eps = TASKS[cell.game][1]
            found["acr"] = acr(player, cell.game, eps, size.episodes, cell.seed)
            record = folder / "agents" / f"{cell.game}-{cell.agent}-{cell.seed}" / RECORD
            if record.exists():
                made = read_object(record)
                kept: Any = {
                    name: made[name] for name in ("start", "decisions", "minutes", "method", "config") if name in made
                }
                found |= kept
        return found

    def made_of(cell: BaselineCell, player: Teacher | IntervalPolicy) -> dict[str, nn.Module]:
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
    if not (place / FILE_NAME).exists():
        start_from(teacher, cell.game, TrainingConfig.gamma, cell.seed, config, report)[0].save(place)
    return IntervalPolicy.load(place), "distilled from its play"


def table_lines(results: TableDocument) -> list[str]:
    """The table in Markdown; agents without a cell are left out."""
    lines = [
        "| task | ε | agent | clean | PGD-10 | worst of suite `quick` | certified (ACR: SortRL / SA-DQN / RADIAL) | decisions | minutes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    found = {(e["cell"]["game"], e["cell"]["agent"], e["cell"]["attack"]): e for e in results["cells"]}
    for task, eps in results["eps"].items():
        for agent, title in TITLES.items():
            by_attack = [found.get((task, agent, attack)) for attack in (CLEAN, ATTACKED, WORST)]
            clean = by_attack[0]
            if clean is None:
                continue
            returns = ["" if cell is None else figure(cell["mean"], cell["sem"]) for cell in by_attack]
            rates = clean.get("acr")
            shares = (
                "" if rates is None else " / ".join(f"{rates[name]:.1%}" for name in ("SortRL", "SA-DQN", "RADIAL"))
            )
            cost = f"{clean['decisions']:,} | {clean['minutes']:.1f}" if "minutes" in clean else " | "
            lines.append(f"| {task} | {eps:g} | {title} | {' | '.join(returns)} | {shares} | {cost} |")
    return lines
