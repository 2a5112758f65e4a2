"""The main job: teacher -> data -> student (:mod:`sortrl.stages`) -> certificates and attacks -> report."""

from __future__ import annotations

import math
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sortrl import attacks, nets, provenance, report, zoo
from sortrl.certify import certificate_summary
from sortrl.config import Preset, RobustifyConfig, robustify_config
from sortrl.envs import describe
from sortrl.errors import SortRLError
from sortrl.evaluate import evaluate_curve
from sortrl.files import locked, read_json, read_object, write_json
from sortrl.nets import CertifiedPolicy
from sortrl.records import Policy, stored_rows
from sortrl.stages import TEST_SEED_OFFSET, Stages, plain
from sortrl.suite import LEARNED, evaluate_suite
from sortrl.teachers import Teacher
from sortrl.teachers.load import check_fit

SLOTS, IMAGE_SLOTS = 128, 64  # environments side by side
TRAINED_HERE = "trained here"  # in the place of a given teacher's name


def robustify(
    teacher: Any = None,
    env: str = "CartPole-v1",
    eps: float | None = None,
    *,
    preset: Preset = "fast",
    out: str | Path | None = None,
    seed: int = 0,
    vecnormalize: Any = None,
    allow_pickle: bool = False,
    command: str | None = None,
    quiet: bool = True,
    **changes: Any,
) -> CertifiedPolicy:
    """Turn an agent into a certified policy.

    Args:
        teacher: path of a Stable-Baselines3 zip or of a saved teacher, an SB3 model, a torch module, a callable on
            batches of observations, or None to train one.
        env: id of a Gymnasium environment with discrete actions.
        eps: l_inf size of the perturbations to resist, in the teacher's input units (default: the task's).
        preset: ``fast``, ``paper`` for the recipe as published, ``memory`` for a student that is not trained but
            remembers the teacher's best episodes (:mod:`sortrl.remember`; for tasks with few starts), or ``rounded`` for
            one that sees rounded pixels (:mod:`sortrl.rounding`; for images of few colours).
        out: directory for everything (teacher, data, policy, results.json, report.html). Without it nothing is kept,
            and the evaluation is left to you.
        seed: fixes the run on one machine and thread count.
        vecnormalize: observation statistics that belong to the teacher (a file or a VecNormalize).
        allow_pickle: accept a pickle there.
        command: what to print in the report as the command that made it.
        quiet: no progress on the terminal.
        changes: replace any field of ``RobustifyConfig`` or ``DistillConfig`` (of the preset ``rounded``: ``RoundingConfig``),
            for example ``steps=500``.
    """
    info = describe(env)
    config = robustify_config(info.env_id, eps, preset, train_teacher=teacher is None, **changes)
    _check_early(config, seed)
    if out is None:
        with tempfile.TemporaryDirectory(prefix="sortrl-") as scratch:
            run = Run(Path(scratch), info.env_id, config, seed, quiet)
            return run.student(run.teacher(teacher, vecnormalize, allow_pickle))
    with locked(Path(out)):
        run = Run(Path(out), info.env_id, config, seed, quiet)
        run.claim(_source_name(teacher))
        agent = run.teacher(teacher, vecnormalize, allow_pickle)
        policy = run.student(agent)
        results = run.results(
            policy, agent, _source_name(teacher), command or f"sortrl.robustify(env={env!r}, eps={config.eps})"
        )
        report.render(results, Path(out))
    return policy


