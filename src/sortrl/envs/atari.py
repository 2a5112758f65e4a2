"""Atari games in protocol "84" of the robust-RL literature (SA-DQN, RADIAL, BCL): one grey 84 x 84 frame, no stack.

A decision lasts 4 frames and sees the brighter of the last 2. The frame gets 4 black columns on either side (168 wide), its
rows ``21 + shift`` to ``189 + shift`` are kept, and every 2 x 2 pixels become one. The agent has the first few of the game's
actions. An episode begins with 1 to 30 frames without action, then FIRE and the action after it where the game knows FIRE.
Actions are never repeated at random, unless that is asked for (``sticky``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from sortrl.core.errors import MissingDependency, SortRLError

SIZE = 84
SKIP = 4
MAX_NOOPS = 30
TOP, ROWS = 21, 168
MARGIN = 2  # black columns on either side of the small frame: 4 of the large one
REWIND_EVERY = 100  # decisions between the moments to which a lost game can go back

Frame = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Game:
    """What differs between games: the file, the rows that matter and how many of its actions the agent may use."""

    rom: str
    shift: int
    n_actions: int


GAMES = {
    "Pong": Game("pong", shift=10, n_actions=4),
    "Freeway": Game("freeway", shift=0, n_actions=3),
    "RoadRunner": Game("road_runner", shift=20, n_actions=6),
    "BankHeist": Game("bank_heist", shift=0, n_actions=6),
}

# The 128 colours of the console, RGB; the emulator's screen holds their numbers, times two.
_PALETTE = bytes.fromhex(
    "0000004a4a4a6f6f6f8e8e8eaaaaaac0c0c0d6d6d6ececec48480069690f86861da2a22abbbb35d2d240e8e84afcfc54"
    "7c2c00904811a26221b47a30c3903dd2a44adfb755ecc860901c00a33915b55328c66c3ad5824ae39759f0aa67fcbc74"
    "940000a71a1ab83232c84848d65c5ce46f6ff08080fc909084006497197aa8308fb846a2c659b3d46cc3e07cd2ec8ce0"
    "50008468199a7d30ad9246c0a459d0b56ce0c57ceed48cfc140090331aa34e32b56848c67f5cd5956fe3a980f0bc90fc"
    "000094181aa72d32b84248c8545cd6656fe47580f08490fc001c88183b9d2d57b04272c2548ad265a0e175b5ef84c8fc"
    "0030641850802d6d984288b054a0c565b7d975cceb84e0fc00403018624e2d8169429e8254b89965d1ae75e7c284fcd4"
    "0044001a661a32843248a0485cba5c6fd26f80e88090fc90143c00355f18527e2d6e9c4287b7549ed065b4e775c8fc84"
    "3038005059166d762b88923ea0ab4fb7c25fccd86ee0ec7c482c00694d14866a26a28638bb9f47d2b656e8cc63fce070"
)


def _grey_of_pairs() -> Frame:
    """Entry ``256 * a + b``: the grey of the brighter, channel by channel, of the colours numbered ``a`` and ``b``.

    Looking pairs up is exact and ten times faster than computing with three channels. The weights are OpenCV's.
    """
    rgb = np.frombuffer(_PALETTE, np.uint8).reshape(-1, 3).astype(np.int64)
    brighter = np.maximum(rgb[:, None], rgb[None])
    table = np.zeros((256, 256), np.uint8)
    table[::2, ::2] = (brighter @ [9798, 19235, 3735] + (1 << 14)) >> 15
    return table.ravel()


_GREY = _grey_of_pairs()


def small_frame(before: Frame, last: Frame, shift: int) -> Frame:
    """Two screens of colour numbers (210, 160) -> the grey frame (1, 84, 84).

    The result equals, bit for bit, what OpenCV 4 and 5 make of it: maximum of the RGB frames, ``cvtColor`` to grey, padding,
    ``resize`` with INTER_AREA, which for half the size is the mean of 2 x 2 pixels, halves rounded up.
    """
    rows = slice(TOP + shift, TOP + shift + ROWS)
    pairs = before[rows].astype(np.uint16)
    pairs <<= 8
    pairs |= last[rows]
    grey = _GREY.take(pairs).astype(np.uint16)
    tall = grey[0::2] + grey[1::2]
    small = np.zeros((1, SIZE, SIZE), np.uint8)
    small[0, :, MARGIN:-MARGIN] = (tall[:, 0::2] + tall[:, 1::2] + 2) >> 2
    return small


class Atari84(gym.Env[Frame, np.int64]):
    """One game. ``reset(seed=...)`` determines the episode: only the number of idle frames at its start is random, which
    ``info["start"]`` tells (some games show nothing of it at first).

    Teachers train on an easier problem: ``episodic_life`` ends an episode with every life lost, and ``reset()`` without a
    seed then goes on with the lives that are left. (They also see clipped rewards; that is up to the learner.)

    With ``sticky`` the game does, in every frame with that probability, what it did in the frame before instead of what it is
    told (Machado et al., 2018, who take 0.25). No two episodes are then alike, and what was learned by heart is of no use.

    ``reset(options={"rewind": True})`` goes back 100 to 200 decisions instead of to the start (or to the start, if that is nearer),
    so that what comes late in a game can be tried as often as what comes first; only with ``rewind``.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 60 // SKIP}  # noqa: RUF012 (Gymnasium's own interface)

    def __init__(
        self,
        game: str,
        episodic_life: bool = False,
        render_mode: str | None = None,
        sticky: float = 0.0,
        rewind: bool = False,
    ) -> None:
        if game not in GAMES:
            raise SortRLError(f"No Atari game {game!r}; expected one of {', '.join(GAMES)}.")
        if not 0 <= sticky < 1:
            raise SortRLError(f"Atari84: sticky is {sticky}, expected a probability below 1.")
        self.game, self.facts = game, GAMES[game]
        self.episodic_life, self.render_mode, self.sticky, self.rewind = episodic_life, render_mode, sticky, rewind
        self._ale = _load(self.facts.rom)
        # A reset inside the emulator keeps some memory of the game before (Freeway's traffic): every game starts from this.
        self._ale.reset_game()
        self._start = self._ale.cloneState(include_rng=True)
        legal = self._ale.getMinimalActionSet()
        self._fires = any(action.name == "FIRE" for action in legal)
        self._actions = legal[: self.facts.n_actions]
        self._screens = np.zeros((2, *self._ale.getScreenDims()), np.uint8)
        self._lives = self._last_action = self._idle = self._decisions = 0
        self._moments: deque[tuple[Any, Frame, int]] = deque(maxlen=2)
        self.observation_space = gym.spaces.Box(0, 255, (1, SIZE, SIZE), np.uint8)
        self.action_space = gym.spaces.Discrete(len(self._actions))

    def get_action_meanings(self) -> list[str]:
        return [action.name for action in self._actions]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Frame, dict[str, Any]]:
        super().reset(seed=seed)
        if options is not None and options.get("rewind"):
            return self._go_back()
        goes_on = self.episodic_life and seed is None and self._lives > 0 and not self._ale.game_over()
        if goes_on:
            self._play(0)
        while not goes_on or self._ale.game_over():
            goes_on = True
            self._ale.restoreState(self._start)
            self._last_action = self._decisions = 0
            self._moments.clear()
            self._idle = int(self.np_random.integers(1, MAX_NOOPS, endpoint=True))
            for _ in range(self._idle):
                self._ale.act(0)
            self._screens[0] = self._screens[1] = self._ale.getScreen()
            for action in (1, 2) if self._fires else ():
                self._play(action)
        self._lives = self._ale.lives()
        return self._observe(), {"lives": self._lives, "start": self._idle}

    def step(self, action: np.int64 | int) -> tuple[Frame, float, bool, bool, dict[str, Any]]:
        if self.rewind and self._decisions % REWIND_EVERY == 0:
            self._moments.append((self._ale.cloneState(include_rng=True), self._screens.copy(), self._last_action))
        self._decisions += 1
        reward = self._play(int(action))
        lives = self._ale.lives()
        over = self._ale.game_over() or (self.episodic_life and lives < self._lives)
        self._lives = lives
        return self._observe(), float(reward), over, False, {"lives": lives}

    def _go_back(self) -> tuple[Frame, dict[str, Any]]:
        if not self._moments:
            raise SortRLError("Atari84: nothing to go back to. Make the game with rewind=True and play a step first.")
        state, screens, self._last_action = self._moments[0]
        self._moments.clear()  # the step that follows keeps this moment again
        self._decisions = 0
        self._ale.restoreState(state)
        self._screens[:] = screens
        self._lives = self._ale.lives()
        return self._observe(), {"lives": self._lives, "start": self._idle}

    def render(self) -> Any:
        return self._ale.getScreenRGB() if self.render_mode == "rgb_array" else None

    def _play(self, action: int) -> int:
        """Hold one action for 4 frames, or until the game is over; the last two screens are kept."""
        total = 0
        for frame in range(SKIP):
            if not self.sticky or self.np_random.random() >= self.sticky:
                self._last_action = action
            total += int(self._ale.act(self._actions[self._last_action]))
            over = self._ale.game_over()
            if frame >= SKIP - 2 or over:
                self._screens[0] = self._screens[1]
                self._ale.getScreen(self._screens[1])
            if over:
                break
        return total

    def _observe(self) -> Frame:
        return small_frame(self._screens[0], self._screens[1], self.facts.shift)

    def __deepcopy__(self, memo: dict[int, Any]) -> Atari84:
        """The same moment of the same game in a second emulator, so that episodes can be branched."""
        twin = Atari84(self.game, self.episodic_life, self.render_mode, self.sticky, self.rewind)
        twin._ale.restoreState(self._ale.cloneState(include_rng=True))
        twin._screens[:], twin._lives, twin._last_action = self._screens, self._lives, self._last_action
        twin._moments.extend(self._moments)
        twin._decisions = self._decisions
        twin.np_random.bit_generator.state = self.np_random.bit_generator.state
        twin.spec = self.spec
        return twin


def _load(rom: str) -> Any:
    try:
        import ale_py
    except ImportError as error:
        raise MissingDependency("Atari games need a package: pip install 'sortrl[atari]'") from error
    path = ale_py.roms.get_rom_path(rom)
    if path is None:
        raise MissingDependency(f"This ale-py has no game {rom!r}. Run: pip install --upgrade 'sortrl[atari]'")
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", 0)  # nothing is drawn from it: actions are not sticky
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(path)
    return ale
