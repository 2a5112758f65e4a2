"""Which student to keep: a short ladder from "follow the teacher closely" to "wide margins", climbed by measurement.

Robustness costs skill, and how much differs from agent to agent. So no setting is fixed beforehand: students are distilled rung by
rung, measured on validation episodes, and the most certified one that keeps the teacher's skill is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from sortrl.attacks import PGD, Attack
from sortrl.attacks.suites import is_black_box
from sortrl.attacks.values import MinQ, Transfer
from sortrl.core.checkpoint import damage_named
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_object, write_json
from sortrl.core.records import Demonstrations, Policy
from sortrl.data.collect import CollectConfig, collect
from sortrl.data.dataset import load_demonstrations, merge, save_demonstrations
from sortrl.distill.config import PRESETS, DistillConfig
from sortrl.distill.loop import Distilled
from sortrl.distill.recipe import Recipe, Work, trained
from sortrl.teachers.load.load import load_teacher

LADDER_FILE = "ladder.json"
AGAIN = "Delete it to measure again."
KEEP = 0.95
GAIN = 0.01  # of certified share, for which the next rung is worth its time
ATTACKED_EPISODES = 10  # validation episodes under each attack
VISITED = 10_000  # states of a rung's student that the next one learns from too; twice as many if it lost the skill


@dataclass(frozen=True)
class Rung:
    """One setting of the trade-off."""

    reach: float
    """Margins are widened for this many times eps."""
    lambda_end: float = 1.0
    steps: float = 1.0
    """Times those of the configuration."""

    def config(self, base: DistillConfig) -> DistillConfig:
        steps = max(1, round(base.steps * self.steps))
        return replace(base, eps=self.reach * base.eps, lambda_end=self.lambda_end, steps=steps)


LADDER = (Rung(0.5, steps=3.0), Rung(0.5), Rung(1.0), Rung(2.0), Rung(3.0, 0.5))
FIRST = 2  # where the climb begins


@dataclass(frozen=True)
class Skill:
    """Returns on the same episodes between which a student's is placed."""

    random: float
    teacher: npt.NDArray[np.floating[Any]]
    """One per episode."""

    @property
    def span(self) -> float:
        return float(self.teacher.mean()) - self.random

    def kept(self, returns: npt.NDArray[np.floating[Any]]) -> float:
        """1: as the teacher, 0: as random play; NaN if the teacher plays no better than that.

        >>> Skill(20.0, np.array([500.0, 500.0])).kept(np.array([260.0, 260.0]))
        0.5
        """
        return (float(returns.mean()) - self.random) / self.span if self.span > 0 else math.nan

    def error(self, returns: npt.NDArray[np.floating[Any]]) -> float:
        """Standard error of :meth:`kept`, paired: both played the same episodes."""
        if len(returns) < 2 or self.span <= 0:
            return math.inf
        return float(np.std(returns - self.teacher, ddof=1) / math.sqrt(len(returns))) / self.span


