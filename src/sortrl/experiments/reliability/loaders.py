"""Every reader of files in the package, each with an intact file to damage and a way to read and use it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from sortrl import report
from sortrl.attacks.learned import LearnedAdversary
from sortrl.attacks.values import Aimed
from sortrl.baselines.memory.remember import remember
from sortrl.certify import load_certificates, save_certificates
from sortrl.core.checkpoint import Checkpoint, damage_named
from sortrl.core.files import read_json, read_object
from sortrl.core.normalizer import Normalizer
from sortrl.core.records import stored_rows
from sortrl.data.continuous import Answers
from sortrl.data.dataset import load_demonstrations
from sortrl.distill import DistillConfig
from sortrl.distill.loop import _initial_policy, _optimizer
from sortrl.evaluate.suite import _File
from sortrl.experiments.reliability import mutations
from sortrl.experiments.reliability.tiny import ENV, TEACHER, tiny_run
from sortrl.nets import CertifiedPolicy, ContinuousPolicy, HybridPolicy, SortPolicy, ThresholdPolicy, load, zoo
from sortrl.nets.architecture import Architecture
from sortrl.report.page import FILM, _film_in
from sortrl.runs.run import read_run, trained_eps
from sortrl.runs.zoo import _training, described, publish, summed_up
from sortrl.teachers import Teacher, load_normalizer, load_teacher
from sortrl.teachers.load.vecnormalize import save_normalizer
from sortrl.teachers.steadying import FILE_NAME, Evolution, _keep, _restored
from sortrl.teachers.train_sb3 import _is_finished, _read_state, make_model, restore
from sortrl.verify import verify

ROUNDED = ("rounded", "normed")  # policies that see rounded pixels, without and with layer norm


@dataclass(frozen=True)
class Loader:
    """``read`` gets the damaged file; ``command`` is what a person would type to read it, if there is such a command."""

    name: str
    file: Path
    mutations: Mapping[str, mutations.Mutation]
    read: Callable[[Path], object]
    command: tuple[str, ...] = ()

    @cached_property
    def intact(self) -> bytes:
        """The file before any damage: ask for it first."""
        return self.file.read_bytes()


def loaders(work: Path) -> list[Loader]:
    """Make one intact file of every kind below ``work``, by a real run, and say how each is read."""
    run = work / "run"
    tiny_run(run)
    _other_files(work, run)
    tensors, text = mutations.TENSORS, mutations.JSON
    return [
        Loader("policy", _copy(run / "policy.safetensors", work), tensors, _read_policy),
        Loader("image policy", work / "image" / "policy.safetensors", tensors, _read_policy),
        Loader("policy of pixels", work / "pixels" / "policy.safetensors", tensors, _read_policy),
        Loader("hybrid policy", work / "hybrid" / "policy.safetensors", tensors, _read_policy),
        Loader("memory policy", work / "memory" / "policy.safetensors", tensors, _read_policy),
        *(Loader(f"{name} policy", work / name / "policy.safetensors", tensors, _read_policy) for name in ROUNDED),
        Loader("continuous policy", work / "continuous" / "policy.safetensors", tensors, _read_policy),
        Loader("states with continuous actions", work / "answers.safetensors", tensors, Answers.load),
        Loader("demonstrations", _copy(run / "data.safetensors", work), tensors, load_demonstrations),
        Loader("teacher", _copy(run / "teacher" / "teacher.safetensors", work), tensors, _read_teacher),
        Loader("adversary", work / "adversary.safetensors", tensors, lambda f: LearnedAdversary.load(f.parent)),
        Loader("certificates", work / "certificates.safetensors", tensors, load_certificates),
        Loader("verified certificates", work / "verify" / "c.safetensors", tensors, verify, ("verify", "{file}")),
        Loader(
            "verified policy",
            work / "verify" / "policy.safetensors",
            tensors,
            lambda f: verify(f.parent / "intact", f),
            ("verify", "{folder}/intact", "--policy", "{file}"),
        ),
        *(
            Loader(
                f"verified {name} policy",
                work / f"verify-{name}" / "policy.safetensors",
                tensors,
                lambda f: verify(f.parent / "intact", f),
            )
            for name in (*ROUNDED, "hybrid")
        ),
        Loader("distillation checkpoint", *_checkpoint(run, work)),
        Loader("teacher's training state", *_training_state(work)),
        Loader("teacher's training log", *_training_log(run, work)),
        Loader("published training log", _copy(run / "teacher" / "training.json", work / "published"), text, _read_log),
        Loader("search for a steadier teacher", *_steadying(work)),
        Loader("normaliser (JSON)", work / "n.json", text, load_normalizer),
        Loader("normaliser (safetensors)", work / "n.safetensors", tensors, load_normalizer),
        Loader("VecNormalize pickle", work / "stats.pkl", mutations.PICKLE, lambda f: load_normalizer(f, True)),
        Loader(
            "Stable-Baselines3 agent",
            work / "agent.zip",
            mutations.ZIP,
            lambda f: load_teacher(f, ENV),
            ("robustify", ENV, "--teacher", "{file}", "--out", "{folder}/new"),
        ),
        Loader("IMPALA agent", work / "impala.pt", mutations.TORCH, load_teacher),
        Loader(
            "results.json", _copy(run / "results.json", work / "report"), text, _read_results, ("report", "{folder}")
        ),
        Loader("run.json", _copy(run, work / "opened") / "run.json", text, _read_run, ("evaluate", "{folder}")),
        Loader("zoo card", _entry(run, work), text, _read_card),
        Loader("evaluation.json", _copy(run / "evaluation.json", work), text, lambda f: stored_rows(read_json(f), f)),
        Loader("suite.json", *_suite(run, work)),
        Loader("film", work / "film" / FILM, mutations.BLIND, lambda f: _film_in(f.parent)),
    ]


def _copy(source: Path, folder: Path) -> Path:
    if source.is_dir():
        return Path(shutil.copytree(source, folder))
    target = folder / source.stem / source.name if source.suffix == ".safetensors" else folder / source.name
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(source, target))


def _policy_files(work: Path, policy: CertifiedPolicy, name: str) -> None:
    """Its file to load, and another with certificates to verify."""
    policy.requires_grad_(False)
    if isinstance(policy, ThresholdPolicy):
        policy.rounding.thresholds.fill_(0.5)
    for folder in (name, f"verify-{name}", f"verify-{name}/unchanged"):
        policy.save(work / folder)
    images = policy.normalize(np.random.default_rng(0).integers(256, size=(5, *policy.obs_shape)))
    intact = work / f"verify-{name}" / "unchanged"
    save_certificates(work / f"verify-{name}" / "intact", policy, images, policy.certify_unit(images), intact)


def _other_files(work: Path, run: Path) -> None:
    """What a run does not write by itself."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    from sortrl.envs.info import make_env

    shape = (2, 9, 8)
    pixels = Normalizer.from_pixels(shape)
    SortPolicy(shape, 3, 6, 2, crop=(1, 0, 2, 0), pool=2, scale=0.5, normalizer=pixels).save(work / "image")
    SortPolicy(shape, 3, 6, 2, pool=2, pixels=(17, 3, 8), normalizer=pixels).save(work / "pixels")
    layers = {"bounded_conv": ((4, 2, 1),), "conv": ((4, 3, 2),), "depth": 2, "hidden": (5,)}
    hybrid = HybridPolicy(shape, 3, width=6, **layers, scale=0.5, normalizer=pixels)
    _policy_files(work, hybrid, "hybrid")
    _policy_files(work, ThresholdPolicy(shape, 3, 1, ((4, 3, 2),), (5,), pixels), "rounded")
    _policy_files(work, ThresholdPolicy(shape, 3, 1, ((4, 3, 2),), (5,), pixels, norm=True), "normed")
    ContinuousPolicy((4,), (-2.0,), (2.0,), (4.0,), width=6, depth=2).save(work / "continuous")
    Answers("Pendulum-v1", np.zeros((6, 3), np.float32), np.ones((6, 1), np.float32), np.arange(6)).save(
        work / "answers.safetensors"
    )
    remember(load_demonstrations(run / "data.safetensors"), Normalizer.identity((4,))).save(work / "memory")
    policy = SortPolicy.load(run)
    states = policy.normalize(np.random.default_rng(0).normal(size=(5, 4)))
    certificate = policy.certify_unit(states)
    policy.save(work / "verify")
    policy.save(work / "verify" / "unchanged")
    for path in (work / "certificates.safetensors", work / "verify" / "c.safetensors", work / "verify" / "intact"):
        save_certificates(path, policy, states, certificate, work / "verify" / "unchanged")
    save_normalizer(work / "n.json", policy.normalizer)
    save_normalizer(work / "n.safetensors", policy.normalizer)
    architecture = Architecture(obs_shape=(6,), n_actions=2, hidden=(4,), activation="Tanh")
    scale = Normalizer(np.zeros(6), np.ones(6), 10.0)
    LearnedAdversary(architecture.build(), scale, architecture, ENV, 0.1, True, Aimed()).save(work)
    env = VecNormalize(DummyVecEnv([lambda: make_env(ENV)]))
    env.save(str(work / "stats.pkl"))
    small = {"net_arch": [4]}
    PPO("MlpPolicy", env, n_steps=8, batch_size=8, device="cpu", policy_kwargs=small).save(work / "agent.zip")
    env.close()
    network = Architecture((3, 16, 16), 16, (), "ReLU", "impala", cnn_features=4, channels=(2, 2, 2))
    torch.save({f"model.{name}": tensor for name, tensor in network.build().state_dict().items()}, work / "impala.pt")
    (work / "film").mkdir()
    (work / "film" / FILM).write_bytes(b"GIF89a" + bytes(100))


