"""Distillation: a SortNet learns its teacher's actions while its margins are widened."""

from sortrl.distill.config import PRESETS, DistillConfig
from sortrl.distill.loop import Distilled, distill, held_out_metrics
from sortrl.distill.losses import imitation_loss, margins, robust_loss
from sortrl.distill.recipe import Recipe, SortRecipe, Work

__all__ = [
    "PRESETS",
    "DistillConfig",
    "Distilled",
    "Recipe",
    "SortRecipe",
    "Work",
    "distill",
    "held_out_metrics",
    "imitation_loss",
    "margins",
    "robust_loss",
]
