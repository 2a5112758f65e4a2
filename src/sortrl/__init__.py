"""sortrl: certified reinforcement-learning policies from ordinary ones.

>>> import sortrl
>>> policy = sortrl.SortPolicy(obs_shape=(4,), n_actions=2, width=16, depth=3)
>>> policy.certify([[0.0, 0.0, 0.0, 0.0]]).radius.shape
(1,)
"""

from sortrl import attacks
from sortrl.collect import collect
from sortrl.distill import DistillConfig, distill
from sortrl.errors import SortRLError
from sortrl.evaluate import evaluate
from sortrl.monitor import Monitor
from sortrl.nets import SortLinear, SortPolicy, load
from sortrl.pipeline import robustify
from sortrl.records import Certificate, Decision, Demonstrations, EvalResult
from sortrl.teachers import Teacher, load_teacher, train_teacher

__all__ = [
    "Certificate",
    "Decision",
    "Demonstrations",
    "DistillConfig",
    "EvalResult",
    "Monitor",
    "SortLinear",
    "SortPolicy",
    "SortRLError",
    "Teacher",
    "attacks",
    "collect",
    "distill",
    "evaluate",
    "load",
    "load_teacher",
    "robustify",
    "train_teacher",
]
