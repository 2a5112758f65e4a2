"""The command line: each command is a thin function over the package; its docstring is its help."""

from __future__ import annotations

import os
import shlex
import sys
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
        run: Directory of a run.
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


def certify(
    run: Annotated[Path, tyro.conf.Positional],
    eps: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2),
    episodes: int = 30,
    seed: int = 0,
    threads: int | None = None,
    json: Path | None = None,
) -> None:
    """Certified share of the states of clean episodes (ACR), and of whole episodes, at each eps.

    Args:
        run: Directory of a run.
        eps: Perturbation sizes, in the policy's input units.
        episodes: Clean episodes to play.
        seed: Chooses the episodes.
        threads: Threads to use [all cores].
        json: Write the figures here.
    """
    import numpy as np

    from sortrl.certify import certificate_summary, certified_shares, fully_certified_episodes
    from sortrl.envs import describe
    from sortrl.evaluate import evaluate as play
    from sortrl.files import write_json
    from sortrl.pipeline import open_run
    from sortrl.progress import stage

    _use_threads(threads)
    env_id, policy, _ = open_run(run)
    with stage("Playing clean episodes", quiet=not sys.stderr.isatty()) as progress:
        clean = play(policy, env_id, episodes=episodes, seed=seed, name="student", progress=progress)
    whole = [fully_certified_episodes(clean, size) for size in eps]
    print(f"{clean.mean:.1f} ± {clean.sem:.1f} clean return, {int(clean.lengths.sum())} states\n")
    print(f"{'eps':>8}{'states certified':>19}{'episodes certified':>21}")
    for size, share, episode_share in zip(eps, certified_shares(clean, eps), whole, strict=True):
        print(f"{size:>8g}{share:>19.1%}{episode_share:>21.1%}")
    median = float(np.median(np.asarray(clean.radii)))
    print(f"\nmedian radius {median:.4g} in input units; in raw units:")
    for name, scale in zip(describe(env_id).obs_names, policy.normalizer.scale.flatten().tolist(), strict=True):
        print(f"  {name:<24} ± {median * scale:.4g}")
    if json is not None:
        write_json(
            json,
            {
                "clean": clean.to_json(),
                **certificate_summary(clean, max(eps)),
                "at": list(eps),
                "episodes_certified": whole,
            },
        )


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
    algorithm: Literal["ppo", "dqn"] = "ppo",
    seed: int = 0,
    json: Path | None = None,
) -> None:
    """Train a teacher alone, with the settings known to solve the task; continues where it was stopped.

    Args:
        env: Gymnasium environment with discrete actions.
        out: Directory for the teacher [runs/teachers/<env>-<algorithm>].
        algorithm: ppo or dqn.
        seed: Fixes the training.
        json: Write the result here.
    """
    from sortrl.evaluate import evaluate as play
    from sortrl.files import write_json
    from sortrl.progress import stage
    from sortrl.teachers import teacher_preset, train_teacher

    directory = out or Path("runs") / "teachers" / f"{env.replace('/', '-')}-{algorithm}"
    with stage(f"Training {algorithm.upper()} on {env}") as progress:
        teacher = train_teacher(env, teacher_preset(env, algorithm), directory, seed, progress)
    result = play(teacher, env, episodes=100, seed=seed + 1)
    print(f"{result.mean:.1f} ± {result.sem:.1f} over 100 greedy episodes\nteacher: {directory}")
    if json is not None:
        write_json(json, result.to_json())


def reproduce(
    what: Annotated[Literal["fig1"], tyro.conf.Positional],
    task: str | None = None,
    scale: Literal["smoke", "cpu", "paper"] = "cpu",
    out: Path = Path("results"),
    work: Path = Path("runs/fig1"),
    teachers: Path | None = None,
    jobs: int | None = None,
) -> None:
    """Make the paper's figures again; continues where it was stopped.

    Args:
        what: fig1: return against eps under PGD-10 on the four classic tasks, in two protocols.
        task: Only this task.
        scale: smoke (seconds, to see that it works), cpu (an hour or two), paper (the printed recipe at full length too).
        out: Where fig1.json and fig1.png go.
        work: Where finished parts are kept.
        teachers: Folder of the published RL Baselines3 Zoo agents [$SORTRL_TEACHERS]; without it experts are trained.
        jobs: Processes side by side [one per core].
    """
    from sortrl import reproduce as module

    results = module.fig1(
        scale, task, out, work, teachers, jobs, progress=lambda line: print(line, file=sys.stderr, flush=True)
    )
    for protocol, by_task in results["curves"].items():
        for name, agents in by_task.items():
            for agent, curve in agents.items():
                points = "  ".join(f"{point['eps']:g}: {point['mean']:.0f}" for point in curve["curve"])
                print(f"{protocol:<11}{name:<16}{agent:<8}{points}")
    print(f"figure: {out / 'fig1.png'}")


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


COMMANDS = {f.__name__: f for f in (robustify, evaluate, certify, report, reproduce, teach, tasks, bench, info)}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``sortrl``. Exit codes: 0 done, 1 a mistake that the message explains, 2 usage, 130 stopped."""
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, args=arguments, prog="sortrl", description=HELP)
    except SortRLError as error:
        print(f"sortrl: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("sortrl: stopped. Start the same command again to continue.", file=sys.stderr)
        sys.exit(130)


HELP = "Turn a trained RL agent into one whose every decision carries a robustness certificate."


def _use_threads(threads: int | None) -> None:
    import torch

    if threads is not None and threads < 1:
        raise SortRLError(f"--threads is {threads}, expected at least 1.")
    torch.set_num_threads(threads or os.cpu_count() or 1)


if __name__ == "__main__":
    main()
