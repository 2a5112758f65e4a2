"""Robust training with interval bounds: bounds are hunted for violations, losses compared with their formulas, trainings resumed."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import sortrl
from sortrl import cli
from sortrl.attacks import PGD
from sortrl.baselines.interval_q import training
from sortrl.baselines.interval_q.acr import acr
from sortrl.baselines.interval_q.adversarial import AdversarialDQN, ri_fgsm
from sortrl.baselines.interval_q.bcl import Curriculum, bootstrapped
from sortrl.baselines.interval_q.car import CarDQN
from sortrl.baselines.interval_q.making import NAMES, make_baseline
from sortrl.baselines.interval_q.network import Dueling, Valid, as_teacher, box, overlap, same_network
from sortrl.baselines.interval_q.radial import RadialDQN
from sortrl.baselines.interval_q.radial_ppo import RadialPPOConfig, radial_ppo, worst_log_probs
from sortrl.baselines.interval_q.rs_dqn import RSDQN
from sortrl.baselines.interval_q.sa_dqn import SADQN, least_lead, searched
from sortrl.baselines.interval_q.starting import DistillationConfig, distilled, start_from
from sortrl.baselines.interval_q.training import Batch, Moment, Networks, TrainingConfig, anchored, fine_tune, td_loss
from sortrl.baselines.interval_q.wocar import WocarDQN, reachable
from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.evaluate.returns import evaluate
from sortrl.nets import IntervalHead, IntervalPolicy, SortPolicy, zoo
from sortrl.nets.architecture import Architecture
from sortrl.teachers import Teacher

METHODS = [SADQN("convex"), SADQN("pgd"), RadialDQN(), WocarDQN(), CarDQN(), RSDQN(), AdversarialDQN()]
FAST = TrainingConfig(0.05, decisions=600, learning_starts=100, batch=16, buffer=500, tests=2, test_episodes=2)


def head(shape: str, seed: int = 0) -> tuple[IntervalHead, torch.Tensor]:
    """A network and states for it."""
    torch.manual_seed(seed)
    if shape == "mlp":
        return IntervalHead(5, (12, 8), 3), torch.randn(20, 5)
    return IntervalHead((2, 6, 6), (10,), 3, ((4, 3, 1),), norm=shape == "norm"), torch.rand(20, 2, 6, 6)


def violations(bounds, network: IntervalHead, states: torch.Tensor, eps: float) -> int:
    """How many scores of sampled points of the box, its corners among them, lie outside the bounds claimed."""
    lower, upper = bounds(states - eps, states + eps)
    found = 0
    for draw in range(200):
        moved = torch.rand_like(states) * 2 - 1
        scores = network(states + eps * (moved.sign() if draw % 2 else moved))
        found += int(((scores < lower - 1e-5) | (scores > upper + 1e-5)).sum())
    return found


@pytest.mark.parametrize("shape", ["mlp", "cnn", "norm"])
@pytest.mark.parametrize("eps", [0.0, 0.02, 0.3])
def test_bounds_hold_at_sampled_points_and_are_tight_without_eps(shape, eps):
    network, states = head(shape)
    assert violations(network.bounds_over, network, states, eps) == 0
    lower, upper = network.bounds_over(states - eps, states + eps)
    if eps == 0:
        torch.testing.assert_close(lower, network(states))
        torch.testing.assert_close(upper, network(states))
    else:
        assert bool((upper > lower).all())


def test_a_wrong_bound_is_caught():
    network, states = head("mlp")

    def planted(lo, hi):  # as if weights had no signs: corners in, corners out
        return torch.minimum(network(lo), network(hi)), torch.maximum(network(lo), network(hi))

    assert violations(planted, network, states, 0.3) > 0

    def narrow(lo, hi):
        lower, upper = network.bounds_over(lo, hi)
        return lower + 0.25 * (upper - lower), upper - 0.25 * (upper - lower)

    linear = IntervalHead(5, (), 3)  # whose bounds are attained
    assert violations(linear.bounds_over, linear, states, 0.3) == 0
    network = linear
    assert violations(narrow, linear, states, 0.3) > 0


@pytest.mark.parametrize("shape", ["mlp", "cnn", "norm"])
def test_gradients_of_bounds_are_those_of_finite_differences(shape):
    network, states = head(shape)
    network, states = network.double(), states.double()[:4]
    weight = network.layers[0].weight
    action = network(states).argmax(1)
    for value in (
        lambda: network.bounds_over(*box(states, 0.05))[0].sum(),
        lambda: network.bounds_over(*box(states, 0.05))[1].sum(),
        lambda: network.leads_over(*box(states, 0.05), action).clamp(max=100).sum(),
    ):
        (gradient,) = torch.autograd.grad(value(), weight)
        place, step = int(gradient.abs().argmax()), 1e-6
        with torch.no_grad():
            flat = weight.view(-1)
            kept = float(flat[place])
            flat[place] = kept + step
            above = float(value())
            flat[place] = kept - step
            below = float(value())
            flat[place] = kept
        assert (above - below) / (2 * step) == pytest.approx(float(gradient.view(-1)[place]), rel=1e-4)


def test_dueling_values_are_those_they_come_from_and_their_bounds_hold():
    network, states = head("mlp")
    q = Dueling.of(network, 3.0)
    torch.testing.assert_close(q(states), 3.0 * network(states), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(q.advantage(states).mean(1), torch.zeros(20), rtol=0, atol=1e-5)
    with torch.no_grad():
        q.advantage.layers[-1].bias.add_(torch.tensor([5.0, 0.0, 1.0]))  # a common part of all actions is no advantage
    value = q.value(states)

    def of_advantages(x):  # the value is that of the true states
        advantages = q.advantage(x)
        return value + advantages - advantages.mean(1, keepdim=True)

    def bounds(lo, hi):
        return q.bounds_over(states, lo, hi)

    assert violations(bounds, of_advantages, states, 0.2) == 0

    def planted(lo, hi):  # as if all actions' means were that of the true states
        lower, upper = q.advantage.bounds_over(lo, hi)
        mean = q.advantage(states).mean(1, keepdim=True)
        return value + lower - mean + 0.4 * (upper - lower), value + upper - mean - 0.4 * (upper - lower)

    assert violations(planted, of_advantages, states, 0.2) > 0


def test_the_anchor_asks_for_a_lead_of_one_for_the_starts_action():
    start, states = head("mlp")
    wanted = start(states).argmax(1)
    other = torch.nn.functional.one_hot((wanted + 1) % 3, 3).float()
    own = torch.nn.functional.one_hot(wanted, 3).float()
    for scores, expected in ((own, 0.0), (2 * own, 0.0), (0.25 * own, 0.75), (other, 2.0)):
        assert float(anchored(lambda _, s=scores: s, start, states)) == pytest.approx(expected)


def setting(method, eps: float = 0.1):
    """Networks, targets, a batch and a moment for a loss."""
    start, states = head("mlp", seed=3)
    nets = Networks({name: copy.deepcopy(net) for name, net in method.networks(Dueling.of(start)).items()})
    torch.manual_seed(4)
    batch = Batch(states, torch.randint(3, (20,)), torch.rand(20), torch.randn(20, 5), (torch.rand(20) < 0.8).float())
    now = Moment(eps, 1.0, 0.9, Valid(), torch.Generator().manual_seed(0))
    return nets, copy.deepcopy(nets), batch, now


@pytest.mark.parametrize(
    "method", METHODS, ids=lambda method: f"{type(method).__name__}-{getattr(method, 'bound', '')}"
)
def test_every_loss_trains_what_it_should(method):
    nets, target, batch, now = setting(method)
    loss = method.loss(nets, target, batch, now)
    loss.backward()
    assert math.isfinite(float(loss.detach()))
    for name, net in nets.items():
        assert all(p.grad is not None and bool((p.grad != 0).any()) for p in net.parameters()), name
    assert all(parameter.grad is None for parameter in target.parameters())


def test_sa_dqn_is_its_formula_and_the_search_stays_below_the_bound():
    for bound in ("convex", "pgd"):
        method = SADQN(bound, kappa=0.3)
        nets, target, batch, now = setting(method)
        chosen = nets["q"](batch.states).argmax(1)
        usual = td_loss(nets, target, batch, now.gamma)
        proven = nets["q"].advantage.leads_over(*box(batch.states, now.eps), chosen).amin(1)
        if bound == "convex":
            expected = usual + 0.3 * (-proven.clamp(max=1.0)).mean()
            torch.testing.assert_close(method.loss(nets, target, batch, now), expected)
        lo, hi = box(batch.states, now.eps)
        found = searched(nets["q"].advantage, batch.states, lo, hi, chosen, 5, now.generator)
        assert bool(((found >= lo) & (found <= hi)).all())
        least = least_lead(nets["q"](found), chosen)
        assert bool((least >= proven - 1e-5).all())
        assert bool((least <= least_lead(nets["q"](batch.states), chosen) + 1e-6).float().mean() > 0.9)
    nets, target, batch, now = setting(SADQN(), eps=0.0)
    chosen = nets["q"](batch.states).argmax(1)
    lead = least_lead(nets["q"](batch.states), chosen).clamp(max=1.0)
    expected = td_loss(nets, target, batch, now.gamma) - 0.005 * lead.mean()
    torch.testing.assert_close(SADQN().loss(nets, target, batch, now), expected)


def test_radial_is_its_formula():
    nets, target, batch, now = setting(RadialDQN())
    q = nets["q"]
    lower, upper = (bound.detach() for bound in q.advantage.bounds_over(*box(batch.states, now.eps)))
    total = 0.0
    for i, played in enumerate(batch.actions.tolist()):
        values = q(batch.states)[i].detach()
        for action in range(3):
            gap = max(0.0, float(values[played] - values[action]))
            total += gap * max(0.0, float(upper[i, action] - lower[i, played]) + gap / 2)
    torch.testing.assert_close(
        float(overlap(q, batch.states, batch.actions, now.eps).sum()), total, rtol=1e-4, atol=1e-4
    )
    expected = 0.8 * td_loss(nets, target, batch, now.gamma) + 0.2 * total / 20
    torch.testing.assert_close(RadialDQN().loss(nets, target, batch, now), expected, rtol=1e-4, atol=1e-4)


def test_car_weighs_the_worst_error_of_the_box_and_is_no_less_than_the_clean_one():
    nets, target, batch, now = setting(CarDQN())
    clean = CarDQN().loss(nets, target, batch, now._replace(eps=0.0))
    assert float(CarDQN().loss(nets, target, batch, now)) > float(clean)
    hot = CarDQN(temperature=1e6).loss(nets, target, batch, now._replace(eps=0.0))
    torch.testing.assert_close(hot, td_loss(nets, target, batch, now.gamma), rtol=1e-4, atol=1e-5)
    assert float(clean) > float(hot)


def test_wocar_reaches_every_action_that_an_attack_finds():
    network, states = head("mlp")
    possible = reachable(network, states, 0.3)
    for _ in range(200):
        played = network(states + 0.3 * (torch.rand_like(states) * 2 - 1).sign()).argmax(1)
        assert bool(possible.gather(1, played[:, None]).all())
    single = reachable(network, states, 0.0)
    assert bool((single.sum(1) == 1).all())
    assert bool((single.float().argmax(1) == network(states).argmax(1)).all())
    assert not bool(reachable(network, states, 1e-3).all())


def test_rs_dqn_punishes_the_worst_case_alone_when_told_to():
    nets, target, batch, now = setting(RSDQN(share=1.0))
    usual = td_loss(nets, target, batch, now.gamma)
    chosen = nets["q"](batch.states).argmax(1)
    at_zero = RSDQN(share=1.0).loss(nets, target, batch, now._replace(eps=0.0)) - usual
    expected = torch.nn.functional.cross_entropy(nets.head("student")(batch.states), chosen)
    torch.testing.assert_close(at_zero, expected)
    assert float(RSDQN(share=1.0).loss(nets, target, batch, now) - usual) > float(expected)


def test_ri_fgsm_lowers_the_value_within_the_box_and_the_valid_range():
    nets, _, batch, now = setting(AdversarialDQN())
    q = nets["q"]
    now = now._replace(valid=Valid(torch.full((5,), -0.5), torch.full((5,), 0.5)))
    states = batch.states.clamp(-0.5, 0.5)
    shown = ri_fgsm(q, states, now)
    assert float((shown - states).abs().max()) <= now.eps + 1e-6
    assert float(shown.abs().max()) <= 0.5
    worth = [float((q(x).softmax(1) * q(x)).sum()) for x in (shown, states)]
    assert worth[0] < worth[1]


def test_worst_log_probs_bound_sampled_ones():
    network, states = head("mlp")
    actions, gains = torch.randint(3, (20,)), torch.where(torch.rand(20) < 0.5, -1.0, 1.0)
    worst = worst_log_probs(network, states, actions, gains, 0.2)
    assert bool((gains > 0).any())
    assert bool((gains < 0).any())
    for _ in range(100):
        moved = states + 0.2 * (torch.rand_like(states) * 2 - 1).sign()
        found = network(moved).log_softmax(1).gather(1, actions[:, None])[:, 0]
        assert bool(torch.where(gains > 0, found >= worst - 1e-5, found <= worst + 1e-5).all())
    clean = network(states).log_softmax(1).gather(1, actions[:, None])[:, 0]
    torch.testing.assert_close(worst_log_probs(network, states, actions, gains, 0.0), clean)


def test_smoothed_schedule_has_no_kink_and_reaches_its_ends():
    grid = np.linspace(0, 1, 1001)
    values = np.array([training.smoothed(float(x)) for x in grid])
    slopes = np.diff(values)
    assert values[0] == 0
    assert values[-1] == pytest.approx(1.0)
    assert (slopes >= 0).all()
    assert np.abs(np.diff(slopes)).max() < 0.02 * slopes.max()
    config = TrainingConfig(0.3, eps_from=0.1)
    assert config.eps_at(0) == 0.1
    assert config.eps_at(config.decisions) == pytest.approx(0.3)


def teacher_of(trunk: str, algorithm: str, activation: str = "ReLU") -> Teacher:
    torch.manual_seed(1)
    if trunk == "mlp":
        architecture = Architecture((4,), 2, (16, 16), activation)
        shape: tuple[int, ...] = (4,)
    elif trunk == "nature_cnn":
        shape = (1, 36, 36)
        architecture = Architecture(shape, 3, (), "ReLU", trunk, cnn_features=16, channels=(4, 4, 4))
    else:
        shape = (2, 8, 8)
        architecture = Architecture(shape, 3, (16,), "ReLU", "norm_cnn", channels=(4,))
    scale = torch.full(shape, 2.0)
    return Teacher(
        architecture.build(),
        Normalizer(torch.zeros(shape), scale),
        architecture.n_actions,
        "t",
        algorithm,
        architecture,
    )


@pytest.mark.parametrize("trunk", ["mlp", "nature_cnn", "norm_cnn"])
def test_a_q_teacher_is_taken_over_as_it_is(trunk):
    teacher = teacher_of(trunk, "dqn")
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    policy = same_network(teacher)
    assert policy is not None
    obs = torch.rand(7, *teacher.obs_shape)
    torch.testing.assert_close(
        policy.scores(policy.normalize(obs)), teacher.scores(teacher.normalize(obs)), rtol=1e-4, atol=1e-5
    )


def test_other_teachers_are_distilled_or_refused():
    assert same_network(teacher_of("mlp", "dqn", "Tanh")) is None
    config = DistillationConfig(decisions=800, updates=300, games=4)
    teacher = teacher_of("mlp", "ppo", "Tanh")
    policy, origin = start_from(teacher, "CartPole-v1", 0.9, config=config)
    assert origin == "distilled from its play"
    same = distilled(teacher, "CartPole-v1", 0.9, 0, config)
    states = torch.randn(50, 4)
    torch.testing.assert_close(policy.scores(states), same.scores(states))
    teacher = teacher_of("mlp", "callable")
    teacher.architecture = None
    with pytest.raises(SortRLError, match="not one of linear layers"):
        start_from(teacher, "CartPole-v1", 0.9, config=config)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("method", [RadialDQN(), RSDQN()], ids=["radial", "rs"])
def test_a_stopped_training_ends_with_the_same_weights(method, tmp_path):
    start = same_network(teacher_of("mlp", "dqn"))
    config = replace(FAST, decisions=6_000, every=8)

    def stop(row):
        if row["decision"] >= 5_500:
            raise Stopped

    whole = fine_tune(start, "CartPole-v1", method, config)
    with pytest.raises(Stopped):
        fine_tune(start, "CartPole-v1", method, config, tmp_path, progress=stop)
    rest = fine_tune(start, "CartPole-v1", method, config, tmp_path)
    again = fine_tune(start, "CartPole-v1", method, config, tmp_path)
    assert [row["decision"] for row in rest.history] == [row["decision"] for row in whole.history]
    for name, tensor in whole.policy.state_dict().items():
        assert torch.equal(tensor, rest.policy.state_dict()[name])
        assert torch.equal(tensor, again.policy.state_dict()[name])
    assert not torch.equal(whole.policy.head.layers[0].weight, start.head.layers[0].weight)
    with pytest.raises(SortRLError, match="other settings"):
        fine_tune(start, "CartPole-v1", method, replace(config, batch=17), tmp_path)


@pytest.fixture(scope="module")
def cartpole():
    """The zoo's teacher of CartPole, and action values of its play."""
    teacher = Teacher.load(zoo.entry("cartpole") / "teacher")
    return teacher, distilled(teacher, "CartPole-v1", 0.98, 0, DistillationConfig(decisions=4_000, updates=1_000))


