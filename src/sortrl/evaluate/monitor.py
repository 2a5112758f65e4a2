"""Run-time monitoring: every decision's radius beside the environment, and a hand-over where it is too small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from sortrl.core.errors import SortRLError
from sortrl.core.records import Decision
from sortrl.nets import CertifiedPolicy


@dataclass(frozen=True)
class Uncertified:
    """A decision that is not certified at ``eps_unit``: what the callback of a :class:`Monitor` receives."""

    step: int
    obs: npt.NDArray[Any]
    decision: Decision
    eps_unit: float


@dataclass(frozen=True)
class EpisodeSummary:
    """One episode, whole or so far: how much of it was certified, where it was closest to not being, its return."""

    eps_unit: float
    steps: int
    certified_share: float
    least_radius: float
    least_radius_step: int
    handed_over: int
    total: float
    finished: bool

    def __str__(self) -> str:
        state = "episode" if self.finished else "episode so far"
        return (
            f"{state} of {self.steps} steps, return {self.total:g}: {self.certified_share:.1%} certified at eps {self.eps_unit:g}, "
            f"least radius {self.least_radius:.4g} at step {self.least_radius_step}, {self.handed_over} handed over"
        )


class Monitor(gym.Wrapper[Any, Any, Any, Any]):
    """Watches a certified policy play one environment; below ``eps`` it warns, hands over, or both.

    ``eps`` is the l_inf size of the perturbations to be safe from, in unit space. ``fallback`` decides in place of the
    policy where its decision is not certified at eps: an object with ``predict``, a callable on one raw observation, or
    an action. ``on_uncertified`` is called with an :class:`Uncertified` there.

    >>> from sortrl.nets import SortPolicy
    >>> policy = SortPolicy((4,), 2, width=16, depth=3)
    >>> env = Monitor(gym.make("CartPole-v1"), policy, eps=0.1, fallback=0)
    >>> obs, info = env.reset(seed=0)
    >>> obs, reward, terminated, truncated, info = env.step(env.decide(obs))
    >>> info["certified"] == (info["radius"] > 0.1), info["handed_over"] == (not info["certified"])
    (True, True)
    >>> env.summary().steps
    1
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        policy: CertifiedPolicy,
        eps: float,
        fallback: Any = None,
        on_uncertified: Callable[[Uncertified], object] | None = None,
    ) -> None:
        n_actions = _check(env, policy, eps, fallback)
        super().__init__(env)
        self.policy, self.eps_unit, self.on_uncertified = policy, float(eps), on_uncertified
        self._fallback, self._n_actions = fallback, n_actions
        self._start()

    def _start(self) -> None:
        self._decision: Decision | None = None
        self._action = -1
        self._radii: list[float] = []
        self._handed_over = 0
        self._total = 0.0
        self._finished = False

    @property
    def radii(self) -> npt.NDArray[np.float64]:
        """The radius of every decision of the episode that was played, in order."""
        return np.array(self._radii)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; the log starts anew."""
        self._start()
        return self.env.reset(seed=seed, options=options)

    def decide(self, obs: npt.ArrayLike) -> int:
        """The action to play for one raw observation, as the sensors show it: the policy's, or the fallback's."""
        raw = np.asarray(obs)
        if raw.shape != self.policy.obs_shape:
            raise SortRLError(
                f"Monitor: decide received an observation of shape {raw.shape}, expected {self.policy.obs_shape} (one at a time)."
            )
        decision = self.policy.predict_certified(raw)
        self._decision, self._action = decision, int(decision.action)
        if not decision.certified_at(self.eps_unit):
            if self.on_uncertified is not None:
                self.on_uncertified(Uncertified(len(self._radii), raw, decision, self.eps_unit))
            if self._fallback is not None:
                self._action = _ask(self._fallback, raw, self._n_actions)
        return self._action

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Play ``action``; the info also tells about the decision behind it.

        ``radius``, ``certified`` (at eps) and ``runner_up`` describe the policy's own decision; ``handed_over`` is True
        where somebody else decided: the fallback, or the caller by playing another action.
        """
        decision = self._decision
        if decision is None:
            raise SortRLError(
                "Monitor: step without a decision. Ask monitor.decide(obs) before every monitor.step(action)."
            )
        certified = bool(decision.certified_at(self.eps_unit))
        handed_over = int(action) != int(decision.action) or (self._fallback is not None and not certified)
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._decision = None
        self._radii.append(float(decision.radius))
        self._handed_over += handed_over
        self._total += float(reward)
        self._finished = bool(terminated or truncated)
        facts = {"radius": float(decision.radius), "certified": certified, "runner_up": int(decision.runner_up)}
        return obs, reward, terminated, truncated, {**info, **facts, "handed_over": handed_over}

    def summary(self) -> EpisodeSummary:
        """The episode, or what was played of it."""
        if not self._radii:
            raise SortRLError("Monitor: no step was played since the last reset, so there is nothing to sum up.")
        radii = self.radii
        return EpisodeSummary(
            eps_unit=self.eps_unit,
            steps=len(radii),
            certified_share=float((radii > self.eps_unit).mean()),
            least_radius=float(radii.min()),
            least_radius_step=int(radii.argmin()),
            handed_over=self._handed_over,
            total=self._total,
            finished=self._finished,
        )


def _check(env: gym.Env[Any, Any], policy: CertifiedPolicy, eps: float, fallback: Any) -> int:
    """Everything that can be wrong before the first step; returns the number of actions."""
    if not isinstance(env, gym.Env):
        raise SortRLError(
            f"Monitor: env is {type(env).__name__}, expected one gymnasium environment (not a vector of them)."
        )
    if not isinstance(policy, CertifiedPolicy):
        raise SortRLError(
            f"Monitor: policy is {type(policy).__name__}, expected a SortPolicy: only those have certificates."
        )
    if not 0 <= eps < float("inf"):
        raise SortRLError(f"Monitor: eps is {eps}, expected a finite number >= 0 in the policy's input units.")
    actions, shape = env.action_space, env.observation_space.shape
    if not isinstance(actions, gym.spaces.Discrete) or int(actions.start) != 0 or int(actions.n) != policy.n_actions:
        raise SortRLError(f"Monitor: the environment has actions {actions}, the policy Discrete({policy.n_actions}).")
    if shape != policy.obs_shape:
        raise SortRLError(f"Monitor: the environment has observations of shape {shape}, the policy {policy.obs_shape}.")
    if isinstance(fallback, (int, np.integer)) and not 0 <= fallback < policy.n_actions:
        raise SortRLError(f"Monitor: fallback is action {fallback}, expected 0..{policy.n_actions - 1}.")
    if fallback is not None and not isinstance(fallback, (int, np.integer)) and not _answers(fallback):
        raise SortRLError(
            f"Monitor: fallback is {type(fallback).__name__}, expected an object with predict(obs), a callable or an action."
        )
    return policy.n_actions


def _answers(fallback: Any) -> bool:
    return callable(getattr(fallback, "predict", None)) or callable(fallback)


def _ask(fallback: Any, obs: npt.NDArray[Any], n_actions: int) -> int:
    if isinstance(fallback, (int, np.integer)):
        return int(fallback)
    predicts = callable(getattr(fallback, "predict", None))
    answer = fallback.predict(obs)[0] if predicts else fallback(obs)
    action = np.asarray(answer)
    if (
        action.size != 1
        or not 0 <= int(action.reshape(())) < n_actions
        or int(action.reshape(())) != action.reshape(())
    ):
        raise SortRLError(f"Monitor: the fallback answered {answer!r}, expected one action in 0..{n_actions - 1}.")
    return int(action.reshape(()))
