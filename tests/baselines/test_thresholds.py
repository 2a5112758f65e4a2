"""Students that see rounded pixels: what is certified is hunted for violations, and the whole way to such a student works."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import sortrl
from sortrl.attacks import FGSM, PGD
from sortrl.baselines.thresholds.distill import ThresholdConfig, distill_thresholds, gap_thresholds
from sortrl.baselines.thresholds.polish import polished
from sortrl.certify import save_certificates
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_json, read_tensors, write_tensors
from sortrl.core.normalizer import Normalizer
from sortrl.core.records import Demonstrations
from sortrl.data.collect import CollectConfig, collect
from sortrl.distill import SortRecipe
from sortrl.envs import greedy_returns
from sortrl.envs.info import make_env
from sortrl.nets import ThresholdPolicy
from sortrl.nets.intervals import Norm
from sortrl.nets.thresholds import UNUSED
from sortrl.runs.config import robustify_config
from sortrl.runs.run import read_run
from sortrl.runs.tasks import continued
from sortrl.teachers.train_pqn import Tutor
from sortrl.verify import verify

SHAPE = (2, 9, 8)
BREAKOUT = "sortrl/Breakout10-v0"


def build(
    seed: int, levels: int = 2, conv=((6, 3, 2), (8, 2, 1)), hidden=(10,), used: float = 0.3, norm: bool = False
) -> ThresholdPolicy:
    """A random network with random thresholds on some of its pixels, in which no action is favoured."""
    torch.manual_seed(seed)
    policy = ThresholdPolicy(SHAPE, 4, levels, conv, hidden, norm=norm).requires_grad_(False)
    for layer in policy.head.norms:
        layer.weight.copy_(torch.randn_like(layer.weight))
        layer.bias.copy_(0.3 * torch.randn_like(layer.bias))
    thresholds = policy.rounding.thresholds
    thresholds.copy_(torch.where(torch.rand_like(thresholds) < used, torch.rand_like(thresholds), UNUSED))
    policy.head.layers[-1].bias.sub_(policy.scores(torch.rand(200, *SHAPE)).mean(0))
    return policy


def flips(policy: ThresholdPolicy, unit: torch.Tensor, size: np.ndarray) -> int:
    """How many states change their action within ``size``: by corners, by gradients and by crossing single thresholds."""
    action, reach = policy.certify_unit(unit).action, torch.from_numpy(size).float().reshape(-1, 1, 1, 1)
    changed = np.zeros(len(unit), bool)
    for _ in range(60):
        signs = torch.where(torch.rand_like(unit) < 0.5, -1.0, 1.0) * (torch.rand_like(unit) < torch.rand(()))
        changed |= policy.scores(unit + signs * reach).argmax(1).numpy() != action
    for attack in (FGSM(), PGD(20, loss="margin", random_start=True, restarts=2)):
        changed |= attack(policy, unit, torch.from_numpy(size)).changed
    return int(changed.sum())


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("conv", "hidden"), [(((6, 3, 2), (8, 2, 1)), (10,)), (((6, 3, 2),), ()), ((), (12, 8)), ((), ())]
)
def test_no_action_changes_within_its_radius(conv, hidden, norm):
    certified = beyond = 0
    for seed in range(6):
        policy, unit = build(seed, 1 + seed % 2, conv, hidden, used=0.05, norm=norm), torch.rand(60, *SHAPE)
        radius = policy.certify_unit(unit).radius
        certified += int((radius > 0.01).sum())
        beyond += int((radius > policy.rounding.distance(unit).numpy() + 0.001).sum())
        assert flips(policy, unit, radius) == 0
        assert flips(policy, unit, 4 * radius + 0.1) > 0, "an attack that never succeeds tests nothing"
    assert certified > 60, "nothing was certified, so nothing was tested"
    # Layer norm makes intervals wide, behind linear layers that see every pixel too wide for any threshold to be crossed.
    least = 20 if not norm else 2 if conv else -1
    assert beyond > least, "intervals never proved more than that no threshold is crossed"


def test_a_radius_that_is_too_large_is_caught():
    policy, unit = build(0, used=0.05), torch.rand(200, *SHAPE)
    assert flips(policy, unit, 3 * policy.certify_unit(unit).radius + 0.05) > 10


def test_a_pixel_on_its_threshold_certifies_nothing_and_one_beside_it_next_to_nothing():
    policy = build(1)
    thresholds = policy.rounding.thresholds.amin(0)
    unit = torch.where(thresholds < UNUSED, thresholds, torch.rand(SHAPE))[None].repeat(2, 1, 1, 1)
    unit[1] = torch.nextafter(unit[1], torch.tensor(2.0))
    assert not torch.equal(policy.rounding(unit[:1]), policy.rounding(unit[1:])), "the least step up crosses thresholds"
    assert flips(policy, unit, policy.certify_unit(unit).radius) == 0


def test_scores_are_those_of_the_answers_alone():
    policy, unit = build(2), torch.rand(50, *SHAPE)
    within = 0.99 * policy.rounding.distance(unit).float().reshape(-1, 1, 1, 1)
    moved = unit + within * (2 * torch.rand_like(unit) - 1)
    assert torch.equal(policy.rounding(unit), policy.rounding(moved))
    assert torch.equal(policy.scores(unit), policy.scores(moved))


def test_what_is_reachable_and_proven_agrees_with_the_radius():
    policy, unit = build(3, used=0.05), torch.rand(80, *SHAPE)
    certificate = policy.certify_unit(unit)
    eps = float(np.median(certificate.radius))
    reachable = policy.reachable(unit, eps)
    assert reachable[np.arange(80), certificate.action].all()
    assert (reachable.sum(1) == 1)[certificate.radius > eps].all()
    assert (reachable.sum(1) > 1)[certificate.radius < 0.9 * eps - 0.01].any()
    assert bool(
        policy.proven(unit - eps, unit + eps, torch.from_numpy(certificate.action))
        .numpy()[certificate.radius > eps]
        .all()
    )


def test_an_attack_gets_a_gradient_through_the_steps():
    policy, unit = build(4), torch.rand(3, *SHAPE, requires_grad=True)
    scores = policy.scores(unit)
    assert torch.allclose(scores, policy.scores(unit.detach()), atol=1e-5), "the gradient is that of the same network"
    scores[:, 0].sum().backward()
    used = (policy.rounding.thresholds < UNUSED).any(0)
    assert bool((unit.grad[:, ~used] == 0).all())
    assert float(unit.grad.abs().max()) > 0


def test_layer_norm_stays_within_its_bounds():
    """Also where next to no contrast is left, which it enlarges most, and for a box of no size, which has rounding alone."""
    torch.manual_seed(0)
    narrow = 0
    for shape in ((5,), (3, 4, 2)):
        norm = Norm(shape[0]).requires_grad_(False)
        norm.weight.copy_(torch.randn_like(norm.weight))
        norm.bias.copy_(torch.randn_like(norm.bias))
        for contrast in (1e-9, 1e-3, 1.0, 100.0):
            for reach in (0.0, 1e-12, 0.1 * contrast, 3.0):
                centre = 7 + contrast * torch.randn(40, *shape, dtype=torch.float64)
                radius = reach * torch.rand_like(centre)
                lo, hi = norm.bounds(centre, radius, careful=True)
                narrow += int((hi - lo < 1e-6).all())
                for _ in range(50):
                    moved = norm(centre + radius * torch.empty_like(centre).uniform_(-1, 1).sign())
                    assert bool(((lo <= moved) & (moved <= hi)).all())
    assert narrow >= 10, "bounds that are always wide prove nothing"
    assert torch.allclose(norm(centre), norm(centre.float()).double(), atol=1e-4)


@pytest.mark.parametrize("norm", [False, True])
def test_it_saves_loads_copies_and_its_certificates_are_checked_independently(tmp_path, norm):
    policy = build(5, used=0.05, norm=norm)
    policy.save(tmp_path)
    loaded, unit = sortrl.load(tmp_path), torch.rand(40, *SHAPE)
    assert isinstance(loaded, ThresholdPolicy)
    assert torch.equal(loaded.scores(unit), policy.scores(unit))
    assert torch.equal(copy.deepcopy(policy).scores(unit), policy.scores(unit))
    certificate = policy.certify_unit(unit)
    path = tmp_path / "certificates.safetensors"
    save_certificates(path, policy, unit, certificate, tmp_path)
    verdict = verify(path)
    assert verdict.ok
    assert verdict.smallest_spare >= 0
    assert verdict.to_json()["lipschitz"] is None
    save_certificates(path, policy, unit, replace(certificate, radius=certificate.radius + 0.05), tmp_path)
    assert not verify(path).ok
    save_certificates(path, policy, unit, replace(certificate, action=(certificate.action + 1) % 4), tmp_path)
    assert not verify(path).ok


@pytest.mark.parametrize(
    "name", ["rounding.thresholds", "head.layers.0.weight", "head.layers.2.bias", "head.norms.1.weight"]
)
def test_the_checker_refuses_weights_that_do_not_fit(tmp_path, name):
    policy, unit = build(6, norm=True), torch.rand(4, *SHAPE)
    policy.save(tmp_path)
    save_certificates(tmp_path / "c.safetensors", policy, unit, policy.certify_unit(unit), tmp_path)
    tensors, metadata = read_tensors(tmp_path / "policy.safetensors")
    tensors[name] = tensors[name][:1].clone()
    write_tensors(tmp_path / "policy.safetensors", tensors, metadata)
    assert any("expected" in line for line in verify(tmp_path / "c.safetensors").failures)
    with pytest.raises(SortRLError, match="do not fit"):
        sortrl.load(tmp_path)


def test_thresholds_lie_in_gaps_that_are_wide_enough():
    rng = np.random.default_rng(0)
    palette = np.array([0, 30, 34, 90, 200], np.uint8)
    obs = palette[rng.integers(5, size=(400, 1, 6, 6))]
    obs[:, 0, 0, 0] = 7  # a pixel that never changes has nothing to tell
    thresholds = gap_thresholds(obs, gap=12, levels=3)
    assert np.isinf(thresholds[:, 0, 0, 0]).all()
    used = np.isfinite(thresholds)
    assert set(thresholds[used]) == {15.0, 62.0, 145.0}, "30 and 34 are too close to be told apart"
    distance = np.abs(obs[:, None].astype(float) - thresholds).reshape(400, -1)
    assert distance.min() >= 12


def test_of_many_gaps_the_most_even_ones_are_taken_and_rare_values_do_not_close_them():
    values = np.repeat(np.array([0, 50, 100, 150, 125], np.uint8), [10, 500, 480, 10, 1])
    obs = values.reshape(-1, 1, 1, 1)
    assert gap_thresholds(obs, 20, 1).ravel().tolist() == [75.0]
    assert set(gap_thresholds(obs, 20, 3, rare=0.005).ravel()) == {75.0, 25.0, 125.0}
    assert set(gap_thresholds(obs, 20, 3).ravel()) == {75.0, 25.0, np.inf}
    assert np.isinf(gap_thresholds(obs, 40, 1, rare=0.0)).all()


def squares(states: int, seed: int) -> Demonstrations:
    """A bright square somewhere in a picture with some texture; the answer is the quarter it is in."""
    rng = np.random.default_rng(seed)
    obs = rng.choice(np.array([10, 14, 18], np.uint8), size=(states, 1, 12, 12))
    where = rng.integers(0, 10, size=(states, 2))
    for picture, (y, x) in zip(obs, where, strict=True):
        picture[0, y : y + 3, x : x + 3] = 200
    actions = 2 * (where[:, 0] > 4) + (where[:, 1] > 4)
    return Demonstrations(
        "Any-v0", obs, actions.astype(np.int64), np.eye(4, dtype=np.float32)[actions], np.arange(states) // 20
    )


TINY = ThresholdConfig(gap=30 / 255, levels=1, conv=((8, 4, 2),), hidden=(32,), steps=250, batch=64, learning_rate=5e-3)


def test_a_student_learns_and_is_certified_up_to_the_gap(tmp_path):
    pixels, seen = Normalizer.from_pixels((1, 12, 12)), []
    made = distill_thresholds(squares(2000, 0), pixels, TINY, 0.1, held_out=squares(300, 1), progress=seen.append)
    assert made.held_out["agreement"] > 0.95
    assert made.held_out["certified"] > 0.95, "at .1, which is less than the gap of .118"
    assert seen[-1]["step"] == 250
    assert seen[-1]["agreement"] > 0.9
    policy, states = made.policy, squares(100, 2)
    raw = gap_thresholds(squares(2000, 0).obs, 30, 1)
    assert torch.equal(
        policy.rounding(policy.normalize(states.obs)), torch.from_numpy((states.obs > raw[0]).astype(np.float32))
    )
    radius = policy.certify(states.obs).radius
    assert (radius > 30 / 255 - 1e-4).mean() > 0.95
    assert flips(policy, policy.normalize(states.obs), radius) == 0


def test_a_training_that_is_cut_off_ends_as_if_it_had_not_been(tmp_path):
    data, pixels = squares(400, 0), Normalizer.from_pixels((1, 12, 12))
    config = replace(TINY, steps=40)
    whole = distill_thresholds(data, pixels, config, 0.1).policy

    def stop(row) -> None:
        if row["step"] >= 22:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill_thresholds(data, pixels, config, 0.1, out_dir=tmp_path, progress=stop)
    resumed = distill_thresholds(data, pixels, config, 0.1, out_dir=tmp_path).policy
    assert all(
        torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    )


def test_what_cannot_be_rounded_is_refused():
    data, pixels = squares(50, 0), Normalizer.from_pixels((1, 12, 12))
    with pytest.raises(SortRLError, match="Lower the gap"):
        distill_thresholds(data, pixels, replace(TINY, gap=0.5), 0.1)
    vectors = Demonstrations(
        "Any-v0",
        np.zeros((4, 3), np.float32),
        np.array([0, 1, 0, 1]),
        np.eye(2, dtype=np.float32)[[0, 1, 0, 1]],
        np.arange(4),
    )
    with pytest.raises(SortRLError, match="images of bytes"):
        distill_thresholds(vectors, Normalizer.identity((3,)), TINY, 0.1)
    with pytest.raises(SortRLError, match="uint8"):
        gap_thresholds(np.zeros((3, 1, 2, 2), np.float32), 0.1, 1)
    with pytest.raises(SortRLError, match="gap is -1"):
        ThresholdConfig(gap=-1)
    with pytest.raises(SortRLError, match="expected images"):
        ThresholdPolicy((4,), 2)


def test_the_preset_has_options_of_its_own():
    config = robustify_config("sortrl/Pong84-v0", preset="thresholds", gap=0.02, steps=7)
    assert (config.student.rounding.gap, config.student.rounding.steps) == (0.02, 7)
    with pytest.raises(SortRLError, match="no option 'rho'"):
        robustify_config("sortrl/Pong84-v0", preset="thresholds", rho=0.1)
    assert isinstance(robustify_config("sortrl/Pong84-v0").student, SortRecipe)


def test_the_whole_job_on_a_small_game(tmp_path):
    """From the zoo's teacher of a MinAtar game to a report: skill, certificates and words."""
    pytest.importorskip("minatar", reason="MinAtar is not installed: pip install 'sortrl[minatar]'")
    _, _, teacher = read_run(Path("zoo:breakout"))
    small = {"collect": CollectConfig(states=6000, exploration=0.7, random_actions=0.15), "dagger_states": 2000}
    measured = {"episodes": 10, "eps_grid": (0.0, 0.3), "suite": ()}
    sortrl.robustify(teacher, "sortrl/Breakout10-v0", preset="thresholds", steps=500, out=tmp_path, **small, **measured)
    results = read_json(tmp_path / "results.json")
    returns = {(row["policy"], row["attack"]): row["mean"] for row in results["evaluation"]}
    assert returns["teacher", "none"] > 10
    assert returns["teacher", "PGD-10"] < 5
    assert returns["student", "none"] >= 0.8 * returns["teacher", "none"]
    assert returns["student", "PGD-10"] == returns["student", "none"], "every decision is certified at .3"
    certified = dict(zip(results["certificate"]["eps"], results["certificate"]["share"], strict=True))
    assert certified[0.3] == 1.0
    assert results["policy"]["lipschitz"] is None
    page = (tmp_path / "report.html").read_text()
    assert "thresholds on pixels" in page
    assert "Lipschitz constant" not in page


