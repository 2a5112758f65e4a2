"""Attacks stay in their budget, certified actions never change, and returns are those of a fixed list of episodes."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from helpers import balancer
from sortrl import attacks
from sortrl.certify import certificate_summary, certified_shares, fully_certified_episodes, proven_mean
from sortrl.core.errors import SortRLError
from sortrl.data.collect import CollectConfig, collect
from sortrl.envs import describe
from sortrl.evaluate.returns import episode_seeds, evaluate, evaluate_curve, valid_range
from sortrl.nets import SortPolicy
from sortrl.teachers import load_teacher

ENV = "CartPole-v1"


@pytest.fixture(scope="module")
def states(student):
    return student.normalize(collect(balancer(), ENV, CollectConfig(states=1500), seed=9).obs)


@pytest.mark.parametrize("attack", [attacks.PGD(10), attacks.FGSM(), attacks.UniformNoise()], ids=lambda a: a.name)
@pytest.mark.parametrize("eps", [0.0, 0.05, 0.5])
def test_attacks_stay_in_their_budget_and_judge_after_projection(student, states, attack, eps):
    low, high = valid_range(student, describe(ENV))
    result = attack(student, states, eps, low, high)
    assert float((result.perturbed.double() - states.double()).abs().max()) <= eps
    assert (result.perturbed <= torch.maximum(high, states)).all()
    assert (result.perturbed >= torch.minimum(low, states)).all()
    assert (student.scores(result.perturbed).argmax(1).numpy() == result.action).all()
    assert (result.changed == (result.clean_action != result.action)).all()


def test_pgd_beats_noise_and_grows_with_eps(student, states):
    def changed(attack, eps):
        return attack(student, states, eps).changed.mean()

    shares = [changed(attacks.PGD(10), eps) for eps in (0.02, 0.1, 0.5)]
    assert shares == sorted(shares)
    assert shares[-1] > 0.1
    assert changed(attacks.PGD(10), 0.1) > changed(attacks.UniformNoise(), 0.1)


def test_no_attack_changes_a_certified_action(student, states):
    cert = student.certify_unit(states)
    checked = 0
    for eps in (0.02, 0.05, 0.1, 0.2):
        inside = torch.from_numpy(cert.certified_at(eps))
        checked += int(inside.sum())
        for attack in (attacks.PGD(10), attacks.PGD(30), attacks.FGSM(), attacks.UniformNoise()):
            assert not attack(student, states[inside], eps).changed.any()
    assert checked > 1000


def test_a_planted_unsound_certificate_is_caught(student, states):
    radius = torch.from_numpy(student.certify_unit(states).radius)
    claimed = 0.3
    lying = radius < claimed  # states whose true radius is smaller than what is claimed here
    assert attacks.PGD(10)(student, states[lying], claimed).changed.any()


def test_skipping_certified_states_changes_nothing_but_time(student):
    fast, slow = (
        evaluate(student, ENV, attacks.PGD(10), 0.1, episodes=4, seed=1, skip_certified=skip) for skip in (True, False)
    )
    assert (fast.returns == slow.returns).all()
    assert fast.changed_share == slow.changed_share
    assert fast.queries < slow.queries


def test_an_episode_certified_at_every_step_has_the_same_return_under_any_attack(student):
    clean = evaluate(student, ENV, episodes=12, seed=2)
    parts = np.split(clean.radii, np.cumsum(clean.lengths)[:-1])
    eps = 0.9 * float(np.median([part.min() for part in parts]))
    certified = np.array([bool((part > eps).all()) for part in parts])
    assert certified.sum() >= 3, "the test needs some fully certified episodes"
    assert fully_certified_episodes(clean, eps) == certified.mean()
    for attack in (attacks.PGD(10), attacks.UniformNoise()):
        attacked = evaluate(student, ENV, attack, eps, episodes=12, seed=2, skip_certified=False)
        assert (attacked.returns[certified] == clean.returns[certified]).all()
        assert (attacked.lengths[certified] == clean.lengths[certified]).all()


def test_episodes_are_fixed_paired_and_complete(student):
    few, many = (evaluate(student, ENV, episodes=6, seed=3, slots=slots) for slots in (2, 6))
    assert (few.returns == many.returns).all(), "the number of slots must not matter"
    assert few.seeds == episode_seeds(3, 6) == evaluate(balancer(), ENV, episodes=6, seed=3).seeds
    assert set(episode_seeds(3, 50)).isdisjoint(episode_seeds(4, 50))
    row = few.to_json()
    assert row["episodes"] == 6
    assert row["mean"] == pytest.approx(np.mean(few.returns))
    assert few.sem == pytest.approx(few.std / np.sqrt(6))


class Waiting(gym.Env):
    """Shows 4 numbers that change every third step, always in the same array, and the same ones again from the middle of the
    episode on; the reward is the action."""

    observation_space = gym.spaces.Box(-5, 5, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.seen, self.shown = 0, np.zeros(4, np.float32), self.np_random.normal(size=(5, 4))
        return self._look(), {}

    def step(self, action):
        self.time += 1
        return self._look(), float(action), self.time == 30, False, {}

    def _look(self):
        self.seen[:] = self.shown[self.time // 3 % 5]
        return self.seen


@pytest.mark.parametrize("attack", [None, attacks.PGD(3), attacks.UniformNoise()], ids=["none", "PGD", "noise"])
def test_a_game_that_stands_still_or_goes_in_circles_is_asked_once(attack):
    gym.register("sortrl-test/Waiting-v0", Waiting)
    try:
        torch.manual_seed(0)
        policy = SortPolicy((4,), 2, width=16, depth=2).requires_grad_(False)
        policy.calibrate(torch.randn(200, 4))
        policy.bias.add_(policy.scores(torch.randn(200, 4)).mean(0))
        asked = []

        class Counted:
            """The same policy, but nobody knows that it answers the same question in the same way."""

            obs_shape, n_actions, normalize = policy.obs_shape, 2, policy.normalize

            def scores(self, unit):
                asked.append(len(unit))
                return policy.scores(unit)

        arguments = ("sortrl-test/Waiting-v0", attack, 0.3, 4)
        known, unknown = evaluate(policy, *arguments, skip_certified=False), evaluate(Counted(), *arguments)
        if attack is None or isinstance(attack, attacks.PGD):
            assert known.returns.tolist() == unknown.returns.tolist()
            assert known.changed_share == unknown.changed_share
            assert 0 < known.returns.mean() < 30
        assert len(known.radii) == 4 * 30, "one radius for every step, also where nothing was computed"
        if isinstance(attack, attacks.PGD):
            assert known.gradients * 6 == unknown.gradients
            assert known.attacked_share == 1.0
        if isinstance(attack, attacks.UniformNoise):
            assert known.queries == unknown.queries, "what is random is drawn anew every time"
    finally:
        del gym.registry["sortrl-test/Waiting-v0"]


def test_certificate_summary(student):
    clean = evaluate(student, ENV, episodes=4, seed=0)
    summary = certificate_summary(clean, 0.05)
    assert summary["share"] == sorted(summary["share"], reverse=True)
    assert summary["share"][0] == certified_shares(clean, [0.0])[0]
    assert len(summary["episode"]["radii"]) == clean.lengths[0]
    with pytest.raises(SortRLError, match="no certificates"):
        certified_shares(evaluate(balancer(), ENV, episodes=1), [0.1])
    with pytest.raises(SortRLError, match="clean episodes"):
        certified_shares(evaluate(student, ENV, attacks.FGSM(), 0.1, episodes=1), [0.1])


BAD_INPUT = {
    "negative eps": (lambda s: evaluate(s, ENV, attacks.FGSM(), -1.0), r"eps is -1\.0"),
    "no episodes": (lambda s: evaluate(s, ENV, episodes=0), "episodes 0"),
    "attack eps": (lambda s: attacks.FGSM()(s, torch.zeros(1, 4), float("nan")), "eps is nan"),
    "attack shape": (lambda s: attacks.FGSM()(s, torch.zeros(1, 5), 0.1), r"expected \(batch, 4\)"),
    "unknown attack": (lambda s: attacks.by_name("pdg-10"), "Unknown attack 'pdg-10'"),
    "no steps": (lambda s: attacks.PGD(0), "steps=0"),
    "black box": (
        lambda s: attacks.FGSM()(load_teacher(lambda obs: np.zeros(len(obs), int), env_id=ENV), torch.zeros(1, 4), 0.1),
        "no gradient",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named(case, student):
    call, message = BAD_INPUT[case]
    with pytest.raises(SortRLError, match=message):
        call(student)


def test_a_curve_is_its_points_played_side_by_side(student):
    grid = (0.0, 0.05, 0.3)
    curve = evaluate_curve(student, ENV, attacks.PGD(10), grid, episodes=6, seed=4, slots=5)
    for eps, together in zip(grid, curve, strict=True):
        alone = evaluate(student, ENV, attacks.PGD(10), eps, episodes=6, seed=4)
        assert together.eps_unit == eps
        assert together.seeds == alone.seeds
        assert together.returns.tolist() == alone.returns.tolist()
        assert together.radii.tolist() == alone.radii.tolist()
        for count in ("attack", "changed_share", "attacked_share", "queries", "gradients"):
            assert getattr(together, count) == getattr(alone, count), count
    assert curve[0].attack == "none"
    assert curve[0].queries == 0
    assert curve[2].changed_share > curve[1].changed_share


@pytest.mark.parametrize("grid", [(), (0.1, 0.1), (0.1, -1.0), (float("nan"),)])
def test_a_curve_needs_sensible_points(student, grid):
    with pytest.raises(SortRLError, match="or several that differ"):
        evaluate_curve(student, ENV, attacks.PGD(10), grid)


def test_playing_leaves_the_number_of_threads_alone(student):
    before = torch.get_num_threads()
    evaluate(student, ENV, episodes=1)
    assert torch.get_num_threads() == before


def test_the_proven_mean_counts_what_is_not_certified_as_lost(student):
    clean = evaluate(student, ENV, episodes=8, seed=4)
    parts = np.split(clean.radii, np.cumsum(clean.lengths)[:-1])
    least = np.sort([part.min() for part in parts])
    between = float(least[3:5].mean())  # half of the episodes have every radius above it
    expected = [total if part.min() > between else -7.0 for total, part in zip(clean.returns, parts, strict=True)]
    assert proven_mean(clean, between, least_return=-7.0) == pytest.approx(np.mean(expected))
    assert proven_mean(clean, 0.0, least_return=-7.0) == clean.mean
    assert proven_mean(clean, 99.0, least_return=-7.0) == -7.0


class Sideways(attacks.Attack):
    """An attack of a user's own: a plain class."""

    name = "sideways"

    def __init__(self, share=1.0):
        self.share, self._private = share, object()

    def search(self, target):
        return target.unit + self.share * target.eps


