"""Distillation: a SortNet learns its teacher's actions while its margins are widened."""

from sortrl.distill.config import PRESETS, DistillConfig
from sortrl.distill.ladder import LadderRecipe
from sortrl.distill.loop import Distilled, distill, fit, held_out_metrics
from sortrl.distill.losses import imitation_loss, margins, robust_loss
from sortrl.distill.recipe import Recipe, SortRecipe, Work
from sortrl.distill.units import in_units, standardised

__all__ = [
    "PRESETS",
    "DistillConfig",
    "Distilled",
    "LadderRecipe",
    "Recipe",
    "SortRecipe",
    "Work",
    "distill",
    "fit",
    "held_out_metrics",
    "imitation_loss",
    "in_units",
    "margins",
    "robust_loss",
    "standardised",
]
