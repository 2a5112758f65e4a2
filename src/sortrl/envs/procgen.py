"""ProcGen games (Cobbe et al., 2020) in easy mode, simulated by envpool: an episode is a level, and its seed names it.

Two sets of levels per game: ``train`` are the 200 levels from 0 on, ``eval`` all 2^31 - 1 of them. A level determines its
episode: the simulator draws no random numbers but from the level's own. envpool draws the levels of a pool from one
generator, which cannot be set between episodes; a pool of one environment over one level is made in about 2 ms, so
every reset makes one. :func:`level_of` says which level a seed means.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from sortrl.core.errors import MissingDependency

Levels = Literal["train", "eval"]
TRAIN_LEVELS = 200
ALL_LEVELS = 2**31 - 1

# What ProcGen's 15 actions press. The letters are used by other games than the two below.
BUTTONS = (
    *("left + down", "left", "left + up", "down", "nothing", "up", "right + down", "right", "right + up"),
    *("D", "A", "W", "S", "Q", "E"),
)
# Actions with the same effect in every state, as one; the first of each group stands for it. A margin between two
# actions that do the same means nothing, so the task has the groups for actions. Neither game looks at the letters,
# and Jumper does not look at "down". (In CoinRun it drops the player through a crate.)
ACTION_GROUPS: dict[str, tuple[tuple[int, ...], ...]] = {
    "Jumper": ((1, 0), (2,), (4, 3, *range(9, 15)), (5,), (7, 6), (8,)),
    "Coinrun": ((0,), (1,), (2,), (3,), (4, *range(9, 15)), (5,), (6,), (7,), (8,)),
}


def level_of(seed: int, levels: Levels) -> int:
    """The level that an episode's seed means.

    Consecutive seeds go through the 200 training levels in turn, so that 200 episodes play each of them once. Of all
    levels, a seed means a hashed one: those of small numbers are the training levels.

    >>> level_of(201, "train"), level_of(201, "eval")
    (1, 1827062285)
    """
    if levels == "train":
        return seed % TRAIN_LEVELS
    return int(np.random.SeedSequence([seed, 5]).generate_state(1)[0]) % ALL_LEVELS


def make_pool(game: str, n: int, seed: int, start_level: int = 0, n_levels: int = 0) -> Any:
    """An envpool of ``n`` environments with ProcGen's 15 actions and levels drawn from a range (0: of all of them)."""
    if importlib.util.find_spec("envpool") is None:
        raise MissingDependency("ProcGen needs a package that is not installed. Run: pip install 'sortrl[procgen]'")
    try:
        import envpool

        return envpool.make_gymnasium(
            f"{game}Easy-v0", num_envs=n, num_threads=1, seed=seed, start_level=start_level, num_levels=n_levels
        )
    except ImportError as error:
        raise MissingDependency(_why_not(error)) from error


def _why_not(error: ImportError) -> str:
    """What is missing: envpool wraps the loader's message, which names the library, in one of its own."""
    said = [str(error)]
    cause: BaseException | None = error
    while cause is not None and (cause := cause.__cause__ or cause.__context__) is not None:
        said.append(str(cause))
    if any("libQt5" in text for text in said):
        return (
            f"ProcGen draws with the system's Qt 5, which cannot be loaded ({said[-1]}). Install it: "
            "apt-get install libqt5gui5 (Debian, Ubuntu) or dnf install qt5-qtbase-gui (Fedora)."
        )
    return (
        f"ProcGen's simulator, envpool, is installed but cannot be imported ({': '.join(said)}). "
        "Install it again: pip install --force-reinstall 'sortrl[procgen]'"
    )


class ProcgenEnv(gym.Env[npt.NDArray[np.uint8], int], gym.utils.EzPickle):
    """One game over one set of levels; observations are uint8 (3, 64, 64).

    After the last step of an episode the simulator shows the start of another one. The observation returned then is
    the last one of the episode that could be seen.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012 (Gymnasium's own interface)

    def __init__(self, game: str, levels: Levels, render_mode: str | None = None) -> None:
        gym.utils.EzPickle.__init__(self, game, levels, render_mode)  # says that a copy must be played again
        self.render_mode = render_mode
        self.game, self.levels = game, levels
        self.action_groups = ACTION_GROUPS[game]
        self.action_names = tuple(BUTTONS[group[0]] for group in self.action_groups)
        self.action_space = gym.spaces.Discrete(len(self.action_groups))  # type: ignore[assignment]
        self.observation_space = gym.spaces.Box(0, 255, (3, 64, 64), np.uint8)
        self._begun: int | None = None
        self._pool = make_pool(game, 1, 0, 0, 1)  # here, so that what is missing is told when the environment is made

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        """Start the level that the seed means; without a seed, one drawn by the generator that the last seed set."""
        super().reset(seed=seed)
        level = level_of(int(self.np_random.integers(ALL_LEVELS)) if seed is None else seed, self.levels)
        self._pool.close()
        self._pool, self._begun = make_pool(self.game, 1, 0, level, 1), None
        self._last = self._pool.reset()[0][0].copy()  # a view would keep the pool's buffers
        return self._last, {"level": level}

    def begin(self, action: int) -> None:
        """Start a step in the pool's own thread; ``step`` with the same action then waits for it and returns it.

        Handing one step over to a thread and back costs more than the step. Many environments that have begun are
        computed back to back.
        """
        self._pool.send(np.array([self.action_groups[action][0]]))
        self._begun = action

    def step(self, action: int) -> tuple[npt.NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        if self._begun is None:
            self.begin(action)
        if self._begun != action:
            raise gym.error.InvalidAction(f"Action {self._begun} has begun; it cannot be changed to {action}.")
        self._begun = None
        obs, reward, terminated, truncated, _ = self._pool.recv()
        if not (terminated[0] or truncated[0]):
            self._last = obs[0].copy()
        return self._last, float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self) -> Any:
        """What the agent sees."""
        return self._last.transpose(1, 2, 0) if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        self._pool.close()
