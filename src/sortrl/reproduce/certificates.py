"""How tight certificates are on the four classic tasks: the ladder of bounds for the students of Figure 1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sortrl import certificate_study
from sortrl.nets import SortPolicy
from sortrl.reproduce.figure1 import PLANS, TASKS, Scale, Unit, agent_of

# States per task, the clean episodes they are drawn from, and boxes that the complete search may open for each.
SIZES = {"smoke": (8, 1, 200), "cpu": (100, 10, 5_000), "paper": (1_000, 50, 20_000)}


def certificates(
    scale: Scale = "cpu",
    task: str | None = None,
    out: Path = Path("results"),
    work: Path = Path("runs/fig1"),
    progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write ``certificates.json`` and ``certificates.png`` into ``out``; students are those of Figure 1, made if absent."""
    policies: dict[str, SortPolicy | str | Path] = {}
    for name in (task,) if task else TASKS:
        student = agent_of(Unit("normalised", name, "ours", 0), PLANS[scale], work, work / scale, None)
        assert isinstance(student, SortPolicy)
        policies[name] = student
    states, episodes, boxes = SIZES[scale]
    return certificate_study.run(
        policies, out, states=states, episodes=episodes, boxes_per_state=boxes, progress=progress
    )
