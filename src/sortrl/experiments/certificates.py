"""How tight certificates are: per task, the share of states that each bound on the radius certifies, against eps.

margin <= intervals <= complete search <= smallest attack; the same states, the same valid range. Written to
certificates.json and drawn as certificates.png.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl import attacks
from sortrl.attacks import Attack
from sortrl.certify import ACR_VARIANTS, acr, interval_radius, ladder
from sortrl.core.errors import SortRLError
from sortrl.core.files import locked, write_json
from sortrl.core.records import Policy
from sortrl.distill import PRESETS, SortRecipe
from sortrl.envs import EnvInfo, EnvSlots, Episode, describe, play_episodes
from sortrl.evaluate import provenance
from sortrl.evaluate.returns import episode_seeds, valid_range
from sortrl.experiments.figure1 import EPS_GRID, PLANS, TASKS, Scale, Unit, agent_of
from sortrl.nets import CertifiedPolicy, SortPolicy
from sortrl.nets.float_bounds import rounding_error, stages, traced_scores
from sortrl.report.figures import panels, save
from sortrl.runs.config import robustify_config
from sortrl.runs.run import open_run
from sortrl.runs.tasks import teacher_preset
from sortrl.teachers import train_teacher

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
ACR_STATES = 1000  # at most, per task: intervals cost more than margins
ONE_SENSOR_REACH = 4.0  # where radii of a single sensor are cut off
ATTACK_STEPS = 10  # of the bisection for the smallest eps at which an attack succeeds
PROTOCOL = (
    "States drawn evenly from clean greedy episodes; eps in the policy's input units, boxes and attacks clipped to the "
    "declared range of observations; radii cut off at reach. exact: complete search with a budget of boxes per state, "
    "lower end certified, upper end a real counter-example. attack: smallest eps at which the named attack changes the action."
)


class SmallestAttack(TypedDict):
    """By state, the smallest eps at which an attack changed the action; None where none up to reach did."""

    name: str
    radius: list[float | None]


class TaskBounds(TypedDict):
    """All bounds of one task."""

    visited: int
    lipschitz: float
    ladder: dict[str, Any]
    """See :func:`sortrl.certify.ladder`."""
    ladder_seconds: float
    attack: SmallestAttack
    one_sensor: dict[str, dict[str, float]] | None
    acr: dict[str, Any]
    """By variant, and what they are shares of."""
    rounding: dict[str, float]


class PixelBounds(TypedDict):
    """What clipping to the valid range of pixels gains."""

    states: int
    distinct_visited: int
    attack: str
    reach: float
    medians: dict[str, float]
    radii: dict[str, list[float]]


class CertificatesDocument(TypedDict):
    """results/certificates.json."""

    schema: int
    kind: str
    protocol: str
    acr_variants: dict[str, str]
    settings: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    tasks: dict[str, TaskBounds]
    images: dict[str, PixelBounds]


def certificates(
    scale: Scale = "cpu",
    task: str | None = None,
    out: Path = Path("results"),
    work: Path = Path("runs/fig1"),
    progress: Callable[[str], None] = print,
) -> CertificatesDocument:
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
    return study(
        policies, out, states=states, episodes=episodes, boxes_per_state=boxes, images=images, progress=progress
    )


def _of_images(scale: Scale, work: Path) -> CertifiedPolicy:
    """A student of a small game, and its teacher, trained or read back."""
    changes = dict(PLANS[scale].changes)
    preset, config = teacher_preset(IMAGES), robustify_config(IMAGES, train_teacher=False, **changes)
    recipe = SortRecipe(PLAIN_PIXELS).for_eps(config.eps)
    own = {name: value for name, value in changes.items() if name in recipe.options}
    config = replace(config, student=recipe.with_options(**own))
    if scale == "smoke":
        preset = replace(preset, total_steps=4096, eval_every=4096)
    name = IMAGES.replace("/", "-")
    folder = work / "teachers" / name if scale != "smoke" else work / scale / name
    with locked(folder):
        teacher = train_teacher(IMAGES, preset, folder)
    with open_run(work / scale / "students" / name, IMAGES, config, 0, teacher) as run:
        return run.student(teacher)


def study(
    policies: Mapping[str, SortPolicy | str | Path],
    out: str | Path,
    *,
    states: int = 100,
    episodes: int = 10,
    seed: int = 1600,
    attack: str = "pgd-10",
    reach: float = 1.0,
    tolerance: float = 5e-4,
    boxes_per_state: int = 5000,
    images: Mapping[str, CertifiedPolicy] | None = None,
    progress: Callable[[str], None] = print,
) -> CertificatesDocument:
    """Compute all bounds for each task (environment id -> policy or its directory); write certificates.json and .png.

    ``images`` are tasks of too many dimensions for the complete search: there the gain of the valid range is measured.
    """
    tasks = {}
    for env_id, source in policies.items():
        policy = source if isinstance(source, SortPolicy) else SortPolicy.load(source)
        started = time.monotonic()
        played = clean_episodes(policy, env_id, episodes, seed)
        tasks[env_id] = climb(
            policy,
            env_id,
            played,
            states,
            attacks.by_name(attack),
            reach=reach,
            tolerance=tolerance,
            boxes_per_state=boxes_per_state,
        )
        progress(f"certificates: {env_id} in {time.monotonic() - started:.0f} s; {summary(tasks[env_id])}")
    pixels = {}
    for env_id, student in (images or {}).items():
        played = clean_episodes(student, env_id, episodes, seed)
        pixels[env_id] = clipping(student, env_id, played, states, attacks.by_name(attack), reach)
        progress(f"certificates: {env_id}, medians {pixels[env_id]['medians']}")
    results: CertificatesDocument = {
        "schema": 1,
        "kind": "certificates",
        "protocol": PROTOCOL,
        "acr_variants": ACR_VARIANTS,
        "settings": {
            "states": states,
            "episodes": episodes,
            "seed": seed,
            "attack": attack,
            "reach": reach,
            "tolerance": tolerance,
            "boxes_per_state": boxes_per_state,
            "one_sensor_reach": ONE_SENSOR_REACH,
        },
        "versions": provenance.versions(),
        "machine": provenance.machine(),
        "tasks": tasks,
        "images": pixels,
    }
    write_json(Path(out) / "certificates.json", results)
    if tasks:
        draw(results, Path(out) / "certificates.png")
    return results


def climb(
    policy: SortPolicy,
    env_id: str,
    played: list[Tensor],
    states: int,
    attack: Attack,
    *,
    reach: float,
    tolerance: float,
    boxes_per_state: int,
) -> TaskBounds:
    """All bounds and statistics of one task, on a sample of the visited states."""
    info = describe(env_id)
    low, high = valid_range(policy, info)
    visited = torch.cat(played)
    unit = visited[torch.linspace(0, len(visited) - 1, min(states, len(visited))).long()]
    started = time.monotonic()
    rungs = ladder(policy, unit, low, high, reach=reach, tolerance=tolerance, boxes_per_state=boxes_per_state)
    seconds = time.monotonic() - started
    smallest = smallest_attack(policy, unit, attack, low, high, reach)
    if (smallest < np.array(rungs["exact_lower"])).any():
        raise SortRLError(
            f"{env_id}: {attack.name} changed a certified action. This is a bug: report it with the policy."
        )
    return {
        "visited": len(visited),
        "lipschitz": policy.lipschitz,
        "ladder": rungs,
        "ladder_seconds": round(seconds, 2),
        "attack": {"name": attack.name, "radius": [None if math.isinf(r) else float(r) for r in smallest]},
        "one_sensor": _one_sensor(policy, unit, low, high, info),
        "acr": _acr(policy, played, low, high),
        "rounding": _rounding(policy, unit),
    }


def clipping(
    policy: CertifiedPolicy, env_id: str, played: list[Tensor], states: int, attack: Attack, reach: float
) -> PixelBounds:
    """Gain from clipping to the valid range of pixels: a black pixel can only get brighter."""
    low, high = valid_range(policy, describe(env_id))
    visited = torch.unique(torch.cat(played), dim=0)
    unit = visited[torch.linspace(0, len(visited) - 1, min(states, len(visited))).long()]
    radii = {
        "margin": np.minimum(policy.certify_unit(unit).radius, reach),
        "interval": interval_radius(policy, unit, reach=reach),
        "clipped": interval_radius(policy, unit, low, high, reach=reach),
    }
    smallest = smallest_attack(policy, unit, attack, low, high, reach)
    if (smallest < radii["clipped"]).any():
        raise SortRLError(
            f"{env_id}: {attack.name} changed a certified action. This is a bug: report it with the policy."
        )
    radii["attack"] = np.minimum(smallest, reach)
    return {
        "states": len(unit),
        "distinct_visited": len(visited),
        "attack": attack.name,
        "reach": reach,
        "medians": {name: round(float(np.median(values)), 4) for name, values in radii.items()},
        "radii": {name: [float(value) for value in values] for name, values in radii.items()},
    }


def clean_episodes(policy: CertifiedPolicy, env_id: str, episodes: int, seed: int) -> list[Tensor]:
    """The unit-space states (steps, *obs_shape) of greedy episodes without an attack."""
    return [policy.normalize(states) for states in clean_observations(policy, env_id, episodes, seed)]


@torch.no_grad()
def clean_observations(
    policy: Policy, env_id: str, episodes: int, seed: int, most: int | None = None, slots: int = 1
) -> list[npt.NDArray[Any]]:
    """The raw observations (steps, *obs_shape) of greedy episodes without an attack; of each at most the first ``most``.

    With one slot scores do not depend, in their last bits, on which other states were in the batch."""
    found: list[list[npt.NDArray[Any]]] = [[] for _ in range(episodes)]

    class Brief(Episode):
        def given_up(self) -> bool:
            return self.steps == most

    def act(playing: list[Brief]) -> list[int]:
        for episode in playing:
            found[episode.number].append(episode.obs)
        unit = policy.normalize(np.stack([episode.obs for episode in playing]))
        actions: list[int] = policy.scores(unit).argmax(1).tolist()
        return actions

    with EnvSlots(env_id, slots) as envs:
        play_episodes(envs, episode_seeds(seed, episodes), act, Brief)
    return [np.stack(states) for states in found]


def smallest_attack(
    policy: CertifiedPolicy, unit: Tensor, attack: Attack, low: Tensor | None, high: Tensor | None, reach: float
) -> npt.NDArray[np.float64]:
    """The smallest eps (batch,) at which ``attack`` was seen to change the action; infinite if at none up to ``reach``."""
    generator = torch.Generator().manual_seed(0)
    found = np.full(len(unit), np.inf)
    below, above = np.zeros(len(unit)), np.full(len(unit), reach)
    eps = above
    for _ in range(1 + ATTACK_STEPS):
        result = attack(policy, unit, torch.from_numpy(eps), low, high, generator)
        distance = (result.perturbed.double() - unit.double()).abs().flatten(1).amax(1).numpy()
        found = np.where(result.changed, np.minimum(found, distance), found)
        below, above = np.where(result.changed, below, eps), np.where(result.changed, eps, above)
        eps = (below + np.minimum(above, reach)) / 2
    return found


def _one_sensor(
    policy: SortPolicy, unit: Tensor, low: Tensor | None, high: Tensor | None, info: EnvInfo
) -> dict[str, dict[str, float]] | None:
    """The median over states of how wrong each value may be while the others are right."""
    if len(policy.obs_shape) != 1:
        return None
    scale = policy.normalizer.scale.tolist()
    sensors = {}
    for index, name in enumerate(info.obs_names):
        weights = torch.zeros(policy.obs_shape)
        weights[index] = 1.0
        median = float(np.median(interval_radius(policy, unit, low, high, weights=weights, reach=ONE_SENSOR_REACH)))
        sensors[name] = {"unit": median, "raw": median * scale[index]}
    return sensors


def _acr(policy: SortPolicy, played: list[Tensor], low: Tensor | None, high: Tensor | None) -> dict[str, Any]:
    step = -(-sum(map(len, played)) // ACR_STATES)
    thinned = [states[::step] for states in played]
    shares = {name: [acr(policy, thinned, eps, name, low, high) for eps in EPS_GRID] for name in ACR_VARIANTS}
    return {"eps": list(EPS_GRID), "states": sum(map(len, thinned)), **shares}


@torch.no_grad()
def _rounding(policy: SortPolicy, unit: Tensor) -> dict[str, float]:
    """The bound on rounding errors beside the errors that were seen, against a float64 evaluation."""
    scores, magnitudes = traced_scores(policy, unit)
    bound = rounding_error(stages(policy), magnitudes)
    error = (scores.double() - copy.deepcopy(policy).double().scores(unit.double())).abs().amax(1)
    return {
        "bound_median": float(bound.median()),
        "error_largest": float(error.max()),
        "bound_of_error_least": float((bound / error.clamp(min=1e-12)).min()),
    }


def summary(task: TaskBounds) -> str:
    """One line: share of the distance to the nearest counter-example that each bound certifies."""
    rungs = task["ladder"]
    shares = {name: rungs[f"{name}_of_upper"]["median"] for name in ("margin", "interval", "exact_lower")}
    parts = ", ".join(f"{name.split('_')[0]} {share:.3f}" for name, share in shares.items())
    return f"median share of the distance to a counter-example: {parts}; {rungs['solved_share']:.0%} solved"


RUNGS = (
    ("margin", "margin", "#0072B2", "-"),
    ("interval", "intervals, valid range", "#00805E", (0, (5, 2))),
    ("exact_lower", "complete search", "#D55E00", "-"),
    ("attack", "not changed by", "#3A424D", (0, (1, 2))),
)


def draw(results: CertificatesDocument, path: Path) -> None:
    """A panel per task: nested curves of the share of states with a radius above eps."""
    tasks = results["tasks"]
    figure, rows = panels(1, len(tasks))
    axes = rows[0]
    for axis, (env_id, task) in zip(axes, tasks.items(), strict=True):
        radii = _radii(task)
        furthest = 1.05 * max(float(np.quantile(_finite(values), 0.98)) for values in radii.values())
        # Radii are cut off at reach: what lies there says nothing about larger eps.
        eps = np.linspace(0.0, min(max(furthest, 1e-3), task["ladder"]["reach"] * (1.0 - 1e-9)), 400)
        for key, label, colour, dash in RUNGS:
            share = (radii[key][None, :] > eps[:, None]).mean(1)
            name = f"{label} {task['attack']['name']}" if key == "attack" else label
            axis.plot(eps, share, color=colour, linestyle=dash, linewidth=1.5, label=name)
        axis.set_title(env_id, fontsize=9)
        axis.set_xlabel("ε (the policy's input units)", fontsize=8)
        axis.set_ylim(0.0, 1.02)
        axis.set_xlim(0.0, eps[-1])
    axes[0].set_ylabel("share of states", fontsize=8)
    axes[0].legend(fontsize=7, frameon=False)
    save(figure, path)


def _radii(task: TaskBounds) -> dict[str, npt.NDArray[np.float64]]:
    rungs = {key: np.array(task["ladder"][key]) for key in ("margin", "interval", "exact_lower")}
    return {**rungs, "attack": np.array([math.inf if r is None else r for r in task["attack"]["radius"]])}


def _finite(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.where(np.isfinite(values), values, 0.0)
