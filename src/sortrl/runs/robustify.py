"""The main job: teacher -> data -> student -> certificates and attacks (:mod:`sortrl.runs.run`) -> report."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from pathlib import Path
from typing import Any

from sortrl import attacks, report
from sortrl.attacks.valid import check_eps, too_wide
from sortrl.core.errors import SortRLError, SortRLWarning
from sortrl.core.files import read_object
from sortrl.core.progress import Tracker
from sortrl.core.tracking import Kind, tracking
from sortrl.envs import EnvInfo, describe, env_id_of, is_continuous
from sortrl.evaluate.suite import LEARNED
from sortrl.nets import CertifiedPolicy, ContinuousPolicy
from sortrl.runs.config import Preset, RobustifyConfig, robustify_config
from sortrl.runs.continuous import ContinuousSettings, continuous_settings, robustify_continuous
from sortrl.runs.measure import results, verdict
from sortrl.runs.run import TRAINED_HERE, open_run
from sortrl.runs.stages import TEST_SEED_OFFSET
from sortrl.teachers.grading import LOG_FILE
from sortrl.teachers.load.load import load_teacher

MOST_NAMED = 12  # sensors that an error names


def robustify(
    teacher: Any = None,
    env: Any = "CartPole-v1",
    eps: float | None = None,
    *,
    preset: Preset | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    vecnormalize: Any = None,
    allow_pickle: bool = False,
    command: str | None = None,
    quiet: bool = False,
    track: Kind | Tracker | None = None,
    **changes: Any,
) -> CertifiedPolicy | ContinuousPolicy:
    """Turn an agent into a certified policy; one with continuous actions into a :class:`sortrl.nets.ContinuousPolicy`.

    Args:
        teacher: path of a Stable-Baselines3 zip or of a saved teacher, an SB3 model, a torch module, a callable on
            batches of observations, or None to train one.
        env: a Gymnasium environment: its id, ``module:id`` to import a module first (the run remembers it),
            a function that makes one, or a ``VecEnv`` of Stable-Baselines3, whose ``VecNormalize`` and ``VecFrameStack`` count.
        eps: l_inf size of the perturbations to resist. For the preset ``auto`` in standard deviations of each sensor, 0.1 by
            default; ``units="teacher"`` or ``units="raw"`` state it in the teacher's input units or the environment's own. For
            other presets in the teacher's input units (default: the task's).
        preset: ``auto`` (the default for observations that are vectors) distils a short ladder of students and keeps the most
            certified one that keeps the teacher's skill; if none does, it warns (:class:`sortrl.core.errors.SortRLWarning`).
            ``fast`` (the default for images), one student with the task's own settings; ``paper`` for the recipe as published;
            ``memory`` for a student that is not trained but remembers the teacher's best episodes
            (:mod:`sortrl.baselines.memory.remember`; for tasks with few starts); ``thresholds`` for one that sees rounded pixels
            (:mod:`sortrl.baselines.thresholds.distill`; for images of few colours).
        out: directory for everything (teacher, data, policy, results.json, report.html). Without it nothing is kept,
            and the evaluation is left to you.
        seed: fixes the run on one machine and thread count.
        vecnormalize: observation statistics that belong to the teacher (a file or a VecNormalize).
        allow_pickle: accept a pickle there.
        command: what to print in the report as the command that made it.
        quiet: no progress on the terminal.
        track: where measurements of every stage go besides: ``csv`` (``progress.csv`` in ``out``), ``wandb``, ``mlflow``, or a function
            of the stage's title and a row of numbers.
        changes: the other options of the command line, by the same names: ``units``, ``sensor_eps`` (raw sizes, one per
            sensor), ``keep`` (share of the teacher's skill, 0.95), ``quick`` (one rung of the ladder), ``states``, ``steps``,
            ``episodes``, ``harden``, ``candidates``; or any other field of ``RobustifyConfig`` or ``DistillConfig`` (of the preset
            ``thresholds``: ``ThresholdConfig``), for example ``steps=500``.
    """
    env_id = env_id_of(env)
    if is_continuous(env_id):
        settings = continuous_settings(eps, preset=None if preset == "auto" else preset, **changes)
        vecnormalize = _statistics(env) if vecnormalize is None else vecnormalize
        return _continuous(teacher, env_id, settings, out, seed, vecnormalize, allow_pickle, command, quiet, track)
    info = describe(env_id)
    preset = preset or default_preset(info)
    config = robustify_config(info.env_id, eps, preset, train_teacher=teacher is None, **changes)
    _check_early(config, seed, info)
    vecnormalize = _statistics(env) if vecnormalize is None else vecnormalize
    given, log, source = None, None, _source_name(teacher)
    if teacher is not None:
        # Before a run is opened for it, which would then be there for nothing. Where actions are merged, the student learns the
        # agent's own greedy play.
        given = load_teacher(teacher, info.env_id, vecnormalize=vecnormalize, allow_pickle=allow_pickle, merge="max")
        if config.units == "teacher":
            check_eps(given, info, config.eps)
        log = _log_of(teacher)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="sortrl-")) if out is None else None
        folder = Path(scratch or out or "")
        stack.enter_context(tracking(track, folder, info.env_id if scratch else folder.name))
        run = stack.enter_context(
            open_run(folder, info.env_id, config, seed, given, source, quiet=quiet, module=_module(env_id))
        )
        agent = run.teacher(given, log)
        policy = run.student(agent)
        if scratch is None:
            said = command or f"sortrl.robustify(env={env_id!r}, eps={config.eps})"
            found = results(run, policy, agent, source, said)
            report.render(found, folder)
            judged = found.get("gate")
        else:
            judged = verdict(run)
    if judged is not None and not judged["passed"]:
        warnings.warn(
            f"Do not rely on this policy: {judged['reason']}. {judged['advice']}", SortRLWarning, stacklevel=2
        )
    return policy


def _continuous(
    teacher: Any,
    env_id: str,
    settings: ContinuousSettings,
    out: str | Path | None,
    seed: int,
    vecnormalize: Any,
    allow_pickle: bool,
    command: str | None,
    quiet: bool,
    track: Kind | Tracker | None,
) -> ContinuousPolicy:
    """:func:`robustify` of an agent whose actions are numbers."""
    info = describe(env_id, continuous=True)
    _check_seed(seed)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="sortrl-")) if out is None else None
        folder = Path(scratch or out or "")
        stack.enter_context(tracking(track, folder, info.env_id if scratch else folder.name))
        said = command or f"sortrl.robustify(env={env_id!r}, eps={settings.eps})"
        policy, found = robustify_continuous(
            teacher,
            info,
            settings,
            folder,
            seed=seed,
            vecnormalize=vecnormalize,
            allow_pickle=allow_pickle,
            command=said,
            module=_module(env_id),
            quiet=quiet,
            measure=scratch is None,
        )
        if scratch is None:
            report.render(found, folder)
    if not found["gate"]["passed"]:
        warnings.warn(f"Do not rely on this policy: {found['gate']['reason']}.", SortRLWarning, stacklevel=3)
    return policy


def default_preset(info: EnvInfo) -> Preset:
    """The preset for who names none."""
    return "auto" if len(info.obs_shape) == 1 else "fast"


def _module(env_id: str) -> str | None:
    """The module of ``module:id``, which whoever opens the run must have imported."""
    return env_id.rpartition(":")[0].rpartition("/")[2] or None


def _statistics(env: Any) -> Any:
    """The ``VecNormalize`` of observations around a ``VecEnv``, if there is one."""
    while hasattr(env, "venv"):
        if type(env).__name__ == "VecNormalize":
            return env if env.norm_obs else None
        env = env.venv
    return None


def _check_early(config: RobustifyConfig, seed: int, info: EnvInfo) -> None:
    """What would otherwise fail after hours of training."""
    sizes = config.sensor_eps
    if sizes is not None and (len(sizes),) != info.obs_shape:
        names = f" ({', '.join(info.obs_names)})" if len(info.obs_names) <= MOST_NAMED else ""
        raise SortRLError(
            f"robustify: sensor_eps has {len(sizes)} sizes, but observations of {info.env_id} have shape {info.obs_shape}{names}."
        )
    if info.is_image and config.eps >= 1:
        raise too_wide(info, config.eps, 1.0)
    _check_seed(seed)
    if isinstance(config.suite, str):
        attacks.suite(config.suite)
    for name in (config.attack, *(() if isinstance(config.suite, str) else config.suite)):
        if name != LEARNED:
            attacks.by_name(name)


def _check_seed(seed: int) -> None:
    if not isinstance(seed, int) or not 0 <= seed < TEST_SEED_OFFSET:
        raise SortRLError(f"robustify: seed is {seed!r}, expected a whole number in 0..{TEST_SEED_OFFSET - 1}.")


def _source_name(teacher: Any) -> str:
    if teacher is None:
        return TRAINED_HERE
    return str(teacher) if isinstance(teacher, (str, Path)) else type(teacher).__name__


def _log_of(teacher: Any) -> dict[str, Any] | None:
    """How a saved teacher was trained, if that lies beside it."""
    path = Path(teacher) / LOG_FILE if isinstance(teacher, (str, Path)) else None
    return read_object(path) if path is not None and path.is_file() else None
