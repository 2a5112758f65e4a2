"""Return against compute: how the nearest-neighbour (memory) student improves with more teacher episodes.

Nearly all of its cost is playing episodes. Each point takes the first part of the data of the student of tables 2 and 4, makes
a student of that part and plays the 200 training levels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sortrl.baselines.memory.recipe import MemoryRecipe
from sortrl.baselines.memory.remember import best_episodes, remember
from sortrl.core.pieces import Engine
from sortrl.core.records import Demonstrations
from sortrl.data.dataset import select, split
from sortrl.evaluate.returns import evaluate
from sortrl.experiments.cells import CellTable, Facts, Found, TableDocument, cell_text, file_name, measured
from sortrl.experiments.experts import find_folder
from sortrl.experiments.figure1 import Scale
from sortrl.experiments.procgen import (
    CERTIFIED_AT,
    GAMES,
    LEAST_RETURN,
    MEMORY,
    PUBLISHED,
    SCALES,
    TEACHER,
    TEST_SEED,
    USUAL_EPISODES,
    student_run,
    teacher_of,
)
from sortrl.nets import CertifiedPolicy
from sortrl.runs.stages import VALIDATION_SHARE
from sortrl.teachers import Teacher

SHARES = (0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Point:
    """A student made of a share of the data."""

    game: str
    share: float
    agent: str = MEMORY

    @property
    def name(self) -> str:
        return file_name("compute", self.game, self.agent, self.share)


def compute(
    scale: Scale = "cpu",
    game: str | None = None,
    out: Path = Path("results"),
    work: Path = Path("runs/procgen"),
    teachers: Path | None = None,
    progress: Callable[[str], None] = print,
    engine: Engine | None = None,
) -> TableDocument:
    """Measure the points that are missing, and write ``compute.json`` after each of them."""
    folder = find_folder(teachers, "procgen", PUBLISHED["Jumper"][TEACHER])
    points = [Point(name, share) for name in GAMES for share in SHARES]
    facts: Facts = {"protocol": f"clean greedy play on the training levels, seed {TEST_SEED}; see table2.json"}

    def measure(point: Point, whole: _Source) -> Found:
        part = first_part(whole.data, point.share)
        episodes = best_episodes(part)
        result = evaluate(whole.student_of(episodes), part.env_id, None, 0.0, SCALES[scale].student, TEST_SEED)
        return {
            **measured(point, result, CERTIFIED_AT, LEAST_RETURN),
            "states": len(part),
            "tries": len(np.unique(part.episodes)),
            "memories": len(episodes),
        }

    return CellTable("compute", scale, points, work / scale, out, facts).fill(
        lambda point: _source(point.game, work, folder, scale, progress),
        measure,
        lambda _, source: {TEACHER: source.teacher},
        progress,
        game,
        start_of=lambda point: teacher_of(point.game, work, folder, progress),
        engine=engine,
    )


@dataclass(frozen=True)
class _Source:
    """Teacher and data of the student of the tables, and the function that makes a student of episodes."""

    teacher: Teacher
    data: Demonstrations
    student_of: Callable[[Demonstrations], CertifiedPolicy]


def _source(game: str, work: Path, published: Path | None, scale: Scale, progress: Callable[[str], None]) -> _Source:
    teacher = teacher_of(game, work, published, progress)
    with student_run(game, MEMORY, work, scale, teacher) as run:
        training, _ = split(run.demonstrations(teacher), VALIDATION_SHARE, run.seed)
    settings = run.config.student
    assert isinstance(settings, MemoryRecipe)
    return _Source(
        teacher, training, lambda episodes: remember(episodes, teacher.normalizer, settings.pool, settings.crop)
    )


def first_part(demos: Demonstrations, share: float) -> Demonstrations:
    """The first episodes, as many as have that share of the states."""
    numbers, sizes = np.unique(demos.episodes, return_counts=True)
    kept = numbers[np.cumsum(sizes) <= share * len(demos)]
    return select(demos, np.isin(demos.episodes, kept))


def table_lines(results: TableDocument) -> list[str]:
    """The points in Markdown."""
    lines = ["| game | states played | tries | states kept | clean return | proven at 5/255 |", "|---" * 6 + "|"]
    for found in results["cells"]:
        numbers = f"{found['states']:,} | {found['tries']:,} | {found['memories']:,}"
        text = cell_text(found, USUAL_EPISODES)
        lines.append(f"| {found['cell']['game']} | {numbers} | {text} | {found['proven']['5']:.2f} |")
    return lines