class Run(Stages):
    """The stages of a run and, behind the policy, what is measured of it."""

    def evaluation(self, policies: dict[str, Policy]) -> list[dict[str, Any]]:
        """Returns of each policy along ``eps_grid``, kept curve by curve; the clean student also gives the certificate."""
        path = self.directory / "evaluation.json"
        rows = stored_rows(read_json(path), path) if path.exists() else []
        done = {(row["policy"], row["eps"]) for row in rows}
        attack = attacks.by_name(self.config.attack)
        slots = SLOTS if len(describe(self.env_id).obs_shape) == 1 else IMAGE_SLOTS
        for name, policy in policies.items():
            # A black box has no gradient to follow.
            grid = (0.0,) if getattr(policy, "algorithm", None) == "callable" else self.config.eps_grid
            grid = tuple(eps for eps in grid if (name, eps) not in done)
            if not grid:
                continue
            with self._stage("evaluate", f"Evaluating the {name} at eps {', '.join(f'{eps:g}' for eps in grid)}") as p:
                curve = evaluate_curve(
                    policy,
                    self.env_id,
                    attack,
                    grid,
                    self.config.episodes,
                    self.seed + TEST_SEED_OFFSET,
                    slots=slots,
                    name=name,
                    progress=p,
                )
            clean = next((result for result in curve if result.eps_unit == 0), None)
            if clean is not None and clean.radii is not None:
                write_json(self.directory / "certificate.json", certificate_summary(clean, self.config.eps))
            rows += [result.to_json() for result in curve]
            write_json(path, rows)
        return rows

    def strongest(self, policy: CertifiedPolicy, teacher: Teacher) -> list[dict[str, Any]]:
        """Returns of both at the eps that was trained for, under attacks of other kinds: one that fails proves nothing."""
        if not self.config.suite or self.config.eps == 0:
            return []
        with self._timed("attack"):
            result = evaluate_suite(
                policy,
                teacher,
                self.env_id,
                self.config.suite,
                (self.config.eps,),
                self.config.suite_episodes,
                self.seed + TEST_SEED_OFFSET,
                path=self.directory / "suite.json",
                adversary_steps=self.config.adversary_steps,
                quiet=self.quiet,
            )
        return [row for row in result.rows if row["eps"] > 0]

    def results(self, policy: CertifiedPolicy, teacher: Teacher, source: str, command: str) -> dict[str, Any]:
        """Evaluate what is not evaluated yet and write results.json, from which alone the report is made."""
        evaluation = self.evaluation({"teacher": teacher, "student": policy}) + self.strongest(policy, teacher)
        info, training = describe(self.env_id), read_object(self.directory / "training.json")
        units = info.raw_units(policy.normalizer.scale.numpy())
        results = {
            "schema": 1,
            "kind": "robustify",
            "sortrl": provenance.sortrl_version(),
            "command": command,
            "seed": self.seed,
            "started": read_object(self.directory / "run.json").get("started"),
            "stage_seconds": self.seconds,
            "versions": provenance.versions(),
            "machine": provenance.machine(),
            "env": {
                "id": self.env_id,
                "obs_shape": list(info.obs_shape),
                "obs_names": [name for name, _ in units],
                "unit_to_raw": [scale for _, scale in units],
                "n_actions": info.n_actions,
                "max_steps": info.max_steps,
            },
            "teacher": {"name": teacher.name, "algorithm": teacher.algorithm, "source": source},
            "config": plain(asdict(self.config)),
            "data": training.get("data"),
            "memory": read_json(memory) if (memory := self.directory / "memory.json").exists() else None,
            "policy": {
                "kind": policy.kind,
                "parameters": policy.parameter_count,
                "lipschitz": policy.lipschitz if math.isfinite(policy.lipschitz) else None,
                **plain(policy.describe()),
                # How many: which ones is in the policy's file.
                **({"pixels": len(policy.config.pixels)} if hasattr(policy.config, "pixels") else {}),
            },
            "training": training.get("history"),
            "evaluation": evaluation,
            "certificate": read_json(self.directory / "certificate.json"),
        }
        write_json(self.directory / "results.json", results)
        return results


def identity_of(directory: Path) -> dict[str, Any]:
    """What a run, or an entry of the zoo, was started with: env, seed, teacher, config."""
    directory = zoo.locate(directory)
    if not (directory / "run.json").exists():
        raise SortRLError(
            f"{directory} is not the directory of a run (no run.json). Make one with: sortrl robustify ENV --out {directory}"
        )
    identity = read_object(directory / "run.json").get("identity")
    if not isinstance(identity, dict):
        raise SortRLError(
            f"{directory / 'run.json'}: identity is {str(identity)[:60]}, expected an object. It is damaged."
        )
    return identity


def trained_eps(directory: Path) -> float:
    """The eps that the policy of a run was trained for."""
    config = identity_of(directory).get("config")
    eps = config.get("eps") if isinstance(config, dict) else None
    if not isinstance(eps, (int, float)) or not 0 <= eps < float("inf"):
        raise SortRLError(f"{directory / 'run.json'}: config.eps is {str(eps)[:60]}, expected a number. It is damaged.")
    return float(eps)


def open_run(directory: Path) -> tuple[str, CertifiedPolicy, Teacher | None]:
    """The environment, the policy and (if it was kept) the teacher of a run, or of an entry of the zoo."""
    directory = zoo.locate(directory)
    env_id = identity_of(directory).get("env")
    # A name with a module in front would have Gymnasium import that module: a file must not choose what is run.
    if not isinstance(env_id, str) or ":" in env_id:
        raise SortRLError(
            f"{directory / 'run.json'}: identity.env is {str(env_id)[:60]!r}, expected an environment's id."
        )
    folder = directory / "teacher"
    teacher = Teacher.load(folder) if (folder / "teacher.safetensors").exists() else None
    policy, info = nets.load(directory), describe(env_id)
    if policy.obs_shape != info.obs_shape or policy.n_actions != info.n_actions:
        raise SortRLError(
            f"{directory}: the policy sees {policy.obs_shape} and has {policy.n_actions} actions, but {env_id} has "
            f"{info.obs_shape} and {info.n_actions}. The files are not of one run."
        )
    if teacher is not None:
        check_fit(teacher, info)
    return env_id, policy, teacher


def _check_early(config: RobustifyConfig, seed: int) -> None:
    """What would otherwise fail after hours of training."""
    if not isinstance(seed, int) or not 0 <= seed < TEST_SEED_OFFSET:
        raise SortRLError(f"robustify: seed is {seed!r}, expected a whole number in 0..{TEST_SEED_OFFSET - 1}.")
    if config.polish is not None and not (config.rounding is not None and config.rounding.norm):
        raise SortRLError("robustify: polish needs a student that learns values: the preset 'rounded' with norm=True.")
    for name in (config.attack, *config.suite):
        if name != LEARNED:
            attacks.by_name(name)


def _source_name(teacher: Any) -> str:
    if teacher is None:
        return TRAINED_HERE
    return str(teacher) if isinstance(teacher, (str, Path)) else type(teacher).__name__
