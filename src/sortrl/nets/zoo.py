"""Trained policies that come with the project: ``sortrl.load("zoo:cartpole")``.

An entry is a folder like that of a run (policy, run.json and, if it is small, the teacher), with a card that says what it is,
how it was measured, and the hash of every file. An installed package has every card, but of large entries not the weights, which
are fetched on request (:func:`sortrl.nets.hub.fetch_entry`) and kept in the user's cache. Teachers that several students learned
from lie in ``teachers``, one copy each, and the cards name them.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from sortrl.core.errors import SortRLError
from sortrl.core.files import read_object, regular_file
from sortrl.nets.cards import FORMAT

PREFIX = "zoo:"
CARD, POLICY = "card.json", "policy.safetensors"
TEACHERS = "teachers"  # inside the zoo's folder
TEACHER_FILE = "teacher.safetensors"
LARGEST_FILE = 5 * 2**20
MOST_FILES = 100


def folder() -> Path:
    """Where the entries are: ``$SORTRL_ZOO``, the installed package's, or those of the source tree."""
    if chosen := os.environ.get("SORTRL_ZOO"):
        return Path(chosen)
    here = Path(__file__).resolve()
    installed, source = here.parents[1] / "zoo", here.parents[3] / "zoo"
    return installed if any(installed.glob(f"*/{CARD}")) else source


def names() -> list[str]:
    """Of all entries.

    >>> "cartpole" in names()
    True
    """
    return sorted(path.parent.name for path in folder().glob(f"*/{CARD}"))


def entry(name: str) -> Path:
    """The folder of an entry: at least its card."""
    if name not in names():  # which also keeps a name from leading out of the folder
        known = ", ".join(names()) or f"nothing in {folder()}; point SORTRL_ZOO to the zoo of a source tree"
        raise SortRLError(f"There is no {PREFIX}{name[:60]}. The zoo has {known}.")
    return folder() / name


def card(where: Path) -> dict[str, Any]:
    """What is known about an entry, from its folder."""
    found = read_object(where / CARD)
    if found.get("format") != FORMAT or not isinstance(found.get("files"), dict):
        raise SortRLError(f"{where / CARD}: format {str(found.get('format'))[:60]!r}, expected {FORMAT}.")
    if len(found["files"]) > MOST_FILES:  # each is read and hashed, and one file has many names
        raise SortRLError(f"{where / CARD}: {len(found['files'])} files, expected at most {MOST_FILES}.")
    return found


def is_entry(path: str | Path) -> bool:
    """Whether a path names an entry of the zoo."""
    return str(path).startswith(PREFIX)


def locate(path: str | Path) -> Path:
    """The path itself; of ``zoo:NAME`` the entry's folder, of ``hf:user/name`` what was fetched of it. Their files are checked
    against the hashes of the card.

    >>> locate("runs/mine").name, locate("zoo:cartpole").name
    ('mine', 'cartpole')
    """
    from sortrl.nets import hub  # it knows this module

    if hub.is_repository(path):
        return hub.fetch(str(path))
    if not is_entry(path):
        return Path(path)
    return checked(whole(str(path).removeprefix(PREFIX)))


def whole(name: str) -> Path:
    """The folder that has all files of an entry: that of the package, or what was fetched into the user's cache."""
    here, fetched = entry(name), cached(name)
    files = card(here)["files"]
    if POLICY not in files or (here / POLICY).exists():
        return here
    if (fetched / CARD).exists() and card(fetched)["files"] == files:
        return fetched
    raise SortRLError(
        f"{PREFIX}{name} is known, but its weights are not part of the installed package, which would be too large with all of them. "
        f"Fetch them once (sortrl zoo {name} --fetch), or point SORTRL_ZOO to the zoo of a source tree."
    )


def cached(name: str) -> Path:
    """Where the files of an entry are kept that were fetched: in ``$SORTRL_CACHE``, or else the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SORTRL_CACHE") or Path(home) / "sortrl") / "zoo" / name


def checked(where: Path, largest: int = LARGEST_FILE) -> Path:
    """The folder of an entry, if its files are those that its card describes."""
    for file, digest in card(where)["files"].items():
        if ".." in Path(file).parts or Path(file).is_absolute() or sha256(where / file, largest) != digest:
            raise SortRLError(f"{where / file} is not the file that {where / CARD} describes. Fetch the entry again.")
    return where


def teacher_folder(where: Path) -> Path | None:
    """Where the teacher of a run or of an entry is, if it is there: beside the student, or the shared one that the card names.

    >>> teacher_folder(entry("cartpole")).name, teacher_folder(entry("freeway-rounded")).parent.name
    ('teacher', 'teachers')
    """
    if (where / "teacher" / TEACHER_FILE).exists():
        return where / "teacher"
    named = card(where).get("shared_teacher") if (where / CARD).exists() else None
    if named is None:
        return None
    name, digest = (str(named.get(key)) if isinstance(named, dict) else "" for key in ("name", "sha256"))
    shared = folder() / TEACHERS / name
    well_named = re.fullmatch(r"[a-z0-9][a-z0-9-]*", name)
    if well_named and not shared.exists():  # packages leave large files out
        return None
    if not well_named or sha256(shared / TEACHER_FILE) != digest:
        raise SortRLError(f"{shared} is not the teacher that {where / CARD} describes. Fetch the entry again.")
    return shared


def sha256(path: Path, largest: int = LARGEST_FILE) -> str:
    """Of a file that may be in the zoo."""
    return hashlib.sha256(regular_file(path, largest).read_bytes()).hexdigest()
