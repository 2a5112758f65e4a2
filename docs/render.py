"""Put the tables of results/*.json into README.md and the pages of docs, between their markers, and draw the picture of the demo.

`python docs/render.py` rewrites them. results/cartpole.json comes from
`sortrl robustify CartPole-v1 --json results/cartpole.json`, results/bench.json from `make bench`, results/fig1.json from
`sortrl reproduce fig1`. docs/assets/demo.gif comes from
`sortrl watch zoo:breakout --beside-teacher --eps 0.075 --out docs/assets/demo.gif`.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from sortrl.core.files import write_text
from sortrl.experiments import (
    agents_judgement,
    agents_lines,
    atari,
    baseline_lines,
    bench,
    compute_lines,
    continuous_table_lines,
    leaderboard,
    procgen,
    teachers_lines,
)
from sortrl.experiments.cells import figure
from sortrl.report.charts import episode_chart
from sortrl.report.figures import save_png
from sortrl.report.model import read_run

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
AGENTS = {"expert": "expert (PPO)", "ours": "**sortrl**", "paper": "recipe as printed"}
NBSP = "\u00a0"  # keeps a figure on one line
# What the tables' JSON calls the agents, and what the documentation does.
PLAIN_NAMES = {
    "**sortrl, rounded**": "**threshold student**",
    "**sortrl, memory**": "**nearest-neighbour student**",
    "Jumper, sortrl, memory": "Jumper, nearest-neighbour student",
    "Coinrun, sortrl, memory": "Coinrun, nearest-neighbour student",
    "PQN, 4 brightnesses": "PQN, 4 grey levels",
}


def summary_table() -> str:
    """One line per domain, or two where one would flatter: teacher and student, clean and attacked, and the certified share."""
    lines = [
        "| task | student | ε | teacher's return | student's return | certified |",
        "|---|---|---|---|---|---|",
    ]
    for protocol, task in (("paper", "Acrobot-v1"), ("normalised", "LunarLander-v3")):
        agents = _results("fig1")["curves"][protocol][task]
        returns = [_arrow(*(_at(agents[agent]["curve"], eps) for eps in (0.0, 0.1))) for agent in ("expert", "ours")]
        lines.append(f"| {task} | SortNet | 0.1 | {' | '.join(returns)} | {_percent(agents['ours']['acr']['0.1'])} |")
    run, eps = _results("breakout"), 0.15
    rows = {(row["policy"], row["eps"]): row["mean"] for row in run["evaluation"] if _on_curve(row)}
    returns = [_arrow(rows[policy, 0.0], rows[policy, eps]) for policy in ("teacher", "student")]
    share = dict(zip(run["certificate"]["eps"], run["certificate"]["share"], strict=True))[eps]
    lines.append(f"| MinAtar Breakout | SortNet | {eps} | {' | '.join(returns)} | {_percent(share)} |")
    procgen_cells = [entry for entry in _results("table2")["cells"] if entry["cell"]["levels"] == "eval"]
    returns = [_arrow(*_cells(procgen_cells, "Coinrun", agent, 5)) for agent in ("PPO", "sortrl")]
    share = _certified(procgen_cells, "Coinrun", "sortrl", 5)
    lines.append(
        f"| ProcGen CoinRun, unseen levels | SortNet with head | 5/255 | {' | '.join(returns)} | {_percent(share)} |"
    )
    cells = _results("table1")["cells"]
    for game in atari.GAMES:
        if {entry["cell"]["level"] for entry in cells if _is_student(entry, game)} < set(atari.LEVELS):
            continue
        returns = [_arrow(*_cells(cells, game, agent, 5)) for agent in (atari.TEACHER, atari.STUDENT)]
        share = _certified(cells, game, atari.STUDENT, 5)
        lines.append(f"| Atari {game} | SortNet | 5/255 | {' | '.join(returns)} | {_percent(share)} |")
    return "\n".join(lines)


def _is_student(entry: dict[str, Any], game: str) -> bool:
    return (entry["cell"]["game"], entry["cell"]["agent"]) == (game, atari.STUDENT)


def _results(name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((ROOT / "results" / f"{name}.json").read_text())
    return results


def _at(curve: list[dict[str, Any]], eps: float) -> float:
    return next(float(point["mean"]) for point in curve if point["eps"] == eps)


def _percent(share: float) -> str:
    return f"{math.floor(100 * share)} %"  # never rounded up


def _arrow(clean: float, attacked: float) -> str:
    digits = 1 if abs(clean) < 10 else 0
    return f"{clean:.{digits}f}{NBSP}→{NBSP}{attacked:.{digits}f}"


def _cells(cells: list[dict[str, Any]], game: str, agent: str, level: int) -> tuple[float, float]:
    """Clean return, and that under PGD-10 at level / 255."""
    found = {
        entry["cell"]["level"]: float(entry["mean"])
        for entry in cells
        if (entry["cell"]["game"], entry["cell"]["agent"]) == (game, agent)
        and entry["cell"]["attack"].lower() in ("none", "pgd-10")
    }
    return found[0], found[level]


def _certified(cells: list[dict[str, Any]], game: str, agent: str, level: int) -> float:
    """Share of the states of clean episodes that is certified at level / 255."""
    clean = (game, agent, "none")
    return next(
        float(entry["certified"][str(level)])
        for entry in cells
        if (entry["cell"]["game"], entry["cell"]["agent"], entry["cell"]["attack"]) == clean
    )


def fig1_table(results: dict[str, Any]) -> str:
    """Returns of expert and student at four sizes of perturbation, and the certified share at 0.1."""
    lines = [
        "| protocol | task | agent | clean | ε = .06 | ε = .1 | ε = .2 | certified at ε = .1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for protocol, tasks in results["curves"].items():
        for task, agents in tasks.items():
            for agent, curve in agents.items():
                points = {point["eps"]: point for point in curve["curve"]}
                cells = [f"{points[eps]['mean']:.0f} ± {points[eps]['sem']:.0f}" for eps in (0.0, 0.06, 0.1, 0.2)]
                share = "" if curve["acr"] is None else f"{curve['acr']['0.1']:.0%}"
                lines.append(f"| {protocol} | {task} | {AGENTS[agent]} | {' | '.join(cells)} | {share} |")
    return "\n".join(lines)


def suites_table(results: dict[str, Any]) -> str:
    """What PGD-10 alone would have made believe, and what the worst of more attacks leaves of it."""
    lines = [
        "| protocol | task | agent | ε | PGD-10 | worst of the paper's attacks | worst of all attacks |",
        "|---|---|---|---|---|---|---|",
    ]
    for protocol, tasks in results["curves"].items():
        for task, agents in tasks.items():
            for agent in ("expert", "ours"):
                suites = agents[agent]["suites"]
                for pgd, paper, full in zip(
                    *(suites.get(name, []) for name in ("PGD-10", "paper", "full")), strict=True
                ):
                    cells = [f"{pgd['mean']:.0f}", *(_worst(point) for point in (paper, full))]
                    lines.append(f"| {protocol} | {task} | {AGENTS[agent]} | {pgd['eps']:g} | {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else "(being computed)"


def _worst(point: dict[str, Any]) -> str:
    """The mean, and which attack it is of; where none did harm there is none to name."""
    return f"{point['mean']:.0f}" + ("" if point["attack"] == "none" else f" ({point['attack']})")


def bench_table(results: dict[str, Any]) -> str:
    machine = results["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['isa']}, torch {machine['torch']}:"
    return f"{where}\n\n{bench.table(results).strip()}"


def run_table(results: dict[str, Any]) -> str:
    """Teacher and student of a run, clean and attacked, with the share of states that is certified."""
    image = len(results["env"].get("obs_shape", [])) == 3
    unit = "where black is 0 and white is 1" if image else "in standard deviations"
    lines = [f"| {results['env']['id']}, ε {unit} | " + " | ".join(_levels(results)) + " |"]
    lines.append("|---" * (1 + len(_levels(results))) + "|")
    levels = _levels(results)
    for policy in ("teacher", "student"):
        rows = {f"{row['eps']:g}": row for row in results["evaluation"] if row["policy"] == policy and _on_curve(row)}
        lines.append(
            f"| {policy}: return under PGD-10 | " + " | ".join(f"{rows[e]['mean']:.0f}" for e in levels) + " |"
        )
        others = [row for row in results["evaluation"] if row["policy"] == policy and not _on_curve(row)]
        if others:
            worst = min(others, key=lambda row: float(row["mean"]))
            cells = [f"{worst['mean']:.0f} ({worst['attack']})" if e == f"{worst['eps']:g}" else "" for e in levels]
            lines.append(f"| {policy}: worst of {len(others)} other attacks | " + " | ".join(cells) + " |")
    grid = dict(zip(results["certificate"]["eps"], results["certificate"]["share"], strict=True))
    shares = [f"{grid[float(eps)]:.0%}" for eps in levels]
    lines.append("| student: states certified | " + " | ".join(shares) + " |")
    return "\n".join(lines)


def _levels(results: dict[str, Any]) -> list[str]:
    return [f"{row['eps']:g}" for row in results["evaluation"] if row["policy"] == "student" and _on_curve(row)]


def _on_curve(row: dict[str, Any]) -> bool:
    """Whether a row belongs to the curve along eps rather than to the other attacks at one eps."""
    return row["attack"] in ("none", "PGD-10")


def certificates_table(results: dict[str, Any]) -> str:
    """How much of the distance to a real counter-example each rung certifies, in the median over states."""
    lines = [
        "| task | states | half the margin | intervals | complete search | brackets within tolerance |",
        "|---|---|---|---|---|---|",
    ]
    for task, found in results["tasks"].items():
        rungs = found["ladder"]
        medians = [rungs[f"{name}_of_upper"]["median"] for name in ("margin", "interval", "exact_lower")]
        shares = [f"{math.floor(median * 1000) / 10:.1f}%" for median in medians]  # never rounded up
        states = len(rungs["margin"])
        lines.append(f"| {task} | {states} | {' | '.join(shares)} | {rungs['solved_share']:.0%} |")
    return "\n".join(lines)


def atari_table(results: dict[str, Any]) -> str:
    return "\n".join(atari.table_lines(results))


def teachers_table(results: dict[str, Any]) -> str:
    """What the first teachers of Atari cost, from the cards of the students that learned from them, beside their clean returns."""
    lines = ["| game | steps | frames | hours, beside other work | clean return |", "|---|---|---|---|---|"]
    for entry in results["cells"]:
        cell, card = entry["cell"], ROOT / "zoo" / f"{entry['cell']['game'].lower()}-memory" / "card.json"
        if (cell["agent"], cell["attack"]) == (atari.TEACHER, "none") and card.exists():
            cost = json.loads(card.read_text())["teacher_training"]
            numbers = f"{cost['step']:,} | {4 * cost['step']:,} | {cost['hours']:.1f}"
            lines.append(f"| {cell['game']} | {numbers} | {figure(entry['mean'], entry['sem'])} |")
    return "\n".join(lines)


def sticky_table(results: dict[str, Any]) -> str:
    return "\n".join(atari.sticky_lines(results))


def procgen_table(results: dict[str, Any]) -> str:
    return "\n".join(procgen.table_lines(results))


def other_attacks_table(results: dict[str, Any]) -> str:
    return "\n".join(procgen.other_attacks_lines(results))


def compute_table(results: dict[str, Any]) -> str:
    return "\n".join(compute_lines(results))


def baselines_table(results: dict[str, Any]) -> str:
    return "\n".join(baseline_lines(results))


def agents_table(results: dict[str, Any]) -> str:
    """Agents that no setting was made for: what their students kept, and what holds under attack."""
    return "\n".join([*agents_lines(results), "", agents_judgement(results)])


def images_table(results: dict[str, Any]) -> str:
    """Median radii where there are too many pixels for a complete search: what the valid range adds."""
    lines = [
        "| task, median radius | states | half the margin | intervals | intervals, valid pixels only | smallest attack found |",
        "|---|---|---|---|---|---|",
    ]
    for task, found in results["images"].items():
        medians = [found["medians"][name] for name in ("margin", "interval", "clipped", "attack")]
        cells = [f"{math.floor(median * 1000) / 1000:.3f}" for median in medians]
        lines.append(f"| {task} | {found['states']} | {' | '.join(cells)} ({found['attack']}) |")
    return "\n".join(lines)


def reached_table(results: dict[str, Any]) -> str:
    """What the Atari teachers reach, beside what was aimed at."""
    return "\n".join(teachers_lines(results))


def leaderboard_table() -> str:
    """The agents measured by the frozen protocols, with the filters that docs/assets/leaderboard.js brings to life."""
    folder = ROOT / leaderboard.FOLDER
    return leaderboard.page(leaderboard.read_board(folder)) if folder.is_dir() else ""


def protocols_table() -> str:
    """What each protocol fixes."""
    return "\n".join(leaderboard.protocol_lines())


def continuous_table(results: dict[str, Any]) -> str:
    """Returns and bounds of agents with continuous actions."""
    return "\n".join(continuous_table_lines(results))


TABLES = {
    "agents": ("agents", agents_table),
    "cartpole": ("cartpole", run_table),
    "breakout": ("breakout", run_table),
    "certificates": ("certificates", certificates_table),
    "images": ("certificates", images_table),
    "fig1": ("fig1", fig1_table),
    "suites": ("fig1", suites_table),
    "table1": ("table1", atari_table),
    "teachers84": ("table1", teachers_table),
    "teachers": ("teachers", reached_table),
    "table1-sticky": ("table1", sticky_table),
    "table2": ("table2", procgen_table),
    "table2-attacks": ("table2", other_attacks_table),
    "table3": ("table3", atari_table),
    "table4": ("table4", procgen_table),
    "compute": ("compute", compute_table),
    "baselines": ("baselines", baselines_table),
    "bench": ("bench", bench_table),
    "continuous": ("continuous", continuous_table),
}


# Made from several files, or from the code.
WITHOUT_FILE = {"summary": summary_table, "leaderboard": leaderboard_table, "protocols": protocols_table}


def rendered(text: str) -> str:
    """Text with every table made anew; a table without its results file stays empty."""
    tables = {**WITHOUT_FILE}
    for name, (source, table) in TABLES.items():
        path = ROOT / "results" / f"{source}.json"
        tables[name] = (lambda path=path, table=table: table(json.loads(path.read_text()))) if path.exists() else str
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.S)
        if pattern.search(text):
            body = _plain(table())
            text = pattern.sub(lambda match, body=body: match[1] + body + "\n" * bool(body) + match[2], text)
    return text


def _plain(table: str) -> str:
    for name, words in PLAIN_NAMES.items():
        table = table.replace(name, words)
    return table.replace(" ± ", f"{NBSP}±{NBSP}")


def draw_picture() -> None:
    """The radius of every decision of one episode of the demo's student."""
    chart = episode_chart(read_run(json.loads((ROOT / "results" / "cartpole.json").read_text())))
    if chart is not None:
        save_png(
            chart,
            ROOT / "results" / "cartpole.png",
            "CartPole-v1: one episode",
        )


if __name__ == "__main__":
    draw_picture()
    for page in PAGES:
        write_text(page, rendered(page.read_text()))
