"""``robustify`` for continuous actions: teacher -> states -> a ladder of Lipschitz students -> returns and bounds -> report.

What is traded for skill here is the steepness of the student: the least steep one that keeps the teacher's skill is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from sortrl.attacks.continuous import ACTION_ATTACKS
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_json, read_object, write_json
from sortrl.core.identity import fingerprint, plain
from sortrl.core.progress import Progress
from sortrl.data.continuous import Answers, Visit, collect_answers
from sortrl.distill.config import DistillConfig
from sortrl.distill.continuous import REGRESSION, distill_continuous, in_units_of, mean_error
from sortrl.distill.ladder import KEEP, LADDER_FILE, Skill
from sortrl.distill.units import standardised
from sortrl.envs import EnvInfo
from sortrl.evaluate import provenance
from sortrl.evaluate.continuous import Agent, ContinuousResult, evaluate_continuous
from sortrl.nets import ContinuousPolicy, load, zoo
from sortrl.runs.config import WIDEST
from sortrl.runs.run import identity_of, open_claim
from sortrl.runs.stages import TEST_SEED_OFFSET, VALIDATION_SEED_OFFSET, VALIDATION_SHARE, Claim
from sortrl.teachers import ContinuousTeacher, load_continuous

STEEPNESSES = (32.0, 16.0, 8.0, 4.0, 2.0, 1.0)
"""Standard deviations of the teacher's actions per standard deviation of a sensor, at most."""
FIRST = 2  # where the climb begins


@dataclass(frozen=True)
class ContinuousSettings:
    """Everything that determines a run besides the teacher and the seed."""

    eps: float = 0.1
    """Perturbation to measure at, in standard deviations of each sensor; the certificate holds for any."""
    keep: float = KEEP
    """Share of the teacher's skill that the student must keep: 1 is the teacher's return, 0 that of random play."""
    quick: bool = False
    """One student, of the middle steepness."""
    states: int = 30_000
    """States of the teacher's play."""
    dagger_rounds: int = 2
    """Provisional students whose states are added before the ladder."""
    dagger_states: int = 10_000
    """States of each, and of every rung."""
    noise: float = 0.2
    """Uniform noise, at most, under which states are collected, in standard deviations."""
    choose_episodes: int = 50
    """Validation episodes of each rung."""
    episodes: int = 50
    """Test episodes per point."""
    distill: DistillConfig = field(default=REGRESSION)

    def __post_init__(self) -> None:
        for name in ("states", "dagger_states", "choose_episodes", "episodes"):
            if getattr(self, name) < 1:
                raise SortRLError(f"robustify: {name} is {getattr(self, name)}, expected a whole number, at least 1.")
        if not 0 < self.keep <= 1:
            raise SortRLError(f"robustify: keep is {self.keep}, expected a share in (0, 1], such as {KEEP}.")
        if isinstance(self.eps, bool) or not isinstance(self.eps, (int, float)) or not 0 <= self.eps < WIDEST:
            raise SortRLError(
                f"robustify: eps is {self.eps!r}, expected standard deviations of each sensor, at least 0 and less than {WIDEST:g}."
            )


def continuous_settings(eps: float | None = None, **changes: Any) -> ContinuousSettings:
    """The defaults with ``changes``, of which ``steps`` is that of the distillation; what does not apply here is refused.

    >>> continuous_settings(0.2, steps=10).distill.steps
    10
    """
    given = {name: value for name, value in changes.items() if value is not None}
    steps = given.pop("steps", None)
    known = [part.name for part in fields(ContinuousSettings)]
    wrong = [name for name in given if name not in known]
    if wrong:
        raise SortRLError(
            f"robustify: {', '.join(wrong)} has no meaning for continuous actions; what has: {', '.join(known)}, steps. Leave it out."
        )
    settings = ContinuousSettings(**given) if eps is None else ContinuousSettings(eps=eps, **given)
    return settings if steps is None else replace(settings, distill=replace(settings.distill, steps=steps))


@dataclass(frozen=True)
class Rung:
    """How the student of one steepness did on the validation episodes."""

    rung: int
    steepness: float
    lipschitz: list[float]
    clean: float
    kept: float
    surely: float
    """``kept`` less its standard error."""
    error: float
    """Mean distance from the teacher's actions on held-out episodes, in their standard deviations."""


