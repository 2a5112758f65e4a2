"""The command line: what a person types and reads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sortrl
from helpers import balancer
from sortrl import attacks, cli
from sortrl.data.collect import CollectConfig


def call(capsys, *arguments: str) -> str:
    cli.main(list(arguments))
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    small = {
        "preset": "fast",
        "steps": 150,
        "width": 32,
        "depth": 3,
        "batch": 128,
        "dagger_rounds": 0,
        "episodes": 2,
        "eps_grid": (0.0, 0.05),
        "suite": ("noise", "pgd-10-p32"),
        "suite_episodes": 2,
    }
    sortrl.robustify(balancer(), "CartPole-v1", 0.05, out=directory, collect=CollectConfig(states=2000), **small)
    return directory


def test_info_names_the_backend_and_why(capsys, tmp_path):
    out = call(capsys, "info", "--json", str(tmp_path / "info.json"))
    facts = json.loads((tmp_path / "info.json").read_text())
    assert facts["in_use"]["backend"] in out
    assert facts["in_use"]["why"] in out
    assert facts["versions"]["torch"] in out


def test_tasks(capsys):
    out = call(capsys, "tasks")
    assert all(name in out for name in ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "LunarLander-v3"))


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(capsys, command):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert cli.COMMANDS[command].__doc__.splitlines()[0].split(",")[0][:40] in out


def test_the_help_of_evaluate_names_every_attack_of_the_registry(capsys):
    with pytest.raises(SystemExit):
        cli.main(["evaluate", "--help"])
    assert set(attacks.names()) <= set(re.findall(r"[a-z0-9-]+", capsys.readouterr().out))


def test_evaluate_shows_student_and_teacher(capsys, run, tmp_path):
    # The hand-written teacher cannot be saved, so the student stands alone here.
    out = call(capsys, "evaluate", str(run), "--eps", "0.05", "--episodes", "2", "--json", str(tmp_path / "rows.json"))
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["eps"] for row in rows] == [0.0, 0.05]
    assert "student" in out
    assert f"{rows[1]['mean']:.1f}" in out


def test_certify_states_radii_in_raw_units(capsys, run, tmp_path):
    out = call(
        capsys, "certify", str(run), "--eps", "0.01", "0.05", "--episodes", "2", "--json", str(tmp_path / "c.json")
    )
    figures = json.loads((tmp_path / "c.json").read_text())
    assert "pole angle" in out
    assert figures["at"] == [0.01, 0.05]


def test_options_of_robustify_reach_the_run(monkeypatch, tmp_path):
    """Hardening and candidates, which take minutes, as far as the configuration that a run would have."""

    class Stop(Exception):
        pass

    def configured(self, *_arguments, **_named):
        raise Stop(self.config)

    monkeypatch.setattr("sortrl.runs.stages.Run.teacher", configured)
    options = ("--harden", "0.3", "--candidates", "2", "--episodes", "7", "--out", str(tmp_path / "run"))
    with pytest.raises(Stop) as stop:
        cli.main(["robustify", "CartPole-v1", "--preset", "fast", *options])
    config = stop.value.args[0]
    assert (config.harden.eps, config.candidates, config.episodes) == (0.3, 2, 7)


def test_report_is_made_again_from_the_results_alone(capsys, run):
    before = (run / "report.html").read_text()
    (run / "report.html").unlink()
    assert "report.html" in call(capsys, "report", str(run))
    assert (run / "report.html").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["robustify", "CartPol-v1"], "Did you mean CartPole-v1"),
        (["robustify", "Pendulum-v1"], "continuous actions"),
        (["robustify", "CartPole-v1", "--eps", "-1"], "eps is -1"),
        (["robustify", "CartPole-v1", "--threads", "0"], "--threads is 0"),
        (["evaluate", "nowhere"], "Cannot read nowhere"),
        (["certify", "nowhere"], "not the directory of a run"),
        (["report", "nowhere"], "Cannot read"),
        (["evaluate", "{run}", "--attack", "magic"], "Unknown attack"),
        (["evaluate", "{run}", "--episodes", "0"], "episodes 0"),
    ],
)
def test_mistakes_give_one_clear_line(capsys, run, arguments, message):
    with pytest.raises(SystemExit) as stop:
        cli.main([argument.format(run=run) for argument in arguments])
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--version"], ["tasks"], ["robustify", "--help"]])
def test_output_that_nobody_reads_ends_the_command_quietly(arguments, unbuffered):
    read, write = os.pipe()
    os.close(read)
    try:
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        command = [sys.executable, "-m", "sortrl", *arguments]
        ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment)
    finally:
        os.close(write)
    assert (ended.stderr, ended.returncode) == ("", 141)


def test_a_broken_pipe_to_somebody_else_is_not_hidden(monkeypatch):
    def broken():
        raise BrokenPipeError

    monkeypatch.setattr(cli, "COMMANDS", {"tasks": broken, "info": broken})
    with pytest.raises(BrokenPipeError):
        cli.main(["tasks"])


def test_importing_prints_nothing_and_stays_light():
    code = "import sys, sortrl.core.errors; print(sorted(m for m in ('tensorboard', 'matplotlib.pyplot') if m in sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
    assert run.stderr == ""
