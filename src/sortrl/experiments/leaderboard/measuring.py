"""An entry, computed cell by cell: every cell is one trial of the protocol, kept in a file of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from sortrl import attacks
from sortrl.attacks import Attack, WhereUncertified
from sortrl.attacks.learned import LearnedAdversary, train_adversary
from sortrl.attacks.suites import Ensemble, is_black_box
from sortrl.attacks.values import MinQ
from sortrl.certify import certified_shares
from sortrl.certify.units import certified_for
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_object
from sortrl.core.identity import fingerprint
from sortrl.core.pieces import Engine
from sortrl.core.records import EvalResult, EvalRow, Policy
from sortrl.core.seeding import one_thread
from sortrl.envs import EnvInfo, describe
from sortrl.evaluate import provenance
from sortrl.evaluate.returns import evaluate
from sortrl.evaluate.suite import Entry as SuiteEntry
from sortrl.evaluate.suite import why_not
from sortrl.experiments.cells import CellTable, Found, TableDocument, file_name
from sortrl.experiments.certificates import clean_observations
from sortrl.experiments.leaderboard.entries import FORMAT, Entry, Kind, Row, Spared, check_free, path_of, write_entry
from sortrl.experiments.leaderboard.protocols import CLEAN, LEARNED, VALUE_AWARE, Protocol, Task, Trial
from sortrl.experiments.leaderboard.units import in_units
from sortrl.nets import CertifiedPolicy

TIMED, ROUNDS = 50, 7  # decisions per round
SLOTS = 32


@dataclass(frozen=True)
class Player:
    """An agent, and the action values that value-aware attacks follow: its teacher's, where that is known."""

    policy: Policy
    teacher: Policy | None = None


@dataclass(frozen=True)
class Entrant:
    """An agent that is to be measured. ``load`` makes it: here, and in every worker again."""

    name: str
    task: str
    kind: Kind
    source: str
    load: Callable[[], Player]
    training_minutes: float | None = None


@dataclass(frozen=True)
class Cell:
    """One trial of one agent."""

    game: str
    agent: str
    attack: str
    eps: float
    episodes: int

    @property
    def name(self) -> str:
        return file_name(self.game, self.agent, self.attack)


def enter(
    entrant: Entrant,
    protocol: Protocol,
    out: Path,
    work: Path,
    progress: Callable[[str], None] = print,
    engine: Engine | None = None,
) -> Entry:
    """Measure an agent by a protocol and write its entry into ``out``, anew after each trial; what is there already is kept."""
    task = protocol.task(entrant.task)
    player, info = entrant.load(), describe(task.env_id)
    policy = player.policy
    if policy.obs_shape != info.obs_shape or policy.n_actions != info.n_actions:
        raise SortRLError(
            f"{entrant.name} sees observations {policy.obs_shape} and has {policy.n_actions} actions, but {task.env_id} has "
            f"{info.obs_shape} and {info.n_actions}. Is this the agent of another task?"
        )
    weights = _weights(policy)
    check_free(path_of(out, protocol.name, task.env_id, entrant.name), weights, entrant.source)
    folder = work / f"{protocol.name}-{protocol.mark}" / file_name(task.env_id, entrant.name)
    black_box = is_black_box(in_units(policy, task.units(info)))
    wanted = [trial for trial in protocol.trials if black_box or not trial.only_answers]
    trials = {trial: _why_not(trial, player, task, info) for trial in wanted}
    cells = [
        Cell(task.env_id, entrant.name, trial.attack, 0.0 if trial.attack == CLEAN else task.eps, trial.episodes)
        for trial, why in trials.items()
        if why is None
    ]
    spared: list[Spared] = [{"attack": trial.attack, "why": why} for trial, why in trials.items() if why is not None]
    table = CellTable(entrant.name, protocol.mark, cells, folder / "cells", folder, {"protocol": protocol.name})

    def compute(cell: Cell, player: Player) -> Found:
        return _measured(cell, player, task, info, protocol, folder)

    def network(cell: Cell, player: Player) -> dict[str, nn.Module]:
        return {entrant.name: cast(nn.Module, player.policy)}

    def tell(line: str) -> None:
        document = _document(table)
        if any(
            cell["cell"]["attack"] == CLEAN for cell in document["cells"]
        ):  # of several workers another may be first
            write_entry(out, _entry(entrant, protocol, policy, weights, spared, document))
        progress(line)

    table.fill(lambda _: entrant.load(), compute, network, tell, engine=engine)
    entry = _entry(entrant, protocol, policy, weights, spared, _document(table))
    write_entry(out, entry)
    return entry


def _document(table: CellTable[Cell]) -> TableDocument:
    return cast(TableDocument, read_object(table.path))


def _weights(policy: Policy) -> str | None:
    """Of an agent of which only the answers are known there is nothing to hash."""
    known = isinstance(policy, nn.Module) and getattr(policy, "algorithm", None) != "callable"
    return str(fingerprint(policy)) if known else None


def _why_not(trial: Trial, player: Player, task: Task, info: EnvInfo) -> str | None:
    """Why a trial cannot be made of this agent; None if it can."""
    if trial.attack in (CLEAN, LEARNED):  # against a black box, an adversary moves the inputs itself
        return None
    policy = in_units(player.policy, task.units(info))
    attack = MinQ(policy) if trial.attack == VALUE_AWARE else attacks.by_name(trial.attack)
    return why_not(policy, SuiteEntry(attack))


