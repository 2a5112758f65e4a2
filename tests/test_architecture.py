"""Imports follow the flow of data: a module never imports one that comes after it."""

from __future__ import annotations

import ast
from pathlib import Path

import sortrl

ORDER = [
    "errors",
    "memory",
    "files",
    "zoo",
    "verify",
    "checkpoint",
    "normalizer",
    "stats",
    "records",
    "datasets",
    "ops",
    "nets",
    "envs",
    "monitor",
    "certified_return",
    "checkpoint",
    "teachers",
    "starts",
    "collect",
    "distill",
    "remember",
    "search",
    "straighten",
    "boxes",
    "compact",
    "rounding",
    "polish",
    "certify",
    "attacks",
    "timing",
    "evaluate",
    "choosing",
    "watch",
    "film",
    "attacked",
    "progress",
    "provenance",
    "suite",
    "checks",
    "report",
    "certificate_study",
    "certification",
    "tasks",
    "config",
    "stages",
    "pipeline",
    "imitate",
    "publish",
    "reliability",
    "reproduce",
    "bench",
    "cli",
]
ROOT = Path(sortrl.__file__).parent


def imported_parts(file: Path) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "sortrl":
            parts |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("sortrl."):
            parts.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            parts |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("sortrl.")}
    return parts


def test_imports_follow_the_arrow():
    upward = []
    for file in ROOT.rglob("*.py"):
        part = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        assert part in ORDER, f"{part} has no place in the flow: add it to ORDER"
        upward += [
            f"{file.relative_to(ROOT)} imports {other}"
            for other in imported_parts(file)
            if other in ORDER and ORDER.index(other) > ORDER.index(part)
        ]
    assert not upward


def test_certify_and_attacks_do_not_know_each_other():
    for file in (ROOT / "certify").glob("*.py"):
        assert "attacks" not in imported_parts(file)
    for file in (ROOT / "attacks").glob("*.py"):
        assert "certify" not in imported_parts(file)
