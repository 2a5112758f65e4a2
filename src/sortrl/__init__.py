"""sortrl: certified reinforcement-learning policies from ordinary ones.

>>> import sortrl
>>> policy = sortrl.SortPolicy(obs_shape=(4,), n_actions=2, width=16, depth=3)
>>> policy.certify([[0.0, 0.0, 0.0, 0.0]]).radius.shape
(1,)

Names are imported when they are first used: torch alone takes seconds, and ``sortrl --version`` needs none of it.
"""

import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sortrl import attacks
    from sortrl.core.errors import SortRLError
    from sortrl.core.records import Certificate, Decision, Demonstrations, EvalResult
    from sortrl.data.collect import collect
    from sortrl.distill import DistillConfig, distill
    from sortrl.evaluate.monitor import Monitor
    from sortrl.evaluate.returns import evaluate
    from sortrl.nets import SortLinear, SortPolicy, load
    from sortrl.runs.robustify import robustify
    from sortrl.runs.teach import train_teacher
    from sortrl.teachers import Teacher, load_teacher

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

_HOME = {
    "Certificate": "sortrl.core.records",
    "Decision": "sortrl.core.records",
    "Demonstrations": "sortrl.core.records",
    "DistillConfig": "sortrl.distill",
    "EvalResult": "sortrl.core.records",
    "Monitor": "sortrl.evaluate.monitor",
    "SortLinear": "sortrl.nets",
    "SortPolicy": "sortrl.nets",
    "SortRLError": "sortrl.core.errors",
    "Teacher": "sortrl.teachers",
    "collect": "sortrl.data.collect",
    "distill": "sortrl.distill",
    "evaluate": "sortrl.evaluate.returns",
    "load": "sortrl.nets",
    "load_teacher": "sortrl.teachers",
    "robustify": "sortrl.runs.robustify",
    "train_teacher": "sortrl.runs.teach",
}


class _Package(ModuleType):
    """``sortrl.evaluate`` is the function, also after something has imported the module of that name."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _HOME and isinstance(value, ModuleType):
            return  # the import system binds every submodule to its package
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name in _HOME:
        value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"sortrl.{name}"):
        return importlib.import_module(f"sortrl.{name}")
    raise AttributeError(f"module 'sortrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