def _read_policy(file: Path) -> object:
    policy, eps = load(file), 0.1
    states = np.zeros((2, *policy.obs_shape))
    return policy.certify(states, eps) if isinstance(policy, ContinuousPolicy) else policy.certify(states)


def _read_teacher(file: Path) -> object:
    teacher = Teacher.load(file)
    return teacher.predict(np.zeros((2, *teacher.obs_shape)))


def _read_results(file: Path) -> object:
    results = read_json(file)
    return report.markdown(results), report.summary_lines(results)


def _read_run(file: Path) -> object:
    return read_run(file.parent), trained_eps(file.parent)


def _entry(run: Path, work: Path) -> Path:
    return publish(run, "tiny", work / "zoo") / zoo.CARD


def _read_card(file: Path) -> object:
    return zoo.checked(file.parent), described(file.parent), summed_up(file.parent)


def _read_log(file: Path) -> object:
    return _training(read_object(file))


def _steadying(work: Path) -> tuple[Path, Mapping[str, mutations.Mutation], Callable[[Path], object]]:
    file, identity = work / "steadying" / FILE_NAME, {"env": ENV}
    search = Evolution(7, 4, 0)
    search.tell(search.ask().sum(1))
    _keep(search, [search.mean], file, identity)
    return file, mutations.TENSORS, lambda damaged: (_restored(search, damaged, identity), search.ask())


