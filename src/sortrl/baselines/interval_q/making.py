"""An agent by the name of its method: ``make_baseline("radial-dqn", "CartPole-v1", teacher, eps=0.1)``."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, get_args

from sortrl.baselines.interval_q.bcl import Curriculum, bootstrapped
from sortrl.baselines.interval_q.car import CarDQN
from sortrl.baselines.interval_q.network import same_network
from sortrl.baselines.interval_q.radial import RadialDQN
from sortrl.baselines.interval_q.radial_ppo import RadialPPOConfig, radial_ppo
from sortrl.baselines.interval_q.rs_dqn import RSDQN
from sortrl.baselines.interval_q.sa_dqn import SADQN
from sortrl.baselines.interval_q.starting import DistillationConfig, cloned, start_from
from sortrl.baselines.interval_q.training import Method, Progress, TrainingConfig, Tuned, fine_tune
from sortrl.baselines.interval_q.wocar import WocarDQN
from sortrl.core.errors import SortRLError
from sortrl.core.files import write_json
from sortrl.envs import describe
from sortrl.evaluate import provenance
from sortrl.nets.interval_policy import IntervalPolicy
from sortrl.teachers.load.load import check_fit
from sortrl.teachers.teacher import Teacher

Name = Literal[
    "rs-dqn",
    "sa-dqn",
    "sa-dqn-pgd",
    "radial-dqn",
    "radial-ppo",
    "wocar-dqn",
    "car-dqn",
    "bcl-at",
    "bcl-mos-at",
    "bcl-radial",
    "bcl-radial-at",
]
NAMES: tuple[Name, ...] = get_args(Name)
RECORD = "baseline.json"
# Where values are in units of leads, and beside an anchor: SA-DQN's published kappa is of no effect there, and CAR-DQN's published
# temperature leaves the worst transition of a batch alone.
SENSORS_KAPPA, SENSORS_TEMPERATURE = 1.0, 30.0

_METHODS: dict[str, Method] = {
    "rs-dqn": RSDQN(),
    "sa-dqn": SADQN("convex"),
    "sa-dqn-pgd": SADQN("pgd"),
    "radial-dqn": RadialDQN(),
    "wocar-dqn": WocarDQN(),
    "car-dqn": CarDQN(),
}
_COURSES = {
    "bcl-at": Curriculum("at"),
    "bcl-mos-at": Curriculum("at", skip=True),
    "bcl-radial": Curriculum("radial"),
    "bcl-radial-at": Curriculum("radial+at"),
}


def make_baseline(
    name: str,
    env_id: str,
    teacher: Teacher,
    eps: float,
    out_dir: str | Path | None = None,
    decisions: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    values: tuple[IntervalPolicy, str] | None = None,
    tests: int | None = None,
) -> Tuned:
    """Train the agent called ``name`` (one of ``NAMES``) from a teacher; into ``out_dir`` go its policy, ``baseline.json`` and the
    checkpoints that the same call goes on from. ``values`` are what :func:`start_from` gave, where several methods start from the same;
    ``tests`` are how many the agent that is kept is chosen by, 0 for that of the end."""
    if name not in NAMES:
        raise SortRLError(f"There is no baseline {name[:60]!r}; choose one of {', '.join(NAMES)}.")
    if decisions is not None and decisions < 1:
        raise SortRLError(f"baseline: {decisions} decisions, expected at least 1.")
    info = describe(env_id)
    check_fit(teacher, info)
    folder = None if out_dir is None else Path(out_dir)
    settings: dict[str, Any]
    if name == "radial-ppo":
        config = _with(RadialPPOConfig(eps), decisions, None if tests is None else max(1, tests))
        start, origin = _policy_start(teacher, env_id, seed, progress)
        settings = {"config": asdict(config)}
        made = radial_ppo(start, env_id, config, folder, seed, progress)
    else:
        training = _with(TrainingConfig(eps), decisions, tests)
        start, origin = values or start_from(teacher, env_id, training.gamma, seed, progress=progress)
        part: Any = _COURSES.get(name) or _METHODS[name]
        if isinstance(part, SADQN) and not info.is_image:
            part = replace(part, kappa=SENSORS_KAPPA)
        if isinstance(part, CarDQN) and not info.is_image:
            part = replace(part, temperature=SENSORS_TEMPERATURE)
        settings = {"method": asdict(part), "config": asdict(training)}
        if isinstance(part, Curriculum):
            made = bootstrapped(start, env_id, part, training, folder, seed, progress)
        else:
            made = fine_tune(start, env_id, part, training, folder, seed, progress)
    if folder is not None:
        made.policy.save(folder)
        if teacher.architecture is not None:  # so that evaluate and attack show it beside the agent
            teacher.save(folder / "teacher")
        identity = {"env": env_id, "seed": seed, "teacher": teacher.name, "baseline": name, **settings}
        write_json(folder / "run.json", {"identity": identity})  # which is what makes a folder one that commands take
        measured = {"decisions": made.decisions, "minutes": round(made.minutes, 3), "history": made.history}
        write_json(folder / RECORD, {**identity, "start": origin, **measured, "versions": provenance.versions()})
    return made


def _with(config: Any, decisions: int | None, tests: int | None) -> Any:
    given = {"decisions": decisions, "tests": tests}
    return replace(config, **{name: value for name, value in given.items() if value is not None})


def _policy_start(teacher: Teacher, env_id: str, seed: int, progress: Progress | None) -> tuple[Any, str]:
    if not teacher.is_stochastic:
        raise SortRLError(
            f"RADIAL-PPO goes on from a policy, and {teacher.name} ({teacher.algorithm}) is not an actor-critic. Give a PPO or A2C "
            "agent, or use radial-dqn."
        )
    same = same_network(teacher)
    if same is not None:
        return same, "the teacher's own network"
    return cloned(teacher, env_id, seed, DistillationConfig(), progress), "distilled from its play"
