"""What people get wrong, and the words they get for it: received, expected, what to do. Never a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import sortrl
from helpers import balancer
from sortrl import cli
from sortrl.attacks import by_name
from sortrl.certify import save_certificates
from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.core.records import Demonstrations
from sortrl.data.collect import CollectConfig, collect
from sortrl.data.dataset import load_demonstrations, merge, split
from sortrl.distill import DistillConfig, distill
from sortrl.envs import describe
from sortrl.evaluate.returns import evaluate
from sortrl.evaluate.suite import evaluate_suite
from sortrl.experiments.reliability.tiny import SETTINGS, tiny_run
from sortrl.runs.config import robustify_config
from sortrl.runs.robustify import robustify
from sortrl.runs.teach import train_teacher
from sortrl.teachers import TeacherConfig, load_normalizer, load_teacher


class Fake(gym.Env):
    """An environment that is whatever a test needs."""

    def __init__(self, actions: Any = None, space: Any = None, value: float = 0.0) -> None:
        self.action_space = actions or gym.spaces.Discrete(2)
        self.observation_space = space or gym.spaces.Box(-1, 1, (4,), np.float32)
        self.value = value

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.full(self.observation_space.shape, self.value, self.observation_space.dtype), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.reset()[0], 1.0, False, False, {}


IMAGES = gym.spaces.Box(0, 255, (3, 8, 8), np.uint8)
ENVIRONMENTS = {
    "OneAction-v0": {"actions": gym.spaces.Discrete(1)},
    "FromFive-v0": {"actions": gym.spaces.Discrete(3, start=5)},
    "Buttons-v0": {"actions": gym.spaces.MultiBinary(3)},
    "Words-v0": {"space": gym.spaces.Discrete(7)},
    "Broken-v0": {"value": float("nan")},
    "Images-v0": {"space": IMAGES},
    "Large-v0": {"space": gym.spaces.Box(0, 255, (3, 50, 50), np.uint8)},
}


@pytest.fixture(scope="module", autouse=True)
def _environments():
    torch.set_num_threads(1)
    for name, settings in ENVIRONMENTS.items():
        gym.register(name, entry_point=lambda settings=settings: Fake(**settings), max_episode_steps=10)
    yield
    for name in ENVIRONMENTS:
        del gym.registry[name]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "tiny"
    tiny_run(directory)
    return directory


def demos(n: int = 4, **changes: Any) -> Demonstrations:
    whole = {
        "env_id": "CartPole-v1",
        "obs": np.zeros((n, 4), np.float32),
        "actions": np.arange(n) % 2,
        "logits": np.zeros((n, 2), np.float32),
        "episodes": np.arange(n) // 2,
    }
    return Demonstrations(**(whole | changes))


def learn(**changes: Any) -> Any:
    return distill(
        demos(), Normalizer.identity((4,)), DistillConfig(**({"steps": 1, "width": 4, "depth": 2} | changes))
    )


def robust(env: str = "CartPole-v1", eps: Any = 0.05, teacher: Any = None, **changes: Any) -> Any:
    return robustify(teacher or balancer(), env, eps, **changes)


def constant(obs: Any) -> Any:
    return np.zeros(len(obs), dtype=int)


POLICY = sortrl.SortPolicy((4,), 2, width=4, depth=2)
NAN = float("nan")

API: dict[str, tuple[Callable[[], Any], str]] = {
    # environments
    "unknown environment": (lambda: robust("CartPoll-v1"), "No environment 'CartPoll-v1'.*Did you mean CartPole-v1"),
    "old version of one": (lambda: describe("LunarLander-v2"), "Did you mean LunarLander-v3"),
    "environment of another kind": (lambda: describe(3), "Environment id is 3, expected a string"),
    "unknown module": (lambda: describe("nosuchmodule:Env-v0"), "Cannot import the module"),
    "continuous actions": (
        lambda: robust("MountainCarContinuous-v0"),
        "discrete actions, but MountainCarContinuous-v0 has continuous actions",
    ),
    "one action only": (lambda: robust("OneAction-v0"), "one action only: there is nothing to decide"),
    "actions not from 0": (lambda: describe("FromFive-v0"), "expected Discrete.n. counted from 0"),
    "actions of another kind": (lambda: describe("Buttons-v0"), "MultiBinary.* expected Discrete"),
    "observations of another kind": (lambda: describe("Words-v0"), r"expected one Box .*\.FlattenObservation"),
    "observations with NaN": (
        lambda: collect(load_teacher(constant, "Broken-v0"), "Broken-v0", CollectConfig(states=5)),
        "contain NaN or infinity.* Check the sensor",
    ),
    # eps
    "eps NaN": (lambda: robust(eps=NAN), "eps is nan, expected"),
    "eps infinite": (lambda: robust(eps=float("inf")), "eps is inf, expected"),
    "eps as text": (lambda: robust(eps="8/255"), "eps is '8/255', expected a number"),
    "eps of grey levels on a 0..1 image": (
        lambda: robust("Images-v0", 8.0, constant),
        "eps is 8, but observations of Images-v0 span only 1 .* write 0.03137",
    ),
    "eps NaN in evaluate": (lambda: evaluate(POLICY, "CartPole-v1", eps=NAN), "eps is nan, expected a finite number"),
    "eps negative in a suite": (
        lambda: evaluate_suite(POLICY, None, "CartPole-v1", eps_units=(-0.1,)),
        r"eps \[-0.1\], expected one or more finite numbers > 0",
    ),
    "no eps at all": (lambda: evaluate_suite(POLICY, None, "CartPole-v1", eps_units=()), "expected one or more"),
    "eps grid without 0": (lambda: robust(eps_grid=(0.1,)), r"eps_grid is \(0.1,\), expected .* and 0 among them"),
    "eps NaN in a monitor": (
        lambda: sortrl.Monitor(gym.make("CartPole-v1"), POLICY, NAN),
        "eps is nan, expected a finite number",
    ),
    # settings
    "unknown option": (lambda: robust(widht=3), "no option 'widht'. Did you mean 'width'"),
    "unknown preset": (
        lambda: robustify_config("CartPole-v1", preset="best"),
        "Unknown preset 'best'; choose one of auto, fast, paper, memory",
    ),
    "no steps": (lambda: robust(steps=0), "steps is 0, expected a positive number"),
    "no test episodes": (lambda: robust(episodes=0), "episodes is 0, expected a whole number, at least 1"),
    "half an episode": (lambda: robust(episodes=2.5), "episodes is 2.5, expected a whole number"),
    "negative rounds": (lambda: robust(dagger_rounds=-1), "dagger_rounds is -1, expected a whole number, at least 0"),
    "noise NaN": (lambda: robust(noise=NAN), "noise is nan, expected a finite number"),
    "smoothing negative": (lambda: robust(smoothing=-1.0), "smoothing is -1.0, expected a finite number"),
    "start_radius negative": (lambda: robust(start_radius=-1.0), "start_radius is -1.0, expected a finite number"),
    "no candidates": (lambda: robust(candidates=0), "candidates is 0, expected a whole number, at least 1"),
    "nothing to choose by": (lambda: robust(choose_eps=()), r"choose_eps is \(\), expected one or more"),
    "seed negative": (lambda: robust(seed=-1), "seed is -1, expected a whole number in 0..999"),
    "seed too large": (lambda: robust(seed=1000), "seed is 1000, expected a whole number in 0..999"),
    "unknown attack, before training": (lambda: robust(attack="magic"), "Unknown attack 'magic'"),
    "unknown attack of a suite, before training": (lambda: robust(suite=("noise", "magic")), "Unknown attack 'magic'"),
    "attack without steps": (lambda: by_name("pgd-0"), "0"),
    "rho of 1": (lambda: sortrl.SortPolicy((4,), 2, rho=1.0), r"rho is 1.0, expected a number in \[0, 1\)"),
    "no states to collect": (lambda: CollectConfig(states=0), "states is 0, expected at least 1"),
    "exploration beyond 1": (lambda: CollectConfig(exploration=1.5), "exploration is 1.5, expected a share"),
    "unknown algorithm": (lambda: TeacherConfig(algorithm="sac"), "expected 'ppo' or 'dqn'"),
    "negative seed of a teacher": (lambda: train_teacher("CartPole-v1", seed=-3), "seed is -3, expected 0 or more"),
    # data
    "no data": (lambda: demos(0), "no states. Collect at least one"),
    "data with NaN": (lambda: demos(obs=np.full((4, 4), NAN)), "observations contain NaN or infinity. Drop those"),
    "scores with NaN": (lambda: demos(logits=np.full((4, 2), NAN)), "logits must not be NaN"),
    "flat observations": (lambda: demos(obs=np.zeros(4)), r"obs has shape \(4,\), expected \(n, \*obs_shape\)"),
    "actions that are not there": (lambda: demos(actions=np.full(4, 7)), "actions range over 7..7, but logits have 2"),
    "data of unequal length": (lambda: demos(actions=np.zeros(3, int)), r"actions has shape \(3,\), expected"),
    "one episode only": (lambda: split(demos(episodes=np.zeros(4, int)), 0.5), "only one episode.* Collect more"),
    "data of two tasks": (lambda: merge(demos(), replace(demos(), env_id="Acrobot-v1")), "demonstrations of different"),
    "nothing to merge": (merge, "nothing to merge; give at least one"),
    "a teacher of one action": (
        lambda: robust(teacher=constant, **{**SETTINGS, "teacher_config": None}),
        "plays action 0 in all of 300 states, so there is nothing to learn",
    ),
    # teachers
    "teacher of another task": (lambda: robust("Acrobot-v1"), "CartPole|Is this the agent of another task"),
    "absent teacher": (lambda: load_teacher("nowhere.zip"), "No teacher at nowhere.zip: no such file. Give the path"),
    "module of the wrong size": (lambda: load_teacher(nn.Linear(3, 2), "CartPole-v1"), r"failed on a batch .*\(2, 4\)"),
    "module of too many scores": (lambda: load_teacher(nn.Linear(4, 9), "CartPole-v1"), r"expected scores \(2, 2\)"),
    "callable of text": (lambda: load_teacher(lambda o: ["x"] * len(o), "CartPole-v1"), "expected integer actions"),
    "callable of impossible actions": (
        lambda: load_teacher(lambda o: np.full(len(o), 5), "CartPole-v1"),
        "played actions 5..5, expected 0..1",
    ),
    "callable that fails": (lambda: load_teacher(lambda o: 1 / 0, "CartPole-v1"), "failed on a batch of observations"),
    "statistics of another shape": (
        lambda: load_teacher(balancer(), normalizer=Normalizer.identity((3,))),
        r"shape \(3,\), but the agent sees \(4,\). Give the statistics",
    ),
    "scale of zero": (lambda: Normalizer(np.zeros(2), np.zeros(2)), "scale positive"),
    # what a policy is asked
    "observation of the wrong shape": (lambda: POLICY.predict(np.zeros(3)), r"shape \(3,\), expected \(batch, 4\)"),
    "observation with NaN": (lambda: POLICY.predict_certified(np.full(4, NAN)), "contain NaN or infinity"),
    "observation beyond float32": (lambda: POLICY.certify(np.full((1, 4), 1e300)), "NaN or infinity|overflow"),
    "negative episodes": (lambda: evaluate(POLICY, "CartPole-v1", episodes=-1), "episodes -1, expected"),
    "policy of another task": (
        lambda: sortrl.Monitor(gym.make("Acrobot-v1"), POLICY, 0.1),
        r"has actions Discrete\(3\), the policy Discrete\(2\)",
    ),
    "certificates of another policy": (
        lambda: save_certificates("c", POLICY, torch.zeros(3, 4), POLICY.certify_unit(torch.zeros(2, 4)), "."),
        "2 certificates for states of shape",
    ),
    # memory, estimated before it is spent
    "a policy too wide": (
        lambda: sortrl.SortPolicy((4,), 2, width=10**7),
        r"300000060000000 parameters would take about .* TB .*lower width or depth",
    ),
    "a batch too large": (lambda: learn(batch=10**12), "batches of 1000000000000 would take .*lower batch, width"),
    "more states than memory": (
        lambda: collect(load_teacher(constant, "Large-v0"), "Large-v0", CollectConfig(states=10**9)),
        "1000000000 states of Large-v0 would take about .* TB .* collect fewer states",
    ),
    "a replay buffer too large": (
        lambda: train_teacher("Large-v0", TeacherConfig(algorithm="dqn", buffer_size=10**9)),
        "replay buffer of 1000000000 steps would take .* lower buffer_size",
    ),
    # files
    "absent policy": (lambda: sortrl.load("nowhere"), "Cannot read nowhere: no such file"),
    "absent data": (lambda: load_demonstrations("nowhere"), "Cannot read nowhere: no such file"),
    "absent statistics": (lambda: load_normalizer("nowhere.pkl"), "Cannot read nowhere.pkl: no such file"),
    "a directory for a file": (lambda: load_normalizer("."), "it is a directory, expected a regular file"),
    "a device for a file": (lambda: load_demonstrations("/dev/zero"), "a device or a pipe, expected a regular file"),
}

COMMANDS: dict[str, tuple[list[str], str]] = {
    "eps in another unit": (["evaluate", "{run}", "--eps", "-1"], "eps is -1.0, expected a finite number >= 0"),
    "eps NaN": (["certify", "{run}", "--eps", "nan"], "eps is nan, expected a finite number >= 0"),
    "eps infinite in a film": (["watch", "{run}", "--eps", "inf"], "eps is inf, expected a finite number >= 0"),
    "eps of 0 in a suite": (["attack", "{run}", "--eps", "0"], "expected one or more finite numbers > 0"),
    "a film of another kind": (["watch", "{run}", "--out", "film.mp4"], "expected a name that ends in .gif"),
    "no episodes to certify": (["certify", "{run}", "--episodes", "0"], "episodes 0, expected"),
    "no budget": (["certify", "{run}", "--budget", "0", "--episodes", "1", "--attack", "none"], "budget"),
    "too many threads": (
        ["robustify", "CartPole-v1", "--threads", "99999999"],
        "--threads is 99999999, expected 1..1024",
    ),
    "other settings": (
        ["robustify", "CartPole-v1", "--preset", "fast", "--out", "{run}"],
        "holds a run with other settings: config.eps is 0.05 there and 0.2 now; .* Choose another",
    ),
    "a file for a directory": (["robustify", "CartPole-v1", "--out", "{run}/run.json"], "Choose another --out"),
    "a pickle without leave": (
        ["robustify", "CartPole-v1", "--teacher", "x.zip", "--vecnormalize", "{run}/run.json.pkl"],
        "Cannot read .*run.json.pkl: no such file",
    ),
    "certificates that are none": (["verify", "{run}/policy.safetensors"], "It holds no certificates"),
    "a report of nothing": (["report", "{run}/teacher"], "results.json: no such file"),
    "an unknown part": (["reproduce", "reliability", "--task", "magic"], "expected one of fuzz, crashes, siege, soak"),
    "a teacher of nothing": (["teach", "NoSuch-v9"], "No environment 'NoSuch-v9'"),
}


def test_the_table_is_as_long_as_promised():
    assert len(API) + len(COMMANDS) >= 60


@pytest.mark.parametrize("case", API)
def test_a_mistake_in_python_is_named(case):
    call, message = API[case]
    with pytest.raises(SortRLError, match=message) as caught:
        call()
    assert 20 < len(str(caught.value)) < 2000


@pytest.mark.parametrize("case", COMMANDS)
def test_a_mistake_on_the_command_line_is_one_message(case, run, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, message = COMMANDS[case]
    with pytest.raises(SystemExit) as stop:
        cli.main([argument.format(run=run) for argument in arguments])
    error = capsys.readouterr().err
    assert stop.value.code == 1
    assert "Traceback" not in error
    with pytest.raises(SortRLError, match=message):
        raise SortRLError(error)


def test_messages_cannot_steer_a_terminal_or_flood_it():
    error = str(SortRLError("a\x1b[31mb" + "x" * 10**6 + "\x07end"))
    assert "\x1b" not in error
    assert "\x07" not in error
    assert len(error) < 2100
    assert error.endswith("end")


def test_control_c_stops_cleanly(tmp_path):
    """That the same command goes on is tested with kills, which are harder on it: test_reliability.py."""
    out = tmp_path / "run"
    code = "import torch; torch.set_num_threads(1); from sortrl import cli; cli.main()"
    fast = ["--steps", "40", "--states", "600", "--episodes", "1", "--threads", "1", "--out", str(out)]
    teacher = balancer_zip(tmp_path / "agent.zip")
    command = [sys.executable, "-c", code, "robustify", "CartPole-v1", "--teacher", str(teacher), *fast]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored if the tests run in the background of a script
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True)
    signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 240
    while not (out / "data.safetensors").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "stopped. Start the same command again to continue" in error
    assert "Traceback" not in error
    assert (out / "run.json").exists()
    assert not (out / "report.html").exists(), "stopped too late to test anything"


def test_an_interrupt_that_is_lost_comes_again(monkeypatch, capsys):
    """As when it arrives while an object is being finalised: Python drops it there."""
    lost = []

    def deaf() -> None:
        """Hears only the second time."""
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        except KeyboardInterrupt:
            lost.append(1)
        time.sleep(60)

    monkeypatch.setattr(cli.interrupts, "INTERRUPT_AGAIN", 0.2)
    monkeypatch.setitem(cli.COMMANDS, "info", deaf)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
    try:
        with pytest.raises(SystemExit) as stop:
            cli.main(["info"])
        assert (lost, stop.value.code) == ([1], 130)
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)) == handlers
        time.sleep(0.5)  # and no alarm is left behind
    finally:
        signal.signal(signal.SIGINT, before)


def balancer_zip(path: Path) -> Path:
    """The hand-written controller as a Stable-Baselines3 agent."""
    import io
    import zipfile

    gain = torch.tensor([0.1, 0.5, 3.0, 1.5])
    state = {"q_net.q_net.0.weight": torch.stack([-gain, gain]), "q_net.q_net.0.bias": torch.zeros(2)}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("policy.pth", buffer.getvalue())
    return path