def test_a_short_training_keeps_the_skill_and_makes_decisions_certain(cartpole):
    _, start = cartpole
    config = TrainingConfig(0.05, decisions=2_000, learning_starts=500, tests=1, test_episodes=4)
    agent = fine_tune(start, "CartPole-v1", RadialDQN(), config).policy
    before, after = (evaluate(one, "CartPole-v1", episodes=4, seed=3) for one in (start, agent))
    assert before.mean > 450, "the start is of no use, so nothing is kept"
    assert after.mean > 450
    assert (after.radii > 0.05).mean() > (before.radii > 0.05).mean() + 0.2
    assert evaluate(agent, "CartPole-v1", PGD(10), 0.05, episodes=4, seed=3).mean > 400


def test_a_robust_agent_can_teach(cartpole):
    _, start = cartpole
    teacher = as_teacher(start, "robust")
    obs = torch.randn(9, 4)
    torch.testing.assert_close(teacher.scores(teacher.normalize(obs)), start.scores(start.normalize(obs)))
    assert teacher.values(obs) is not None
    image = same_network(teacher_of("nature_cnn", "dqn"))
    with pytest.raises(SortRLError, match="linear layers alone"):
        as_teacher(image, "robust")


def test_without_tests_the_agent_of_the_end_is_kept(tmp_path):
    start = same_network(teacher_of("mlp", "dqn"))
    config = replace(FAST, decisions=648, tests=0)
    made = fine_tune(start, "CartPole-v1", RadialDQN(), config, tmp_path)
    assert made.history[-1]["decision"] == 648
    assert not any("tested" in row for row in made.history)
    assert not torch.equal(made.policy.head.layers[0].weight, start.head.layers[0].weight)
    again = fine_tune(start, "CartPole-v1", RadialDQN(), config, tmp_path)
    torch.testing.assert_close(again.policy.head.layers[0].weight, made.policy.head.layers[0].weight, rtol=0, atol=0)
    torch.testing.assert_close(again.policy.head.layers[0].weight, made.values.q.advantage.layers[0].weight)


