"""What is measured of a run's policy and its teacher: returns, attacks of other kinds, certificates; and results.json."""

from __future__ import annotations

import math
from typing import Any, TypedDict

import numpy as np
from typing_extensions import NotRequired

from sortrl import attacks
from sortrl.certify import certificate_summary
from sortrl.certify.shares import CertificateSummary
from sortrl.core.checkpoint import damage_named
from sortrl.core.files import read_json, read_object, write_json
from sortrl.core.identity import plain
from sortrl.core.records import EvalRow, Policy, stored_rows
from sortrl.distill import LadderRecipe, in_units
from sortrl.distill.ladder import LADDER_FILE, Skill, gate
from sortrl.envs import describe
from sortrl.evaluate import provenance
from sortrl.evaluate.returns import evaluate_curve
from sortrl.evaluate.suite import evaluate_suite
from sortrl.nets import CertifiedPolicy
from sortrl.runs.stages import TEST_SEED_OFFSET, Run
from sortrl.teachers import Teacher

ADVICE = (
    "Try more data and training (--states 200000 --steps 4000), a smaller --eps, or --keep with less to ask for; check that the "
    "teacher has the normalisation that belongs to it (--vecnormalize)."
)
SLOTS, IMAGE_SLOTS = 128, 64  # environments side by side


class RunResults(TypedDict):
    """results.json of a run; :mod:`sortrl.report.model` validates what it reads of it."""

    schema: int
    kind: str
    sortrl: str
    command: str
    seed: int
    started: str | None
    stage_seconds: dict[str, float]
    versions: dict[str, str]
    machine: dict[str, Any]
    env: dict[str, Any]
    teacher: dict[str, Any]
    config: dict[str, Any]
    data: dict[str, Any] | None
    policy: dict[str, Any]
    student: dict[str, str]
    training: list[dict[str, Any]] | None
    evaluation: list[EvalRow]
    certificate: CertificateSummary
    memory: NotRequired[dict[str, Any]]
    """Of a nearest-neighbour student: how it was made small."""
    ladder: NotRequired[dict[str, Any]]
    """Of the preset ``auto``: the students that were tried."""
    gate: NotRequired[dict[str, Any]]
    """Whether the student may be relied on."""


def evaluation(run: Run, policies: dict[str, Policy]) -> list[EvalRow]:
    """Returns of each policy along ``eps_grid``, kept curve by curve; the clean student also gives the certificate."""
    path = run.directory / "evaluation.json"
    attack = attacks.by_name(run.config.attack)
    rows = [
        row
        for row in (stored_rows(read_json(path), path) if path.exists() else [])
        if row.get("episodes") == run.config.episodes  # others are measured again
        and row["eps"] in run.config.eps_grid
        and row["attack"] == (attack.name if row["eps"] > 0 else "none")
    ]
    done = {(row["policy"], row["eps"]) for row in rows}
    slots = SLOTS if len(describe(run.env_id).obs_shape) == 1 else IMAGE_SLOTS
    for name, policy in policies.items():
        # A black box has no gradient to follow.
        grid = (0.0,) if getattr(policy, "algorithm", None) == "callable" else run.config.eps_grid
        grid = tuple(eps for eps in grid if (name, eps) not in done)
        if not grid:
            continue
        with run.stage("evaluate", f"Evaluating the {name} at eps {', '.join(f'{eps:g}' for eps in grid)}") as p:
            curve = evaluate_curve(
                policy,
                run.env_id,
                attack,
                grid,
                run.config.episodes,
                run.seed + TEST_SEED_OFFSET,
                slots=slots,
                name=name,
                progress=p,
            )
        clean = next((result for result in curve if result.eps_unit == 0), None)
        if clean is not None and clean.radii is not None:
            write_json(run.directory / "certificate.json", certificate_summary(clean, run.config.eps))
        rows += [result.to_json() for result in curve]
        rows.sort(key=lambda row: ([*policies].index(row["policy"]), row["eps"]))
        write_json(path, rows)
    return rows


