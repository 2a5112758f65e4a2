"""Figure 1: return against eps under PGD-10 on the four classic tasks.

Two protocols, because the paper leaves the units of eps open. "paper": the published experts of the RL Baselines3 Zoo,
eps in their own input units (raw for CartPole and LunarLander, normalised for Acrobot and MountainCar).
"normalised": teachers with observation normalisation, eps in standard deviations.

The work is cut into units (protocol, task, agent, seed, adversary), each kept in a file of its own: a stopped reproduction
continues, and a finished one is only drawn again. Units that stand in the figure already, even from another machine,
are kept as well, as long as their settings are the current ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sortrl import attacks
from sortrl.attacks import suite
from sortrl.certify import certified_shares
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_json, read_object, write_json
from sortrl.core.identity import differences, fingerprint, plain
from sortrl.core.pieces import Engine, Piece, run_pieces
from sortrl.core.records import Policy
from sortrl.evaluate import provenance
from sortrl.evaluate.returns import evaluate_curve
from sortrl.evaluate.suite import evaluate_suite
from sortrl.experiments.experts import expert, find_teachers
from sortrl.nets import CertifiedPolicy
from sortrl.report.figures import panels, save
from sortrl.runs import tasks as known
from sortrl.runs.config import RobustifyConfig, robustify_config
from sortrl.runs.measure import SLOTS
from sortrl.runs.run import open_run
from sortrl.teachers import Teacher

Scale = Literal["smoke", "cpu", "paper"]
PROTOCOLS = ("paper", "normalised")
TASKS = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "LunarLander-v3")
EPS_GRID = tuple(round(0.02 * k, 2) for k in range(11))


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
    """eps at which the expert and the first student are also evaluated under all attacks."""
    suite_protocols: tuple[str, ...] = PROTOCOLS
    adversary_steps: int = 200_000
    """Training steps of the learned adversary against each of them."""
    changes: tuple[tuple[str, Any], ...] = ()
    suite: str | tuple[str, ...] = "full"
    """The attack suite, or names of attacks."""


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
TEST_SEED = 1500  # settings were chosen on the episodes of other seeds
SUITE_COLUMNS = (
    "policy",
    "attack",
    "eps",
    "mean",
    "sem",
    "iqm",
    "iqm_interval",
    "changed_share",
    "queries",
    "gradients",
)
STYLES = {
    "expert": ("#0072b2", "o", "expert (PPO)"),
    "ours": ("#d55e00", "s", "sortrl"),
    "paper": ("#009e73", "^", "recipe as printed"),
}


@dataclass(frozen=True)
class Unit:
    """One agent and its evaluation: PGD-10 at every eps, or the whole attack suite (on its expert too) at some eps."""

    protocol: str
    task: str
    agent: Literal["expert", "ours", "paper"]
    seed: int
    adversary: Literal["pgd", "suite"] = "pgd"

    @property
    def name(self) -> str:
        return f"{self.protocol}-{self.task}-{self.agent}-{self.seed}-{self.adversary}"


def units(plan: Plan, tasks: tuple[str, ...], protocols: tuple[str, ...] = PROTOCOLS) -> list[Unit]:
    """All units; experts first, because students learn from them, and suites last, because they meet trained students."""
    pairs = [(protocol, task) for protocol in protocols for task in tasks]
    experts = [Unit(protocol, task, "expert", 0) for protocol, task in pairs]
    ours = [Unit(protocol, task, "ours", seed) for seed in range(plan.seeds) for protocol, task in pairs]
    printed = [
        Unit("paper", task, "paper", s) for s in range(plan.paper_seeds) for task in tasks if "paper" in protocols
    ]
    suites = [Unit(protocol, task, "ours", 0, "suite") for protocol, task in pairs if protocol in plan.suite_protocols]
    return experts + ours + printed + suites


def config_of(unit: Unit, plan: Plan) -> RobustifyConfig:
    """How the student of a unit is made."""
    task = known.TASKS[unit.task]
    settings = task.figure1.get(unit.protocol, {})
    if unit.agent == "paper":
        changes = {name: value for name, value in plan.changes if name != "dagger_rounds"}
        eps = task.printed_eps or settings.get("eps")
        return robustify_config(unit.task, eps, "paper", train_teacher=False, **changes)
    return robustify_config(unit.task, train_teacher=False, **{**settings, **dict(plan.changes)})


def agent_of(unit: Unit, plan: Plan, work: Path, folder: Path, published: Path | None) -> Teacher | CertifiedPolicy:
    """The expert, or the student of it: trained now, continued, or read back."""
    teacher = expert(unit.protocol, unit.task, work, published)
    if unit.agent == "expert":
        return teacher
    directory = folder / "students" / f"{unit.protocol}-{unit.task}-{unit.agent}-{unit.seed}"
    config, shared = config_of(unit, plan), _shared(unit, folder)
    with open_run(directory, unit.task, config, unit.seed, teacher, shared=shared, wait=True) as run:
        return run.student(teacher)


def _shared(unit: Unit, folder: Path) -> Path:
    """Folder of what depends on the expert only, shared by the students of all seeds."""
    return folder / "teachers" / f"{unit.protocol}-{unit.task}-{unit.agent}"


def compute(unit: Unit, plan: Plan, work: Path, folder: Path, published: Path | None) -> dict[str, Any]:
    """Train (unless it is the expert) and evaluate one unit; the result is plain JSON."""
    agent = agent_of(unit, plan, work, folder, published)
    config = None if unit.agent == "expert" else plain(config_of(unit, plan))
    teacher = expert(unit.protocol, unit.task, work, published)
    found = {"unit": asdict(unit), "config": config, "expert": fingerprint(teacher)}
    if unit.adversary != "pgd":
        return {**found, **_under_suites(unit, plan, agent, teacher, folder)}
    printed = unit.agent == "paper"
    episodes, grid = (plan.paper_episodes, plan.paper_eps_grid) if printed else (plan.episodes, plan.eps_grid)
    curve = evaluate_curve(agent, unit.task, attacks.PGD(10), grid, episodes, TEST_SEED, slots=SLOTS, name=unit.agent)
    shares = None
    if curve[0].radii is not None:
        shares = dict(zip(map(str, EPS_GRID), certified_shares(curve[0], EPS_GRID), strict=True))
    rows = [result.to_json() for result in curve]
    return {**found, "rows": rows, "acr": shares}


def _under_suites(unit: Unit, plan: Plan, student: Policy, teacher: Policy, folder: Path) -> dict[str, Any]:
    """The worst of all attacks, and of those that the paper and its rivals report, on student and expert.

    Rows of the expert are reused for other students of the same expert.
    """
    path, known = folder / "suites" / f"{unit.name}.json", _known_expert(unit, folder)
    expert_rows = read_json(known) if known.exists() else []
    full = evaluate_suite(
        student,
        teacher,
        unit.task,
        plan.suite,
        plan.suite_eps_grid,
        plan.suite_episodes,
        TEST_SEED,
        path=path,
        adversary_steps=plan.adversary_steps,
        play=("student",) if expert_rows else ("student", "teacher"),
    )
    full = replace(full, rows=(*full.rows, *expert_rows))
    worst = {}
    for name, members in (("PGD-10", {"PGD-10"}), ("paper", {*suite("paper", teacher)}), ("full", None)):
        part = [row for row in full.rows if members is None or row["attack"] in {*members, "none"}]
        worst[name] = replace(full, rows=tuple(part)).to_json()["worst"]
    every: tuple[Mapping[str, object], ...] = full.rows
    rows = [{key: row[key] for key in SUITE_COLUMNS} for row in every]
    return {"rows": rows, "worst": worst}


def fig1(
    scale: Scale = "cpu",
    task: str | None = None,
    out: Path = Path("results"),
    work: Path = Path("runs/fig1"),
    teachers: Path | None = None,
    progress: Callable[[str], None] = print,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Compute what is missing, of one task or of all, then write ``fig1.json`` and ``fig1.png`` into ``out``."""
    if task is not None and task not in TASKS:
        raise SortRLError(f"Figure 1 has no task {task!r}; choose one of {', '.join(TASKS)}.")
    plan, published = PLANS[scale], find_teachers(teachers)
    folder = work / scale
    wanted = units(plan, TASKS)
    _keep_earlier(wanted, plan, folder, earlier_units(out / "fig1.json", scale))

    def missing() -> list[Unit]:
        return [unit for unit in wanted if task in (None, unit.task) and not (folder / f"{unit.name}.json").exists()]

    def drop_others(piece: Piece[tuple[str, str]], mark: str) -> None:
        _drop_others(wanted, *piece.what, mark, published is not None, folder)

    experts = [Piece(" ".join(pair), pair) for pair in dict.fromkeys((unit.protocol, unit.task) for unit in missing())]
    run_pieces(lambda pair: fingerprint(expert(*pair, work, published)), experts, drop_others, engine, "fig1, experts")
    todo = missing()
    progress(f"fig1: {len(wanted)} units, {len(todo)} to be computed now")
    curves = {unit.name for unit in todo if unit.adversary == "pgd"}

    def publish() -> dict[str, Any]:
        there = [unit for unit in wanted if (folder / f"{unit.name}.json").exists()]
        results = assemble(there, plan, folder, scale, published is not None)
        write_json(out / "fig1.json", results)
        draw(results, out / "fig1.png")
        progress(f"fig1: {out / 'fig1.json'} and {out / 'fig1.png'} written, {len(there)} of {len(wanted)} units")
        return results

    def done(piece: Piece[Unit], found: dict[str, Any]) -> None:
        write_json(folder / f"{piece.name}.json", found)
        progress(f"fig1: {piece.name} done")
        curves.discard(piece.name)
        if (
            not curves and piece.what.adversary == "pgd"
        ):  # suites take as long again: the figure is drawn before and after
            publish()

    # Suites meet students that are trained for the curves.
    pieces = [Piece(unit.name, unit, after=(replace(unit, adversary="pgd").name,)) for unit in todo]
    run_pieces(lambda unit: compute(unit, plan, work, folder, published), pieces, done, engine, "fig1")
    return publish()


