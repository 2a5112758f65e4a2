"""The case about evaluation under attack: environments are stepped, every observation passes through PGD first."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sortrl import ops
from sortrl.attacks import PGD
from sortrl.envs import EnvSlots, describe
from sortrl.experiments.bench.policies import Size, make_policy
from sortrl.experiments.bench.timing import Contender, disagreements, take_turns
from sortrl.nets import SortPolicy

TASK, EPS = "CartPole-v1", 0.1
ATTACK = PGD(10)


class AttackedPlay:
    """As many environments as the batch has states; a call attacks all their observations and plays one step
    in each; it returns what the policy was shown."""

    def __init__(self, policy: SortPolicy, batch: int, backend: str) -> None:
        self.policy, self.backend = policy, backend
        self.envs = EnvSlots(TASK, batch)
        self.obs: list[npt.NDArray[Any]] = []

    def restore(self) -> None:
        self.obs = [self.envs.reset(slot, slot) for slot in range(len(self.envs))]

    def __call__(self) -> Tensor:
        with ops.use_backend(self.backend):
            result = ATTACK(self.policy, self.policy.normalize(np.stack(self.obs)), EPS)
        for slot, action in enumerate(result.action):
            self.obs[slot], _, done = self.envs.step(slot, int(action))
            if done:
                self.obs[slot] = self.envs.reset(slot, slot)
        return result.perturbed


def attacked_play(size: Size, repeats: int) -> dict[str, Any]:
    """Seconds for one attacked step of every environment, with our operators and with their plain torch definition."""
    info = describe(TASK)
    policy = make_policy(size, inputs=info.obs_size, actions=info.n_actions).eval().requires_grad_(False)
    plays = {name: AttackedPlay(policy, size.batch, name) for name in ("auto", "reference")}
    ours, rival = (Contender(play, play.restore) for play in plays.values())
    timing = take_turns(ours, {"reference": rival}, repeats)
    for play in plays.values():
        play.envs.close()
    best, wrong = timing.best_s, disagreements(timing.first)
    return {
        "op": "attacked_play",
        "shape": [size.batch, info.obs_size, info.n_actions],
        "p": None,
        "ours_s": best["ours"],
        "median_s": timing.median_s["ours"],
        "rivals": {"reference": best["reference"]},
        "limit_s": None,
        "wrong": sorted(wrong),
        "notes": [
            f"{ATTACK.name} at {EPS:g} against {size.depth} layers of {size.width} units, {size.batch} environments of {TASK}",
            *timing.notes,
            *(f"{name}: {why}" for name, why in wrong.items()),
        ],
        "steps_per_s": {name: None if seconds is None else size.batch / seconds for name, seconds in best.items()},
    }