def strongest(run: Run, policy: CertifiedPolicy, teacher: Teacher) -> list[EvalRow]:
    """Returns of both at the eps that was trained for, under attacks of other kinds: one that fails proves nothing."""
    if not run.config.suite or run.config.eps == 0:
        return []
    with run.timed("attack"):
        result = evaluate_suite(
            policy,
            teacher,
            run.env_id,
            run.config.suite,
            (run.config.eps,),
            run.config.suite_episodes,
            run.seed + TEST_SEED_OFFSET,
            path=run.directory / "suite.json",
            adversary_steps=run.config.adversary_steps,
            quiet=run.quiet,
            again=True,
        )
    # The attack along eps_grid has its row already, over more episodes.
    known = attacks.by_name(run.config.attack).name if run.config.eps in run.config.eps_grid else None
    return [row for row in result.rows if row["eps"] > 0 and row["attack"] != known]


def verdict(run: Run, rows: list[EvalRow] | None = None) -> dict[str, Any] | None:
    """Whether the student may be relied on: results.json's ``gate``. None for recipes that do not measure what skill is kept.

    Skill must be kept on the validation episodes and, if ``rows`` of the test episodes are given, on those too.
    """
    path = run.directory / LADDER_FILE
    if not isinstance(run.config.student, LadderRecipe) or not path.exists():
        return None
    with damage_named(path, "Delete the run's directory to start over."):
        return _judged(read_object(path), read_object(run.directory / "training.json")["data"], rows)


def _judged(ladder: dict[str, Any], data: dict[str, Any], rows: list[EvalRow] | None) -> dict[str, Any]:
    chosen = next(rung for rung in ladder["rungs"] if rung["rung"] == ladder["chosen"])
    measured = [("validation", ladder["teacher"], chosen["clean"])]
    if rows is not None:
        clean = {row["policy"]: row["mean"] for row in rows if row["attack"] == "none"}
        measured.append(("test", clean["teacher"], clean["student"]))
    found: dict[str, Any] = {"passed": True, "reason": None, "keep": ladder["keep"], "random": ladder["random"]}
    found |= {"agreement": data["agreement"], "commonest_action": data["commonest_action"]}
    for episodes, teacher, student in measured:
        skill = Skill(ladder["random"], np.array([teacher]))
        kept = skill.kept(np.array([student]))
        reason = gate(kept, data["agreement"], data["commonest_action"], skill, ladder["keep"])
        found[f"kept_{episodes}"] = None if math.isnan(kept) else kept
        if reason is not None and found["passed"]:
            found |= {"passed": False, "reason": f"{reason} ({episodes} episodes)", "advice": ADVICE}
    return found


def results(run: Run, policy: CertifiedPolicy, teacher: Teacher, source: str, command: str) -> RunResults:
    """Evaluate what is not evaluated yet and write results.json, from which alone the report is made."""
    if run.config.units != "teacher":
        teacher = in_units(teacher, policy.normalizer)
    rows = evaluation(run, {"teacher": teacher, "student": policy})
    judged = verdict(run, rows)
    rows += strongest(run, policy, teacher)
    info, training = describe(run.env_id), read_object(run.directory / "training.json")
    units = info.raw_units(policy.normalizer.scale.numpy())
    document: RunResults = {
        "schema": 1,
        "kind": "robustify",
        "sortrl": provenance.sortrl_version(),
        "command": command,
        "seed": run.seed,
        "started": run.claim.document.get("started"),
        "stage_seconds": run.claim.seconds,
        "versions": provenance.versions(),
        "machine": provenance.machine(),
        "env": {
            "id": run.env_id,
            "obs_shape": list(info.obs_shape),
            "obs_names": [name for name, _ in units],
            "unit_to_raw": [scale for _, scale in units],
            "n_actions": info.n_actions,
            "max_steps": info.max_steps,
        },
        "teacher": {"name": teacher.name, "algorithm": teacher.algorithm, "source": source},
        "config": plain(run.config),
        "data": training.get("data"),
        "policy": {
            "kind": policy.kind,
            "parameters": policy.parameter_count,
            "lipschitz": policy.lipschitz if math.isfinite(policy.lipschitz) else None,
            **plain(policy.describe()),
            # How many: which ones is in the policy's file.
            **({"pixels": len(policy.config.pixels)} if hasattr(policy.config, "pixels") else {}),
        },
        "student": policy.explain(),
        "training": training.get("history"),
        "evaluation": rows,
        "certificate": read_json(run.directory / "certificate.json"),
    }
    if judged is not None:
        document["gate"] = judged
    document |= run.config.student.describe(run.directory)  # type: ignore[typeddict-item]
    write_json(run.directory / "results.json", document)
    return document
