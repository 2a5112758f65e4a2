"""Commands that make something: a certified policy, a teacher, a table of the paper, an entry of the zoo."""

from __future__ import annotations

import shlex
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from sortrl.cli.common import engine_of, use_threads
from sortrl.core.errors import SortRLError, SortRLWarning

Track = Literal["csv", "wandb", "mlflow"] | None
LOST = 3  # exit code of a run whose student lost its teacher's skill


def robustify(
    env: Annotated[str, tyro.conf.Positional],
    teacher: Path | None = None,
    vecnormalize: Path | None = None,
    allow_pickle: bool = False,
    eps: float | None = None,
    units: Literal["std", "teacher", "raw"] | None = None,
    sensor_eps: tuple[float, ...] | None = None,
    preset: Literal["auto", "fast", "paper", "memory", "thresholds"] | None = None,
    keep: float | None = None,
    quick: bool = False,
    out: Path | None = None,
    seed: int = 0,
    steps: int | None = None,
    states: int | None = None,
    episodes: int | None = None,
    harden: float | None = None,
    candidates: int | None = None,
    threads: int | None = None,
    track: Track = None,
    json: Path | None = None,
) -> None:
    """Turn an agent into one whose every decision carries a certificate, and report the result.

    Trains a teacher (or loads yours), collects states, distils a Lipschitz student, certifies it, attacks both and
    writes report.html. Start it again with the same options to continue a run that was stopped. Exit code 3: it is done, but the
    student lost the teacher's skill.

    Args:
        env: Gymnasium environment, for example CartPole-v1; module:id imports a module first; frames-4/id stacks observations, as
            VecFrameStack does. Where actions are continuous, the certificate bounds how far they can be moved.
        teacher: Agent to start from: a Stable-Baselines3 zip (PPO, A2C, TRPO, DQN, QR-DQN, ARS; for continuous actions PPO, A2C, TRPO,
            SAC, TD3, DDPG) or a saved teacher. Without it, PPO is trained (for discrete actions).
        vecnormalize: Observation statistics of that agent: a file written by sortrl, or SB3's vecnormalize.pkl with --allow-pickle.
        allow_pickle: Accept a pickle for --vecnormalize. Only plain arrays are read from it.
        eps: Size of the perturbation to resist, in --units [auto: 0.1, other presets: the task's].
        units: What eps is stated in: std, standard deviations of each sensor (the default of auto); teacher, the teacher's own
            input units (that of other presets); raw, the environment's units.
        sensor_eps: With --units raw, a size for each sensor, in the order in which the report has them; --eps then counts in these
            [1].
        preset: auto (the default for vectors) distils a short ladder of students and keeps the most certified one that keeps the
            teacher's skill; fast (the default for images), one student with the task's own settings; paper for the published
            recipe; memory for a nearest-neighbour student of the teacher's best episodes, a baseline for tasks with few start
            states (ProcGen's training levels); thresholds for a threshold student, a baseline for images of few colours (Atari).
        keep: Of auto, the share of the teacher's skill to keep, from 0 (random play) to 1 (the teacher) [0.95].
        quick: Of auto, train one student instead of a ladder of them.
        out: Directory for the run [runs/<env>].
        seed: Fixes the run on one machine and thread count.
        steps: Optimiser steps of the distillation.
        states: States to collect.
        episodes: Test episodes per point.
        harden: Adversarial fine-tuning of the teacher (PPO and A2C on vectors; three million steps): train it on under attacks
            of up to this eps before it is distilled. For tasks in which the teacher fails under attack.
        candidates: Students to distil from the same data; the best on validation episodes is kept.
        threads: Threads to use [all cores].
        track: Also give the measurements of every stage to this tool; csv is progress.csv in the run's directory.
        json: Also write the results here.
    """
    from sortrl import report
    from sortrl.core.files import read_json, write_json
    from sortrl.runs import robustify as pipeline

    use_threads(threads)
    directory = out or Path("runs") / env.rpartition(":")[2].replace("/", "-")
    changes: dict[str, Any] = {
        "states": states,
        "steps": steps,
        "episodes": episodes,
        "candidates": candidates,
        "harden": harden,
        "units": units,
        "sensor_eps": sensor_eps,
        "keep": keep,
        "quick": quick or None,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SortRLWarning)  # the summary says it
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
            track=track,
            **changes,
        )
    results = read_json(directory / "results.json")
    if json is not None:
        write_json(json, results)
    lines = report.summary_lines(results)
    failed = not results.get("gate", {"passed": True})["passed"]
    if failed and sys.stdout.isatty():
        lines[0] = f"\033[1;31m{lines[0]}\033[0m"
    print("\n".join(lines))
    print(f"report: {directory / 'report.html'}")
    if failed:
        sys.exit(LOST)


