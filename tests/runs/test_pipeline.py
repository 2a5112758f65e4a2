"""The main job end to end on a small scale: it learns, resumes after a kill, and refuses what it should."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import sortrl
from helpers import balancer, restless
from sortrl.core.errors import SortRLError
from sortrl.data.collect import CollectConfig
from sortrl.runs.config import robustify_config
from sortrl.runs.run import open_run
from sortrl.runs.stages import TEST_SEED_OFFSET
from sortrl.runs.tasks import TASKS
from sortrl.teachers import HardenConfig, SteadyConfig, Teacher, TeacherConfig

SMALL = {
    "preset": "fast",
    "steps": 500,
    "width": 64,
    "depth": 4,
    "batch": 256,
    "lambda_end": 0.3,
    "collect": CollectConfig(states=6000),
    "smoothing": 0.0,
    "dagger_rounds": 1,
    "dagger_states": 2000,
    "episodes": 4,
    "eps_grid": (0.0, 0.05),
    "suite": ("noise", "learned"),
    "suite_episodes": 2,
    "adversary_steps": 8192,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    sortrl.robustify(balancer(), "CartPole-v1", 0.05, out=directory, **SMALL)
    return directory


def test_a_run_makes_a_good_certified_student_and_a_report(run):
    results = json.loads((run / "results.json").read_text())
    rows = {(row["policy"], row["attack"]): row for row in results["evaluation"]}
    assert rows["teacher", "none"]["mean"] == 500
    assert rows["student", "none"]["mean"] > 400
    assert rows["student", "PGD-10"]["certified_share"] > 0.5
    assert results["data"]["agreement"] > 0.85
    assert "<html" in (run / "report.html").read_text()
    assert sortrl.load(run).certify(np.zeros((1, 4))).radius.shape == (1,)
    assert list((run / "student" / "tensorboard").iterdir())


def test_the_same_command_again_changes_nothing(run):
    before = (run / "policy.safetensors").read_bytes()
    rows = json.loads((run / "evaluation.json").read_text())
    sortrl.robustify(balancer(), "CartPole-v1", 0.05, out=run, **SMALL)
    assert (run / "policy.safetensors").read_bytes() == before
    assert json.loads((run / "evaluation.json").read_text()) == rows


def test_other_settings_in_the_same_directory_are_refused(run):
    with pytest.raises(SortRLError, match="other settings"):
        sortrl.robustify(balancer(), "CartPole-v1", 0.1, out=run, **SMALL)


def test_a_second_run_in_the_same_directory_is_refused(run):
    from sortrl.core.files import locked

    with locked(run), pytest.raises(SortRLError, match="Another run"):
        sortrl.robustify(balancer(), "CartPole-v1", 0.05, out=run, **SMALL)


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
from helpers import balancer, restless
from test_pipeline import SMALL
import sortrl, torch
torch.set_num_threads(1)
sortrl.robustify(balancer(), "CartPole-v1", 0.05, out=sys.argv[1], **SMALL)
"""


@pytest.mark.slow  # on a smaller run, at random moments, test_reliability.py does the same in seconds
def test_a_killed_run_continues_and_ends_with_the_same_weights(tmp_path):
    """SIGKILL at three moments; the last start finishes, bit for bit as an undisturbed run."""

    def start(directory: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", SCRIPT, str(directory), str(Path(__file__).parents[1])]
        return subprocess.Popen(command, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})

    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    marks = ["data.safetensors", "provisional-student-1/checkpoint.safetensors", "student/checkpoint.safetensors"]
    for mark in marks:
        process = start(disturbed)
        deadline = time.monotonic() + 120
        while not (disturbed / mark).exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (disturbed / mark).exists()
        assert not (disturbed / "policy.safetensors").exists(), "killed too late to test anything"
    assert start(disturbed).wait() == 0
    assert start(undisturbed).wait() == 0
    assert (disturbed / "policy.safetensors").read_bytes() == (undisturbed / "policy.safetensors").read_bytes()
    rows = [json.loads((d / "evaluation.json").read_text()) for d in (disturbed, undisturbed)]
    assert [row["returns"] for row in rows[0]] == [row["returns"] for row in rows[1]]
    assert not list(disturbed.rglob("*.tmp"))


def test_a_teacher_is_trained_where_none_is_given(tmp_path):
    teacher = TeacherConfig(total_steps=512, eval_every=512, n_steps=32, eval_episodes=2)
    policy = sortrl.robustify(None, "CartPole-v1", 0.05, **{**SMALL, "teacher_config": teacher, "steps": 20})
    assert policy.predict(np.zeros(4))[0] in (0, 1)


def test_a_black_box_can_be_the_teacher(tmp_path):
    def push(obs):
        return (obs @ np.array([0.1, 0.5, 3.0, 1.5]) > 0).astype(int)

    sortrl.robustify(push, "CartPole-v1", 0.05, out=tmp_path, **{**SMALL, "steps": 50})
    rows = json.loads((tmp_path / "evaluation.json").read_text())
    assert [(row["policy"], row["attack"]) for row in rows] == [
        ("teacher", "none"),
        ("student", "none"),
        ("student", "PGD-10"),
    ]


