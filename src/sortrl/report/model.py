"""The results of a run as a typed, validated record: the only thing the rest of the report reads."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard

from sortrl.core.errors import SortRLError

SCHEMA = 1
INFINITE_P = 1e9  # how results.json, which has no infinity, writes p = infinity
ROUNDED = "rounded"  # the kind of students without sort layers
Settings = tuple[tuple[str, str], ...]
_MISSING = object()
LARGEST = 1e15  # far above any quantity of a run; larger numbers mean a damaged file
_DEEPEST = 6  # levels of nested settings that are shown


@dataclass(frozen=True)
class Row:
    """One evaluation: a policy, what was done to its observations, and its returns."""

    policy: str
    attack: str
    eps: float
    mean: float
    sem: float
    std: float
    episodes: int
    changed_share: float
    certified_share: float | None

    @property
    def is_clean(self) -> bool:
        return self.attack == "none"


@dataclass(frozen=True)
class TrainingPoint:
    """The state of the training at one step. ``p`` may be infinite; students without sort layers have neither p nor a weight."""

    step: float
    agreement: float
    certified: float
    p: float | None
    weight: float | None


@dataclass(frozen=True)
class Episode:
    """The radius of every decision of one clean episode of the student."""

    seed: int
    total: float
    radii: tuple[float, ...]


@dataclass(frozen=True)
class Certified:
    """Radii over the visited states: share certified against eps, histogram, one episode."""

    eps: tuple[float, ...]
    share: tuple[float, ...]
    radius_median: float
    edges: tuple[float, ...]
    counts: tuple[float, ...]
    episode: Episode | None
    whole_episodes: float | None


@dataclass(frozen=True)
class Student:
    """``network`` (what the policy is made of) and ``proof`` (why its radii hold) come from ``CertifiedPolicy.explain``."""

    parameters: int
    network: str
    proof: str


@dataclass(frozen=True)
class Data:
    """What the student learned from, and how it does on held-out episodes (None: none were held out)."""

    states: int
    distinct: int
    dagger_states: int | None
    held_out_states: int | None
    agreement: float | None
    certified: float | None


@dataclass(frozen=True)
class Gate:
    """Whether the student keeps its teacher's skill; if not, why it is not to be relied on, and what to try."""

    passed: bool
    reason: str
    advice: str


@dataclass(frozen=True)
class Rung:
    """One student of the ladder, as it did on the validation episodes."""

    number: int
    eps: float
    """For which its margins were widened."""
    clean: float
    kept: float | None
    attacked: float
    attack: str
    certified: float
    chosen: bool


@dataclass(frozen=True)
class Run:
    """One run; ``unit_to_raw`` is empty where the observation has no named units."""

    env_id: str
    max_steps: int | None
    n_actions: int
    obs_shape: tuple[int, ...]
    obs_names: tuple[str, ...]
    unit_to_raw: tuple[float, ...]
    eps: float
    seed: int
    command: str
    started: str
    version: str
    teacher: str
    teacher_source: str
    student: Student
    data: Data
    training: tuple[TrainingPoint, ...]
    evaluation: tuple[Row, ...]
    certified: Certified
    stage_seconds: tuple[tuple[str, float], ...]
    settings: tuple[tuple[str, Settings], ...]
    gate: Gate | None = None
    ladder: tuple[Rung, ...] = ()
    needed: float | None = None
    """Of a ladder, the least clean return that keeps the skill."""

    def clean(self, policy: str) -> Row | None:
        return next((row for row in self.evaluation if row.policy == policy and row.is_clean), None)

    def attacked(self, policy: str) -> Row | None:
        """The lowest return of any attack at the trained eps."""
        rows = [r for r in self.evaluation if r.policy == policy and not r.is_clean and math.isclose(r.eps, self.eps)]
        return min(rows, key=lambda row: row.mean, default=None)

    @property
    def attacks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.attack for row in self.evaluation if not row.is_clean))

    @property
    def curves(self) -> tuple[str, ...]:
        """The attacks to draw against eps: those that were run at several, if there are any."""
        sizes = {attack: {row.eps for row in self.evaluation if row.attack == attack} for attack in self.attacks}
        return tuple(attack for attack in self.attacks if len(sizes[attack]) > 1) or self.attacks

    @property
    def certified_at_eps(self) -> float | None:
        """Share certified at the trained eps; if that eps was not measured, a lower bound from a larger one."""
        measured = zip(self.certified.eps, self.certified.share, strict=True)
        return max((share for eps, share in measured if eps >= self.eps * (1 - 1e-9)), default=None)


