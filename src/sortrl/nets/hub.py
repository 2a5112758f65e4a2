"""Policies on the Hugging Face Hub: ``sortrl.load("hf:user/name@revision")`` and ``policy.push_to_hub("user/name")``.

A repository has the layout of an entry of the zoo: ``card.json`` with the hash of every file, ``policy.safetensors`` and, where they
are known, ``run.json`` and the teacher; ``README.md`` is the model card. Only what the card lists is fetched, and only safetensors and
JSON: whatever else lies in a repository is never downloaded, let alone opened.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch

from sortrl.core.errors import MissingDependency, SortRLError
from sortrl.core.files import LARGEST_JSON, atomic_path, read_object, read_tensors, write_json, write_text
from sortrl.nets import zoo
from sortrl.nets.cards import FORMAT, card_of, model_card
from sortrl.nets.zoo import POLICY

if TYPE_CHECKING:
    from sortrl.nets.base import CertifiedPolicy

PREFIX = "hf:"
LARGEST_FILE = 256 * 2**20  # 64 million weights; the largest policy of the zoo has five megabytes
RUN = "run.json"
_ENDINGS = (".safetensors", ".json")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def is_repository(path: str | Path) -> bool:
    """Whether a path names a repository of the hub.

    >>> is_repository("hf:sortrl/cartpole"), is_repository("runs/cartpole")
    (True, False)
    """
    return str(path).startswith(PREFIX)


def fetch(name: str) -> Path:
    """The folder of ``hf:user/name`` or ``hf:user/name@revision`` in the hub's local cache, every file checked against its hash.

    What is in the cache already is not downloaded again, and with ``HF_HUB_OFFLINE=1`` nothing else is used.
    """
    repository, revision = parsed(name)
    with _explained(name):
        folder = _download(repository, zoo.CARD, revision, LARGEST_JSON).parent
        files = zoo.card(folder)["files"]
        for file in files:
            _check_name(name, file)
        if POLICY not in files:
            raise SortRLError(f"{name}: its {zoo.CARD} lists no {POLICY}. It is not the repository of a sortrl policy.")
        for file in files:
            # Of the same commit as the card, which may no longer be the newest one.
            _download(repository, file, folder.name, LARGEST_FILE)
    return zoo.checked(folder, LARGEST_FILE)


def fetch_entry(name: str) -> Path:
    """Fetch the weights of an entry of the zoo that the installed package leaves out, into the user's cache.

    They come from the hub's ``sortrl/NAME``, and are those of the hashes in the package's own card, or nothing is kept.
    """
    here = zoo.entry(name)
    files, where = zoo.card(here)["files"], f"{PREFIX}sortrl/{name}"
    kept = zoo.cached(name)
    with _explained(where):
        for file, digest in files.items():
            _check_name(str(here), file)
            found = _download(f"sortrl/{name}", file, None, zoo.LARGEST_FILE)
            if zoo.sha256(found) != digest:
                raise SortRLError(
                    f"{where}: {file} is not the file that this version of sortrl describes in {here / zoo.CARD}. Nothing was kept. "
                    "Install the version that the repository was written by."
                )
            with atomic_path(kept / file) as temporary:
                shutil.copyfile(found, temporary)
    shutil.copyfile(here / "README.md", kept / "README.md")
    write_json(kept / zoo.CARD, zoo.card(here))  # the last: without it there is no entry
    return zoo.checked(kept)


def parsed(name: str) -> tuple[str, str | None]:
    """Repository and revision of a name.

    >>> parsed("hf:sortrl/cartpole@v1")
    ('sortrl/cartpole', 'v1')
    """
    repository, _, revision = str(name).removeprefix(PREFIX).partition("@")
    _check_repository(repository)
    return repository, revision or None


def export(entry: Path, directory: Path, name: str) -> Path:
    """Write an entry of the zoo (a folder with a card) as the repository that ``name`` ("hf:user/name") would have."""
    card = zoo.card(zoo.checked(entry))
    if directory.exists() and any(directory.iterdir()):
        raise SortRLError(f"{directory} is not empty. Choose another directory, or delete it to write it anew.")
    for file in card["files"]:
        _check_name(str(entry), file)
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(entry / file, directory / file)
    return _complete(directory, card, name)


def push_entry(entry: Path, repository: str, private: bool = False) -> str:
    """Upload an entry of the zoo; returns the name to load it by, with its commit."""
    _check_repository(repository)
    with tempfile.TemporaryDirectory(prefix="sortrl-") as scratch:
        return _upload(export(entry, Path(scratch) / "repository", PREFIX + repository), repository, private)


def push_policy(policy: CertifiedPolicy, repository: str, run: str | Path | None = None, private: bool = False) -> str:
    """Upload a policy; ``run`` is the directory of the run that made it, whose results then stand on the card."""
    _check_repository(repository)
    with tempfile.TemporaryDirectory(prefix="sortrl-") as scratch:
        folder = Path(scratch)
        policy.save(folder)
        files, title = [POLICY], repository.partition("/")[2]
        if run is not None:
            if not _same_weights(folder / POLICY, Path(run) / POLICY):
                raise SortRLError(f"push_to_hub: {run} holds another policy than this one. Give the run that made it.")
            identity = read_object(Path(run) / RUN).get("identity")
            if not isinstance(identity, dict):
                raise SortRLError(f"{Path(run) / RUN} lacks its identity. It is damaged.")
            identity["teacher"] = Path(str(identity.get("teacher"))).name  # not where it lay on this machine
            write_json(folder / RUN, {"identity": identity})
            files.append(RUN)
        hashes = {file: zoo.sha256(folder / file, LARGEST_FILE) for file in files}
        card = _bare_card(policy, title, hashes)
        if run is not None:
            card = card_of(title, read_object(Path(run) / "results.json"), hashes)
        return _upload(_complete(folder, card, PREFIX + repository), repository, private)


def _bare_card(policy: CertifiedPolicy, title: str, hashes: dict[str, str]) -> dict[str, Any]:
    """Of a policy of which nothing was measured."""
    constant = {"lipschitz": policy.lipschitz} if math.isfinite(policy.lipschitz) else {}
    facts = {"kind": policy.kind, "parameters": policy.parameter_count, **constant, **policy.describe()}
    version = importlib.metadata.version("sortrl")
    return {
        "format": FORMAT,
        "name": title,
        "env": None,
        "policy": facts,
        "returns": [],
        "certified": {},
        "sortrl": version,
        "files": hashes,
    }


def _complete(directory: Path, card: dict[str, Any], name: str) -> Path:
    """Add the card, for programs and for people."""
    write_text(directory / "README.md", model_card(card, name))
    write_json(directory / zoo.CARD, card)
    return directory


def _same_weights(one: Path, other: Path) -> bool:
    (ours, facts), (theirs, stated) = read_tensors(one), read_tensors(other)
    same = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    return same and facts == stated


def _check_repository(repository: str) -> None:
    if not _REPOSITORY.fullmatch(repository):
        raise SortRLError(
            f"{repository[:80]!r} is no repository of the hub, expected user/name such as sortrl/cartpole."
        )


def _check_name(where: str, file: object) -> None:
    """Refuse what leads out of the folder, and what is neither tensors nor JSON."""
    path = PurePosixPath(str(file))
    inside = not path.is_absolute() and ".." not in path.parts and "\\" not in str(file) and ":" not in str(file)
    if not inside or path.suffix not in _ENDINGS:
        raise SortRLError(
            f"{where}: its {zoo.CARD} lists {str(file)[:80]!r}, expected safetensors and JSON inside of the repository. Nothing else "
            "is fetched or opened, pickles least of all."
        )


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise MissingDependency("The Hugging Face Hub needs a package: pip install 'sortrl[hub]'") from error
    return huggingface_hub


def _download(repository: str, file: str, revision: str | None, largest: int) -> Path:
    """The cached file; its size is asked for before anything is fetched."""
    hub = _hub()
    found = hub.hf_hub_download(repository, file, revision=revision, library_name="sortrl", dry_run=True)
    if found.file_size is None or found.file_size > largest:
        stated = "an unknown number of" if found.file_size is None else str(found.file_size)
        raise SortRLError(
            f"{PREFIX}{repository}: {file} has {stated} bytes, expected at most {largest}. Not downloaded."
        )
    return Path(hub.hf_hub_download(repository, file, revision=revision, library_name="sortrl"))


def _upload(folder: Path, repository: str, private: bool) -> str:
    version = importlib.metadata.version("sortrl")
    with _explained(PREFIX + repository):
        api = _hub().HfApi(library_name="sortrl", library_version=version)
        api.create_repo(repository, private=private, exist_ok=True)
        made = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=f"A certified policy, by sortrl {version}"
        )
    return f"{PREFIX}{repository}@{made.oid}"


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """The hub's errors in a line, with what to do."""
    hub = _hub()
    errors = hub.errors
    try:
        yield
    except SortRLError:
        raise
    except errors.LocalEntryNotFoundError as error:  # the hub is offline, or out of reach
        raise SortRLError(
            f"{name} is not in the local cache of the hub, and the hub cannot be reached (HF_HUB_OFFLINE=1, or no connection). "
            "Load it once while online."
        ) from error
    except errors.EntryNotFoundError as error:
        raise SortRLError(
            f"{name} lacks a file that a sortrl policy has ({_line(error)}). Only {zoo.CARD} and the safetensors and JSON that it lists are "
            "read; a pickle is never opened. Upload policies with policy.push_to_hub."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise SortRLError(f"{name}: there is no such revision. Give a branch, a tag or a commit after @.") from error
    except errors.HfHubHTTPError as error:
        if error.response is None or error.response.status_code not in (401, 403, 404):
            raise SortRLError(f"{name}: the hub answered with an error ({_line(error)}). Try again later.") from error
        raise SortRLError(
            f"{name}: no such repository, or you have no access to it. If it is private or yours to write to, log in first: hf auth login."
        ) from error
    # Of the network, of the disk: the library passes on what its own libraries raise.
    except (OSError, ValueError, RuntimeError) as error:
        raise SortRLError(f"{name}: failed on the way to or from the hub ({_line(error)}). Try again later.") from error


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300] or type(error).__name__
