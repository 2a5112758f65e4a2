"""The command line: each command is a thin function over the package; its docstring is its help."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

# Before torch is imported: waiting threads that spin slow each other down on few cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import tyro

from sortrl.errors import SortRLError


def robustify(
    env: Annotated[str, tyro.conf.Positional],
    teacher: Path | None = None,
    vecnormalize: Path | None = None,
    allow_pickle: bool = False,
    eps: float | None = None,
    preset: Literal["fast", "paper"] = "fast",
    out: Path | None = None,
    seed: int = 0,
    steps: int | None = None,
    states: int | None = None,
    episodes: int | None = None,
    threads: int | None = None,
    json: Path | None = None,
) -> None:
    """Turn an agent into one whose every decision carries a certificate, and report the result.

    Trains a teacher (or loads yours), collects states, distils a Lipschitz student, certifies it, attacks both and
    writes report.html. Start it again with the same options to continue a run that was stopped.

    Args:
        env: Gymnasium environment with discrete actions, for example CartPole-v1.
        teacher: Agent to start from: a Stable-Baselines3 zip (PPO, A2C, DQN, QR-DQN) or a saved teacher. Without it, PPO is trained.
        vecnormalize: Observation statistics of that agent: a file written by sortrl, or SB3's vecnormalize.pkl with --allow-pickle.
        allow_pickle: Accept a pickle for --vecnormalize. Only plain arrays are read from it.
        eps: Size of the perturbation to resist, in the teacher's input units (for a normalising teacher: standard deviations).
        preset: fast, or paper for the published recipe.
        out: Directory for the run [runs/<env>].
        seed: Fixes the run on one machine and thread count.
        steps: Optimiser steps of the distillation.
        states: States to collect.
        episodes: Test episodes per point.
        threads: Threads to use [all cores].
        json: Also write the results here.
    """
    from dataclasses import replace

    from sortrl import pipeline, report
    from sortrl.config import robustify_config
    from sortrl.envs import describe
    from sortrl.files import read_json, write_json

    _use_threads(threads)
    directory = out or Path("runs") / env.replace("/", "-")
    changes: dict[str, Any] = {"steps": steps, "episodes": episodes}
    if states is not None:
        default = robustify_config(describe(env).env_id, eps, preset).collect
        changes["collect"] = replace(default, states=states)
    pipeline.robustify(
        teacher,
        env,
        eps,
        preset=preset,
        out=directory,
        seed=seed,
        vecnormalize=vecnormalize,
        allow_pickle=allow_pickle,
        command=shlex.join(["sortrl", *sys.argv[1:]]),
        quiet=False,
        **changes,
    )
    results = read_json(directory / "results.json")
    if json is not None:
        write_json(json, results)
    print("\n".join(report.summary_lines(results)))
    print(f"report: {directory / 'report.html'}")


def evaluate(
    run: Annotated[Path, tyro.conf.Positional],
    attack: str = "pgd-10",
    eps: tuple[float, ...] = (0.0, 0.1),
    episodes: int = 30,
    seed: int = 0,
    threads: int | None = None,
    json: Path | None = None,
) -> None:
    """Returns under attack beside clean returns, the student's beside the teacher's.

    Args:
        run: Directory of a run, or zoo:NAME.
        attack: pgd-<steps>, fgsm or noise.
        eps: Perturbation sizes, in the policy's input units.
        episodes: Episodes per point; the same for teacher and student.
        seed: Chooses the episodes.
        threads: Threads to use [all cores].
        json: Write the rows here.
    """
    from sortrl import attacks
    from sortrl.evaluate import evaluate as play
    from sortrl.files import write_json
    from sortrl.pipeline import open_run
    from sortrl.progress import stage

    _use_threads(threads)
    env_id, policy, teacher = open_run(run)
    _check_eps(policy, env_id, eps)
    chosen, rows = attacks.by_name(attack), []
    print(f"{'policy':<10}{'attack':<10}{'eps':>8}{'return':>20}{'changed':>10}{'certified':>11}")
    for size in dict.fromkeys((0.0, *eps)):
        for name, agent in (("teacher", teacher), ("student", policy)):
            if agent is None:
                continue
            with stage(f"Evaluating the {name} at eps {size:g}", quiet=not sys.stderr.isatty()) as progress:
                result = play(
                    agent, env_id, chosen if size > 0 else None, size, episodes, seed, name=name, progress=progress
                )
            certified = "" if result.certified_share is None else f"{result.certified_share:.1%}"
            score = f"{result.mean:.1f} ± {result.sem:.1f}"
            print(f"{name:<10}{result.attack:<10}{size:>8g}{score:>20}{result.changed_share:>10.1%}{certified:>11}")
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
    json: Path | None = None,
) -> None:
    """Attack student and teacher in many ways; the worst return counts.

    Args:
        run: Directory of a run, or zoo:NAME.
        suite: quick (a few attacks), paper (the literature's), auto (strongest per action), full (all, noises, timed, trained adversary).
        eps: Perturbation sizes, in the policy's input units.
        episodes: Episodes per point; the same for every agent and attack.
        seed: Chooses the episodes.
        check: Also tell robustness from masked gradients by common-sense checks; exit code 1 if one fails.
        threads: Threads to use [all cores].
        json: Write the result here, point by point; the same command goes on where it was stopped.
    """
    from sortrl.checks import check_run
    from sortrl.pipeline import open_run
    from sortrl.suite import evaluate_suite, table

    _use_threads(threads)
    env_id, policy, teacher = open_run(run)
    _check_eps(policy, env_id, eps)
    result = evaluate_suite(
        policy, teacher, env_id, suite, eps, episodes, seed, path=json, quiet=not sys.stderr.isatty()
    )
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
) -> None:
    """Certified share of the states of clean episodes (ACR), of whole episodes, and the return that is proven, at each eps.

    Writes certificate.png into the run: certified share, radii, proven return beside the attacked one, and pictures of the
    states where the policy is least certain.

    Args:
        run: Directory of a run, or zoo:NAME.
        eps: Perturbation sizes, in the policy's input units.
        episodes: Clean episodes to play.
        seed: Chooses the episodes.
        attack: What to compare the proven return with, or none.
        return_episodes: Episodes, the first of those, of which the return is bounded and attacked.
        budget: Simulated steps per episode in the search for the worst return that can be forced.
        threads: Threads to use [all cores].
        save: Write the certificate of every visited state here; sortrl verify checks such a file.
        json: Write the figures here.
    """
    from sortrl import attacks
    from sortrl.certification import FIGURE, certification
    from sortrl.envs import describe
    from sortrl.files import write_json
    from sortrl.pipeline import open_run
    from sortrl.progress import stage

    _use_threads(threads)
    env_id, policy, _ = open_run(run)
    _check_eps(policy, env_id, eps)
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
    _draw_off_screen()
    figure = _output_folder(run) / FIGURE
    missing = found.save_figure(figure)
    print(f"figure: {figure}" + ("" if missing is None else f" (without pictures of states: {missing})"))


def _save_certificates(run: Path, env_id: str, episodes: int, seed: int, path: Path) -> None:
    import torch

    from sortrl.certificate_study import clean_episodes
    from sortrl.certify import save_certificates
    from sortrl.nets import load
    from sortrl.zoo import locate

    policy = load(run)
    states = torch.cat(clean_episodes(policy, env_id, episodes, seed))
    save_certificates(path, policy, states, policy.certify_unit(states), locate(run))
    print(f"certificates: {path} (check them with: sortrl verify {path})")


def verify(
    certificates: Annotated[Path, tyro.conf.Positional], policy: Path | None = None, json: Path | None = None
) -> None:
    """Check a file of certificates again, in float64, with code that shares nothing with what made it.

    Exit code 0 if every action is the arg-max of its scores and every radius at most margin / (2 L); 1 otherwise.

    Args:
        certificates: File written by sortrl certify --save, or by sortrl.certify.save_certificates.
        policy: The policy's file or directory, if it is no longer where the certificates say.
        json: Write the verdict here.
    """
    from sortrl.files import write_json
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
    print(f"{verdict.states} certificates hold: actions, radii (L = {verdict.lipschitz:.9g}) and the policy's weights")


def watch(
    run: Annotated[Path, tyro.conf.Positional],
    eps: float | None = None,
    attack: str = "pgd-10",
    seed: int = 0,
    out: Path | None = None,
    max_steps: int | None = None,
    threads: int | None = None,
    json: Path | None = None,
) -> None:
    """Film an episode with the radius of every decision below the picture; with an attack, clean and attacked side by side.

    Green: certified at eps; red: not. A black tick marks a step at which the attack changed the action. The film in the run
    directory, its default place, is also shown in report.html.

    Args:
        run: Directory of a run, or zoo:NAME.
        eps: Perturbation size, in the policy's input units [the one the policy was trained for].
        attack: Name of an attack, or none.
        seed: Chooses the episode.
        out: File to write [RUN/episode.gif; for zoo:NAME, runs/zoo-NAME/episode.gif].
        max_steps: Stop after so many steps.
        threads: Threads to use [all cores].
        json: Write actions and radii of every step here.
    """
    from sortrl import attacks
    from sortrl import report as reports
    from sortrl.evaluate import episode_seeds
    from sortrl.files import read_json, write_json
    from sortrl.film import film
    from sortrl.pipeline import open_run, trained_eps
    from sortrl.report.page import FILM
    from sortrl.watch import play

    _use_threads(threads)
    env_id, policy, _ = open_run(run)
    size = trained_eps(run) if eps is None else eps
    _check_eps(policy, env_id, (size,))
    path = out or _output_folder(run) / FILM
    if path.suffix.lower() != ".gif":
        raise SortRLError(f"--out is {path}, expected a name that ends in .gif.")
    chosen = [None] if attack == "none" else [None, attacks.by_name(attack)]
    episode_seed = episode_seeds(seed, 1)[0]
    episodes = [play(policy, env_id, size, adversary, episode_seed, max_steps) for adversary in chosen]
    for episode in episodes:
        share = f"{episode.certified.mean():.1%} of {len(episode)} steps certified at eps {size:g}"
        changed = "" if episode.attack == "none" else f", {episode.changed.sum()} actions changed"
        print(f"{episode.attack:<10} return {episode.total:g}: {share}{changed}")
    if json is not None:
        write_json(json, [episode.to_json() for episode in episodes])
    _draw_off_screen()
    film(episodes, path)
    print(f"film: {path}")
    if path == run / FILM and (run / "results.json").exists():
        print(f"report: {reports.render(read_json(run / 'results.json'), run)}")


def export(run: Annotated[Path, tyro.conf.Positional], onnx: Path) -> None:
    """Write the policy of a run as an ONNX file: raw observation in; action, scores and certified radius out.

    Args:
        run: Directory of a run, or zoo:NAME.
        onnx: File to write.
    """
    from sortrl.nets import sort_layers_only
    from sortrl.nets.export import export_onnx
    from sortrl.pipeline import open_run

    export_onnx(sort_layers_only(open_run(run)[1], "Exporting to ONNX"), onnx)
    print(f"onnx: {onnx}")


def report(run: Annotated[Path, tyro.conf.Positional]) -> None:
    """Make report.html, report.md and the figures again from results.json.

    Args:
        run: Directory of a run.
    """
    from sortrl import report as module
    from sortrl.files import read_json

    results = read_json(run / "results.json")
    path = module.render(results, run)
    print("\n".join(module.summary_lines(results)))
    print(f"report: {path}")


def teach(
    env: Annotated[str, tyro.conf.Positional],
    out: Path | None = None,
    algorithm: Literal["ppo", "dqn", "pqn"] | None = None,
    processes: int = 1,
    seed: int = 0,
    json: Path | None = None,
) -> None:
    """Train a teacher alone, with the settings known to solve the task; continues where it was stopped.

    Args:
        env: Gymnasium environment with discrete actions.
        out: Directory for the teacher [runs/teachers/<env>-<algorithm>].
        algorithm: ppo, dqn or (for images) pqn [the one the task has settings for, else ppo].
        processes: Among which the games of a PQN training are shared out; the result is the same.
        seed: Fixes the training.
        json: Write the result here.
    """
    from sortrl.evaluate import evaluate as play
    from sortrl.files import locked, write_json
    from sortrl.progress import stage
    from sortrl.teachers import teacher_preset, train_teacher

    config = teacher_preset(env, algorithm)
    directory = out or Path("runs") / "teachers" / f"{env.replace('/', '-')}-{config.algorithm}"
    with locked(directory), stage(f"Training {config.algorithm.upper()} on {env}") as progress:
        teacher = train_teacher(env, config, directory, seed, progress, processes)
    result = play(teacher, env, episodes=config.confirm_episodes, seed=seed + 1)
    print(f"{result.mean:.1f} ± {result.sem:.1f} over {config.confirm_episodes} greedy episodes\nteacher: {directory}")
    if json is not None:
        write_json(json, result.to_json())


def reproduce(
    what: Annotated[Literal["fig1", "table2", "table4", "certificates", "reliability"], tyro.conf.Positional],
    task: str | None = None,
    scale: Literal["smoke", "cpu", "paper"] = "cpu",
    out: Path = Path("results"),
    work: Path | None = None,
    teachers: Path | None = None,
    jobs: int | None = None,
    seconds: float | None = None,
) -> None:
    """Make the paper's figures again, and what goes beyond them; continues where it was stopped.

    Args:
        what: fig1: return against eps on the four classic tasks, in two protocols, under PGD-10 and the worst of all attacks;
            table2, table4: ProcGen's Jumper and CoinRun under PGD-10 and PGD-30, beside published rivals;
            certificates: how tight the certificates of its students are; reliability: damaged files, kills at random
            moments, many threads and processes.
        task: Only this task; of tables 2 and 4, only this game (Jumper, Coinrun); of reliability, only this part (fuzz, crashes, soak).
        scale: smoke (minutes, to see that it works), cpu (hours on two cores), paper (the printed recipe at full length too).
        out: Where the JSON and the PNG go.
        work: Where finished parts are kept [runs/fig1, runs/procgen or runs/reliability].
        teachers: Folder of the published agents [$SORTRL_TEACHERS]; without it experts are trained.
        jobs: Processes side by side [one per core].
        seconds: How long the soak of reliability lasts [as the scale says].
    """
    from sortrl import reproduce as module

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    kept = {"reliability": "reliability", "table2": "procgen", "table4": "procgen"}
    folder = work or Path("runs") / kept.get(what, "fig1")
    if what == "reliability":
        found = module.reliability(main, scale, task, out, folder, seconds, progress)
        print("\n".join(module.reliability_summary(found)))
        print(f"results: {out / what}.json")
        return
    if what in ("table2", "table4"):
        from sortrl.reproduce.procgen import table_lines

        found = module.procgen_table(what, scale, task, out, folder, teachers, progress)
        print("\n".join(table_lines(found)))
        print(f"results: {out / what}.json")
        return
    if what == "certificates":
        module.certificates(scale, task, out, folder, progress)
    else:
        print("\n".join(module.figure1.summary(module.fig1(scale, task, out, folder, teachers, jobs, progress))))
    print(f"figure: {out / what}.png")


def zoo(
    name: Annotated[str | None, tyro.conf.Positional] = None, add: Path | None = None, folder: Path = Path("zoo")
) -> None:
    """List the trained policies that come with sortrl, show the card of one, or add one from a run.

    Args:
        name: Show this entry's card; with --add, what to call the new one.
        add: Directory of a finished run.
        folder: Where --add writes.
    """
    from sortrl import zoo as entries
    from sortrl.publish import described, publish, summed_up

    if add is not None:
        if name is None:
            raise SortRLError("zoo: --add needs a name: sortrl zoo NAME --add RUN.")
        print(f"entry: {publish(add, name, folder)}")
        return
    if name is not None:
        print(described(entries.entry(name.removeprefix(entries.PREFIX))), end="")
        return
    for known in entries.names():
        print(f"zoo:{known:<14} {summed_up(entries.entry(known))}")


def tasks() -> None:
    """List the tasks with settings of their own. Any other Gymnasium id with discrete actions works too."""
    from sortrl.config import TASKS

    for task in TASKS.values():
        print(f"{task.env_id:<18} eps {task.eps:<6g} {task.summary}")


def bench(json: Path | None = None, quick: bool = False) -> None:
    """Time the kernels against torch and against the machine's measured limit.

    Args:
        json: Write the measurements here.
        quick: Tiny shapes, to see that it works.
    """
    from sortrl import bench as module

    results = module.run(
        quick=quick, repeats=5 if quick else 25, progress=lambda line: print(line, file=sys.stderr, flush=True)
    )
    if json is not None:
        module.write(results, json)
    print(module.table(results))


def info(json: Path | None = None) -> None:
    """Versions, instruction set, threads, and which backends there are.

    Args:
        json: Write the same here.
    """
    import importlib.util

    import torch

    from sortrl import ops, provenance
    from sortrl.files import write_json
    from sortrl.ops import cpu

    backend, reason = ops.backend_for(torch.zeros(1))
    has_triton = importlib.util.find_spec("triton") is not None
    facts = {
        "versions": provenance.versions(),
        "machine": provenance.machine(),
        "backends": {
            "cpu": cpu.select().reason
            if cpu.select().module is None
            else f"{cpu.select().isa} ({cpu.select().reason})",
            "triton": ("installed" if has_triton else "not installed")
            + ("" if torch.cuda.is_available() else "; no GPU found, so it is not used"),
            "reference": "always available (plain torch)",
        },
        "in_use": {"backend": backend, "why": reason},
    }
    for title, section in facts.items():
        print(title)
        for key, value in section.items():
            print(f"  {key:<18} {value}")
    if json is not None:
        write_json(json, facts)


COMMANDS = {
    f.__name__: f
    for f in (
        robustify,
        evaluate,
        attack,
        certify,
        verify,
        watch,
        export,
        report,
        reproduce,
        teach,
        tasks,
        zoo,
        bench,
        info,
    )
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``sortrl``. Exit codes: 0 done, 1 a mistake that the message explains, 2 usage, 130 stopped."""
    try:
        with _insistent_interrupts():
            tyro.extras.subcommand_cli_from_dict(COMMANDS, args=arguments, prog="sortrl", description=HELP)
    except SortRLError as error:
        print(f"sortrl: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("sortrl: stopped. Start the same command again to continue.", file=sys.stderr)
        sys.exit(130)
    except MemoryError:
        print("sortrl: out of memory. Lower states, batch, width or depth, or free some memory.", file=sys.stderr)
        sys.exit(1)


@contextmanager
def _insistent_interrupts() -> Iterator[None]:
    """Repeat an interrupt until the command has ended.

    Python forgets one that arrives while an object is being finalised, and so may code between C and Python; the command
    would go on as if nobody had asked it to stop.
    """

    def interrupt(number: int, frame: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, INTERRUPT_AGAIN)
        raise KeyboardInterrupt

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield  # somebody else looks after interrupts, or nobody can
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGALRM)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)


INTERRUPT_AGAIN = 3.0  # seconds, in which most commands have long cleaned up and ended
MOST_THREADS = 1024
HELP = "Turn a trained RL agent into one whose every decision carries a robustness certificate."


def _draw_off_screen() -> None:
    """Pictures are drawn into memory; a machine without a display must not be asked for one."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def _output_folder(run: Path) -> Path:
    """Where the files of a command go that names no place for them: into the run; never into the zoo."""
    from sortrl import zoo as entries

    return Path("runs") / str(run).replace(":", "-") if entries.is_entry(run) else run


def _check_eps(policy: Any, env_id: str, eps: tuple[float, ...]) -> None:
    from sortrl.attacks.valid import check_eps
    from sortrl.envs import describe

    for size in eps:
        check_eps(policy, describe(env_id), size)


def _use_threads(threads: int | None) -> None:
    import torch

    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise SortRLError(f"--threads is {threads}, expected 1..{MOST_THREADS}.")
    torch.set_num_threads(threads or os.cpu_count() or 1)


if __name__ == "__main__":
    main()
