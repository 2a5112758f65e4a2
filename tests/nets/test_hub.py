"""Policies go to the hub and come back the same; what a repository may hold beside them, or instead, does no harm."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

import hub_server
import sortrl
from sortrl.cli import main
from sortrl.core.errors import SortRLError
from sortrl.nets import hub as hubs
from sortrl.nets import zoo
from sortrl.nets.cards import card_text

pytest.importorskip("huggingface_hub", reason="the hub needs a package: pip install 'sortrl[hub]'")

TRY = """
import sortrl
def error(name):
    try:
        sortrl.load(name)
    except sortrl.SortRLError as problem:
        return str(problem)
    return "loaded"
found = {name: error(name) for name in NAMES}
"""


@pytest.fixture
def hub():
    with hub_server.running() as running:
        yield running


def repository(content: dict[str, bytes] | None = None, **card: object) -> hub_server.Files:
    """The repository of zoo:cartpole, with other files and another card."""
    entry = zoo.entry("cartpole")
    document = zoo.card(entry)
    found = {file: (entry / file).read_bytes() for file in document["files"]} | (content or {})
    return {**found, "card.json": json.dumps({**document, **card}).encode()}


def test_a_policy_comes_back_from_the_hub_as_it_went(hub, tmp_path):
    """Into an own repository, by commit and by branch, on the command line too; then without the hub."""
    states = np.random.default_rng(0).normal(size=(200, 4))
    ours = sortrl.load("zoo:cartpole")
    pushed = hub_server.python(
        hub, tmp_path, "import sortrl\nfound = sortrl.load('zoo:cartpole').push_to_hub('someone/pole')"
    )
    commit, files = hub.files("someone/pole", "main")
    assert pushed == f"hf:someone/pole@{commit}"
    assert files.keys() == {"policy.safetensors", "card.json", "README.md"}
    assert "sortrl.load(" in files["README.md"].decode()
    assert any(verb == "PUT" for verb, _ in hub.log), "weights went through large-file storage"
    hub.commit("someone/pole", {**files, "payload.pkl": b"never fetched", "notes.py": b"raise SystemExit"})
    hub.log.clear()

    read = f"""
import numpy as np, sortrl
states = np.random.default_rng(0).normal(size=(200, 4))
policies = [sortrl.load(name) for name in ({pushed!r}, "hf:someone/pole")]
found = [[policy.predict(states)[0].tolist(), policy.certify(states).radius.tolist()] for policy in policies]
"""
    expected = [ours.predict(states)[0].tolist(), ours.certify(states).radius.tolist()]
    assert hub_server.python(hub, tmp_path, read) == [expected, expected]
    assert set(hub.fetched()) == {"card.json", "policy.safetensors"}
    hub.log.clear()
    assert hub_server.python(hub, tmp_path, read, offline=True) == [expected, expected]
    assert not hub.log, "offline, nothing is asked"
    missing = hub_server.python(hub, tmp_path, TRY.replace("NAMES", "['hf:someone/other']"), offline=True)
    assert "not in the local cache" in missing["hf:someone/other"]


def test_an_entry_of_the_zoo_on_the_hub_is_played_from_the_command_line(hub, tmp_path):
    push = "from sortrl.cli import main\nmain(['zoo', 'cartpole', '--push', 'someone/pole'])"
    hub_server.python(hub, tmp_path, push)
    _, files = hub.files("someone/pole", "main")
    assert files.keys() == {"policy.safetensors", "run.json", "teacher/teacher.safetensors", "card.json", "README.md"}
    play = """