def _checkpoint(run: Path, work: Path) -> tuple[Path, Mapping[str, mutations.Mutation], Callable[[Path], object]]:
    file = _copy(run / "student" / "checkpoint.safetensors", work)
    identity = mutations.parse(file.read_bytes())[0]["identity"]
    data, teacher = load_demonstrations(run / "data.safetensors"), Teacher.load(run / "teacher")
    config = DistillConfig(**identity["config"])
    policy = _initial_policy(data, teacher.normalizer, config, torch.Generator())

    def read(damaged: Path) -> object:
        checkpoint = Checkpoint(damaged.parent, identity)
        return checkpoint.restore(policy, _optimizer(policy, config), torch.Generator())

    return file, mutations.TENSORS, read


def _training_state(work: Path) -> tuple[Path, Mapping[str, mutations.Mutation], Callable[[Path], object]]:
    from sortrl.teachers import train_sb3 as train

    model = make_model(ENV, TEACHER)
    identity = {"env_id": ENV, "seed": 0, "config": {}}
    record = {"identity": identity, "segment": 1, "history": [], "best": 1.0, "done": False}
    train._write_state(work / "state", record, model)

    def read(damaged: Path) -> object:
        tensors, found = _read_state(damaged, identity)
        with damage_named(damaged):
            restore(model, tensors, found["counts"])
        return found

    return work / "state" / train.STATE_FILE, mutations.TENSORS, read


def _training_log(run: Path, work: Path) -> tuple[Path, Mapping[str, mutations.Mutation], Callable[[Path], object]]:
    file = _copy(run / "teacher" / "training.json", work / "log")
    identity = json.loads(file.read_text())["identity"]
    return file, mutations.JSON, lambda damaged: _is_finished(damaged, identity)


def _suite(run: Path, work: Path) -> tuple[Path, Mapping[str, mutations.Mutation], Callable[[Path], object]]:
    file = _copy(run / "suite.json", work)
    identity = json.loads(file.read_text())["identity"]
    return file, mutations.JSON, lambda damaged: _File(damaged, identity).rows
