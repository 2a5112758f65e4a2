"""Where agents of the leaderboard come from: a run or an entry of the zoo, with its teacher; or anybody's ``module:load``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from sortrl.baselines.interval_q.making import RECORD
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_object
from sortrl.core.identity import fingerprint
from sortrl.core.modules import imported
from sortrl.core.records import Policy
from sortrl.experiments.leaderboard.entries import Kind, read_board
from sortrl.experiments.leaderboard.measuring import Entrant, Player
from sortrl.experiments.leaderboard.protocols import Protocol
from sortrl.nets import hub, zoo
from sortrl.nets.interval_policy import IntervalPolicy
from sortrl.nets.thresholds import ThresholdPolicy
from sortrl.runs.run import identity_of, read_run
from sortrl.runs.stages import RUN_FILE
from sortrl.teachers import Teacher, load_teacher
from sortrl.teachers.grading import LOG_FILE

NOT_TRAINING = ("teacher", "evaluate", "attack")  # stages of a run
EXPECTED = (
    "a policy of sortrl, a Stable-Baselines3 model, the path of its zip, a torch module, an object with predict, or a function of a "
    "batch of observations"
)


def of_run(run: Path, task: str | None, name: str | None) -> list[Entrant]:
    """The policy of a run and, if it was kept, its teacher."""
    env_id, policy, _ = read_run(run)
    if task not in (None, env_id):
        raise SortRLError(f"--task is {task}, but {run} is a run of {env_id}. Leave it out.")
    folder = zoo.locate(run)
    elsewhere = zoo.is_entry(run) or hub.is_repository(run)
    title = name or (str(run) if elsewhere else folder.resolve().name)
    kind = _kind(policy, folder)

    def student() -> Player:
        return Player(read_run(run)[1], _teacher(run))

    entrants = [Entrant(title, env_id, kind, _plain(run), student, _minutes(folder, kind))]
    if _teacher(run) is not None:

        def teacher() -> Player:
            found = _teacher(run)
            assert found is not None
            return Player(found, found)

        entrants.append(
            Entrant(f"teacher of {title}", env_id, "teacher", f"{_plain(run)}, teacher", teacher, _lessons(folder))
        )
    return entrants


def of_loader(
    source: str, protocol: Protocol, task: str | None, name: str | None, kind: Kind, minutes: float | None = None
) -> list[Entrant]:
    """What ``module:load`` returns: for one task, or for each task of the protocol for which it does not return None."""
    tasks = [task] if task is not None else [one.env_id for one in protocol.tasks]
    for one in tasks:
        protocol.task(one)
    make = _loader(source)
    if len(tasks) > 1 and not _takes_task(make, source):
        raise SortRLError(
            f"{source} takes no argument, so it cannot know which task it is for. Name the task (--task {tasks[0]}), or let it take "
            "the id of the task."
        )
    title = name or source

    def loading(one: str) -> Callable[[], Player]:
        return lambda: _of_policy(source, one)

    found = [
        Entrant(title, one, kind, source, loading(one), minutes)
        for one in tasks
        if _made(make, source, one) is not None
    ]
    if not found:
        raise SortRLError(f"{source} returned None for {', '.join(tasks)}; expected {EXPECTED}.")
    return found


def same_agent(entrant: Entrant, folder: Path) -> str | None:
    """The name under which an agent with these weights is on the board of a folder already; None if it is not."""
    policy = entrant.load().policy
    if not folder.is_dir() or not isinstance(policy, nn.Module) or getattr(policy, "algorithm", None) == "callable":
        return None
    wanted = (entrant.task, str(fingerprint(policy)))
    return next((one["agent"] for one in read_board(folder).entries if (one["task"], one["weights"]) == wanted), None)


def _plain(run: Path) -> str:
    """Not where it lies on somebody's disk."""
    return str(run) if zoo.is_entry(run) or hub.is_repository(run) else run.resolve().name


def _kind(policy: Any, folder: Path) -> Kind:
    if isinstance(policy, IntervalPolicy):
        return "baseline"
    if isinstance(policy, ThresholdPolicy):
        return "threshold"
    config = identity_of(folder).get("config")
    return "memory" if isinstance(config, dict) and config.get("preset") == "memory" else "SortRL"


def _teacher(run: Path) -> Teacher | None:
    """As it was given: not restated in the units of its student, so that it is the same agent beside any of them."""
    folder = zoo.teacher_folder(zoo.locate(run))
    return None if folder is None else Teacher.load(folder)


def _minutes(folder: Path, kind: Kind) -> float | None:
    """Training of a student, after its teacher; None if nobody wrote it down."""
    if kind == "baseline":
        path = folder / RECORD
        minutes = read_object(path).get("minutes") if path.exists() else None
        return minutes if isinstance(minutes, (int, float)) else None
    seconds = read_object(folder / RUN_FILE).get("stage_seconds")
    if not isinstance(seconds, dict) or not seconds:
        return None
    return round(sum(float(value) for name, value in seconds.items() if name not in NOT_TRAINING) / 60, 2)


def _lessons(folder: Path) -> float | None:
    """Training of the teacher of a run, or of an entry of the zoo."""
    log, card = folder / "teacher" / LOG_FILE, folder / zoo.CARD
    if log.exists():
        history = read_object(log).get("history")
        hours = [row["hours"] for row in history if "hours" in row] if isinstance(history, list) else []
    elif card.exists():
        cost = read_object(card).get("teacher_training")
        hours = [cost["hours"]] if isinstance(cost, dict) and "hours" in cost else []
    else:
        hours = []
    return round(60 * max(map(float, hours)), 2) if hours else None


def _loader(source: str) -> Callable[..., Any]:
    module, _, part = source.partition(":")
    if not module or not part:
        raise SortRLError(f"--policy is {source!r}, expected package.module:load, a function that returns the policy.")
    make = getattr(imported(module, f"the policy {part}"), part, None)
    if not callable(make):
        raise SortRLError(
            f"{source} is {type(make).__name__}, expected a function in {module} that returns the policy: {EXPECTED}."
        )
    found: Callable[..., Any] = make
    return found


def _takes_task(make: Callable[..., Any], source: str) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [one for one in inspect.signature(make).parameters.values() if one.kind in kinds]
    needed = [one for one in places if one.default is inspect.Parameter.empty]
    if len(needed) > 1:
        raise SortRLError(
            f"{source} needs {len(needed)} arguments ({', '.join(one.name for one in needed)}), expected none, or the id of the task."
        )
    return bool(needed)


def _made(make: Callable[..., Any], source: str, task: str) -> Any:
    try:
        return make(task) if _takes_task(make, source) else make()
    except SortRLError:
        raise
    except Exception as error:  # whatever somebody's loader raises
        raise SortRLError(f"{source} failed for {task}: {type(error).__name__}: {error}") from error


def _of_policy(source: str, task: str) -> Player:
    made = _made(_loader(source), source, task)
    if isinstance(made, Player):
        return made
    if isinstance(made, Policy):
        return Player(made)
    is_model = hasattr(made, "policy") and hasattr(made, "get_vec_normalize_env")
    predict = getattr(made, "predict", None)
    if predict is not None and not is_model and not isinstance(made, nn.Module):

        def answer(obs: Any) -> Any:
            return predict(obs)

        answer.__name__ = type(made).__name__
        return Player(load_teacher(answer, task))
    try:
        return Player(load_teacher(made, task))
    except SortRLError as error:
        raise SortRLError(f"{source} returned {type(made).__name__}: {error}") from error
