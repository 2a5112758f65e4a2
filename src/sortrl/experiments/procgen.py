"""Tables 2 and 4: returns on ProcGen's Jumper and CoinRun, of our student, its teacher and the published rivals.

Every cell (game, levels, agent, eps) is kept in a file of its own, so that a stopped reproduction continues. The table says
of each cell how many episodes it has, and which cells are not computed yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sortrl import attacks
from sortrl.baselines.memory.search import SearchConfig
from sortrl.core.files import locked
from sortrl.core.pieces import Engine
from sortrl.core.records import Policy
from sortrl.evaluate.returns import evaluate
from sortrl.experiments import quoted
from sortrl.experiments.cells import CellTable, Facts, Found, TableDocument, cell_text, figure, file_name, measured
from sortrl.experiments.experts import find_folder
from sortrl.experiments.figure1 import Scale
from sortrl.nets import CertifiedPolicy, zoo
from sortrl.runs.config import Preset, robustify_config
from sortrl.runs.run import open_run, read_run
from sortrl.runs.stages import Run
from sortrl.runs.tasks import teacher_preset
from sortrl.teachers import Teacher, load_teacher, sampled, train_teacher

Table = Literal["table2", "table4"]
GAMES = ("Jumper", "Coinrun")
LEVELS = ("train", "eval")
TEST_SEED = 1500
USUAL_EPISODES = 200  # cells with fewer say so
STUDENT, MEMORY, TEACHER, SAMPLED = "sortrl", "sortrl, memory", "PPO", "PPO, sampled"
OURS: dict[str, Preset] = {STUDENT: "fast", MEMORY: "memory"}  # students, and the presets that make them
TINY: dict[str, dict[str, Any]] = {"fast": {"steps": 20, "dagger_rounds": 0}, "memory": {"search": SearchConfig()}}
ZOO = {STUDENT: "-distilled", MEMORY: ""}  # what their names in the zoo have behind that of the game
PUBLISHED = {
    "Jumper": {
        TEACHER: "Jumper_ppo.pt",
        "RADIAL-PPO": "Jumper_radial_ppo.pt",
        "BCL-MOS(V)-AT": "BCL_MOS_V_AT_PPO_Jumper.pt",
    },
    "Coinrun": {},
}
# The attack of each table, its sizes in 255ths, and what the paper has there.
COLUMNS: dict[str, tuple[str, tuple[int, ...], dict[tuple[str, str, str], quoted.Figures]]] = {
    "table2": ("pgd-10", (0, 1, 3, 5), quoted.TABLE2),
    "table4": ("pgd-30", (0, 10, 20, 40), quoted.TABLE4),
}
CERTIFIED_AT = (1, 3, 5, 10, 20, 40)
LEAST_RETURN = 0.0
OTHER_ATTACKS = ("noise", "fgsm", "pgd-10-p32", "apgd-ce-10", "square-20")
OTHERS_AT = 5


@dataclass(frozen=True)
class Episodes:
    """How many, of our student and of the others; those are residual networks that cost many times as much to attack."""

    student: int
    clean: int
    attacked: int
    other_attacks: int


SCALES: dict[str, Episodes] = {
    "smoke": Episodes(2, 2, 2, 2),
    "cpu": Episodes(200, 200, 50, 50),
    "paper": Episodes(1000, 1000, 1000, 200),
}


@dataclass(frozen=True)
class Cell:
    """One agent on one set of levels at one eps."""

    game: str
    levels: str
    agent: str
    attack: str
    level: int
    """eps in 255ths."""

    @property
    def name(self) -> str:
        return file_name(self.game, self.levels, self.agent, self.attack, self.level)

    @property
    def env_id(self) -> str:
        return f"sortrl/{self.game}-{self.levels}-v0"


def cells(table: Table, games: Iterable[str], published: bool) -> list[Cell]:
    """All cells of a table; what is cheap or matters most comes first."""
    attack, levels, _ = COLUMNS[table]
    found = []
    for game in games:
        rivals = [agent for agent in PUBLISHED[game] if published and agent != TEACHER]
        for agent in (*OURS, TEACHER, *rivals):
            found += [Cell(game, where, agent, attack if k else "none", k) for where in LEVELS for k in levels]
            if agent in (*OURS, TEACHER) and table == "table2":
                found += [Cell(game, "train", agent, other, OTHERS_AT) for other in OTHER_ATTACKS]
        if table == "table2":
            found += [Cell(game, where, SAMPLED, "none", 0) for where in LEVELS]
    return sorted(found, key=lambda cell: (GAMES.index(cell.game), cell.agent not in OURS, cell.level > 0))


def teacher_of(game: str, work: Path, published: Path | None, progress: Callable[[str], None]) -> Teacher:
    """The published agent; or the one in the zoo; or one that is trained here, which takes hours."""
    env_id = f"sortrl/{game}-train-v0"
    if published is not None and TEACHER in PUBLISHED[game]:
        return load_teacher(published / PUBLISHED[game][TEACHER], env_id, merge="max")
    _, shipped = _from_zoo(game, MEMORY)
    if shipped is not None:
        return shipped
    progress(f"{game}: training a teacher, or reading the trained one")
    folder = work / "teachers" / game
    with locked(folder, wait=True):  # two tables may need it at once
        return train_teacher(env_id, teacher_preset(env_id), folder)


def _from_zoo(game: str, agent: str) -> tuple[CertifiedPolicy | None, Teacher | None]:
    """The student that comes with the project, and the teacher that it was made from, if that was ours to pass on."""
    name = game.lower() + ZOO[agent]
    if name not in zoo.names():
        return None, None
    _, student, teacher = read_run(Path(f"{zoo.PREFIX}{name}"))
    return student, teacher


def student_of(
    game: str, agent: str, work: Path, published: Path | None, scale: Scale, progress: Callable[[str], None]
) -> CertifiedPolicy:
    """One of our students: made now, continued, or read back; or the one in the zoo."""
    student, teacher = _from_zoo(game, agent)
    same_teacher = teacher is not None or (published is not None and TEACHER in PUBLISHED[game])
    if student is not None and same_teacher and scale != "smoke" and not _folder(game, agent, work, scale).exists():
        return student
    teacher = teacher_of(game, work, published, progress)
    with student_run(game, agent, work, scale, teacher) as run:
        return run.student(teacher)


def _folder(game: str, agent: str, work: Path, scale: Scale) -> Path:
    return work / "students" / (f"{game}-{scale}" + ("" if OURS[agent] == "fast" else f"-{OURS[agent]}"))


def student_run(game: str, agent: str, work: Path, scale: Scale, teacher: Teacher) -> AbstractContextManager[Run]:
    """The run that makes one of our students."""
    env_id, preset = f"sortrl/{game}-train-v0", OURS[agent]
    tiny: dict[str, Any] = {} if scale != "smoke" else TINY[preset]
    config = robustify_config(env_id, preset=preset, train_teacher=False, **tiny)
    return open_run(_folder(game, agent, work, scale), env_id, config, 0, teacher, quiet=False, wait=True)


def procgen_table(
    table: Table,
    scale: Scale = "cpu",
    game: str | None = None,
    out: Path = Path("results"),
    work: Path = Path("runs/procgen"),
    teachers: Path | None = None,
    progress: Callable[[str], None] = print,
    agent: str | None = None,
    engine: Engine | None = None,
) -> TableDocument:
    """Compute the cells that are missing, of one game or agent or of all, and write the table after each of them."""
    folder = find_folder(teachers, "procgen", PUBLISHED["Jumper"][TEACHER])
    wanted = cells(table, GAMES, folder is not None)
    return CellTable(table, scale, wanted, work / scale, out, _facts(table, folder is not None)).fill(
        lambda cell: _agent(cell, work, folder, scale, progress),
        lambda cell, agent: _compute(cell, agent, scale),
        lambda cell, agent: {cell.agent: agent},
        progress,
        game,
        agent,
        start_of=lambda cell: teacher_of(cell.game, work, folder, progress),
        engine=engine,
    )


def _agent(
    cell: Cell, work: Path, published: Path | None, scale: Scale, progress: Callable[[str], None]
) -> Teacher | CertifiedPolicy:
    if cell.agent in OURS:
        return student_of(cell.game, cell.agent, work, published, scale, progress)
    if cell.agent == TEACHER:
        return teacher_of(cell.game, work, published, progress)
    if cell.agent == SAMPLED and published is not None and TEACHER in PUBLISHED[cell.game]:
        return sampled(load_teacher(published / PUBLISHED[cell.game][TEACHER], cell.env_id))
    if cell.agent == SAMPLED:
        return sampled(teacher_of(cell.game, work, published, progress))
    assert published is not None
    return load_teacher(published / PUBLISHED[cell.game][cell.agent], cell.env_id, merge="max")


def _compute(cell: Cell, agent: Policy, scale: Scale) -> Found:
    size = SCALES[scale]
    if cell.attack in OTHER_ATTACKS:
        episodes = size.other_attacks
    elif cell.agent in OURS:
        episodes = size.student
    else:
        episodes = size.attacked if cell.level else size.clean
    attack = None if cell.attack == "none" else attacks.WhereUncertified(attacks.by_name(cell.attack))
    result = evaluate(agent, cell.env_id, attack, cell.level / 255, episodes, TEST_SEED, name=cell.agent)
    return measured(cell, result, CERTIFIED_AT, LEAST_RETURN)


def _facts(table: Table, published: bool) -> Facts:
    attack, levels, figures = COLUMNS[table]
    return {
        "attack": attack,
        "levels": list(levels),
        "protocol": f"easy mode; 200 training levels from 0, or all; greedy play (unless it says sampled); seed {TEST_SEED}: "
        "200 episodes are every training level once; PGD steps of eps / 10 from the clean image; SEM over episodes; our students "
        "are attacked in the states that are not certified at eps, because in the others no attack can change the action",
        "experts": "as published" if published else "trained here",
        "quoted": [
            {"game": game, "levels": where, "agent": agent, "figures": [list(pair) for pair in row]}
            for (game, where, agent), row in figures.items()
        ],
    }


def table_lines(results: TableDocument) -> list[str]:
    """The table in Markdown: measured rows, then those that the paper prints."""
    levels = results["levels"]
    lines = [
        "| game | levels | agent | "
        + " | ".join("clean" if k == 0 else f"{k}/255" for k in levels)
        + " | certified at 1/255 |",
        "|---" * (4 + len(levels)) + "|",
    ]
    rows: dict[tuple[str, str, str], dict[int, Found]] = {}
    for found in results["cells"]:
        cell = found["cell"]
        if cell["attack"] in ("none", results["attack"]):
            rows.setdefault((cell["game"], cell["levels"], cell["agent"]), {})[cell["level"]] = found
    for (game, where, agent), by_level in sorted(rows.items(), key=lambda item: (item[0][0], item[0][1] != "train")):
        clean = by_level.get(0)
        texts = [cell_text(by_level.get(k), USUAL_EPISODES) for k in levels]
        share = None if clean is None else clean.get("certified", {}).get("1")
        name = f"**{agent}**" if agent in OURS else agent
        lines.append(f"| {game} | {where} | {name} | {' | '.join(texts)} | {'' if share is None else f'{share:.1%}'} |")
        if clean is not None and "proven" in clean:
            proven = [f"{clean['proven'][str(k)]:.2f}" if k else "" for k in levels]
            lines.append(f"| {game} | {where} | {name}, *proven, whatever the attack* | {' | '.join(proven)} | |")
    for row in results["quoted"]:
        if not any(game == row["game"] for game, _, _ in rows):
            continue
        texts = ["" if pair is None else figure(*pair) for pair in row["figures"]]
        blank = [""] * (len(levels) - len(texts))  # the paper's Table 4 has no clean column
        lines.append(
            f"| {row['game']} | {row['levels']} | {row['agent']}, *quoted from the paper* | {' | '.join(blank + texts)} | |"
        )
    return lines


def other_attacks_lines(results: TableDocument) -> list[str]:
    """What attacks of other kinds do on the training levels, in Markdown; empty if none was tried."""
    found: dict[str, dict[str, Found]] = {}
    for entry in results["cells"]:
        if entry["cell"]["attack"] in OTHER_ATTACKS:
            found.setdefault(f"{entry['cell']['game']}, {entry['cell']['agent']}", {})[entry["cell"]["attack"]] = entry
    if not found:
        return []
    names = [name for name in OTHER_ATTACKS if any(name in row for row in found.values())]
    head = f"| return at {OTHERS_AT}/255, training levels | " + " | ".join(names) + " |"
    rows = [
        f"| {agent} | {' | '.join(cell_text(row.get(name), USUAL_EPISODES) for name in names)} |"
        for agent, row in found.items()
    ]
    return [head, "|---" * (1 + len(names)) + "|", *rows]