def test_radial_ppo_resumes_and_refuses_action_values(tmp_path):
    start = same_network(teacher_of("mlp", "ppo"))
    config = RadialPPOConfig(0.05, decisions=1_536, steps=64, tests=2, test_episodes=2)

    def stop(row):
        if row["decision"] >= 1_000:
            raise Stopped

    whole = radial_ppo(start, "CartPole-v1", config)
    with pytest.raises(Stopped):
        radial_ppo(start, "CartPole-v1", config, tmp_path, progress=stop)
    rest = radial_ppo(start, "CartPole-v1", config, tmp_path)
    for name, tensor in whole.policy.state_dict().items():
        assert torch.equal(tensor, rest.policy.state_dict()[name])
    assert not torch.equal(whole.policy.head.layers[0].weight, start.head.layers[0].weight)
    with pytest.raises(SortRLError, match="actor-critic"):
        make_baseline("radial-ppo", "CartPole-v1", teacher_of("mlp", "dqn"), 0.1)


def test_curriculum_goes_through_its_phases_and_skips_those_that_are_robust_already(monkeypatch):
    start = same_network(teacher_of("mlp", "dqn"))
    config = replace(FAST, decisions=800)
    course = Curriculum("radial+at", phases=2, switch=0.5)
    assert isinstance(course.method_at(0.5), RadialDQN)
    assert isinstance(course.method_at(1.0), AdversarialDQN)
    made = bootstrapped(start, "CartPole-v1", course, config)
    assert {row["phase"] for row in made.history} == {1, 2}
    assert made.decisions == 800
    assert max(row["eps"] for row in made.history) == pytest.approx(config.eps)
    import sortrl.baselines.interval_q.bcl as bcl

    monkeypatch.setattr(bcl, "is_robust", lambda policy, env, eps, *rest: eps < 0.04)
    made = bootstrapped(start, "CartPole-v1", replace(course, skip=True), config)
    assert made.history[0] == {"phase": 1, "eps": 0.025, "skipped": True}
    assert made.decisions == 400