def read_run(results: Mapping[str, Any]) -> Run:
    """Validate ``results`` (the content of results.json) and return it as a record."""
    if not isinstance(results, Mapping):
        raise SortRLError(f"results: received {type(results).__name__}, expected the object of a results.json.")
    top = Reader(results)
    if top.integer("schema") != SCHEMA:
        raise top.fail("schema", f"{SCHEMA}, the only one this version of sortrl reads")
    if top.text("kind") != "robustify":
        raise top.fail("kind", "'robustify'")
    env, teacher = top.object("env"), top.object("teacher")
    names = env.texts("obs_names")
    scales = env.numbers("unit_to_raw", 0.0) if env.has("unit_to_raw") else ()
    if len(scales) not in (0, len(names)):
        raise SortRLError(
            f"results: env.unit_to_raw has {len(scales)} values for {len(names)} env.obs_names; expected as many."
        )
    policy = top.object("policy")
    kind = policy.text("kind") if policy.has("kind") else "sort"  # files written before `kind` existed omit it
    run = Run(
        env_id=env.text("id"),
        max_steps=env.optional_integer("max_steps"),
        n_actions=env.integer("n_actions", 1),
        obs_shape=tuple(map(int, env.numbers("obs_shape", 1))) if env.has("obs_shape") else (len(names),),
        obs_names=names,
        unit_to_raw=scales,
        eps=top.object("config").number("eps", 0.0),
        seed=top.integer("seed"),
        command=top.text("command"),
        started=top.text("started"),
        version=top.text("sortrl"),
        teacher=teacher.text("name"),
        teacher_source=teacher.text("source") if teacher.has("source") else "",
        student=_student(top, policy, kind),
        data=_data(top.object("data")),
        training=tuple(_training_point(point, kind) for point in top.objects("training")),
        evaluation=tuple(map(_row, top.objects("evaluation"))),
        certified=_certified(top.object("certificate")),
        stage_seconds=_stage_seconds(top.object("stage_seconds")),
        settings=tuple((name, top.object(name).flat()) for name in ("config", "policy", "data", "versions", "machine")),
        gate=_gate(top.object("gate")) if top.has("gate") else None,
        ladder=_ladder(top.object("ladder")) if top.has("ladder") else (),
        needed=_needed(top.object("ladder")) if top.has("ladder") else None,
    )
    if run.clean("student") is None:
        raise SortRLError(
            "results: evaluation has no row with policy 'student' and attack 'none'; the clean return is needed."
        )
    return run


def _gate(part: Reader) -> Gate:
    passed = part.values.get("passed")
    if not isinstance(passed, bool):
        raise part.fail("passed", "true or false")
    return Gate(passed, "" if passed else part.text("reason"), "" if passed else part.text("advice"))


def _ladder(part: Reader) -> tuple[Rung, ...]:
    chosen = part.integer("chosen")
    return tuple(
        Rung(
            number=rung.integer("rung"),
            eps=rung.number("eps", 0.0),
            clean=rung.number("clean"),
            kept=rung.number("kept") if rung.has("kept") else None,
            attacked=rung.number("attacked"),
            attack=rung.text("attack"),
            certified=rung.share("certified"),
            chosen=rung.integer("rung") == chosen,
        )
        for rung in part.objects("rungs")
    )


