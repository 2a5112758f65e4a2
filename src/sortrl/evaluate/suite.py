"""A suite of attacks on a student and its teacher: every attack at every eps, and the worst of them."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from sortrl.attacks import Aimed, Attack, by_name, suite
from sortrl.attacks.learned import LearnedAdversary, train_adversary
from sortrl.attacks.schedule import CriticalPoints, Strategic, Timing
from sortrl.attacks.suites import is_black_box
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_object, write_json
from sortrl.core.identity import differences, fingerprint, named
from sortrl.core.pieces import Engine, Piece, run_pieces
from sortrl.core.progress import stage
from sortrl.core.records import PROTOCOL, EvalRow, Policy, stored_rows
from sortrl.envs import describe
from sortrl.evaluate import provenance
from sortrl.evaluate.returns import evaluate

SCHEMA = 1
LEARNED, LEARNED_LABEL = "learned", "learned adversary"  # its name in a list of attacks, and in tables
ADVERSARY_STEPS = 200_000


class Skipped(TypedDict):
    """Attacks that an agent was not exposed to, and why."""

    policy: str
    attacks: str
    why: str


class WorstRow(TypedDict):
    """The attack under which an agent's mean return at one eps is lowest."""

    policy: str
    eps: float
    attack: str
    mean: float
    sem: float
    iqm: float


class SuiteDocument(TypedDict):
    """What :meth:`SuiteResult.to_json` returns."""

    env_id: str
    suite: str
    eps: list[float]
    episodes: int
    seed: int
    worst: list[WorstRow]
    skipped: list[Skipped]
    rows: list[EvalRow]


Point = tuple[str, str, float]  # agent, attack, eps


@dataclass(frozen=True)
class Entry:
    """One attack of a suite and its timing; ``attack`` None is an adversary that is trained for each agent and eps."""

    attack: Attack | None
    when: Timing | None = None

    @property
    def needs_gradient(self) -> bool:
        return self.attack is not None and self.attack.needs_gradient


@dataclass(frozen=True)
class SuiteResult:
    """Results of every attack on every agent at every eps: rows of :meth:`sortrl.core.records.EvalResult.to_json`, with names.

    ``skipped`` lists attacks that were not run on an agent, and why.
    """

    env_id: str
    suite: str
    eps_units: tuple[float, ...]
    episodes: int
    seed: int
    rows: tuple[EvalRow, ...]
    skipped: tuple[Skipped, ...] = ()

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row["policy"] for row in self.rows))

    def clean(self, policy: str) -> EvalRow:
        return next(row for row in self.rows if row["policy"] == policy and row["eps"] == 0)

    def at(self, policy: str, eps_unit: float) -> list[EvalRow]:
        """The rows of one agent at one eps."""
        return [row for row in self.rows if row["policy"] == policy and row["eps"] == eps_unit]

    def worst(self, policy: str, eps_unit: float) -> EvalRow:
        """The row of the lowest mean return; clean play is among the candidates, as an adversary may do nothing."""
        return min([self.clean(policy), *self.at(policy, eps_unit)], key=lambda row: float(row["mean"]))

    def to_json(self) -> SuiteDocument:
        worst: list[WorstRow] = []
        for eps in self.eps_units:
            for policy in self.policies:
                row = self.worst(policy, eps)
                worst.append(
                    {
                        "policy": policy,
                        "eps": eps,
                        "attack": row["attack"],
                        "mean": row["mean"],
                        "sem": row["sem"],
                        "iqm": row["iqm"],
                    }
                )
        return {
            "env_id": self.env_id,
            "suite": self.suite,
            "eps": list(self.eps_units),
            "episodes": self.episodes,
            "seed": self.seed,
            "worst": worst,
            "skipped": list(self.skipped),
            "rows": list(self.rows),
        }


