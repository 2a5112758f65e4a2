"""Films and pictures show the episode that was played; the commands that make them work on a run."""

from __future__ import annotations

import json
import os
from base64 import b64decode
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from PIL import Image
from test_report import make_results

from helpers import balancer
from sortrl import attacks, cli
from sortrl.certify.returns import CertifiedReturn
from sortrl.core.errors import SortRLError
from sortrl.core.files import write_json
from sortrl.data.collect import CollectConfig, collect
from sortrl.distill.loop import DistillConfig, distill
from sortrl.envs import Simulator
from sortrl.evaluate.returns import episode_seeds, evaluate
from sortrl.evaluate.watch import Episode, least_certain, pictures, play
from sortrl.nets import SortPolicy
from sortrl.report import film, render

ENV = "CartPole-v1"
EPS = 0.1


@pytest.fixture(scope="module", autouse=True)
def off_screen():
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


@pytest.fixture(scope="module")
def student():
    data = collect(balancer(), ENV, CollectConfig(states=3000), seed=0)
    config = DistillConfig(eps=0.05, steps=200, batch=256, width=32, depth=3, lambda_end=0.1)
    return distill(data, balancer().normalizer, config).policy


@pytest.fixture(scope="module")
def run(student, tmp_path_factory):
    """The directory of a run, as far as commands on a finished run read it."""
    directory = tmp_path_factory.mktemp("run")
    student.save(directory)
    write_json(directory / "run.json", {"identity": {"env": ENV, "config": {"eps": EPS}}})
    return directory


@pytest.fixture(scope="module")
def pair(student):
    return [play(student, ENV, EPS, attack, seed=1, max_steps=60) for attack in (None, attacks.PGD(10))]


def _frames(path):
    with Image.open(path) as image:
        return [
            frame.copy().convert("RGB") for index in range(image.n_frames) for frame in [image.seek(index) or image]
        ]


def _count(image, colour, tolerance=24):
    """Pixels of about this colour."""
    return int((np.abs(np.asarray(image, dtype=int) - np.array(colour)).max(2) <= tolerance).sum())


def test_an_episode_is_the_one_that_evaluate_plays(student):
    seeds = episode_seeds(4, 2)
    for attack, eps in ((None, 0.0), (attacks.PGD(10), EPS)):
        result = evaluate(student, ENV, attack, eps, episodes=2, seed=4)
        episodes = [play(student, ENV, eps, attack, seed) for seed in seeds]
        assert [episode.total for episode in episodes] == result.returns.tolist()
        assert np.concatenate([episode.radii for episode in episodes]) == pytest.approx(
            result.radii, rel=1e-4, abs=1e-6
        )
        changed = np.concatenate([episode.changed for episode in episodes])
        assert changed.mean() == result.changed_share
        assert changed.any() == (attack is not None)


def test_no_action_changes_where_it_is_certified(student):
    episode = play(student, ENV, EPS, attacks.PGD(10), seed=3)
    assert episode.certified.any()
    assert episode.changed.any()
    assert not episode.changed[episode.certified].any()


def test_least_certain_states_lie_apart():
    radii = np.array([5.0, 0.1, 0.0, 0.2, 5.0, 5.0, 5.0, 5.0, 0.3, 5.0])
    zeros = np.zeros(10)
    episode = Episode(ENV, 0, "none", EPS, zeros.astype(int), radii, zeros.astype(bool), zeros)
    assert least_certain(episode, 2, apart=5) == [2, 8]
    assert least_certain(episode, 3, apart=1) == [1, 2, 3]


def test_pictures_show_the_steps_asked_for(pair):
    shown, pace = pictures(pair[0], [0, 10, len(pair[0])])
    assert pace == 50
    assert len(shown) == 3
    assert shown[0].shape == (400, 600, 3)
    assert not np.array_equal(shown[0], shown[1])
    assert np.array_equal(pictures(pair[0], [10])[0][0], shown[1])


def test_an_episode_that_does_not_repeat_is_refused(pair):
    wrong = Episode(**{**vars(pair[0]), "rewards": pair[0].rewards + 1})
    with pytest.raises(SortRLError, match="does not repeat itself"):
        pictures(wrong, [5])