def test_every_task_has_settings():
    for name in TASKS:
        for preset in ("fast", "paper"):
            config = robustify_config(name, preset=preset)
            assert config.student.distill.eps == config.eps
    assert robustify_config("CartPole-v1", preset="paper").student.distill.width == 640
    assert robustify_config("CartPole-v1", preset="paper").dagger_rounds == 0


BAD_INPUT = {
    "unknown environment": (lambda: sortrl.robustify(env="CartPol-v1"), "Did you mean CartPole-v1"),
    "continuous actions": (lambda: sortrl.robustify(env="Pendulum-v1"), "continuous actions"),
    "missing teacher": (lambda: sortrl.robustify("absent.zip", env="CartPole-v1"), "absent.zip"),
    "negative eps": (lambda: sortrl.robustify(balancer(), env="CartPole-v1", eps=-1.0), r"eps is -1\.0"),
    "unknown option": (lambda: sortrl.robustify(balancer(), env="CartPole-v1", stepz=3), "Did you mean 'steps'"),
    "unknown preset": (
        lambda: sortrl.robustify(balancer(), env="CartPole-v1", preset="quick"),
        "choose one of auto, fast, paper, memory",
    ),
    "teacher of another task": (lambda: sortrl.robustify(balancer(), env="Acrobot-v1", **SMALL), "Acrobot-v1"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named(case):
    call, message = BAD_INPUT[case]
    with pytest.raises(SortRLError, match=message):
        call()


def test_a_read_only_directory_is_a_clear_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(SortRLError, match="Choose another --out"):
        sortrl.robustify(balancer(), "CartPole-v1", 0.05, out=blocked / "run", **SMALL)


CHOSEN = {**SMALL, "steps": 60, "dagger_rounds": 0, "candidates": 3, "choose_eps": (0.0, 0.05), "choose_episodes": 3}


def test_of_several_candidates_the_best_on_validation_episodes_is_kept(tmp_path):
    policy = sortrl.robustify(balancer(), "CartPole-v1", 0.05, out=tmp_path, **{**CHOSEN, "suite": ()})
    choice = json.loads((tmp_path / "choice.json").read_text())
    scores = [(np.mean(one["returns"]), one["certified"]) for one in choice["candidates"]]
    assert len(set(scores)) > 1  # there was something to choose
    assert choice["best"] == max(range(3), key=scores.__getitem__)
    kept = sortrl.evaluate(policy, "CartPole-v1", None, 0.0, 3, choice["seed"])
    assert kept.mean == choice["candidates"][choice["best"]]["returns"][0]
    assert choice["seed"] < TEST_SEED_OFFSET  # none of the test's


def test_a_steadied_teacher_is_what_the_student_learns_from(tmp_path):
    search = SteadyConfig(eps=0.05, generations=2, population=4, episodes=2, check_episodes=2)
    small = {**SMALL, "steps": 30, "dagger_rounds": 0, "suite": (), "steady": search}
    sortrl.robustify(restless(), "CartPole-v1", 0.05, out=tmp_path, **small)
    assert (tmp_path / "steadying.safetensors").exists()
    saved = json.loads((tmp_path / "run.json").read_text())["identity"]["config"]
    assert saved["steady"]["generations"] == 2
    before = (tmp_path / "policy.safetensors").read_bytes()
    sortrl.robustify(restless(), "CartPole-v1", 0.05, out=tmp_path, **small)
    assert (tmp_path / "policy.safetensors").read_bytes() == before


def test_a_hardened_teacher_is_what_the_student_learns_from(tmp_path):
    training = HardenConfig(eps=0.05, steps=128, n_envs=4, n_steps=16, check_episodes=4)
    small = {**SMALL, "steps": 30, "dagger_rounds": 0, "suite": (), "harden": training}
    pilot = restless()
    sortrl.robustify(pilot, "CartPole-v1", 0.05, out=tmp_path, **small)
    assert (tmp_path / "hardened" / "checkpoint.safetensors").exists()
    saved = json.loads((tmp_path / "run.json").read_text())["identity"]["config"]
    assert saved["harden"]["steps"] == 128


def test_students_can_share_what_was_made_of_their_teacher(tmp_path):
    config = robustify_config(
        "CartPole-v1",
        0.05,
        train_teacher=False,
        harden=HardenConfig(eps=0.05, steps=128, n_envs=4, n_steps=16, check_episodes=4),
    )
    pilot = restless()

    def prepared(n: int) -> Teacher:
        with open_run(tmp_path / str(n), "CartPole-v1", config, n, pilot, shared=tmp_path / "both") as run:
            return run.prepared(pilot)

    one = prepared(0)
    before = (tmp_path / "both" / "hardened" / "checkpoint.safetensors").stat().st_mtime_ns
    other = prepared(1)
    assert (tmp_path / "both" / "hardened" / "checkpoint.safetensors").stat().st_mtime_ns == before
    assert all(np.array_equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())
