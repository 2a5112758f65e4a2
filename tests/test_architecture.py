"""The floor plan: packages are layers, and a module imports only from its own layer and those below it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import sortrl

ROOT = Path(sortrl.__file__).parent
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
LAYERS = (  # bottom first; CONTRIBUTING.md shows the same list with what is in each
    "core",
    "ops",
    "nets",
    "envs",
    "attacks",
    "teachers",
    "data",
    "distill",
    "certify",
    "verify",
    "evaluate",
    "baselines",
    "report",
    "runs",
    "experiments",
    "cli",
)


def imported_layers(file: Path) -> set[str]:
    """The packages of sortrl that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "sortrl":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("sortrl."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("sortrl.")}
    return found


def test_the_top_holds_packages_only():
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(LAYERS)


def test_imports_go_down():
    upward = []
    for layer in LAYERS:
        for file in (ROOT / layer).rglob("*.py"):
            above = LAYERS[LAYERS.index(layer) + 1 :]
            upward += [f"{file.relative_to(ROOT)} imports {other}" for other in imported_layers(file) if other in above]
    assert not upward


def test_certify_and_attacks_do_not_know_each_other():
    for one, other in (("certify", "attacks"), ("attacks", "certify")):
        files = list((ROOT / one).rglob("*.py"))
        assert files
        assert not [file for file in files if other in imported_layers(file)]


def test_verify_shares_no_code_with_what_it_checks():
    for file in (ROOT / "verify").rglob("*.py"):
        assert imported_layers(file) <= {"core", "verify"}, file


def test_contributing_shows_the_layers():
    listed = CONTRIBUTING.read_text().partition("<!-- layers:begin -->")[2].partition("<!-- layers:end -->")[0]
    shown = re.findall(r"^\d+\. `([a-z]+)`: ", listed, re.M)
    assert shown == list(LAYERS)


def test_tests_mirror_the_packages():
    folders = {path.name for path in Path(__file__).parent.iterdir() if path.is_dir()} - {"fixtures", "__pycache__"}
    assert folders <= set(LAYERS)