def evaluate_suite(
    policy: Policy,
    teacher: Policy | None,
    env_id: str,
    chosen: str | Sequence[str] = "quick",
    eps_units: Sequence[float] = (0.1,),
    episodes: int = 20,
    seed: int = 0,
    *,
    path: str | Path | None = None,
    adversary_steps: int = ADVERSARY_STEPS,
    quiet: bool = True,
    play: Collection[str] = ("student", "teacher"),
    again: bool = False,
    engine: Engine | None = None,
) -> SuiteResult:
    """Play clean and under every attack of a suite, the student and (if there is one) its teacher, on the same episodes.

    ``chosen`` is the name of a suite or a list of attacks as :func:`sortrl.attacks.by_name` reads them, and
    "learned" for an adversary that is trained against each agent. ``path`` is where the
    result is written, point by point: the same call continues where it was stopped. An agent without gradients is attacked
    only by attacks that need none (see ``skipped``). ``play`` leaves out an agent whose rows are known already; attacks on
    the student may still use the teacher's gradients. A file of other agents, episodes or seeds is refused or, with ``again``, replaced.
    An ``engine`` spreads the points over workers.
    """
    if not eps_units or not all(0 < eps < float("inf") for eps in eps_units):
        raise SortRLError(f"evaluate_suite: eps {list(eps_units)}, expected one or more finite numbers > 0.")
    agents = {"student": policy} | ({} if teacher is None else {"teacher": teacher})
    attacks = entries(chosen, teacher, env_id, policy)
    name = chosen if isinstance(chosen, str) else ", ".join(chosen)
    identity = _identity(env_id, episodes, seed, agents, adversary_steps)
    file = _File(None if path is None else Path(path), identity, again)
    agents = {agent: player for agent, player in agents.items() if agent in play}
    result = SuiteResult(
        env_id, name, tuple(dict.fromkeys(map(float, eps_units))), episodes, seed, (), _spared(agents, attacks)
    )
    points = [(agent, label, eps) for agent, label, _, eps in _points(agents, attacks, result.eps_units)]
    rows = {point: row for point in points if (row := file.find(*point)) is not None}
    directory = file.directory

    def play_point(point: Point) -> EvalRow:
        agent, label, eps = point
        entry = attacks.get(label)
        attack = None if entry is None else entry.attack
        if entry is not None and attack is None:
            attack = _adversary(agents[agent], agent, label, env_id, eps, seed, adversary_steps, directory, quiet)
        when = None if entry is None else entry.when
        with stage(f"{agent}, {label}, eps {eps:g}", quiet) as progress:
            played = evaluate(
                agents[agent], env_id, attack, eps, episodes, seed, when=when, name=agent, progress=progress
            )
        return {**played.to_json(), "attack": label}

    def so_far() -> SuiteResult:
        return replace(result, rows=tuple(rows[point] for point in points if point in rows))

    def done(piece: Piece[Point], row: EvalRow) -> None:
        rows[piece.what] = row
        file.write(so_far())

    pieces = [Piece(f"{agent}, {label}, eps {eps:g}", (agent, label, eps)) for agent, label, eps in points]
    run_pieces(play_point, [piece for piece in pieces if piece.what not in rows], done, engine, f"Suite {name}")
    file.write(so_far())
    return so_far()


def table(result: SuiteResult) -> str:
    """Attack x eps as text: the agents beside each other, then what an attack on the student costs, and the worst."""
    agents = result.policies
    costs = "".join(f"{title:>12}" for title in ("queries", "gradients", "seconds"))
    lines = [f"{'eps':>6}  {'attack':<20}" + "".join(f"{agent:>20}{'changed':>9}" for agent in agents) + costs]
    for eps in (0.0, *result.eps_units):
        rows = {agent: {row["attack"]: row for row in result.at(agent, eps)} for agent in agents}
        for label in dict.fromkeys(label for by_attack in rows.values() for label in by_attack):
            cells = "".join(_cell(rows[agent].get(label)) for agent in agents)
            lines.append(f"{eps:>6g}  {label:<20}{cells}{_cost(rows[agents[0]].get(label))}")
    lines += [
        "",
        f"Costs are of the {agents[0]}: queries and gradients per step, seconds for {result.episodes} episodes.",
    ]
    for eps in result.eps_units:
        worst = {agent: result.worst(agent, eps) for agent in agents}
        found = ", ".join(
            f"{agent} {row['mean']:.1f} ± {row['sem']:.1f} ({row['attack']})" for agent, row in worst.items()
        )
        lines.append(f"worst at eps {eps:g}: {found}")
    lines += [f"{one['policy']} was spared {one['attacks']}: {one['why']}" for one in result.skipped]
    return "\n".join(lines)


def _cell(row: EvalRow | None) -> str:
    if row is None:
        return f"{'-':>20}{'-':>9}"
    return f"{row['mean']:>12.1f} ± {row['sem']:<5.1f}{row['changed_share']:>9.1%}"


def _cost(row: EvalRow | None) -> str:
    if row is None:
        return ""
    return f"{row['queries'] / row['steps']:>12.1f}{row['gradients'] / row['steps']:>12.1f}{row['seconds']:>12.1f}"


