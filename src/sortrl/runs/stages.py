"""The stages of a run from the teacher to the policy, each kept in a file of the run's directory.

A killed run continues when it is started again with the same settings: a finished stage is read from its file, an
unfinished training from its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sortrl import attacks, nets
from sortrl.attacks.valid import check_eps
from sortrl.baselines.memory.compact import compact
from sortrl.baselines.memory.remember import best_episodes
from sortrl.baselines.memory.search import search
from sortrl.baselines.memory.straighten import straightened
from sortrl.baselines.thresholds.distill import RoundingConfig, distill_rounded
from sortrl.baselines.thresholds.polish import polished
from sortrl.core.errors import SortRLError
from sortrl.core.files import locked, remove_leftovers, write_json
from sortrl.core.progress import Report, stage
from sortrl.core.records import Demonstrations
from sortrl.data.attacked import UnderAttack
from sortrl.data.collect import CollectConfig, collect
from sortrl.data.dataset import check_splits, load_demonstrations, merge, save_demonstrations, split
from sortrl.distill.loop import DistillConfig, Distilled, distill, held_out_metrics
from sortrl.envs import describe
from sortrl.nets import CertifiedPolicy
from sortrl.runs.choosing import choose
from sortrl.runs.config import RobustifyConfig
from sortrl.teachers import Teacher, decided_at_start, hardened, smoothed, steadied, train_teacher
from sortrl.teachers.grading import LOG_FILE
from sortrl.teachers.train_pqn import Tutor

VALIDATION_SHARE = 0.1
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


class Stages:
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
    def _stage(self, name: str, title: str) -> Iterator[Report]:
        """Show progress, and add the time to the record."""
        with self._timed(name), stage(title, self.quiet) as progress:
            yield progress

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the time to the record, also of a stage that is finished in a later attempt."""
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = self.claim.seconds
            seconds[name] = round(seconds.get(name, 0.0) + time.monotonic() - started, 2)
            self.claim.write()

    def student(self, teacher: Teacher) -> CertifiedPolicy:
        """Data and distillation: everything up to the policy."""
        if (self.directory / "policy.safetensors").exists():
            return nets.load(self.directory)
        teacher = self.prepared(teacher)
        if self.config.smoothing > 0:
            teacher = smoothed(teacher, self.config.smoothing)
        if self.config.start_radius > 0:
            teacher = decided_at_start(teacher, self.env_id, self.config.start_radius)
        data = self.demonstrations(teacher)
        training, held_out = split(data, VALIDATION_SHARE, self.seed)
        if self.config.remember:
            training = self.searched(training, teacher)
            return self._finish(self.remembered(training, teacher), [], training, held_out)
        for index in range(1, self.config.dagger_rounds + 1):
            training = merge(training, self.dagger(index, training, held_out, teacher))
        final = self.chosen(training, held_out, teacher)
        if self.config.polish is not None:
            return self._finish(self.polished(final.policy, training, teacher), final.history, training, held_out)
        return self._finish(final.policy, final.history, training, held_out, final.held_out)

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
            with self._stage("teacher", "Hardening the teacher") as progress:
                teacher = hardened(teacher, self.env_id, self.config.harden, folder / HARDENED, progress)
        if self.config.steady is not None:
            with self._stage("teacher", "Steadying the teacher") as progress:
                teacher = steadied(teacher, self.env_id, self.config.steady, folder, progress)
        return teacher

    def _finish(
        self,
        policy: CertifiedPolicy,
        history: list[dict[str, Any]],
        training: Demonstrations,
        held_out: Demonstrations,
        metrics: dict[str, float] | None = None,
    ) -> CertifiedPolicy:
        """Keep the policy, and what its data and training were."""
        metrics = metrics or held_out_metrics(policy, held_out, self.config.eps)
        data = merge(training, held_out)
        facts = {
            "states": len(data),
            "distinct": data.n_distinct,
            "dagger_states": self.config.dagger_rounds * self.config.dagger_states,
            "held_out_states": len(held_out),
            "agreement": metrics["agreement"],
            "certified": metrics["certified"],
        }
        write_json(self.directory / "training.json", {"history": history, "data": facts})
        policy.save(self.directory)
        return policy

    def searched(self, data: Demonstrations, teacher: Teacher) -> Demonstrations:
        """With episodes that win where none in the data does, and plainer ones, as far as they can be found."""
        config = self.config.search
        if config.steps > 0:
            data = self._with_found(
                "search",
                "Searching where the teacher never won",
                data,
                lambda p: search(teacher, data, config, self.seed, p),
            )
        whole = data
        if config.straighten:
            data = self._with_found(
                "straighten",
                "Putting back the teacher's own answers",
                whole,
                lambda p: straightened(teacher, whole, config.goal, self.seed, p),
            )
        return data

    def _with_found(
        self, name: str, title: str, data: Demonstrations, find: Callable[[Report], Demonstrations | None]
    ) -> Demonstrations:
        """The data and further episodes, which are found now or were before."""
        path, done = self.directory / f"{name}.safetensors", self.directory / f"{name}.json"
        if not done.exists():
            with self._stage(name, title) as progress:
                found = find(progress)
            if found is not None:
                save_demonstrations(path, found)
            write_json(done, {"episodes": 0 if found is None else len(np.unique(found.episodes))})
        return merge(data, load_demonstrations(path)) if path.exists() else data

    def chosen(self, training: Demonstrations, held_out: Demonstrations, teacher: Teacher) -> Distilled:
        """The student; of several candidates the best on validation episodes, which are those of no data and of no test."""
        config = self.config
        names = ["student", *(f"candidate {number}" for number in range(1, config.candidates))]
        found = [
            self.distilled(name, training, held_out, teacher, config.training, number)
            for number, name in enumerate(names)
        ]
        if len(found) == 1:
            return found[0]
        with self._stage("choose", f"Choosing among {len(found)} candidates") as progress:
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

    def polished(self, policy: CertifiedPolicy, training: Demonstrations, teacher: Teacher) -> CertifiedPolicy:
        """The student after it has gone on learning in the game."""
        assert self.config.polish is not None
        folder = self.directory / "polished"
        known = torch.from_numpy(training.obs), torch.from_numpy(training.logits.astype(np.float32))
        tutor = Tutor(teacher, *known) if self.config.tutored else None
        with self._stage("polish", "Learning on in the game") as progress:
            return polished(policy, self.env_id, self.config.polish, folder, self.seed, progress, tutor)

    def remembered(self, data: Demonstrations, teacher: Teacher) -> CertifiedPolicy:
        """A student that is not trained: the best episodes in the data, and the nearest neighbour among their states."""
        with self._stage("remember", "Remembering the best episodes"):
            config = self.config.distill
            small = compact(
                best_episodes(data, plain=self.config.search.straighten),
                teacher.normalizer,
                config.pool,
                config.crop,
                self.config.eps_keep,
                self.config.memory_bytes,
            )
            write_json(self.directory / "memory.json", small.to_json())
            return small.policy

    def teacher(self, given: Teacher | None = None, log: dict[str, Any] | None = None) -> Teacher:
        """The one given, kept with the log of its training; or one that is trained now."""
        folder = self.directory / "teacher"
        if given is None:
            with self._stage("teacher", "Training the teacher") as progress:
                trained = train_teacher(self.env_id, self.config.teacher_config, folder, self.seed, progress)
            check_eps(trained, describe(self.env_id), self.config.eps)  # its units are known only now
            return trained
        if given.architecture is not None:
            given.save(folder)
            if log is not None:  # how it was trained, for whoever gets the student
                write_json(folder / LOG_FILE, log)
        return given

    def demonstrations(self, teacher: Teacher) -> Demonstrations:
        config = replace(self.config.collect, eps_unit=self.config.noise)

        def collected(progress: Report) -> Demonstrations:
            data = collect(teacher, self.env_id, config, self.seed, progress=progress)
            check_splits(data)  # what nothing can be learned from is not kept: it would be in the way of better data
            # A memory keeps what was played, not labels.
            if len(np.unique(data.actions)) == 1 and not self.config.remember:
                raise SortRLError(
                    f"{teacher.name} plays action {data.actions[0]} in all of {len(data)} states, so there is nothing to learn "
                    "from it. Train it longer, or give the normalisation that belongs to it (vecnormalize)."
                )
            return data

        return self._data("data", "Collecting states", collected)

    def dagger(
        self, index: int, training: Demonstrations, held_out: Demonstrations, teacher: Teacher
    ) -> Demonstrations:
        """States that a provisional student reaches, labelled by the teacher."""
        path = self.directory / f"dagger-{index}.safetensors"
        if path.exists():  # and the provisional student is needed no more
            return load_demonstrations(path)
        short = replace(self.config.training, steps=max(1, self.config.training.steps // 3))
        student = self.distilled(f"provisional student {index}", training, held_out, teacher, short).policy
        seed, eps = self.seed + 10_000 * index, self.config.dagger_eps
        config = CollectConfig(states=self.config.dagger_states, eps_unit=0.0 if eps > 0 else self.config.noise)
        actor = UnderAttack(student, describe(self.env_id), eps, seed) if eps > 0 else student
        return self._data(
            path.stem,
            "Collecting the student's states",
            lambda p: collect(teacher, self.env_id, config, seed, actor=actor, progress=p),
        )

    def _data(self, name: str, title: str, make: Callable[[Report], Demonstrations]) -> Demonstrations:
        path = self.directory / f"{name}.safetensors"
        if not path.exists():
            with self._stage("collect", title) as progress:
                save_demonstrations(path, make(progress))
        return load_demonstrations(path)

    def distilled(
        self,
        name: str,
        training: Demonstrations,
        held_out: Demonstrations,
        teacher: Teacher,
        config: DistillConfig | RoundingConfig,
        number: int = 0,
    ) -> Distilled:
        folder = self.directory / name.replace(" ", "-")
        with self._stage("distill", f"Distilling the {name}") as progress, _tensorboard(folder) as log:

            def both(row: dict[str, Any]) -> None:
                progress(row)
                log(row)

            seed = self.seed + TEST_SEED_OFFSET * number
            how: dict[str, Any] = {"held_out": held_out, "out_dir": folder, "seed": seed, "progress": both}
            if isinstance(config, RoundingConfig):
                return distill_rounded(training, teacher.normalizer, config, self.config.eps, **how)
            return distill(training, teacher.normalizer, config, **how)


@contextmanager
def _tensorboard(folder: Path) -> Iterator[Report]:
    """A TensorBoard log of the training measurements."""
    from torch.utils.tensorboard import SummaryWriter  # slow to import, and only needed while training

    writer = SummaryWriter(str(folder / "tensorboard"))

    def log(row: dict[str, Any]) -> None:
        for name in ("loss", "cross_entropy", "agreement", "certified", "p", "lambda"):
            if name in row:
                writer.add_scalar(f"distill/{name}", row[name], row["step"])

    try:
        yield log
    finally:
        writer.close()