def earlier_units(path: Path, scale: str) -> list[dict[str, Any]]:
    """The units of a figure as it was last written; none if there is no such file."""
    if not path.exists():
        return []
    figure = read_object(path)
    if figure.get("scale") != scale:
        raise SortRLError(
            f"{path} is a figure of scale {figure.get('scale')}; one of scale {scale} needs another --out."
        )
    found = figure.get("units")
    if not isinstance(found, list) or not all(isinstance(u, dict) and isinstance(u.get("unit"), dict) for u in found):
        raise SortRLError(f"{path} is not a figure made of units. Delete it, or name another --out.")
    return found


def is_current(stored: dict[str, Any] | None, config: RobustifyConfig | None) -> bool:
    """Whether the stored settings of a unit equal the current ones.

    >>> from sortrl.runs.config import robustify_config
    >>> from sortrl.core.identity import plain
    >>> config = robustify_config("CartPole-v1", 0.2, train_teacher=False)
    >>> stored = plain(config)
    >>> del stored["start_radius"]
    >>> is_current(stored, config), is_current(stored, robustify_config("CartPole-v1", 0.1, train_teacher=False))
    (True, False)
    """
    return not differences(stored, config)


def _keep_earlier(wanted: list[Unit], plan: Plan, folder: Path, earlier: list[dict[str, Any]]) -> None:
    """Give those units that an earlier figure has, with today's settings, the files of their own that they lack.

    Files of other settings are removed.
    """
    for unit in wanted:
        path, config = folder / f"{unit.name}.json", None if unit.agent == "expert" else config_of(unit, plan)
        if path.exists() and not is_current(read_json(path).get("config"), config):
            path.unlink()
        same = [entry for entry in earlier if entry["unit"] == asdict(unit) and is_current(entry.get("config"), config)]
        if same and not path.exists():
            write_json(path, same[0])
        if unit.adversary == "suite" and not same:
            rows = [row for entry in earlier if entry["unit"] == asdict(unit) for row in entry["rows"]]
            known = [row for row in rows if row["policy"] == "teacher"]
            if known:
                write_json(_known_expert(unit, folder), known)