def poor_student(steps: int = 150) -> tuple[ThresholdPolicy, Tutor]:
    """One that has learned little from the zoo's teacher of a MinAtar game, and that teacher with what it has shown."""
    pytest.importorskip("minatar", reason="MinAtar is not installed: pip install 'sortrl[minatar]'")
    _, _, teacher = read_run(Path("zoo:breakout"))
    data = collect(teacher, BREAKOUT, CollectConfig(states=2000, exploration=0.7, random_actions=0.15), 0)
    config = ThresholdConfig(gap=0.4, levels=1, conv=((16, 3, 1),), hidden=(128,), norm=True, steps=steps)
    policy = distill_thresholds(data, teacher.normalizer, config, 0.3).policy
    assert isinstance(policy, ThresholdPolicy)
    return policy, Tutor(teacher, torch.from_numpy(data.obs), torch.from_numpy(data.logits.astype(np.float32)))


def test_a_poor_student_learns_on_in_the_game_and_keeps_its_certificates():
    student, tutor = poor_student()
    config = replace(continued(BREAKOUT), total_steps=16_384, eval_every=4096, target_return=None)
    better = polished(student, BREAKOUT, config, tutor=tutor)
    assert torch.equal(better.rounding.thresholds, student.rounding.thresholds), "where it looks is not learned"
    before, after = (greedy_returns(policy, BREAKOUT, range(900, 920)).mean() for policy in (student, better))
    assert after > before + 1, "it has learned to play better"
    env = make_env(BREAKOUT)
    obs = np.stack([env.reset(seed=0)[0], *(env.step(np.int64(k % 3))[0] for k in range(20))])
    radius = better.certify(obs).radius
    assert (radius > 0.3).all()
    assert flips(better, better.normalize(obs), radius) == 0


