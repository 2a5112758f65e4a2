"""ProcGen: episodes named by their seed, actions that do the same are one, training on many games."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from sortrl.core.errors import MissingDependency, SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.data.collect import CollectConfig, collect
from sortrl.envs import EnvSlots, Simulator, describe
from sortrl.envs.info import make_env
from sortrl.envs.procgen import ACTION_GROUPS, ALL_LEVELS, BUTTONS, TRAIN_LEVELS, level_of, make_pool
from sortrl.runs.tasks import teacher_preset
from sortrl.teachers import Architecture, Teacher, grading, load_teacher, train_teacher
from sortrl.teachers import train_sb3 as training

JUMPER, COINRUN = "sortrl/Jumper-train-v0", "sortrl/Coinrun-train-v0"


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


simulated = pytest.mark.usefixtures("procgen")


@simulated
@pytest.mark.parametrize(("game", "n_actions"), [("Jumper", 6), ("Coinrun", 9)])
@pytest.mark.parametrize("levels", ["train", "eval"])
def test_tasks(game, n_actions, levels):
    info = describe(f"sortrl/{game}-{levels}-v0")
    assert (info.obs_shape, info.obs_dtype, info.is_image) == ((3, 64, 64), np.uint8, True)
    assert (info.valid_low == 0).all()
    assert (info.valid_high == 255).all()
    assert (info.n_actions, len(info.action_names), info.max_steps) == (n_actions, n_actions, 1000)
    assert info.action_names[info.merged_action[4]] == "nothing"
    for original, merged in enumerate(info.merged_action):
        assert original in info.action_groups[merged]
    assert len(info.merged_action) == len(BUTTONS) == 15
    with pytest.raises(SortRLError, match=f"Did you mean .*sortrl/{game}-{levels}-v0"):
        describe(f"sortrl/{game}-{levels}-v1")


def test_other_tasks_do_not_merge_actions():
    info = describe("CartPole-v1")
    assert info.action_groups is None
    assert info.merged_action == (0, 1)


def test_seeds_name_levels():
    assert sorted(level_of(seed, "train") for seed in range(1_000_000, 1_000_200)) == list(range(TRAIN_LEVELS))
    levels = [level_of(seed, "eval") for seed in range(1000)]
    assert len(set(levels)) == 1000
    assert TRAIN_LEVELS < min(levels) < ALL_LEVELS / 10
    assert 0.9 * ALL_LEVELS < max(levels) < ALL_LEVELS


def episode(slots, slot, seed, actions, ahead):
    frames, rewards = [slots.reset(slot, seed)], []
    for action in actions:
        if ahead:
            slots.begin([slot], [action])
        obs, reward, done = slots.step(slot, action)
        frames.append(obs)
        rewards.append(reward)
        if done:
            break
    return np.stack(frames), rewards


@simulated
@pytest.mark.parametrize("env_id", [JUMPER, COINRUN, "sortrl/Jumper-eval-v0"])
def test_an_episode_depends_on_its_seed_alone(env_id):
    actions = np.random.default_rng(0).integers(6, size=30)
    with EnvSlots(env_id, 2) as slots:
        first = episode(slots, 0, 1, actions, ahead=False)
        assert len(np.unique(first[0].reshape(len(first[0]), -1), axis=0)) > 3  # something moves
        for slot, ahead in ((1, False), (0, True)):
            again = episode(slots, slot, 1, actions, ahead)
            assert np.array_equal(first[0], again[0])
            assert first[1] == again[1]
        assert not np.array_equal(first[0][0], slots.reset(0, 2))
        same_level = np.array_equal(first[0][0], slots.reset(0, 1 + TRAIN_LEVELS))
        assert same_level == ("train" in env_id)


@simulated
def test_what_has_begun_cannot_be_changed():
    env = make_env(JUMPER)
    env.reset(seed=0)
    env.unwrapped.begin(1)
    with pytest.raises(Exception, match="Action 1 has begun"):
        env.step(2)
    first = env.reset(seed=0)[0]  # forgets it
    assert np.array_equal(env.step(2)[0].shape, first.shape)
    assert env.reset()[0].shape == (3, 64, 64)  # without a seed: a level of the environment's choice
    env.close()


@simulated
def test_the_last_observation_is_of_the_episode_that_ended():
    """The simulator itself shows the start of the next episode instead."""
    with EnvSlots(JUMPER, 1, max_episode_steps=5) as slots:
        slots.reset(0, 0)
        for _ in range(5):
            _, _, done = slots.step(0, 2)
        assert done
        assert slots.truncated[0]
    simulator = Simulator(JUMPER, seed=1)
    start, before = simulator.obs, simulator.obs
    while not simulator.done:
        before = simulator.obs
        simulator.step(5 if simulator.length % 5 else 4)
    assert simulator.length > 3
    assert np.array_equal(simulator.obs, before)
    assert not np.array_equal(simulator.obs, start)


@simulated
def test_episodes_can_be_branched():
    here = Simulator(COINRUN, seed=3)
    for _ in range(5):
        here.step(8)
    there = here.fork()
    assert np.array_equal(here.obs, there.obs)
    here.step(7)
    there.step(1)
    assert not np.array_equal(here.obs, there.obs)


def differ(game, first, second):
    """Whether two sequences of original actions (steps, games) ever lead to different frames, rewards or ends."""
    pools = [make_pool(game, first.shape[1], 0, 0, TRAIN_LEVELS) for _ in range(2)]
    try:
        assert np.array_equal(*(pool.reset()[0] for pool in pools))
        for actions in zip(first, second, strict=True):
            steps = [pool.step(action)[:4] for pool, action in zip(pools, actions, strict=True)]
            if not all(np.array_equal(one, other) for one, other in zip(*steps, strict=True)):
                return True
        return False
    finally:
        for pool in pools:
            pool.close()


@simulated
@pytest.mark.parametrize("game", ACTION_GROUPS)
@pytest.mark.parametrize("steps", [80, pytest.param(2000, marks=pytest.mark.slow)])
def test_merged_actions_do_the_same_in_every_state(game, steps):
    """One pool plays the first action of each group, the other any of the group: they never part."""
    rng = np.random.default_rng(steps)
    groups = ACTION_GROUPS[game]
    chosen = rng.integers(len(groups), size=(steps, 24))
    first = np.array([group[0] for group in groups])[chosen]
    any_of = np.vectorize(lambda group: rng.choice(groups[group]))(chosen)
    assert (first != any_of).mean() > 0.05
    assert not differ(game, first, any_of)


@simulated
@pytest.mark.parametrize("game", ACTION_GROUPS)
def test_actions_that_are_not_merged_differ(game):
    """Where one action is replaced by another, the pools part. CoinRun's "down" needs a crate to stand on."""
    firsts = np.array([group[0] for group in ACTION_GROUPS[game]])
    rng = np.random.default_rng(1)
    for one in range(len(firsts)):
        for other in range(one):
            chosen = firsts[rng.choice([one, other, len(firsts) - 1], size=(100, 24))]  # the last: jump to the right
            assert differ(game, chosen, np.where(chosen == firsts[one], firsts[other], chosen)), (one, other)


