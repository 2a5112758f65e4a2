"""The report: every number on the page, nothing loaded, nothing believed, and clear words when results are wrong."""

from __future__ import annotations

import copy
import json
import math
import re
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.image import imread

from helpers import make_results
from sortrl.core.errors import SortRLError
from sortrl.nets import HybridPolicy, SortPolicy, ThresholdPolicy
from sortrl.report import markdown, render, summary_lines
from sortrl.report.charts import KEYS, charts
from sortrl.report.model import read_run
from sortrl.report.page import html_page


@pytest.fixture(scope="module")
def results():
    return make_results(("PGD-10", "FGSM"))


@pytest.fixture(scope="module")
def written(results, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return render(results, folder), folder


class _Tags(HTMLParser):
    """Every tag with its attributes; fails on tags that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def _words(page):
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", page)))


def test_page_shows_every_figure_and_number(results, written):
    path, _ = written
    page = path.read_text(encoding="utf-8")
    words = _words(page)
    figures = [attrs["id"] for tag, attrs in _Tags(page).found if tag == "figure"]
    assert figures == list(KEYS)
    charts = [attrs for tag, attrs in _Tags(page).found if tag == "svg" and attrs.get("role") == "img"]
    assert len(charts) >= 6
    assert all(attrs["aria-label"] for attrs in charts)
    assert page.count("<figcaption>") == 6
    student, attacked = results["evaluation"][1], results["evaluation"][5]
    share = math.floor(results["certificate"]["share"][5] * 1000) / 10
    assert f"Certified at ε = 0.1 in {share} % of the visited states; return {student['mean']:.4g} clean" in words
    assert (attacked["policy"], attacked["attack"], attacked["eps"]) == ("student", "PGD-10", 0.1)
    for row in results["evaluation"]:
        mean, sem = (f"{row[key]:.1f}" for key in ("mean", "sem"))
        assert f"{row['policy']} {row['attack']}" in words
        assert f"{mean} ± {sem}" in words
    for value in (
        "97.1 %",
        "40 %",
        "133,000 parameters",
        "1.2 %",
        "31 %",
        "5,039",
        "∞",
        "pole angle",
        "seed 7",
        "2026-01-01",
    ):
        assert value in words, value
    for name in (
        "sortrl robustify CartPole-v1 --eps 0.1",
        "distill.steps 1500",
        "torch 2.13.0",
        "isa avx512",
        "40.1 s",
    ):
        assert name in words, name
    raw = math.floor(results["certificate"]["radius_median"] * 0.0973 * 1e4) / 1e4
    assert f"pole angle ±{raw:.4f} ±0.00973 0.0973" in words


def test_the_frontier_shows_what_each_radius_costs(results):
    chart = charts(read_run(results))[-1]
    clean, attacked = chart.panels[0].lines
    assert clean.x == attacked.x == (0.41, 0.62, 0.83)
    assert (clean.y, attacked.y) == ((498.0, 492.0, 402.0), (431.0, 447.0, 377.0))
    kept, needed = chart.panels[0].rules
    assert (kept.at, kept.label) == (0.62, "kept: rung 2")
    assert needed.at == pytest.approx(22 + 0.95 * 478)
    assert "rung 3 (margins for ε = 0.2): 402" in chart.summary
    assert "377 (MinQ-10)" in chart.summary
    one = copy.deepcopy(results)
    one["ladder"]["rungs"] = one["ladder"]["rungs"][1:2]
    assert "frontier" not in [drawn.key for drawn in charts(read_run(one))]  # a point is no frontier


def test_page_loads_nothing_and_follows_the_reader(written):
    page = written[0].read_text(encoding="utf-8")
    tags = _Tags(page).found
    assert not {tag for tag, _ in tags} & {"script", "link", "img", "iframe", "object", "embed", "image", "use", "base"}
    assert not [attrs for _, attrs in tags if {"src", "href", "xlink:href", "srcset", "data"} & set(attrs)]
    assert "://" not in page
    assert not re.search(r"url\(|@import", page)
    assert "prefers-color-scheme: dark" in page
    assert "width=device-width" in page


def test_dark_mode_redefines_every_colour(written):
    page = written[0].read_text(encoding="utf-8")
    light, dark = (set(re.findall(r"(--\w+):", block)) for block in re.findall(r":root \{([^}]*)\}", page))
    assert light == dark
    used = set(re.findall(r"var\((--\w+)\)", page)) - {"--tone"}
    assert used <= light
    assert not re.findall(r'(?:fill|stroke)="#', page)


def test_figures_are_real_images(written):
    _, folder = written
    assert sorted(path.stem for path in (folder / "figures").iterdir()) == sorted(KEYS)
    for key in KEYS:
        pixels = (imread(folder / "figures" / f"{key}.png") * 255).astype(np.uint32)
        assert min(pixels.shape[:2]) > 400
        assert pixels.shape[1] == 1280
        assert len(np.unique(pixels[..., 0] << 16 | pixels[..., 1] << 8 | pixels[..., 2])) > 20  # something is drawn
    assert not list(folder.rglob("*.tmp"))


def test_render_is_deterministic(results, written, tmp_path):
    before = copy.deepcopy(results)
    render(json.loads(json.dumps(results)), tmp_path)
    assert results == before
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert len(files) == 8
    for file in files:
        assert (tmp_path / file).read_bytes() == (written[1] / file).read_bytes(), file


def test_hostile_names_are_shown_not_run(tmp_path):
    evil = "<script>alert('x')</script>\"><img src=x onerror=y>|`$\\frac$ \x1b[31m\ud800"
    hostile = make_results((evil,))
    hostile["env"]["id"] = hostile["command"] = hostile["teacher"]["name"] = hostile["started"] = evil
    hostile["env"]["obs_names"] = [evil] * 4
    hostile["versions"][evil] = hostile["machine"]["cpu"] = hostile["config"]["preset"] = evil
    page = render(hostile, tmp_path).read_text(encoding="utf-8")
    tags = _Tags(page).found
    assert not {tag for tag, _ in tags} & {"script", "img"}
    assert not [attrs for _, attrs in tags if "onerror" in attrs]
    assert "&lt;script&gt;alert(" in page
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "<script" not in re.sub(r"^    .*$", "", text, flags=re.MULTILINE)  # but for the command, a code block
    for row in [line for line in text.splitlines() if line.startswith("|")]:
        assert len(re.findall(r"(?<!\\)\|", row)) in (5, 7, 9)
    assert "\x1b" not in page + text + "".join(summary_lines(hostile))


def _paths(value, prefix=()):
    """The path of every key and of one item of every list."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*prefix, key)
            yield from _paths(item, (*prefix, key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from _paths(value[0], (*prefix, 0))


UNREAD = {"loss", "cross_entropy", "rho", "scale", "algorithm", "env_id", "first_seed", "returns", "steps", "queries"}
UNREAD |= {"iqm", "iqm_interval", "spread", "protocol", "timing", "attack_parameters", "attacked_share"}
UNREAD |= {"gradients", "seconds"}  # they may be there, and are only shown in the details
NULLABLE = {"max_steps", "unit_to_raw", "source", "dagger_states", "held_out_states", "agreement", "certified"}
NULLABLE |= {"certified_share", "episode", "fully_certified_episodes"}
FREE_FORM = ("versions", "machine", "stage_seconds", "config")


def _is_needed(path):
    if path[0] in FREE_FORM:
        return len(path) == 1 or path == ("config", "eps")
    if path[0] == "ladder":  # of the preset auto alone
        return path[-1] in {"chosen", "rungs", "random", "teacher", "keep", "rung", "clean", "attacked", "attack"}
    return not UNREAD.intersection(path) and (path[0] == "training" or path[-1] not in NULLABLE)


def _changed(results, path, value=None, drop=False):
    mutated = copy.deepcopy(results)
    *parents, last = path
    place = mutated
    for key in parents:
        place = place[key]
    if drop:
        del place[last]
    else:
        place[last] = value
    return mutated


def test_missing_keys_are_named(results):
    needed = [path for path in _paths(results) if _is_needed(path)]
    assert len(needed) >= 50
    for path in needed:
        name = re.sub(r"\.(\d+)", r"[\1]", ".".join(map(str, path)))
        with pytest.raises(SortRLError, match=re.escape(f"{name} is missing")):
            summary_lines(_changed(results, path, drop=True))


def _outcome(results):
    """Everything but the PNG files, or the message of the error."""
    try:
        run = read_run(results)
        return "\n".join([*summary_lines(results), markdown(results), html_page(run, charts(run))])
    except SortRLError as error:
        return str(error)


@pytest.mark.parametrize("value", ["text", -1, math.nan, [], 10**400, 1e-300, 1e15], ids=lambda value: str(value)[:8])
def test_wrong_values_are_refused_or_drawn(value):
    """Any single wrong value: an error that names results, or a report without NaN. Nothing else is raised."""
    small = make_results()
    small["training"] = small["training"][::60]
    small["certificate"]["episode"]["radii"] = [0.2, 0.05, 0.3]
    for path in _paths(small):
        outcome = _outcome(_changed(small, path, value)).partition("<h2>Details")[0]  # which show any text
        assert outcome.startswith(("results: ", "task ")), path
        assert not re.search(r"\b(nan|inf)\b", outcome) or outcome.startswith("results: "), path


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), 2, "schema is 2, expected 1"),
        (("kind",), "bench", "expected 'robustify'"),
        (("env", "unit_to_raw"), [1.0], "1 values for 4"),
        (("certificate", "share"), [0.5], "certificate.share 1"),
        (("certificate", "histogram", "edges"), [0.0, 0.1], "2 edges and 30 counts"),
        (("evaluation",), [], "no row with policy 'student'"),
        (("evaluation", 0, "policy"), "oracle", "'teacher' or 'student'"),
        (("data", "agreement"), 1.2, r"data.agreement is 1.2, expected a number in \[0, 1\]"),
    ],
)
def test_wrong_values_are_explained(results, path, value, message, tmp_path):
    with pytest.raises(SortRLError, match=message):
        render(_changed(results, path, value), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_results_must_be_an_object():
    with pytest.raises(SortRLError, match="expected the object"):
        summary_lines([])


def test_optional_parts_may_be_absent(results, tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "episode.png").write_bytes(b"of an earlier run")
    bare = copy.deepcopy(results)
    del bare["ladder"]
    bare["training"], bare["stage_seconds"] = [], {"teacher": None, "distill": 3.0}
    bare["certificate"] |= {"episode": None, "fully_certified_episodes": None}
    bare["data"] |= {"agreement": None, "certified": None, "held_out_states": None, "dagger_states": None}
    bare["env"] |= {"unit_to_raw": None, "max_steps": None}
    bare["evaluation"] = [row for row in bare["evaluation"] if row["policy"] == "student" and row["attack"] == "none"]
    page = render(bare, tmp_path).read_text(encoding="utf-8")
    assert [attrs["id"] for tag, attrs in _Tags(page).found if tag == "figure"] == list(KEYS[:3])
    assert sorted(path.stem for path in (tmp_path / "figures").iterdir()) == sorted(KEYS[:3])  # stale ones are gone
    assert "None" not in page + markdown(bare) + "".join(summary_lines(bare))


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        (SortPolicy((4,), 2, width=8, depth=2), "sort"),
        (HybridPolicy((4,), 2, width=8, depth=2, hidden=(4,)), "hybrid"),
        (ThresholdPolicy((1, 8, 8), 3, levels=1, conv=((4, 3, 1),), hidden=(8,)), "rounded"),
    ],
)
def test_the_page_has_the_policy_s_own_words_and_old_files_get_the_same(results, policy, kind):
    old = copy.deepcopy(results)
    old["policy"] = {"kind": kind, "parameters": 1234}
    if kind != "rounded":
        old["policy"] |= {"lipschitz": policy.lipschitz, "width": 8, "depth": 2}
    pages = [html_page(run, charts(run)) for run in (read_run(old), read_run(old | {"student": policy.explain()}))]
    assert pages[0] == pages[1]
    words = _words(pages[0]).replace("l ∞ ", "l∞ ")
    assert all(part in words for part in policy.explain().values())
    other = {"network": "a <b>net</b>", "proof": "Because it is <i>so</i>."}
    run = read_run(old | {"student": other})
    page = html_page(run, charts(run))
    assert "<b>net</b>" not in page
    assert all(part in unescape(page) for part in other.values())