def entries(chosen: str | Sequence[str], teacher: Policy | None, env_id: str, policy: Policy) -> dict[str, Entry]:
    """The attacks of a suite, by name."""
    if not isinstance(chosen, str):
        if not chosen:
            raise SortRLError("evaluate_suite: no attacks named; name a suite, or at least one attack.")
        named = [by_name(one) for one in chosen if one != LEARNED]
        learned = {LEARNED_LABEL: Entry(None)} if LEARNED in chosen else {}
        return {attack.name: Entry(attack) for attack in named} | learned
    found = {label: Entry(attack) for label, attack in suite(chosen, teacher).items()}
    if chosen == "full":
        steps = max(1, (describe(env_id).max_steps or 400) // 4)
        guide = policy if teacher is None else teacher
        found["strategic"] = Entry(Aimed(), Strategic(threshold=0.5, steps=steps, guide=guide))
        found["critical points"] = Entry(Aimed(), CriticalPoints(horizon=60, steps=steps, strokes=10))
        found[LEARNED_LABEL] = Entry(None)
    return found


def _points(
    agents: Mapping[str, Policy], attacks: Mapping[str, Entry], eps_units: Sequence[float]
) -> Iterator[tuple[str, str, Entry | None, float]]:
    """Every evaluation to be made, in order: clean play first."""
    for agent in agents:
        yield agent, "none", None, 0.0
    for eps in eps_units:
        for label, entry in attacks.items():
            for agent, policy in agents.items():
                if why_not(policy, entry) is None:
                    yield agent, label, entry, eps


def why_not(policy: Policy, entry: Entry) -> str | None:
    """Why an attack is not run on a policy; None if it is."""
    if entry.needs_gradient and is_black_box(policy):
        return "only its answers are known, no gradients"
    if getattr(entry.attack, "surrogate_p", None) is not None and not hasattr(policy, "surrogate_scores"):
        return "it has no smooth surrogate, so they would repeat the attacks without one"
    return None


def _spared(agents: Mapping[str, Policy], attacks: Mapping[str, Entry]) -> tuple[Skipped, ...]:
    """The attacks that are not run, grouped by agent and reason."""
    spared: dict[tuple[str, str], list[str]] = {}
    for agent, policy in agents.items():
        for label, entry in attacks.items():
            reason = why_not(policy, entry)
            if reason is not None:
                spared.setdefault((agent, reason), []).append(label)
    return tuple({"policy": agent, "attacks": ", ".join(labels), "why": why} for (agent, why), labels in spared.items())


def _adversary(
    victim: Policy,
    agent: str,
    label: str,
    env_id: str,
    eps: float,
    seed: int,
    steps: int,
    directory: Path | None,
    quiet: bool,
) -> LearnedAdversary:
    folder = None if directory is None else directory / f"adversary-{agent}-{eps:g}"
    if folder is not None and folder.exists():
        return LearnedAdversary.load(folder)
    with stage(f"Training the {label} against the {agent} at eps {eps:g}", quiet) as progress:
        return train_adversary(victim, env_id, eps, steps, seed, folder, progress, director=not is_black_box(victim))


def _identity(
    env_id: str, episodes: int, seed: int, agents: Mapping[str, Policy], adversary_steps: int
) -> dict[str, Any]:
    """Settings that must be equal for stored rows to be reused."""
    return {
        "env_id": env_id,
        "episodes": episodes,
        "seed": seed,
        "agents": {name: fingerprint(policy) for name, policy in agents.items()},
        "adversary_steps": adversary_steps,
    }


class _File:
    """The result file (if a path is given): rows that it has are not computed again."""

    def __init__(self, path: Path | None, identity: dict[str, Any], again: bool = False) -> None:
        self.path = path
        self.identity = identity
        self.rows: list[EvalRow] = []
        if path is not None and path.exists():
            document = read_object(path)
            found = differences(document.get("identity"), identity)
            if found and not again:
                raise SortRLError(
                    f"{path} holds the result of other agents, episodes or seeds: {named(found)}. Choose another file, or delete it."
                )
            if not found:
                self.rows = stored_rows(document.get("rows"), path)
            elif {one.field for one in found} != {"episodes"} and self.directory is not None:
                shutil.rmtree(self.directory, ignore_errors=True)  # adversaries of other agents, or of other training

    @property
    def directory(self) -> Path | None:
        """Where trained adversaries go: beside the file, under its name."""
        return None if self.path is None else self.path.with_suffix("")

    def find(self, policy: str, attack: str, eps: float) -> EvalRow | None:
        wanted = (policy, attack, eps)
        return next((row for row in self.rows if (row["policy"], row["attack"], row["eps"]) == wanted), None)

    def write(self, result: SuiteResult) -> None:
        if self.path is not None:
            # Rows of an earlier call that this one does not ask for are kept: they may be asked for again.
            new = {(row["policy"], row["attack"], row["eps"]) for row in result.rows}
            kept = [row for row in self.rows if (row["policy"], row["attack"], row["eps"]) not in new]
            head = {"schema": SCHEMA, "kind": "attack", "identity": self.identity, "protocol": PROTOCOL}
            head |= {"versions": provenance.versions()}
            write_json(self.path, {**head, **result.to_json(), "rows": [*result.rows, *kept]})
