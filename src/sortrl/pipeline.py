"""The main job: teacher -> data -> student -> certificates and attacks -> report, each stage kept in a file.

A killed run continues when it is started again with the same settings: a finished stage is read from its file, an
unfinished training from its checkpoint.
"""

from __future__ import annotations

import datetime
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from sortrl import attacks, nets, provenance, report, zoo
from sortrl.attacked import UnderAttack
from sortrl.attacks.valid import check_eps
from sortrl.certify import certificate_summary
from sortrl.choosing import choose
from sortrl.collect import CollectConfig, collect, load_demonstrations, merge, save_demonstrations, split
from sortrl.compact import compact
from sortrl.config import Preset, RobustifyConfig, robustify_config
from sortrl.distill import DistillConfig, Distilled, distill, held_out_metrics
from sortrl.envs import describe
from sortrl.errors import SortRLError
from sortrl.evaluate import evaluate_curve
from sortrl.files import locked, read_json, read_object, write_json
from sortrl.nets import CertifiedPolicy
from sortrl.progress import Report, stage
from sortrl.records import Demonstrations, Policy, stored_rows
from sortrl.remember import best_episodes
from sortrl.rounding import RoundingConfig, distill_rounded
from sortrl.search import SearchConfig, search
from sortrl.straighten import straightened
from sortrl.suite import LEARNED, evaluate_suite
from sortrl.teachers import Teacher, decided_at_start, load_teacher, smoothed, steadied, train_teacher
from sortrl.teachers.grading import LOG_FILE
from sortrl.teachers.load import check_fit

VALIDATION_SHARE = 0.1
SLOTS, IMAGE_SLOTS = 128, 64  # environments side by side
CHOICE = ("candidates", "choose_eps", "choose_episodes")
TRAINED_HERE = "trained here"  # in the place of a given teacher's name
VALIDATION_SEED_OFFSET = 0  # a run's seed lies below 1000
TEST_SEED_OFFSET = 1000  # test episodes never coincide with those that data or choices were made from


def robustify(
    teacher: Any = None,
    env: str = "CartPole-v1",
    eps: float | None = None,
    *,
    preset: Preset = "fast",
    out: str | Path | None = None,
    seed: int = 0,
    vecnormalize: Any = None,
    allow_pickle: bool = False,
    command: str | None = None,
    quiet: bool = True,
    **changes: Any,
) -> CertifiedPolicy:
    """Turn an agent into a certified policy.

    Args:
        teacher: path of a Stable-Baselines3 zip or of a saved teacher, an SB3 model, a torch module, a callable on
            batches of observations, or None to train one.
        env: id of a Gymnasium environment with discrete actions.
        eps: l_inf size of the perturbations to resist, in the teacher's input units (default: the task's).
        preset: ``fast``, ``paper`` for the recipe as published, ``memory`` for a student that is not trained but
            remembers the teacher's best episodes (:mod:`sortrl.remember`; for tasks with few starts), or ``rounded`` for
            one that sees rounded pixels (:mod:`sortrl.rounding`; for images of few colours).
        out: directory for everything (teacher, data, policy, results.json, report.html). Without it nothing is kept,
            and the evaluation is left to you.
        seed: fixes the run on one machine and thread count.
        vecnormalize: observation statistics that belong to the teacher (a file or a VecNormalize).
        allow_pickle: accept a pickle there.
        command: what to print in the report as the command that made it.
        quiet: no progress on the terminal.
        changes: replace any field of ``RobustifyConfig`` or ``DistillConfig`` (of the preset ``rounded``: ``RoundingConfig``),
            for example ``steps=500``.
    """
    info = describe(env)
    config = robustify_config(info.env_id, eps, preset, train_teacher=teacher is None, **changes)
    _check_early(config, seed)
    if out is None:
        with tempfile.TemporaryDirectory(prefix="sortrl-") as scratch:
            run = Run(Path(scratch), info.env_id, config, seed, quiet)
            return run.student(run.teacher(teacher, vecnormalize, allow_pickle))
    with locked(Path(out)):
        run = Run(Path(out), info.env_id, config, seed, quiet)
        run.claim(_source_name(teacher))
        agent = run.teacher(teacher, vecnormalize, allow_pickle)
        policy = run.student(agent)
        results = run.results(
            policy, agent, _source_name(teacher), command or f"sortrl.robustify(env={env!r}, eps={config.eps})"
        )
        report.render(results, Path(out))
    return policy


