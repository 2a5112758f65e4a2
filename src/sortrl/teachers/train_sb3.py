"""Train a teacher, resumably: PPO and DQN with Stable-Baselines3, parallel Q-learning with our own loop (``pq``).

Training runs in segments. Each starts from saved state (weights, optimiser, statistics, replay) with freshly seeded
generators and environments, so a training that is killed and started again continues to exactly the same result.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sortrl.core.checkpoint import damage_named, optimizer_tensors, part, prefixed, restore_optimizer
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_object, read_tensors, write_json, write_tensors
from sortrl.core.identity import check_same, plain
from sortrl.core.limits import require
from sortrl.core.progress import Progress
from sortrl.core.seeding import generators_restored, one_thread
from sortrl.envs import describe
from sortrl.envs.info import make_env
from sortrl.envs.procgen import ProcgenEnv
from sortrl.teachers.config import ImagePPOConfig, PQNConfig, TeacherConfig
from sortrl.teachers.grading import LOG_FILE, grade
from sortrl.teachers.load.load import load_teacher
from sortrl.teachers.teacher import Teacher
from sortrl.teachers.train_pqn import train_pqn

STATE_FILE = "training.safetensors"
FORMAT = "sortrl-training-1"
_COUNTS = ("num_timesteps", "_n_updates", "_n_calls")
_REPLAY = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


def train_teacher(
    env_id: str,
    config: TeacherConfig,
    out_dir: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    processes: int = 1,
    start: Teacher | None = None,
) -> Teacher:
    """Train until the target return is reached and confirmed, or the steps are used up; return the best agent seen.

    With ``out_dir`` the best teacher so far and the state of the training are kept there, and the same call continues
    from them (a finished training is just loaded). The result depends on the configuration and the seed alone.
    ``progress`` is called after each evaluation with ``step``, ``total`` and ``return`` (greedy, mean). The games of a PQN
    training can be shared out among ``processes``, and it can go on from an earlier agent (``start``).
    """
    if seed < 0:
        raise SortRLError(f"train_teacher: seed is {seed}, expected 0 or more.")
    info = describe(env_id)
    if isinstance(config, PQNConfig):
        return train_pqn(info, config, out_dir, seed, progress, processes, start)
    if start is not None:
        raise SortRLError(f"train_teacher: only pqn can go on from an earlier agent, not {config.algorithm}.")
    identity = plain({"env_id": info.env_id, "seed": int(seed), "config": config})
    record: dict[str, Any] = {"identity": identity, "segment": 0, "history": [], "best": None, "done": False}
    out = Path(out_dir) if out_dir is not None else None
    if out is not None and _is_finished(out / LOG_FILE, identity):
        return Teacher.load(out)
    resumed = None
    if out is not None and (out / STATE_FILE).exists():
        resumed, record = _read_state(out / STATE_FILE, identity)
    best = Teacher.load(out) if out is not None and record["best"] is not None else None
    with one_thread(), generators_restored():
        set_seed(_mixed(seed, 0))
        model = make_model(info.env_id, config)
        try:
            if resumed is not None and out is not None:
                with damage_named(out / STATE_FILE):
                    restore(model, resumed, record.pop("counts"))
            while not record["done"]:
                _run_segment(model, config, seed, record["segment"])
                record["segment"] += 1
                teacher = load_teacher(model, info.env_id)
                teacher.name = f"{config.algorithm}-{info.env_id}"
                score, confirmed = grade(teacher, info.env_id, config, seed, record["segment"])
                record["history"].append({"step": model.num_timesteps, "return": score})
                record["done"] = confirmed or model.num_timesteps >= config.total_steps
                # A confirmed agent wins over a lucky one: its return was measured on more episodes. Of equals, the later one wins.
                if confirmed or record["best"] is None or score >= record["best"]:
                    record["best"], best = score, teacher
                    if out is not None:
                        teacher.save(out)
                if out is not None:
                    _write_state(out, record, model)
                if progress is not None:
                    progress({"step": model.num_timesteps, "total": config.total_steps, "return": score})
        finally:
            model.env.close()
    if best is None:
        raise SortRLError(f"Training {info.env_id} ended without an evaluation. Raise total_steps.")
    return best


def _run_segment(model: Any, config: TeacherConfig, seed: int, segment: int) -> None:
    """Learn for ``eval_every`` steps from fresh episodes and generators that depend on the segment's number alone."""
    mixed = _mixed(seed, 1 + segment)
    set_seed(mixed)
    model.action_space.seed(mixed)
    model.env.seed(mixed)
    model._last_obs = None  # makes learn() reset the environments, with the seeds just given
    steps = min(config.eval_every, config.total_steps - model.num_timesteps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # remarks on batch sizes and devices that presets answer for
        model.learn(steps, reset_num_timesteps=False, log_interval=None if config.algorithm == "ppo" else 10**9)


def make_model(env_id: str, config: TeacherConfig) -> Any:
    """A Stable-Baselines3 model with its normalised environments, untrained."""
    from stable_baselines3 import DQN, PPO
    from stable_baselines3.common.vec_env import VecNormalize

    plain = _side_by_side(env_id, config.n_envs)
    policy = "CnnPolicy" if len(plain.observation_space.shape) == 3 else "MlpPolicy"
    env = VecNormalize(plain, norm_obs=config.normalize_obs, norm_reward=config.normalize_reward, gamma=config.gamma)
    progressed: list[Any] = []  # filled below: schedules must see the whole training, not the segment under way

    def remaining() -> float:
        return 1.0 - min(1.0, progressed[0].num_timesteps / config.total_steps) if progressed else 1.0

    def scheduled(value: float) -> Callable[[float], float]:
        return lambda _: value * (max(remaining(), 1e-3) if config.linear_decay else 1.0)

    common: dict[str, Any] = {
        "learning_rate": scheduled(config.learning_rate),
        "gamma": config.gamma,
        "batch_size": config.batch_size,
        "policy_kwargs": {"net_arch": list(config.hidden), **_convolutions(config)},
        "device": "cpu",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if config.algorithm == "ppo":
            model: Any = PPO(
                policy,
                env,
                n_steps=config.n_steps,
                n_epochs=config.n_epochs,
                gae_lambda=config.gae_lambda,
                ent_coef=config.ent_coef,
                clip_range=scheduled(config.clip_range),
                **common,
            )
        else:
            info = describe(env_id)
            size = 2 * config.buffer_size * info.obs_size * info.obs_dtype.itemsize
            require(f"A replay buffer of {config.buffer_size} steps", size, "lower buffer_size")
            model = DQN(
                policy,
                env,
                buffer_size=config.buffer_size,
                learning_starts=config.learning_starts,
                train_freq=config.train_freq,
                gradient_steps=config.gradient_steps,
                target_update_interval=config.target_update_interval,
                **common,
            )
            fraction, final = max(config.exploration_fraction, 1e-9), config.exploration_final_eps
            model.exploration_schedule = lambda _: max(final, 1.0 + (final - 1.0) * (1.0 - remaining()) / fraction)
    progressed.append(model)
    return model


def _convolutions(config: TeacherConfig) -> dict[str, Any]:
    if not isinstance(config, ImagePPOConfig):
        return {}
    from sortrl.teachers.pool import Convolutions

    sizes = {"features_dim": config.cnn_features, "channels": config.channels}
    return {"features_extractor_class": Convolutions, "features_extractor_kwargs": sizes}


def _side_by_side(env_id: str, n: int) -> Any:
    """``n`` environments as one that Stable-Baselines3 can train on."""
    from stable_baselines3.common.vec_env import DummyVecEnv

    from sortrl.teachers.pool import PoolVecEnv

    one = make_env(env_id).unwrapped
    if isinstance(one, ProcgenEnv):
        return PoolVecEnv(one, n)
    one.close()
    return DummyVecEnv([lambda: make_env(env_id)] * n)


def capture(model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything a segment starts from: tensors, and numbers as JSON has them."""
    # Copies, because a CNN that actor and critic share stands there under three names, and a file holds each tensor once.
    tensors = prefixed("policy", {name: tensor.clone() for name, tensor in model.policy.state_dict().items()})
    tensors |= prefixed("optimizer", optimizer_tensors(model.policy.optimizer))
    counts: dict[str, Any] = {name: int(getattr(model, name, 0)) for name in _COUNTS}
    for name in _statistics(model):
        rms = getattr(model.env, name)
        tensors |= {f"{name}.mean": torch.as_tensor(rms.mean), f"{name}.var": torch.as_tensor(rms.var)}
        counts[name] = float(rms.count)
    replay = getattr(model, "replay_buffer", None)
    if replay is not None:
        tensors |= {f"replay.{name}": torch.from_numpy(getattr(replay, name)) for name in _REPLAY}
        counts |= {"replay.pos": int(replay.pos), "replay.full": bool(replay.full)}
    return tensors, counts


def restore(model: Any, tensors: dict[str, Tensor], counts: dict[str, Any]) -> None:
    """The inverse of :func:`capture`."""
    model.policy.load_state_dict(part(tensors, "policy"))
    restore_optimizer(model.policy.optimizer, part(tensors, "optimizer"))
    for name in _COUNTS:
        if hasattr(model, name):
            setattr(model, name, int(counts[name]))
    for name in _statistics(model):
        rms = getattr(model.env, name)
        mean, var = tensors[f"{name}.mean"].numpy(), tensors[f"{name}.var"].numpy()
        if mean.shape != np.shape(rms.mean) or var.shape != np.shape(rms.var):
            raise ValueError(f"{name} of shapes {mean.shape} and {var.shape}")
        rms.mean, rms.var, rms.count = mean, var, float(counts[name])
    replay = getattr(model, "replay_buffer", None)
    if replay is not None:
        for name in _REPLAY:
            getattr(replay, name)[:] = tensors[f"replay.{name}"].numpy()
        replay.pos, replay.full = int(counts["replay.pos"]), bool(counts["replay.full"])


def _statistics(model: Any) -> list[str]:
    return ["ret_rms", *(["obs_rms"] if model.env.norm_obs else [])]


def _write_state(out: Path, record: dict[str, Any], model: Any) -> None:
    if not record["done"]:
        tensors, counts = capture(model)
        write_tensors(out / STATE_FILE, tensors, {"format": FORMAT, "record": {**record, "counts": counts}})
    write_json(out / LOG_FILE, record)
    if record["done"]:  # from now on the log alone is asked
        (out / STATE_FILE).unlink(missing_ok=True)


def _is_finished(path: Path, identity: dict[str, Any]) -> bool:
    if not path.exists():
        return False
    record = read_object(path)
    _check_identity(record.get("identity"), identity, path)
    return record.get("done") is True


def _read_state(path: Path, identity: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, metadata = read_tensors(path)
    found = metadata.get("record")
    record: dict[str, Any] = found if isinstance(found, dict) and metadata.get("format") == FORMAT else {}
    kinds = {"counts": dict, "history": list, "segment": int, "best": float | int | None}
    if not record or not all(isinstance(record.get(name), kind) for name, kind in kinds.items()):
        raise SortRLError(
            f"{path} cannot be read (format {metadata.get('format')!r}). Delete it to train from the start."
        )
    _check_identity(record.get("identity"), identity, path)
    return tensors, {**record, "done": False}


def _check_identity(found: Any, identity: dict[str, Any], path: Path) -> None:
    check_same(
        found,
        identity,
        f"{path.parent} holds a training with other settings",
        "Choose another directory, or delete it.",
    )


def _mixed(seed: int, part: int) -> int:
    return int(np.random.SeedSequence([seed, 4, part]).generate_state(1)[0] >> 2)


def set_seed(seed: int) -> None:
    """Seed the global generators that Stable-Baselines3 draws from."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (Stable-Baselines3 draws from the global generator)
    torch.manual_seed(seed)
