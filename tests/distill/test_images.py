"""The whole job on pixels, on a game small enough for a test: teacher, data, student, certificate, attack, report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import sortrl
from sortrl.attacks import PGD
from sortrl.certify import certified_levels, save_certificates
from sortrl.data.dataset import load_demonstrations
from sortrl.distill import distill
from sortrl.experiments.certificates import PLAIN_PIXELS, clean_episodes, clipping
from sortrl.nets import Centre, Ramp
from sortrl.runs.run import read_run
from sortrl.runs.tasks import teacher_preset
from sortrl.verify import verify

pytest.importorskip("minatar", reason="MinAtar is not installed: pip install 'sortrl[minatar]'")
GAME = "sortrl/Breakout10-v0"
EPS = 0.15


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("breakout")
    teacher = replace(
        teacher_preset(GAME), total_steps=73_728, eval_every=24_576, exploration_fraction=0.3, target_return=None
    )
    short = {"teacher_config": teacher, "steps": 800, "episodes": 10, "eps_grid": (0.0, EPS)}
    sortrl.robustify(None, GAME, out=directory, suite=("noise", "pgd-10-p32"), suite_episodes=4, **short)
    return directory


def test_the_student_plays_like_its_teacher_and_keeps_it_up_under_attack(run):
    results = json.loads((run / "results.json").read_text())
    returns = {(row["policy"], row["attack"]): row["mean"] for row in results["evaluation"]}
    clean = returns["teacher", "none"]
    assert clean > 3, "the teacher has not learned, so nothing was tested"
    assert returns["student", "none"] >= 0.8 * clean
    assert returns["teacher", "PGD-10"] < 0.5 * clean
    assert min(returns["student", attack] for attack in ("PGD-10", "PGD-10-p32", "noise")) >= 0.8 * clean
    certified = dict(zip(results["certificate"]["eps"], results["certificate"]["share"], strict=True))
    assert certified[EPS] > 0.7
    assert results["env"]["obs_names"] == ["every pixel"]
    assert "every pixel" in (run / "report.md").read_text()


def test_certificates_of_images_hold_and_can_be_checked_by_others(run, tmp_path):
    env_id, policy, teacher = read_run(run)
    played = clean_episodes(policy, env_id, 2, seed=3)
    unit = torch.cat(played)
    certificate = policy.certify_unit(unit)
    within = torch.from_numpy(0.999 * certificate.radius)
    for attack in (PGD(10), PGD(10, surrogate_p=32.0), PGD(10, loss="margin", random_start=True)):
        assert not attack(policy, unit, within).changed.any()
    save_certificates(tmp_path / "c.safetensors", policy, unit, certificate, run)
    assert verify(tmp_path / "c.safetensors").ok
    assert teacher is not None
    assert teacher.values(unit) is not None


def test_the_student_sees_pixels_through_ramps_across_the_gap_between_black_and_white(run):
    """Half of what is certified is the gap less the ramp; nothing that is told of this student is true of one without ramps."""
    _, policy, _ = read_run(run)
    assert policy.kind == "sort"
    centre, ramp = (next(part for part in policy.front if isinstance(part, kind)) for kind in (Centre, Ramp))
    assert ramp.width == pytest.approx(64 / 255)
    assert torch.allclose(centre.centres, torch.full_like(centre.centres, 0.5))
    assert 50 < len(centre.centres) < 400, "pixels that never vary are not seen"
    data = load_demonstrations(run / "data.safetensors")
    radius = policy.certify(data.obs[:500]).radius
    assert (radius > 0.24).mean() > 0.95


def test_a_pixel_cannot_be_darker_than_black(run):
    """The valid range adds to the radius, which counts in levels of grey. Behind ramps, which are constant there, it cannot."""
    env_id, _, teacher = read_run(run)
    data = load_demonstrations(run / "data.safetensors")
    policy = distill(data, teacher.normalizer, replace(PLAIN_PIXELS, eps=EPS, steps=800)).policy
    played = clean_episodes(policy, env_id, 2, seed=4)
    found = clipping(policy, env_id, played, 40, PGD(10), reach=1.0)
    margin, interval, clipped, attack = (
        np.array(found["radii"][n]) for n in ("margin", "interval", "clipped", "attack")
    )
    assert (interval >= margin).all()
    assert (clipped >= interval * 0.999).all()
    assert (attack >= clipped).all()
    assert clipped.mean() > interval.mean(), "half of each box is empty, so something must be gained"
    pixels = (torch.cat(played)[:40] * 255).round().numpy().astype(np.uint8)
    assert np.median(certified_levels(policy, pixels)) >= 255 * EPS
