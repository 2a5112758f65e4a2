"""The stages of a run from the teacher to the policy, each kept in a file of the run's directory.

A killed run continues when it is started again with the same settings: a finished stage is read from its file, an
unfinished training from its checkpoint.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sortrl import attacks, nets
from sortrl.attacked import UnderAttack
from sortrl.attacks.valid import check_eps
from sortrl.choosing import choose
from sortrl.collect import CollectConfig, collect
from sortrl.compact import compact
from sortrl.config import RobustifyConfig
from sortrl.datasets import load_demonstrations, merge, save_demonstrations, split
from sortrl.distill import DistillConfig, Distilled, distill, held_out_metrics
from sortrl.envs import describe
from sortrl.errors import SortRLError
from sortrl.files import read_object, write_json
from sortrl.nets import CertifiedPolicy
from sortrl.polish import polished
from sortrl.progress import Report, stage
from sortrl.records import Demonstrations
from sortrl.remember import best_episodes
from sortrl.rounding import RoundingConfig, distill_rounded
from sortrl.search import SearchConfig, search
from sortrl.straighten import straightened
from sortrl.teachers import Teacher, decided_at_start, hardened, load_teacher, smoothed, steadied, train_teacher
from sortrl.teachers.grading import LOG_FILE
from sortrl.teachers.pq import Tutor

VALIDATION_SHARE = 0.1
CHOICE = ("candidates", "choose_eps", "choose_episodes")
VALIDATION_SEED_OFFSET = 0  # a run's seed lies below 1000
TEST_SEED_OFFSET = 1000  # test episodes never coincide with those that data or choices were made from


class Stages:
    """What one run has in its directory. Each stage returns what the next one needs, made now or read back."""

    def __init__(
        self,
        directory: Path,
        env_id: str,
        config: RobustifyConfig,
        seed: int,
        quiet: bool = True,
        shared: Path | None = None,
    ) -> None:
        self.directory, self.env_id, self.config, self.seed, self.quiet = directory, env_id, config, seed, quiet
        self.shared = shared or directory  # what is made of the teacher does not depend on the seed of a student
        self.seconds: dict[str, float] = {}

    def claim(self, source: str) -> None:
        """Make sure that what lies in the directory belongs to this run."""
        config = plain(asdict(self.config))
        if not self.config.remember:  # what a memory alone needs: older runs do not mention it
            config = {name: value for name, value in config.items() if name not in ("eps_keep", "memory_bytes")}
        if config["rounding"] is None:  # likewise, of students that see rounded pixels
            del config["rounding"]
        elif not config["rounding"]["norm"]:
            del config["rounding"]["norm"]
        if self.config.polish is None:
            del config["polish"], config["tutored"]
        for name in ("harden", "steady"):  # likewise, of teachers that are changed first
            if config[name] is None:
                del config[name]
        if self.config.candidates == 1:
            config = {name: value for name, value in config.items() if name not in CHOICE}
        for name in ("focus", "spread", "sticky"):  # likewise
            if not config["collect"][name]:
                del config["collect"][name]
        if self.config.search == SearchConfig():
            del config["search"]
        identity = {"env": self.env_id, "seed": self.seed, "teacher": source, "config": config}
        path = self.directory / "run.json"
        if path.exists():
            document = read_object(path)
            if document.get("identity") != identity:
                raise SortRLError(
                    f"{self.directory} holds a run with other settings. Choose another --out, or delete it to start over."
                )
            taken = document.get("stage_seconds")
            if not isinstance(taken, dict) or not all(isinstance(value, float) for value in taken.values()):
                raise SortRLError(f"{path}: stage_seconds is {str(taken)[:60]}, expected numbers. Delete {path}.")
            self.seconds = taken
            return
        write_json(path, {"identity": identity, "started": _now(), "stage_seconds": {}})

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
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - started, 2)
            path = self.directory / "run.json"
            if path.exists():
                write_json(path, {**read_object(path), "stage_seconds": self.seconds})

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
        if len(np.unique(data.actions)) == 1 and not self.config.remember:  # a memory keeps what was played, not labels
            raise SortRLError(
                f"{teacher.name} plays action {data.actions[0]} in all of {len(data)} states, so there is nothing to learn "
                "from it. Train it longer, or give the normalisation that belongs to it (vecnormalize)."
            )
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
        if self.config.harden is not None:
            with self._stage("teacher", "Hardening the teacher") as progress:
                teacher = hardened(teacher, self.env_id, self.config.harden, self.shared / "hardened", progress)
        if self.config.steady is not None:
            with self._stage("teacher", "Steadying the teacher") as progress:
                teacher = steadied(teacher, self.env_id, self.config.steady, self.shared, progress)
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

    def teacher(self, source: Any = None, vecnormalize: Any = None, allow_pickle: bool = False) -> Teacher:
        folder = self.directory / "teacher"
        if source is None:
            with self._stage("teacher", "Training the teacher") as progress:
                trained = train_teacher(self.env_id, self.config.teacher_config, folder, self.seed, progress)
            check_eps(trained, describe(self.env_id), self.config.eps)  # its units are known only now
            return trained
        # Where actions are merged, the student learns the agent's own greedy play.
        teacher = load_teacher(source, self.env_id, vecnormalize=vecnormalize, allow_pickle=allow_pickle, merge="max")
        check_eps(teacher, describe(self.env_id), self.config.eps)
        if teacher.architecture is not None:
            teacher.save(folder)
            log = Path(source) / LOG_FILE if isinstance(source, (str, Path)) else None
            if log is not None and log.is_file():  # how it was trained, for whoever gets the student
                write_json(folder / LOG_FILE, read_object(log))
        return teacher

    def demonstrations(self, teacher: Teacher) -> Demonstrations:
        config = replace(self.config.collect, eps_unit=self.config.noise)
        return self._data(
            "data",
            "Collecting states",
            lambda p: collect(teacher, self.env_id, config, self.seed, progress=p),
        )

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


def plain(value: Any) -> Any:
    """Tuples as lists, so that a record equals itself after a round trip through JSON."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
