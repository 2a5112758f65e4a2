"""Commands that evaluate a policy: returns, attacks, certificates."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from sortrl.cli.common import (
    Import,
    check_each_eps,
    draw_off_screen,
    engine_of,
    output_folder,
    use_module,
    use_threads,
)
from sortrl.core.errors import SortRLError

if TYPE_CHECKING:
    from sortrl.core.pieces import Engine
    from sortrl.experiments.leaderboard import Kind


USUAL_ATTACK = "pgd-10"
USUAL = {"attack": None, "eps": (0.0, 0.1), "episodes": 30, "seed": 0}  # of evaluate; a protocol fixes them


def evaluate(
    run: Annotated[Path | None, tyro.conf.Positional] = None,
    attack: str | None = None,
    eps: tuple[float, ...] = (0.0, 0.1),
    episodes: int = 30,
    seed: int = 0,
    protocol: str | None = None,
    policy: str | None = None,
    task: str | None = None,
    name: str | None = None,
    kind: Literal["SortRL", "threshold", "memory", "baseline", "teacher", "published", "outside"] = "outside",
    out: Path = Path("results/leaderboard"),
    work: Path = Path("runs/leaderboard"),
    workers: int | None = None,
    ray: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="[ADDRESS]")] = None,
    threads: int | None = None,
    json: Path | None = None,
    imports: Import = None,
) -> None:
    """Returns under attack beside clean returns, the student's beside the teacher's.

    With --protocol, an entry of the leaderboard: everything is measured as the protocol says, and the same command continues where
    it was stopped.

    Args:
        run: Directory of a run, or zoo:NAME.
        attack: Of discrete actions [pgd-10]: fgsm, pgd-10, pgd-10-margin, pgd-10-dlr, pgd-10-p32, targeted, ri-fgsm, ri-fgsm-multi,
            apgd-ce, apgd-dlr, minbest-10, square, auto, noise, gaussian, dropout or salt-and-pepper; numbers may be changed (pgd-30,
            square-500). Of continuous ones [farthest-10]: farthest-10, worst-direction-10, push-up-10, push-down-10 or noise.
        eps: Perturbation sizes, in the policy's input units.
        episodes: Episodes per point; the same for teacher and student.
        seed: Chooses the episodes.
        protocol: Measure by this protocol (classic-1, minatar-1, atari84-1 or procgen-1) and write an entry of the leaderboard.
        policy: In place of a run, package.module:load: a function that returns the policy (for the id of a task, if it takes one).
        task: With --policy, only this task of the protocol [all for which there is a policy].
        name: What the entry is called [the run's name, or module:load].
        kind: With --policy, what the entry is called a kind of.
        out: Folder of the leaderboard.
        work: Where finished parts of an entry are kept.
        workers: With --protocol, processes of one thread each that share out the attacks [this process alone].
        ray: In place of them, a Ray cluster: the one at this address; without an address, the one running here, or else a local
            one that is started for this command.
        threads: Threads to use [all cores].
        json: Write the rows here.
        imports: Import this module first: the one that registers the run's environment.
    """
    from sortrl import attacks
    from sortrl.core.files import write_json
    from sortrl.core.progress import stage
    from sortrl.evaluate.returns import evaluate as play
    from sortrl.nets import ContinuousPolicy, load
    from sortrl.runs.run import read_run

    use_threads(threads)
    use_module(imports)
    if protocol is not None:
        given = {"attack": attack, "eps": eps, "episodes": episodes, "seed": seed}
        fixed = [f"--{option}" for option, value in given.items() if value != USUAL[option]]
        if fixed:
            raise SortRLError(f"evaluate: {', '.join(fixed)} cannot be chosen with --protocol, which fixes it.")
        spread = engine_of(workers, ray, usual=1, imports=imports)
        _enter(run, policy, protocol, task, name, kind, out, work, spread, json)
        return
    if policy is not None or run is None:
        raise SortRLError(
            "evaluate: give the directory of a run or zoo:NAME; or --policy package.module:load with --protocol, to enter a policy of "
            "your own into the leaderboard."
        )
    if isinstance(load(run), ContinuousPolicy):
        _evaluate_continuous(run, attack or "farthest-10", eps, episodes, seed, json)
        return
    env_id, student, teacher = read_run(run)
    check_each_eps(student, env_id, eps)
    chosen, rows = attacks.by_name(attack or USUAL_ATTACK), []
    print(f"{'policy':<10}{'attack':<10}{'eps':>8}{'return':>20}{'changed':>10}{'certified':>11}")
    for size in dict.fromkeys((0.0, *eps)):
        for title, agent in (("teacher", teacher), ("student", student)):
            if agent is None:
                continue
            with stage(f"Evaluating the {title} at eps {size:g}", quiet=not sys.stderr.isatty()) as progress:
                result = play(
                    agent, env_id, chosen if size > 0 else None, size, episodes, seed, name=title, progress=progress
                )
            certified = "" if result.certified_share is None else f"{result.certified_share:.1%}"
            score = f"{result.mean:.1f} ± {result.sem:.1f}"
            print(f"{title:<10}{result.attack:<10}{size:>8g}{score:>20}{result.changed_share:>10.1%}{certified:>11}")
            rows.append(result.to_json())
    if json is not None:
        write_json(json, rows)


def _enter(
    run: Path | None,
    policy: str | None,
    protocol: str,
    task: str | None,
    name: str | None,
    kind: Kind,
    out: Path,
    work: Path,
    engine: Engine,
    json: Path | None,
) -> None:
    """Entries of the leaderboard: of a run and its teacher, or of somebody's policy."""
    from sortrl.core.files import write_json
    from sortrl.experiments import leaderboard as board

    if (run is None) == (policy is None):
        raise SortRLError("evaluate --protocol: give either a run (or zoo:NAME) or --policy package.module:load.")
    frozen = board.protocol_of(protocol)
    if policy is not None:
        entrants = board.of_loader(policy, frozen, task, name, kind)
    else:
        assert run is not None
        entrants = board.of_run(run, task, name)
    made = []
    for entrant in entrants:
        frozen.task(entrant.task)
        other = board.same_agent(entrant, out)
        if other not in (None, entrant.name):
            print(f"{entrant.name}: on the board already, as {other}")
            continue
        made.append(board.enter(entrant, frozen, out, work, _to_stderr, engine))
    print(board.text(board.Board(tuple(made))))
    print(f"entries: {out}")
    if json is not None:
        write_json(json, made)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _evaluate_continuous(
    run: Path, attack: str, eps: tuple[float, ...], episodes: int, seed: int, json: Path | None
) -> None:
    """Returns, and how far actions were moved beside what is certified."""
    from sortrl.attacks.continuous import action_attack
    from sortrl.core.files import write_json
    from sortrl.evaluate.continuous import evaluate_continuous
    from sortrl.runs.continuous import read_continuous

    env_id, policy, teacher = read_continuous(run)
    chosen, rows = action_attack(attack), []
    constants = ", ".join(f"{constant:.6g}" for constant in policy.lipschitz)
    print(f"an action moves by at most L eps, L = {constants}\n")
    print(f"{'policy':<10}{'attack':<20}{'eps':>8}{'return':>20}{'moved':>16}{'bound':>16}")
    for size in dict.fromkeys((0.0, *eps)):
        for name, agent in (("teacher", teacher), ("student", policy)):
            if agent is None:
                continue
            result = evaluate_continuous(agent, env_id, chosen, size, episodes, seed, name=name)
            moved, bound = (
                "" if part is None else ", ".join(f"{number:.4g}" for number in part)
                for part in (result.moved, result.bound)
            )
            score = f"{result.mean:.1f} ± {result.sem:.1f}"
            print(f"{name:<10}{result.attack:<20}{size:>8g}{score:>20}{moved:>16}{bound:>16}")
            rows.append(result.to_json())
    if json is not None:
        write_json(json, rows)


def attack(
    run: Annotated[Path, tyro.conf.Positional],
    suite: Literal["quick", "paper", "auto", "full"] = "quick",
    eps: tuple[float, ...] = (0.1,),
    episodes: int = 20,
    seed: int = 0,
    check: bool = False,
    threads: int | None = None,
    workers: int | None = None,
    ray: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="[ADDRESS]")] = None,
    json: Path | None = None,
    imports: Import = None,
) -> None:
    """Attack student and teacher in many ways; the worst return counts.

    Args:
        run: Directory of a run, or zoo:NAME.
        suite: quick (a few attacks), paper (the literature's), auto (ensemble of strong attacks), full (all of these, noise, timed
            attacks, learned adversary).
        eps: Perturbation sizes, in the policy's input units.
        episodes: Episodes per point; the same for every agent and attack.
        seed: Chooses the episodes.
        check: Also run sanity checks for gradient masking; exit code 1 if one fails.
        threads: Threads to use [all cores].
        workers: Processes of one thread each that share out the attacks [this process alone, with its threads].
        ray: In place of them, a Ray cluster: the one at this address; without an address, the one running here, or else a local
            one that is started for this command. Results are those of --threads 1.
        json: Write the result here, point by point; the same command continues where it was stopped.
        imports: Import this module first: the one that registers the run's environment.
    """
    from sortrl.attacks.sanity import check_run
    from sortrl.evaluate.suite import evaluate_suite, table
    from sortrl.runs.run import read_run

    use_threads(threads)
    use_module(imports)
    env_id, policy, teacher = read_run(run)
    check_each_eps(policy, env_id, eps)
    spread = None if workers is None and ray is None else engine_of(workers, ray, usual=1, imports=imports)
    quiet = spread is not None or not sys.stderr.isatty()
    result = evaluate_suite(policy, teacher, env_id, suite, eps, episodes, seed, path=json, quiet=quiet, engine=spread)
    print(table(result))
    if not check:
        return
    checks = check_run(policy, env_id, max(eps), seed=seed)
    print(f"\nchecks on states of the student, eps {max(eps):g}:")
    for one in checks:
        print(f"  {'ok  ' if one.passed else 'FAIL'}  {one.name}: {one.evidence}")
    if not all(one.passed for one in checks):
        sys.exit(1)