class Run:
    """The stages of one run in its directory. Each stage returns what the next one needs, made now or read back."""

    def __init__(self, directory: Path, env_id: str, config: RobustifyConfig, seed: int, quiet: bool = True) -> None:
        self.directory, self.env_id, self.config, self.seed, self.quiet = directory, env_id, config, seed, quiet
        self.seconds: dict[str, float] = {}

    def claim(self, source: str) -> None:
        """Make sure that what lies in the directory belongs to this run."""
        config = _plain(asdict(self.config))
        if not self.config.remember:  # what a memory alone needs: older runs do not mention it
            config = {name: value for name, value in config.items() if name not in ("eps_keep", "memory_bytes")}
        if config["rounding"] is None:  # likewise, of students that see rounded pixels
            del config["rounding"]
        if self.config.steady is None:  # likewise, of a search
            del config["steady"]
        if self.config.candidates == 1:
            config = {name: value for name, value in config.items() if name not in CHOICE}
        for name in ("focus", "spread", "sticky"):  # likewise
            if not config["collect"][name]:
                del config["collect"][name]
        if self.config.search == SearchConfig():
            del config["search"]
        identity = {"env": self.env_id, "seed": self.seed, "teacher": source, "config": config}
        path = self.directory / "run.json"
        if path.exists():
            document = read_object(path)
            if document.get("identity") != identity:
                raise SortRLError(
                    f"{self.directory} holds a run with other settings. Choose another --out, or delete it to start over."
                )
            taken = document.get("stage_seconds")
            if not isinstance(taken, dict) or not all(isinstance(value, float) for value in taken.values()):
                raise SortRLError(f"{path}: stage_seconds is {str(taken)[:60]}, expected numbers. Delete {path}.")
            self.seconds = taken
            return
        write_json(path, {"identity": identity, "started": _now(), "stage_seconds": {}})

    @contextmanager
    def _stage(self, name: str, title: str) -> Iterator[Report]:
        """Show progress, and add the time to the record."""
        with self._timed(name), stage(title, self.quiet) as progress:
            yield progress

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the time to the record, also of a stage that is finished in a later attempt."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - started, 2)
            path = self.directory / "run.json"
            if path.exists():
                write_json(path, {**read_object(path), "stage_seconds": self.seconds})

    def student(self, teacher: Teacher) -> CertifiedPolicy:
        """Data and distillation: everything up to the policy."""
        if (self.directory / "policy.safetensors").exists():
            return nets.load(self.directory)
        if self.config.steady is not None:
            with self._stage("teacher", "Steadying the teacher") as progress:
                teacher = steadied(teacher, self.env_id, self.config.steady, self.directory, progress)
        if self.config.smoothing > 0:
            teacher = smoothed(teacher, self.config.smoothing)
        if self.config.start_radius > 0:
            teacher = decided_at_start(teacher, self.env_id, self.config.start_radius)
        data = self.demonstrations(teacher)
        if len(np.unique(data.actions)) == 1 and not self.config.remember:  # a memory keeps what was played, not labels
            raise SortRLError(
                f"{teacher.name} plays action {data.actions[0]} in all of {len(data)} states, so there is nothing to learn "
                "from it. Train it longer, or give the normalisation that belongs to it (vecnormalize)."
            )
        training, held_out = split(data, VALIDATION_SHARE, self.seed)
        if self.config.remember:
            training = self.searched(training, teacher)
            return self._finish(self.remembered(training, teacher), [], training, held_out)
        for index in range(1, self.config.dagger_rounds + 1):
            training = merge(training, self.dagger(index, training, held_out, teacher))
        final = self.chosen(training, held_out, teacher)
        return self._finish(final.policy, final.history, training, held_out, final.held_out)

    def _finish(
        self,
        policy: CertifiedPolicy,
        history: list[dict[str, Any]],
        training: Demonstrations,
        held_out: Demonstrations,
        metrics: dict[str, float] | None = None,
    ) -> CertifiedPolicy:
        """Keep the policy, and what its data and training were."""
        metrics = metrics or held_out_metrics(policy, held_out, self.config.eps)
        data = merge(training, held_out)
        facts = {
            "states": len(data),
            "distinct": data.n_distinct,
            "dagger_states": self.config.dagger_rounds * self.config.dagger_states,
            "held_out_states": len(held_out),
            "agreement": metrics["agreement"],
            "certified": metrics["certified"],
        }
        write_json(self.directory / "training.json", {"history": history, "data": facts})
        policy.save(self.directory)
        return policy

    def searched(self, data: Demonstrations, teacher: Teacher) -> Demonstrations:
        """With episodes that win where none in the data does, and plainer ones, as far as they can be found."""
        config = self.config.search
        if config.steps > 0:
            data = self._with_found(
                "search",
                "Searching where the teacher never won",
                data,
                lambda p: search(teacher, data, config, self.seed, p),
            )
        whole = data
        if config.straighten:
            data = self._with_found(
                "straighten",
                "Putting back the teacher's own answers",
                whole,
                lambda p: straightened(teacher, whole, config.goal, self.seed, p),
            )
        return data

    def _with_found(
        self, name: str, title: str, data: Demonstrations, find: Callable[[Report], Demonstrations | None]
    ) -> Demonstrations:
        """The data and further episodes, which are found now or were before."""
        path, done = self.directory / f"{name}.safetensors", self.directory / f"{name}.json"
        if not done.exists():
            with self._stage(name, title) as progress:
                found = find(progress)
            if found is not None:
                save_demonstrations(path, found)
            write_json(done, {"episodes": 0 if found is None else len(np.unique(found.episodes))})
        return merge(data, load_demonstrations(path)) if path.exists() else data

    def chosen(self, training: Demonstrations, held_out: Demonstrations, teacher: Teacher) -> Distilled:
        """The student; of several candidates the best on validation episodes, which are those of no data and of no test."""
        config = self.config
        names = ["student", *(f"candidate {number}" for number in range(1, config.candidates))]
        found = [
            self.distilled(name, training, held_out, teacher, config.training, number)
            for number, name in enumerate(names)
        ]
        if len(found) == 1:
            return found[0]
        with self._stage("choose", f"Choosing among {len(found)} candidates") as progress:
            choice = choose(
                [candidate.policy for candidate in found],
                self.env_id,
                attacks.by_name(config.attack),
                config.choose_eps,
                config.eps,
                config.choose_episodes,
                self.seed + VALIDATION_SEED_OFFSET,
                progress,
            )
        write_json(self.directory / "choice.json", choice.to_json())
        return found[choice.best]

    def remembered(self, data: Demonstrations, teacher: Teacher) -> CertifiedPolicy:
        """A student that is not trained: the best episodes in the data, and the nearest neighbour among their states."""
        with self._stage("remember", "Remembering the best episodes"):
            config = self.config.distill
            small = compact(
                best_episodes(data, plain=self.config.search.straighten),
                teacher.normalizer,
                config.pool,
                config.crop,
                self.config.eps_keep,
                self.config.memory_bytes,
            )
            write_json(self.directory / "memory.json", small.to_json())
            return small.policy

    def teacher(self, source: Any = None, vecnormalize: Any = None, allow_pickle: bool = False) -> Teacher:
        folder = self.directory / "teacher"
        if source is None:
            with self._stage("teacher", "Training the teacher") as progress:
                trained = train_teacher(self.env_id, self.config.teacher_config, folder, self.seed, progress)
            check_eps(trained, describe(self.env_id), self.config.eps)  # its units are known only now
            return trained
        # Where actions are merged, the student learns the agent's own greedy play.
        teacher = load_teacher(source, self.env_id, vecnormalize=vecnormalize, allow_pickle=allow_pickle, merge="max")
        check_eps(teacher, describe(self.env_id), self.config.eps)
        if teacher.architecture is not None:
            teacher.save(folder)
            log = Path(source) / LOG_FILE if isinstance(source, (str, Path)) else None
            if log is not None and log.is_file():  # how it was trained, for whoever gets the student
                write_json(folder / LOG_FILE, read_object(log))
        return teacher

    def demonstrations(self, teacher: Teacher) -> Demonstrations:
        config = replace(self.config.collect, eps_unit=self.config.noise)
        return self._data(
            "data",
            "Collecting states",
            lambda p: collect(teacher, self.env_id, config, self.seed, progress=p),
        )

    def dagger(
        self, index: int, training: Demonstrations, held_out: Demonstrations, teacher: Teacher
    ) -> Demonstrations:
        """States that a provisional student reaches, labelled by the teacher."""
        path = self.directory / f"dagger-{index}.safetensors"
        if path.exists():  # and the provisional student is needed no more
            return load_demonstrations(path)
        short = replace(self.config.training, steps=max(1, self.config.training.steps // 3))
        student = self.distilled(f"provisional student {index}", training, held_out, teacher, short).policy
        seed, eps = self.seed + 10_000 * index, self.config.dagger_eps
        config = CollectConfig(states=self.config.dagger_states, eps_unit=0.0 if eps > 0 else self.config.noise)
        actor = UnderAttack(student, describe(self.env_id), eps, seed) if eps > 0 else student
        return self._data(
            path.stem,
            "Collecting the student's states",
            lambda p: collect(teacher, self.env_id, config, seed, actor=actor, progress=p),
        )

    def _data(self, name: str, title: str, make: Callable[[Report], Demonstrations]) -> Demonstrations:
        path = self.directory / f"{name}.safetensors"
        if not path.exists():
            with self._stage("collect", title) as progress:
                save_demonstrations(path, make(progress))
        return load_demonstrations(path)

    def distilled(
        self,
        name: str,
        training: Demonstrations,
        held_out: Demonstrations,
        teacher: Teacher,
        config: DistillConfig | RoundingConfig,
        number: int = 0,
    ) -> Distilled:
        folder = self.directory / name.replace(" ", "-")
        with self._stage("distill", f"Distilling the {name}") as progress, _tensorboard(folder) as log:

            def both(row: dict[str, Any]) -> None:
                progress(row)
                log(row)

            seed = self.seed + TEST_SEED_OFFSET * number
            how: dict[str, Any] = {"held_out": held_out, "out_dir": folder, "seed": seed, "progress": both}
            if isinstance(config, RoundingConfig):
                return distill_rounded(training, teacher.normalizer, config, self.config.eps, **how)
            return distill(training, teacher.normalizer, config, **how)

    def evaluation(self, policies: dict[str, Policy]) -> list[dict[str, Any]]:
        """Returns of each policy along ``eps_grid``, kept curve by curve; the clean student also gives the certificate."""
        path = self.directory / "evaluation.json"
        rows = stored_rows(read_json(path), path) if path.exists() else []
        done = {(row["policy"], row["eps"]) for row in rows}
        attack = attacks.by_name(self.config.attack)
        slots = SLOTS if len(describe(self.env_id).obs_shape) == 1 else IMAGE_SLOTS
        for name, policy in policies.items():
            # A black box has no gradient to follow.
            grid = (0.0,) if getattr(policy, "algorithm", None) == "callable" else self.config.eps_grid
            grid = tuple(eps for eps in grid if (name, eps) not in done)
            if not grid:
                continue
            with self._stage("evaluate", f"Evaluating the {name} at eps {', '.join(f'{eps:g}' for eps in grid)}") as p:
                curve = evaluate_curve(
                    policy,
                    self.env_id,
                    attack,
                    grid,
                    self.config.episodes,
                    self.seed + TEST_SEED_OFFSET,
                    slots=slots,
                    name=name,
                    progress=p,
                )
            clean = next((result for result in curve if result.eps_unit == 0), None)
            if clean is not None and clean.radii is not None:
                write_json(self.directory / "certificate.json", certificate_summary(clean, self.config.eps))
            rows += [result.to_json() for result in curve]
            write_json(path, rows)
        return rows

    def strongest(self, policy: CertifiedPolicy, teacher: Teacher) -> list[dict[str, Any]]:
        """Returns of both at the eps that was trained for, under attacks of other kinds: one that fails proves nothing."""
        if not self.config.suite or self.config.eps == 0:
            return []
        with self._timed("attack"):
            result = evaluate_suite(
                policy,
                teacher,
                self.env_id,
                self.config.suite,
                (self.config.eps,),
                self.config.suite_episodes,
                self.seed + TEST_SEED_OFFSET,
                path=self.directory / "suite.json",
                adversary_steps=self.config.adversary_steps,
                quiet=self.quiet,
            )
        return [row for row in result.rows if row["eps"] > 0]

    def results(self, policy: CertifiedPolicy, teacher: Teacher, source: str, command: str) -> dict[str, Any]:
        """Evaluate what is not evaluated yet and write results.json, from which alone the report is made."""
        evaluation = self.evaluation({"teacher": teacher, "student": policy}) + self.strongest(policy, teacher)
        info, training = describe(self.env_id), read_object(self.directory / "training.json")
        units = info.raw_units(policy.normalizer.scale.numpy())
        results = {
            "schema": 1,
            "kind": "robustify",
            "sortrl": provenance.sortrl_version(),
            "command": command,
            "seed": self.seed,
            "started": read_object(self.directory / "run.json").get("started"),
            "stage_seconds": self.seconds,
            "versions": provenance.versions(),
            "machine": provenance.machine(),
            "env": {
                "id": self.env_id,
                "obs_shape": list(info.obs_shape),
                "obs_names": [name for name, _ in units],
                "unit_to_raw": [scale for _, scale in units],
                "n_actions": info.n_actions,
                "max_steps": info.max_steps,
            },
            "teacher": {"name": teacher.name, "algorithm": teacher.algorithm, "source": source},
            "config": _plain(asdict(self.config)),
            "data": training.get("data"),
            "memory": read_json(memory) if (memory := self.directory / "memory.json").exists() else None,
            "policy": {
                "kind": policy.kind,
                "parameters": policy.parameter_count,
                "lipschitz": policy.lipschitz if math.isfinite(policy.lipschitz) else None,
                **_plain(policy.describe()),
                # How many: which ones is in the policy's file.
                **({"pixels": len(policy.config.pixels)} if hasattr(policy.config, "pixels") else {}),
            },
            "training": training.get("history"),
            "evaluation": evaluation,
            "certificate": read_json(self.directory / "certificate.json"),
        }
        write_json(self.directory / "results.json", results)
        return results


def identity_of(directory: Path) -> dict[str, Any]:
    """What a run, or an entry of the zoo, was started with: env, seed, teacher, config."""
    directory = zoo.locate(directory)
    if not (directory / "run.json").exists():
        raise SortRLError(
            f"{directory} is not the directory of a run (no run.json). Make one with: sortrl robustify ENV --out {directory}"
        )
    identity = read_object(directory / "run.json").get("identity")
    if not isinstance(identity, dict):
        raise SortRLError(
            f"{directory / 'run.json'}: identity is {str(identity)[:60]}, expected an object. It is damaged."
        )
    return identity


def trained_eps(directory: Path) -> float:
    """The eps that the policy of a run was trained for."""
    config = identity_of(directory).get("config")
    eps = config.get("eps") if isinstance(config, dict) else None
    if not isinstance(eps, (int, float)) or not 0 <= eps < float("inf"):
        raise SortRLError(f"{directory / 'run.json'}: config.eps is {str(eps)[:60]}, expected a number. It is damaged.")
    return float(eps)


def open_run(directory: Path) -> tuple[str, CertifiedPolicy, Teacher | None]:
    """The environment, the policy and (if it was kept) the teacher of a run, or of an entry of the zoo."""
    directory = zoo.locate(directory)
    env_id = identity_of(directory).get("env")
    # A name with a module in front would have Gymnasium import that module: a file must not choose what is run.
    if not isinstance(env_id, str) or ":" in env_id:
        raise SortRLError(
            f"{directory / 'run.json'}: identity.env is {str(env_id)[:60]!r}, expected an environment's id."
        )
    folder = directory / "teacher"
    teacher = Teacher.load(folder) if (folder / "teacher.safetensors").exists() else None
    policy, info = nets.load(directory), describe(env_id)
    if policy.obs_shape != info.obs_shape or policy.n_actions != info.n_actions:
        raise SortRLError(
            f"{directory}: the policy sees {policy.obs_shape} and has {policy.n_actions} actions, but {env_id} has "
            f"{info.obs_shape} and {info.n_actions}. The files are not of one run."
        )
    if teacher is not None:
        check_fit(teacher, info)
    return env_id, policy, teacher


@contextmanager
def _tensorboard(folder: Path) -> Iterator[Report]:
    """A TensorBoard log of the training measurements."""
    from torch.utils.tensorboard import SummaryWriter  # slow to import, and only needed while training

    writer = SummaryWriter(str(folder / "tensorboard"))

    def log(row: dict[str, Any]) -> None:
        for name in ("loss", "cross_entropy", "agreement", "certified", "p", "lambda"):
            if name in row:
                writer.add_scalar(f"distill/{name}", row[name], row["step"])

    try:
        yield log
    finally:
        writer.close()


def _check_early(config: RobustifyConfig, seed: int) -> None:
    """What would otherwise fail after hours of training."""
    if not isinstance(seed, int) or not 0 <= seed < TEST_SEED_OFFSET:
        raise SortRLError(f"robustify: seed is {seed!r}, expected a whole number in 0..{TEST_SEED_OFFSET - 1}.")
    for name in (config.attack, *config.suite):
        if name != LEARNED:
            attacks.by_name(name)


def _source_name(teacher: Any) -> str:
    if teacher is None:
        return TRAINED_HERE
    return str(teacher) if isinstance(teacher, (str, Path)) else type(teacher).__name__


def _plain(value: Any) -> Any:
    """Tuples as lists, so that a record equals itself after a round trip through JSON."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