def _measured(cell: Cell, player: Player, task: Task, info: EnvInfo, protocol: Protocol, folder: Path) -> Found:
    units = task.units(info)
    policy = in_units(player.policy, units)
    attack = None if cell.attack == CLEAN else _attack(cell, player, policy, task, info, protocol, folder)
    result = evaluate(policy, cell.game, attack, cell.eps, cell.episodes, protocol.seed, name=cell.agent)
    found = cast(Found, {"cell": asdict(cell), **result.to_json()})
    if cell.attack == CLEAN:
        found["decision_seconds"] = _decision_seconds(player.policy, cell.game, protocol.seed)
        shares = _shares(player.policy, result, task, info, cell.episodes, protocol)
        if shares is not None:
            found["certified"] = {f"{eps:g}": share for eps, share in zip(task.certified_at, shares, strict=True)}
    return found


def _attack(
    cell: Cell, player: Player, policy: Policy, task: Task, info: EnvInfo, protocol: Protocol, folder: Path
) -> Attack:
    """The attack of a trial. Of the ensemble, a search costs more than a certificate: it is made only where nothing is proven."""
    if cell.attack == VALUE_AWARE:
        return MinQ(policy if player.teacher is None else in_units(player.teacher, task.units(info)))
    if cell.attack != LEARNED:
        attack = _without_repeats(attacks.by_name(cell.attack), policy)
        return WhereUncertified(attack) if isinstance(attack, Ensemble) else attack
    place = folder / "adversary"
    if place.exists():
        return LearnedAdversary.load(place)
    return train_adversary(
        policy,
        cell.game,
        task.eps,
        protocol.adversary_steps,
        protocol.seed,
        place,
        director=not is_black_box(policy),
    )


def _without_repeats(attack: Attack, policy: Policy) -> Attack:
    """An ensemble without the members that follow smooth surrogates, where the policy has none: they would repeat the others."""
    if not isinstance(attack, Ensemble) or hasattr(policy, "surrogate_scores"):
        return attack
    return Ensemble(tuple(one for one in attack.members if getattr(one, "surrogate_p", None) is None), attack.name)


def _shares(
    policy: Policy, clean: EvalResult, task: Task, info: EnvInfo, episodes: int, protocol: Protocol
) -> list[float] | None:
    """The certified shares of clean play; None of a policy without certificates."""
    if not isinstance(policy, CertifiedPolicy):
        return None
    if clean.radii is not None:  # the policy's own units
        return certified_shares(clean, task.certified_at)
    states = np.concatenate(clean_observations(policy, task.env_id, episodes, protocol.seed, slots=SLOTS))
    some = states[np.linspace(0, len(states) - 1, min(protocol.certify_states, len(states))).astype(int)]
    scale = task.units(info).scale.numpy()
    return [float(certified_for(policy, some, eps * scale).mean()) for eps in task.certified_at]


def _decision_seconds(policy: Policy, env_id: str, seed: int) -> float:
    """Seconds of the processor for a decision, with its certificate where there is one, for one observation at a time.

    Not of the clock, so that what else the machine does counts for little."""
    (states,) = clean_observations(policy, env_id, 1, seed, most=TIMED)
    decide: Callable[[npt.NDArray[Any]], Any]
    if isinstance(policy, CertifiedPolicy):
        decide = policy.predict_certified
    else:

        def decide(obs: npt.NDArray[Any]) -> Any:
            with torch.no_grad():
                return policy.scores(policy.normalize(obs[None])).argmax(1)

    rounds = []
    with one_thread():
        for _ in range(ROUNDS):
            started = time.thread_time()
            for obs in states:
                decide(obs)
            rounds.append((time.thread_time() - started) / len(states))
    return min(rounds)


def _row(row: EvalRow, attack: str) -> Row:
    return {
        "attack": attack,
        "eps": row["eps"],
        "episodes": row["episodes"],
        "mean": row["mean"],
        "sem": row["sem"],
        "iqm": row["iqm"],
        "iqm_interval": row["iqm_interval"],
        "changed_share": row["changed_share"],
        "returns": row["returns"],
    }


def _entry(
    entrant: Entrant,
    protocol: Protocol,
    policy: Policy,
    weights: str | None,
    spared: list[Spared],
    document: TableDocument,
) -> Entry:
    """The entry of a table of cells, of which clean play is one, and then the first."""
    found = document["cells"]
    rows = [_row(cell, cell["cell"]["attack"]) for cell in found]
    clean = found[0]
    names = {file_name(entrant.task, entrant.name, trial.attack): trial.attack for trial in protocol.trials}
    return {
        "format": FORMAT,
        "protocol": {"name": protocol.name, "mark": protocol.mark},
        "agent": entrant.name,
        "kind": entrant.kind,
        "task": entrant.task,
        "source": entrant.source,
        "weights": weights,
        "parameters": sum(p.numel() for p in policy.parameters()) if isinstance(policy, nn.Module) else None,
        "clean": rows[0],
        "attacks": rows[1:],
        "worst": min(rows, key=lambda row: row["mean"]),
        "spared": spared,
        "missing": [names[name] for name in document["missing"]],
        "certified": clean.get("certified"),
        "seconds_per_decision": clean["decision_seconds"],
        "training_minutes": entrant.training_minutes,
        "versions": provenance.versions(),
        "machine": provenance.machine(),
    }
