"""Evaluation: returns clean and under attack, attack suites, single recorded episodes, a run-time monitor."""

from sortrl.attacks.valid import valid_range
from sortrl.evaluate.monitor import Monitor
from sortrl.evaluate.returns import episode_seeds, evaluate, evaluate_curve

__all__ = ["Monitor", "episode_seeds", "evaluate", "evaluate_curve", "valid_range"]