from sortrl.cli import main
main(['evaluate', 'hf:someone/pole', '--eps', '0.1', '--episodes', '2', '--json', OUT])
found = json.load(open(OUT))
""".replace("OUT", repr(str(tmp_path / "rows.json")))
    rows = hub_server.python(hub, tmp_path, play)
    assert {row["policy"] for row in rows} == {"teacher", "student"}
    assert all(row["mean"] == 500 for row in rows)


def test_damaged_and_hostile_repositories_are_refused(hub, tmp_path):
    """Each for what is wrong with it, and nothing of theirs is written outside of the cache or unpickled."""

    class Exploit:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploited",))

    evil = pickle.dumps(Exploit())
    known = zoo.card(zoo.entry("cartpole"))["files"]
    digest = zoo.sha256(zoo.entry("cartpole") / "run.json")
    weights = bytearray((zoo.entry("cartpole") / "policy.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "evil").write_bytes(evil)
    cases = {
        "wrong/hash": (repository({"policy.safetensors": bytes(weights)}), r"not the file that"),
        "path/up": (
            repository({"../../../evil.json": b"{}"}, files={**known, "../../../evil.json": digest}),
            "inside of the repository",
        ),
        "path/absolute": (repository(files={**known, "/etc/passwd.json": digest}), "inside of the repository"),
        "path/windows": (repository(files={**known, "..\\evil.json": digest}), "inside of the repository"),
        "listed/pickle": (
            repository({"policy.pkl": evil}, files={**known, "policy.pkl": digest}),
            "pickles least of all",
        ),
        "only/pickle": ({"policy.pkl": evil, "policy.pth": evil}, "a pickle is never opened"),
        "renamed/pickle": (
            repository(
                {"policy.safetensors": evil}, files={"policy.safetensors": zoo.sha256(tmp_path / "evil", 10**6)}
            ),
            "not a readable safetensors file",
        ),
        "no/policy": (repository(files={"run.json": known["run.json"]}), "lists no policy.safetensors"),
        "file/missing": (
            {name: content for name, content in repository().items() if name != "policy.safetensors"},
            "lacks a file",
        ),
        "card/garbled": ({**repository(), "card.json": b"{"}, "not valid JSON"),
        "card/other": (repository(format="another"), "expected sortrl-zoo-1"),
        "many/files": (repository(files={f"{i}.json": digest for i in range(101)}), "at most 100"),
    }
    for name, (files, _) in cases.items():
        hub.commit(name, files)
    hub.commit("large/policy", repository({"large.safetensors": b"x"}, files={**known, "large.safetensors": digest}))
    hub.claimed["large.safetensors"] = hubs.LARGEST_FILE + 1
    names = [f"hf:{name}" for name in (*cases, "large/policy", "no/where")]
    names += ["hf:wrong/hash@nothing", "hf:", "hf:alone", "hf:a/b/c", "hf:../../x"]
    said = hub_server.python(hub, tmp_path / "home", TRY.replace("NAMES", repr(names)))
    for name, (_, expected) in cases.items():
        assert expected in said[f"hf:{name}"], (name, said[f"hf:{name}"])
    assert "Not downloaded" in said["hf:large/policy"]
    assert "large.safetensors" not in hub.fetched()
    assert "no such repository" in said["hf:no/where"]
    assert "no such revision" in said["hf:wrong/hash@nothing"]
    assert all("expected user/name" in said[name] for name in ("hf:", "hf:alone", "hf:a/b/c", "hf:../../x"))
    assert not (tmp_path / "exploited").exists()
    assert {"policy.pkl", "policy.pth"}.isdisjoint(hub.fetched())
    assert not list(tmp_path.rglob("evil.json"))


def test_a_cached_file_that_was_changed_is_noticed_offline(hub, tmp_path):
    hub.commit("someone/pole", repository())
    load = TRY.replace("NAMES", "['hf:someone/pole']")
    assert hub_server.python(hub, tmp_path, load)["hf:someone/pole"] == "loaded"
    cached = next(tmp_path.rglob("policy.safetensors"))
    content = bytearray(cached.read_bytes())
    content[-1] ^= 1
    cached.resolve().write_bytes(content)
    assert "is not the file" in hub_server.python(hub, tmp_path, load, offline=True)["hf:someone/pole"]


def test_pushing_needs_the_run_of_this_policy_and_a_login(hub, tmp_path):
    code = """
import sortrl
found = []
for arguments in (("not a name",), ("someone/pole", RUN), ("someone/pole",)):
    try:
        sortrl.SortPolicy((4,), 2, width=16, depth=3).push_to_hub(*arguments)
    except sortrl.SortRLError as problem:
        found.append(str(problem))
