"""The policies that come with the project: they load, play as their cards say, and cannot be swapped unnoticed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import sortrl
from sortrl import attacks
from sortrl.certify import save_certificates
from sortrl.cli import main
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_json, read_tensors
from sortrl.data.collect import CollectConfig
from sortrl.envs import EnvSlots, describe
from sortrl.evaluate.returns import valid_range
from sortrl.nets import zoo
from sortrl.runs.run import TRAINED_HERE, read_run
from sortrl.runs.zoo import publish
from sortrl.teachers import quantized
from sortrl.verify import verify

ENTRIES = zoo.names()
GAMES = ("freeway", "roadrunner", "pong", "bankheist")
ATARI = tuple(name for name in ENTRIES if name.partition("-")[0] in GAMES)


def _needs(name):
    """Skip where the package is missing that an entry's environment needs."""
    needed = {"breakout": "minatar", "jumper": "envpool", "coinrun": "envpool"}.get(name.partition("-")[0])
    needed = "ale_py" if name in ATARI else needed
    if needed:
        pytest.importorskip(needed, reason=f"zoo:{name} is played with {needed}")


@pytest.fixture
def own_zoo(tmp_path, monkeypatch):
    """A copy of the zoo that a test may damage."""
    shutil.copytree(zoo.folder(), tmp_path / "zoo")
    monkeypatch.setenv("SORTRL_ZOO", str(tmp_path / "zoo"))
    return tmp_path / "zoo"


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_is_whole_and_small(name):
    entry = zoo.locate(f"zoo:{name}")
    card = zoo.card(entry)
    assert {"policy.safetensors", "run.json"} <= card["files"].keys()
    assert all((entry / file).stat().st_size <= zoo.LARGEST_FILE for file in card["files"])
    assert (entry / "README.md").read_text().startswith(f"# zoo:{name}")
    assert sortrl.load(f"zoo:{name}").n_actions == card["policy"]["n_actions"]
    _needs(name)
    env_id, policy, _ = read_run(Path(f"zoo:{name}"))
    assert env_id == card["env"]
    assert policy.n_actions == card["policy"]["n_actions"]


def test_an_entry_plays_as_its_card_says():
    policy = sortrl.load("zoo:cartpole")
    result = sortrl.evaluate(policy, "CartPole-v1", episodes=5, seed=7)
    stated = next(
        row for row in zoo.card(zoo.entry("cartpole"))["returns"] if row["policy"] == "student" and row["eps"] == 0
    )
    assert result.mean == pytest.approx(stated["mean"], rel=0.02)


@pytest.mark.parametrize("name", ATARI)
def test_no_attack_changes_an_action_of_an_atari_student_within_its_radius(name):
    """On states that it remembers or has learned from and on others: sticky actions lead away from the former."""
    _needs(name)
    env_id, policy, _ = read_run(Path(f"zoo:{name}"))
    states = []
    for task in (env_id, env_id.replace("84", "84-sticky")):
        with EnvSlots(task, 1) as slots:
            obs = slots.reset(0, seed=0)
            for _ in range(60):
                obs, _, _ = slots.step(0, int(policy.predict(obs)[0]))
                states.append(obs.copy())
    unit = policy.normalize(np.stack(states))
    certificate = policy.certify_unit(unit)
    known = (certificate.radius[:60] > 1 / 255).mean()  # the way it knows; a SortNet knows none by heart
    assert known == 1.0 or (name in GAMES and known > 0.9)
    eps = torch.from_numpy(0.999 * certificate.radius)
    hunt = attacks.Ensemble(
        (attacks.SaltAndPepper(), attacks.PGD(10, surrogate_p=8.0), attacks.Targeted(5), attacks.Square(20)), "hunt"
    )
    low, high = valid_range(policy, describe(env_id))
    for lower, upper in ((low, high), (None, None)):  # pixels that are darker than black must not do it either
        found = hunt(policy, unit, eps, lower, upper, torch.Generator().manual_seed(0))
        assert not found.changed.any()
    wide = hunt(policy, unit, torch.full_like(eps, 0.5), low, high, torch.Generator().manual_seed(0))
    assert wide.changed.any(), "an attack that never succeeds would prove nothing"


@pytest.mark.parametrize("name", ["jumper", "coinrun"])
def test_a_memory_plays_the_levels_of_its_card_again(name):
    """A level is a deterministic game, and so is its memory: the return is the one on the card, not about that."""
    _needs(name)
    card = zoo.card(zoo.entry(name))
    stated = next(row for row in card["returns"] if row["policy"] == "student" and row["eps"] == 0)
    policy = sortrl.load(f"zoo:{name}")
    # The seeds of any evaluation with up to 200 episodes mean the levels from 0 on.
    result = sortrl.evaluate(policy, card["env"], episodes=stated["episodes"], seed=7)
    assert result.mean == stated["mean"] > 0
    attacked = sortrl.evaluate(policy, card["env"], attacks.PGD(2), 5 / 255, 3, seed=7)
    assert attacked.returns.tolist() == result.returns[:3].tolist()


