"""What policies achieve: returns clean and under attack, suites of attacks, episodes to look at, a run-time monitor."""

from sortrl.attacks.valid import valid_range
from sortrl.evaluate.monitor import Monitor
from sortrl.evaluate.returns import episode_seeds, evaluate, evaluate_curve

__all__ = ["Monitor", "episode_seeds", "evaluate", "evaluate_curve", "valid_range"]