""".replace("RUN", repr(str(zoo.entry("cartpole"))))
    said = hub_server.python(hub, tmp_path, code, token=None)
    assert "expected user/name" in said[0]
    assert "another policy" in said[1]
    assert "hf auth login" in said[2]
    assert not any(verb == "PUT" for verb, _ in hub.log)


def test_the_export_is_the_repository(tmp_path, capsys):
    """``--export`` writes what an upload would; a folder that holds something is left alone."""
    main(["zoo", "cartpole", "--export", str(tmp_path / "repository")])
    entry = zoo.entry("cartpole")
    for file in zoo.card(entry)["files"]:
        assert (tmp_path / "repository" / file).read_bytes() == (entry / file).read_bytes()
    card = (tmp_path / "repository" / "README.md").read_text()
    yaml = pytest.importorskip("yaml")
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == "sortrl"
    assert front["model-index"][0]["results"][0]["metrics"][0]["value"] == "500.00 +/- 0.00"
    assert card.endswith(card_text(zoo.card(entry), "hf:sortrl/cartpole"))
    assert zoo.checked(tmp_path / "repository")
    with pytest.raises(SortRLError, match="is not empty"):
        hubs.export(entry, tmp_path / "repository", "hf:a/b")
    capsys.readouterr()


def test_a_run_pushes_its_results(hub, tmp_path):
    """A run's results stand on the card, and no path of this machine does."""
    make = """
import sortrl
from sortrl.data.collect import CollectConfig
from sortrl.nets import zoo
tiny = {"preset": "fast", "steps": 20, "width": 16, "depth": 2, "episodes": 2, "suite": (), "dagger_rounds": 0}
policy = sortrl.robustify(zoo.locate("zoo:cartpole") / "teacher", "CartPole-v1", out=RUN, collect=CollectConfig(states=2000), **tiny)
found = policy.push_to_hub("someone/pole", run=RUN)
""".replace("RUN", repr(str(tmp_path / "run")))
    hub_server.python(hub, tmp_path / "home", make)
    _, files = hub.files("someone/pole", "main")
    assert files.keys() == {"policy.safetensors", "run.json", "card.json", "README.md"}
    assert "| student | none | 0 |" in files["README.md"].decode()
    assert all(str(tmp_path).encode() not in content for content in files.values())
    shutil.rmtree(tmp_path / "run")


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """The zoo as the installed package has it: of large entries the cards alone. A small one stands for those here."""
    folder, cache, whole = tmp_path / "packaged", tmp_path / "cache", repository()
    shutil.copytree(zoo.folder() / "cartpole", folder / "cartpole", ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.setenv("SORTRL_ZOO", str(folder))
    monkeypatch.setenv("SORTRL_CACHE", str(cache))
    return cache / "zoo" / "cartpole", whole


FETCH = """
import sortrl
from sortrl.cli import main
try:
    main(['zoo', 'cartpole', '--fetch'])
except SystemExit:
    found = 'refused'
"""


def test_weights_that_the_package_leaves_out_are_fetched_once_by_their_hashes(hub, tmp_path, packaged):
    kept, whole = packaged
    with pytest.raises(SortRLError, match=r"not part of the installed package.*sortrl zoo cartpole --fetch"):
        sortrl.load("zoo:cartpole")
    main(["zoo", "cartpole"])  # the card is there
    hub.commit("sortrl/cartpole", {**whole, "policy.safetensors": b"another policy"})
    assert hub_server.python(hub, tmp_path / "home", FETCH) == "refused"
    assert not (kept / "card.json").exists()
    assert not (kept / "policy.safetensors").exists()
    hub.commit("sortrl/cartpole", whole)
    assert hub_server.python(hub, tmp_path / "home", FETCH) is None
    assert (kept / "policy.safetensors").read_bytes() == whole["policy.safetensors"]
    asked = len(hub.log)
    assert sortrl.load("zoo:cartpole").n_actions == 2
    assert len(hub.log) == asked, "loaded from the cache"
