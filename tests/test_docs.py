"""What the documentation says can be typed, its figures are those of results/, and its pages are all in the site."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml

import sortrl
from sortrl import cli

ROOT = Path(__file__).resolve().parents[1]
SITE_PAGES = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *SITE_PAGES, ROOT / "bench" / "README.md"]
NEEDS_YOUR_AGENT = "agent.zip"  # such a block trains for minutes: it is compiled and its names are looked up


def fenced(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language; fences open and close in turn, so a pattern alone would pair them wrongly."""
    blocks: list[str] = []
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


def inline(page: Path) -> list[str]:
    """Code within sentences."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    return re.findall(r"`([^`\n]+)`", text)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


WITH_A_PACKAGE = 'python -c "import my_package; from sortrl.cli import main; main()"'
UNDER_TORCHRUN = re.compile(r"torchrun .* -m sortrl")
COMMANDS = [
    UNDER_TORCHRUN.sub("sortrl", line.split("#")[0].strip().replace(WITH_A_PACKAGE, "sortrl"))
    for page in PAGES
    for block in fenced(page, "")
    for line in block.splitlines()
    if line.strip().startswith(("sortrl ", "torchrun ", WITH_A_PACKAGE))
]
MENTIONED = sorted({code for page in PAGES for code in inline(page) if re.match(r"sortrl [a-z]", code)})
PYTHON_PAGES = [page for page in PAGES if fenced(page, "python")]


def test_there_is_something_to_check():
    assert len(COMMANDS) >= 40
    assert len(MENTIONED) >= 10
    assert len(PYTHON_PAGES) >= 9


@pytest.mark.parametrize("line", sorted(set(COMMANDS)))
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


@pytest.mark.parametrize("code", MENTIONED)
def test_commands_within_sentences_exist(code):
    """A sentence may leave out what a command needs, but it names no command and no option that there is not."""
    words = code.split()
    options = {option.replace("_", "-") for option in inspect.signature(cli.COMMANDS[words[1]]).parameters}
    assert {word[2:] for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_documented_make_targets_and_extras_exist(page):
    makefile, project = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    text = page.read_text()
    for target in re.findall(r"(?:^|`)make ([a-z][a-z-]*)", text, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), f"make {target}"
    for extras in re.findall(r"'(?:sortrl|\.)\[([\w,]+)\]'", text):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = \[", project, re.M), f"the extra {extra}"


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=named)
def test_python_examples_run(page, tmp_path, monkeypatch):
    """The blocks of a page run in order, in one namespace; those that need the reader's agent name what there is."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "example"}
    for code in fenced(page, "python"):
        compiled = compile(code, named(page), "exec")
        if NEEDS_YOUR_AGENT not in code:
            exec(compiled, namespace)
            continue
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("sortrl."):
                assert functools.reduce(getattr, ast.unparse(node).split(".")[1:], sortrl) is not None
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "sortrl.robustify":
                _check_options(node)


def _check_options(call: ast.Call) -> None:
    from sortrl.runs.config import robustify_config

    own = inspect.signature(sortrl.robustify).parameters
    given = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    robustify_config("CartPole-v1", **{name: value for name, value in given.items() if name not in own})


def render():
    spec = importlib.util.spec_from_file_location("render", ROOT / "docs" / "render.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_show_the_committed_results():
    module = render()
    for page in module.PAGES:
        text = page.read_text()
        assert module.rendered(text) == text, f"{named(page)}: run python docs/render.py"


def test_every_table_is_shown_and_every_marker_has_one():
    markers = {name for page in PAGES for name in re.findall(r"<!-- ([\w-]+):begin -->", page.read_text())}
    assert markers == {*render().TABLES, *render().WITHOUT_FILE, "layers"}


def test_readme_is_one_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    for part in ("make demo", "make test", "```python", "![", "robustify"):
        assert part in text[:2500]
    assert len(fenced(ROOT / "README.md", "python")[0].splitlines()) <= 8
    assert (ROOT / "docs" / "assets" / "demo.gif").stat().st_size <= 2_000_000


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=named)
def test_links_of_the_root_pages_lead_somewhere(page):
    """Those of the site are checked by `make docs`, which is strict."""
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_every_page_is_in_the_menu_and_nothing_is_fetched_from_elsewhere():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)]

    assert sorted(pages(config["nav"])) == [str(page.relative_to(ROOT / "docs")) for page in SITE_PAGES]
    assert config["strict"] is True
    assert config["theme"]["font"] is False
    assert not any("//" in str(path) for key in ("extra_css", "extra_javascript") for path in config.get(key, []))


@pytest.mark.parametrize(
    "module",
    [
        "sortrl",
        "sortrl.attacks",
        "sortrl.certify",
        "sortrl.nets",
        "sortrl.ops",
        "sortrl.teachers",
        "sortrl.envs",
        "sortrl.runs.tasks",
    ],
)
def test_the_reference_has_every_public_name(module):
    page = ROOT / "docs" / "reference" / f"{module.rpartition('.')[2]}.md"
    shown = re.findall(rf"^::: {re.escape(module)}\.(\w+)$", page.read_text(), re.M)
    assert sorted(shown) == sorted({*importlib.import_module(module).__all__} - {"attacks"})


def test_the_two_maps_of_the_layers_agree():
    contributing = re.findall(r"^\d+\. `(\w+)`:", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    architecture = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "architecture.md").read_text(), re.M)
    assert contributing == architecture
    assert len(contributing) == 16


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
