"""The table of tasks: what is known to work for each, so that one command needs no further option."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sortrl.collect import CollectConfig
from sortrl.compact import EPS_KEEP, SIZE
from sortrl.distill import PRESETS, DistillConfig
from sortrl.errors import SortRLError
from sortrl.rounding import RoundingConfig
from sortrl.search import SearchConfig
from sortrl.teachers import HardenConfig, PQNConfig, SteadyConfig, TeacherConfig, continued, teacher_preset

Preset = Literal["fast", "paper", "memory", "rounded"]
RECIPES: dict[str, DistillConfig] = {**PRESETS, "memory": PRESETS["fast"], "rounded": PRESETS["fast"]}


@dataclass(frozen=True)
class Task:
    """Defaults of one environment."""

    env_id: str
    summary: str
    eps: float = 0.1
    """Perturbation to train for, in the teacher's input units."""
    fast: dict[str, Any] = field(default_factory=dict)
    """Fields of ``RobustifyConfig`` and ``DistillConfig`` that differ from the ``fast`` preset's, for normalising teachers."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Likewise for the ``memory`` preset."""
    rounded: dict[str, Any] = field(default_factory=dict)
    """Likewise for the ``rounded`` preset, with the fields of ``RoundingConfig``."""
    paper: dict[str, Any] = field(default_factory=dict)
    """Likewise for the ``paper`` preset."""


# Students of large images: convolutions, of which the last sees everything, one sort layer and a linear head.
IMAGES: dict[str, Any] = {
    "dagger_rounds": 2,
    "noise": 2 / 255,
    "depth": 1,
    "head": (),
    "scale": 100.0,
    "batch": 256,
    "steps": 9000,
    "learning_rate": 0.01,
    "head_learning_rate": 0.001,
    "worst_share": 0.5,
    "lambda_end": 1.0,
    "warm_share": 0.3,
    "final_share": 0.2,
    "exact_share": 0.2,
    "eps_grid": tuple(k / 255 for k in (0, 1, 2, 3, 5)),  # those of the tables, and the one that is trained for
    "suite": (),  # the tables have attacks enough
}
# As printed for video games: sort layers on the pixels, two linear layers behind them, 100,000 states of the teacher's own play.
PRINTED: dict[str, Any] = {
    "collect": CollectConfig(states=100_000, exploration=0.0, slots=64),
    "width": 1280,
    "depth": 6,
    "head": (256, 256),
    "theta_factor": 2.2,
}
PROCGEN: dict[str, Any] = {
    **IMAGES,
    # Greedy agents stand still for hundreds of steps; sampled ones show what there is to see.
    "collect": CollectConfig(states=100_000, exploration=1.0, random_actions=0.02, slots=64),
    "bounded_conv": ((24, 4, 4), (48, 3, 2), (256, 7, 1)),  # 64 x 64 -> 16 -> 7 -> 1
}
# Many tries from every level, as many again from those that were not yet solved twice, a search where all were lost; and of all
# that won only what the teacher would not have done by itself.
LEVELS: dict[str, Any] = {
    "collect": CollectConfig(states=200_000, exploration=1.0, focus=0.5, slots=64),
    "search": SearchConfig(steps=1_000_000, goal=10.0, straighten=True),
}
ATARI: dict[str, Any] = {
    **IMAGES,
    # A Q-learner is greedy, and a seed only draws 1 to 30 idle frames: random actions make the episodes differ.
    "collect": CollectConfig(states=100_000, exploration=0.5, random_actions=0.05, slots=64),
    "bounded_conv": ((24, 8, 4), (48, 4, 2), (256, 9, 1)),  # 84 x 84 -> 20 -> 9 -> 1
    "episodes": 20,  # as the literature has it
}
# The teacher's own play from all thirty starts, and episodes in which it has to find its way back.
ATARI_ROUNDED: dict[str, Any] = {
    "collect": CollectConfig(states=130_000, exploration=0.5, random_actions=0.05, sticky=0.25, spread=True, slots=64),
    "dagger_rounds": 1,
    "dagger_states": 40_000,
    "noise": 0.0,
}