def test_a_film_shows_radii_in_green_and_red_and_marks_successes(pair, tmp_path):
    path = tmp_path / "film.gif"
    film.film(pair, path)
    frames, longest = _frames(path), max(map(len, pair))
    assert len(frames) == longest + 1
    assert frames[0].width == 2 * film.WIDTH + film._GAP
    strips = [
        frames[-1].crop((left, frames[-1].height - film._STRIP, left + film.WIDTH, frames[-1].height))
        for left in (0, film.WIDTH + film._GAP)
    ]
    for strip, episode in zip(strips, pair, strict=True):
        assert 0 < episode.certified.mean() < 1, "the test needs both colours"
        assert _count(strip, film._GREEN) + _count(strip, film._PALE_GREEN, 12) > 0.8 * episode.certified.sum() * 90
        assert _count(strip, film._RED) + _count(strip, film._PALE_RED, 12) > 0.8 * (~episode.certified).sum() * 90
    above = [
        frames[-1].crop(
            (
                left,
                frames[-1].height - film._STRIP - film._MARKS,
                left + film.WIDTH,
                frames[-1].height - film._STRIP - 2,
            )
        )
        for left in (0, film.WIDTH + film._GAP)
    ]
    assert _count(above[0], film._INK) == 0
    assert _count(above[1], film._INK) >= pair[1].changed.sum()


def _balanced(steps):
    """An episode longer than a film has frames."""
    simulator, actions = Simulator(ENV, 0), []
    while len(actions) < steps:
        actions.append(int(balancer().predict(simulator.obs)[0]))
        simulator.step(actions[-1])
    radii = np.random.default_rng(0).uniform(0, 0.3, steps)
    return Episode(ENV, 0, "none", EPS, np.array(actions), radii, np.zeros(steps, bool), np.ones(steps))


