"""Many episodes at once, each with its own seed."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from sortrl.core.errors import SortRLError
from sortrl.envs.info import describe, make_env


class EnvSlots:
    """``n`` plain environments stepped one by one; the caller batches the policy, not the physics.

    Gymnasium's vector environments restart an episode with a seed of their own choosing. An evaluation that is to be
    repeated, or compared with another one, needs every episode to start from a seed it names: hence slots.

    >>> with EnvSlots("CartPole-v1", 2) as slots:
    ...     obs = slots.reset(0, seed=7)
    ...     obs, reward, done = slots.step(0, 1)
    >>> reward, done
    (1.0, False)
    """

    def __init__(self, env_id: str, n: int, max_episode_steps: int | None = None) -> None:
        if n < 1:
            raise SortRLError(f"EnvSlots: n is {n}, expected at least one environment.")
        self.info = describe(env_id)
        self._envs = [make_env(env_id, max_episode_steps) for _ in range(n)]
        self._playing = [False] * n
        # How the last step of each slot ended: a terminated episode is over for good, a truncated one ran out of time.
        self.terminated = np.zeros(n, dtype=bool)
        self.truncated = np.zeros(n, dtype=bool)
        self.starts = np.full(n, -1)  # which of the task's starts each slot's episode has, if the environment tells

    def __len__(self) -> int:
        return len(self._envs)

    def reset(self, slot: int, seed: int) -> npt.NDArray[Any]:
        """Start the episode that ``seed`` names; returns its first raw observation."""
        obs, info = self._envs[slot].reset(seed=seed)
        self._playing[slot], self.starts[slot] = True, info.get("start", -1)
        self.terminated[slot] = self.truncated[slot] = False
        return np.asarray(obs)

    def begin(self, slots: Iterable[int], actions: Iterable[int]) -> None:
        """Tell which steps come next. Environments with a thread of their own start them; ``step`` collects the results."""
        for slot, action in zip(slots, actions, strict=True):
            begin = getattr(self._envs[slot].unwrapped, "begin", None)
            if begin is not None:
                begin(int(action))

    def step(self, slot: int, action: int) -> tuple[npt.NDArray[Any], float, bool]:
        """Play one action; returns the raw observation, the reward and whether the episode is over."""
        if not self._playing[slot]:
            raise SortRLError(f"EnvSlots: slot {slot} has no episode under way. Call reset(slot, seed) first.")
        obs, reward, terminated, truncated, _ = self._envs[slot].step(int(action))
        done = bool(terminated or truncated)
        self.terminated[slot], self.truncated[slot], self._playing[slot] = terminated, truncated, not done
        return np.asarray(obs), float(reward), done

    def close(self) -> None:
        """Close every environment. Safe to call twice."""
        while self._envs:
            self._envs.pop().close()

    def __enter__(self) -> EnvSlots:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