def teach(
    env: Annotated[str, tyro.conf.Positional],
    out: Path | None = None,
    algorithm: Literal["ppo", "dqn", "pqn"] | None = None,
    processes: int = 1,
    imitate: Path | None = None,
    start: Path | None = None,
    half: bool = False,
    seed: int = 0,
    json: Path | None = None,
) -> None:
    """Train a teacher alone, with the settings known to solve the task; continues where it was stopped.

    Args:
        env: Gymnasium environment with discrete actions.
        out: Directory for the teacher [runs/teachers/<env>-<algorithm>].
        algorithm: ppo, dqn or (for images) pqn [the one the task has settings for, else ppo].
        processes: Processes that play the games of a PQN training while this one learns; the result does not depend on it.
        imitate: Continue from this trained actor-critic by imitating the best of its own sampled episodes; for tasks with few
            start states, such as the training levels of ProcGen.
        start: Go on from this PQN teacher (its folder, a run's, or zoo:NAME) with next to no random actions.
        half: Of a PQN training, compute all layers but the last in bfloat16: faster on CPUs that have it, slower on others.
        seed: Fixes the training.
        json: Write the result here.
    """
    from sortrl.core.files import locked, write_json
    from sortrl.core.progress import stage
    from sortrl.evaluate.returns import evaluate as play
    from sortrl.runs.tasks import continued, teacher_preset
    from sortrl.teachers import PQNConfig, train_teacher

    if start is not None and imitate is not None:
        raise SortRLError("teach: --start and --imitate are two ways to go on; choose one.")
    begun = None if start is None else _teacher_of(start)
    config = teacher_preset(env, algorithm) if begun is None else continued(env)
    if half:
        if not isinstance(config, PQNConfig):
            raise SortRLError(f"teach: --half is for pqn, and {env} is taught by {config.algorithm}.")
        config = replace(config, half=True)
    kind = config.algorithm if imitate is None else "imitation"
    directory = out or Path("runs") / "teachers" / f"{env.replace('/', '-')}-{kind}"
    with locked(directory):
        if imitate is not None:
            teacher = _imitated(imitate, env, directory, seed)
        else:
            with stage(f"Training {config.algorithm.upper()} on {env}") as progress:
                teacher = train_teacher(env, config, directory, seed, progress, processes, begun)
    result = play(teacher, env, episodes=config.confirm_episodes, seed=seed + 1)
    print(f"{result.mean:.1f} ± {result.sem:.1f} over {config.confirm_episodes} greedy episodes\nteacher: {directory}")
    if json is not None:
        write_json(json, result.to_json())


def _teacher_of(source: Path) -> Any:
    """The teacher in a folder, or of a run or an entry of the zoo."""
    from sortrl.nets import zoo
    from sortrl.teachers import Teacher

    folder = zoo.locate(source)
    return Teacher.load(zoo.teacher_folder(folder) or folder)


def _imitated(source: Path, env: str, directory: Path, seed: int) -> Any:
    from sortrl.core.files import read_object
    from sortrl.core.progress import stage
    from sortrl.runs.imitate import imitate
    from sortrl.teachers import Teacher
    from sortrl.teachers.grading import LOG_FILE

    log = source / LOG_FILE
    earlier = read_object(log) if log.is_file() else None
    with stage(f"Imitating the best tries on {env}") as progress:
        return imitate(Teacher.load(source), env, directory, None, seed, earlier, progress, quiet=False)


Baseline = Literal[
    "rs-dqn",
    "sa-dqn",
    "sa-dqn-pgd",
    "radial-dqn",
    "radial-ppo",
    "wocar-dqn",
    "car-dqn",
    "bcl-at",
    "bcl-mos-at",
    "bcl-radial",
    "bcl-radial-at",
]
Reproduced = Literal[
    "fig1",
    "fig2",
    "fig3",
    "table1",
    "table2",
    "table3",
    "table4",
    "compute",
    "teachers",
    "certificates",
    "reliability",
    "baselines",
    "agents",
    "continuous",
]
IN_PIECES = ("fig1", "table1", "table2", "table3", "table4", "compute", "baselines")
KEPT_IN = {
    "continuous": "continuous",
    "agents": "agents",
    "reliability": "reliability",
    "baselines": "baselines",
    "table1": "atari",
    "table2": "procgen",
    "table3": "atari",
    "table4": "procgen",
    "compute": "procgen",
}