def test_halved_weights_are_certified_as_they_are(tmp_path):
    """The file holds halves, the policy computes with floats: the independent checker agrees on scores and hash."""
    file = zoo.locate("zoo:cartpole") / "policy.safetensors"
    assert read_tensors(file)[0]["layers.0.weight"].dtype == torch.float16
    policy = sortrl.load("zoo:cartpole")
    states = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    save_certificates(tmp_path / "c.safetensors", policy, states, policy.certify_unit(states), file)
    verdict = verify(tmp_path / "c.safetensors")
    assert verdict.ok, verdict.failures


def test_a_swapped_file_is_refused(own_zoo):
    file = own_zoo / "cartpole" / "policy.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(SortRLError, match=r"not the file that .*cartpole/card.json describes"):
        sortrl.load("zoo:cartpole")


@pytest.mark.parametrize("name", ["nothing", "../cartpole", "", "cartpole/../cartpole"])
def test_unknown_names_are_told_what_there_is(name):
    with pytest.raises(SortRLError, match=r"The zoo has .*cartpole"):
        sortrl.load(f"zoo:{name}")


def test_a_card_cannot_point_outside(own_zoo):
    path = own_zoo / "cartpole" / "card.json"
    card = read_json(path)
    card["files"]["../breakout/run.json"] = zoo.sha256(own_zoo / "breakout" / "run.json")
    path.write_text(json.dumps(card))
    with pytest.raises(SortRLError, match="describes"):
        zoo.locate("zoo:cartpole")


def test_a_run_becomes_an_entry(tmp_path, monkeypatch, capsys):
    """What was measured is on the card, no path of the machine is, and the entry is played from the command line."""
    run = tmp_path / "run"
    tiny = {"preset": "fast", "steps": 20, "width": 16, "depth": 2, "episodes": 2, "suite": (), "dagger_rounds": 0}
    tiny["collect"] = CollectConfig(states=2000)
    teacher = zoo.locate("zoo:cartpole") / "teacher"
    policy = sortrl.robustify(teacher, "CartPole-v1", out=run, **tiny)
    entry = publish(run, "tiny", tmp_path / "zoo")
    monkeypatch.setenv("SORTRL_ZOO", str(tmp_path / "zoo"))
    monkeypatch.chdir(tmp_path)
    states = np.random.default_rng(0).normal(size=(100, 4))
    assert (sortrl.load("zoo:tiny").predict(states)[0] == policy.predict(states)[0]).mean() >= 0.98
    for file in ("card.json", "run.json", "README.md"):
        assert str(tmp_path) not in (entry / file).read_text()
    with pytest.raises(SortRLError, match="exists already"):
        publish(run, "tiny", tmp_path / "zoo")
    with pytest.raises(SortRLError, match="lower-case"):
        publish(run, "../tiny", tmp_path / "zoo")
    main(["zoo"])
    assert "zoo:tiny" in capsys.readouterr().out
    main(["zoo", "tiny"])
    assert "sha256" in capsys.readouterr().out
    main(["evaluate", "zoo:tiny", "--eps", "0.1", "--episodes", "2"])
    assert "student" in capsys.readouterr().out


def test_a_teacher_that_was_given_is_not_passed_on(tmp_path):
    run = tmp_path / "run"
    tiny = {"preset": "fast", "steps": 20, "width": 16, "depth": 2, "episodes": 2, "suite": (), "dagger_rounds": 0}
    sortrl.robustify(
        zoo.locate("zoo:cartpole") / "teacher", "CartPole-v1", out=run, collect=CollectConfig(states=2000), **tiny
    )
    assert not (publish(run, "given", tmp_path) / "teacher").exists()
    assert (publish(run, "passed-on", tmp_path, with_teacher=True) / "teacher" / "teacher.safetensors").exists()
    document = read_json(run / "run.json")
    document["identity"]["teacher"] = TRAINED_HERE
    (run / "run.json").write_text(json.dumps(document))
    assert (publish(run, "own", tmp_path) / "teacher" / "teacher.safetensors").exists()


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_can_be_watched(name, tmp_path, monkeypatch, capsys):
    _needs(name)
    monkeypatch.chdir(tmp_path)
    main(["watch", f"zoo:{name}", "--max-steps", "3"])
    assert (tmp_path / "runs" / f"zoo-{name}" / "episode.gif").exists()
    assert "film:" in capsys.readouterr().out


def test_rounding_pixels_defends_a_teacher_whose_pixels_are_black_or_white():
    """The baseline that certificates have to be compared with: where images have two levels, it is hard to beat."""
    pytest.importorskip("minatar")
    env_id, _, teacher = read_run(Path("zoo:breakout"))
    behind = quantized(teacher, 2)
    arguments = (env_id, attacks.PGD(10), 0.3, 3)
    clean, attacked = (sortrl.evaluate(behind, env_id, episodes=3), sortrl.evaluate(behind, *arguments))
    assert attacked.returns.tolist() == clean.returns.tolist()
    assert sortrl.evaluate(teacher, *arguments).mean < 0.5 * clean.mean
    unit = teacher.normalize(np.random.default_rng(0).integers(0, 256, size=(20, *teacher.obs_shape)))
    assert attacks.PGD(10)(behind, unit, 0.3).changed.any(), "the gradient behind the rounding is there to be followed"
    with pytest.raises(SortRLError, match="expected a whole number from 2"):
        quantized(teacher, 1)
