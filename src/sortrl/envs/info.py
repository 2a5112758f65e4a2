"""What a task looks like: shapes, valid range, names; and errors that say how to mend a wrong environment id."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from sortrl.core.errors import MissingDependency, SortRLError
from sortrl.core.modules import imported
from sortrl.envs.given import GIVEN
from sortrl.envs.shapes import STACKED, shaped

OBS_NAMES: dict[str, tuple[str, ...]] = {
    "CartPole": ("cart position", "cart velocity", "pole angle", "pole angular velocity"),
    "Acrobot": (
        "cos of angle 1",
        "sin of angle 1",
        "cos of angle 2",
        "sin of angle 2",
        "angular velocity 1",
        "angular velocity 2",
    ),
    "MountainCar": ("position", "velocity"),
    "LunarLander": (
        "x position",
        "y position",
        "x velocity",
        "y velocity",
        "angle",
        "angular velocity",
        "left leg contact",
        "right leg contact",
    ),
    "Pendulum": ("cos of angle", "sin of angle", "angular velocity"),
}
OBS_NAMES["LunarLanderContinuous"] = OBS_NAMES["LunarLander"]
ACTION_NAMES = {"Pendulum": ("torque",), "LunarLanderContinuous": ("main engine", "side engines")}  # continuous ones

# Some environments write "unbounded" as the largest float32 rather than as infinity.
_UNBOUNDED_FROM = 1e30


@dataclass(frozen=True)
class ActionBox:
    """Continuous actions: vectors of numbers, each between finite bounds (float64, of shape (numbers,))."""

    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.low)

    @property
    def span(self) -> npt.NDArray[np.float64]:
        return self.high - self.low


@dataclass(frozen=True)
class EnvInfo:
    """What the rest of the package needs to know about a task.

    ``valid_low`` and ``valid_high`` are the declared bounds of raw observations (float64, of shape ``obs_shape``,
    infinite where there is none); ``max_steps`` is the time limit, None if there is none. ``action_groups`` tells, for
    each action of a task that merges equivalent ones, which of the original actions it stands for. A task with continuous actions
    has an ``action_box``, and ``n_actions`` is how many numbers an action has; :func:`describe` only gives it to who asks for it.
    """

    env_id: str
    obs_shape: tuple[int, ...]
    n_actions: int
    valid_low: npt.NDArray[np.float64]
    valid_high: npt.NDArray[np.float64]
    obs_names: tuple[str, ...]
    max_steps: int | None
    obs_dtype: np.dtype[Any]
    action_names: tuple[str, ...] = ()
    action_groups: tuple[tuple[int, ...], ...] | None = None
    action_box: ActionBox | None = None

    def played(self, action: Any) -> Any:
        """An answer of a policy as the environment takes it: a whole number, or numbers within their bounds."""
        if self.action_box is None:
            return int(action)
        numbers = np.asarray(action, np.float64)
        if numbers.shape != self.action_box.low.shape or not np.isfinite(numbers).all():
            raise SortRLError(
                f"{self.env_id}: the action is {str(action)[:100]}, expected {len(self.action_box)} finite number(s)."
            )
        return np.clip(numbers, self.action_box.low, self.action_box.high).astype(np.float32)

    @property
    def obs_size(self) -> int:
        """Number of values in one observation."""
        return math.prod(self.obs_shape)

    @property
    def is_image(self) -> bool:
        """Bytes with three dimensions: pixels in 0..255."""
        return self.obs_dtype == np.uint8 and len(self.obs_shape) == 3

    @property
    def merged_action(self) -> tuple[int, ...]:
        """Which action of the task each original action is: the inverse of ``action_groups``."""
        groups = self.action_groups or tuple((action,) for action in range(self.n_actions))
        owner = {original: action for action, group in enumerate(groups) for original in group}
        return tuple(owner[original] for original in sorted(owner))

    def raw_units(self, scale: npt.NDArray[np.float64]) -> list[tuple[str, float]]:
        """What one unit of unit space is worth in the raw units of each value; once for all pixels if they are alike."""
        if self.is_image and len(np.unique(scale)) == 1:
            return [("every pixel", float(scale.flat[0]))]
        return [(name, float(value)) for name, value in zip(self.obs_names, scale.flat, strict=True)]


def describe(env_id: str, continuous: bool = False) -> EnvInfo:
    """Describe a Gymnasium environment with array observations and discrete actions, or else ``continuous`` ones.

    >>> info = describe("CartPole-v1")
    >>> info.obs_shape, info.n_actions, info.max_steps
    ((4,), 2, 500)
    >>> info.obs_names[2], round(float(info.valid_high[2]), 3)
    ('pole angle', 0.419)
    >>> describe("Pendulum-v1", continuous=True).action_box.high
    array([2.])
    """
    env = make_env(env_id)
    try:
        return _info_of(env, env_id.rpartition("/")[0] if STACKED.fullmatch(env_id) else "", continuous)
    finally:
        env.close()


def is_continuous(env_id: str) -> bool:
    """Whether actions are vectors of numbers."""
    env = make_env(env_id)
    try:
        return isinstance(env.action_space, gym.spaces.Box)
    finally:
        env.close()


def make_env(env_id: str, max_episode_steps: int | None = None, **options: Any) -> gym.Env[Any, Any]:
    """``gymnasium.make`` with errors that say what to do; the environment is checked by :func:`describe`, not here.

    What is no array of numbers, or no single action, is made one (:mod:`sortrl.envs.shapes`). ``module:id`` imports the module
    first. ``options`` are the environment's own, such as ``episodic_life`` of an Atari game.
    """
    if not isinstance(env_id, str):
        raise SortRLError(f"Environment id is {env_id!r}, expected a string such as 'CartPole-v1'.")
    stacked = STACKED.fullmatch(env_id)
    frames, plain_id = (int(stacked[1]), stacked[2]) if stacked else (1, env_id)
    module, _, plain_id = plain_id.rpartition(":")
    if module:
        imported(module, f"the environment {plain_id}")
    try:
        with _quiet():
            # The passive checker warns about style on every step; describe() checks what matters here.
            env = gym.make(plain_id, max_episode_steps=max_episode_steps, disable_env_checker=True, **options)
    except gym.error.DependencyNotInstalled as error:
        raise _missing_dependency(plain_id, error) from error
    except (gym.error.Error, ImportError) as error:
        raise _unknown_id(plain_id, error) from error
    return shaped(env, frames)


def _info_of(env: gym.Env[Any, Any], stacked: str = "", continuous: bool = False) -> EnvInfo:
    env_id = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
    env_id = f"{stacked}/{env_id}" if stacked else env_id
    actions, observations = env.action_space, env.observation_space
    box = _action_box(env, env_id, actions) if continuous else None
    n_actions = _number_of_actions(env_id, actions) if box is None else len(box)
    if not isinstance(observations, gym.spaces.Box):
        raise SortRLError(
            f"{env_id} has observations {observations}; expected one Box (an array of numbers). "
            "(Of a Dict, boxes of one or two dimensions are flattened.) Wrap the environment, for example with "
            "gymnasium.wrappers.FlattenObservation."
        )
    shape = tuple(observations.shape)
    return EnvInfo(
        env_id=env_id,
        obs_shape=shape,
        n_actions=n_actions,
        valid_low=_bounds(observations.low),
        valid_high=_bounds(observations.high),
        obs_names=_obs_names(env, env_id, shape),
        max_steps=env.spec.max_episode_steps if env.spec is not None else None,
        obs_dtype=np.dtype(observations.dtype),
        action_names=_told(env, "action_names", ()),
        action_groups=_told(env, "action_groups", None),
        action_box=box,
    )


def _number_of_actions(env_id: str, actions: gym.Space[Any]) -> int:
    if isinstance(actions, gym.spaces.Box):
        raise SortRLError(
            f"{env_id} has continuous actions {actions}, and this is for discrete ones. What takes continuous actions: sortrl "
            "robustify, with a teacher, and sortrl evaluate."
        )
    if not isinstance(actions, gym.spaces.Discrete) or int(actions.start) != 0:
        raise SortRLError(f"{env_id} has actions {actions}; expected Discrete(n) counted from 0. Wrap the environment.")
    if int(actions.n) < 2:
        raise SortRLError(f"{env_id} has one action only: there is nothing to decide, hence nothing to certify.")
    return int(actions.n)


def _action_box(env: gym.Env[Any, Any], env_id: str, actions: gym.Space[Any]) -> ActionBox:
    if not isinstance(actions, gym.spaces.Box) or len(actions.shape) != 1 or actions.dtype.kind != "f":
        raise SortRLError(
            f"{env_id} has actions {actions}; expected continuous ones, a Box with one dimension of floating-point numbers."
        )
    low, high = _bounds(actions.low), _bounds(actions.high)
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        raise SortRLError(
            f"{env_id} has actions {actions}; expected finite bounds on every number. Wrap the environment in "
            "gymnasium.wrappers.RescaleAction."
        )
    names = tuple(_told(env, "action_names", ACTION_NAMES.get(env_id.split("/")[-1].rpartition("-v")[0], ())))
    return ActionBox(low, high, names if len(names) == len(low) else tuple(f"action[{i}]" for i in range(len(low))))


def _bounds(declared: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    bounds = declared.astype(np.float64)
    bounds = np.where(np.abs(bounds) >= _UNBOUNDED_FROM, np.copysign(np.inf, bounds), bounds)
    bounds.flags.writeable = False
    return bounds


def _told(env: gym.Env[Any, Any], name: str, default: Any) -> Any:
    """What an environment, or a wrapper around it, says of itself."""
    return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else default


def _obs_names(env: gym.Env[Any, Any], env_id: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    names = tuple(_told(env, "obs_names", OBS_NAMES.get(env_id.split("/")[-1].rpartition("-v")[0], ())))
    size = math.prod(shape)
    if len(shape) == 1 and names and len(names) < size and size % len(names) == 0:  # frames
        ago = range(size // len(names) - 1, -1, -1)
        return tuple(
            f"{name}, {steps} step{'s' * (steps > 1)} ago" if steps else name for steps in ago for name in names
        )
    if len(names) == size:
        return names
    return tuple(f"obs[{', '.join(map(str, index))}]" for index in np.ndindex(shape))


def _missing_dependency(env_id: str, error: Exception) -> MissingDependency:
    registered = gym.registry.get(env_id)
    entry = f"{registered.entry_point if registered else ''} {error}".lower()
    for extra, mark in (("box2d", "box2d"), ("atari", "atari"), ("atari", "ale")):
        if mark in entry:
            return MissingDependency(
                f"{env_id} needs a package that is not installed. Run: pip install 'sortrl[{extra}]'"
            )
    return MissingDependency(f"{env_id} needs a package that is not installed: {error}")


def _unknown_id(env_id: str, error: Exception) -> SortRLError:
    if env_id.startswith(GIVEN):
        return SortRLError(
            f"{env_id} was given as a function in Python, which no file can hold. Evaluate it there: "
            "sortrl.evaluate(sortrl.load(run), env=the_function)."
        )
    if env_id.startswith("ALE/") or "NoFrameskip" in env_id:
        return MissingDependency(f"No environment {env_id!r}. Atari games need a package: pip install 'sortrl[atari]'")
    if isinstance(error, ImportError):
        return SortRLError(f"Cannot import the module that registers {env_id!r}: {error}")
    name = env_id.rpartition("-v")[0] or env_id
    # Other versions of the same task first (LunarLander-v2 -> LunarLander-v3), then similar names.
    versions = [known for known in gym.registry if known.rpartition("-v")[0].lower() == name.lower()]
    by_lower = {known.lower(): known for known in gym.registry}
    similar = [by_lower[match] for match in difflib.get_close_matches(env_id.lower(), by_lower, n=3, cutoff=0.6)]
    suggestions = list(dict.fromkeys([*sorted(versions, reverse=True), *similar]))[:3]
    hint = f"Did you mean {', '.join(suggestions)}?" if suggestions else "List the known ids with gymnasium.registry."
    return SortRLError(f"No environment {env_id!r} in Gymnasium {gym.__version__}. {hint}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Gymnasium and pygame warn about versions and packaging on construction; nothing the user can act on here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