def reproduce(
    what: Annotated[Reproduced, tyro.conf.Positional],
    task: str | None = None,
    agent: str | None = None,
    scale: Literal["smoke", "cpu", "paper"] = "cpu",
    out: Path = Path("results"),
    work: Path | None = None,
    teachers: Path | None = None,
    workers: int | None = None,
    ray: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="[ADDRESS]")] = None,
    seconds: float | None = None,
) -> None:
    """Reproduce the paper's figures and tables, and further experiments; continues where it was stopped.

    Args:
        what: fig1: return against eps on the four classic tasks, in two protocols, under PGD-10 and the worst of all attacks;
            table1, table3: four Atari games under PGD-10, and under the worst of four attacks at larger eps;
            table2, table4: ProcGen's Jumper and CoinRun under PGD-10 and PGD-30, beside published baselines;
            compute: return of the nearest-neighbour (memory) student on ProcGen against the number of states it was made of;
            teachers: returns of the Atari teachers with and without sticky actions, and their learning curves;
            fig2, fig3: pictures of tables 1 and 3, from what is computed of them (normalised scores; return against eps);
            baselines: SA-DQN, RADIAL, WocaR-DQN, CAR-DQN, RS-DQN and BCL on classic control, trained from one teacher;
            agents: robustify, with no option at all, on agents of many kinds that it has never seen;
            continuous: agents with continuous actions (Pendulum, LunarLander) and their students, and how far actions can be moved;
            certificates: how tight the certificates of its students are; reliability: damaged files, kills at random
            moments, attacks on certified decisions, many threads and processes.
        task: Only this task; of tables, and of figures 2 and 3, only this game (table1, table3: Freeway, RoadRunner, Pong, BankHeist;
            table2, table4, compute: Jumper, Coinrun; teachers: as table1); of reliability, only this part (fuzz, crashes, siege, soak).
        agent: Of tables, baselines, agents and continuous, only the rows of this agent, as the JSON calls it (for example "sortrl, memory"
            or radial-dqn).
        scale: smoke (minutes, to see that it works), cpu (hours on two cores), paper (the printed recipe at full length too).
        out: Where the JSON and the PNG go.
        work: Where finished parts are kept [runs/fig1, runs/atari, runs/procgen, runs/baselines, runs/agents, runs/continuous or
            runs/reliability].
        teachers: Folder of the published agents [$SORTRL_TEACHERS]; without it experts are trained. Of Atari: a folder with a
            teacher for each game (freeway, roadrunner, pong, bankheist), given here; without it those of the zoo, with their students.
        workers: Processes of one thread each that compute cells, or parts of figure 1, side by side [one per core].
        ray: In place of them, a Ray cluster: the one at this address; without an address, the one running here, or else a local
            one that is started for this command. Results do not depend on any of this.
        seconds: Duration of the soak test of reliability [set by the scale].
    """
    from sortrl import experiments as module
    from sortrl.core.workers import cores

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if agent is not None and not what.startswith("table") and what not in ("baselines", "agents", "continuous"):
        raise SortRLError(f"reproduce: --agent chooses rows of a table, and {what} has none.")
    folder = work or Path("runs") / KEPT_IN.get(what, "fig1")
    if (workers is not None or ray is not None) and what not in IN_PIECES:
        raise SortRLError(
            f"reproduce: --workers and --ray are for {', '.join(IN_PIECES)}; {what} is not made of pieces."
        )
    engine = engine_of(workers, ray, cores())
    if what == "reliability":
        from sortrl.cli import main  # the campaigns run commands of all kinds

        campaigns = module.reliability(main, scale, task, out, folder, seconds, progress)
        print("\n".join(module.reliability_summary(campaigns)))
    elif what in ("table1", "table3"):
        found = module.atari_table(what, scale, task, out, folder, teachers, progress, agent, engine)
        print("\n".join(module.atari_lines(found)))
    elif what in ("table2", "table4"):
        found = module.procgen_table(what, scale, task, out, folder, teachers, progress, agent, engine)
        print("\n".join(module.procgen_lines(found)))
    elif what == "baselines":
        found = module.baselines(scale, task, out, folder, teachers, progress, agent, engine)
        print("\n".join(module.baseline_lines(found)))
    elif what == "agents":
        print("\n".join(module.agents_lines(module.agents_table(scale, task, out, folder, teachers, progress, agent))))
    elif what == "continuous":
        table = module.continuous_table(scale, task, out, folder, teachers, progress, agent)
        print("\n".join(module.continuous_table_lines(table)))
    elif what == "compute":
        print("\n".join(module.compute_lines(module.compute(scale, task, out, folder, teachers, progress, engine))))
    elif what == "teachers":
        print("\n".join(module.teachers_lines(module.teachers_table(scale, task, out, teachers, progress))))
    elif what in ("fig2", "fig3"):
        (module.fig2 if what == "fig2" else module.fig3)(out, task)
    elif what == "certificates":
        module.certificates(scale, task, out, folder, progress)
    else:
        print("\n".join(module.figure1.summary(module.fig1(scale, task, out, folder, teachers, progress, engine))))
    pictured = what.startswith("fig") or what == "certificates"
    print(f"figure: {out / what}.png" if pictured else f"results: {out / what}.json")


