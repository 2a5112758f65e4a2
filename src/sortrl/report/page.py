"""report.html: one self-contained page, with figures/*.png and report.md beside it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from sortrl.core.errors import SortRLError
from sortrl.core.files import regular_file, write_text
from sortrl.report.charts import KEYS, Chart, charts
from sortrl.report.continuous import is_continuous, render_continuous
from sortrl.report.model import Run, Settings, read_run
from sortrl.report.numbers import number, percent, rounded_down, seconds, short
from sortrl.report.svg import draw, legend
from sortrl.report.text import (
    beside_teacher,
    evaluation_table,
    headline,
    ladder_table,
    markdown,
    raw_table,
    warning,
)

_PAIRED = ("certified_share", "radius_histogram")  # drawn side by side on a wide screen
_SECTIONS = {
    "config": "Configuration",
    "policy": "Student",
    "data": "Data",
    "versions": "Versions",
    "machine": "Machine",
}
FILM = "episode.gif"  # shown on the page if it is there
LARGEST_FILM = 64 * 2**20


def render(results: Mapping[str, Any], out_dir: Path) -> Path:
    """Write report.html, report.md and figures/*.png into ``out_dir`` and return the path of the page.

    ``results`` is the content of a results.json and all that is needed; it is validated before anything is written.
    The same results give the same bytes. If ``out_dir`` holds an episode.gif, the page shows it.
    """
    if is_continuous(results):
        return render_continuous(results, out_dir)
    run = read_run(results)
    drawn = charts(run)
    page, text = html_page(run, drawn, _film_in(Path(out_dir))), markdown(results)
    from sortrl.report.figures import (
        save_png,  # here, because commands that draw nothing should not wait for matplotlib
    )

    figures = Path(out_dir) / "figures"
    for chart in drawn:
        save_png(chart, figures / f"{chart.key}.png", f"{run.env_id}: {chart.title.lower()}")
    for key in set(KEYS) - {chart.key for chart in drawn}:
        (figures / f"{key}.png").unlink(missing_ok=True)  # of an earlier run
    write_text(Path(out_dir) / "report.md", text)
    path = Path(out_dir) / "report.html"
    write_text(path, page)
    return path


def html_page(run: Run, drawn: list[Chart], film: bytes | None = None) -> str:
    """The page as text, with the bytes of an animated GIF in it if there is one."""
    return template("page.html.j2").render(
        run=run,
        css=style(),
        headline=headline(run),
        warning=warning(run),
        ladder=ladder_table(run) if run.ladder else None,
        about=_about(run),
        tiles=_tiles(run),
        figures=[drawings(chart) for chart in drawn],
        film=None if film is None else b64encode(film).decode(),
        film_name=FILM,
        evaluations=evaluation_table(run),
        raw=raw_table(run) if run.unit_to_raw else None,
        details=_details(run),
    )


def style() -> Markup:
    """The page's style sheet."""
    return Markup(Path(__file__).with_name("page.css").read_text(encoding="utf-8"))


@cache
def template(name: str) -> Template:
    """A page, with the filters that it needs."""
    environment = Environment(
        loader=PackageLoader("sortrl.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "unbroken": _unbroken,
        "number": number,
        "legend": lambda chart: Markup(legend(chart)),
    }
    return environment.get_template(name)


def _about(run: Run) -> tuple[str, ...]:
    source = f" ({run.teacher_source})" if run.teacher_source else ""
    student = f"{run.student.network}, {number(run.student.parameters)} parameters"
    return (f"Teacher: {run.teacher}{source}", f"Student: {student}", f"Seed {run.seed}", run.started)


def _unbroken(text: str) -> Markup:
    """Escaped text in which a number keeps its sign and unit on the same line, and l∞ has its subscript."""
    glued = text.replace(" %", "\N{NO-BREAK SPACE}%").replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    return escape(glued.replace("ε = ", "ε\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}")).replace(
        "l∞", Markup("l<sub>∞</sub>")
    )


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    """Name, value and note of the key figures at the top of the page."""
    clean, attacked, median = run.clean("student"), run.attacked("student"), run.certified.radius_median
    under = "" if attacked is None else f"; {percent(attacked.certified_share)} under {attacked.attack}"
    tiles = [(f"certified at ε = {short(run.eps)}", percent(run.certified_at_eps), f"of the visited states{under}")]
    if clean is not None:
        tiles.append(("return, clean", number(clean.mean), beside_teacher(run.clean("teacher"))))
    if attacked is not None:
        tiles.append(
            (
                f"return under {attacked.attack}",
                number(attacked.mean),
                beside_teacher(run.attacked("teacher"), attacked.attack),
            )
        )
    times = f"{rounded_down(median / run.eps, 2)} × ε, " if run.eps > 0 else ""
    tiles.append(("median radius", rounded_down(median), f"{times}in unit space"))
    if run.data.agreement is not None:
        states = (
            f"{number(run.data.held_out_states)} held-out states" if run.data.held_out_states else "held-out states"
        )
        tiles.append(("agreement with the teacher", percent(run.data.agreement), f"on {states}"))
    if run.certified.whole_episodes is not None:
        tiles.append(
            ("episodes certified whole", percent(run.certified.whole_episodes), f"every step at ε = {short(run.eps)}")
        )
    return tiles


def drawings(chart: Chart) -> tuple[Chart, Markup, Markup, bool]:
    """A chart, its drawings for broad and narrow screens, and whether it takes the whole width."""
    paired = chart.key in _PAIRED
    broad = draw(chart, 420, 200) if paired else draw(chart, 880, 260)
    return chart, _classed(broad, "broad"), _classed(draw(chart, 340, 190), "narrow"), not paired


def _classed(drawing: str, name: str) -> Markup:
    return Markup(drawing.replace("<svg ", f'<svg class="{name}" ', 1))


def _film_in(folder: Path) -> bytes | None:
    path = folder / FILM
    if not path.exists():
        return None
    data = regular_file(path, LARGEST_FILM).read_bytes()
    if not data.startswith((b"GIF87a", b"GIF89a")):
        raise SortRLError(f"{path} is not a GIF. Make it again with: sortrl watch {folder}, or delete it.")
    return data


def _details(run: Run) -> list[tuple[str, Settings]]:
    timed = tuple((name, seconds(taken)) for name, taken in run.stage_seconds)
    limit = "no step limit" if run.max_steps is None else f"{number(run.max_steps)} steps at most"
    task: Settings = (
        ("environment", run.env_id),
        ("observation", f"{' x '.join(map(number, run.obs_shape))} values"),
        ("actions", number(run.n_actions)),
        ("episode", limit),
        ("seed", str(run.seed)),
        ("started", run.started),
    )
    named = [(_SECTIONS[name], values) for name, values in run.settings]
    return [("Task", task), ("Time per stage", timed), *named]
