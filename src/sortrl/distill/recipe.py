"""A recipe: its settings, and how it makes a student of a teacher's demonstrations.

SortRL's own is :class:`SortRecipe`. Baselines bring theirs; a run treats all of them alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

from sortrl.attacks import Attack
from sortrl.core.progress import Progress
from sortrl.core.records import Demonstrations, EvalResult, Policy
from sortrl.distill.config import PRESETS, DistillConfig
from sortrl.distill.loop import Distilled, distill
from sortrl.teachers.teacher import Teacher


@dataclass(frozen=True)
class Work:
    """What a recipe works with, and where it keeps what it makes."""

    env_id: str
    teacher: Teacher
    training: Demonstrations
    held_out: Demonstrations
    eps: float
    """Perturbation to resist, unit space."""
    seed: int
    directory: Path
    stage: Callable[[str, str], AbstractContextManager[Progress]]
    """Opens a stage of the run (its name in the record, its title on the screen) and gives what to report progress to."""
    play: Callable[[Policy, Attack | None, int], EvalResult]
    """Plays that many of the run's validation episodes, attacked at eps: episodes of no data and of no test."""
    episodes: int
    """Validation episodes to judge a student by."""
    noise: float
    """Uniform noise, at most, under which states are collected."""


class Recipe(ABC):
    """How one kind of student is made. Subclasses are frozen dataclasses; their fields are the settings."""

    learns_labels: ClassVar[bool] = True
    """Whether it needs states with different answers."""

    def extended(self, work: Work) -> Demonstrations:
        """The demonstrations to learn from: those collected, or more that the recipe finds by itself."""
        return work.training

    @abstractmethod
    def train(self, work: Work, name: str, seed: int, short: bool = False) -> Distilled:
        """A student called ``name``; a ``short`` one serves to visit states for the next (DAgger)."""

    def chosen(self, work: Work) -> Distilled | None:
        """The student to keep, by a recipe that makes several and chooses itself; None leaves it to the run."""
        return None

    def finished(self, work: Work, student: Distilled) -> Distilled:
        """What becomes of the student that was chosen."""
        return student

    def describe(self, directory: Path) -> dict[str, Any]:
        """What else results.json should say about a student that was made in ``directory``."""
        return {}

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the settings, those inside of its parts included."""
        return tuple(self._homes())

    def with_options(self, **changes: Any) -> Self:
        """The recipe with other settings, all at once, because some are only valid together."""
        homes = self._homes()
        parts: dict[str, dict[str, Any]] = {}
        own = {}
        for name, value in changes.items():
            if homes[name] is None:
                own[name] = value
            else:
                parts.setdefault(str(homes[name]), {})[name] = value
        changed = {part: replace(getattr(self, part), **values) for part, values in parts.items()}
        return replace(self, **{**changed, **own})  # type: ignore[type-var]

    def for_eps(self, eps: float) -> Self:
        """The recipe for that eps; of no effect on recipes that do not train for one."""
        return self.with_options(eps=eps) if "eps" in self.options else self

    def to_json(self) -> dict[str, Any]:
        """The settings as a run's file has them."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    def _homes(self) -> dict[str, str | None]:
        """Setting -> the part that has it, None for the recipe's own."""
        found: dict[str, str | None] = {}
        for own in fields(self):  # type: ignore[arg-type]
            value = getattr(self, own.name)
            if own.name == self._main and is_dataclass(value):
                found |= {inner.name: own.name for inner in fields(value)}
            found[own.name] = None
        return found

    _main: ClassVar[str] = ""
    """The part whose settings can be named directly."""


@dataclass(frozen=True)
class SortRecipe(Recipe):
    """SortRL: a SortNet distilled from its teacher."""

    distill: DistillConfig = PRESETS["fast"]
    _main: ClassVar[str] = "distill"

    def train(self, work: Work, name: str, seed: int, short: bool = False) -> Distilled:
        config = replace(self.distill, steps=max(1, self.distill.steps // 3)) if short else self.distill
        return trained(work, name, seed, config)


def trained(work: Work, name: str, seed: int, config: DistillConfig) -> Distilled:
    """One training of a SortNet, as a stage of the run."""
    with training_stage(work, name) as (folder, progress):
        return distill(
            work.training,
            work.teacher.normalizer,
            config,
            held_out=work.held_out,
            out_dir=folder,
            seed=seed,
            progress=progress,
        )


@contextmanager
def training_stage(work: Work, name: str) -> Iterator[tuple[Path, Progress]]:
    """The folder of a student's training, and where to report its progress: the screen, and TensorBoard's log."""
    from torch.utils.tensorboard import SummaryWriter  # slow to import, and only needed while training

    folder = work.directory / name.replace(" ", "-")
    with work.stage("distill", f"Distilling the {name}") as progress:
        writer = SummaryWriter(str(folder / "tensorboard"))

        def both(row: dict[str, Any]) -> None:
            progress(row)
            for key in ("loss", "cross_entropy", "agreement", "certified", "p", "lambda"):
                if key in row:
                    writer.add_scalar(f"distill/{key}", row[key], row["step"])

        try:
            yield folder, both
        finally:
            writer.close()
