"""Demonstrations: the teacher's greedy answers, reproducible episodes, files and splits that keep episodes whole."""

from __future__ import annotations

import sys

import gymnasium as gym
import numpy as np
import pytest
import torch

from sortrl.core.errors import MissingDependency, SortRLError
from sortrl.core.files import read_tensors, write_tensors
from sortrl.core.normalizer import Normalizer
from sortrl.core.records import Demonstrations
from sortrl.data.collect import CollectConfig, _Recorder, collect
from sortrl.data.dataset import export_minari, import_minari, load_demonstrations, merge, save_demonstrations, split
from sortrl.distill import DistillConfig, distill, standardised
from sortrl.envs import EnvSlots, describe
from sortrl.teachers import Architecture, Teacher, load_teacher

ARRAYS = ("obs", "actions", "logits", "episodes")
AFTER = ("played", "rewards", "terminated", "truncated", "final_obs")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def teacher():
    """A linear actor-critic that balances the pole for a while: pushes towards the side it falls to."""
    architecture = Architecture(obs_shape=(4,), n_actions=2, hidden=(), activation="Tanh")
    scale = np.array([1.0, 0.5, 0.1, 0.5])
    teacher = Teacher(architecture.build(), Normalizer(np.zeros(4), scale), 2, "leaner", "ppo", architecture)
    with torch.no_grad():
        teacher.body[1].bias.zero_()
        teacher.body[1].weight.copy_(torch.tensor([[0.0, 0.0, -1.0, -2.0], [0.0, 0.0, 1.0, 2.0]]))
    return teacher


def same(one, two):
    equal = all(np.array_equal(getattr(one, name), getattr(two, name)) for name in ARRAYS)
    if one.transitions is None or two.transitions is None:
        return equal and one.transitions is two.transitions
    return equal and all(np.array_equal(getattr(one.transitions, n), getattr(two.transitions, n)) for n in AFTER)


def replays(demos, env_id="CartPole-v1"):
    """Whether the played actions lead from each state to the next, checked with the task's own physics."""
    import gymnasium as gym

    env = gym.make(env_id).unwrapped
    env.reset(seed=0)
    after, checked = demos.transitions, 0
    numbers = np.unique(demos.episodes)
    for row in range(0, len(demos), 7):
        last = row + 1 == len(demos) or demos.episodes[row + 1] != demos.episodes[row]
        following = after.final_obs[np.searchsorted(numbers, demos.episodes[row])] if last else demos.obs[row + 1]
        env.state = demos.obs[row].astype(np.float64)
        env.steps_beyond_terminated = None
        obs, reward, terminated, _, _ = env.step(int(after.played[row]))
        assert np.allclose(obs, following, atol=1e-5)
        assert reward == after.rewards[row]
        assert terminated == after.terminated[row]
        checked += 1
    return checked


def test_labels_are_the_teachers_greedy_answers_to_clean_states(teacher):
    config = CollectConfig(states=1500, exploration=1.0, random_actions=0.3, eps_unit=0.5)
    demos = collect(teacher, "CartPole-v1", config)
    assert len(demos) == 1500
    assert demos.obs.dtype == np.float32
    expected = teacher.scores(teacher.normalize(demos.obs)).numpy()
    assert np.allclose(demos.logits, expected, atol=1e-5)
    assert np.array_equal(demos.actions, demos.logits.argmax(axis=1))
    assert 0.05 < (demos.transitions.played != demos.actions).mean() < 0.6  # it did explore


def test_sticky_actions_repeat_the_last_one(teacher):
    def repeats(sticky):
        config = CollectConfig(states=3000, exploration=1.0, random_actions=0.0, sticky=sticky)
        demos = collect(teacher, "CartPole-v1", config, actor=teacher)  # which does not sample
        played, first = demos.transitions.played, np.append(True, demos.episodes[1:] != demos.episodes[:-1])
        assert (played[first] == demos.actions[first]).all(), "at the start there is nothing to repeat"
        return float((played != demos.actions).mean()), played[1:][~first[1:]] == played[:-1][~first[1:]]

    assert repeats(0.0)[0] < 0.01
    changed, same = repeats(0.5)
    assert changed > 0.1
    assert same.mean() > repeats(0.0)[1].mean()
    assert repeats(1.0)[1].all()


