"""Commands that show or export: film, report, ONNX, tasks, benchmark, versions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from sortrl.cli.common import Import, check_each_eps, draw_off_screen, output_folder, use_module, use_threads
from sortrl.core.errors import SortRLError


def watch(
    run: Annotated[Path, tyro.conf.Positional],
    eps: float | None = None,
    attack: str = "pgd-10",
    seed: int = 0,
    out: Path | None = None,
    max_steps: int | None = None,
    beside_teacher: bool = False,
    threads: int | None = None,
    json: Path | None = None,
    imports: Import = None,
) -> None:
    """Film an episode with the radius of every decision below the picture; with an attack, clean and attacked side by side.

    Green: certified at eps; red: not. A black tick marks a step at which the attack changed the action. The film in the run
    directory, its default place, is also shown in report.html.

    Args:
        run: Directory of a run, or zoo:NAME.
        eps: Perturbation size, in the policy's input units [the one the policy was trained for].
        attack: Name of an attack (as in sortrl evaluate), or none.
        seed: Chooses the episode.
        out: File to write [RUN/episode.gif; for zoo:NAME, runs/zoo-NAME/episode.gif].
        max_steps: Stop after this many steps.
        beside_teacher: Show the teacher under the same attack instead of the student's clean episode.
        threads: Threads to use [all cores].
        json: Write actions and radii of every step here.
        imports: Import this module first: the one that registers the run's environment.
    """
    from sortrl import attacks
    from sortrl import report as reports
    from sortrl.core.files import read_json, write_json
    from sortrl.core.records import Policy
    from sortrl.evaluate.returns import episode_seeds
    from sortrl.evaluate.watch import play
    from sortrl.report.film import film
    from sortrl.report.page import FILM
    from sortrl.runs.run import read_run, trained_eps

    use_threads(threads)
    use_module(imports)
    env_id, policy, teacher = read_run(run)
    size = trained_eps(run) if eps is None else eps
    check_each_eps(policy, env_id, (size,))
    path = out or output_folder(run) / FILM
    if path.suffix.lower() != ".gif":
        raise SortRLError(f"--out is {path}, expected a name that ends in .gif.")
    adversary = None if attack == "none" else attacks.by_name(attack)
    if beside_teacher:
        if teacher is None:
            raise SortRLError(f"--beside-teacher: {run} has no teacher to show. Choose a run that keeps its teacher.")
        shown: list[tuple[str, Policy, attacks.Attack | None]] = [
            ("teacher", teacher, adversary),
            ("student", policy, adversary),
        ]
    else:
        shown = [("", policy, how) for how in ((None,) if adversary is None else (None, adversary))]
    episode_seed = episode_seeds(seed, 1)[0]
    episodes = [play(agent, env_id, size, how, episode_seed, max_steps, name) for name, agent, how in shown]
    for episode in episodes:
        share = f"{episode.certified.mean():.1%} of {len(episode)} steps certified at eps {size:g}"
        changed = "" if episode.attack == "none" else f", {episode.changed.sum()} actions changed"
        who = f"{episode.agent} " if episode.agent else ""
        print(f"{who}{episode.attack:<10} return {episode.total:g}: {share}{changed}")
    if json is not None:
        write_json(json, [episode.to_json() for episode in episodes])
    draw_off_screen()
    film(episodes, path)
    print(f"film: {path}")
    if path == run / FILM and (run / "results.json").exists():
        print(f"report: {reports.render(read_json(run / 'results.json'), run)}")


def report(run: Annotated[Path, tyro.conf.Positional]) -> None:
    """Make report.html, report.md and the figures again from results.json.

    Args:
        run: Directory of a run.
    """
    from sortrl import report as module
    from sortrl.core.files import read_json

    results = read_json(run / "results.json")
    path = module.render(results, run)
    print("\n".join(module.summary_lines(results)))
    print(f"report: {path}")


def leaderboard(
    task: str | None = None,
    protocol: str | None = None,
    certified: bool = False,
    folder: Path = Path("results/leaderboard"),
    json: Path | None = None,
) -> None:
    """The agents that were measured by a frozen protocol, task by task, the best under its worst attack first.

    Entries are made by sortrl evaluate --protocol. IQM: interquartile mean over episodes, with its 95 % bootstrap interval.

    Args:
        task: Only this task.
        protocol: Only the tasks of this protocol.
        certified: Only agents whose decisions carry certificates.
        folder: Where the entries are, one file each.
        json: Write the entries that are shown here.
    """
    from sortrl.core.files import write_json
    from sortrl.experiments import leaderboard as board

    found = board.read_board(folder).chosen(task, protocol, certified)
    if json is not None:
        write_json(json, found.entries)
    print(board.text(found))


def export(
    run: Annotated[Path, tyro.conf.Positional],
    onnx: Path | None = None,
    c: Path | None = None,
    vnnlib: Path | None = None,
    eps: float | None = None,
    states: int = 20,
    seed: int = 0,
    imports: Import = None,
) -> None:
    """Write the policy of a run for other programs: raw observation in; action and certified radius out.

    Args:
        run: Directory of a run, or zoo:NAME.
        onnx: ONNX file to write.
        c: Directory for a packed policy and C sources that a robot can link, with an example and its Makefile.
        vnnlib: Directory for the network as ONNX and one VNN-LIB instance per state, as verifiers of neural networks take them.
        eps: Of --vnnlib, how far observations may be off, in the policy's input units [the one the policy was trained for].
        states: Of --vnnlib, how many states of a clean episode.
        seed: Of --vnnlib, chooses the episode.
        imports: Import this module first: the one that registers the run's environment.
    """
    from sortrl.experiments.certificates import clean_episodes
    from sortrl.nets import sort_layers_only
    from sortrl.nets.onnx import export_onnx
    from sortrl.nets.packed import export_c
    from sortrl.nets.vnnlib import INSTANCES, export_vnnlib
    from sortrl.runs.run import read_run, trained_eps

    use_module(imports)
    if onnx is None and c is None and vnnlib is None:
        raise SortRLError("export: nothing to write. Choose --onnx FILE, --c DIR or --vnnlib DIR, or several of them.")
    env_id, found, _ = read_run(run)
    policy = sort_layers_only(found, "Exporting")
    if onnx is not None:
        export_onnx(policy, onnx)
        print(f"onnx: {onnx}")
    if c is not None:
        export_c(policy, c)
        print(f"c: {c} (make -C {c} builds the example)")
    if vnnlib is not None:
        size = trained_eps(run) if eps is None else eps
        check_each_eps(policy, env_id, (size,))
        unit = clean_episodes(policy, env_id, 1, seed)[0]
        if not 1 <= states <= len(unit):
            raise SortRLError(f"export: --states is {states}, expected 1..{len(unit)}, the states of the episode.")
        chosen = unit[:: len(unit) // states][:states]
        export_vnnlib(policy, chosen, size, vnnlib)
        certified = int((policy.certify_unit(chosen).radius > size).sum())
        print(f"vnnlib: {vnnlib / INSTANCES} ({states} instances at eps {size:g}, {certified} of them certified here)")


def tasks() -> None:
    """List the tasks with settings of their own. Any other Gymnasium id with discrete actions works too."""
    from sortrl.runs.tasks import TASKS

    width = max(map(len, TASKS))
    for task in TASKS.values():
        print(f"{task.env_id:<{width}} eps {task.eps:<8.3g} {task.summary}")


def bench(json: Path | None = None, quick: bool = False, whole_jobs: bool = False) -> None:
    """Time the kernels against torch and against the machine's measured limit.

    Args:
        json: Write the measurements here; beside it goes a picture (.png) of them and of other processors' (NAME-*.json).
        quick: Tiny shapes, to see that it works.
        whole_jobs: Time robustify CartPole-v1 and the demo as well: some minutes more.
    """
    from sortrl.experiments import bench as module

    results = module.run(
        quick=quick,
        repeats=5 if quick else 12,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
        whole_jobs=whole_jobs,
    )
    if json is not None:
        module.write(results, json)
        module.draw_all(json)
    print(module.table(results))


def info(json: Path | None = None) -> None:
    """Versions, instruction set, threads and available backends.

    Args:
        json: Write the same here.
    """
    import importlib.util

    import torch

    from sortrl import ops
    from sortrl.core.files import write_json
    from sortrl.evaluate import provenance
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