def test_what_the_command_line_takes_python_takes_too():
    module = torch.nn.Linear(4, 2)
    named = evaluate(module, ENV, "pgd-10", eps=0.1, episodes=2)
    built = evaluate(load_teacher(module, ENV), lambda: gym.make(ENV), attacks.PGD(10), eps=0.1, episodes=2)
    assert named.returns.tolist() == built.returns.tolist()
    assert named.attack == "PGD-10"
    with pytest.raises(SortRLError, match="Did you mean pgd-10"):
        evaluate(module, ENV, "pdg-10", eps=0.1)


def test_a_model_of_stable_baselines_is_a_policy():
    from stable_baselines3 import PPO

    model = PPO("MlpPolicy", ENV, n_steps=8, batch_size=8, device="cpu", seed=0)
    assert (
        evaluate(model, ENV, episodes=2).returns.tolist()
        == evaluate(load_teacher(model), ENV, episodes=2).returns.tolist()
    )


def test_an_attack_of_ones_own_needs_no_dataclass(student):
    result = evaluate(student, ENV, Sideways(0.5), eps=0.3, episodes=2)
    assert (result.attack, result.to_json()["attack_parameters"]) == ("sideways", {"share": 0.5})
    named = attacks.by_name(f"{__name__}:Sideways")
    assert evaluate(student, ENV, named, eps=0.3, episodes=2).changed_share > 0
    with pytest.raises(SortRLError, match=r"is NoneType, expected a subclass of sortrl\.attacks\.Attack"):
        attacks.by_name(f"{__name__}:Absent")
    with pytest.raises(SortRLError, match="cannot be made without arguments"):
        attacks.by_name("sortrl.attacks:MinQ")


def test_a_bar_is_shown_on_a_terminal_and_a_part_of_a_stage_shows_none(monkeypatch, capsys):
    from sortrl.core import progress

    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    evaluate(balancer(), ENV, episodes=1)
    assert f"Playing {ENV}" in capsys.readouterr().err
    with progress.stage("The whole"):
        evaluate(balancer(), ENV, episodes=1)
    shown = capsys.readouterr().err
    assert "The whole" in shown
    assert "Playing" not in shown
