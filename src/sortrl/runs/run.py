"""Opening a run: a directory that :func:`open_run` locks and claims.

There is one way to write to a run, :func:`open_run`, and one to look at a finished one, :func:`read_run`.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym

from sortrl import nets
from sortrl.core.errors import SortRLError
from sortrl.core.files import locked, read_object, remove_leftovers
from sortrl.core.identity import Identity, differences, fingerprint, named, plain
from sortrl.distill import in_units
from sortrl.envs import describe
from sortrl.envs.shapes import STACKED
from sortrl.nets import CertifiedPolicy, zoo
from sortrl.runs.config import RobustifyConfig
from sortrl.runs.stages import RUN_FILE, Claim, Run
from sortrl.teachers import Teacher
from sortrl.teachers.grading import LOG_FILE
from sortrl.teachers.load.load import check_fit
from sortrl.teachers.teacher import FILE_NAME as TEACHER_FILE
from sortrl.teachers.train_sb3 import STATE_FILE

TRAINED_HERE = "trained here"  # in the place of a given teacher's name
# Settings that change what is measured of a policy, and nothing about the policy: another value is measured, not refused.
MEASURED = tuple(
    f"config.{name}" for name in ("episodes", "eps_grid", "attack", "suite", "suite_episodes", "adversary_steps")
)
FOLDERS = (
    "teacher",
    "student",
    "candidate-*",
    "rung-*",
    "provisional-student-*",
    "hardened",
    "polished",
    "suite",
    "suite/*",
    "figures",
)
# What the stages after the teacher make.
PARTS = (
    *("data.safetensors", "plain.safetensors", "reference.json", "ladder.json"),
    *("dagger-*.safetensors", "search.*", "straighten.*", "steadying.safetensors"),
    *("policy.safetensors", "training.json", "memory.json", "choice.json"),
    *("evaluation.json", "certificate.json", "suite.json", "results.json"),
    *FOLDERS[1:-2],
)


@contextmanager
def open_run(
    directory: Path,
    env_id: str,
    config: RobustifyConfig,
    seed: int,
    teacher: Teacher | None,
    source: str | None = None,
    *,
    quiet: bool = True,
    shared: Path | None = None,
    module: str | None = None,
    wait: bool = False,
) -> Iterator[Run]:
    """Open a run to go on with it, or begin it: locked, and only if what lies in the directory belongs to it.

    ``teacher`` is the one given, None for one that the run trains; ``source`` says where it came from (default: its name).
    ``shared`` is where several runs keep what they make of the same teacher; ``module`` is the one that registers the environment.
    With ``wait``, another process that has the directory is waited for, not refused: workers that need the same student.
    """
    if teacher is None:
        source = TRAINED_HERE
    identity = {
        "env": env_id,
        "seed": seed,
        "teacher": teacher.name if source is None and teacher is not None else source,
        "teacher_weights": None if teacher is None else fingerprint(teacher),
        "config": config,
    }
    with open_claim(directory, plain(identity), module, wait) as claim:
        yield Run(claim, env_id, config, seed, quiet, shared)


@contextmanager
def open_claim(directory: Path, identity: Identity, module: str | None = None, wait: bool = False) -> Iterator[Claim]:
    """The directory of a run, locked and claimed for what ``identity`` says the run is."""
    with locked(directory, wait):
        for folder in (folder for name in FOLDERS for folder in directory.glob(name)):
            if folder.is_dir() and not folder.is_symlink():
                remove_leftovers(folder)
        claim = _claimed(directory, identity)
        if module is not None and claim.document.get("module") != module:
            claim.document["module"] = module  # told to whoever opens the run; never imported by that alone
            claim.write()
        yield claim


def _claimed(directory: Path, identity: Identity) -> Claim:
    """Write what the run is into its directory, unless parts of another run lie there.

    A claim of which nothing was made keeps nobody out: a command that failed at once can be corrected and given again.
    """
    path, parts = directory / RUN_FILE, [found.name for name in PARTS for found in directory.glob(name)]
    begun = {"identity": identity, "started": _now(), "stage_seconds": {}}
    if not path.exists():
        if parts:
            raise SortRLError(
                f"{directory} holds parts of a run ({', '.join(parts[:4])}) but no {RUN_FILE} that says of which. "
                "Choose another --out, or delete it to start over."
            )
        claim = Claim(directory, begun)
        claim.write()
        return claim
    claim = Claim(directory, read_object(path))
    stored = claim.document.get("identity")
    found = differences(stored, identity, ignored=MEASURED)
    was_trained = isinstance(stored, dict) and stored.get("teacher") == TRAINED_HERE
    if was_trained and identity["teacher"] != TRAINED_HERE:
        parts += [name for name in (STATE_FILE, LOG_FILE) if (directory / "teacher" / name).exists()]
    if found and parts:
        raise SortRLError(
            f"{directory} holds a run with other settings: {named(found)}. Choose another --out, or delete it to start over."
        )
    if found:
        if not was_trained:
            for name in (TEACHER_FILE, LOG_FILE):  # the copy of a teacher that is not this run's
                (directory / "teacher" / name).unlink(missing_ok=True)
        claim = Claim(directory, begun)
    taken = claim.document.get("stage_seconds")
    if not isinstance(taken, dict) or not all(isinstance(value, float) for value in taken.values()):
        raise SortRLError(f"{path}: stage_seconds is {str(taken)[:60]}, expected numbers. Delete {path}.")
    if stored != identity:
        claim.document["identity"] = identity
        claim.write()
    return claim


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


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


def read_run(directory: Path) -> tuple[str, CertifiedPolicy, Teacher | None]:
    """The environment, the policy and (if it was kept) the teacher of a run, or of an entry of the zoo: only to be looked at."""
    directory = zoo.locate(directory)
    env_id = identity_of(directory).get("env")
    # A name with a module in front would have Gymnasium import that module: a file must not choose what is run.
    if not isinstance(env_id, str) or ":" in env_id:
        raise SortRLError(
            f"{directory / 'run.json'}: identity.env is {str(env_id)[:60]!r}, expected an environment's id."
        )
    _check_known(directory, env_id)
    policy, info = nets.load_discrete(directory), describe(env_id)
    folder = zoo.teacher_folder(directory)
    teacher = None if folder is None else Teacher.load(folder)
    if policy.obs_shape != info.obs_shape or policy.n_actions != info.n_actions:
        raise SortRLError(
            f"{directory}: the policy sees {policy.obs_shape} and has {policy.n_actions} actions, but {env_id} has "
            f"{info.obs_shape} and {info.n_actions}. The files are not of one run."
        )
    if teacher is not None:
        check_fit(teacher, info)
        if len(info.obs_shape) == 1:  # kept as it was given; the student's units may be others
            teacher = in_units(teacher, policy.normalizer)
    return env_id, policy, teacher


def _check_known(directory: Path, env_id: str) -> None:
    """Say which module registers the environment, if it is not registered: opening a run imports nothing by itself."""
    module = read_object(directory / RUN_FILE).get("module")
    stacked = STACKED.fullmatch(env_id)
    if isinstance(module, str) and (stacked[2] if stacked else env_id) not in gym.registry:
        raise SortRLError(
            f"{directory} is a run of {env_id}, which the module {module[:100]} registers. Opening a run imports nothing by itself: if "
            f"you trust that module, add --import {module[:100]} (in Python, import it first)."
        )