def _needed(part: Reader) -> float:
    random = part.number("random")
    return random + part.number("keep", 0.0, 1.0) * (part.number("teacher") - random)


def _row(row: Reader) -> Row:
    if row.text("policy") not in ("teacher", "student"):
        raise row.fail("policy", "'teacher' or 'student'")
    return Row(
        policy=row.text("policy"),
        attack=row.text("attack"),
        eps=row.number("eps", 0.0),
        mean=row.number("mean"),
        sem=row.number("sem", 0.0),
        std=row.number("std", 0.0),
        episodes=row.integer("episodes", 1),
        changed_share=row.share("changed_share"),
        certified_share=row.optional_share("certified_share"),
    )


def _training_point(point: Reader, kind: str) -> TrainingPoint:
    p = None if kind == ROUNDED else point.number("p", 1.0)
    return TrainingPoint(
        step=point.number("step", 0.0),
        agreement=point.share("agreement"),
        certified=point.share("certified"),
        p=math.inf if p is not None and p >= INFINITE_P else p,
        weight=None if kind == ROUNDED else point.number("lambda", 0.0),
    )


def _certified(part: Reader) -> Certified:
    eps, share = part.numbers("eps", 0.0), part.numbers("share", 0.0, 1.0)
    if len(eps) != len(share) or not eps or list(eps) != sorted(eps):
        raise SortRLError(
            f"results: certificate.eps has {len(eps)} values and certificate.share {len(share)}; "
            "expected as many, at least one, eps in rising order."
        )
    histogram = part.object("histogram")
    edges, counts = histogram.numbers("edges", 0.0), histogram.numbers("counts", 0.0)
    if len(edges) != len(counts) + 1 or any(a >= b for a, b in pairwise(edges)):
        raise SortRLError(
            f"results: certificate.histogram has {len(edges)} edges and {len(counts)} counts; "
            "expected rising edges, one more than counts."
        )
    return Certified(
        eps=eps,
        share=share,
        radius_median=part.number("radius_median", 0.0),
        edges=edges,
        counts=counts,
        episode=_episode(part.object("episode")) if part.has("episode") else None,
        whole_episodes=part.optional_share("fully_certified_episodes"),
    )


def _episode(part: Reader) -> Episode:
    return Episode(part.integer("seed"), part.number("return"), part.numbers("radii", 0.0))


def _student(top: Reader, policy: Reader, kind: str) -> Student:
    parameters = policy.integer("parameters")
    if top.has("student"):
        own = top.object("student")
        return Student(parameters, own.text("network"), own.text("proof"))
    # Files written before policies explained themselves omit `student`.
    if kind == ROUNDED:
        return Student(
            parameters,
            "thresholds on pixels, then convolutions and linear layers",
            "Every pixel is compared with thresholds, so nothing changes until one of them is crossed; where some can be, "
            "intervals bound what the network makes of it.",
        )
    network = f"SortNet, {policy.integer('depth')} layers of {policy.integer('width')}"
    lipschitz = policy.number("lipschitz", 0.0)
    if kind == "hybrid":
        return Student(
            parameters,
            f"{network}, with linear layers behind them",
            "The sort layers are Lipschitz, which bounds how far their outputs can move, and intervals bound what the linear "
            "layers make of that.",
        )
    return Student(
        parameters,
        network,
        "The radius is half the gap between the best score and the next, divided by the network's l∞ Lipschitz constant "
        f"({lipschitz:.6g}).",
    )


def _data(part: Reader) -> Data:
    return Data(
        states=part.integer("states"),
        distinct=part.integer("distinct"),
        dagger_states=part.optional_integer("dagger_states"),
        held_out_states=part.optional_integer("held_out_states"),
        agreement=part.optional_share("agreement"),
        certified=part.optional_share("certified"),
    )


def _stage_seconds(part: Reader) -> tuple[tuple[str, float], ...]:
    """Seconds of the stages that ran; null (a loaded teacher) is left out."""
    names = [name for name, _ in part.flat()]
    return tuple((name, part.number(name, 0.0)) for name in names if part.has(name))


