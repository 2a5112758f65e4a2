"""Everything that determines a run, with the defaults of its task and preset."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from sortrl.baselines.memory.recipe import MemoryRecipe
from sortrl.baselines.thresholds.recipe import ThresholdRecipe
from sortrl.core.errors import SortRLError
from sortrl.core.identity import plain
from sortrl.data.collect import CollectConfig
from sortrl.distill import config as distill
from sortrl.distill.ladder import LadderRecipe
from sortrl.distill.recipe import Recipe, SortRecipe
from sortrl.runs.tasks import TASKS, Task, teacher_preset
from sortrl.teachers import HardenConfig, SteadyConfig, TeacherConfig

Preset = Literal["auto", "fast", "paper", "memory", "thresholds"]
Units = Literal["std", "teacher", "raw"]
WIDEST = 3.0  # standard deviations: as far as most states lie from the mean


@dataclass(frozen=True)
class RobustifyConfig:
    """Everything that determines the result of ``robustify`` besides the teacher and the seed."""

    eps: float
    preset: Preset
    teacher_config: TeacherConfig | None
    collect: CollectConfig
    student: Recipe
    """How the student is made, with its settings."""
    dagger_rounds: int
    """Provisional students, each trained for a third of the steps, whose states the teacher labels for the next."""
    dagger_states: int
    """States per round."""
    dagger_eps: float
    """Perturbation, at most, under which the provisional students act: PGD leads them where an adversary would."""
    noise: float
    """Students and teacher act on observations with uniform noise of up to this size while states are collected, so
    that the data hold what a disturbed agent meets."""
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
    suite: str | tuple[str, ...] = ("noise", "pgd-10-p32", "apgd-ce-10", "square-20")
    """Attacks of other kinds, at the eps that is trained for: a suite's name, or a list in which "learned" trains an adversary
    against each agent (minutes)."""
    suite_episodes: int = 10
    adversary_steps: int = 100_000
    """Environment steps in which a learned adversary is trained."""
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
    units: Units = "teacher"
    """What eps, noise and radii are stated in: ``std``, standard deviations of each sensor over the states that the teacher visits;
    ``teacher``, the teacher's own input units; ``raw``, the environment's."""
    sensor_eps: tuple[float, ...] | None = None
    """With ``units`` raw: a size for each sensor, in the environment's units. eps, noise and radii then count in these: eps 1 allows
    every sensor its own."""

    def __post_init__(self) -> None:
        for name, least in (
            ("episodes", 1),
            ("suite_episodes", 1),
            ("dagger_rounds", 0),
            ("dagger_states", 1),
            ("candidates", 1),
            ("choose_episodes", 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise SortRLError(f"robustify: {name} is {value!r}, expected a whole number, at least {least}.")
        for name in ("noise", "smoothing", "start_radius", "dagger_eps"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise SortRLError(f"robustify: {name} is {getattr(self, name)}, expected a finite number >= 0.")
        if self.units not in get_args(Units):
            raise SortRLError(f"robustify: units is {self.units!r}, expected one of {', '.join(get_args(Units))}.")
        if self.candidates > 1 and isinstance(self.student, LadderRecipe):
            raise SortRLError(
                "robustify: the preset auto chooses among its own rungs; candidates is for the preset fast. Leave it out, or add "
                "preset fast."
            )
        if self.units == "std" and self.eps >= WIDEST:
            raise SortRLError(
                f"robustify: eps is {self.eps:g} standard deviations of each sensor, which allows to replace nearly every "
                f"observation by any other; expected less than {WIDEST:g}. For {self.eps:g} hundredths of one write "
                f'{self.eps / 100:g}; for {self.eps:g} in the environment\'s own units add --units raw (units="raw").'
            )
        if self.sensor_eps is not None:
            if self.units != "raw":
                raise SortRLError(
                    f'robustify: sensor_eps states sizes in the environment\'s units, and units is {self.units}. Add units="raw" '
                    "(--units raw)."
                )
            if not self.sensor_eps or not all(0 < size < float("inf") for size in self.sensor_eps):
                raise SortRLError(f"robustify: sensor_eps is {self.sensor_eps}, expected a positive number per sensor.")
        if not self.choose_eps or not all(0 <= eps < float("inf") for eps in self.choose_eps):
            raise SortRLError(f"robustify: choose_eps is {self.choose_eps}, expected one or more finite numbers >= 0.")
        if 0.0 not in self.eps_grid or not all(0 <= eps < float("inf") for eps in self.eps_grid):
            raise SortRLError(
                f"robustify: eps_grid is {self.eps_grid}, expected finite numbers >= 0, and 0 among them."
            )

    @property
    def learns_from_another(self) -> bool:
        """Whether the student learns from something made of the teacher that was given."""
        return self.smoothing > 0 or self.start_radius > 0 or self.harden is not None or self.steady is not None

    def to_json(self) -> dict[str, Any]:
        """As run.json and results.json have it: the recipe's settings stand beside the others."""
        own = {part.name: plain(getattr(self, part.name)) for part in fields(self) if part.name != "student"}
        return {**own, **plain(self.student)}


