"""What the Atari teachers reach and what they cost: returns on the test's seeds, with and without sticky actions, and learning curves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, cast

from sortrl.core.files import read_object, write_json
from sortrl.core.identity import differences, fingerprint
from sortrl.core.records import EvalResult
from sortrl.evaluate import evaluate
from sortrl.experiments.atari import GAMES, SEED, SIZES, env_id_of
from sortrl.experiments.figure1 import Scale
from sortrl.nets import zoo
from sortrl.teachers import load_teacher
from sortrl.teachers.grading import LOG_FILE
from sortrl.teachers.teacher import FILE_NAME

BARS = {"Freeway": 33.5, "RoadRunner": 40_000.0, "Pong": 21.0, "BankHeist": 1_300.0}
STICKY_SHARE = 0.85  # of the clean return, which a teacher should keep when actions are repeated by accident


class Returns(TypedDict):
    mean: float
    sem: float
    returns: list[float]


class Training(TypedDict):
    """What a teacher cost."""

    settings: dict[str, Any]
    step: int
    """Of the state that was kept, as ``hours``."""
    hours: float | None
    curve: list[dict[str, float | None]]


class TeacherRow(TypedDict):
    game: str
    weights: str
    episodes: int
    bar: float
    clean: Returns
    sticky: Returns
    training: Training | None


class TeachersDocument(TypedDict):
    """results/teachers.json."""

    teachers: list[TeacherRow]
    sticky_share: float


def teachers_table(
    scale: Scale = "cpu",
    game: str | None = None,
    out: Path = Path("results"),
    teachers: Path | None = None,
    progress: Callable[[str], None] = print,
) -> TeachersDocument:
    """Measure the teachers (those in the folder given, else those of the zoo) and write ``teachers.json`` after each of them.

    A row that was measured already, with the same weights and on as many episodes, is kept.
    """
    path = out / "teachers.json"
    stored: list[TeacherRow] = read_object(path)["teachers"] if path.exists() else []
    rows = {row["game"]: row for row in stored}
    for name in GAMES if game is None else (game,):
        env_id = env_id_of(name)
        places = [] if teachers is None else [teachers / name.lower()]
        places += [zoo.folder() / zoo.TEACHERS / name.lower()]
        folder = next((place for place in places if (place / FILE_NAME).exists()), places[-1])
        teacher = load_teacher(folder, env_id)
        weights, episodes, bar = fingerprint(teacher), SIZES[scale].episodes, BARS[name]
        made_with = {"weights": weights, "episodes": episodes, "bar": bar}
        if name in rows and not differences({key: rows[name].get(key) for key in made_with}, made_with):
            continue
        progress(f"{name}: playing with and without sticky actions")
        clean, sticky = (
            _returns(evaluate(teacher, played, episodes=episodes, seed=SEED))
            for played in (env_id, env_id.replace("84-", "84-sticky-"))
        )
        rows[name] = {
            "game": name,
            "weights": weights,
            "episodes": episodes,
            "bar": bar,
            "clean": clean,
            "sticky": sticky,
            "training": _training(folder / LOG_FILE),
        }
        document: TeachersDocument = {
            "teachers": [rows[one] for one in GAMES if one in rows],
            "sticky_share": STICKY_SHARE,
        }
        write_json(path, document)
    return cast(TeachersDocument, read_object(path))


def _returns(result: EvalResult) -> Returns:
    return {"mean": result.mean, "sem": result.sem, "returns": [float(one) for one in result.returns]}


def _training(log: Path) -> Training | None:
    """Settings, cost and learning curve, where the training left its log beside the weights."""
    if not log.exists():
        return None
    found = read_object(log)
    curve = [{key: row.get(key) for key in ("step", "return", "hours")} for row in found["history"]]
    best = max(found["history"], key=lambda row: float(row["return"]))
    settings = found["identity"]
    return {"settings": settings, "step": best["step"], "hours": best.get("hours"), "curve": curve}


def table_lines(results: TeachersDocument) -> list[str]:
    """In Markdown: what was reached beside what was aimed at."""
    lines = ["| game | clean | aim | with sticky actions | of the clean return |", "|---|---|---|---|---|"]
    for row in results["teachers"]:
        clean, sticky = row["clean"], row["sticky"]
        kept = f"{sticky['mean'] / clean['mean']:.0%}" if clean["mean"] > 0 else ""
        texts = [f"{part['mean']:,.2f} ± {part['sem']:,.2f}" for part in (clean, sticky)]
        lines.append(f"| {row['game']} | {texts[0]} | {row['bar']:,g} | {texts[1]} | {kept} |")
    return lines
