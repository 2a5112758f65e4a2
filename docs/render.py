"""Put the tables of results/*.json into README.md, between their markers. `python docs/render.py` rewrites the file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sortrl import bench
from sortrl.files import write_text

ROOT = Path(__file__).resolve().parents[1]


def fig1_table(results: dict[str, Any]) -> str:
    """Returns of expert and student at four sizes of perturbation, and the certified share at 0.1."""
    lines = [
        "| protocol | task | agent | clean | ε = .06 | ε = .1 | ε = .2 | certified at ε = .1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = {"expert": "expert (PPO)", "ours": "**sortrl**", "paper": "recipe as printed"}
    for protocol, tasks in results["curves"].items():
        for task, agents in tasks.items():
            for agent, curve in agents.items():
                points = {point["eps"]: point for point in curve["curve"]}
                cells = [f"{points[eps]['mean']:.0f} ± {points[eps]['sem']:.0f}" for eps in (0.0, 0.06, 0.1, 0.2)]
                share = "" if curve["acr"] is None else f"{curve['acr']['0.1']:.0%}"
                lines.append(f"| {protocol} | {task} | {names[agent]} | {' | '.join(cells)} | {share} |")
    return "\n".join(lines)


def bench_table(results: dict[str, Any]) -> str:
    return bench.table(results).strip()


TABLES = {"fig1": fig1_table, "bench": bench_table}


def rendered(text: str) -> str:
    """README text with every table made anew; a table without its results file stays empty."""
    for name, table in TABLES.items():
        path = ROOT / "results" / f"{name}.json"
        body = table(json.loads(path.read_text())) + "\n" if path.exists() else ""
        pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.S)
        text = pattern.sub(lambda match, body=body: match[1] + body + match[2], text)
    return text


if __name__ == "__main__":
    write_text(ROOT / "README.md", rendered((ROOT / "README.md").read_text()))
