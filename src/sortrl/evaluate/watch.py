"""One recorded episode: actions, radii and attacks step by step, and rendered frames."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch

from sortrl import envs
from sortrl.attacks import Attack
from sortrl.core.errors import SortRLError
from sortrl.core.records import Policy
from sortrl.envs import describe
from sortrl.envs.info import make_env
from sortrl.evaluate.returns import valid_range
from sortrl.nets import CertifiedPolicy


@dataclass(frozen=True)
class Episode:
    """One played episode: arrays with one entry per step. ``changed`` tells where the attack changed the action.

    ``agent`` names who played; an agent without certificates, such as a teacher, has radii of 0.
    """

    env_id: str
    seed: int
    attack: str
    eps_unit: float
    actions: npt.NDArray[np.int64]
    radii: npt.NDArray[np.float64]
    changed: npt.NDArray[np.bool_]
    rewards: npt.NDArray[np.float64]
    agent: str = ""

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def total(self) -> float:
        return float(self.rewards.sum())

    @property
    def certified(self) -> npt.NDArray[np.bool_]:
        result: npt.NDArray[np.bool_] = self.radii > self.eps_unit
        return result

    def to_json(self) -> dict[str, object]:
        """The episode as plain JSON values."""
        return {
            "env_id": self.env_id,
            "agent": self.agent,
            "seed": self.seed,
            "attack": self.attack,
            "eps": self.eps_unit,
            "return": self.total,
            "certified_share": float(self.certified.mean()),
            "actions": self.actions.tolist(),
            "changed": np.flatnonzero(self.changed).tolist(),
            "radii": [round(radius, 6) for radius in self.radii.tolist()],
        }


def play(
    policy: Policy,
    env: str,
    eps: float,
    attack: Attack | None = None,
    seed: int = 0,
    max_steps: int | None = None,
    name: str = "",
) -> Episode:
    """Play the episode that ``seed`` names, every observation perturbed by ``attack`` within ``eps`` (unit space).

    Radii are those of the true observations; a policy without certificates (a teacher) has radii of 0. Without an attack,
    eps only says what counts as certified. ``name`` is what the film calls the policy.

    >>> from sortrl.nets import SortPolicy
    >>> episode = play(SortPolicy((4,), 2, width=16, depth=3), "CartPole-v1", eps=0.1, max_steps=5)
    >>> len(episode), episode.total, episode.attack
    (5, 5.0, 'none')
    """
    if not 0 <= eps < float("inf") or (max_steps is not None and max_steps < 1):
        raise SortRLError(
            f"watch: eps is {eps} and max_steps {max_steps}, expected a finite eps >= 0 in the policy's input units and "
            "at least one step."
        )
    info = describe(env)
    low, high = valid_range(policy, info)
    generator = torch.Generator().manual_seed(seed)
    steps: list[tuple[int, float, bool]] = []
    rewards: list[float] = []

    class Watched(envs.Episode):
        def see(self, obs: npt.NDArray[Any], reward: float) -> None:
            super().see(obs, reward)
            rewards.append(reward)

    def act(playing: list[Watched]) -> list[int] | None:
        if max_steps is not None and len(steps) >= max_steps:
            return None
        unit = policy.normalize(playing[0].obs[None])
        action, radius, changed = *_decide(policy, unit), False
        if attack is not None and eps > 0:
            result = attack(policy, unit, eps, low, high, generator)
            action, changed = int(result.action[0]), bool(result.changed[0])
        steps.append((action, radius, changed))
        return [action]

    with envs.EnvSlots(env, 1) as slots:
        envs.play_episodes(slots, [seed], act, Watched)
    actions, radii, changes = zip(*steps, strict=True)
    return Episode(
        env_id=info.env_id,
        seed=seed,
        attack="none" if attack is None else attack.name,
        eps_unit=float(eps),
        actions=np.array(actions, dtype=np.int64),
        radii=np.array(radii, dtype=np.float64),
        changed=np.array(changes, dtype=np.bool_),
        rewards=np.array(rewards, dtype=np.float64),
        agent=name,
    )


def _decide(policy: Policy, unit: torch.Tensor) -> tuple[int, float]:
    if isinstance(policy, CertifiedPolicy):
        certificate = policy.certify_unit(unit)
        return int(certificate.action[0]), float(certificate.radius[0])
    with torch.no_grad():
        return int(policy.scores(unit).argmax(dim=1)), 0.0


def least_certain(episode: Episode, count: int = 4, apart: int = 5) -> list[int]:
    """The steps with the smallest radii, in order of time, at least ``apart`` steps from each other."""
    chosen: list[int] = []
    for step in np.argsort(episode.radii, kind="stable"):
        if len(chosen) < count and all(abs(int(step) - other) >= apart for other in chosen):
            chosen.append(int(step))
    return sorted(chosen)


def pictures(episode: Episode, steps: Sequence[int]) -> tuple[list[npt.NDArray[np.uint8]], float]:
    """What the environment looked like before each of ``steps`` (rising; ``len(episode)``: at the end), and its pace.

    RGB arrays, and frames per second. The episode is played again from its seed; an environment that does not repeat
    itself is refused.
    """
    env = _rendered(episode.env_id)
    try:
        env.reset(seed=episode.seed)
        taken, rewards, wanted = [], [], set(steps)
        for step in range(max(wanted) + 1):
            if step in wanted:
                taken.append(np.asarray(env.render(), dtype=np.uint8))
            if step < len(episode):
                rewards.append(float(env.step(int(episode.actions[step]))[1]))
        pace = float(env.metadata.get("render_fps") or 30)
    finally:
        env.close()
    if rewards != episode.rewards[: len(rewards)].tolist():
        raise SortRLError(f"{episode.env_id} does not repeat itself from one seed: its episodes cannot be shown.")
    return taken, pace


def _rendered(env_id: str) -> gym.Env[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about packaging and style, nothing the user can act on
        try:
            env = make_env(env_id, render_mode="rgb_array")
        except (gym.error.Error, TypeError) as error:
            raise SortRLError(f"{env_id} cannot be drawn: {error}") from error
    if env.render_mode != "rgb_array":
        env.close()
        raise SortRLError(f"{env_id} cannot be drawn: it has no render mode 'rgb_array'.")
    return env
