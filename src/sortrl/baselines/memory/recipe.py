"""The recipe of nearest-neighbour students: no training; the teacher's best episodes, searched for, kept and made small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sortrl.baselines.memory.compact import EPS_KEEP, SIZE, compact
from sortrl.baselines.memory.remember import best_episodes
from sortrl.baselines.memory.search import SearchConfig, search
from sortrl.baselines.memory.straighten import straightened
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_json, write_json
from sortrl.core.progress import Progress
from sortrl.core.records import Demonstrations
from sortrl.data.dataset import load_demonstrations, merge, save_demonstrations
from sortrl.distill import Distilled
from sortrl.distill.recipe import Recipe, Work


@dataclass(frozen=True)
class MemoryRecipe(Recipe):
    """A student that plays the action of the nearest remembered state."""

    search: SearchConfig = field(default_factory=SearchConfig)
    """How to look for episodes that win where the teacher never did."""
    eps_keep: float = EPS_KEEP
    """Each state keeps a certified radius of this size, or its own if that is smaller; less only if the student would be
    too large otherwise."""
    memory_bytes: int = SIZE
    """How large the student may be in half precision, as the zoo stores it."""
    pool: int = 1
    """Average pooling of images."""
    crop: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Borders of images to leave out (top, bottom, left, right)."""
    learns_labels: ClassVar[bool] = False  # it keeps what was played

    def __post_init__(self) -> None:
        if not 0 < self.eps_keep < float("inf"):
            raise SortRLError(f"robustify: eps_keep is {self.eps_keep}, expected a positive finite number.")
        if not isinstance(self.memory_bytes, int) or self.memory_bytes < 1:
            raise SortRLError(f"robustify: memory_bytes is {self.memory_bytes!r}, expected a whole number, at least 1.")

    def extended(self, work: Work) -> Demonstrations:
        """With episodes that win where none in the data does, and plainer ones, as far as they can be found."""
        data, config = work.training, self.search
        if config.steps > 0:
            title = "Searching where the teacher never won"
            data = _with_found(work, "search", title, data, lambda p: search(work.teacher, data, config, work.seed, p))
        whole = data
        if config.straighten:
            title = "Putting back the teacher's own answers"
            data = _with_found(
                work, "straighten", title, whole, lambda p: straightened(work.teacher, whole, config.goal, work.seed, p)
            )
        return data

    def train(self, work: Work, name: str, seed: int, short: bool = False) -> Distilled:
        with work.stage("remember", "Remembering the best episodes"):
            small = compact(
                best_episodes(work.training, plain=self.search.straighten),
                work.teacher.normalizer,
                self.pool,
                self.crop,
                self.eps_keep,
                self.memory_bytes,
            )
            write_json(work.directory / "memory.json", small.to_json())
        return Distilled(small.policy, [], None)

    def describe(self, directory: Path) -> dict[str, Any]:
        return {"memory": read_json(directory / "memory.json")}

    def to_json(self) -> dict[str, Any]:
        return {"remember": True, **super().to_json()}


def _with_found(
    work: Work, name: str, title: str, data: Demonstrations, find: Callable[[Progress], Demonstrations | None]
) -> Demonstrations:
    """The data and further episodes, which are found now or were before."""
    path, done = work.directory / f"{name}.safetensors", work.directory / f"{name}.json"
    if not done.exists():
        with work.stage(name, title) as progress:
            found = find(progress)
        if found is not None:
            save_demonstrations(path, found)
        write_json(done, {"episodes": 0 if found is None else len(np.unique(found.episodes))})
    return merge(data, load_demonstrations(path)) if path.exists() else data