def descend(try_rung: Callable[[int], Rung], n_rungs: int, first: int, keep: float) -> list[Rung]:
    """Try the rung ``first``, then less steep ones while the skill is kept, or steeper ones until it is."""
    tried = [try_rung(first)]
    step = 1 if tried[0].kept >= keep else -1
    while 0 <= tried[-1].rung + step < n_rungs:
        tried.append(try_rung(tried[-1].rung + step))
        if (tried[-1].kept >= keep) == (step == -1):
            break
    return tried


def choose_rung(tried: list[Rung], keep: float) -> Rung:
    """The least steep of those that keep the skill (by one standard error, or else in the mean); if none does, the most skilful."""
    skilled = [one for one in tried if one.surely >= keep] or [one for one in tried if one.kept >= keep]
    if skilled:
        return min(skilled, key=lambda one: one.steepness)
    return max(tried, key=lambda one: -math.inf if math.isnan(one.kept) else one.kept)


def robustify_continuous(
    teacher: Any,
    info: EnvInfo,
    settings: ContinuousSettings,
    directory: Path,
    *,
    seed: int = 0,
    vecnormalize: Any = None,
    allow_pickle: bool = False,
    command: str = "",
    module: str | None = None,
    quiet: bool = False,
    measure: bool = True,
) -> tuple[ContinuousPolicy, dict[str, Any]]:
    """The policy, and what results.json says of it; that is only written if test episodes are to be played (``measure``)."""
    if teacher is None:
        raise SortRLError(
            f"{info.env_id} has continuous actions, for which no teacher is trained here. Give one: sortrl robustify {info.env_id} "
            "--teacher agent.zip, a PPO, A2C, TRPO, SAC, TD3 or DDPG of Stable-Baselines3."
        )
    given = load_continuous(teacher, info.env_id, vecnormalize=vecnormalize, allow_pickle=allow_pickle)
    source = str(teacher) if isinstance(teacher, (str, Path)) else type(teacher).__name__
    identity = {"env": info.env_id, "seed": seed, "teacher": source, "teacher_weights": fingerprint(given)}
    with open_claim(directory, plain({**identity, "config": settings}), module) as claim:
        if given.architecture is not None:
            given.save(directory / "teacher")
        work = _Work(claim, info, settings, given, seed, quiet)
        policy = work.student()
        if not measure:
            return policy, {"gate": work.gate([])}
        found = work.results(policy, source, command)
        write_json(directory / "results.json", found)
    return policy, found


def read_continuous(directory: Path) -> tuple[str, ContinuousPolicy, ContinuousTeacher | None]:
    """The environment, the policy and (if it was kept) the teacher of a finished run."""
    directory = zoo.locate(directory)
    env_id, policy = str(identity_of(directory).get("env")), load(directory)
    if ":" in env_id or not isinstance(policy, ContinuousPolicy):
        raise SortRLError(f"{directory} is no run with continuous actions.")
    folder = directory / "teacher"
    teacher = load_continuous(folder, env_id) if (folder / "teacher.safetensors").exists() else None
    return env_id, policy, None if teacher is None else in_units_of(teacher, policy.normalizer)


