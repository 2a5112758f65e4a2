"""A memory is the nearest neighbour in l_inf, its certificate is that of the nearest neighbour, and it plays the best it saw."""

from __future__ import annotations

import json
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch

import sortrl
from sortrl import attacks
from sortrl.baselines.memory.boxes import Range, cover
from sortrl.baselines.memory.compact import compact
from sortrl.baselines.memory.remember import best_episodes, remember
from sortrl.certify import save_certificates
from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.core.records import Demonstrations, Transitions
from sortrl.data.collect import CollectConfig
from sortrl.evaluate.returns import evaluate
from sortrl.runs.zoo import publish
from sortrl.verify import verify

SIZE = 6


class Corridor(gym.Env):
    """A bright square, to be moved to the right end of its row; four starts, dark or bright ground, no chance."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (1, SIZE, SIZE), np.uint8)
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        start = int(self.np_random.integers(4))
        self.row, self.column, self.ground, self.steps = 2 * (start % 2), 1, 90 * (start // 2), 0
        return self.picture(), {}

    def step(self, action):
        self.column = int(np.clip(self.column + int(action) - 1, 0, SIZE - 1))
        self.steps += 1
        won, lost = self.column == SIZE - 1, self.column == 0
        return self.picture(), float(won), won or lost, self.steps >= 40, {}

    def picture(self):
        frame = np.full((1, SIZE, SIZE), self.ground, np.uint8)
        frame[0, self.row, self.column] = 255
        return frame


gym.register("Corridor-v0", Corridor)


def demonstrations(episodes: list[tuple[list[int], list[int], float]]) -> Demonstrations:
    """Episodes as (states, actions, return); a state is a number, shown as a vector of two."""
    states = np.concatenate([states for states, _, _ in episodes])
    played = np.concatenate([actions for _, actions, _ in episodes])
    numbers = np.repeat(np.arange(len(episodes)), [len(states) for states, _, _ in episodes])
    last = np.append(np.diff(numbers) > 0, True)
    rewards = np.zeros(len(states), np.float32)
    rewards[last] = [total for _, _, total in episodes]
    obs = np.stack([states, -states], 1).astype(np.float32)
    after = Transitions(played, rewards, last, np.zeros(len(states), bool), np.zeros((len(episodes), 2), np.float32))
    return Demonstrations("Any-v0", obs, np.zeros_like(played), np.zeros((len(states), 3), np.float32), numbers, after)


def kept(best: Demonstrations) -> dict[int, int]:
    return dict(zip(best.obs[:, 0].astype(int).tolist(), best.actions.tolist(), strict=True))


def test_the_best_episode_of_each_start_is_kept_and_of_the_best_the_shortest():
    slow = ([0, 1, 2, 3], [0, 0, 0, 1], 5.0)
    short = ([0, 4, 3], [1, 0, 1], 5.0)
    poor = ([0, 5], [2, 2], 1.0)
    other = ([7, 8], [1, 2], 0.0)
    assert kept(best_episodes(demonstrations([slow, poor, short, other, other]))) == {0: 1, 4: 0, 3: 1, 7: 1, 8: 2}


def test_an_episode_that_was_cut_off_is_better_than_none():
    cut, ended = ([0, 1], [2, 2], 9.0), ([0, 5, 6], [1, 1, 1], 0.0)
    demos = demonstrations([cut, ended, ([7], [1], 0.0), ([7], [1], 0.0)])
    demos.transitions.terminated[[1, 5, 6]] = False
    assert kept(best_episodes(demos)) == {0: 1, 5: 1, 6: 1, 7: 1}


def test_an_episode_that_contradicts_itself_or_another_is_passed_over():
    waits = ([0, 0, 1], [2, 1, 1], 5.0)  # two answers to one state
    longer = ([0, 2, 3, 1], [0, 0, 0, 1], 5.0)
    contradicts = ([7, 3], [1, 2], 5.0)  # state 3 has been answered with 0
    agrees = ([7, 8, 3], [1, 1, 0], 5.0)
    best = kept(best_episodes(demonstrations([waits, longer, contradicts, agrees])))
    assert best == {0: 0, 2: 0, 3: 0, 1: 1, 7: 1, 8: 1}
    # With no other to choose, the last answer counts.
    assert kept(best_episodes(demonstrations([waits, waits])))[0] == 1


def test_starts_that_look_alike_are_told_apart_by_their_numbers():
    """As in Pong, where the first pictures do not show how long the game has been running."""
    episodes = [([0, 1], [0, 1], 1.0), ([0, 2], [0, 1], 2.0), ([0, 1], [0, 1], 1.0), ([0, 2], [0, 1], 2.0)]
    demos = demonstrations(episodes)
    assert kept(best_episodes(demos)) == {0: 0, 2: 1}, "one start, as far as can be seen"
    after = replace(demos.transitions, starts=np.array([4, 9, 4, 9]))
    assert kept(best_episodes(replace(demos, transitions=after))) == {0: 0, 1: 1, 2: 1}
    with pytest.raises(SortRLError, match="starts has shape"):
        replace(after, starts=np.array([4, 9]))


def test_a_lucky_episode_does_not_spoil_other_starts():
    """The teacher answers 0 everywhere (see ``demonstrations``); its own episodes agree with each other."""
    lucky = ([1, 5], [2, 2], 9.0)  # contradicts the greedy play of the other start in state 5
    greedy = ([1, 6], [0, 0], 1.0)
    other = ([3, 5], [0, 0], 4.0)
    better = ([3, 7], [1, 1], 8.0)  # contradicts nobody
    assert kept(best_episodes(demonstrations([lucky, greedy, other, other]))) == {1: 0, 6: 0, 3: 0, 5: 0}
    assert kept(best_episodes(demonstrations([lucky, greedy, other, better]))) == {1: 0, 6: 0, 3: 1, 7: 1}


def test_starts_that_are_never_met_again_are_refused():
    with pytest.raises(SortRLError, match="3 episodes from 3 different starts"):
        best_episodes(demonstrations([([k, 10 + k], [0, 1], 1.0) for k in range(3)]))


@pytest.mark.parametrize("pool", [1, 2])
def test_a_memory_is_the_nearest_neighbour_and_so_is_its_certificate(pool):
    rng = np.random.default_rng(0)
    obs = rng.integers(0, 256, (60, 3, 8, 8)).astype(np.uint8)
    actions = rng.integers(0, 4, 60)
    demos = Demonstrations("Any-v0", obs, actions, np.zeros((60, 4), np.float32), np.zeros(60, np.int64))
    policy = remember(demos, Normalizer(np.zeros((3, 8, 8)), np.full((3, 8, 8), 255.0)), pool)
    asked = np.clip(obs[rng.integers(0, 60, 200)] + rng.integers(-60, 61, (200, 3, 8, 8)), 0, 255).astype(np.uint8)

    def seen(images):
        return policy.front(policy.normalize(images)).flatten(1).double().numpy()

    distance = np.abs(seen(asked)[:, None] - seen(obs)[None]).max(2)
    per_action = np.stack([distance[:, actions == a].min(1) for a in range(4)], 1)
    nearest, runner_up = np.sort(per_action, 1)[:, :2].T
    certificate = policy.certify(asked)
    assert (certificate.action == per_action.argmin(1)).all()
    assert (certificate.radius <= (runner_up - nearest) / 2).all()
    np.testing.assert_allclose(certificate.radius, (runner_up - nearest) / 2, atol=1e-5)


def pictures(n: int = 300, size: int = 12) -> Demonstrations:
    """A bright square on a dim, unsteady ground; the answer is the quarter in which it is."""
    rng = np.random.default_rng(0)
    obs = rng.integers(0, 40, (n, 1, size, size)).astype(np.uint8)
    where = rng.integers(0, size - 1, (n, 2))
    for picture, (row, column) in zip(obs, where, strict=True):
        picture[0, row : row + 2, column : column + 2] = 200
    actions = 2 * (where[:, 0] >= size // 2) + (where[:, 1] >= size // 2)
    return Demonstrations("Any-v0", obs, actions, np.zeros((n, 4), np.float32), np.zeros(n, np.int64))


@pytest.mark.parametrize(("pool", "crop"), [(1, (0, 0, 0, 0)), (1, (0, 0, 1, 0)), (2, (0, 0, 0, 0))])
@pytest.mark.parametrize("size", [10**9, 1])
def test_a_small_memory_answers_every_state_as_the_whole_one_and_keeps_its_radius(pool, crop, size):
    demos = pictures()
    normalizer = Normalizer.from_pixels((1, 12, 12))
    small, whole = compact(demos, normalizer, pool, crop, size=size), remember(demos, normalizer, pool, crop)
    assert (small.policy.predict(demos.obs)[0] == whole.predict(demos.obs)[0]).all()
    before, after = whole.certify(demos.obs).radius, small.policy.certify(demos.obs).radius
    assert (after > np.minimum(before, small.eps_kept) - 1.1e-3).all()
    assert (after > 0.03).any(), "some are certified"
    assert small.policy.parameter_count < whole.parameter_count
    assert small.eps_kept > 20 / 255 if size > 1 else small.eps_kept < 20 / 255
    shares = small.to_json()
    assert len(shares["certified_before"]) == len(shares["certified_after"]) == len(shares["eps"])


def test_a_small_memory_is_certified_soundly_also_on_pixels_that_it_ignores(tmp_path):
    demos = pictures()
    policy = compact(demos, Normalizer.from_pixels((1, 12, 12))).policy
    assert 0 < len(policy.config.pixels) < 144
    unit = policy.normalize(demos.obs)
    certificate = policy.certify_unit(unit)
    assert (certificate.radius > 5 / 255).mean() > 0.5
    radius = torch.from_numpy(certificate.radius).float()[:, None, None, None] * (1 - 1e-6)
    generator = torch.Generator().manual_seed(0)
    memories = policy.layers[0].weight
    for trial in range(30):
        if trial % 3 == 0:  # towards some memory, everywhere
            goal = unit.flatten(1).clone()
            goal[:, list(policy.config.pixels)] = memories[
                torch.randint(len(memories), (len(unit),), generator=generator)
            ]
            direction = (goal.view_as(unit) - unit).sign()
        elif trial % 3 == 1:
            direction = torch.randint(0, 2, unit.shape, generator=generator) * 2.0 - 1.0
        else:
            direction = 2 * torch.rand(unit.shape, generator=generator) - 1
        assert (policy.scores(unit + radius * direction).argmax(1).numpy() == certificate.action).all()
    policy.save(tmp_path)
    save_certificates(tmp_path / "c.safetensors", policy, unit, certificate, tmp_path)
    verdict = verify(tmp_path / "c.safetensors")
    assert verdict.ok, verdict.failures
    again = sortrl.load(tmp_path)
    assert torch.equal(again.scores(unit), policy.scores(unit))


def test_boxes_hold_many_states_and_stay_away_from_the_others():
    """Two far clouds need one box each, whatever their size; a state among those of the other action gets its own."""
    rng = np.random.default_rng(0)
    states = torch.from_numpy(np.concatenate([rng.uniform(0, 0.2, (200, 5)), rng.uniform(0.8, 1, (200, 5))])).float()
    actions = torch.arange(2).repeat_interleave(200)
    numbers = Range(0.5, 0.5)
    assert len(cover(states, actions, numbers, 0.2)) == 2
    assert cover(states, actions, numbers, 0.2, most=1) is None
    actions[7] = 1
    boxes = cover(states, actions, numbers, 0.02)
    assert len(boxes) < 100
    distance = boxes.distances(states)
    own = boxes.actions[:, None] == actions
    assert ((distance <= numbers.lost) & own).any(0).all(), "every state is in a box of its action"
    apart = torch.where(actions[:, None] == actions, torch.inf, torch.cdist(states, states, p=torch.inf)).amin(1)
    others = distance.masked_fill(own, torch.inf).amin(0)
    assert (others >= apart.clamp(max=0.02) - numbers.lost - 1e-5).all()


def test_a_memory_of_a_clumsy_teacher_plays_better_than_it_and_is_certified(tmp_path):
    def wanders(obs):
        """Back and forth, and seldom on."""
        return (obs.reshape(len(obs), -1).argmax(1) % 2) * 2

    changes = {"collect": CollectConfig(states=4000, random_actions=0.9, exploration=1.0)}
    policy = sortrl.robustify(
        wanders, "Corridor-v0", 0.05, preset="memory", out=tmp_path, episodes=8, suite=(), **changes
    )
    result = evaluate(policy, "Corridor-v0", attacks.PGD(10), 0.05, episodes=12, seed=3)
    assert result.mean == 1.0
    assert result.lengths.tolist() == [4] * 12  # the shortest way
    assert (result.radii > 0.05).all()
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["config"]["remember"] is True
    assert "<html" in (tmp_path / "report.html").read_text()
    again = sortrl.load(tmp_path)
    states = torch.rand(5, 1, SIZE, SIZE)
    assert torch.equal(again.scores(states), policy.scores(states))
    assert results["memory"]["pixels"] == results["policy"]["pixels"] == len(policy.config.pixels)
    entry = publish(tmp_path, "corridor", tmp_path / "zoo")
    assert json.loads((entry / "card.json").read_text())["half_precision_agreement"] == 1.0
    assert torch.equal(sortrl.load(entry).scores(states), policy.scores(states)), "nothing is lost in half precision"
