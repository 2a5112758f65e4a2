"""Two processes under torchrun train as one does: the same curves and the same policies within float error."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parallel_trainings import trained
from sortrl import cli
from sortrl.core import parallel
from sortrl.core.checkpoint import Checkpoint
from sortrl.core.errors import SortRLError
from sortrl.nets import zoo

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run_two(*command):
    """Under torchrun, with two processes of one thread each."""
    tests = Path(__file__).parents[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tests), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([*TORCHRUN, *map(str, command)], env=env, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return run


def same_curve(ours, theirs):
    assert len(ours) == len(theirs) > 0
    of_its_own = {"lead", "certified"}  # what the leading process sees of a batch, not what it learns from
    for one, other in zip(ours, theirs, strict=True):
        one, other = ({name: row[name] for name in row if name not in of_its_own} for row in (one, other))
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    threads = torch.get_num_threads()
    try:
        return trained(tmp_path_factory.mktemp("alone"))
    finally:
        torch.set_num_threads(threads)


def test_two_processes_give_the_curves_and_policies_of_one(alone, tmp_path):
    run_two(Path(__file__).parents[1] / "parallel_trainings.py", tmp_path)
    together = json.loads((tmp_path / "found.json").read_text())
    assert set(together) == set(alone) == {"start", "sort", "hybrid", "CarDQN", "SADQN"}
    untrained = alone["start"]["scores"]
    for name in ("sort", "hybrid", "CarDQN", "SADQN"):
        found = alone[name]
        same_curve(together[name]["curve"], found["curve"])
        torch.testing.assert_close(
            torch.tensor(together[name]["scores"]), torch.tensor(found["scores"]), rtol=1e-4, atol=1e-4
        )
        assert found["scores"] != untrained
    assert alone != together, "the sums were taken in another order, by two processes"


@pytest.mark.slow
def test_the_command_line_robustifies_and_resumes_in_two_processes(tmp_path):
    teacher = zoo.folder() / "cartpole" / "teacher"
    options = ["robustify", "CartPole-v1", "--teacher", str(teacher), "--preset", "fast", "--states", "1500"]
    options += ["--steps", "60", "--episodes", "2", "--threads", "1"]
    cli.main([*options, "--out", str(tmp_path / "one")])
    said = run_two("-m", "sortrl", *options, "--out", tmp_path / "two").stdout
    assert said.count("report:") == 1, "one process speaks"
    curves = [json.loads((tmp_path / name / "training.json").read_text())["history"] for name in ("one", "two")]
    same_curve(*curves)
    (tmp_path / "two" / "policy.safetensors").unlink()
    (tmp_path / "two" / "training.json").unlink()
    run_two("-m", "sortrl", *options, "--out", tmp_path / "two")  # from the checkpoint of the training
    assert json.loads((tmp_path / "two" / "training.json").read_text())["history"] == curves[1]


class Team:
    """Of a process that is the ``rank``-th of two."""

    def __init__(self, rank):
        self.team = parallel._Team(rank, 2, torch.device("cpu"), None, None)

    def __enter__(self):
        self.token = parallel._training.set(self.team)

    def __exit__(self, *_):
        parallel._training.reset(self.token)


def test_shares_are_disjoint_make_up_the_batch_and_have_rows_of_every_group():
    batch, shares = torch.arange(24), []
    for rank in range(2):
        with Team(rank):
            shares.append(parallel.own(batch, groups=3))
    assert torch.equal(torch.cat(shares).sort().values, batch)
    assert [int((share // 8 == group).sum()) for share in shares for group in range(3)] == [4] * 6
    assert torch.equal(parallel.own(batch, groups=3), batch), "alone, all of it"


def test_random_numbers_of_shares_are_those_of_the_batch():
    shares = []
    for rank in range(2):
        with Team(rank):
            shares.append(parallel.drawn((3, 2), torch.Generator().manual_seed(5)))
    assert torch.equal(torch.cat(shares), parallel.drawn((6, 2), torch.Generator().manual_seed(5)))


def test_a_batch_that_cannot_be_shared_is_named():
    with Team(0), pytest.raises(SortRLError, match=r"A batch of 250 .* 2 processes .* multiple of 8"):
        parallel.own(torch.zeros(250), groups=4)


def test_only_the_leader_writes_checkpoints(tmp_path):
    checkpoint = Checkpoint(tmp_path, {"seed": 1})
    assert checkpoint.path is not None
    copy = pickle.loads(pickle.dumps(checkpoint))
    assert (copy.path, copy.identity) == (None, {"seed": 1})