def certify(
    run: Annotated[Path, tyro.conf.Positional],
    eps: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2),
    episodes: int = 30,
    seed: int = 0,
    attack: str = "pgd-10",
    return_episodes: int = 10,
    budget: int = 1000,
    threads: int | None = None,
    save: Path | None = None,
    json: Path | None = None,
    imports: Import = None,
) -> None:
    """Certified share of the states of clean episodes (ACR), of whole episodes, and the return that is proven, at each eps.

    Writes certificate.png into the run: certified share, radii, proven return beside the attacked one, and pictures of the
    states where the policy is least certain.

    Args:
        run: Directory of a run, or zoo:NAME.
        eps: Perturbation sizes, in the policy's input units.
        episodes: Clean episodes to play.
        seed: Chooses the episodes.
        attack: Attack to compare the proven return with (names as in sortrl evaluate), or none.
        return_episodes: How many of these episodes (the first ones) also get a proven return and are attacked.
        budget: Simulated steps per episode in the search for the worst return that can be forced.
        threads: Threads to use [all cores].
        save: Write the certificate of every visited state here; sortrl verify checks such a file.
        json: Write the figures here.
        imports: Import this module first: the one that registers the run's environment.
    """
    from sortrl import attacks
    from sortrl.core.files import write_json
    from sortrl.core.progress import stage
    from sortrl.envs import describe
    from sortrl.runs.certification import FIGURE, certification
    from sortrl.runs.run import read_run

    use_threads(threads)
    use_module(imports)
    env_id, policy, _ = read_run(run)
    check_each_eps(policy, env_id, eps)
    chosen = None if attack == "none" else attacks.by_name(attack)
    with stage("Certifying episodes", quiet=not sys.stderr.isatty()) as progress:
        found = certification(
            policy,
            env_id,
            eps,
            episodes,
            seed,
            attack=chosen,
            return_episodes=return_episodes,
            budget=budget,
            progress=progress,
        )
    clean = found.clean
    print(f"{clean.mean:.1f} ± {clean.sem:.1f} clean return, {int(clean.lengths.sum())} states\n")
    print(
        f"{'eps':>8}{'states certified':>19}{'episodes certified':>21}{'return proven':>16}{f'under {found.attack}':>16}"
    )
    for row, share, whole in zip(found.returns, found.shares, found.whole_episodes, strict=True):
        proven = "no bound" if row.lower is None else f">= {row.lower:.1f}"
        attacked = "" if row.attacked is None else f"{row.attacked.mean:.1f}"
        print(f"{row.eps_unit:>8g}{share:>19.1%}{whole:>21.1%}{proven:>16}{attacked:>16}")
    compared = len(found.returns[0].proven)
    print(f"returns: the first {compared} episodes, {clean.returns[:compared].mean():.1f} without attack")
    print(f"\nmedian radius {found.median_radius:.4g} in input units; in raw units:")
    for name, scale in describe(env_id).raw_units(policy.normalizer.scale.numpy()):
        print(f"  {name:<24} ± {found.median_radius * scale:.4g}")
    print(f"\nleast certain states of episode {found.episode.seed}:")
    for step in found.least_certain:
        print(f"  step {step:<6} action {found.episode.actions[step]}  radius {found.episode.radii[step]:.4g}")
    if json is not None:
        write_json(json, found.to_json())
    if save is not None:
        _save_certificates(run, env_id, episodes, seed, save)
    draw_off_screen()
    figure = output_folder(run) / FIGURE
    missing = found.save_figure(figure)
    print(f"figure: {figure}" + ("" if missing is None else f" (without pictures of states: {missing})"))