def _known_expert(unit: Unit, folder: Path) -> Path:
    """What is known of the expert under the attacks of a suite, from a figure whose student was another one."""
    return folder / "suites" / f"{unit.name}-expert.json"


def _drop_others(wanted: list[Unit], protocol: str, task: str, mark: str, published: bool, folder: Path) -> None:
    """Remove units of another expert: trained on another machine, it may be a little different, and so are its students."""
    mine = [unit for unit in wanted if (unit.protocol, unit.task) == (protocol, task)]
    for unit in mine:
        path = folder / f"{unit.name}.json"
        named = read_json(path).get("expert") if path.exists() else mark
        # Older units do not name theirs: then only a published one is surely the same.
        if named != mark and not (named is None and protocol == "paper" and published):
            path.unlink()
            for other in mine:
                _known_expert(other, folder).unlink(missing_ok=True)


def summary(results: dict[str, Any]) -> list[str]:
    """The curves as lines of text."""
    return [
        f"{protocol:<11}{task:<16}{agent:<8}"
        + "  ".join(f"{point['eps']:g}: {point['mean']:.0f}" for point in found["curve"])
        for protocol, by_task in results["curves"].items()
        for task, agents in by_task.items()
        for agent, found in agents.items()
    ]


def assemble(wanted: list[Unit], plan: Plan, folder: Path, scale: str, published: bool) -> dict[str, Any]:
    """One document with every unit and, per curve, the mean over seeds."""
    found = [read_json(folder / f"{unit.name}.json") for unit in wanted]
    curves: dict[str, Any] = {}
    for unit in wanted:
        agents = curves.setdefault(unit.protocol, {}).setdefault(unit.task, {})
        group = [entry for entry in found if _same_curve(entry["unit"], unit)]
        if unit.adversary != "pgd":
            for agent, policy in (("ours", "student"), ("expert", "teacher")):
                agents[agent]["suites"] = {
                    name: [point for point in worst if point["policy"] == policy]
                    for name, worst in group[0]["worst"].items()
                }
            continue
        curve = [_mean_over_seeds([entry["rows"][i] for entry in group]) for i in range(len(group[0]["rows"]))]
        acr = [entry["acr"] for entry in group if entry["acr"]]
        agents[unit.agent] = {
            "curve": curve,
            "acr": {eps: float(np.mean([a[eps] for a in acr])) for eps in acr[0]} if acr else None,
            "suites": {},
        }
    return {
        "schema": 1,
        "figure": "fig1",
        "scale": scale,
        "protocol": "PGD-10 with steps of eps / 10 from the clean state, clipped to the declared range of observations; "
        f"{plan.episodes} episodes per point, greedy, seed {TEST_SEED}; spread: SEM over episodes of all seeds",
        "suites_protocol": f"the worst mean return over the attacks of a suite, {plan.suite_episodes} episodes per attack and point; "
        "the expert and the first student",
        "experts_of_paper_protocol": "RL Baselines3 Zoo (published)" if published else "trained here",
        "plan": asdict(plan),
        "versions": provenance.versions(),
        "machine": provenance.machine(),
        "curves": curves,
        "units": found,
    }


