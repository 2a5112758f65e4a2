"""The card of a published policy: what it is, how it was measured, and the hash of every file; as JSON and for people."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

FORMAT = "sortrl-zoo-1"


def card_of(
    name: str,
    results: dict[str, Any],
    files: dict[str, str],
    agreement: float | None = None,
    training: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The card of a finished run: from its ``results.json``, the hash of every file, the share of states in which weights in half
    precision give the same action, and how the teacher was trained."""
    certificate = results["certificate"]
    shares = dict(zip(map(str, certificate["eps"]), certificate["share"], strict=True))
    columns = ("policy", "attack", "eps", "mean", "sem", "episodes")
    return {
        "format": FORMAT,
        "name": name,
        "env": results["env"]["id"],
        "teacher": results["teacher"]["name"],
        "teacher_training": training,
        "policy": results["policy"],
        "command": without_folders(results["command"]),
        "seed": results["seed"],
        "eps": results["config"]["eps"],
        "preset": results["config"]["preset"],
        "half_precision_agreement": agreement,
        "returns": [{column: row.get(column) for column in columns} for row in results["evaluation"]],
        "certified": shares,
        "sortrl": results["sortrl"],
        "versions": results["versions"],
        "machine": results["machine"],
        "files": files,
    }


def without_folders(command: str) -> str:
    """A command without the folders of the machine it ran on.

    >>> without_folders("sortrl robustify sortrl/Jumper-train-v0 --teacher /data/ppo.pt")
    'sortrl robustify sortrl/Jumper-train-v0 --teacher ppo.pt'
    """
    return " ".join(Path(part).name if Path(part).is_absolute() else part for part in command.split(" "))


def _origin(found: dict[str, Any]) -> str:
    if found.get("preset") == "memory":
        return f"a memory of the best episodes of {found['teacher']}: the nearest neighbour in l_inf among their states"
    if found.get("preset") == "thresholds":
        return f"distilled from {found['teacher']} on pixels compared with thresholds in the gaps between their values"
    return f"distilled from {found['teacher']} for perturbations of l_inf size {found['eps']:g} in the policy's input units"


def _measured(found: dict[str, Any]) -> list[str]:
    """Returns and certified shares, and the command that they come from."""
    if not found["returns"]:
        return ["Returns were not measured; the certificates hold regardless.", ""]
    rows = [
        f"| {row['policy']} | {row['attack']} | {row['eps']:g} | {row['mean']:.1f} ± {row['sem']:.1f} |"
        for row in found["returns"]
    ]
    shares = {float(eps): share for eps, share in found["certified"].items()}
    wanted = sorted({row["eps"] for row in found["returns"] if row["eps"] <= max(shares)})
    proven = ", ".join(f"{_share_at(shares, eps)} at {eps:g}" for eps in wanted)
    return [
        "| policy | attack | eps | return (mean ± SEM) |",
        "|---|---|---|---|",
        *rows,
        "",
        f"Share of the states of clean episodes whose action is proven: {proven}.",
        "",
        f"- made by `{found['command']}`, seed {found['seed']}, sortrl {found['sortrl']}",
    ]


def _first_line(found: dict[str, Any]) -> str:
    if found.get("env") is None:
        policy = found["policy"]
        return f"A certified policy for observations of shape {policy['obs_shape']} and {policy['n_actions']} actions."
    return f"A certified policy for `{found['env']}`, {_origin(found)}."


def _teacher_lines(training: dict[str, Any] | None) -> list[str]:
    if training is None:
        return []
    hours = f", {training['hours']:.1f} hours" if "hours" in training else ""
    had = f"had {training['return']:.1f} after {training['step']:,} steps of"
    if "imitates" in training:
        return [*_teacher_lines(training["imitates"]), f"- it {had} imitating the best of its own tries"]
    return [f"- the teacher {had} training{hours}"]


def _share_at(shares: dict[float, float], eps: float) -> str:
    """What is certified at the next larger eps that the card has is certified at this one too; never rounded up."""
    share = shares[min(size for size in shares if size >= eps)]
    return f"{math.floor(share * 1000) / 10:.1f}%"


def card_text(found: dict[str, Any], name: str | None = None) -> str:
    """The card for people; ``name`` is what the policy is loaded by [zoo:NAME]."""
    name = name or f"zoo:{found['name']}"
    agreement = found.get("half_precision_agreement")
    precision = (
        "single precision"
        if agreement is None
        else f"half precision (same action in {agreement:.2%} of the training states)"
    )
    return "\n".join(
        [
            f"# {name}",
            "",
            _first_line(found),
            "",
            "```python",
            "import sortrl",
            "",
            f'policy = sortrl.load("{name}")',
            "```",
            "",
            *_measured(found),
            *_teacher_lines(found.get("teacher_training")),
            f"- {found['policy']['parameters']} parameters, weights in {precision}",
            *([f"- its teacher: `zoo/teachers/{shared['name']}`"] if (shared := found.get("shared_teacher")) else []),
            *(f"- sha256 of `{file}`: `{digest}`" for file, digest in found["files"].items()),
            "",
        ]
    )


def model_card(found: dict[str, Any], name: str) -> str:
    """:func:`card_text` with the front matter that the Hugging Face Hub reads: tags, and the clean return of the policy."""
    env = found.get("env")
    front: dict[str, Any] = {
        "library_name": "sortrl",
        "tags": ["reinforcement-learning", "certified-robustness", "sortrl", *([env] if env else [])],
    }
    clean = [row for row in found["returns"] if row["policy"] == "student" and row["eps"] == 0]
    if env and clean:
        value = f"{clean[0]['mean']:.2f} +/- {clean[0]['sem']:.2f}"
        result = {
            "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
            "dataset": {"name": env, "type": env},
            "metrics": [{"type": "mean_reward", "name": "mean_reward", "value": value, "verified": False}],
        }
        front["model-index"] = [{"name": found["name"], "results": [result]}]
    lines = [f"{key}: {json.dumps(value)}" for key, value in front.items()]  # JSON is YAML
    return "\n".join(["---", *lines, "---", "", card_text(found, name)])
