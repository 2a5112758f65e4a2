"""The ladder: units from data, the climb, the choice, the gate; and a run that has all of them."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import sortrl
from helpers import balancer
from sortrl import SortPolicy, cli
from sortrl.attacks.valid import check_eps
from sortrl.core.errors import SortRLError, SortRLWarning
from sortrl.core.normalizer import Normalizer
from sortrl.data.collect import CollectConfig
from sortrl.distill.ladder import LADDER, Climbed, LadderRecipe, Skill, climb, gate, select
from sortrl.distill.units import in_units, standardised
from sortrl.envs import describe
from sortrl.runs.config import robustify_config
from sortrl.runs.robustify import default_preset
from sortrl.runs.run import read_run
from sortrl.teachers import Architecture, Teacher, load_teacher

# --- units ------------------------------------------------------------------------------------------------------------


def test_units_survive_constant_rare_and_heavy_tailed_sensors():
    draw, n = np.random.default_rng(0), 20_000
    heavy, rare = draw.standard_cauchy(n), (draw.random(n) < 0.001).astype(float)
    units = standardised(np.stack([draw.normal(3, 2, n), np.full(n, 12.0), heavy, rare], 1))
    assert float(units.scale[0]) == pytest.approx(2, abs=0.1)
    assert units.scale[1] == 1
    assert units.scale[2] < 20 < heavy.std()
    assert float(units.scale[3]) == pytest.approx(rare.std())


def test_a_teacher_in_other_units_is_the_same_agent_and_keeps_its_clip():
    architecture = Architecture(obs_shape=(4,), n_actions=3, hidden=(16,), activation="Tanh")
    own = Normalizer(np.arange(4.0), np.array([0.1, 1, 10, 3.0]), 5.0)
    teacher = Teacher(architecture.build(), own, 3, architecture=architecture)
    units = Normalizer(np.full(4, 0.5), np.array([2.0, 0.3, 1, 7]))
    restated = in_units(teacher, units)
    obs = np.random.default_rng(1).normal(0, 20, (500, 4))
    assert (own(obs).abs() == 5).any()  # the clip is at work
    torch.testing.assert_close(
        teacher.scores(teacher.normalize(obs)), restated.scores(restated.normalize(obs)), atol=1e-4, rtol=1e-4
    )
    assert restated.normalizer.clip == math.inf
    assert in_units(teacher, own) is teacher


def test_a_black_box_can_be_restated():
    teacher = load_teacher(lambda obs: (obs[:, 2] > 0).astype(int), "CartPole-v1")
    restated = in_units(teacher, Normalizer(np.full(4, 0.01), np.full(4, 0.1)))
    obs = np.random.default_rng(0).normal(0, 0.2, (200, 4))
    assert (teacher.predict(obs)[0] == restated.predict(obs)[0]).all()
    assert restated.algorithm == "callable"


# --- climb, choice and gate -------------------------------------------------------------------------------------------


def rungs(kept, certified):
    return lambda i: Climbed(i, 0.0, kept[i], 0.0, certified[i])


def tried(*args, **kwargs):
    return [one.rung for one in climb(*args, **kwargs)]


def test_the_climb_goes_up_until_skill_or_gain_ends():
    assert tried(5, 2, rungs([1, 1, 1, 1, 0.9], [0.1, 0.2, 0.3, 0.5, 0.7])) == [2, 3, 4]
    assert tried(5, 2, rungs([1] * 5, [0.1, 0.2, 0.3, 0.3, 0.7])) == [2, 3]


def test_the_climb_goes_down_until_skill():
    assert tried(5, 2, rungs([1, 0.96, 0.9, 0, 0], [0] * 5)) == [2, 1]
    assert tried(5, 2, rungs([0.5] * 5, [0] * 5)) == [2, 1, 0]


def test_of_a_teacher_without_skill_one_student_is_enough():
    assert tried(5, 2, rungs([math.nan] * 5, [0] * 5)) == [2]


def test_the_most_certified_of_those_that_keep_the_skill_is_taken():
    found = [Climbed(2, 0, 1, 0.01, 0.5), Climbed(3, 0, 0.97, 0.01, 0.6), Climbed(4, 0, 0.955, 0.02, 0.9)]
    assert select(found) == 1  # the last keeps it only in the mean
    assert select(found[2:]) == 0
    assert select([Climbed(1, 0, 0.8, 0, 0.1), Climbed(2, 0, 0.7, 0, 0.9)]) == 0
    assert select([Climbed(1, 0, math.nan, 0, 0.1)]) == 0


def test_a_student_that_falls_under_attack_is_passed_over():
    found = [Climbed(2, 0, 1, 0, 0.5, 450.0), Climbed(3, 0, 1, 0, 0.6, 400.0), Climbed(4, 0, 1, 0, 0.9, 250.0)]
    assert select(found, hold=380.0) == 1
    assert select(found, hold=500.0) == 0
    assert select(found) == 2


def test_the_gate_names_what_is_wrong():
    skill = Skill(0.0, np.full(5, 100.0))
    assert gate(1.0, 0.9, 0.5, skill) is None
    assert "keeps 94%" in gate(0.94, 0.9, 0.5, skill)
    assert "keeps 94.9% of the teacher's skill, less than 95%" in gate(0.9499, 0.9, 0.5, skill)
    assert gate(0.94, 0.9, 0.5, skill, keep=0.9) is None
    assert "fixed action" in gate(1.0, 0.5, 0.5, skill)
    assert gate(math.nan, 0.9, 0.5, skill) is not None
    useless = Skill(10.0, np.full(5, 10.0))
    assert math.isnan(useless.kept(np.ones(5)))
    assert "no better than random" in gate(useless.kept(np.ones(5)), 0.9, 0.5, useless)


def test_a_rungs_measurements_survive_their_file():
    for one in (Climbed(2, 5.0, math.nan, math.inf, 0.5, 4.0, "PGD-10"), Climbed(1, 5.0, 1.0, 0.1, 0.5)):
        stored = json.loads(json.dumps(one.to_json(), allow_nan=False))
        assert repr(Climbed.from_json(stored)) == repr(one)


# --- settings ---------------------------------------------------------------------------------------------------------


def test_auto_is_the_default_of_vectors_and_has_no_settings_of_tasks():
    assert default_preset(describe("CartPole-v1")) == "auto"
    assert default_preset(describe("sortrl/Breakout10-v0")) == "fast"
    one, other = (robustify_config(name, preset="auto", train_teacher=False) for name in ("CartPole-v1", "Acrobot-v1"))
    assert one == other
    assert (one.eps, one.units, one.noise, one.suite) == (0.1, "std", 0.3, "quick")
    sizes = [robustify_config("CartPole-v1", eps, "auto").dagger_eps for eps in (0.0, 0.1, 0.2)]
    assert sizes == pytest.approx([0.0, 0.15, 0.3])  # where an adversary of a little more than eps leads
    assert robustify_config("CartPole-v1", 0.2, "auto", units="teacher").noise == pytest.approx(0.6)


REFUSED = {
    "percent": ({"eps": 50.0}, r"eps is 50 standard deviations .* write 0\.5"),
    "keep": ({"keep": 1.5}, r"keep is 1\.5, expected a share"),
    "units": ({"units": "metres"}, "units is 'metres', expected one of std, teacher, raw"),
    "raw size": ({"units": "raw"}, "units raw needs a size .* --sensor-eps"),
    "sizes": ({"units": "raw", "sensor_eps": (1.0, 2.0)}, r"sensor_eps has 2 sizes, .* shape \(4,\) \(cart position, "),
    "size": ({"units": "raw", "sensor_eps": (1.0, 2.0, 0.0, 1.0)}, "expected a positive number per sensor"),
    "sizes of what": ({"sensor_eps": (1.0,) * 4}, "units is std. Add"),
    "candidates": ({"candidates": 3}, "chooses among its own rungs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_auto_refuses(case):
    changes, message = REFUSED[case]
    with pytest.raises(SortRLError, match=message):
        sortrl.robustify(balancer(), "CartPole-v1", **changes)


def test_grey_levels_given_for_pixels_are_refused_with_the_number_to_write():
    info = replace(
        describe("CartPole-v1"),
        obs_shape=(1, 8, 8),
        obs_dtype=np.dtype(np.uint8),
        valid_low=np.zeros((1, 8, 8)),
        valid_high=np.full((1, 8, 8), 255.0),
    )
    policy = SortPolicy((1, 8, 8), 2, width=8, depth=2, normalizer=Normalizer.from_pixels((1, 8, 8)))
    with pytest.raises(SortRLError, match=r"For 8 of 255 grey levels write 0\.03137"):
        check_eps(policy, info, 8.0)


# --- a run ------------------------------------------------------------------------------------------------------------

TINY = {
    "steps": 250,
    "width": 32,
    "depth": 3,
    "collect": CollectConfig(states=5000),
    "dagger_rounds": 1,
    "dagger_states": 1500,
    "episodes": 3,
    "choose_episodes": 4,
    "eps_grid": (0.0, 0.1),
    "suite_episodes": 2,
    "keep": 0.8,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("ladder")
    sortrl.robustify(balancer(), "CartPole-v1", out=directory, **TINY)
    return directory


def test_raw_sizes_for_each_sensor_are_the_units_and_students_still_learn(tmp_path):
    """Sizes far from what sensors vary by would leave fresh weights nothing to measure, if inputs were not scaled by the data."""
    sizes = (0.002, 0.005, 0.0002, 0.004)
    settings = {**TINY, "suite": (), "quick": True, "eps_grid": (0.0,)}
    policy = sortrl.robustify(balancer(), "CartPole-v1", units="raw", sensor_eps=sizes, out=tmp_path, **settings)
    assert policy.normalizer.scale.tolist() == list(sizes)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["config"]["eps"] == 1.0
    assert results["env"]["unit_to_raw"] == list(sizes)
    assert results["gate"]["passed"], results["gate"]
    assert policy.lipschitz < 0.1  # of the factor on the inputs
    obs = np.random.default_rng(0).uniform(-0.05, 0.05, (200, 4))
    certificate = policy.certify(obs)
    assert (certificate.radius > 1).any()  # certified for all the sizes at once
    moved = obs + np.random.default_rng(1).choice([-1.0, 1.0], obs.shape) * np.array(sizes)
    held = certificate.radius > 1
    assert (policy.predict(moved)[0] == certificate.action)[held].all()


def test_a_ladder_keeps_the_skill_and_shows_what_radii_cost(run):
    results = json.loads((run / "results.json").read_text())
    assert results["gate"]["passed"], results["gate"]
    assert results["gate"]["kept_test"] >= 0.8
    ladder = results["ladder"]
    assert ladder["chosen"] in [rung["rung"] for rung in ladder["rungs"]]
    assert len(ladder["rungs"]) >= 2
    for rung in ladder["rungs"]:
        assert (run / f"rung-{rung['rung']}").is_dir()
        assert rung["attacked"] <= max(rung["clean"], 500.0)
        assert 0 <= rung["certified"] <= 1
    attacks = {row["attack"] for row in results["evaluation"] if row["policy"] == "student"}
    assert {"MinQ-10", "transfer-PGD-10", "APGD-CE-10"} & attacks >= {"MinQ-10", "transfer-PGD-10"}
    points = [(row["policy"], row["attack"], row["eps"]) for row in results["evaluation"]]
    assert len(points) == len(set(points))
    report = (run / "report.md").read_text()
    assert "What each certified radius costs" in report
    assert "What each certified radius costs" in (run / "report.html").read_text()
    assert "Do not rely" not in report


def test_units_are_in_the_policy_and_the_teacher_meets_it_in_them(run):
    _, policy, teacher = read_run(run)
    data = sortrl.load(run)
    assert torch.equal(policy.normalizer.scale, data.normalizer.scale)
    assert policy.normalizer.clip == math.inf
    results = json.loads((run / "results.json").read_text())
    assert results["env"]["unit_to_raw"] == policy.normalizer.scale.tolist()
    from sortrl.data.dataset import load_demonstrations

    plain = load_demonstrations(run / "plain.safetensors")
    unit = policy.normalizer(plain.obs)
    assert (unit.std(0) - 1).abs().max() < 0.1
    assert teacher is None  # hand-made: its code cannot be saved


def test_a_rung_that_is_there_is_not_trained_again(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    before = (copy / "policy.safetensors").read_bytes()
    for name in ("policy.safetensors", "ladder.json", "results.json"):
        (copy / name).unlink()
    kept = {path: path.stat().st_mtime_ns for path in copy.glob("rung-*") if path.is_file()}
    assert kept
    sortrl.robustify(balancer(), "CartPole-v1", out=copy, **TINY)
    assert (copy / "policy.safetensors").read_bytes() == before
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.parametrize("file", ["rung-*.json", "reference.json"])
def test_a_damaged_measurement_is_named(run, tmp_path, file):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for name in ("policy.safetensors", "ladder.json", "results.json"):
        (copy / name).unlink()
    path = sorted(copy.glob(file))[0]
    path.write_text('{"attacked": "much"}')
    with pytest.raises(SortRLError, match=rf"{path.name} is damaged .*Delete it to measure again"):
        sortrl.robustify(balancer(), "CartPole-v1", out=copy, **TINY)


HOPELESS = {**TINY, "steps": 1, "dagger_rounds": 0, "suite": (), "quick": True, "keep": 0.95}


def test_a_student_that_cannot_learn_is_announced(tmp_path):
    with pytest.warns(SortRLWarning, match=r"Do not rely on this policy: .* Try more data"):
        sortrl.robustify(balancer(), "CartPole-v1", out=tmp_path, **HOPELESS)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["gate"]["passed"] is False
    assert len(results["ladder"]["rungs"]) == 1
    said = f"Do not rely on this student: {results['gate']['reason']}"
    assert sortrl.report.summary_lines(results)[0].startswith(said)
    assert (tmp_path / "report.md").read_text().splitlines()[2].startswith("**Do not rely on this student")
    assert 'class="lead warning"' in (tmp_path / "report.html").read_text()
    with pytest.warns(SortRLWarning, match="Do not rely"):
        sortrl.robustify(balancer(), "CartPole-v1", **HOPELESS)  # nothing is kept, and it is said all the same


def test_the_command_ends_with_code_3_if_the_skill_is_lost(tmp_path, monkeypatch, capsys, recwarn):
    from sortrl.runs import robustify as pipeline

    monkeypatch.setattr(pipeline, "load_teacher", lambda *_, **__: balancer())
    made = pipeline.robustify

    def short(*args, **changes):
        return made(*args, **{**HOPELESS, **{k: v for k, v in changes.items() if v is not None}})

    monkeypatch.setattr(pipeline, "robustify", short)
    with pytest.raises(SystemExit) as stop:
        cli.main(["robustify", "CartPole-v1", "--teacher", "x.zip", "--out", str(tmp_path / "run"), "--quick"])
    assert stop.value.code == 3
    assert capsys.readouterr().out.startswith("Do not rely on this student: ")
    assert not [one for one in recwarn if issubclass(one.category, SortRLWarning)]  # it is said once


def test_the_recipe_is_a_recipe():
    recipe = LadderRecipe().with_options(steps=7, keep=0.9)
    assert (recipe.distill.steps, recipe.keep) == (7, 0.9)
    assert [rung.config(recipe.distill).steps for rung in LADDER] == [21, 7, 7, 7, 7]
    assert recipe.for_eps(0.2).distill.eps == 0.2