@dataclass(frozen=True)
class _Preset:
    """A recipe, and what it asks of the run around it."""

    recipe: Recipe
    collect: CollectConfig
    dagger_rounds: int = 0
    noise: float = 0.0
    """In units of eps."""
    dagger_eps: float = 0.0
    """In units of eps."""
    units: Units = "teacher"
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of ``RobustifyConfig`` that differ from the defaults."""


_UNITS = {"std": "standard deviations of each sensor", "teacher": "the teacher's input units", "raw": "raw units"}
_EXPLORED = CollectConfig(states=50_000, exploration=0.5)
PRESETS: dict[str, _Preset] = {
    # For any agent: no setting is of one task.
    "auto": _Preset(
        LadderRecipe(),
        _EXPLORED,
        dagger_rounds=2,
        noise=3.0,
        dagger_eps=1.5,
        units="std",
        changes={"noise": 0.3, "dagger_states": 15_000, "episodes": 50, "suite": "quick"},
    ),
    "fast": _Preset(SortRecipe(distill.PRESETS["fast"]), _EXPLORED, dagger_rounds=1, noise=1.0),
    # As printed: the teacher's own greedy states alone.
    "paper": _Preset(SortRecipe(distill.PRESETS["paper"]), CollectConfig(states=50_000, exploration=0.0)),
    # Many tries from every start, so that one of them is good.
    "memory": _Preset(MemoryRecipe(), CollectConfig(states=200_000, exploration=1.0, slots=64)),
    "thresholds": _Preset(ThresholdRecipe(), _EXPLORED, dagger_rounds=1),
}


def robustify_config(
    env_id: str, eps: float | None = None, preset: Preset = "fast", train_teacher: bool = True, **changes: Any
) -> RobustifyConfig:
    """The defaults for a task; ``changes`` replace fields of the result or settings of its recipe. As on the command line, ``states``
    is how many to collect, and ``harden`` may be the eps of it.

    >>> config = robustify_config("CartPole-v1", eps=0.2, steps=10)
    >>> config.student.distill.steps, config.student.distill.eps
    (10, 0.2)
    """
    if preset not in PRESETS:
        raise SortRLError(f"Unknown preset {preset!r}; choose one of {', '.join(PRESETS)}.")
    chosen = PRESETS[preset]
    # A task's own settings belong to the units that they were found in.
    task = TASKS.get(env_id, Task(env_id, "")) if preset != "auto" else Task(env_id, "")
    if eps is None and changes.get("units") == "raw":
        if not changes.get("sensor_eps"):
            raise SortRLError(
                "robustify: units raw needs a size in the environment's units: eps, one for all sensors, or sensor_eps, one for each "
                "(--eps, --sensor-eps)."
            )
        eps = 1.0
    eps = task.eps if eps is None else eps
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise SortRLError(f"robustify: eps is {eps!r}, expected a number (in {_UNITS[chosen.units]}).")
    config = RobustifyConfig(
        eps=eps,
        preset=preset,
        teacher_config=teacher_preset(env_id) if train_teacher else None,
        collect=chosen.collect,
        student=chosen.recipe.for_eps(eps),
        dagger_rounds=chosen.dagger_rounds,
        dagger_states=20_000,
        dagger_eps=chosen.dagger_eps * eps,
        noise=chosen.noise * eps,
        smoothing=0.0,
        start_radius=0.0,
        episodes=30,
        eps_grid=tuple(round(share * eps, 6) for share in (0.0, 0.5, 1.0, 1.5, 2.0)),
        units=chosen.units,
    )
    given = {name: value for name, value in changes.items() if value is not None}
    if "states" in given:
        given["collect"] = replace(given.get("collect", chosen.collect), states=given.pop("states"))
    if isinstance(given.get("harden"), (int, float)):
        given["harden"] = HardenConfig(eps=given["harden"])
    defaults = dict(chosen.changes)
    if given.get("units", chosen.units) != "std":
        defaults.pop("noise", None)  # its size is known in standard deviations alone; in other units it goes by eps
        if "scale" in config.student.options and preset == "auto":
            defaults["scale"] = None  # nor is it known how much sensors vary in those
    return _with_changes(config, {**defaults, **task.settings(preset), **given})


def _with_changes(config: RobustifyConfig, changes: dict[str, Any]) -> RobustifyConfig:
    own, recipe = [part.name for part in fields(config)], config.student.options
    for name in changes:
        if name not in own and name not in recipe:
            close = difflib.get_close_matches(name, [*own, *recipe], n=1)
            raise SortRLError(f"robustify has no option {name!r}." + (f" Did you mean {close[0]!r}?" if close else ""))
    student = config.student.with_options(**{name: value for name, value in changes.items() if name not in own})
    return replace(config, **{"student": student, **{name: value for name, value in changes.items() if name in own}})
