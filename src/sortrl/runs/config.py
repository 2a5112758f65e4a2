"""Everything that determines a run, with the defaults of its task and preset."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Any, Literal

from sortrl.baselines.memory.compact import EPS_KEEP, SIZE
from sortrl.baselines.memory.search import SearchConfig
from sortrl.baselines.thresholds.distill import RoundingConfig
from sortrl.core.errors import SortRLError
from sortrl.data.collect import CollectConfig
from sortrl.distill.loop import PRESETS, DistillConfig
from sortrl.runs.tasks import MEASURED, TASKS, Task
from sortrl.teachers import HardenConfig, PQNConfig, SteadyConfig, TeacherConfig, teacher_preset

Preset = Literal["fast", "paper", "memory", "rounded"]
RECIPES: dict[str, DistillConfig] = {**PRESETS, "memory": PRESETS["fast"], "rounded": PRESETS["fast"]}


@dataclass(frozen=True)
class RobustifyConfig:
    """Everything that determines the result of ``robustify`` besides the teacher and the seed."""

    eps: float
    preset: Preset
    teacher_config: TeacherConfig | None
    collect: CollectConfig
    distill: DistillConfig
    dagger_rounds: int
    """Provisional students, each trained for a third of the steps, whose states the teacher labels for the next."""
    dagger_states: int
    """States per round."""
    dagger_eps: float
    """Perturbation, at most, under which the provisional students act: PGD leads them where an adversary would."""
    noise: float
    """Students and teacher act on observations with uniform noise of up to this size while states are collected, so
    that the data hold what a disturbed agent meets."""
    remember: bool
    """Make a student that is not trained but remembers the teacher's best episodes (:mod:`sortrl.baselines.memory.remember`)."""
    search: SearchConfig
    """For such a student: how to look for episodes that win where the teacher never did (:mod:`sortrl.baselines.memory.search`)."""
    smoothing: float
    """The student learns from the teacher averaged over Gaussian displacements of this size; 0 for the teacher itself."""
    start_radius: float
    """Closer than this to where episodes begin, the student learns one action, the one that the teacher prefers there; 0 for
    the teacher's own choice. It keeps an adversary from deciding a start on the teacher's switching surface."""
    episodes: int
    """Test episodes per point."""
    eps_grid: tuple[float, ...]
    """Where the return under attack is measured."""
    attack: str = "pgd-10"
    """The attack along ``eps_grid``."""
    suite: tuple[str, ...] = ("noise", "pgd-10-p32", "apgd-ce-10", "square-20")
    """Attacks of other kinds, at the eps that is trained for; "learned" trains an adversary against each agent (minutes)."""
    suite_episodes: int = 10
    adversary_steps: int = 100_000
    """Environment steps in which a learned adversary is trained."""
    eps_keep: float = EPS_KEEP
    """A student that remembers is made small by :mod:`sortrl.baselines.memory.compact`: each state keeps a radius of this size, or its own if
    that is smaller; less only if the student would be too large otherwise."""
    memory_bytes: int = SIZE
    """How large a student that remembers may be in half precision, as the zoo stores it."""
    rounding: RoundingConfig | None = None
    """Make a student that sees rounded pixels (:mod:`sortrl.baselines.thresholds.distill`); ``distill`` then says nothing."""
    polish: PQNConfig | None = None
    """Let that student go on learning in the game itself, by Q-learning (:mod:`sortrl.baselines.thresholds.polish`); it needs ``norm``."""
    tutored: bool = True
    """There it learns from the teacher's values in the states of its own play; or else from rewards, without the teacher."""
    harden: HardenConfig | None = None
    """First train the teacher on, by reinforcement learning, while it is attacked (:mod:`sortrl.teachers.hardening`); the student
    learns from the one that comes out. None: from the teacher as it is."""
    steady: SteadyConfig | None = None
    """First search near the teacher for one that plays as well and whose decisions fewer small displacements change
    (:mod:`sortrl.teachers.steadying`); the student learns from that one. None: from the teacher as it is."""
    candidates: int = 1
    """Students distilled from the same data with different random numbers; the best on validation episodes is kept."""
    choose_eps: tuple[float, ...] = (0.0,)
    """The return that candidates are chosen by is the mean over these eps, attacked by ``attack``; of equals the one with more
    decisions certified at ``eps`` is kept."""
    choose_episodes: int = 50
    """Validation episodes at each of those eps."""

    @property
    def training(self) -> DistillConfig | RoundingConfig:
        """How the student is trained."""
        return self.distill if self.rounding is None else self.rounding

    def __post_init__(self) -> None:
        for name, least in (
            ("episodes", 1),
            ("suite_episodes", 1),
            ("dagger_rounds", 0),
            ("dagger_states", 1),
            ("memory_bytes", 1),
            ("candidates", 1),
            ("choose_episodes", 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise SortRLError(f"robustify: {name} is {value!r}, expected a whole number, at least {least}.")
        for name in ("noise", "smoothing", "start_radius", "dagger_eps"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise SortRLError(f"robustify: {name} is {getattr(self, name)}, expected a finite number >= 0.")
        if not 0 < self.eps_keep < float("inf"):
            raise SortRLError(f"robustify: eps_keep is {self.eps_keep}, expected a positive finite number.")
        if not self.choose_eps or not all(0 <= eps < float("inf") for eps in self.choose_eps):
            raise SortRLError(f"robustify: choose_eps is {self.choose_eps}, expected one or more finite numbers >= 0.")
        if 0.0 not in self.eps_grid or not all(0 <= eps < float("inf") for eps in self.eps_grid):
            raise SortRLError(
                f"robustify: eps_grid is {self.eps_grid}, expected finite numbers >= 0, and 0 among them."
            )


def robustify_config(
    env_id: str, eps: float | None = None, preset: Preset = "fast", train_teacher: bool = True, **changes: Any
) -> RobustifyConfig:
    """The defaults for a task; ``changes`` replace fields of the result or of its ``distill`` part.

    >>> robustify_config("CartPole-v1", eps=0.2, steps=10).distill.steps
    10
    """
    task = TASKS.get(env_id, Task(env_id, ""))
    eps = task.eps if eps is None else eps
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise SortRLError(f"robustify: eps is {eps!r}, expected a number in the teacher's input units.")
    if preset not in RECIPES:
        raise SortRLError(f"Unknown preset {preset!r}; choose one of {', '.join(RECIPES)}.")
    fast = preset == "fast"  # the printed recipe has the teacher's own greedy states alone
    memory, rounded = preset == "memory", preset == "rounded"
    states = CollectConfig(states=50_000, exploration=0.5 if fast or rounded else 0.0)
    if memory:  # many tries from every start, so that one of them is good
        states = CollectConfig(states=200_000, exploration=1.0, slots=64)
    config = RobustifyConfig(
        eps=eps,
        preset=preset,
        teacher_config=teacher_preset(env_id) if train_teacher else None,
        collect=states,
        distill=replace(RECIPES[preset], eps=eps),
        dagger_rounds=1 if fast or rounded else 0,
        dagger_states=20_000,
        dagger_eps=0.0,
        noise=eps if fast else 0.0,
        remember=memory,
        search=SearchConfig(),
        smoothing=0.0,
        start_radius=0.0,
        episodes=30,
        eps_grid=tuple(round(share * eps, 6) for share in (0.0, 0.5, 1.0, 1.5, 2.0)),
        rounding=RoundingConfig() if rounded else None,
    )
    own = task.fast if fast else {name: task.fast[name] for name in MEASURED if preset != "paper" and name in task.fast}
    own = own | {"memory": task.memory, "rounded": task.rounded, "paper": task.paper}.get(preset, {})
    return _with_changes(config, {**own, **{k: v for k, v in changes.items() if v is not None}})


def _with_changes(config: RobustifyConfig, changes: dict[str, Any]) -> RobustifyConfig:
    own, training = RobustifyConfig.__dataclass_fields__, config.training.__dataclass_fields__
    for name in changes:
        if name not in own and name not in training:
            close = difflib.get_close_matches(name, [*own, *training], n=1)
            raise SortRLError(f"robustify has no option {name!r}." + (f" Did you mean {close[0]!r}?" if close else ""))
    # All at once, because some are only valid together.
    config = replace(config, **{name: value for name, value in changes.items() if name in own})
    changed: Any = replace(config.training, **{name: v for name, v in changes.items() if name not in own})
    return replace(config, **{"distill" if config.rounding is None else "rounding": changed})
