"""An environment as the user gives it (an id, a function that makes one, Stable-Baselines3's vector of them) -> its id.

Many copies are played side by side, and each episode from a seed of its own: so what is needed is a way to make one, not one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym

from sortrl.core.errors import SortRLError

GIVEN = "factory/"
"""Namespace of the ids of environments given as functions: they are known in this process only."""
_HARMLESS = ("VecNormalize", "VecTransposeImage", "VecMonitor", "VecCheckNan")
_ADVICE = 'Give its id, "module:id", or a function that makes one (lambda: MyEnv()).'


def env_id_of(env: Any) -> str:
    """The id of a Gymnasium id itself, of a function that makes an environment, or of a ``VecEnv``.

    >>> env_id_of("CartPole-v1"), env_id_of(lambda: gym.make("CartPole-v1"))
    ('CartPole-v1', 'factory/CartPoleEnv-v0')
    """
    if isinstance(env, str):
        return env
    if hasattr(env, "num_envs") and hasattr(env, "get_attr"):
        return _of_vector(env)
    if isinstance(env, gym.Env):
        return _of_spec(env.spec, f"the environment {type(env.unwrapped).__name__}")
    if callable(env):
        return _registered(env)
    raise SortRLError(f"An environment is {env!r}, expected an id such as 'CartPole-v1'. {_ADVICE}")


def _registered(make: Callable[[], Any]) -> str:
    made = make()
    if not isinstance(made, gym.Env):
        raise SortRLError(f"The function given as env made a {type(made).__name__}, expected a gymnasium.Env.")
    env_id = f"{GIVEN}{type(made.unwrapped).__name__}-v0"
    made.close()
    gym.registry.pop(env_id, None)  # the one given last is meant
    gym.register(env_id, lambda render_mode=None: make())  # type: ignore[arg-type]
    return env_id


def _of_vector(vector: Any) -> str:
    frames = 1
    while hasattr(vector, "venv"):
        kind = type(vector).__name__
        if kind == "VecFrameStack":
            frames *= int(vector.n_stack if hasattr(vector, "n_stack") else vector.stacked_obs.n_stack)
        elif kind not in _HARMLESS:
            raise SortRLError(f"env is a VecEnv behind {kind}, which changes what is played. {_ADVICE}")
        vector = vector.venv
    env_id = _of_spec(vector.get_attr("spec")[0], "the VecEnv's environment")
    return f"frames-{frames}/{env_id}" if frames > 1 else env_id


def _of_spec(spec: Any, what: str) -> str:
    if spec is None or spec.id not in gym.registry:
        raise SortRLError(f"{what} was not made by an id, so that no others of its kind can be made. {_ADVICE}")
    wrappers = [wrapper.name for wrapper in spec.additional_wrappers or () if wrapper.name != "Monitor"]
    usual = {**gym.registry[spec.id].kwargs, "render_mode": None}
    changed = [name for name, value in spec.kwargs.items() if name != "render_mode" and usual.get(name) != value]
    if wrappers or changed:
        raise SortRLError(f"{what} is {spec.id} changed by {', '.join([*wrappers, *changed])}. {_ADVICE}")
    return str(spec.id)
