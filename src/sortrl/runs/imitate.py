"""A teacher that imitates the best of its own tries, where reinforcement learning alone takes too long.

PPO finds out within minutes that running and jumping to the right wins seven of ten of CoinRun's levels, and then hardly gets
better for hours. Its *sampled* tries, however, win nearly every level once. So the agent's network is trained further, by
cross-entropy, to play the best try of every start (self-imitation; Oh et al., 2018): the tries that a memory would keep
(:mod:`sortrl.baselines.memory.remember`), found and straightened in the same way, so that most of what is to be learned is what the agent does
already.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sortrl.baselines.memory.remember import best_episodes
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_object, write_json
from sortrl.core.identity import check_same, fingerprint
from sortrl.core.records import Demonstrations
from sortrl.core.seeding import one_thread
from sortrl.envs import describe, greedy_returns
from sortrl.runs.config import robustify_config
from sortrl.runs.run import open_run
from sortrl.teachers import Teacher
from sortrl.teachers.grading import LOG_FILE

Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class ImitationConfig:
    """How an agent learns from its best tries."""

    states: int = 100_000
    """States of its sampled tries."""
    steps: int = 3_000
    """Gradient steps."""
    batch_size: int = 256
    """States per step."""
    learning_rate: float = 5e-4
    """Step size of Adam, which falls to zero linearly."""
    eval_every: int = 500
    """Steps between greedy evaluations; the best agent is kept."""
    eval_episodes: int = 200
    """Episodes of each evaluation."""

    def __post_init__(self) -> None:
        for name in ("states", "steps", "batch_size", "eval_every", "eval_episodes"):
            if getattr(self, name) < 1:
                raise SortRLError(f"ImitationConfig: {name} is {getattr(self, name)}, expected at least 1.")
        if not self.learning_rate > 0:
            raise SortRLError(f"ImitationConfig: learning_rate is {self.learning_rate}, expected above 0.")


def imitate(
    teacher: Teacher,
    env_id: str,
    out: str | Path,
    config: ImitationConfig | None = None,
    seed: int = 0,
    earlier: dict[str, Any] | None = None,
    progress: Progress | None = None,
    quiet: bool = True,
) -> Teacher:
    """Train the teacher's network on the best of its tries; keep the result, its log and the tries in ``out``.

    The tries are kept as they are found, so that a killed call does not begin again from nothing; a finished one is just
    loaded. ``earlier`` is the log of how the teacher was trained before, to be passed on. ``progress`` is called after each
    evaluation with ``step``, ``total`` and ``return`` (greedy, mean).
    """
    folder, config, env_id = Path(out), config or ImitationConfig(), describe(env_id).env_id
    if teacher.architecture is None or not teacher.is_stochastic:
        raise SortRLError(
            f"imitate: {teacher.name} ({teacher.algorithm}) is no actor-critic whose network can be trained on. Give one that "
            "sortrl teach has trained."
        )
    identity = {"env_id": env_id, "seed": seed, "imitates": teacher.name, "config": asdict(config)}
    identity["imitates_weights"] = fingerprint(teacher)
    log = folder / LOG_FILE
    if log.exists() and (found := read_object(log)).get("done") is True:
        advice = "Choose another directory, or delete it."
        check_same(found.get("identity"), identity, f"{folder} holds another teacher", advice)
        return Teacher.load(folder)
    best = _best_tries(teacher, env_id, folder / "tries", config, seed, quiet)
    record: dict[str, Any] = {"identity": identity, "before": earlier, "states": len(best), "history": [], "best": None}
    with one_thread():
        return _trained(teacher, best, config, seed, folder, record, progress)


def _best_tries(
    teacher: Teacher, env_id: str, folder: Path, config: ImitationConfig, seed: int, quiet: bool
) -> Demonstrations:
    """What a memory of this teacher would be made of."""
    settings = robustify_config(env_id, preset="memory", train_teacher=False)
    settings = replace(settings, collect=replace(settings.collect, states=config.states))
    with open_run(folder, env_id, settings, seed, teacher, quiet=quiet) as run:
        data = run.searched(run.demonstrations(teacher), teacher)
    return best_episodes(data, plain=settings.search.straighten)


def _trained(
    teacher: Teacher,
    best: Demonstrations,
    config: ImitationConfig,
    seed: int,
    folder: Path,
    record: dict[str, Any],
    progress: Progress | None,
) -> Teacher:
    body = copy.deepcopy(teacher.body).requires_grad_(True)
    optimizer = torch.optim.Adam(body.parameters(), lr=config.learning_rate)
    rng = np.random.default_rng([seed, 8])
    seeds = (np.random.SeedSequence([seed, 9]).generate_state(config.eval_episodes) >> 1).tolist()
    answers = torch.from_numpy(best.actions)
    kept = teacher
    for step in range(1, config.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * (1.0 - (step - 1) / config.steps)
        rows = rng.integers(len(best), size=config.batch_size)
        loss = nn.functional.cross_entropy(body(teacher.normalize(best.obs[rows])), answers[rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % config.eval_every and step < config.steps:
            continue
        now = Teacher(
            copy.deepcopy(body),
            teacher.normalizer,
            teacher.n_actions,
            teacher.name,
            teacher.algorithm,
            teacher.architecture,
        )
        score = float(greedy_returns(now, best.env_id, seeds).mean())
        record["history"].append({"step": step, "return": score, "loss": float(loss.detach())})
        if record["best"] is None or score >= record["best"]:
            record["best"], kept = score, now
            now.save(folder)
        write_json(folder / LOG_FILE, {**record, "done": step == config.steps})
        if progress is not None:
            progress({"step": step, "total": config.steps, "return": score})
    return kept