@pytest.mark.parametrize("tutored", [False, True])
def test_learning_on_that_is_cut_off_ends_as_if_it_had_not_been(tmp_path, tutored):
    student, tutor = poor_student(steps=2)
    config = replace(continued(BREAKOUT), total_steps=2048, eval_every=1024, eval_episodes=2, target_return=None)
    tutor = tutor if tutored else None
    whole = polished(student, BREAKOUT, config, tmp_path / "whole", tutor=tutor)

    def stop(row) -> None:
        if row["step"] > 1200:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        polished(student, BREAKOUT, config, tmp_path / "cut", progress=stop, tutor=tutor)
    resumed = polished(student, BREAKOUT, config, tmp_path / "cut", tutor=tutor)
    again = polished(student, BREAKOUT, config, tmp_path / "cut", tutor=tutor)
    for made in (resumed, again):
        assert all(
            torch.equal(a, b) for a, b in zip(whole.state_dict().values(), made.state_dict().values(), strict=True)
        )
    with pytest.raises(SortRLError, match="other settings"):
        polished(poor_student(steps=3)[0], BREAKOUT, config, tmp_path / "cut", tutor=tutor)


def test_only_a_student_with_layer_norm_learns_on(tmp_path):
    with pytest.raises(SortRLError, match="norm=True"):
        polished(build(0), BREAKOUT, continued(BREAKOUT))
    with pytest.raises(SortRLError, match="norm=True"):
        sortrl.robustify(None, BREAKOUT, preset="thresholds", polish=continued(BREAKOUT), out=tmp_path)