def test_episodes_are_whole_ordered_and_real(teacher):
    demos = collect(teacher, "CartPole-v1", CollectConfig(states=3000, exploration=1.0, random_actions=0.2))
    assert (np.diff(demos.episodes) >= 0).all()
    assert len(np.unique(demos.episodes)) > 5
    assert demos.transitions.terminated.sum() > 3
    ends = demos.transitions.terminated | demos.transitions.truncated
    assert np.array_equal(np.flatnonzero(ends), np.flatnonzero(np.append(np.diff(demos.episodes) > 0, True)))
    assert replays(demos) > 400


@pytest.mark.parametrize("fields", [{}, {"exploration": 1.0}, {"eps_unit": 0.3}, {"slots": 1}, {"exploration": 0.0}])
def test_one_seed_one_data_set(teacher, fields):
    config = CollectConfig(states=700, **fields)
    first = collect(teacher, "CartPole-v1", config, seed=3)
    assert same(first, collect(teacher, "CartPole-v1", config, seed=3))
    other = collect(teacher, "CartPole-v1", config, seed=4)
    starts = {tuple(row) for row in first.obs[np.unique(first.episodes, return_index=True)[1]]}
    assert not starts & {tuple(row) for row in other.obs[np.unique(other.episodes, return_index=True)[1]]}


def test_exploration_reaches_more_of_the_state_space(teacher):
    def spread(**fields):
        demos = collect(teacher, "CartPole-v1", CollectConfig(states=4000, **fields))
        return np.abs(demos.obs[:, 2:]).mean()

    greedy = spread(exploration=0.0)
    assert spread(exploration=1.0, random_actions=0.3) > 1.1 * greedy
    assert spread(exploration=0.0, eps_unit=1.0) > 1.1 * greedy


def test_greedy_collection_plays_the_labels(teacher):
    demos = collect(teacher, "CartPole-v1", CollectConfig(states=600, exploration=0.0))
    assert np.array_equal(demos.transitions.played, demos.actions)


def test_q_values_are_not_sampled_as_if_they_were_logits():
    callable_teacher = load_teacher(lambda obs: (obs[:, 2] > 0).astype(int), "CartPole-v1")
    config = CollectConfig(states=600, exploration=1.0, random_actions=0.0)
    demos = collect(callable_teacher, "CartPole-v1", config)
    assert np.array_equal(demos.transitions.played, demos.actions)
    explored = collect(callable_teacher, "CartPole-v1", CollectConfig(states=600, exploration=1.0, random_actions=0.5))
    assert 0.15 < (explored.transitions.played != explored.actions).mean() < 0.35


class Stubborn:
    """Always pushes left, whatever it sees; remembers what it saw."""

    def __init__(self):
        self.seen = []

    def predict(self, obs):
        self.seen.append(obs.copy())
        return np.zeros(len(obs), dtype=int), None


def test_dagger_visits_the_actors_states_and_keeps_the_teachers_labels(teacher):
    config = CollectConfig(states=500, exploration=0.0)
    demos = collect(teacher, "CartPole-v1", config, actor=Stubborn())
    assert (demos.transitions.played == 0).all()
    assert (demos.actions == 1).mean() > 0.5  # the teacher objects
    lengths = np.unique(demos.episodes, return_counts=True)[1]
    assert lengths[:-1].max() < 12  # the actor's short episodes, not the teacher's long ones


def test_a_disturbed_actor_sees_noise_of_the_stated_size(teacher):
    actor = Stubborn()
    config = CollectConfig(states=400, exploration=0.0, eps_unit=0.4, slots=1)
    demos = collect(teacher, "CartPole-v1", config, actor=actor)
    noise_unit = (np.concatenate(actor.seen) - demos.obs) / teacher.normalizer.scale.numpy()
    assert np.abs(noise_unit).max() <= 0.4 + 1e-5
    assert np.abs(noise_unit).max() > 0.3
    per_episode = [np.abs(noise_unit[demos.episodes == episode]).max() for episode in np.unique(demos.episodes)]
    assert min(per_episode) < 0.15  # each episode has its own level