def test_image_observations_do_not_flood_the_page(results):
    large = copy.deepcopy(results)
    large["env"]["obs_names"] = [f"obs[{index}]" for index in range(7056)]
    large["env"]["unit_to_raw"] = [255.0] * 7056
    assert len(markdown(large)) < 6000
    assert max(map(len, summary_lines(large))) < 160


def test_summary_says_the_key_results(results):
    lines = summary_lines(results)
    assert 8 <= len(lines) <= 14
    text = "\n".join(lines)
    attacked = min(row["mean"] for row in results["evaluation"] if row["policy"] == "teacher" and row["eps"] == 0.1)
    share = math.floor(results["certificate"]["share"][5] * 1000) / 10
    for part in (
        f"{share} %",
        "97.1 %",
        "49,871 distinct",
        "distill 1 min 0 s",
        "pole angle ±0.0",
        f"teacher {attacked:.1f}",
    ):
        assert part in text, part
    assert all(line.isprintable() for line in lines)


def test_shares_are_never_rounded_up(results):
    almost = copy.deepcopy(results)
    almost["certificate"]["share"] = [0.99996] * 16
    assert "99.9 % of the visited states" in "\n".join(summary_lines(almost))


def test_eps_between_measured_levels_gives_a_lower_bound(results):
    between = copy.deepcopy(results)
    between["config"]["eps"] = 0.11
    share = math.floor(results["certificate"]["share"][6] * 1000) / 10  # the level 0.12
    assert f"certified at eps 0.11  {share} %" in "\n".join(summary_lines(between))


def test_markdown_has_every_row(results):
    text = markdown(results)
    assert text.startswith("# CartPole-v1: robustness report\n\nCertified at ε = 0.1 in ")
    table = [line for line in text.splitlines() if line.startswith(("| teacher", "| student"))]
    assert len(table) == len(results["evaluation"])
    assert "| pole angle | ±0.0" in text