def baseline(
    method: Annotated[Baseline, tyro.conf.Positional],
    env: Annotated[str, tyro.conf.Positional],
    teacher: Path,
    eps: float,
    vecnormalize: Path | None = None,
    allow_pickle: bool = False,
    out: Path | None = None,
    decisions: int | None = None,
    seed: int = 0,
    track: Track = None,
) -> None:
    """Train a robust agent by another method than SortRL's, from a teacher, to compare with. Its certificates are those of intervals.

    Start it again with the same options to continue a training that was stopped. The result works with evaluate, attack and certify.

    Args:
        method: Of which paper; docs/baselines.md says what each does.
        env: Gymnasium environment with discrete actions, for example CartPole-v1.
        teacher: Agent to start from, as robustify takes it, or zoo:NAME. One without action values (PPO) is first distilled into a Q-network.
        eps: Size of the perturbation to resist, in the teacher's input units.
        vecnormalize: Observation statistics of that agent: a file written by sortrl, or SB3's vecnormalize.pkl with --allow-pickle.
        allow_pickle: Accept a pickle for --vecnormalize. Only plain arrays are read from it.
        out: Directory for the agent [runs/baselines/<env>-<method>].
        decisions: Steps of the environment to train for [the method's own number].
        seed: Fixes the training.
        track: Also give the measurements to this tool; csv is progress.csv in the agent's directory.
    """
    from sortrl.baselines.interval_q.making import make_baseline
    from sortrl.core.files import locked
    from sortrl.core.progress import stage
    from sortrl.core.tracking import tracking
    from sortrl.nets import zoo as entries
    from sortrl.teachers import load_teacher

    source = _teacher_of(teacher) if entries.is_entry(teacher) else teacher
    start = load_teacher(source, env, vecnormalize=vecnormalize, allow_pickle=allow_pickle)
    directory = out or Path("runs") / "baselines" / f"{env.replace('/', '-')}-{method}"
    with (
        locked(directory),
        tracking(track, directory, directory.name),
        stage(f"Training {method} on {env}") as progress,
    ):
        made = make_baseline(method, env, start, eps, directory, decisions, seed, progress)
    print(f"{made.decisions} decisions in {made.minutes:.1f} minutes\nagent: {directory}")
    print(f"next: sortrl evaluate {directory} --eps {eps:g}")


def zoo(
    name: Annotated[str | None, tyro.conf.Positional] = None,
    add: Path | None = None,
    with_teacher: bool = False,
    folder: Path = Path("zoo"),
    export: Path | None = None,
    push: str | None = None,
    private: bool = False,
    fetch: bool = False,
) -> None:
    """List the trained policies that come with sortrl, show the card of one, add one from a run, or take some to the hub.

    Args:
        name: Show this entry's card; with --add, what to call the new one; with --export and --push, the entry meant.
        add: Directory of a finished run.
        with_teacher: Also publish a teacher that was given to the run (one that was trained in the run always is).
        folder: Where --add writes.
        export: Write the entry here as a repository of the Hugging Face Hub; without a name, every entry in a folder of its own.
        push: Upload the entry to this repository of the Hugging Face Hub, USER/NAME.
        private: Make the repository of --push a private one, if it is new.
        fetch: Fetch the entry's weights from the hub, if the installed package leaves them out; without a name, those of every entry.
    """
    from sortrl.nets import hub
    from sortrl.nets import zoo as entries
    from sortrl.runs.zoo import described, publish, summed_up

    named = None if name is None else name.removeprefix(entries.PREFIX)
    if (add is not None or push is not None) and named is None:
        raise SortRLError("zoo: --add and --push need a name, for example: sortrl zoo NAME --add RUN.")
    made = None
    if add is not None and named is not None:
        made = publish(add, named, folder, with_teacher)
        print(f"entry: {made}")
    if export is not None:
        for one in entries.names() if named is None else [named]:
            where = export if named is not None else export / one
            print(f"repository: {hub.export(made or entries.whole(one), where, f'{hub.PREFIX}sortrl/{one}')}")
    if push is not None and named is not None:
        print(f"uploaded: {hub.push_entry(made or entries.whole(named), push, private)}")
    for one in (entries.names() if named is None else [named]) if fetch else ():
        here = entries.entry(one)
        print(f"here: {here if (here / entries.POLICY).exists() else hub.fetch_entry(one)}")
    if add is not None or export is not None or push is not None or fetch:
        return
    if name is not None:
        print(described(entries.entry(name.removeprefix(entries.PREFIX))), end="")
        return
    known = entries.names()
    widest = max(map(len, known), default=0)
    for one in known:
        print(f"{entries.PREFIX}{one:<{widest}} {summed_up(entries.entry(one))}")