def test_small_collections_still_see_whole_episodes(teacher):
    demos = collect(teacher, "CartPole-v1", CollectConfig(states=600, exploration=0.0, slots=32))
    assert np.unique(demos.episodes, return_counts=True)[1].max() > 600 // 32


class Doors(gym.Env):
    """Four starts and one step; from the last start there is nothing to win."""

    observation_space = gym.spaces.Box(-5, 5, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.door = seed % 4
        return np.array([0, self.door, -1, -1], np.float32), {}

    def step(self, action):
        return np.zeros(4, np.float32), float(self.door < 3), True, False, {}


def test_focus_spends_tries_where_none_was_good_twice(teacher):
    gym.register("sortrl-test/Doors-v0", Doors, max_episode_steps=1)
    try:
        config = CollectConfig(states=400, exploration=1.0, random_actions=0.1, focus=0.5, slots=4)
        demos = collect(teacher, "sortrl-test/Doors-v0", config)
        doors, early = demos.obs[:, 1].astype(int), np.arange(400) < 200
        assert set(doors[early]) == {0, 1, 2, 3}
        assert (doors[~early] == 3).mean() > 0.95, (
            "the episodes under way when the focus begins are played to their end"
        )
    finally:
        del gym.registry["sortrl-test/Doors-v0"]


def test_progress_is_reported(teacher):
    reports = []
    collect(teacher, "CartPole-v1", CollectConfig(states=150), progress=reports.append)
    assert reports[-1] == {"step": 150, "total": 150}
    assert [report["step"] for report in reports] == sorted(report["step"] for report in reports)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"states": 0}, "states is 0"),
        ({"slots": 0}, "slots is 0"),
        ({"exploration": 1.1}, "exploration is 1.1"),
        ({"random_actions": -0.1}, "random_actions is -0.1"),
        ({"focus": -0.5}, "focus is -0.5"),
        ({"eps_unit": -1.0}, "eps_unit is -1.0"),
        ({"eps_unit": float("nan")}, "eps_unit is nan"),
    ],
)
def test_bad_configs(fields, message):
    with pytest.raises(SortRLError, match=message):
        CollectConfig(**fields)


def test_a_teacher_of_another_task_is_refused(teacher):
    with pytest.raises(SortRLError, match="agent of another task"):
        collect(teacher, "MountainCar-v0", CollectConfig(states=10))


# --- files, merging, splitting ----------------------------------------------------------------------------------------


def without_transitions(demos):
    return Demonstrations(demos.env_id, demos.obs, demos.actions, demos.logits, demos.episodes)


def test_files_round_trip(teacher, tmp_path):
    demos = collect(teacher, "CartPole-v1", CollectConfig(states=300))
    for one in (demos, without_transitions(demos)):
        save_demonstrations(tmp_path / "d.safetensors", one)
        read = load_demonstrations(tmp_path / "d.safetensors")
        assert read.env_id == "CartPole-v1"
        assert same(read, one)
        assert read.obs.dtype == one.obs.dtype


def test_bad_files_are_refused(teacher, tmp_path):
    path = tmp_path / "d.safetensors"
    save_demonstrations(path, collect(teacher, "CartPole-v1", CollectConfig(states=50)))
    tensors, metadata = read_tensors(path)
    cases = [
        ({}, {"format": "other"}, "holds no demonstrations"),
        ({}, {"env_id": 3}, "holds no demonstrations"),
        ({"actions": None}, {}, "lacks actions"),
        ({"actions": tensors["actions"].float()}, {}, "actions has dtype float32"),
        ({"actions": tensors["actions"] + 2}, {}, "actions range over"),
        ({"logits": tensors["logits"][:-1]}, {}, "logits has shape"),
        ({"obs": tensors["obs"] / 0}, {}, "NaN or infinity"),
        ({"transitions.rewards": None}, {}, "incomplete"),
        ({"transitions.rewards": tensors["transitions.rewards"][:-1]}, {}, "equal 1-d shapes"),
        ({"transitions.truncated": tensors["transitions.truncated"].int()}, {}, "transitions.truncated has dtype"),
        ({"transitions.final_obs": tensors["transitions.final_obs"][:0]}, {}, "final_obs"),
    ]
    for changes, more, message in cases:
        changed = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
        write_tensors(path, changed, metadata | more)
        with pytest.raises(SortRLError, match=message):
            load_demonstrations(path)


