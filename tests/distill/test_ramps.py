"""Ramps are put where the data leave room, whatever the game; the policy that is made of them sees what was trained on."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sortrl.attacks import PGD
from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.core.records import Demonstrations
from sortrl.distill import DistillConfig, distill
from sortrl.distill.loop import temperature
from sortrl.distill.ramps import GAPS, found_ramps
from sortrl.nets import Centre, Ramp

SHAPE = (1, 6, 6)
PIXELS = Normalizer.from_pixels(SHAPE)
CONFIG = DistillConfig(
    eps=10 / 255, steps=400, batch=128, width=48, depth=3, rho=0.0, learning_rate=0.08, scalar_learning_rate=0.002,
    mu_start=2.0, lambda_end=1.0, warm_share=0.5, final_share=0.1, p_end=64.0, ramps=True, soft_targets=0.5,
    soft_temperature=None,
)  # fmt: skip


def screen(states: int, seed: int = 0, colours: tuple[int, ...] = (40, 90, 200)) -> Demonstrations:
    """A dot of one of two colours on a background; the answer is the half that it is in. The last row never changes."""
    rng = np.random.default_rng(seed)
    obs = np.full((states, *SHAPE), colours[0], np.uint8)
    row, column = rng.integers(0, 5, states), rng.integers(0, 6, states)
    obs[np.arange(states), 0, row, column] = rng.choice(colours[1:], states, p=(0.6, 0.4))
    actions = (column >= 3).astype(np.int64)
    logits = np.stack([1.0 - actions, actions], 1).astype(np.float32)
    return Demonstrations("Any-v0", obs, actions, logits, np.arange(states) // 50)


def test_ramps_stand_in_the_middle_of_the_widest_gaps_that_tell_enough():
    ramps = found_ramps(screen(2000).obs, PIXELS)
    assert len(ramps.pixels) == 60, "two for each pixel that varies, none for the others"
    assert set(ramps.pixels.tolist()) == set(range(30))
    assert set(np.round(ramps.centres * 255, 6).tolist()) == {65.0, 145.0}
    assert (ramps.width * 255, ramps.limit) == (pytest.approx(40.0), 1.0), "gaps of 50 and 110: half of 50 is above 20"
    near = found_ramps(screen(2000, colours=(100, 112, 124)).obs, PIXELS)
    assert near.width * 255 == pytest.approx(10.0)
    assert near.width < 2 * min(GAPS) / 255 + 1e-9


def test_what_moves_is_seen_although_walls_change_more_of_the_screen():
    """Two mazes of black and white walls, and a dot of dark grey: the widest gaps would show which maze it is, and nothing else."""
    rng = np.random.default_rng(0)
    obs = np.zeros((2000, *SHAPE), np.uint8)
    obs[:, 0, :5] = 200 * rng.integers(0, 2, (2000, 1, 1))
    column = rng.integers(0, 6, 2000)
    obs[np.arange(2000), 0, 5, column] = 24
    ramps = found_ramps(obs, PIXELS)
    assert ramps.width * 255 == pytest.approx(21)
    assert set(ramps.pixels.tolist()) >= set(range(30, 36)), "the last row, that of the dot"
    assert len(ramps.pixels) == 7, "and one of the walls, which change together"


def test_of_ramps_that_show_the_same_the_one_across_the_widest_gap_is_kept():
    rng = np.random.default_rng(0)
    there = rng.random((2000, 1)) < 0.3
    other = rng.random((2000, 1)) < 0.5
    faint, bright, dark = (np.where(there, a, b) for a, b in ((60, 10), (250, 20), (30, 200)))
    obs = np.concatenate([faint, bright, dark, np.where(other, 90, 10)], 1).astype(np.uint8)
    ramps = found_ramps(obs, Normalizer.from_pixels((4,)))
    assert ramps.pixels.tolist() == [1, 3], "the third shows the opposite of the others"
    assert (ramps.centres * 255).tolist() == pytest.approx([135.0, 50.0])


def test_pixels_without_gaps_are_standardised():
    rng = np.random.default_rng(0)
    obs = np.clip(rng.normal(120, 25, (4000, *SHAPE)), 0, 255).astype(np.uint8)
    obs[:, 0, 0, 0] = 7
    ramps = found_ramps(obs, PIXELS)
    assert ramps.pixels.tolist() == list(range(1, 36))
    np.testing.assert_allclose(ramps.centres * 255, 120, atol=2)
    assert ramps.width * 255 == pytest.approx(25, abs=1)
    assert ramps.limit == 1.5


def test_what_cannot_be_seen_is_refused():
    with pytest.raises(SortRLError, match="all the same"):
        found_ramps(np.full((10, *SHAPE), 9, np.uint8), PIXELS)
    with pytest.raises(SortRLError, match="uint8"):
        found_ramps(np.zeros((10, *SHAPE)), PIXELS)
    with pytest.raises(SortRLError, match="one scale"):
        found_ramps(screen(10).obs, Normalizer(np.zeros(SHAPE), 1.0 + np.arange(36).reshape(SHAPE)))
    with pytest.raises(SortRLError, match=r"pool is 2 for observations of shape \(36,\)"):
        found_ramps(screen(10).obs.reshape(10, 36), Normalizer.from_pixels((36,)), pool=2)
    for other in ({"scale": 2.0}, {"head": ()}, {"bounded_conv": ((4, 3, 1),)}):
        with pytest.raises(SortRLError, match="ramps are a front end of their own"):
            replace(CONFIG, **other)


def test_a_student_learns_through_ramps_and_certifies_the_gap():
    made = distill(screen(3000), PIXELS, CONFIG, held_out=screen(500, seed=1))
    assert made.held_out["agreement"] > 0.97
    assert made.held_out["certified"] > 0.9
    assert made.policy.obs_shape == SHAPE, "it was trained on the pixels that vary, and plays with whole images"
    assert {type(part) for part in made.policy.front} >= {Centre, Ramp}
    unseen = screen(200, seed=2).obs.copy()
    before = made.policy.certify(unseen)
    within = np.sort(before.radius)[[20, 100, 180]]
    asked = np.resize(within, 200)
    told = made.policy.certify_unit(PIXELS(unseen), torch.from_numpy(asked))
    assert (told.action == before.action).all()
    above, below = before.radius > 1.02 * asked, before.radius < 0.98 * asked  # bisection leaves about a hundredth
    assert above.sum() > 20
    assert below.sum() > 20
    assert (told.radius > asked)[above].all()
    assert not (told.radius > asked)[below].any()
    unseen[:, 0, 5] = 255  # a row that never varied
    after = made.policy.certify(unseen)
    assert (before.action == after.action).all()
    assert (before.radius == after.radius).all()


def test_of_pooled_images_the_ramps_are_those_of_blocks():
    rng = np.random.default_rng(0)
    obs = np.clip(rng.normal(120, 25, (4000, 1, 7, 6)), 0, 255).astype(np.uint8)
    ramps = found_ramps(obs, Normalizer.from_pixels((1, 7, 6)), pool=2)
    assert ramps.pixels.tolist() == list(range(9)), "the last row fills no block"
    assert ramps.width * 255 == pytest.approx(12.5, abs=0.5), "means of four"
    np.testing.assert_allclose(ramps.centres * 255, 120, atol=1)


def test_a_student_of_pooled_images_sees_in_whole_ones_what_it_was_trained_on():
    data = screen(3000)
    made = distill(data, PIXELS, replace(CONFIG, pool=3, eps=1 / 255), held_out=screen(500, seed=1))
    assert made.held_out["agreement"] > 0.97, "blocks of three columns do not straddle the middle"
    ramps = found_ramps(data.obs, PIXELS, pool=3)
    assert ramps.pixels.tolist(), "some blocks vary"
    seen, normalizer, narrow = ramps.seen(data, PIXELS)
    assert seen.obs.dtype == np.int16
    whole = made.policy
    front = whole.front(PIXELS(data.obs[:50])).numpy()
    own = (normalizer(torch.from_numpy(seen.obs[:50])).numpy()[:, narrow.pixels] - narrow.centres) / narrow.width
    np.testing.assert_allclose(front, np.clip(own, -narrow.limit, narrow.limit), atol=1e-5)


def test_the_same_seed_gives_the_same_student_and_a_resume_changes_nothing(tmp_path):
    short = replace(CONFIG, steps=40, batch=32, width=16)
    data, unit = screen(500), PIXELS(screen(50, seed=3).obs)
    once = distill(data, PIXELS, short, seed=4).policy

    class Stop(Exception):
        pass

    def stop(row):
        if row["step"] == 30:
            raise Stop

    with pytest.raises(Stop):
        distill(data, PIXELS, short, seed=4, out_dir=tmp_path, progress=stop)
    again = distill(data, PIXELS, short, seed=4, out_dir=tmp_path).policy
    assert torch.equal(once.scores(unit), again.scores(unit))
    other = distill(data, PIXELS, short, seed=5).policy
    assert not torch.equal(once.scores(unit), other.scores(unit))


def test_exponents_and_temperature_of_the_recipe():
    exponents = [CONFIG.p_at(step) for step in range(400)]
    assert exponents[:201] == [8.0] * 201
    assert max(p for p in exponents if p < math.inf) == 64.0
    assert exponents[360:] == [math.inf] * 40
    assert temperature(torch.tensor([[3.0, 0.0, -9.0], [0.0, 6.0, 5.0], [1.0, 1.0, 0.0]])) == pytest.approx(1 / 3)
    assert temperature(torch.zeros(4, 2)) == 1.0


def test_attacks_find_their_way_through_saturated_ramps():
    """Black and white saturate every ramp; beyond the gap an attack must succeed all the same, and within it cannot."""
    data = screen(1000, colours=(0, 255, 255))
    policy = distill(data, PIXELS, replace(CONFIG, steps=200)).policy
    unit = PIXELS(screen(100, seed=7, colours=(0, 255, 255)).obs)
    ramp = next(part for part in policy.front if isinstance(part, Ramp))
    assert ((unit.flatten(1) - 0.5).abs() / ramp.width > ramp.limit).all()
    gap = 0.5 - ramp.width * ramp.limit
    assert (policy.certify_unit(unit).radius > 0.99 * gap).all()
    for attack in (PGD(10), PGD(10, surrogate_p=8.0), PGD(10, loss="margin", surrogate_p=32.0)):
        assert not attack(policy, unit, 0.99 * gap).changed.any()
        found = attack(policy, unit, 0.49).changed
        assert found.mean() > 0.2, f"{attack.name} found {found.sum()} of {len(found)}"