@dataclass(frozen=True)
class Climbed:
    """How the student of one rung did on the validation episodes."""

    rung: int
    clean: float
    """Mean return."""
    kept: float
    error: float
    certified: float
    """Share of the decisions of clean play that are certified at eps."""
    attacked: float = math.inf
    """Mean return at eps under the worst of the quick checks."""
    attack: str = "none"
    """The one that was the worst."""

    @property
    def surely(self) -> float:
        return self.kept - self.error

    def to_json(self) -> dict[str, Any]:
        """JSON has neither NaN nor infinity: null."""
        return {name: None if value != value or value == math.inf else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Climbed:
        absent: dict[str, Any] = {"kept": math.nan, "error": math.inf, "attacked": math.inf}
        return cls(**{name: absent[name] if value is None else value for name, value in stored.items()})


def climb(n_rungs: int, first: int, try_rung: Callable[[int], Climbed], keep: float = KEEP) -> list[Climbed]:
    """Try the rung ``first``; then upwards while the skill is kept and the certified share grows, or downwards until the skill
    is kept. The other rungs are never trained; none but the first if the teacher has no skill to keep."""
    tried = [try_rung(first)]
    if math.isnan(tried[0].kept):
        return tried
    step = 1 if tried[0].kept >= keep else -1
    while 0 <= tried[-1].rung + step < n_rungs:
        tried.append(try_rung(tried[-1].rung + step))
        now, before = tried[-1], tried[-2]
        if step == -1 and now.kept >= keep:
            break
        if step == 1 and not (now.kept >= keep and now.certified >= before.certified + GAIN):
            break
    return tried


def select(tried: Sequence[Climbed], keep: float = KEEP, hold: float = -math.inf) -> int:
    """Place of the one to keep: of those that keep the skill (by one standard error, or else in the mean) and return at least
    ``hold`` (the teacher's own) under attack, the most certified. If none holds, the one that returns most under attack; if none
    keeps the skill, the most skilful."""
    places = range(len(tried))
    skilled = [i for i in places if tried[i].surely >= keep] or [i for i in places if tried[i].kept >= keep]
    if not skilled:
        return max(places, key=lambda i: -math.inf if math.isnan(tried[i].kept) else tried[i].kept)
    holding = [i for i in skilled if tried[i].attacked >= hold]
    if holding:
        return max(holding, key=lambda i: tried[i].certified)
    return max(skilled, key=lambda i: tried[i].attacked)


def gate(kept: float, agreement: float, chance: float, skill: Skill, keep: float = KEEP) -> str | None:
    """Why the student must not be relied on; None if it may. ``chance`` is the agreement of always playing the commonest action."""
    if skill.span <= 0:
        return f"the teacher itself plays no better than random ({skill.teacher.mean():.1f} against {skill.random:.1f})"
    if not kept >= keep:
        share = (
            "none" if math.isnan(kept) else f"{math.floor(1000 * kept) / 10:g}%"
        )  # rounded up it might equal what is asked for
        return f"the student keeps {share} of the teacher's skill, less than {100 * keep:g}%"
    if agreement <= chance:
        return f"the student agrees with the teacher in {agreement:.0%} of held-out states, no more than one fixed action would"
    return None


@dataclass(frozen=True)
class LadderRecipe(Recipe):
    """SortNets distilled rung by rung; the one kept is chosen by measurement. No setting is of one task."""

    distill: DistillConfig = PRESETS["auto"]
    keep: float = KEEP
    """Share of the teacher's skill that a student must keep: 1 is the teacher's return, 0 that of random play."""
    quick: bool = False
    """One rung, the middle one."""
    _main: ClassVar[str] = "distill"

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise SortRLError(f"robustify: keep is {self.keep}, expected a share in (0, 1], such as {KEEP}.")

    def train(self, work: Work, name: str, seed: int, short: bool = False) -> Distilled:
        config = replace(self.distill, steps=max(1, self.distill.steps // 3)) if short else self.distill
        return trained(work, name, seed, config)

    def chosen(self, work: Work) -> Distilled:
        """Climb, measure, select; every rung has its folder, its states and its measurements in the run's directory."""
        checks = _checks(work)
        skill, hold = self._reference(work, checks)
        data, students = work.training, dict[int, Distilled]()
        before: Climbed | None = None

        def try_rung(number: int) -> Climbed:
            nonlocal data, before
            if before is not None:  # learn from the states that its student met, too
                times = 1 if before.kept >= self.keep else 2
                data = merge(data, _visited(work, before.rung, students[before.rung].policy, times))
            rung = LADDER[number]
            student = trained(replace(work, training=data), f"rung {number}", work.seed, rung.config(self.distill))
            students[number] = student
            path = work.directory / f"rung-{number}.json"
            if not path.exists():
                write_json(path, self._measured(work, number, student.policy, skill, checks).to_json())
            with damage_named(path, AGAIN):
                before = Climbed.from_json(read_object(path))
            return before

        tried = [try_rung(FIRST)] if self.quick else climb(len(LADDER), FIRST, try_rung, self.keep)
        best = tried[select(tried, self.keep, hold)]
        rungs = [
            {**one.to_json(), "eps": LADDER[one.rung].reach * work.eps} for one in sorted(tried, key=lambda c: c.rung)
        ]
        write_json(
            work.directory / LADDER_FILE,
            {
                "eps": work.eps,
                "keep": self.keep,
                "episodes": work.episodes,
                "random": skill.random,
                "teacher": float(skill.teacher.mean()),
                "teacher_attacked": hold if math.isfinite(hold) else None,
                "chosen": best.rung,
                "rungs": rungs,
            },
        )
        return replace(students[best.rung], held_out=None)  # was measured at the rung's own eps

    def describe(self, directory: Path) -> dict[str, Any]:
        return {"ladder": read_object(directory / LADDER_FILE)}

    def _reference(self, work: Work, checks: Sequence[Attack]) -> tuple[Skill, float]:
        """What students are measured against: random play, the teacher, and the teacher under attack."""
        path = work.directory / "reference.json"
        if not path.exists():
            draw = np.random.default_rng(work.seed)
            n_actions = work.teacher.n_actions
            random = load_teacher(lambda obs: draw.integers(n_actions, size=len(obs)), work.env_id)
            with work.stage("choose", "Measuring the teacher and random play"):
                returns = work.play(work.teacher, None, work.episodes).returns
                hold = None if is_black_box(work.teacher) else _worst(work, work.teacher, checks, returns)[0]
                document = {"random": work.play(random, None, work.episodes).mean, "teacher": returns.tolist()}
            write_json(path, {**document, "attacked": hold})
        with damage_named(path, AGAIN):
            found = read_object(path)
            hold = -math.inf if found["attacked"] is None else float(found["attacked"])
            return Skill(float(found["random"]), np.array(found["teacher"], np.float64)), hold

    def _measured(self, work: Work, number: int, student: Policy, skill: Skill, checks: Sequence[Attack]) -> Climbed:
        with work.stage("choose", f"Measuring rung {number}"):
            clean = work.play(student, None, work.episodes)
            attacked, attack = _worst(work, student, checks, clean.returns)
        assert clean.radii is not None
        certified = float((clean.radii > work.eps).mean())
        kept, error = skill.kept(clean.returns), skill.error(clean.returns)
        return Climbed(number, clean.mean, kept, error, certified, attacked, attack)


def _checks(work: Work) -> tuple[Attack, ...]:
    """The attacks of the quick suite that find most for their time."""
    if work.eps == 0:
        return ()
    through = () if is_black_box(work.teacher) else (MinQ(work.teacher), Transfer(work.teacher, PGD(10)))
    return (PGD(10), *through)


def _worst(
    work: Work, policy: Policy, checks: Sequence[Attack], clean: npt.NDArray[np.floating[Any]]
) -> tuple[float, str]:
    """The lowest mean return under the attacks, and whose it is; clean play is among them, as an adversary may do nothing. ``clean``
    are the returns of that, of which the attacks meet the first episodes."""
    episodes = min(ATTACKED_EPISODES, len(clean))
    played = [(work.play(policy, attack, episodes).mean, attack.name) for attack in checks]
    return min([(float(clean[:episodes].mean()), "none"), *played], key=lambda one: one[0])


def _visited(work: Work, number: int, student: Any, times: int) -> Demonstrations:
    """States that a rung's student meets, labelled by the teacher."""
    path = work.directory / f"rung-{number}.safetensors"
    if not path.exists():
        states = min(VISITED, len(work.training)) * times
        config = CollectConfig(states=states, eps_unit=work.noise)
        seed = work.seed + 100_000 * (number + 1)
        with work.stage("collect", "Collecting the student's states") as progress:
            save_demonstrations(
                path, collect(work.teacher, work.env_id, config, seed, actor=student, progress=progress)
            )
    return load_demonstrations(path)
