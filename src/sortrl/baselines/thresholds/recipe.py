"""The recipe of threshold students: distillation behind thresholds and, if asked for, further learning in the game."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch

from sortrl.baselines.thresholds.distill import ThresholdConfig, distill_thresholds
from sortrl.baselines.thresholds.polish import polished
from sortrl.core.errors import SortRLError
from sortrl.distill import Distilled
from sortrl.distill.recipe import Recipe, Work, training_stage
from sortrl.teachers.config import PQNConfig
from sortrl.teachers.train_pqn import Tutor


@dataclass(frozen=True)
class ThresholdRecipe(Recipe):
    """A student that compares every pixel with thresholds (:mod:`sortrl.nets.thresholds`)."""

    rounding: ThresholdConfig = field(default_factory=ThresholdConfig)
    polish: PQNConfig | None = None
    """Let the student go on learning in the game, from its teacher's values in the states of its own play; it needs ``norm``."""
    _main: ClassVar[str] = "rounding"

    def __post_init__(self) -> None:
        if self.polish is not None and not self.rounding.norm:
            raise SortRLError(
                "robustify: polish needs a student that learns values: the preset 'thresholds' with norm=True."
            )

    def train(self, work: Work, name: str, seed: int, short: bool = False) -> Distilled:
        config = replace(self.rounding, steps=max(1, self.rounding.steps // 3)) if short else self.rounding
        with training_stage(work, name) as (folder, progress):
            return distill_thresholds(
                work.training,
                work.teacher.normalizer,
                config,
                work.eps,
                held_out=work.held_out,
                out_dir=folder,
                seed=seed,
                progress=progress,
            )

    def finished(self, work: Work, student: Distilled) -> Distilled:
        if self.polish is None:
            return student
        data = work.training
        tutor = Tutor(work.teacher, torch.from_numpy(data.obs), torch.from_numpy(data.logits.astype(np.float32)))
        with work.stage("polish", "Learning on in the game") as progress:
            policy = polished(
                student.policy, work.env_id, self.polish, work.directory / "polished", work.seed, progress, tutor
            )
        return Distilled(policy, student.history, None)