def _same_curve(entry: dict[str, Any], unit: Unit) -> bool:
    return all(entry[key] == getattr(unit, key) for key in ("protocol", "task", "agent", "adversary"))


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


def draw(results: dict[str, Any], path: Path) -> None:
    """The figure: a row per protocol, a column per task, mean and standard error against eps."""
    curves = results["curves"]
    tasks = list(dict.fromkeys(task for protocol in curves.values() for task in protocol))
    figure, axes = panels(len(curves), len(tasks), sharey="col")
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
                worst = by_task[task][agent]["suites"].get("full")
                if worst:
                    eps, mean = (np.array([point[key] for point in worst]) for key in ("eps", "mean"))
                    axis.plot(
                        eps,
                        mean,
                        color=colour,
                        marker=marker,
                        markersize=4.5,
                        fillstyle="none",
                        linestyle=":",
                        linewidth=1.2,
                        label=f"{label}, worst of all attacks",
                    )
            axis.set_title(f"{task} · {protocol}", fontsize=9)
            if row == len(curves) - 1:
                axis.set_xlabel("ε (the agent's input units)", fontsize=8)
            if column == 0:
                axis.set_ylabel("return under attack (line: PGD-10)", fontsize=8)
    # Below the panels, where it covers no curve; each label once, whichever panels have it.
    shown = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    columns = max(1, len(shown))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    save(figure, path)
