"""report.html: one self-contained page, with figures/*.png and report.md beside it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from sortrl.errors import SortRLError
from sortrl.files import regular_file, write_text
from sortrl.report.chart import Chart
from sortrl.report.charts import KEYS, charts
from sortrl.report.run import ROUNDED, Run, Settings, Student, read_run
from sortrl.report.style import style_sheet
from sortrl.report.summary import markdown
from sortrl.report.svg import draw, legend
from sortrl.report.tables import Table, evaluation_table, raw_table
from sortrl.report.words import beside_teacher, headline, number, percent, rounded_down, seconds, short

_PAIRED = ("certified_share", "radius_histogram")  # drawn side by side on a wide screen
_SECTIONS = {
    "config": "Configuration",
    "policy": "Student",
    "data": "Data",
    "versions": "Versions",
    "machine": "Machine",
}
# Nothing may be loaded or run, whatever the results contain.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
FILM = "episode.gif"  # shown on the page if it is there
LARGEST_FILM = 64 * 2**20


def render(results: Mapping[str, Any], out_dir: Path) -> Path:
    """Write report.html, report.md and figures/*.png into ``out_dir`` and return the path of the page.

    ``results`` is the content of a results.json and all that is needed; it is validated before anything is written.
    The same results give the same bytes. If ``out_dir`` holds an episode.gif, the page shows it.
    """
    run = read_run(results)
    drawn = charts(run)
    page, text = html_page(run, drawn, _film_in(Path(out_dir))), markdown(results)
    from sortrl.report.figures import (
        save_png,
    )  # here, because commands that draw nothing should not wait for matplotlib

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
    raw = ""
    if run.unit_to_raw:
        note = "" if len(run.unit_to_raw) <= 24 else f" Three of {number(len(run.unit_to_raw))} dimensions are shown."
        raw = f"""<h2>In raw units</h2>
<p>ε and radii live in unit space. Times the scale of a component, they are shifts in that component's own units; all
components may be shifted at once.{note}</p>
{_table(raw_table(run))}"""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}{"" if film is None else "; img-src data:"}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(run.env_id)} – sortrl report</title>
<style>
{style_sheet()}</style>
</head>
<body>
<main>
<header>
<p class="over">sortrl robustness report</p>
<h1>{escape(run.env_id)}</h1>
<p class="lead">{_unbroken(headline(run))}</p>
<p class="meta">{_about(run)}</p>
</header>
{_tiles(run)}
<h2>Results</h2>
<div class="charts">
{"".join(map(_figure, drawn))}{"" if film is None else _film(run, film)}</div>
<h2>All evaluations</h2>
{_table(evaluation_table(run), coloured=True)}
<p class="note">Return is the mean over the episodes ± its standard error. Certified at ε: share of the states visited
in that evaluation; for clean play, of states with a radius above 0. Shares are rounded down.</p>
{raw}
{_meaning(run)}
<h2>Details</h2>
{_details(run)}
<footer>Made by sortrl {escape(run.version)} from results.json {"alone" if film is None else f"and {FILM}"}.
Beside this page: report.md, the tables as text; figures/, the charts as PNG.</footer>
</main>
</body>
</html>
"""


def _about(run: Run) -> str:
    source = f" ({run.teacher_source})" if run.teacher_source else ""
    student = f"{_network(run.student)}, {number(run.student.parameters)} parameters"
    parts = (f"Teacher: {run.teacher}{source}", f"Student: {student}", f"Seed {run.seed}", run.started)
    return "\n".join(f"<span>{escape(part)}</span>" for part in parts)


def _network(student: Student) -> str:
    if student.kind == ROUNDED:
        return "thresholds on pixels, then convolutions and linear layers"
    behind = ", with linear layers behind them" if student.kind == "hybrid" else ""
    return f"SortNet, {student.depth} layers of {student.width}{behind}"


def _proof(student: Student) -> str:
    """Where a radius comes from."""
    if student.kind == ROUNDED:
        return """Every pixel is compared with thresholds, so nothing changes until one of them is crossed; where some can be,
intervals bound what the network makes of it."""
    if student.kind == "hybrid":
        return """The sort layers are Lipschitz, which bounds how far their outputs can move, and intervals bound what the linear
layers make of that."""
    assert student.lipschitz is not None
    return f"""The radius is half the gap between the best score and the next, divided by the network's l<sub>∞</sub> Lipschitz
constant ({escape(short(student.lipschitz))})."""


def _unbroken(text: str) -> str:
    """Escaped text in which a number keeps its sign and unit on the same line."""
    return escape(text).replace(" %", "&nbsp;%").replace("ε = ", "ε&nbsp;=&nbsp;").replace(" ± ", "&nbsp;±&nbsp;")


def _tiles(run: Run) -> str:
    clean, attacked, median = run.clean("student"), run.attacked("student"), run.certified.radius_median
    tiles = [(f"certified at ε = {short(run.eps)}", percent(run.certified_at_eps), "of the visited states")]
    if clean is not None:
        tiles.append(("return, clean", number(clean.mean), beside_teacher(run.clean("teacher"))))
    if attacked is not None:
        tiles.append(
            (f"return under {attacked.attack}", number(attacked.mean), beside_teacher(run.attacked("teacher")))
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
    items = "".join(
        f"<li><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(note)}</small></li>"
        for name, value, note in tiles
    )
    return f'<ul class="tiles">{items}</ul>'


def _figure(chart: Chart) -> str:
    paired = chart.key in _PAIRED
    broad = draw(chart, 420, 200) if paired else draw(chart, 880, 260)
    drawings = (
        broad.replace("<svg ", '<svg class="broad" ', 1),
        draw(chart, 340, 190).replace("<svg ", '<svg class="narrow" ', 1),
    )
    kind = "" if paired else ' class="wide"'
    head = f"<h3>{escape(chart.title)}</h3>{legend(chart)}"
    caption = f"<figcaption>{_unbroken(chart.caption)}</figcaption>"
    return f'<figure id="{chart.key}"{kind}>{head}{"".join(drawings)}{caption}</figure>\n'


def _film_in(folder: Path) -> bytes | None:
    path = folder / FILM
    if not path.exists():
        return None
    data = regular_file(path, LARGEST_FILM).read_bytes()
    if not data.startswith((b"GIF87a", b"GIF89a")):
        raise SortRLError(f"{path} is not a GIF. Make it again with: sortrl watch {folder}, or delete it.")
    return data


def _film(run: Run, film: bytes) -> str:
    text = f"Animation of an episode of {run.env_id}; the strip below the picture shows the radius of every decision."
    caption = (
        "An episode as it was played, with the radii of the last decisions below: green where certified at ε, red where "
        "not. A black tick marks a step at which the attack changed the action."
    )
    source = f"data:image/gif;base64,{b64encode(film).decode()}"
    return (
        f'<figure id="film" class="wide"><h3>One episode</h3><img src="{source}" alt="{escape(text)}">'
        f"<figcaption>{caption}</figcaption></figure>\n"
    )


def _table(table: Table, coloured: bool = False) -> str:
    kinds = ["" if column < table.named else ' class="n"' for column in range(len(table.headings))]
    head = "".join(
        f'<th scope="col"{kind}>{escape(text)}</th>' for kind, text in zip(kinds, table.headings, strict=True)
    )
    body = []
    for first, *rest in table.rows:
        who = f' class="who t-{first}"' if coloured and first in ("teacher", "student") else ""
        cells = "".join(f"<td{kind}>{escape(text)}</td>" for kind, text in zip(kinds[1:], rest, strict=True))
        body.append(f'<tr><th scope="row"{who}>{escape(first)}</th>{cells}</tr>')
    rows = "\n".join(body)
    return (
        f'<div class="table" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'
    )


def _meaning(run: Run) -> str:
    """What is promised and what is not; read this before quoting the figures."""
    whole = """<li>An episode certified from first to last step keeps its actions, and therefore its return, under every
such attack, if the environment's own randomness stays the same.</li>
"""
    return f"""<h2>What the certificate means</h2>
<p>A decision with radius <i>r</i> stays the same whatever is done to the observation, as long as every component moves
by less than <i>r</i> in unit space. {_proof(run.student)} Rounding errors are allowed for.
It is a proof about the network, not the outcome of an attack, so no cleverer attack can break it.</p>
<p><b>Unit space</b> is the policy's own input: each component of the observation minus its mean, divided by its
scale.</p>
<ul>
<li><b>Threat model:</b> at every step, all components of the observation at once, each by up to ε (l<sub>∞</sub>).
Only the observation: not the dynamics, the reward, the action on its way to the motor, or the weights.</li>
<li><b>Where the radius is ε or less, nothing is promised.</b> There the attacked returns tell what these attacks
achieved; a stronger one may achieve more.</li>
<li>A certified decision is the student's decision made stable. Whether it is a good one, the return tells.</li>
<li>The shares are over the states of the evaluated episodes; other states may have smaller radii. The radius of each
decision is known as it is made.</li>
{whole if run.certified.whole_episodes is not None else ""}</ul>"""


def _details(run: Run) -> str:
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
    parts = [
        f"<details open><summary>Command</summary><pre>{escape(run.command)}</pre></details>",
        _settings("Task", task),
        _settings("Time per stage", timed),
        *(_settings(_SECTIONS[name], values) for name, values in run.settings),
    ]
    return "\n".join(part for part in parts if part)


def _settings(title: str, values: Settings) -> str:
    if not values:
        return ""
    rows = "\n".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in values)
    table = f'<div class="table"><table><tbody>\n{rows}\n</tbody></table></div>'
    return f"<details><summary>{escape(title)}</summary>{table}</details>"
