"""The style sheet of the page: light and dark, desktop and phone; no font, image or script is loaded."""

LIGHT = """
  --page: #fbfbfa; --card: #ffffff; --ink: #1b2026; --soft: #3a424d; --muted: #5b6470; --edge: #e2e4e8; --grid: #eceef1;
  --base: #b5bbc4; --student: #0072b2; --teacher: #d55e00; --agreement: #00805e; --below: #c4609b; --faint: #cfd4da;
"""
DARK = """
  --page: #121518; --card: #1a1e23; --ink: #e8eaed; --soft: #c6ccd4; --muted: #9aa4b0; --edge: #2c323a; --grid: #262c33;
  --base: #4b545f; --student: #56b4e9; --teacher: #f0903c; --agreement: #3fc79a; --below: #e08fc0; --faint: #3d454f;
"""
RULES = """
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  -webkit-text-size-adjust: 100%; overflow-wrap: anywhere }
main { max-width: 62rem; margin: 0 auto; padding: 3rem 1.5rem 4rem }
h1, h2, h3 { line-height: 1.2; font-weight: 650; letter-spacing: -.012em; text-wrap: balance }
h1 { font-size: 2.1rem; margin: .2rem 0 .7rem }
h2 { font-size: 1.3rem; margin: 3.2rem 0 .8rem }
h3 { font-size: 1rem; margin: 0 0 .35rem; letter-spacing: 0 }
p, ul { max-width: 44rem }
.over { margin: 0; font-size: .78rem; letter-spacing: .09em; text-transform: uppercase; color: var(--muted) }
.lead { font-size: 1.22rem; line-height: 1.45; margin: 0 0 .7rem; max-width: 46rem; text-wrap: pretty }
.meta span { display: inline-block; margin-right: 1.4em }
.note { margin-top: .7rem }
.meta, .note, footer { color: var(--muted); font-size: .88rem }
.meta { margin: 0; max-width: none }
footer { margin-top: 3rem; border-top: 1px solid var(--edge); padding-top: 1rem; max-width: none }
.tiles { display: grid; grid-template-columns: repeat(3, 1fr); gap: 1px; margin: 2rem 0 0; padding: 0; list-style: none;
  max-width: none; background: var(--edge); border: 1px solid var(--edge); border-radius: 10px; overflow: hidden }
.tiles li { background: var(--card); padding: 1rem 1.2rem 1.05rem }
.tiles span, .tiles small { display: block; font-size: .84rem; line-height: 1.4; color: var(--muted) }
.tiles b { display: block; font-size: 1.8rem; line-height: 1.3; font-weight: 620; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums }
.charts { display: grid; grid-template-columns: 1fr 1fr; gap: 1.2rem; margin-top: 1rem }
figure { margin: 0; min-width: 0; background: var(--card); border: 1px solid var(--edge); border-radius: 10px;
  padding: 1.2rem 1.3rem; display: flex; flex-direction: column }
figure.wide { grid-column: 1 / -1 }
figcaption { color: var(--muted); font-size: .86rem; line-height: 1.5; margin-top: .7rem; max-width: 46rem }
.legend { display: flex; flex-wrap: wrap; gap: .15rem 1.2rem; list-style: none; margin: .1rem 0 .5rem; padding: 0;
  font-size: .84rem; color: var(--soft) }
.legend li { display: flex; align-items: center; gap: .45rem }
.key { flex: none }
figure > svg { display: block; width: 100%; height: auto }
figure > svg.narrow { display: none }
figure > img { max-width: 100%; align-self: flex-start; border-radius: 4px }
figure > svg.narrow, figure:not(.wide) > svg { max-width: 30rem }
svg text { font-size: 12px; fill: var(--muted); font-variant-numeric: tabular-nums }
svg .axis { fill: var(--soft) }
svg .mark { fill: var(--ink); paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round }
.grid, .base, .rule, .line, .whisker, .dots { fill: none }
.grid { stroke: var(--grid) } .base { stroke: var(--base) }
.rule { stroke: var(--ink); stroke-dasharray: 4 3; opacity: .75 }
.second { stroke-dasharray: 1 3 }
.line { stroke: var(--tone); stroke-width: 2; stroke-linejoin: round }
.thin { stroke-width: 1 }
.band { fill: var(--tone); opacity: .13 }
.whisker { stroke: var(--tone); opacity: .7 }
.dot { fill: var(--tone); stroke: var(--card); stroke-width: 1 }
.bar { fill: var(--tone) }
.dots { stroke: var(--tone); stroke-width: 4; stroke-linecap: round }
.dots.t-below { stroke-width: 5.5 }
.key .dots { stroke-width: 8 }
.t-student { --tone: var(--student) } .t-teacher { --tone: var(--teacher) } .t-agreement { --tone: var(--agreement) }
.t-below { --tone: var(--below) } .t-faint { --tone: var(--faint) } .t-ink { --tone: var(--soft) }
.table { overflow-x: auto; border: 1px solid var(--edge); border-radius: 10px; background: var(--card) }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums;
  overflow-wrap: normal }
th, td { text-align: left; padding: .5rem .95rem; border-bottom: 1px solid var(--edge); white-space: nowrap;
  vertical-align: top }
tbody tr:last-child > * { border-bottom: 0 }
thead th { color: var(--muted); font-weight: 550; font-size: .82rem }
tbody th { font-weight: 450; white-space: normal }
.n { text-align: right }
.who { white-space: nowrap }
.who::before { content: ""; display: inline-block; width: .6em; height: .6em; margin-right: .55em;
  background: var(--tone) }
.who.t-student::before { border-radius: 50% }
details { border-top: 1px solid var(--edge); padding: .7rem 0 }
details[open] { padding-bottom: 1.2rem }
summary { cursor: pointer; font-weight: 550 }
details .table, pre { margin-top: .8rem }
details td { white-space: normal; min-width: 9rem }
details th { width: 38% }
li + li { margin-top: .3rem }
.legend li, .tiles li { margin-top: 0 }
sub { line-height: 0 }
pre, code { font: .88rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
pre { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: .8rem 1rem;
  white-space: pre-wrap }
:focus-visible { outline: 2px solid var(--student); outline-offset: 2px }
@media (max-width: 52rem) {
  main { padding: 1.8rem 1rem 3rem }
  h1 { font-size: 1.6rem } h2 { margin-top: 2.4rem } .lead { font-size: 1.08rem }
  .tiles { grid-template-columns: 1fr 1fr } .tiles li { padding: .75rem .9rem } .tiles b { font-size: 1.4rem }
  .charts { grid-template-columns: minmax(0, 1fr) }
  figure { padding: 1rem .9rem }
  table { font-size: .85rem } th, td { padding: .45rem .6rem }
}
@media (max-width: 46rem) { figure > svg.narrow { display: block } figure > svg.broad { display: none } }
@media print { body { background: #fff } figure, tr, .tiles { break-inside: avoid } }
"""


def style_sheet() -> str:
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{{DARK}}} }}"
    return f":root {{ color-scheme: light dark;{LIGHT}}}\n{dark}\n{RULES}"
