"""Tables 1 and 3: returns on four Atari games, of our students, of their teacher, and of the teacher on quantised pixels.

The protocol is that of the literature ("84"; see :mod:`sortrl.envs.atari`): test environments with raw rewards and all lives, 20
greedy episodes with the seeds 0 to 19, at most 10,000 steps each, mean and standard error over episodes. Table 1 has PGD-10.
Table 3 has larger eps and reports the worst of four attacks; each of them is a cell of its own. Beside table 1, the clean
return with sticky actions tells skill from memorised episodes: the 20 episodes are the same for all agents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from sortrl import attacks
from sortrl.attacks import Attack
from sortrl.baselines.thresholds.recipe import ThresholdRecipe
from sortrl.core.errors import SortRLError
from sortrl.core.files import locked
from sortrl.core.identity import fingerprint
from sortrl.core.pieces import Engine
from sortrl.data.collect import CollectConfig
from sortrl.envs.registry import ATARI_STEPS
from sortrl.envs.registry import STICKY as STICKY_ACTIONS
from sortrl.evaluate.returns import evaluate
from sortrl.experiments import quoted
from sortrl.experiments.cells import (
    CellFields,
    CellTable,
    Facts,
    Found,
    Quoted,
    TableDocument,
    WorstFound,
    cell_text,
    figure,
    file_name,
    measured,
)
from sortrl.experiments.figure1 import Scale
from sortrl.nets import CertifiedPolicy, zoo
from sortrl.runs.config import Preset, robustify_config
from sortrl.runs.run import open_run, read_run
from sortrl.runs.tasks import teacher_preset
from sortrl.teachers import Teacher, load_teacher, quantized, train_teacher
from sortrl.teachers.teacher import FILE_NAME

Table = Literal["table1", "table3"]
GAMES = ("Freeway", "RoadRunner", "Pong", "BankHeist")
# With 4 brightnesses next to no pixel is within 10/255 of where its rounding changes (BankHeist: 9 %), and most of what moves can
# still be told from what does not; with 8 or 16, most pixels of Pong or Freeway are within 5/255.
BRIGHTNESSES = 4
STUDENT, ROUNDED, MEMORY = "sortrl", "sortrl, rounded", "sortrl, memory"
TEACHER, QUANTIZED = "PQN", f"PQN, {BRIGHTNESSES} brightnesses"
OURS: dict[str, Preset] = {
    STUDENT: "fast",
    ROUNDED: "thresholds",
    MEMORY: "memory",
}  # students, and the presets that make them
AGENTS = (*OURS, TEACHER, QUANTIZED)
STICKY = "sticky"  # in place of an attack: clean play with sticky actions
AUTO = "auto"  # the suite, in every state the first of its attacks that succeeds; of SortNets alone, which are certified in most states

SEED = 0  # episodes 0 to 19
LEVELS = (0, 1, 3, 5)
STRONGER_LEVELS = {**quoted.TABLE3_LEVELS, "Pong": (10, 15, 20)}  # Pong is ours: the paper's table leaves it out
STRONGER = {
    "pgd-30": "PGD-30",
    "fgsm": "FGSM",
    "ri-fgsm-multi": "RI-FGSM-Multi",
    "ri-fgsm-multi-t": "RI-FGSM-Multi-T",
}
CERTIFIED_AT = (1, 3, 5, 10, 15, 20)
SHOWN_AT = (1, 5)  # the paper prints the first


@dataclass(frozen=True)
class Size:
    """How much of the protocol to play."""

    episodes: int
    stronger_episodes: int
    """Episodes of our students in table 3; they are attacked only in uncertified states, of which there are few."""
    stronger_others: int
    """Episodes of the other agents in table 3, where those attacks cost up to a hundred times as much as clean play."""
    starts: int
    """Random starts of its two -Multi attacks per state; a thousand take a student about 3 seconds on one core."""
    suite: tuple[int, int] = (30, 300)
    """Steps and queries of the attacks of the suite auto."""


SIZES: dict[str, Size] = {
    "smoke": Size(1, 1, 1, 2, (2, 4)),
    "cpu": Size(20, 20, 5, 10),
    "paper": Size(20, 20, 20, 1000),
}
# Too small to learn anything: at least two episodes, one of which is held out; or enough that a start state recurs.
SMOKE_STUDENTS: dict[str, dict[str, Any]] = {
    STUDENT: {"steps": 5, "batch": 16, "dagger_rounds": 0, "collect": CollectConfig(states=5000)},
    ROUNDED: {"steps": 5, "batch": 16, "dagger_rounds": 0, "collect": CollectConfig(states=5000)},
    MEMORY: {"collect": CollectConfig(states=140_000)},
}
SMOKE_TRAINING: dict[str, Any] = {
    "total_steps": 2048,
    "eval_every": 2048,
    "eval_episodes": 1,
    "confirm_episodes": 1,
    "stagger": 0,
}


@dataclass(frozen=True)
class Cell:
    """One agent in one game under one attack."""

    game: str
    agent: str
    attack: str
    level: int
    """eps in 255ths."""

    @property
    def name(self) -> str:
        return file_name(self.game, self.agent, self.attack, self.level)


@dataclass(frozen=True)
class Player:
    """An agent of a table, and the teacher it was made from, whose action values targeted attacks use."""

    policy: Teacher | CertifiedPolicy
    teacher: Teacher


def env_id_of(game: str) -> str:
    return f"sortrl/{game}84-v0"


def cells(table: Table, games: Iterable[str] = GAMES) -> list[Cell]:
    """All cells of a table, agent by agent."""
    pairs = [(game, agent) for game in games for agent in AGENTS]
    if table == "table1":
        attacked = [("pgd-10" if level else "none", level) for level in LEVELS]
        found = [Cell(*pair, *how) for pair in pairs for how in (*attacked, (STICKY, 0))]
        return found + [Cell(game, STUDENT, AUTO, max(LEVELS)) for game in games]
    return [Cell(*pair, attack, k) for pair in pairs for k in STRONGER_LEVELS[pair[0]] for attack in STRONGER]


def atari_table(
    table: Table,
    scale: Scale = "cpu",
    game: str | None = None,
    out: Path = Path("results"),
    work: Path = Path("runs/atari"),
    teachers: Path | None = None,
    progress: Callable[[str], None] = print,
    agent: str | None = None,
    engine: Engine | None = None,
) -> TableDocument:
    """Compute the cells that are missing, of one game or agent or of all, and write the table of all after each of them."""
    derived = _with_worst if table == "table3" else None
    return CellTable(table, scale, cells(table), work / scale, out, _facts(table, SIZES[scale]), derived).fill(
        lambda cell: _player(cell, work, scale, teachers, progress),
        lambda cell, player: _compute(cell, player, scale),
        _networks,
        progress,
        game,
        agent,
        start_of=lambda cell: _start(cell, work, scale, teachers, progress),
        engine=engine,
    )


def teacher_of(game: str, work: Path, scale: Scale, teachers: Path | None, progress: Callable[[str], None]) -> Teacher:
    """The one in the folder given; or one that is trained here, which takes hours."""
    env_id, folder = env_id_of(game), work / "teachers" / game
    if teachers is not None:
        folder = teachers / game.lower()
        if not (folder / FILE_NAME).exists():
            raise SortRLError(
                f"{teachers} holds no teacher of {game}. Train one: sortrl teach {env_id} --out {folder}, or leave --teachers out."
            )
        return load_teacher(folder, env_id)
    preset = teacher_preset(env_id)
    if scale == "smoke":
        folder = work / scale / "teachers" / game
        preset = replace(preset, **SMOKE_TRAINING)
    progress(f"{game}: training a teacher, or reading the trained one")

    def tell(row: dict[str, Any]) -> None:
        if "return" in row:  # at evaluations, a few minutes apart
            progress(f"{game}: step {row['step']} of {row['total']}, return {row['return']:.1f}")

    with locked(folder, wait=True):  # two tables may need it at once
        return train_teacher(env_id, preset, folder, progress=tell)


def student_of(game: str, agent: str, teacher: Teacher, work: Path, scale: Scale) -> CertifiedPolicy:
    """One of our students: made now, continued, or read back."""
    preset = OURS[agent]
    tiny = SMOKE_STUDENTS[agent] if scale == "smoke" else {}
    config = robustify_config(env_id_of(game), preset=preset, train_teacher=False, **tiny)
    recipe = config.student
    if scale == "smoke" and isinstance(recipe, ThresholdRecipe) and recipe.polish is not None:
        config = replace(config, student=replace(recipe, polish=replace(recipe.polish, **SMOKE_TRAINING)))
    directory = work / "students" / (f"{game}-{scale}" + ("" if preset == "fast" else f"-{preset}"))
    source = f"{TEACHER}, {fingerprint(teacher)}"
    with open_run(directory, env_id_of(game), config, 0, teacher, source, quiet=False, wait=True) as run:
        return run.student(teacher)


def _from_zoo(game: str) -> dict[str, Player]:
    """Students that come with the project, each with its teacher; and that of the first as the teacher of the table."""
    found: dict[str, Player] = {}
    for name in zoo.names():
        if zoo.card(zoo.entry(name)).get("env") != env_id_of(game):
            continue
        _, student, teacher = read_run(Path(f"{zoo.PREFIX}{name}"))
        agents = [agent for agent, preset in OURS.items() if preset == zoo.card(zoo.entry(name)).get("preset")]
        if teacher is None or len(agents) != 1 or agents[0] in found:
            raise SortRLError(f"{zoo.PREFIX}{name}: expected one student of {game} for each preset, with its teacher.")
        found[agents[0]] = Player(student, teacher)
    first = next((found[agent].teacher for agent in OURS if agent in found), None)
    return found if first is None else {**found, TEACHER: Player(first, first)}


def _start(cell: Cell, work: Path, scale: Scale, teachers: Path | None, progress: Callable[[str], None]) -> None:
    """Train the teacher that all agents of a game start from, unless it is there."""
    if teachers is None and (scale == "smoke" or not _from_zoo(cell.game)):
        teacher_of(cell.game, work, scale, teachers, progress)


def _player(cell: Cell, work: Path, scale: Scale, teachers: Path | None, progress: Callable[[str], None]) -> Player:
    shipped = _from_zoo(cell.game) if teachers is None and scale != "smoke" else {}
    if cell.agent in shipped:
        return shipped[cell.agent]
    teacher = shipped[TEACHER].teacher if shipped else teacher_of(cell.game, work, scale, teachers, progress)
    if cell.agent in OURS:
        return Player(student_of(cell.game, cell.agent, teacher, work, scale), teacher)
    return Player(quantized(teacher, BRIGHTNESSES) if cell.agent == QUANTIZED else teacher, teacher)


def _networks(cell: Cell, player: Player) -> dict[str, nn.Module]:
    """Students of the zoo may have learned from an earlier or a later teacher than the one of the table."""
    if cell.agent in OURS:
        return {f"teacher of {cell.agent}": player.teacher, cell.agent: player.policy}
    return {TEACHER: player.teacher}


def _compute(cell: Cell, player: Player, scale: Scale) -> Found:
    size = SIZES[scale]
    stronger = size.stronger_episodes if cell.agent in OURS else size.stronger_others
    episodes = stronger if cell.attack in STRONGER else size.episodes
    attack = _attack(cell.attack, player.teacher, size)
    attack = None if attack is None else attacks.WhereUncertified(attack)
    env_id = env_id_of(cell.game) if cell.attack != STICKY else f"sortrl/{cell.game}84-sticky-v0"
    certify = (
        False if cell.attack == STICKY else [level / 255 for level in CERTIFIED_AT]
    )  # of the former the return alone is shown
    result = evaluate(player.policy, env_id, attack, cell.level / 255, episodes, SEED, name=cell.agent, certify=certify)
    return measured(cell, result, CERTIFIED_AT)


def _attack(name: str, values: Teacher, size: Size) -> Attack | None:
    if name == AUTO:
        return attacks.auto(*size.suite)
    if name == "ri-fgsm-multi":
        return attacks.RIFGSMMulti(size.starts)
    if name == "ri-fgsm-multi-t":
        return attacks.RIFGSMMultiT(values, size.starts)
    return None if name in ("none", STICKY) else attacks.by_name(name)


def _facts(table: Table, size: Size) -> Facts:
    """Protocol, attacks and quoted figures of a table."""
    one = table == "table1"
    return {
        "attacks": ["pgd-10"] if one else list(STRONGER),
        "levels": list(LEVELS) if one else sorted({k for levels in STRONGER_LEVELS.values() for k in levels}),
        "episodes": size.episodes if one else size.stronger_episodes,
        "starts": None if one else size.starts,
        "protocol": "84: one grey frame of 84 x 84; test environments with raw rewards and all lives; greedy; episodes with "
        f"seeds from {SEED} on, at most {ATARI_STEPS} steps; SEM over episodes; PGD steps of eps / 10 from the clean image; "
        "our students are attacked in the states that are not certified at eps, because in the others no attack can change the action; "
        "RI-FGSM-Multi-T ranks actions by the teacher's values; certified: share of the states of clean play whose radius "
        f"is above eps; {STICKY}: clean play in which every frame repeats, with probability {STICKY_ACTIONS}, the action of the "
        "frame before",
        "quoted": _quoted(quoted.TABLE1 if one else quoted.TABLE3, one),
    }


def _quoted(table: dict[tuple[str, str], quoted.Partial], with_acr: bool) -> list[Quoted]:
    return [
        {
            "game": game,
            "agent": agent,
            "levels": list(LEVELS if with_acr else STRONGER_LEVELS[game]),
            "figures": [None if cell is None else list(cell) for cell in row],
            "acr_percent": quoted.TABLE1_ACR.get((game, agent)) if with_acr else None,
        }
        for (game, agent), row in table.items()
    ]


def _with_worst(found: list[Found]) -> Facts:
    return {"worst": worst(found)}


def worst(found: list[Found]) -> list[WorstFound]:
    """Of each game, agent and eps the attack under which the mean return is lowest, among those computed so far."""
    groups: dict[tuple[str, str, int], list[Found]] = {}
    for entry in found:
        cell = entry["cell"]
        groups.setdefault((cell["game"], cell["agent"], cell["level"]), []).append(entry)
    rows: list[WorstFound] = []
    for (game, agent, level), tried in groups.items():
        lowest = min(tried, key=lambda entry: float(entry["mean"]))
        rows.append(
            {
                "game": game,
                "agent": agent,
                "level": level,
                "attack": lowest["attack"],
                "mean": lowest["mean"],
                "sem": lowest["sem"],
                "episodes": lowest["episodes"],
                "attacks_tried": len(tried),
            }
        )
    return rows


def table_lines(results: TableDocument, with_quoted: bool = True) -> list[str]:
    """The table in Markdown, under a line that says what it shows: measured rows, then those that the paper prints."""
    stronger, levels = "worst" in results, results["levels"]
    rows: dict[tuple[str, str], dict[int, Found | WorstFound]] = {}
    worst_of_suite: dict[tuple[str, str], Found | WorstFound] = {}
    for where, entry in _places(results):
        if where["attack"] == STICKY:
            continue
        if where["attack"] == AUTO:
            worst_of_suite[where["game"], where["agent"]] = entry
            continue
        rows.setdefault((where["game"], where["agent"]), {})[where["level"]] = entry
    columns = ["clean" if k == 0 else f"{k}/255" for k in levels]
    columns += [] if stronger else [f"{max(LEVELS)}/255, suite auto"]
    columns += [] if stronger else [f"certified at {k}/255" for k in SHOWN_AT]
    lines = [_caption(results), "", f"| game | agent | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    for game in GAMES:
        for agent in AGENTS:
            by_level = rows.get((game, agent))
            if by_level is None:
                continue
            texts = [_text(by_level.get(k), results["episodes"], len(results["attacks"])) for k in levels]
            texts += [] if stronger else [cell_text(worst_of_suite.get((game, agent)), results["episodes"])]
            clean = by_level.get(0)
            shares = clean["certified"] if clean is not None and "certified" in clean else {}
            texts += [] if stronger else [_share(shares.get(str(k))) for k in SHOWN_AT]
            lines.append(f"| {game} | {_bold(agent)} | {' | '.join(texts)} |")
        shown = with_quoted and any(key[0] == game for key in rows)
        printed = [row for row in results["quoted"] if row["game"] == game and shown]
        lines += [_quoted_line(row, levels, stronger) for row in printed]
    return lines


def _share(share: float | None) -> str:
    """In percent, never rounded up."""
    return "" if share is None else f"{math.floor(share * 1e4) / 100:.2f}%"


def _places(results: TableDocument) -> list[tuple[CellFields | WorstFound, Found | WorstFound]]:
    """What a table shows and where: the worst of several attacks, or every cell."""
    if "worst" in results:
        return [(entry, entry) for entry in results["worst"]]
    return [(entry["cell"], entry) for entry in results["cells"]]


def sticky_lines(results: TableDocument) -> list[str]:
    """Clean returns without and with sticky actions, in Markdown; empty if none was measured."""
    clean, sticky = (
        {(e["cell"]["game"], e["cell"]["agent"]): e for e in results["cells"] if e["cell"]["attack"] == attack}
        for attack in ("none", STICKY)
    )
    if not sticky:
        return []
    lines = ["| game | agent | clean | with sticky actions |", "|---|---|---|---|"]
    for game, agent in ((game, agent) for game in GAMES for agent in AGENTS if (game, agent) in sticky):
        texts = [cell_text(found.get((game, agent)), results["episodes"]) for found in (clean, sticky)]
        lines.append(f"| {game} | {_bold(agent)} | {' | '.join(texts)} |")
    return lines


def _bold(agent: str) -> str:
    return f"**{agent}**" if agent in OURS else agent


def _caption(results: TableDocument) -> str:
    episodes = f"{results['episodes']} episodes per cell, fewer where it is said"
    if results["starts"] is None:
        return f"Mean return ± standard error under PGD-10, {results['episodes']} episodes per cell."
    names = ", ".join(STRONGER[name] for name in results["attacks"])
    return (
        f"The lowest mean return ± standard error under {names}, {episodes}; the last two attacks have {results['starts']} random "
        f"starts (the literature: {SIZES['paper'].stronger_episodes} episodes, {SIZES['paper'].starts} starts)."
    )


def _text(entry: Found | WorstFound | None, episodes: int, attacks_wanted: int) -> str:
    """A cell; of the worst of several attacks also its name, and how many were tried where some are missing."""
    text = cell_text(entry, episodes)
    if entry is None or "attacks_tried" not in entry:
        return text
    tried = entry["attacks_tried"]
    return f"{text} ({entry['attack']}{'' if tried == attacks_wanted else f'; {tried} of {attacks_wanted} attacks'})"


def _quoted_line(row: Quoted, levels: list[int], stronger: bool) -> str:
    printed = dict(zip(row["levels"], row["figures"], strict=True))
    texts = ["" if printed.get(k) is None else figure(*printed[k]) for k in levels] + ([] if stronger else [""])
    shares = {1: row["acr_percent"]}
    texts += [] if stronger else ["" if shares.get(k) is None else f"{shares[k]:.2f}%" for k in SHOWN_AT]
    return f"| {row['game']} | {row['agent']}, *quoted from the paper* | {' | '.join(texts)} |"
