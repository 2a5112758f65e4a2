"""Hooks of the documentation site: files that pages show but that live outside docs/."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
SHOWN = "assets/results"  # where results/ stands in the site
_OUTSIDE = re.compile(
    r"(\]\(|href=\")(?:\.\./)+(results/[\w./-]+|CHANGELOG\.md|CONTRIBUTING\.md|LICENSE|bench/README\.md)([)\"])"
)


def on_files(files: Files, config: Any) -> Files:
    """Publish what is in results/, and the root's documents, beside the pages that link to them."""
    for path in sorted(found for found in (ROOT / "results").rglob("*") if found.is_file()):
        name = path.relative_to(ROOT / "results").as_posix()
        files.append(File.generated(config, f"{SHOWN}/{name}", abs_src_path=str(path)))
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "bench/README.md"):
        target = f"assets/{name.replace('/', '-')}.txt"
        files.append(File.generated(config, target, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """In the repository a page links to ../results/x.json; in the site that file is an asset."""
    start = posixpath.dirname(page.file.src_uri)

    def inside(match: re.Match[str]) -> str:
        name = match[2]
        shown = f"{SHOWN}/{name.removeprefix('results/')}"
        target = shown if name.startswith("results/") else f"assets/{name.replace('/', '-')}.txt"
        return f"{match[1]}{posixpath.relpath(target, start or '.')}{match[3]}"

    return _OUTSIDE.sub(inside, markdown)