class _Work:
    """The stages of one run; what is finished is read from its file."""

    def __init__(
        self,
        claim: Claim,
        info: EnvInfo,
        settings: ContinuousSettings,
        given: ContinuousTeacher,
        seed: int,
        quiet: bool,
    ) -> None:
        self.claim, self.directory, self.info, self.settings = claim, claim.directory, info, settings
        self.seed, self.quiet = seed, quiet
        assert info.action_box is not None
        self.box = info.action_box
        # Units are measured over the teacher's undisturbed play.
        plainly = Visit(states=max(1, round(0.4 * settings.states)))
        self.plain = self._answers("plain", given, plainly, seed + 5_000, "Collecting states")
        self.teacher = in_units_of(given, standardised(self.plain.obs))

    def student(self) -> ContinuousPolicy:
        """Data, ladder, choice."""
        path = self.directory / "policy.safetensors"
        if path.exists():
            return ContinuousPolicy.load(path)
        settings = self.settings
        noisy = Visit(states=max(1, round(0.6 * settings.states)), eps_unit=settings.noise)
        data = self.plain.joined(self._answers("data", self.teacher, noisy, self.seed, "Collecting states"))
        data, held_out = data.split(VALIDATION_SHARE, self.seed)
        visited = replace(noisy, states=settings.dagger_states)
        short = replace(settings.distill, steps=max(1, settings.distill.steps // 3))
        for index in range(1, settings.dagger_rounds + 1):
            if (self.directory / f"dagger-{index}.safetensors").exists():
                more = Answers.load(self.directory / f"dagger-{index}.safetensors")
            else:
                actor = self._trained(f"provisional student {index}", data, STEEPNESSES[FIRST], short)
                more = self._answers(f"dagger-{index}", self.teacher, visited, self.seed + 10_000 * index, actor=actor)
            data = data.joined(more)
        skill = self._skill()
        students: dict[int, ContinuousPolicy] = {}

        def try_rung(number: int) -> Rung:
            nonlocal data
            students[number] = self._trained(f"rung {number}", data, STEEPNESSES[number], settings.distill)
            path = self.directory / f"rung-{number}.json"
            if not path.exists():
                write_json(path, plain(self._measured(number, students[number], skill, held_out)))
            # The next rung learns from the states that this one met.
            seed = self.seed + 100_000 * (number + 1)
            data = data.joined(self._answers(f"rung-{number}", self.teacher, visited, seed, actor=students[number]))
            return Rung(**read_object(path))

        tried = [try_rung(FIRST)] if settings.quick else descend(try_rung, len(STEEPNESSES), FIRST, settings.keep)
        best = choose_rung(tried, settings.keep)
        ladder = {"keep": settings.keep, "episodes": settings.choose_episodes, "random": skill.random}
        ladder |= {"teacher": float(skill.teacher.mean()), "chosen": best.rung}
        write_json(self.directory / LADDER_FILE, {**ladder, "rungs": plain(sorted(tried, key=lambda one: one.rung))})
        facts = {"states": len(data), "held_out_states": len(held_out), "spread": self.plain.spread.tolist()}
        write_json(self.directory / "training.json", {"data": facts, "error": best.error})
        students[best.rung].save(self.directory)
        return students[best.rung]

    def results(self, policy: ContinuousPolicy, source: str, command: str) -> dict[str, Any]:
        """What results.json says."""
        rows = self._evaluated(policy)
        units = self.info.raw_units(policy.normalizer.scale.numpy())
        return {
            "schema": 1,
            "kind": "continuous",
            "sortrl": provenance.sortrl_version(),
            "command": command,
            "seed": self.seed,
            "started": self.claim.document.get("started"),
            "stage_seconds": self.claim.seconds,
            "versions": provenance.versions(),
            "machine": provenance.machine(),
            "env": {
                "id": self.info.env_id,
                "obs_names": [name for name, _ in units],
                "unit_to_raw": [scale for _, scale in units],
                "action_names": list(self.box.names),
                "action_low": self.box.low.tolist(),
                "action_high": self.box.high.tolist(),
            },
            "teacher": {"name": self.teacher.name, "algorithm": self.teacher.algorithm, "source": source},
            "config": plain(self.settings),
            "policy": {
                "kind": policy.kind,
                "parameters": policy.parameter_count,
                "lipschitz": policy.lipschitz.tolist(),
                **plain(policy.describe()),
            },
            "student": policy.explain(),
            "data": read_object(self.directory / "training.json"),
            "ladder": read_object(self.directory / LADDER_FILE),
            "evaluation": rows,
            "gate": self.gate(rows),
        }

    def gate(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Whether the student may be relied on: it keeps the skill on the validation episodes and, if ``rows`` of the test episodes
        are given, on those."""
        ladder, keep = read_object(self.directory / LADDER_FILE), self.settings.keep
        chosen = next(rung for rung in ladder["rungs"] if rung["rung"] == ladder["chosen"])
        measured = {"validation": (ladder["teacher"], chosen["clean"])}
        if rows:
            clean = {row["policy"]: row["mean"] for row in rows if row["attack"] == "none"}
            measured["test"] = (clean["teacher"], clean["student"])
        found: dict[str, Any] = {"passed": True, "reason": None, "keep": keep}
        for episodes, (teacher, student) in measured.items():
            skill = Skill(ladder["random"], np.array([teacher]))
            kept, reason = skill.kept(np.array([student])), None
            if skill.span <= 0:
                reason = f"the teacher itself plays no better than random ({teacher:.1f} against {skill.random:.1f})"
            elif not kept >= keep:
                reason = f"the student keeps {kept:.0%} of the teacher's skill, less than {keep:.0%}"
            found[f"kept_{episodes}"] = None if math.isnan(kept) else kept
            if reason is not None and found["passed"]:
                found |= {"passed": False, "reason": f"{reason} ({episodes} episodes)"}
        return found

    def _evaluated(self, policy: ContinuousPolicy) -> list[dict[str, Any]]:
        """Test episodes of both, clean and under every attack, kept row by row."""
        path, settings = self.directory / "evaluation.json", self.settings
        rows = [row for row in read_json(path) if row["episodes"] == settings.episodes] if path.exists() else []
        done = {(row["policy"], row["attack"], row["eps"]) for row in rows}
        points: list[tuple[str, float]] = [("none", 0.0)]
        points += [(name, share * settings.eps) for name in ACTION_ATTACKS for share in (1.0, 2.0) if settings.eps > 0]
        agents: tuple[tuple[str, Agent], ...] = (("teacher", self.teacher), ("student", policy))
        for attack, eps in points:
            for name, agent in agents:
                black_box = getattr(agent, "algorithm", None) == "callable" and attack not in ("none", "noise")
                if (name, attack, eps) in done or black_box:
                    continue
                with self._stage("evaluate", f"Evaluating the {name}, {attack}, eps {eps:g}") as progress:
                    rows.append(
                        self._played(agent, TEST_SEED_OFFSET, settings.episodes, attack, eps, name, progress).to_json()
                    )
                write_json(path, rows)
        return rows

    def _played(
        self,
        agent: Agent,
        offset: int,
        episodes: int,
        attack: str = "none",
        eps: float = 0.0,
        name: str = "",
        progress: Progress | None = None,
    ) -> ContinuousResult:
        return evaluate_continuous(
            agent,
            self.info.env_id,
            ACTION_ATTACKS.get(attack),
            eps,
            episodes,
            self.seed + offset,
            name=name,
            progress=progress,
        )

    def _skill(self) -> Skill:
        """What students are measured against: random play and the teacher."""
        path = self.directory / "reference.json"
        if not path.exists():
            draw, box = np.random.default_rng(self.seed), self.box
            random = load_continuous(
                lambda obs: draw.uniform(box.low, box.high, (len(obs), len(box))), self.info.env_id
            )
            with self._stage("choose", "Measuring the teacher and random play"):
                agents: tuple[Agent, Agent] = (random, self.teacher)
                played = [
                    self._played(agent, VALIDATION_SEED_OFFSET, self.settings.choose_episodes).returns.tolist()
                    for agent in agents
                ]
            write_json(path, {"random": float(np.mean(played[0])), "teacher": played[1]})
        found = read_object(path)
        return Skill(float(found["random"]), np.array(found["teacher"], np.float64))

    def _measured(self, number: int, student: ContinuousPolicy, skill: Skill, held_out: Answers) -> Rung:
        with self._stage("choose", f"Measuring rung {number}"):
            clean = self._played(student, VALIDATION_SEED_OFFSET, self.settings.choose_episodes)
        kept = skill.kept(clean.returns)
        surely = kept - skill.error(clean.returns)
        return Rung(
            number,
            STEEPNESSES[number],
            student.lipschitz.tolist(),
            clean.mean,
            kept if math.isfinite(kept) else 0.0,
            surely if math.isfinite(surely) else 0.0,
            mean_error(student, held_out),
        )

    def _trained(self, name: str, data: Answers, steepness: float, config: DistillConfig) -> ContinuousPolicy:
        folder = self.directory / name.replace(" ", "-")
        with self._stage("distill", f"Distilling the {name}") as progress:
            return distill_continuous(
                data,
                self.teacher.normalizer,
                self.box,
                steepness,
                config,
                eps=self.settings.eps,
                out_dir=folder,
                seed=self.seed,
                progress=progress,
            )[0]

    def _answers(
        self,
        name: str,
        teacher: ContinuousTeacher,
        visit: Visit,
        seed: int,
        title: str = "Collecting the student's states",
        actor: ContinuousPolicy | None = None,
    ) -> Answers:
        path = self.directory / f"{name}.safetensors"
        if not path.exists():
            with self._stage("collect", title) as progress:
                collect_answers(teacher, self.info.env_id, visit, seed, actor, progress).save(path)
        return Answers.load(path)

    def _stage(self, name: str, title: str) -> AbstractContextManager[Progress]:
        return self.claim.stage(name, title, self.quiet)