def test_the_agent_works_with_every_command(tmp_path, capsys):
    teacher = teacher_of("mlp", "dqn")
    teacher.save(tmp_path / "teacher")
    out = tmp_path / "agent"
    arguments = ["CartPole-v1", "--teacher", str(tmp_path / "teacher"), "--eps", "0.05", "--decisions", "400"]
    cli.main(["baseline", "radial-dqn", *arguments, "--out", str(out)])
    record = json.loads((out / "baseline.json").read_text())
    assert record["start"] == "the teacher's own network"
    assert record["decisions"] == 400
    policy = sortrl.load(out)
    assert isinstance(policy, IntervalPolicy)
    cli.main(["evaluate", str(out), "--eps", "0.05", "--episodes", "2"])
    cli.main(["attack", str(out), "--suite", "quick", "--eps", "0.05", "--episodes", "2"])
    cli.main(["certify", str(out), "--episodes", "2", "--save", str(tmp_path / "certificates.safetensors")])
    assert "student" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["verify", str(tmp_path / "certificates.safetensors")])
    assert "'interval'" in capsys.readouterr().err


def test_every_method_has_a_name_and_unknown_ones_are_refused():
    assert len(NAMES) == 11
    from typing import get_args

    from sortrl.cli.making import Baseline

    assert get_args(Baseline) == NAMES
    with pytest.raises(SortRLError, match="choose one of rs-dqn"):
        make_baseline("magic", "CartPole-v1", teacher_of("mlp", "dqn"), 0.1)
    with pytest.raises(SortRLError, match="span only"):
        make_baseline("radial-dqn", "Acrobot-v1", acrobot_teacher(), 1e9)


