"""How tight certificates are on the four classic tasks: the ladder of bounds for the students of Figure 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sortrl.core.errors import SortRLError
from sortrl.core.files import locked
from sortrl.distill.loop import PRESETS, DistillConfig
from sortrl.experiments import certificate_study
from sortrl.experiments.figure1 import Scale, Unit, agent_of
from sortrl.experiments.settings import PLANS, TASKS
from sortrl.nets import CertifiedPolicy, SortPolicy
from sortrl.runs.config import robustify_config
from sortrl.runs.run import open_run
from sortrl.teachers import teacher_preset, train_teacher

IMAGES = "sortrl/Breakout10-v0"
# What the valid range adds is asked of a student that sees the pixels as they are: ramps are constant where they leave it.
PLAIN_PIXELS = replace(
    PRESETS["fast"],
    depth=3,
    steps=1000,
    batch=256,
    lambda_end=0.5,
    warm_share=0.4,
    final_share=0.15,
    exact_share=0.1,
)
# States per task, the clean episodes they are drawn from, and boxes that the complete search may open for each.
SIZES = {"smoke": (8, 1, 200), "cpu": (100, 10, 5_000), "paper": (1_000, 50, 20_000)}


def certificates(
    scale: Scale = "cpu",
    task: str | None = None,
    out: Path = Path("results"),
    work: Path = Path("runs/fig1"),
    progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write ``certificates.json`` and ``certificates.png`` into ``out``; students are those of Figure 1 (and one of images),
    made if absent."""
    policies: dict[str, SortPolicy | str | Path] = {}
    if task is not None and task not in (*TASKS, IMAGES):
        raise SortRLError(f"certificates: no task {task!r}; choose one of {', '.join((*TASKS, IMAGES))}.")
    for name in TASKS:
        if task not in (None, name):
            continue
        student = agent_of(Unit("normalised", name, "ours", 0), PLANS[scale], work, work / scale, None)
        assert isinstance(student, SortPolicy)
        policies[name] = student
    images = {IMAGES: _of_images(scale, work)} if task in (None, IMAGES) else {}
    states, episodes, boxes = SIZES[scale]
    return certificate_study.run(
        policies, out, states=states, episodes=episodes, boxes_per_state=boxes, images=images, progress=progress
    )


def _of_images(scale: Scale, work: Path) -> CertifiedPolicy:
    """A student of a small game, and its teacher, trained or read back."""
    changes = dict(PLANS[scale].changes)
    preset, config = teacher_preset(IMAGES), robustify_config(IMAGES, train_teacher=False, **changes)
    own = {name: value for name, value in changes.items() if name in DistillConfig.__dataclass_fields__}
    config = replace(config, distill=replace(PLAIN_PIXELS, eps=config.eps, **own))
    if scale == "smoke":
        preset = replace(preset, total_steps=4096, eval_every=4096)
    name = IMAGES.replace("/", "-")
    folder = work / "teachers" / name if scale != "smoke" else work / scale / name
    with locked(folder):
        teacher = train_teacher(IMAGES, preset, folder)
    with open_run(work / scale / "students" / name, IMAGES, config, 0, teacher) as run:
        return run.student(teacher)