def test_merge_keeps_episodes_apart(teacher):
    one = collect(teacher, "CartPole-v1", CollectConfig(states=200), seed=1)
    two = collect(teacher, "CartPole-v1", CollectConfig(states=300), seed=2)
    both = merge(one, two)
    assert len(both) == 500
    counted = [len(np.unique(demos.episodes)) for demos in (one, two, both)]
    assert counted[2] == counted[0] + counted[1]
    assert not set(both.episodes[:200]) & set(both.episodes[200:])
    assert np.array_equal(both.obs[200:], two.obs)
    assert len(both.transitions.final_obs) == counted[2]
    assert merge(one, without_transitions(two)).transitions is None
    assert both.n_distinct == 500
    assert merge(one, one).n_distinct == 200
    with pytest.raises(SortRLError, match="nothing to merge"):
        merge()
    other = Demonstrations("Acrobot-v1", one.obs, one.actions, one.logits, one.episodes)
    with pytest.raises(SortRLError, match=r"different tasks: Acrobot-v1.*; CartPole-v1"):
        merge(one, other)


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.99])
def test_split_holds_out_whole_episodes(teacher, share):
    demos = collect(teacher, "CartPole-v1", CollectConfig(states=4000, exploration=1.0, random_actions=0.3))
    longest = np.unique(demos.episodes, return_counts=True)[1].max().item()
    train, held_out = split(demos, share, seed=1)
    assert len(train) + len(held_out) == len(demos)
    assert not set(train.episodes) & set(held_out.episodes)
    assert len(held_out) == pytest.approx(share * len(demos), abs=longest)
    assert replays(train) > 0
    assert replays(held_out) > 0
    assert same(train, split(demos, share, seed=1)[0])
    assert not same(train, split(demos, share, seed=2)[0])


def test_split_refuses_the_impossible(teacher):
    demos = collect(teacher, "CartPole-v1", CollectConfig(states=20, exploration=0.0))
    assert len(np.unique(demos.episodes)) == 1
    with pytest.raises(SortRLError, match="only one episode"):
        split(demos, 0.5)
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(SortRLError, match="strictly between 0 and 1"):
            split(demos, share)


# --- Minari -----------------------------------------------------------------------------------------------------------


def test_minari_export(teacher, tmp_path, monkeypatch):
    minari = pytest.importorskip("minari", reason="minari is not installed")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    demos = collect(teacher, "CartPole-v1", CollectConfig(states=400, exploration=1.0, random_actions=0.2))
    export_minari(demos, "cartpole/sortrl-test-v0")
    dataset = minari.load_dataset("cartpole/sortrl-test-v0")
    assert dataset.total_steps == 400
    assert dataset.total_episodes == len(np.unique(demos.episodes))
    assert dataset.env_spec.id == "CartPole-v1"
    for episode, number in zip(dataset.iterate_episodes(), np.unique(demos.episodes), strict=True):
        rows = demos.episodes == number
        assert np.array_equal(episode.observations[:-1], demos.obs[rows])
        assert np.array_equal(episode.actions, demos.transitions.played[rows])
        assert np.array_equal(episode.infos["teacher_action"][:-1], demos.actions[rows])
        assert episode.terminations[-1] or episode.truncations[-1]
        assert not episode.terminations[:-1].any()
        assert not episode.truncations[:-1].any()
    with pytest.raises(SortRLError, match="already exists"):
        export_minari(demos, "cartpole/sortrl-test-v0")
    with pytest.raises(SortRLError, match="lack transitions"):
        export_minari(without_transitions(demos), "cartpole/sortrl-test-v1")


