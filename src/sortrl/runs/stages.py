"""A run's stages, from the teacher to the policy, each kept in a file of the run's directory.

A killed run continues when it is started again with the same settings: a finished stage is read from its file, an
unfinished training from its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sortrl import attacks, nets
from sortrl.attacks import Attack
from sortrl.attacks.valid import check_eps
from sortrl.core.errors import SortRLError
from sortrl.core.files import locked, remove_leftovers, write_json
from sortrl.core.normalizer import Normalizer
from sortrl.core.progress import Progress, stage
from sortrl.core.records import Demonstrations, EvalResult, Policy
from sortrl.data.attacked import UnderAttack
from sortrl.data.collect import CollectConfig, collect
from sortrl.data.dataset import check_splits, load_demonstrations, merge, save_demonstrations, split
from sortrl.distill import Distilled, Work, held_out_metrics, in_units, standardised
from sortrl.envs import describe
from sortrl.evaluate.returns import evaluate
from sortrl.nets import CertifiedPolicy
from sortrl.runs.choosing import SLOTS, choose
from sortrl.runs.config import RobustifyConfig
from sortrl.runs.teach import train_teacher
from sortrl.teachers import Teacher, decided_at_start, hardened, smoothed, steadied
from sortrl.teachers.grading import LOG_FILE

VALIDATION_SHARE = 0.1
PLAIN_SHARE = 0.4  # of the states to collect: where units are measured, the teacher's undisturbed play
PLAIN_SEED_OFFSET = 5_000  # of that play: other episodes than those under noise
RUN_FILE, HARDENED = "run.json", "hardened"
VALIDATION_SEED_OFFSET = 0  # a run's seed lies below 1000
TEST_SEED_OFFSET = 1000  # test episodes never coincide with those that data or choices were made from


@dataclass
class Claim:
    """A directory that belongs to one run, and is locked for it: :func:`sortrl.runs.run.open_run` makes these, and nobody else."""

    directory: Path
    document: dict[str, Any]
    """What ``run.json`` has: ``identity``, ``started`` and ``stage_seconds``."""

    @property
    def seconds(self) -> dict[str, float]:
        found: dict[str, float] = self.document["stage_seconds"]
        return found

    def write(self) -> None:
        write_json(self.directory / RUN_FILE, self.document)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time to the record, also of a stage that is finished in a later attempt."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - started, 2)
            self.write()

    @contextmanager
    def stage(self, name: str, title: str, quiet: bool) -> Iterator[Progress]:
        """Show progress, and add the time to the record."""
        with self.timed(name), stage(title, quiet) as progress:
            yield progress


class Run:
    """What one run has in its directory. Each stage returns what the next one needs, made now or read back."""

    def __init__(
        self,
        claim: Claim,
        env_id: str,
        config: RobustifyConfig,
        seed: int,
        quiet: bool = True,
        shared: Path | None = None,
    ) -> None:
        self.claim, self.directory = claim, claim.directory
        self.env_id, self.config, self.seed, self.quiet = env_id, config, seed, quiet
        self.shared = shared  # what is made of the teacher does not depend on the seed of a student

    @contextmanager
    def stage(self, name: str, title: str) -> Iterator[Progress]:
        """Show progress, and add the time to the record."""
        with self.claim.stage(name, title, self.quiet) as progress:
            yield progress

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Add the time to the record, also of a stage that is finished in a later attempt."""
        return self.claim.timed(name)

    def student(self, teacher: Teacher) -> CertifiedPolicy:
        """Data and distillation: everything up to the policy."""
        if (self.directory / "policy.safetensors").exists():
            return nets.load_discrete(self.directory)
        given, teacher = teacher, self.in_units(self.prepared(teacher))
        if self.config.smoothing > 0:
            teacher = smoothed(teacher, self.config.smoothing)
        if self.config.start_radius > 0:
            teacher = decided_at_start(teacher, self.env_id, self.config.start_radius)
        data = self.demonstrations(teacher)
        if self.config.units != "teacher" and not self.config.learns_from_another:  # whose answers those are
            data = merge(self.plain(teacher), data)
        training, held_out = split(data, VALIDATION_SHARE, self.seed)
        recipe, work = self.config.student, self.work(teacher, training, held_out)
        work = replace(work, training=recipe.extended(work))
        for index in range(1, self.config.dagger_rounds + 1):
            work = replace(work, training=merge(work.training, self.dagger(index, work)))
        final = recipe.finished(work, recipe.chosen(work) or self.chosen(work))
        return self._finish(final, work, given)

    def work(self, teacher: Teacher, training: Demonstrations, held_out: Demonstrations) -> Work:
        """What the recipe works with."""
        config = self.config

        def play(policy: Policy, attack: Attack | None, episodes: int) -> EvalResult:
            eps, seed = 0.0 if attack is None else config.eps, self.seed + VALIDATION_SEED_OFFSET
            return evaluate(policy, self.env_id, attack, eps, episodes, seed, slots=SLOTS)

        return Work(
            self.env_id,
            teacher,
            training,
            held_out,
            config.eps,
            self.seed,
            self.directory,
            self.stage,
            play,
            config.choose_episodes,
            config.noise,
        )

    def in_units(self, teacher: Teacher) -> Teacher:
        """The teacher in the units that eps is stated in."""
        if self.config.units == "teacher":
            return teacher
        shape = teacher.obs_shape
        if len(shape) != 1:
            raise SortRLError(
                f"robustify: units {self.config.units} is for observations that are vectors; those of {self.env_id} have shape "
                f"{shape}. Leave it out."
            )
        units = standardised(self.plain(teacher).obs)
        if self.config.units == "raw":
            sizes = np.ones(shape) if self.config.sensor_eps is None else np.array(self.config.sensor_eps)
            units = Normalizer(units.mean, sizes)
        return in_units(teacher, units)

    def plain(self, teacher: Teacher) -> Demonstrations:
        """States of the teacher's undisturbed play, over which the units are measured."""
        config = replace(self.config.collect, states=max(1, round(PLAIN_SHARE * self.config.collect.states)))
        return self._data(
            "plain",
            "Collecting states",
            lambda p: self._with_answers(
                teacher, collect(teacher, self.env_id, config, self.seed + PLAIN_SEED_OFFSET, progress=p)
            ),
        )

    def prepared(self, teacher: Teacher) -> Teacher:
        """The teacher to learn from: the one given or, if asked for, what further training or a search makes of it."""
        if self.shared is None:
            return self._prepared(teacher, self.directory)
        with locked(self.shared, wait=True):  # the first student to come makes it, and the others wait and read it
            if (self.shared / HARDENED).is_dir():
                remove_leftovers(self.shared / HARDENED)
            return self._prepared(teacher, self.shared)

    def _prepared(self, teacher: Teacher, folder: Path) -> Teacher:
        if self.config.harden is not None:
            with self.stage("teacher", "Hardening the teacher") as progress:
                teacher = hardened(teacher, self.env_id, self.config.harden, folder / HARDENED, progress)
        if self.config.steady is not None:
            with self.stage("teacher", "Steadying the teacher") as progress:
                teacher = steadied(teacher, self.env_id, self.config.steady, folder, progress)
        return teacher

    def _finish(self, final: Distilled, work: Work, given: Teacher) -> CertifiedPolicy:
        """Keep the policy, and what its data and training were. Agreement is with the teacher that was given, whatever was made
        of it to learn from."""
        held_out = work.held_out
        if self.config.learns_from_another:
            parts = [held_out.obs[start : start + 1024] for start in range(0, len(held_out), 1024)]
            held_out = replace(held_out, actions=np.concatenate([given.predict(part)[0] for part in parts]))
            metrics = held_out_metrics(final.policy, held_out, self.config.eps)
        else:
            metrics = final.held_out or held_out_metrics(final.policy, held_out, self.config.eps)
        data = merge(work.training, work.held_out)
        facts = {
            "states": len(data),
            "distinct": data.n_distinct,
            "dagger_states": self.config.dagger_rounds * self.config.dagger_states,
            "held_out_states": len(work.held_out),
            "agreement": metrics["agreement"],
            "commonest_action": float(np.bincount(held_out.actions).max() / len(held_out)),
            "certified": metrics["certified"],
        }
        write_json(self.directory / "training.json", {"history": final.history, "data": facts})
        final.policy.save(self.directory)
        return final.policy

    def chosen(self, work: Work) -> Distilled:
        """The student; of several candidates the best on validation episodes, which are those of no data and of no test."""
        config = self.config
        names = ["student", *(f"candidate {number}" for number in range(1, config.candidates))]
        found = [
            config.student.train(work, name, self.seed + TEST_SEED_OFFSET * number) for number, name in enumerate(names)
        ]
        if len(found) == 1:
            return found[0]
        with self.stage("choose", f"Choosing among {len(found)} candidates") as progress:
            choice = choose(
                [candidate.policy for candidate in found],
                self.env_id,
                attacks.by_name(config.attack),
                config.choose_eps,
                config.eps,
                config.choose_episodes,
                self.seed + VALIDATION_SEED_OFFSET,
                progress,
            )
        write_json(self.directory / "choice.json", choice.to_json())
        return found[choice.best]

    def teacher(self, given: Teacher | None = None, log: dict[str, Any] | None = None) -> Teacher:
        """The one given, kept with the log of its training; or one that is trained now."""
        folder = self.directory / "teacher"
        if given is None:
            with self.stage("teacher", "Training the teacher") as progress:
                trained = train_teacher(self.env_id, self.config.teacher_config, folder, self.seed, progress)
            if self.config.units == "teacher":
                check_eps(trained, describe(self.env_id), self.config.eps)  # its units are known only now
            return trained
        if given.architecture is not None:
            given.save(folder)
            if log is not None:  # how it was trained, for whoever gets the student
                write_json(folder / LOG_FILE, log)
        return given

    def demonstrations(self, teacher: Teacher) -> Demonstrations:
        states = self.config.collect.states
        if self.config.units != "teacher":  # the others are :meth:`plain`
            states = max(1, round((1.0 - PLAIN_SHARE) * states))
        config = replace(self.config.collect, states=states, eps_unit=self.config.noise)

        def collected(progress: Progress) -> Demonstrations:
            data = collect(teacher, self.env_id, config, self.seed, progress=progress)
            if states == self.config.collect.states or self.config.learns_from_another:  # else there are others to come
                check_splits(
                    data
                )  # what nothing can be learned from is not kept: it would be in the way of better data
            return self._with_answers(teacher, data)

        return self._data("data", "Collecting states", collected)

    def _with_answers(self, teacher: Teacher, data: Demonstrations) -> Demonstrations:
        """The data, refused if there is nothing to learn from them."""
        if self.config.student.learns_labels and len(np.unique(data.actions)) == 1:
            raise SortRLError(
                f"{teacher.name} plays action {data.actions[0]} in all of {len(data)} states, so there is nothing to learn "
                "from it. Train it longer, or give the normalisation that belongs to it (vecnormalize)."
            )
        return data

    def dagger(self, index: int, work: Work) -> Demonstrations:
        """States that a provisional student reaches, labelled by the teacher."""
        path = self.directory / f"dagger-{index}.safetensors"
        if path.exists():  # and the provisional student is needed no more
            return load_demonstrations(path)
        student = self.config.student.train(work, f"provisional student {index}", self.seed, short=True).policy
        seed, eps = self.seed + 10_000 * index, self.config.dagger_eps
        # Where the teacher shows little without exploring, a student does, too: one that stands still shows one state.
        exploration = max(CollectConfig().exploration, self.config.collect.exploration)
        noise = 0.0 if eps > 0 else self.config.noise
        config = CollectConfig(states=self.config.dagger_states, exploration=exploration, eps_unit=noise)
        actor = UnderAttack(student, describe(self.env_id), eps, seed) if eps > 0 else student
        return self._data(
            path.stem,
            "Collecting the student's states",
            lambda p: collect(work.teacher, self.env_id, config, seed, actor=actor, progress=p),
        )

    def _data(self, name: str, title: str, make: Callable[[Progress], Demonstrations]) -> Demonstrations:
        path = self.directory / f"{name}.safetensors"
        if not path.exists():
            with self.stage("collect", title) as progress:
                save_demonstrations(path, make(progress))
        return load_demonstrations(path)