def test_missing_envpool_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(MissingDependency, match=r"pip install 'sortrl\[procgen\]'"):
        describe(JUMPER)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="hides a library as Linux would look for it")
def test_missing_qt_names_the_system_package(tmp_path):
    pytest.importorskip("envpool", reason="envpool is not installed")
    for library in ("libQt5Core.so.5", "libQt5Gui.so.5"):
        (tmp_path / library).write_text("not a library")  # comes before the real one
    code = f"from sortrl.envs import describe; describe({JUMPER!r})"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    assert "MissingDependency" in error
    assert "libQt5" in error
    assert "apt-get install libqt5gui5" in error


def frames(n=16):
    return np.random.default_rng(0).integers(0, 256, (n, 3, 64, 64), dtype=np.uint8)


@simulated
def test_collected_images():
    torch.manual_seed(0)
    body = Architecture((3, 64, 64), 6, (), "ReLU", "impala", 8, channels=(2, 3, 4)).build()
    teacher = Teacher(body, Normalizer.from_pixels((3, 64, 64)), 6, algorithm="ppo")
    config = CollectConfig(states=150, exploration=1.0, random_actions=0.0, slots=8)
    demos = collect(teacher, JUMPER, config, seed=3)
    assert demos.obs.dtype == np.uint8
    assert demos.n_actions == 6
    assert np.array_equal(demos.actions, teacher.predict(demos.obs)[0])
    assert len(np.unique(demos.transitions.played)) == 6
    distinct = np.unique(demos.obs.reshape(len(demos), -1), axis=0)
    assert 50 < demos.n_distinct == len(distinct) <= 150


TINY = replace(
    teacher_preset(COINRUN), total_steps=96, eval_every=32, eval_episodes=1, n_envs=4, n_steps=8, batch_size=16
)


@simulated
def test_a_killed_training_on_images_continues_to_the_same_teacher(tmp_path, monkeypatch):
    # Untrained agents play on until the time limit.
    monkeypatch.setattr(grading, "greedy_returns", lambda teacher, env_id, seeds: np.arange(len(seeds)))
    whole = train_teacher(COINRUN, TINY, tmp_path / "whole", seed=5)

    def kill(entry):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_teacher(COINRUN, TINY, tmp_path / "killed", seed=5, progress=kill)
    steps = []
    resumed = train_teacher(COINRUN, TINY, tmp_path / "killed", seed=5, progress=steps.append)
    assert [entry["step"] for entry in steps] == [64, 96]
    for ours, theirs in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert resumed.architecture.channels == (16, 32, 32)
    assert resumed.predict(frames())[0].shape == (16,)
    assert float(resumed.normalizer.scale.max()) == 255.0


@simulated
def test_trained_networks_are_read_faithfully_and_levels_follow_the_seed():
    training.set_seed(0)
    model = training.make_model(COINRUN, TINY)
    teacher = load_teacher(model, COINRUN)
    with torch.no_grad():
        logits = model.policy.get_distribution(torch.from_numpy(frames())).distribution.logits
    torch.testing.assert_close(teacher.scores(teacher.normalize(frames())).log_softmax(1), logits)
    starts = []
    for seed in (1, 2, 1):
        model.env.seed(seed)
        starts.append(model.env.reset())
    assert np.array_equal(starts[0], starts[2])
    assert not np.array_equal(starts[0], starts[1])
    model.env.close()
