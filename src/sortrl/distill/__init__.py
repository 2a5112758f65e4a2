"""Distillation: a SortNet learns its teacher's actions while its margins are widened."""

from sortrl.distill.loop import PRESETS, DistillConfig, Distilled, distill, held_out_metrics

__all__ = ["PRESETS", "DistillConfig", "Distilled", "distill", "held_out_metrics"]