def clean(value: object) -> str:
    """Text without control characters or lone surrogates, so that it can neither steer a terminal nor break a file.

    >>> clean("Cart\\x1b[31mPole")
    'Cart\ufffd[31mPole'
    """
    return "".join(
        "\ufffd" if unicodedata.category(mark) in ("Cc", "Cf", "Cs", "Zl", "Zp") else mark for mark in str(value)
    )


@dataclass(frozen=True)
class Reader:
    """One JSON object and the key under which it was found.

    >>> Reader({"eps": 0.1}).number("eps")
    0.1
    >>> Reader({"env": {}}).object("env").text("id")
    Traceback (most recent call last):
    ...
    sortrl.core.errors.SortRLError: results: env.id is missing, expected text. Write them again with `sortrl robustify`.
    """

    values: Mapping[str, Any]
    path: str = ""

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def fail(self, key: str, expected: str) -> SortRLError:
        value = self.values.get(key, _MISSING)
        received = "is missing" if value is _MISSING else f"is {clean(repr(value))[:60]}"
        return SortRLError(
            f"results: {clean(self.name(key))} {received}, expected {expected}. "
            "Write them again with `sortrl robustify`."
        )

    def has(self, key: str) -> bool:
        """Whether the key is there with a value; null is how an absent optional value is written."""
        return self.values.get(key) is not None

    def object(self, key: str) -> Reader:
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            raise self.fail(key, "an object")
        return Reader(value, self.name(key))

    def objects(self, key: str) -> list[Reader]:
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise self.fail(key, "a list of objects")
        return [Reader(item, f"{self.name(key)}[{index}]") for index, item in enumerate(value)]

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str):
            raise self.fail(key, "text")
        return clean(value)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(key, "a list of texts")
        return tuple(clean(item) for item in value)

    def number(self, key: str, low: float = -math.inf, high: float = math.inf) -> float:
        value = self.values.get(key)
        if not _is_number(value) or not low <= value <= high:
            raise self.fail(key, f"a number{_bounds(low, high)}")
        return float(value)

    def integer(self, key: str, low: int = 0) -> int:
        value = self.number(key, low)
        if value != int(value):
            raise self.fail(key, "a whole number")
        return int(value)

    def numbers(self, key: str, low: float = -math.inf, high: float = math.inf) -> tuple[float, ...]:
        value = self.values.get(key)
        if not isinstance(value, list) or not all(_is_number(item) and low <= item <= high for item in value):
            raise self.fail(key, f"a list of numbers{_bounds(low, high)}")
        return tuple(map(float, value))

    def share(self, key: str) -> float:
        return self.number(key, 0.0, 1.0)

    def optional_share(self, key: str) -> float | None:
        return self.share(key) if self.has(key) else None

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if self.has(key) else None

    def flat(self) -> tuple[tuple[str, str], ...]:
        """Every setting as (dotted name, text): {"collect": {"episodes": 3}} -> (("collect.episodes", "3"),)."""
        return tuple(_flatten(self.values, "", 0))


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= LARGEST  # false for NaN, infinity and integers that no float can hold


def _bounds(low: float, high: float) -> str:
    if high < math.inf:
        return f" in [{low:g}, {high:g}]"
    return f" >= {low:g}" if low > -math.inf else f" of at most {LARGEST:g}"


def _flatten(value: object, name: str, depth: int) -> Iterator[tuple[str, str]]:
    if depth < _DEEPEST and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{name}.{clean(key)}" if name else clean(key), depth + 1)
    elif isinstance(value, (Mapping, list, tuple)):
        shallow = isinstance(value, Mapping) or any(isinstance(item, (Mapping, list, tuple)) for item in value)
        yield name, f"({len(value)} entries)" if shallow else ", ".join(map(clean, value)) or "none"
    elif isinstance(value, bool):
        yield name, "yes" if value else "no"
    else:
        yield name, "not set" if value is None else clean(value)
