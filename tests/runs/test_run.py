"""Opening a run: one writer, nothing of another run, and no failed start that blocks the next one."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import pytest
import torch

import sortrl
from helpers import balancer, restless
from sortrl import cli
from sortrl.core.checkpoint import Checkpoint
from sortrl.core.errors import MissingDependency, SortRLError
from sortrl.core.files import atomic_path, locked, read_json, remove_leftovers, write_json
from sortrl.core.identity import differences, fingerprint, plain
from sortrl.data.collect import CollectConfig
from sortrl.envs import procgen
from sortrl.evaluate.suite import evaluate_suite
from sortrl.runs.config import robustify_config
from sortrl.runs.run import open_run, read_run, trained_eps
from sortrl.teachers import HardenConfig, SteadyConfig

TINY = {
    "steps": 20,
    "width": 8,
    "depth": 2,
    "batch": 32,
    "collect": CollectConfig(states=300, slots=4, exploration=1.0, random_actions=0.5),
    "smoothing": 0.0,
    "dagger_rounds": 0,
    "episodes": 1,
    "eps_grid": (0.0, 0.05),
    "suite": ("noise",),
    "suite_episodes": 1,
}
CONFIG = robustify_config("CartPole-v1", 0.05, train_teacher=False, **TINY)


def run_tiny(out: Path, teacher=None, eps: float = 0.05, env="CartPole-v1", **changes):
    return sortrl.robustify(teacher or balancer(), env, eps, out=out, preset="fast", **{**TINY, **changes})


def opened(directory: Path, teacher=None, **changes):
    return open_run(directory, "CartPole-v1", replace(CONFIG, **changes), 0, teacher or balancer())


# --- locks and leftovers ----------------------------------------------------------------------------------------------


def test_deleting_the_lock_of_a_run_lets_nobody_in(tmp_path):
    with locked(tmp_path):
        (tmp_path / ".lock").unlink()
        with pytest.raises(SortRLError, match="Another run is writing"), locked(tmp_path):
            pass


def test_a_lock_that_is_replaced_while_it_is_taken_does_not_count(tmp_path, monkeypatch):
    """As if somebody deleted it between opening and locking: the lock is then on a file that nobody else will find."""
    taken, real = [], fcntl.flock

    def flock(handle, flags):
        if not taken and not os.path.isdir(f"/proc/self/fd/{handle}"):
            (tmp_path / ".lock").unlink()
            taken.append(handle)
        real(handle, flags)

    monkeypatch.setattr("sortrl.core.files.fcntl.flock", flock)
    with locked(tmp_path):
        assert taken
        with (tmp_path / ".lock").open() as other, pytest.raises(BlockingIOError):
            real(other.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_writer_can_be_waited_for(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from sortrl.core.files import locked\n"
        "with locked(Path(sys.argv[1])):\n print('in', flush=True); sys.stdin.read(1); Path(sys.argv[1], 'done').touch()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout.readline() == "in\n"
    owner.stdin.write("x")
    owner.stdin.flush()
    with locked(tmp_path, wait=True):
        assert (tmp_path / "done").exists()
    owner.communicate()


def test_only_what_our_own_writer_left_is_removed(tmp_path):
    def killed(path: Path) -> Path:
        with atomic_path(path) as temporary:
            temporary.write_text("whole")
        temporary.write_text("half")  # as a killed writer leaves it
        return temporary

    other_run = tmp_path / "another run"
    other_run.mkdir()
    ours = killed(tmp_path / "policy.safetensors")
    kept = [killed(other_run / "policy.safetensors"), tmp_path / ".notes.tmp", tmp_path / ".draft.abcdefgh.tmp"]
    for path in kept[1:]:
        path.write_text("somebody's")
    (tmp_path / ".x.tmp").mkdir()
    (tmp_path / ".x.abcdefgh.sortrl.tmp").mkdir()
    (tmp_path / ".y.abcdefgh.sortrl.tmp").symlink_to(kept[1])
    remove_leftovers(tmp_path)
    assert not ours.exists()
    assert all(path.exists() for path in kept)
    assert (tmp_path / ".x.tmp").is_dir()
    assert (tmp_path / ".x.abcdefgh.sortrl.tmp").is_dir()
    assert (tmp_path / ".y.abcdefgh.sortrl.tmp").is_symlink()


@pytest.mark.parametrize("place", ["student/.checkpoint.safetensors", "rung-2/.checkpoint", "figures/.return.png"])
def test_a_run_removes_what_was_left_in_its_own_folders(tmp_path, place):
    left = tmp_path / f"{place}.abcdefgh.sortrl.tmp"
    with opened(tmp_path):
        pass
    left.parent.mkdir()
    left.write_text("half")
    with opened(tmp_path):
        assert not left.exists()


# --- numbers that no float can hold -----------------------------------------------------------------------------------


def test_an_integer_beyond_every_float_is_one_message(tmp_path, capsys):
    text = json.dumps({"identity": {"env": "CartPole-v1", "config": {"eps": 0.5}}})
    (tmp_path / "run.json").write_text(text.replace("0.5", "1" + "0" * 400))
    with pytest.raises(SortRLError, match="an integer of 401 digits"):
        trained_eps(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["watch", str(tmp_path)])
    assert stop.value.code == 1
    assert "Traceback" not in capsys.readouterr().err


# --- whose run is it? -------------------------------------------------------------------------------------------------


def test_other_settings_are_named_with_both_values(tmp_path):
    with opened(tmp_path) as run:
        run.demonstrations(balancer())
    with pytest.raises(SortRLError, match=r"config\.noise is \S+ there and 0\.5 now"), opened(tmp_path, noise=0.5):
        pass


def test_another_teacher_of_the_same_name_is_another_run(tmp_path):
    first, second = restless(), restless()
    next(second.body.parameters()).data.add_(1.0)
    with opened(tmp_path, first) as run:
        run.demonstrations(first)
    with pytest.raises(SortRLError, match="teacher_weights is"), opened(tmp_path, second):
        pass


def test_parts_of_an_unknown_run_are_not_taken_over(tmp_path):
    """A reproduction used to leave students without a word on what they were made with."""
    balanced = sortrl.SortPolicy((4,), 2, width=4, depth=2)
    balanced.save(tmp_path)
    with pytest.raises(SortRLError, match=r"parts of a run \(policy.safetensors\) but no run.json"), opened(tmp_path):
        pass


def test_a_stale_student_does_not_enter_a_table(tmp_path):
    from sortrl.experiments import procgen as tables

    folder = tables._folder("Coinrun", tables.MEMORY, tmp_path, "smoke")
    sortrl.SortPolicy((4,), 2, width=4, depth=2).save(folder)
    with (
        pytest.raises(SortRLError, match=r"no run\.json that says of which"),
        tables.student_run("Coinrun", tables.MEMORY, tmp_path, "smoke", balancer()),
    ):
        pass


def test_a_run_is_locked_while_it_is_open(tmp_path):
    with opened(tmp_path), pytest.raises(SortRLError, match="Another run is writing"), opened(tmp_path):
        pass


def test_runs_written_before_a_setting_existed_are_continued(tmp_path):
    with opened(tmp_path) as run:
        run.demonstrations(balancer())
    document = read_json(tmp_path / "run.json")
    config = document["identity"]["config"]
    for name in ("harden", "steady", "candidates", "choose_eps"):
        del config[name]
    # Once every run had the settings of all kinds of students, and some that nobody set.
    config |= {"remember": False, "rounding": None, "polish": None, "tutored": True, "eps_keep": 20 / 255}
    config["distill"] |= {"lambda_start": 1.0, "mask_chunk": 128}
    del config["collect"]["focus"], config["distill"]["soft_temperature"], document["identity"]["teacher_weights"]
    write_json(tmp_path / "run.json", document)
    with opened(tmp_path):
        pass
    assert read_json(tmp_path / "run.json")["identity"]["teacher_weights"] == fingerprint(balancer())
    write_json(tmp_path / "run.json", document)
    with pytest.raises(SortRLError, match=r"config\.candidates is 1 there and 2 now"), opened(tmp_path, candidates=2):
        pass


def test_checkpoints_with_an_earlier_fingerprint_are_continued(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer, generator = torch.optim.Adam(model.parameters()), torch.Generator()
    values = b"".join(tensor.double().numpy().tobytes() for tensor in model.state_dict().values())
    Checkpoint(tmp_path, {"teacher": hashlib.sha256(values).hexdigest()[:16]}).save(model, optimizer, generator, 3, [])
    assert Checkpoint(tmp_path, {"teacher": fingerprint(model)}).restore(model, optimizer, generator)[0] == 3
    with pytest.raises(SortRLError, match=r"teacher is .* there and .* now"):
        Checkpoint(tmp_path, {"teacher": fingerprint(torch.nn.Linear(2, 2))}).restore(model, optimizer, generator)


def test_settings_that_became_constants_must_have_had_their_value():
    wanted = {"harden": plain(HardenConfig(eps=0.1)), "steady": plain(SteadyConfig(eps=0.1))}
    stored = {
        "harden": {**wanted["harden"], "calm": 0.4, "attack_steps": 3, "gae_lambda": 0.97, "n_epochs": 6},
        "steady": {**wanted["steady"], "give": 0.02, "price": 0.2, "last_layer": True},
    }
    assert differences(stored, wanted) == []
    # Off is not what the constant says: such a file was made in another way.
    for group, name, other in (("steady", "last_layer", False), ("steady", "give", 0.0), ("harden", "calm", 0.0)):
        changed = {**stored, group: {**stored[group], name: other}}
        assert [one.field for one in differences(changed, wanted)] == [f"{group}.{name}"]


def test_differences_see_everything_that_is_not_the_same():
    wanted = plain({"config": CONFIG, "seed": 0})
    assert differences(json.loads(json.dumps(wanted)), wanted) == []
    assert [one.field for one in differences({**wanted, "more": 1}, wanted)] == ["more"]
    assert [one.field for one in differences({"seed": 0}, wanted)] == ["config"]
    assert [one.field for one in differences(None, wanted)] == ["identity"]


# --- failed starts, and other measurements ----------------------------------------------------------------------------


def test_a_bad_teacher_leaves_nothing_that_blocks_the_corrected_command(tmp_path):
    with pytest.raises(SortRLError, match=r"absent\.zip"):
        run_tiny(tmp_path / "run", "absent.zip")
    assert not (tmp_path / "run" / "run.json").exists()
    run_tiny(tmp_path / "run")


def test_a_start_that_made_nothing_can_be_corrected(tmp_path):
    def constant(obs):
        return [0] * len(obs)

    with pytest.raises(SortRLError, match="nothing to learn"):
        run_tiny(tmp_path, constant)
    run_tiny(tmp_path)
    assert read_json(tmp_path / "run.json")["identity"]["teacher"] == type(balancer()).__name__


def test_data_that_cannot_be_split_are_not_in_the_way_of_better_ones(tmp_path):
    with pytest.raises(SortRLError, match="only one episode"):
        run_tiny(tmp_path, collect=CollectConfig(states=20, slots=1))
    run_tiny(tmp_path)


def test_what_is_only_measured_is_measured_again(tmp_path):
    run_tiny(tmp_path)
    weights = (tmp_path / "policy.safetensors").read_bytes()
    clean = read_json(tmp_path / "evaluation.json")[0]
    run_tiny(tmp_path, eps_grid=(0.0, 0.1), suite=("fgsm",))
    rows = read_json(tmp_path / "evaluation.json")
    assert rows[0] == clean, "what is known is kept"
    assert {row["eps"] for row in rows} == {0.0, 0.1}
    run_tiny(tmp_path, episodes=2, suite_episodes=2)
    results = read_json(tmp_path / "results.json")
    assert {row["episodes"] for row in results["evaluation"]} == {2}
    assert {row["eps"] for row in results["evaluation"]} == {0.0, 0.05}
    assert results["config"]["episodes"] == read_json(tmp_path / "run.json")["identity"]["config"]["episodes"] == 2
    assert (tmp_path / "policy.safetensors").read_bytes() == weights


def test_a_suite_names_what_differs(tmp_path):
    policy = sortrl.SortPolicy((4,), 2, width=4, depth=2)
    for episodes, path in ((1, tmp_path / "s.json"), (1, tmp_path / "s.json")):
        evaluate_suite(policy, None, "CartPole-v1", ("noise",), episodes=episodes, path=path)
    with pytest.raises(SortRLError, match="episodes is 1 there and 2 now"):
        evaluate_suite(policy, None, "CartPole-v1", ("noise",), episodes=2, path=tmp_path / "s.json")


# --- what is missing is named -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "expected", "absent"),
    [
        ("libQt5Core.so.5: cannot open shared object file", "system's Qt 5", "cannot be imported"),
        ("numpy.core.multiarray failed to import", "cannot be imported .*numpy.core.multiarray", "Qt"),
        ("/lib/libstdc++.so.6: version GLIBCXX_3.4.30 not found", "cannot be imported .*GLIBCXX", "Qt"),
    ],
)
def test_why_envpool_cannot_be_imported(tmp_path, monkeypatch, message, expected, absent):
    (tmp_path / "envpool.py").write_text(f"raise ImportError({message!r})")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "envpool", raising=False)
    with pytest.raises(MissingDependency, match=expected) as caught:
        procgen.make_pool("Jumper", 1, 0)
    assert absent not in str(caught.value)


def test_a_run_remembers_the_module_of_its_environment_and_imports_it_only_on_request(tmp_path, monkeypatch, capsys):
    module = "own_task_of_a_test"
    (tmp_path / f"{module}.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('OwnPole-v0', 'gymnasium.envs.classic_control.cartpole:CartPoleEnv', max_episode_steps=30)\n"
    )
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run_tiny(run, env=f"{module}:OwnPole-v0")
    assert read_json(run / "run.json")["module"] == module
    assert read_json(run / "run.json")["identity"]["env"] == "OwnPole-v0"
    run_tiny(run, env=f"{module}:OwnPole-v0")  # is the same run
    gym.registry.pop("OwnPole-v0")
    monkeypatch.delitem(sys.modules, module)
    with pytest.raises(SortRLError, match=rf"which the module {module} registers.*add --import {module}"):
        read_run(run)
    assert module not in sys.modules
    cli.main(["evaluate", str(run), "--episodes", "1", "--eps", "0.05", "--import", module])
    assert "student" in capsys.readouterr().out


def test_states_and_harden_are_options_of_python_too():
    assert robustify_config("CartPole-v1", states=700).collect == replace(
        robustify_config("CartPole-v1").collect, states=700
    )
    assert robustify_config("CartPole-v1", harden=0.1).harden == HardenConfig(eps=0.1)
