"""Action certification rate (ACR): the share of states of clean play whose action is proven at eps, as three papers count it.

- ``RADIAL``: the lower bound of the action's score exceeds the upper bound of every other, over the unclipped box; the mean of the
  episodes' shares.
- ``SA-DQN``: bounds of differences of scores, over the box clipped to what observations can be; all states count alike.
- ``SortRL``: this project's certificates: differences, unclipped, all states alike, every rounding accounted for.

A SortNet's certificate bounds every score by itself, and observations are not clipped; so of one only the way of taking the mean differs.
"""

from __future__ import annotations

import numpy as np
import torch

from sortrl.attacks.valid import valid_range
from sortrl.baselines.interval_q.network import Valid, box, gathered
from sortrl.envs import describe
from sortrl.envs.player import Episode, Obs, play_episodes
from sortrl.envs.vector import EnvSlots
from sortrl.evaluate.returns import episode_seeds
from sortrl.nets import CertifiedPolicy
from sortrl.nets.interval_policy import IntervalPolicy


class _Seen(Episode):
    """An episode that remembers its states."""

    def __init__(self, number: int, seed: int, obs: Obs) -> None:
        super().__init__(number, seed, obs)
        self.states: list[Obs] = []


@torch.no_grad()
def acr(policy: CertifiedPolicy, env_id: str, eps: float, episodes: int = 20, seed: int = 0) -> dict[str, float]:
    """The three rates of clean greedy episodes."""
    info = describe(env_id)
    valid = Valid(*valid_range(policy, info))

    def act(playing: list[_Seen]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        for episode in playing:
            episode.states.append(episode.obs)
        return policy.predict(np.stack([episode.obs for episode in playing]))[0]

    seeds = episode_seeds(seed, episodes)
    with EnvSlots(env_id, min(64, episodes)) as envs:
        played = play_episodes(envs, seeds, act, _Seen)
    shares: dict[str, list[np.ndarray[tuple[int], np.dtype[np.bool_]]]] = {"RADIAL": [], "SA-DQN": [], "SortRL": []}
    for episode in played:
        unit = policy.normalize(np.stack(episode.states))
        proven = policy.certify_unit(unit).certified_at(eps)
        shares["SortRL"].append(proven)
        if not isinstance(policy, IntervalPolicy):
            shares["RADIAL"].append(proven)
            shares["SA-DQN"].append(proven)
            continue
        action = policy.scores(unit).argmax(1)
        lower, upper = policy.head.bounds_over(*box(unit, eps))
        others = upper.scatter(1, action[:, None], -torch.inf).amax(1)
        shares["RADIAL"].append((gathered(lower, action) > others).numpy())
        leads = policy.head.leads_over(*box(unit, eps, valid), action)
        shares["SA-DQN"].append((leads > 0).all(1).numpy())
    return {
        "RADIAL": float(np.mean([share.mean() for share in shares["RADIAL"]])),
        "SA-DQN": float(np.concatenate(shares["SA-DQN"]).mean()),
        "SortRL": float(np.concatenate(shares["SortRL"]).mean()),
    }
