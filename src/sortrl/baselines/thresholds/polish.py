"""A student that sees rounded pixels goes on learning where distillation ends, in the game itself.

What is certified of such a student is that no threshold's answer changes, whatever network stands behind the thresholds. So that
network may learn to play as well as it can with what it sees, and nothing is lost of the certificate: from its teacher's values in the
states of its own play or, without a tutor, from rewards, by the Q-learning that its teacher came from. Thresholds stay as they are.
"""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path

from torch import nn

from sortrl.core.errors import SortRLError
from sortrl.core.identity import fingerprint
from sortrl.core.progress import Progress
from sortrl.envs import describe
from sortrl.nets import CertifiedPolicy, ThresholdPolicy
from sortrl.teachers.config import PQNConfig
from sortrl.teachers.train_pqn import Tutor, q_learn


def polished(
    policy: CertifiedPolicy,
    env_id: str,
    config: PQNConfig,
    out_dir: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    tutor: Tutor | None = None,
) -> ThresholdPolicy:
    """The student after ``config.total_steps`` more of the game: the best of its states, the first among them, by greedy episodes
    that belong to no test.

    ``config`` is that of a teacher's training; what it says of the network does not count. Trainings are resumed as those are.
    """
    if not isinstance(policy, ThresholdPolicy) or not policy.config.norm:
        raise SortRLError(
            f"Only a student that sees rounded pixels and has layer norm can go on by Q-learning, and this one is {policy.kind!r}. "
            "Distil it with the preset 'thresholds' and norm=True."
        )
    learner = copy.deepcopy(policy).requires_grad_(True)
    body = nn.Sequential(learner.rounding, learner.head)

    def frozen() -> ThresholdPolicy:
        return copy.deepcopy(learner).eval().requires_grad_(False)

    settings = {name: value for name, value in asdict(config).items() if name not in ("channels", "hidden")}
    identity = {"env_id": env_id, "seed": int(seed), "config": settings, "start": fingerprint(policy)}
    if tutor is not None:
        identity["tutor"] = fingerprint(tutor.teacher)
    out = None if out_dir is None else Path(out_dir)
    return q_learn(
        body, frozen, ThresholdPolicy.load, describe(env_id), config, out, identity, progress, trained=True, tutor=tutor
    )
