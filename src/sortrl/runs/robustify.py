"""The main job: teacher -> data -> student -> certificates and attacks (:mod:`sortrl.runs.run`) -> report."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from sortrl import attacks, report
from sortrl.attacks.valid import check_eps
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_object
from sortrl.envs import describe
from sortrl.evaluate.suite import LEARNED
from sortrl.nets import CertifiedPolicy
from sortrl.runs.config import Preset, RobustifyConfig, robustify_config
from sortrl.runs.run import TRAINED_HERE, open_run
from sortrl.runs.stages import TEST_SEED_OFFSET
from sortrl.teachers.grading import LOG_FILE
from sortrl.teachers.load.load import load_teacher


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
            remembers the teacher's best episodes (:mod:`sortrl.baselines.memory.remember`; for tasks with few starts), or ``rounded`` for
            one that sees rounded pixels (:mod:`sortrl.baselines.thresholds.distill`; for images of few colours).
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
    given, log, source = None, None, _source_name(teacher)
    if teacher is not None:
        # Before a run is opened for it, which would then be there for nothing. Where actions are merged, the student learns the
        # agent's own greedy play.
        given = load_teacher(teacher, info.env_id, vecnormalize=vecnormalize, allow_pickle=allow_pickle, merge="max")
        check_eps(given, info, config.eps)
        log = _log_of(teacher)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="sortrl-")) if out is None else None
        folder = Path(scratch or out or "")
        run = stack.enter_context(open_run(folder, info.env_id, config, seed, given, source, quiet=quiet))
        agent = run.teacher(given, log)
        policy = run.student(agent)
        if scratch is None:
            said = command or f"sortrl.robustify(env={env!r}, eps={config.eps})"
            report.render(run.results(policy, agent, source, said), folder)
    return policy


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


def _log_of(teacher: Any) -> dict[str, Any] | None:
    """How a saved teacher was trained, if that lies beside it."""
    path = Path(teacher) / LOG_FILE if isinstance(teacher, (str, Path)) else None
    return read_object(path) if path is not None and path.is_file() else None
