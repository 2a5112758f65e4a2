"""What the documentation says can be typed, and its figures are those of results/."""

from __future__ import annotations

import functools
import importlib.util
import re
import runpy
import shlex
from pathlib import Path

import pytest

from sortrl import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "bench" / "README.md"]


def fenced(language: str) -> list[str]:
    """The fenced blocks of a language; fences open and close in turn, so a pattern alone would pair them wrongly."""
    blocks: list[str] = []
    for page in PAGES:
        inside: list[str] | None = None
        for line in page.read_text().splitlines():
            if line.startswith("```") and inside is None:
                inside, found = [], line[3:].strip()
            elif line.startswith("```"):
                if found == language:
                    blocks.append("\n".join(inside))
                inside = None
            elif inside is not None:
                inside.append(line)
    return blocks


COMMANDS = [
    line.split("#")[0].strip()
    for block in fenced("")
    for line in block.splitlines()
    if line.strip().startswith("sortrl ")
]


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("line", COMMANDS)
def test_documented_commands_are_accepted(line, monkeypatch):
    """Every option exists and parses. What the commands do is tested where they are."""
    called = []

    def recording(function):
        @functools.wraps(function)
        def record(*args, **kwargs):
            called.append(function.__name__)

        return record

    monkeypatch.setattr(cli, "COMMANDS", {name: recording(function) for name, function in cli.COMMANDS.items()})
    arguments = shlex.split(line)[1:]
    cli.main(arguments)
    assert called == [arguments[0]]


def test_documented_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.M):
            assert re.search(rf"^{target}:", makefile, re.M), f"{page.name}: make {target}"


@pytest.mark.parametrize("index", range(len(fenced("python"))))
def test_python_examples_compile_and_run_where_they_are_short(index):
    code = fenced("python")[index]
    compiled = compile(code, "README.md", "exec")
    if "agent.zip" not in code:
        exec(compiled, {})


def test_readme_shows_the_committed_results():
    spec = importlib.util.spec_from_file_location("render", ROOT / "docs" / "render.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for page in module.PAGES:
        text = page.read_text()
        assert module.rendered(text) == text, f"{page.name}: run python docs/render.py"


def test_readme_first_screen():
    first = (ROOT / "README.md").read_text()[:2500]
    for part in ("make demo", "make test", "```python", "![", "robustify"):
        assert part in first


def test_quickstart_runs(capsys):
    assert (
        len(
            [
                line
                for line in (ROOT / "examples" / "quickstart.py").read_text().splitlines()
                if line and "import" not in line
            ]
        )
        <= 9
    )
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    out = capsys.readouterr().out
    score = float(re.search(r"PGD-10 at eps 0.1: (\d+)", out)[1])
    assert score > 400
