"""Bootstrapped curriculum learning (BCL; Wu and Vorobeychik, 2022): eps grows in phases, each of which starts from the best agent of
the one before.

Of several trainings of a phase the best under attack is kept. With opportunistic skipping (MOS) a phase at whose eps the agent is
robust already is left out. A phase is trained by RADIAL, by adversarial training (AT), or first by the one and then by the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sortrl.attacks import PGD
from sortrl.baselines.interval_q.adversarial import AdversarialDQN
from sortrl.baselines.interval_q.radial import RadialDQN
from sortrl.baselines.interval_q.training import TEST_SEED, Method, Progress, TrainingConfig, Tuned, fine_tune
from sortrl.core.errors import SortRLError
from sortrl.evaluate.returns import evaluate
from sortrl.nets.interval_policy import IntervalPolicy


@dataclass(frozen=True)
class Curriculum:
    """Published for Atari: phases of 1/255 each, several runs, a switch to AT at 13/255 (BankHeist) or 12/255 (RoadRunner)."""

    method: Literal["at", "radial", "radial+at"] = "at"
    skip: bool = False
    """Leave out phases at whose eps the agent is robust already (MOS)."""
    phases: int = 4
    """Equal steps from 0 to eps; the decisions are shared out among them."""
    runs: int = 1
    """Trainings of each phase, of which the best is kept."""
    switch: float = 0.5
    """Of "radial+at": the share of eps beyond which phases are trained by AT."""
    robust: float = 0.95
    """An agent is robust at an eps if PGD-10 leaves it this share of what it has without attack."""

    def __post_init__(self) -> None:
        if self.phases < 1 or self.runs < 1 or not (0 <= self.switch <= 1 and 0 < self.robust <= 1):
            raise SortRLError(
                f"Curriculum: {self.phases} phases of {self.runs} runs, switch {self.switch}, robust {self.robust}: expected at least "
                "one phase and run, and shares between 0 and 1."
            )

    def method_at(self, share: float) -> Method:
        """Of the phase that reaches this share of eps."""
        adversarial = self.method == "at" or (self.method == "radial+at" and share > self.switch)
        return AdversarialDQN() if adversarial else RadialDQN()


def bootstrapped(
    start: IntervalPolicy,
    env_id: str,
    course: Curriculum,
    config: TrainingConfig,
    out_dir: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Tuned:
    """Train through the phases up to ``config.eps``; resumes as :func:`fine_tune` does, phase by phase."""
    policy, values, reached = start, None, 0.0
    history: list[dict[str, Any]] = []
    decisions, minutes = 0, 0.0
    for phase in range(1, course.phases + 1):
        share = phase / course.phases
        eps = config.eps * share
        if course.skip and is_robust(policy, env_id, eps, config.test_episodes, course.robust):
            history.append({"phase": phase, "eps": eps, "skipped": True})
            continue
        decisions_each = max(1, config.decisions // course.phases)
        starts = min(config.learning_starts, decisions_each // 8)  # every phase fills a replay of its own
        part = replace(config, eps=eps, eps_from=reached, decisions=decisions_each, learning_starts=starts)
        made: list[Tuned] = []
        for run in range(course.runs):
            folder = None if out_dir is None else Path(out_dir) / f"phase-{phase}-run-{run}"
            made.append(fine_tune(policy, env_id, course.method_at(share), part, folder, seed + run, progress, values))
        best = max(made, key=lambda one: _tested(one.history))
        history += [{"phase": phase, **row} for row in best.history]
        decisions += sum(one.decisions for one in made)
        minutes += sum(one.minutes for one in made)
        policy, values, reached = best.policy, best.values, eps
    return Tuned(policy, history, decisions, minutes)


def is_robust(policy: IntervalPolicy, env_id: str, eps: float, episodes: int, share: float) -> bool:
    """Whether PGD-10 leaves the agent a ``share`` of its clean return; of negative returns, costs it no more than the rest of it."""
    clean = evaluate(policy, env_id, None, 0.0, episodes, TEST_SEED).mean
    attacked = evaluate(policy, env_id, PGD(10), eps, episodes, TEST_SEED).mean
    return attacked >= clean - (1.0 - share) * abs(clean)


def _tested(history: list[dict[str, Any]]) -> float:
    return max((float(row["tested"]) for row in history if "tested" in row), default=-math.inf)
