"""MinAtar games (Young and Tian, 2019): Atari in miniature, small enough to learn in a test."""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from sortrl.core.errors import MissingDependency

Image = npt.NDArray[np.uint8]
FRAMES_PER_SECOND = 10
# One colour per kind of object; where several share a cell, the last is seen.
COLOURS = np.array(
    [0x1F77B4, 0xFF7F0E, 0x2CA02C, 0xD62728, 0x9467BD, 0x8C564B, 0xE377C2, 0x7F7F7F, 0xBCBD22, 0x17BECF], ">u4"
)


class MinAtar10(gym.Env[Image, np.int64]):
    """One game as images (channels, 10, 10) of bytes, 0 or 255: one channel per kind of object, no random repeats.

    The agent has only the actions that do something in the game.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": FRAMES_PER_SECOND}  # noqa: RUF012 (Gymnasium's own interface)

    def __init__(self, game: str, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        try:
            from minatar import Environment
        except ImportError as error:
            raise MissingDependency("MinAtar games need a package: pip install 'sortrl[minatar]'") from error
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", game).lower()  # SpaceInvaders -> space_invaders
        self._env = Environment(name, sticky_action_prob=0.0)
        self._actions = self._env.minimal_action_set()
        height, width, channels = self._env.state_shape()
        self.observation_space = gym.spaces.Box(0, 255, (channels, height, width), np.uint8)
        self.action_space = gym.spaces.Discrete(len(self._actions))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Image, dict[str, Any]]:
        super().reset(seed=seed)
        self._env.seed(int(self.np_random.integers(2**31)))
        self._env.reset()
        return self._observe(), {}

    def step(self, action: np.int64 | int) -> tuple[Image, float, bool, bool, dict[str, Any]]:
        reward, over = self._env.act(self._actions[int(action)])
        return self._observe(), float(reward), bool(over), False, {}

    def render(self) -> Any:
        """The field on black, one pixel per cell."""
        if self.render_mode != "rgb_array":
            return None
        planes = self._env.state()
        picture = np.zeros((*planes.shape[:2], 3), np.uint8)
        for channel, colour in enumerate(COLOURS.view(np.uint8).reshape(-1, 4)[: planes.shape[2], 1:]):
            picture[planes[:, :, channel] > 0] = colour
        return picture

    def _observe(self) -> Image:
        planes = self._env.state().transpose(2, 0, 1)
        return np.where(planes, 255, 0).astype(np.uint8)
