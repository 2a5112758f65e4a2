"""The tasks this package adds to Gymnasium, by id. Registering names only: a game's package is imported when it is made."""

from __future__ import annotations

import gymnasium as gym

NAMESPACE = "sortrl/"
ATARI_GAMES = ("Pong", "Freeway", "RoadRunner", "BankHeist")
STICKY = 0.25  # of actions that are repeated by accident, as Machado et al. (2018) recommend
ATARI_STEPS = 10_000  # the cap of the literature's evaluations, in decisions of the agent
MINATAR_GAMES = ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")
MINATAR_STEPS = 2_500
PROCGEN_GAMES = ("Jumper", "Coinrun")
PROCGEN_STEPS = 1_000  # the games' own limit, too


def register_tasks() -> None:
    """Make ``sortrl/<Game>84-v0`` and ``sortrl/<Game>84-sticky-v0`` (Atari), ``sortrl/<Game>10-v0`` (MinAtar),
    ``sortrl/<Game>-train-v0`` and ``sortrl/<Game>-eval-v0`` (ProcGen) known to ``gymnasium.make``.

    >>> register_tasks()
    >>> gym.spec("sortrl/Pong84-v0").max_episode_steps
    10000
    """
    for game in ATARI_GAMES:
        _register(f"{game}84", "sortrl.envs.atari:Atari84", game, ATARI_STEPS)
        _register(f"{game}84-sticky", "sortrl.envs.atari:Atari84", game, ATARI_STEPS, sticky=STICKY)
    for game in MINATAR_GAMES:
        _register(f"{game}10", "sortrl.envs.minatar:MinAtar10", game, MINATAR_STEPS)
    for game in PROCGEN_GAMES:
        for levels in ("train", "eval"):
            _register(f"{game}-{levels}", "sortrl.envs.procgen:ProcgenEnv", game, PROCGEN_STEPS, levels=levels)


def _register(name: str, entry_point: str, game: str, max_episode_steps: int, **options: str | float) -> None:
    env_id = f"{NAMESPACE}{name}-v0"
    if env_id not in gym.registry:
        gym.register(env_id, entry_point, max_episode_steps=max_episode_steps, kwargs={"game": game, **options})