def test_a_film_stays_small(tmp_path, monkeypatch):
    long = _balanced(230)
    film.film([long], tmp_path / "long.gif")
    frames, size = len(_frames(tmp_path / "long.gif")), (tmp_path / "long.gif").stat().st_size
    assert frames == film.MOST_FRAMES
    assert size < film.MOST_BYTES
    monkeypatch.setattr(film, "MOST_BYTES", size // 2)
    film.film([long], tmp_path / "short.gif")
    assert (tmp_path / "short.gif").stat().st_size <= size // 2
    assert len(_frames(tmp_path / "short.gif")) < frames


def test_the_report_shows_the_film(pair, tmp_path):
    results = make_results()
    assert "<img" not in render(results, tmp_path).read_text(encoding="utf-8")
    film.film(pair[:1], tmp_path / "episode.gif")
    page = render(results, tmp_path).read_text(encoding="utf-8")
    source = page.split('<img src="data:image/gif;base64,')[1].split('"')[0]
    assert b64decode(source) == (tmp_path / "episode.gif").read_bytes()
    assert "img-src data:" in page
    assert 'alt="Animation of an episode of CartPole-v1' in page
    (tmp_path / "episode.gif").write_bytes(b"not a picture")
    with pytest.raises(SortRLError, match="not a GIF"):
        render(results, tmp_path)


def test_watch_command(capsys, run, tmp_path):
    out = tmp_path / "some" / "film.gif"
    cli.main(
        [
            "watch",
            str(run),
            "--out",
            str(out),
            "--max-steps",
            "20",
            "--eps",
            "0.2",
            "--json",
            str(tmp_path / "watch.json"),
        ]
    )
    text = capsys.readouterr().out
    assert "PGD-10" in text
    assert "certified at eps 0.2" in text
    assert len(_frames(out)) == 21
    clean, attacked = json.loads((tmp_path / "watch.json").read_text())
    assert (clean["attack"], attacked["attack"]) == ("none", "PGD-10")
    assert len(clean["radii"]) == len(clean["actions"]) == 20
    cli.main(["watch", str(run), "--attack", "none", "--max-steps", "10"])
    assert f"at eps {EPS:g}" in capsys.readouterr().out, "the eps of the run is the default"
    assert _frames(run / "episode.gif")[0].width == film.WIDTH


def test_watch_shows_the_teacher_under_the_same_attack(capsys, tmp_path):
    out, record = tmp_path / "film.gif", tmp_path / "watch.json"
    options = ["--beside-teacher", "--eps", "0.075", "--max-steps", "20", "--out", str(out), "--json", str(record)]
    cli.main(["watch", "zoo:breakout", *options])
    teacher, student = json.loads(record.read_text())
    assert [(episode["agent"], episode["attack"]) for episode in (teacher, student)] == [
        ("teacher", "PGD-10"),
        ("student", "PGD-10"),
    ]
    assert teacher["changed"], "the attack must reach the teacher"
    assert set(teacher["radii"]) == {0.0}, "a teacher has no certificates"
    assert max(student["radii"]) > 0.075
    assert "teacher PGD-10" in capsys.readouterr().out
    assert _frames(out)[0].width == 2 * film.WIDTH + film._GAP


def test_certify_command_draws_and_tells_what_is_proven(capsys, run, student, tmp_path):
    arguments = ["--eps", "0.02", "0.1", "--episodes", "3", "--return-episodes", "2", "--budget", "300"]
    cli.main(["certify", str(run), *arguments, "--seed", "2", "--json", str(tmp_path / "c.json")])
    text, figures = capsys.readouterr().out, json.loads((tmp_path / "c.json").read_text())
    assert "return proven" in text
    assert "under PGD-10" in text
    assert "least certain states" in text
    for row in figures["returns"]:
        bounds = [episode["lower"] for episode in row["episodes"]]
        assert row["lower_mean"] == np.mean(bounds)
        assert all(total >= bound for total, bound in zip(row["attacked"]["returns"], bounds, strict=True))
        assert f">= {row['lower_mean']:.1f}" in text
    assert set(CertifiedReturn.__dataclass_fields__) - {"eps_unit"} == set(figures["returns"][0]["episodes"][0])
    steps = [state["step"] for state in figures["least_certain"]]
    assert steps == sorted(steps)
    with Image.open(run / "certificate.png") as image:
        assert image.width > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["watch", "nowhere"], "not the directory of a run"),
        (["watch", "{run}", "--attack", "magic"], "magic"),
        (["watch", "{run}", "--out", "film.mp4"], "ends in .gif"),
        (["watch", "{run}", "--eps", "-1"], "eps is -1"),
        (["watch", "{run}", "--max-steps", "0"], "max_steps 0"),
        (["watch", "{run}", "--beside-teacher"], "has no teacher to show"),
        (["certify", "{run}", "--budget", "0"], "budget 0"),
        (["certify", "{run}", "--return-episodes", "0"], "return_episodes 0"),
    ],
)
def test_mistakes_give_one_clear_line(capsys, run, arguments, message):
    with pytest.raises(SystemExit) as stop:
        cli.main([argument.format(run=run) for argument in arguments])
    assert stop.value.code == 1
    assert message in capsys.readouterr().err


class Blind(CartPoleEnv):
    """A task without pictures."""

    metadata: ClassVar = {"render_modes": []}

    def __init__(self):
        super().__init__()


def test_what_cannot_be_drawn_is_named_and_certified_all_the_same(student, capsys, tmp_path):
    gym.register("sortrl-test-Blind-v0", Blind, max_episode_steps=30)
    with pytest.raises(SortRLError, match="cannot be drawn"):
        pictures(play(student, "sortrl-test-Blind-v0", EPS, max_steps=3), [0])
    student.save(tmp_path)
    write_json(tmp_path / "run.json", {"identity": {"env": "sortrl-test-Blind-v0", "config": {"eps": EPS}}})
    cli.main(["certify", str(tmp_path), "--eps", "0.2", "--episodes", "2", "--budget", "20", "--attack", "none"])
    out = capsys.readouterr().out
    assert "no bound" in out, "no least reward is declared for this task"
    assert "without pictures of states" in out
    assert (tmp_path / "certificate.png").exists()


def test_play_works_on_other_tasks():
    torch.manual_seed(0)
    policy = SortPolicy((8,), 4, width=8, depth=2).eval().requires_grad_(False)
    episode = play(policy, "LunarLander-v3", 0.1, attacks.FGSM(), seed=5, max_steps=25)
    shown, _ = pictures(episode, [0, len(episode)])
    assert len(shown) == 2