def test_minari_both_ways(teacher, tmp_path, monkeypatch):
    """What was written is read again as it was; with a teacher, its own answers take the place of those that were kept."""
    pytest.importorskip("minari", reason="minari is not installed")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    demos = collect(teacher, "CartPole-v1", CollectConfig(states=300, exploration=1.0, random_actions=0.3))
    export_minari(demos, "cartpole/sortrl-both-v0")
    found = import_minari("cartpole/sortrl-both-v0")
    assert (found.actions != found.transitions.played).any(), "answers are the teacher's, not what was played"
    relabelled = import_minari("cartpole/sortrl-both-v0", teacher)
    for one in (found, relabelled):
        assert one.env_id == "CartPole-v1"
        np.testing.assert_array_equal(one.obs, demos.obs)
        np.testing.assert_array_equal(one.actions, demos.actions)
        np.testing.assert_array_equal(one.episodes, np.unique(demos.episodes, return_inverse=True)[1])
        for name in ("played", "rewards", "terminated", "truncated", "final_obs"):
            np.testing.assert_array_equal(getattr(one.transitions, name), getattr(demos.transitions, name))
    np.testing.assert_allclose(relabelled.logits, demos.logits, atol=1e-5)
    opposite = import_minari("cartpole/sortrl-both-v0", Opposite(teacher))
    assert (opposite.actions != demos.actions).mean() > 0.9
    student = distill(
        found, standardised(found.obs), DistillConfig(steps=60, width=16, depth=3, batch=64, rho=0.0)
    ).policy
    agreement = (student.predict(demos.obs)[0] == demos.actions).mean()
    assert agreement > np.bincount(demos.actions).max() / len(demos)


class Opposite:
    """Answers as another teacher would: the other way round."""

    def __init__(self, teacher):
        self.normalize, self._scores = teacher.normalize, teacher.scores

    def scores(self, unit):
        return -self._scores(unit)


def test_minari_datasets_of_others(tmp_path, monkeypatch):
    """Without a teacher's answers, those that were played are learned; what does not fit is refused."""
    minari = pytest.importorskip("minari", reason="minari is not installed")
    from minari.data_collector import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))

    def made(name, actions, **spaces):
        buffer = EpisodeBuffer(
            id=0,
            observations=np.zeros((4, 2), np.float32),
            actions=actions,
            rewards=[0.0] * 3,
            terminations=[False, False, True],
            truncations=[False] * 3,
        )
        minari.create_dataset_from_buffers(
            name, [buffer], observation_space=gym.spaces.Box(-1, 1, (2,)), algorithm_name="", description="", **spaces
        )

    made("own/plain-v0", np.array([0, 1, 1]), action_space=gym.spaces.Discrete(3))
    found = import_minari("own/plain-v0")
    assert found.actions.tolist() == [0, 1, 1]
    assert found.n_actions == 3
    assert found.transitions.terminated.tolist() == [False, False, True]
    made("own/numbers-v0", np.zeros((3, 1), np.float32), action_space=gym.spaces.Box(-1, 1, (1,)))
    with pytest.raises(SortRLError, match="expected a Box and Discrete"):
        import_minari("own/numbers-v0")
    with pytest.raises(SortRLError, match="No Minari dataset 'own/absent-v0' on this machine"):
        import_minari("own/absent-v0")


def test_minari_export_names_its_extra(teacher, monkeypatch):
    monkeypatch.setitem(sys.modules, "minari", None)
    demos = collect(teacher, "CartPole-v1", CollectConfig(states=20))
    with pytest.raises(MissingDependency, match=r"pip install 'sortrl\[minari\]'"):
        export_minari(demos, "cartpole/sortrl-test-v0")


def test_episodes_begin_where_the_fewest_began():
    """Thirty starts of an Atari game: drawn at random, thirty episodes would meet about nineteen of them."""
    pytest.importorskip("ale_py")
    idle = load_teacher(lambda obs: np.zeros(len(obs), int), env_id="sortrl/Pong84-v0")
    met = {}
    for spread in (False, True):
        config = CollectConfig(states=40, exploration=0.0, spread=spread, slots=1)
        with EnvSlots("sortrl/Pong84-v0", 1, max_episode_steps=1) as slots:
            recorder = _Recorder(idle, describe("sortrl/Pong84-v0"), slots, config, seed=0)
            while recorder.n_states < config.states:
                recorder.play(None)
        met[spread] = len(np.unique(recorder.finish("sortrl/Pong84-v0").transitions.starts))
    assert met[False] < 26
    assert met[True] >= 28