def acrobot_teacher() -> Teacher:
    architecture = Architecture((6,), 3, (8,), "ReLU")
    return Teacher(architecture.build(), Normalizer.identity((6,)), 3, "t", "dqn", architecture)


def test_action_certification_rates_as_three_papers_count_them():
    policy = same_network(teacher_of("mlp", "dqn"))
    policy.requires_grad_(False)
    clean = evaluate(policy, "CartPole-v1", episodes=4)
    eps = float(np.median(clean.radii))
    rates = acr(policy, "CartPole-v1", eps, episodes=4)
    assert rates["SortRL"] == pytest.approx(float((clean.radii > eps).mean()))
    assert 0 < rates["SortRL"] < 1, "all or nothing is certified, so nothing is compared"
    assert rates["SA-DQN"] >= rates["SortRL"]  # a smaller box, no rounding
    assert rates["RADIAL"] < 1
    assert acr(policy, "CartPole-v1", 10.0, episodes=2)["RADIAL"] == 0.0
    student = SortPolicy((4,), 2, width=8, depth=2, rho=0.0).eval().requires_grad_(False)
    radii = evaluate(student, "CartPole-v1", episodes=3).radii
    rates = acr(student, "CartPole-v1", float(np.median(radii)), episodes=3)
    assert rates["SortRL"] == rates["SA-DQN"] == pytest.approx(float((radii > np.median(radii)).mean()))