def _save_certificates(run: Path, env_id: str, episodes: int, seed: int, path: Path) -> None:
    import torch

    from sortrl.certify import save_certificates
    from sortrl.experiments.certificates import clean_episodes
    from sortrl.nets import load_discrete
    from sortrl.nets.zoo import locate

    policy = load_discrete(run)
    states = torch.cat(clean_episodes(policy, env_id, episodes, seed))
    save_certificates(path, policy, states, policy.certify_unit(states), locate(run))
    print(f"certificates: {path} (check them with: sortrl verify {path})")


def verify(
    certificates: Annotated[Path, tyro.conf.Positional], policy: Path | None = None, json: Path | None = None
) -> None:
    """Check a file of certificates in float64, with code that is independent of the code that made it.

    Exit code 0 if every action is the one that the policy plays and every radius can be proven, rounding included; 1 otherwise.

    Args:
        certificates: File written by sortrl certify --save, or by sortrl.certify.save_certificates.
        policy: The policy's file or directory, if it has been moved since the certificates were written.
        json: Write the verdict here.
    """
    from sortrl.core.files import write_json
    from sortrl.verify import verify as check

    verdict = check(certificates, policy)
    if json is not None:
        write_json(json, verdict.to_json())
    if not verdict.ok:
        wrong = len(verdict.failures)
        shown = "\n  ".join(verdict.failures[:5])
        raise SortRLError(
            f"{certificates}: {wrong} claim{'s' * (wrong > 1)} of {verdict.states} states do not hold:\n  {shown}"
        )
    constant = f" (L = {verdict.lipschitz:.9g})" if math.isfinite(verdict.lipschitz) else ""
    several = "" if verdict.distinct == verdict.states else f" (of {verdict.distinct} different states)"
    print(f"{verdict.states} certificates hold{several}: actions, radii{constant} and the policy's weights")
    for note in verdict.notes:
        print(f"note: {note}")