# Distilled only as a start; then such a student goes on with its teacher's answers to the states of its own play.
PONG_ROUNDED: dict[str, Any] = {
    **ATARI_ROUNDED,
    "norm": True,
    "steps": 4000,
    "polish": replace(
        continued("sortrl/Pong84-v0"),
        total_steps=200_000,
        eval_every=65_536,
        eval_episodes=20,
        exploration_final_eps=0.01,
        target_return=None,
    ),
}
# Thirty starts, several times each: a Q-learner's own play, and tries with an accident now and then that may end better.
ATARI_MEMORY: dict[str, Any] = {
    "collect": CollectConfig(states=250_000, exploration=0.3, random_actions=0.01, focus=0.2, spread=True, slots=64)
}
# Four thousand steps a game: there is room for the teacher's own play alone.
ROADRUNNER_MEMORY: dict[str, Any] = {"collect": CollectConfig(states=340_000, exploration=0.0, spread=True, slots=64)}
MEASURED = ("episodes", "eps_grid", "suite")  # what is measured at the end, however the student was made
TASKS: dict[str, Task] = {
    task.env_id: task
    for task in (
        Task(
            "CartPole-v1",
            "balance a pole on a cart; 500 is perfect",
            eps=0.2,
            fast={"smoothing": 0.3, "noise": 0.3, "lambda_end": 0.1, "dagger_rounds": 2},
        ),
        Task(
            "Acrobot-v1",
            "swing a two-link arm above a line; about -70 is very good",
            eps=0.15,
            fast={"smoothing": 0.1, "noise": 0.2, "dagger_rounds": 2},
        ),
        Task(
            "MountainCar-v0",
            "rock a car out of a valley; about -105 is very good",
            fast={"scale": 2.0, "lambda_end": 0.5, "dagger_rounds": 2},
        ),
        Task(
            "LunarLander-v3",
            "land softly between two flags; 200 is solved",
            eps=0.05,
            fast={
                # Its teacher switches engines every few steps: little can be certified, so nothing is given up for it.
                "scale": 2.0,
                "smoothing": 0.1,
                "noise": 0.1,
                "lambda_end": 1.0,
                "steps": 3000,
                "dagger_rounds": 6,
                "dagger_states": 30_000,
            },
        ),
        Task(
            "sortrl/Breakout10-v0",
            "MinAtar's Breakout, 4 x 10 x 10 pixels; small enough to try images in a few minutes",
            eps=0.15,
            fast={
                "collect": CollectConfig(states=20_000, exploration=0.7, random_actions=0.15),
                "noise": 0.0,  # a ball of a third of its brightness is none, and the teacher has never seen one
                "dagger_states": 5_000,
                "depth": 3,
                "steps": 1000,
                "batch": 256,
                "lambda_end": 0.5,
                "warm_share": 0.4,
                "final_share": 0.15,
                "exact_share": 0.1,
            },
            rounded={
                "collect": CollectConfig(states=20_000, exploration=0.7, random_actions=0.15),
                "noise": 0.0,
                "dagger_states": 5_000,
                "gap": 0.4,  # its pixels are black or white
                "levels": 1,
                "conv": ((16, 3, 1),),
                "hidden": (128,),
                "steps": 1500,
            },
        ),
        Task(
            "sortrl/Jumper-train-v0",
            "ProcGen's Jumper on its 200 training levels; 9.25 is the most there is",
            eps=2 / 255,
            fast=PROCGEN,
            memory=LEVELS,
            paper=PRINTED,
        ),
        Task(
            "sortrl/Coinrun-train-v0",
            "ProcGen's CoinRun on its 200 training levels; 10 is perfect",
            eps=2 / 255,
            fast=PROCGEN,
            memory=LEVELS,
            paper=PRINTED,
        ),
        Task(
            "sortrl/Freeway84-v0",
            "Atari's Freeway in protocol 84; 34 is very good",
            2 / 255,
            ATARI,
            ATARI_MEMORY,
            ATARI_ROUNDED,
            PRINTED,
        ),
        Task(
            "sortrl/RoadRunner84-v0",
            "Atari's RoadRunner in protocol 84; about 44,000 is very good",
            2 / 255,
            ATARI,
            ROADRUNNER_MEMORY,
            ATARI_ROUNDED,
            PRINTED,
        ),
        Task(
            "sortrl/Pong84-v0",
            "Atari's Pong in protocol 84; 21 is perfect",
            2 / 255,
            ATARI,
            ATARI_MEMORY,
            PONG_ROUNDED,
            PRINTED,
        ),
        Task(
            "sortrl/BankHeist84-v0",
            "Atari's BankHeist in protocol 84; about 1,300 is very good",
            2 / 255,
            ATARI,
            ATARI_MEMORY,
            {**ATARI_ROUNDED, "gap": 7.5 / 255},
            PRINTED,
        ),
    )
}


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
    """Make a student that is not trained but remembers the teacher's best episodes (:mod:`sortrl.remember`)."""
    search: SearchConfig
    """For such a student: how to look for episodes that win where the teacher never did (:mod:`sortrl.search`)."""
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
    """A student that remembers is made small by :mod:`sortrl.compact`: each state keeps a radius of this size, or its own if
    that is smaller; less only if the student would be too large otherwise."""
    memory_bytes: int = SIZE
    """How large a student that remembers may be in half precision, as the zoo stores it."""
    rounding: RoundingConfig | None = None
    """Make a student that sees rounded pixels (:mod:`sortrl.rounding`), trained like this; ``distill`` then says nothing."""
    polish: PQNConfig | None = None
    """Let that student go on learning in the game itself, by Q-learning (:mod:`sortrl.polish`); it needs ``norm``."""
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
