"""The independent checker against an adversary who writes both files, hashes included: a table of named forgeries.

Each is applied to genuine files of every kind of policy, and is refused or judged false.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sortrl
from sortrl import cli
from sortrl.baselines.memory.compact import compact
from sortrl.certify import save_certificates
from sortrl.certify.files import policy_hash
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_tensors, write_tensors
from sortrl.core.normalizer import Normalizer
from sortrl.core.records import Demonstrations
from sortrl.nets import Centre, HybridPolicy, SortPolicy, ThresholdPolicy, zoo
from sortrl.verify import read_safetensors, verify
from sortrl.verify.described import described
from sortrl.verify.reading import weights_hash
from sortrl.verify.sorting import sort_network

STATES = 20


@dataclass
class Files:
    """A policy's file and that of its certificates, open for forgery."""

    weights: dict[str, Tensor]
    own: dict[str, Any]
    tensors: dict[str, Tensor]
    metadata: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Files:
        return cls(*read_tensors(folder / "policy.safetensors"), *read_tensors(folder / "c.safetensors"))

    @property
    def config(self) -> dict[str, Any]:
        return self.own["config"]

    def signed(self) -> None:
        """The hash that belongs to what the policy's file holds now."""
        self.metadata["policy_sha256"] = policy_hash(self.weights, self.own)

    def write(self, folder: Path) -> Path:
        write_tensors(folder / "policy.safetensors", self.weights, self.own)
        write_tensors(folder / "c.safetensors", self.tensors, self.metadata)
        return folder / "c.safetensors"

    def named(self, ending: str) -> str:
        return next(name for name in sorted(self.weights) if name.endswith(ending))


def sort_policy() -> tuple[SortPolicy, Tensor]:
    scale = Normalizer([0.0, 1.0, 0.0], [2.0, 1.0, 1.0], clip=5.0)
    policy = SortPolicy((3,), 3, width=24, depth=3, scale=2.0, normalizer=scale).requires_grad_(False)
    policy.calibrate(torch.randn(200, 3))
    return policy, torch.randn(STATES, 3)


def image_policy() -> tuple[SortPolicy, Tensor]:
    front = {"crop": (1, 0, 2, 1), "pool": 2, "scale": 0.5, "bounded_conv": ((6, 2, 1),), "conv": ((5, 2, 1),)}
    policy = SortPolicy((2, 12, 13), 4, width=10, depth=2, **front, normalizer=Normalizer.from_pixels((2, 12, 13)))
    policy.requires_grad_(False).calibrate(torch.rand(100, 2, 12, 13))
    return policy, torch.rand(STATES, 2, 12, 13)


def hybrid_policy() -> tuple[HybridPolicy, Tensor]:
    policy = HybridPolicy((3,), 4, width=16, depth=2, hidden=(12,), scale=2.0).requires_grad_(False)
    policy.calibrate(torch.randn(200, 3))
    return policy, torch.randn(STATES, 3)


def rounded_policy(norm: bool = False) -> tuple[ThresholdPolicy, Tensor]:
    policy = ThresholdPolicy((1, 8, 8), 4, 2, ((6, 3, 2),), (10,), norm=norm).requires_grad_(False)
    thresholds = policy.rounding.thresholds
    thresholds.copy_(torch.where(torch.rand_like(thresholds) < 0.05, torch.rand_like(thresholds), 1000.0))
    policy.head.layers[-1].bias.sub_(policy.scores(torch.rand(200, 1, 8, 8)).mean(0))  # no action is favoured
    return policy, torch.rand(STATES, 1, 8, 8)


def memory() -> tuple[SortPolicy, Tensor]:
    rng = np.random.default_rng(0)
    obs, where = rng.integers(0, 40, (60, 1, 8, 8)).astype(np.uint8), rng.integers(0, 7, (60, 2))
    for picture, (row, column) in zip(obs, where, strict=True):
        picture[0, row : row + 2, column : column + 2] = 200
    actions = 2 * (where[:, 0] >= 4) + (where[:, 1] >= 4)
    demos = Demonstrations("Any-v0", obs, actions, np.zeros((60, 4), np.float32), np.zeros(60, np.int64))
    policy = compact(demos, Normalizer.from_pixels((1, 8, 8))).policy
    return policy, policy.normalize(obs[:STATES])


def ramp_policy() -> tuple[SortPolicy, Tensor]:
    places = (*range(50), *range(25))
    normalizer = Normalizer.from_pixels((1, 8, 8))
    policy = SortPolicy((1, 8, 8), 4, 16, 3, 0.3, pixels=places, ramp_width=0.1, normalizer=normalizer)
    policy.requires_grad_(False)
    next(part for part in policy.front if isinstance(part, Centre)).centres.copy_(torch.rand(75))
    policy.calibrate(torch.rand(200, 1, 8, 8))
    policy.bias += policy.scores(torch.rand(200, 1, 8, 8)).mean(0)
    return policy, torch.rand(STATES, 1, 8, 8)


POLICIES = {
    "sort": sort_policy,
    "ramp": ramp_policy,
    "image": image_policy,
    "hybrid": hybrid_policy,
    "rounded": rounded_policy,
    "normed": lambda: rounded_policy(norm=True),
    "memory": memory,
}
EVERY, SORTING, ROUNDED = tuple(POLICIES), ("sort", "ramp", "image", "hybrid", "memory"), ("rounded", "normed")
VECTORS = ("sort", "hybrid")


@pytest.fixture(scope="module")
def genuine(tmp_path_factory) -> dict[str, Path]:
    folders = {}
    for kind, build in POLICIES.items():
        torch.manual_seed(3)
        policy, states = build()
        folders[kind] = tmp_path_factory.mktemp(kind)
        policy.save(folders[kind])
        certificate = policy.certify_unit(states)
        assert (certificate.radius > 1e-4).sum() > 3, kind
        save_certificates(folders[kind] / "c.safetensors", policy, states, certificate, folders[kind])
    return folders


@pytest.fixture
def files(genuine, kind, tmp_path) -> Files:
    return Files.read(genuine[kind])


@pytest.mark.parametrize("kind", EVERY)
def test_genuine_files_pass(genuine, kind):
    verdict = verify(genuine[kind] / "c.safetensors")
    assert verdict.ok, verdict.failures
    assert (verdict.states, verdict.distinct, verdict.notes) == (STATES, STATES, ())
    assert verdict.smallest_spare >= 0


def test_a_policy_that_says_nothing_of_later_settings_passes(genuine, tmp_path):
    """Files written before a setting existed omit it; there, and only there, its absence has a meaning."""
    for kind, names in (
        ("sort", ("kind", "conv", "bounded_conv", "pixels", "ramp_width", "ramp_limit")),
        ("rounded", ("norm",)),
    ):
        files = Files.read(genuine[kind])
        for name in names:
            files.own.pop(name, None)
            files.config.pop(name, None)
        files.signed()
        assert verify(files.write(tmp_path)).ok


def refused(path: Path) -> str:
    """Why a file is refused or judged false; empty if it passes."""
    try:
        return "\n".join(verify(path).failures)
    except SortRLError as error:
        return str(error)


# --- forgeries of what is stated ----------------------------------------------------------------------------------------


def put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Files], None]:
    def forge(files: Files) -> None:
        files.tensors[name] = change(files.tensors[name].clone())

    return forge


def say(name: str, value: Any) -> Callable[[Files], None]:
    def forge(files: Files) -> None:
        files.metadata[name] = value

    return forge


def drop(part: str, name: str) -> Callable[[Files], None]:
    return lambda files: getattr(files, part).__delitem__(name)


def at_largest(value: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def change(radius: Tensor) -> Tensor:
        radius[radius.argmax()] = value(radius.max())
        return radius

    return change


def other_action(files: Files) -> None:
    files.tensors["action"] = (files.tensors["action"] + 1) % files.config["n_actions"]


def unplayed_without_radius(files: Files) -> None:
    """Radius 0 is no licence to state any action."""
    files.tensors["action"], files.tensors["runner_up"] = files.tensors["runner_up"], files.tensors["action"]
    files.tensors["radius"] = torch.zeros_like(files.tensors["radius"])


def third_for_second(files: Files) -> None:
    taken = torch.stack([files.tensors["action"], files.tensors["runner_up"]], 1).tolist()
    third = [next(a for a in range(files.config["n_actions"]) if a not in pair) for pair in taken]
    files.tensors["runner_up"] = torch.tensor(third)


def weights_hash_alone(files: Files) -> None:
    arrays = {name: tensor.numpy() for name, tensor in files.weights.items()}
    files.metadata["policy_sha256"] = weights_hash(arrays)


STATED: dict[str, tuple[Callable[[Files], None], str]] = {
    "every radius 2 % larger": (put("radius", lambda t: t * 1.02 + 1e-3), "can be proven"),
    "one radius is large": (put("radius", at_largest(lambda r: r + 0.5)), "can be proven|the scores say"),
    "one radius is infinite": (put("radius", at_largest(lambda r: torch.inf)), "its radius is inf"),
    "one radius is no number": (put("radius", at_largest(lambda r: torch.nan)), "its radius is nan"),
    "one radius is negative": (put("radius", at_largest(lambda r: -r)), "its radius is -"),
    "radii in float32": (put("radius", lambda t: t.float()), "radius: .*float32"),
    "radii in a column": (put("radius", lambda t: t[:, None]), "radius: shape"),
    "other actions": (other_action, "the scores say"),
    "actions without radius": (unplayed_without_radius, "the scores say"),
    "actions in 32 bits": (put("action", lambda t: t.int()), "action: .*int32"),
    "actions as floats": (put("action", lambda t: t.float()), "action: .*float32"),
    "an action of -1": (put("action", lambda t: t - t.max() - 1), "outside 0"),
    "an action too many": (put("action", lambda t: t + 100), "outside 0"),
    "the third best as runner-up": (third_for_second, "runner-up"),
    "the action as runner-up": (lambda f: f.tensors.update(runner_up=f.tensors["action"].clone()), "runner-up"),
    "states in float64": (put("states", lambda t: t.double()), "states: .*float64"),
    "states in half precision": (put("states", lambda t: t.half()), "states: .*float16"),
    "states in another order": (put("states", lambda t: t.flip(0)), "state "),
    "a state dropped": (put("states", lambda t: t[1:].clone()), "states: shape"),
    "a state of NaN": (put("states", lambda t: t.fill_(torch.nan)), "NaN"),
    "no states": (drop("tensors", "states"), "states: nothing"),
    "no radii": (drop("tensors", "radius"), "radius: nothing"),
    "a mix": (lambda f: f.tensors.update({"mix.0": torch.ones(1)}), "mix.0: expected no such tensor"),
    "more tensors": (lambda f: f.tensors.update(eps=torch.ones(1)), "eps: expected no such tensor"),
    "other units": (say("claim", "For every state and every raw input within its radius."), "claim"),
    "a constant": (say("lipschitz", 0.1), "fields"),
    "a scale of eps": (say("eps_scale", 255.0), "fields"),
    "a later format": (say("format", "sortrl-certificates-3"), "format"),
    "the first format": (say("format", "sortrl-certificates-1"), "fields"),
    "no hash": (drop("metadata", "policy_sha256"), "fields"),
    "a hash of nothing": (say("policy_sha256", None), "configuration and weights"),
    "a hash of the weights alone": (weights_hash_alone, "configuration and weights"),
    "no policy": (say("policy", None), "fields"),
    "a policy elsewhere": (say("policy", "/dev/zero"), "Cannot read"),
}


# To a memory all actions but that of the nearest memory are equally far, so any of them is the second best.
@pytest.mark.parametrize(
    ("forgery", "kind"),
    [
        (forgery, kind)
        for forgery in STATED
        for kind in EVERY
        if (forgery, kind) != ("the third best as runner-up", "memory")
    ],
)
def test_false_statements_are_caught(files, forgery, tmp_path):
    forge, reason = STATED[forgery]
    forge(files)
    assert_refused(files, tmp_path, reason)


def assert_refused(files: Files, folder: Path, reason: str) -> None:
    found = refused(files.write(folder))
    assert re.search(reason, found), f"expected {reason!r}, found {found[:400]!r}"


# --- forgeries of the policy, with a hash that belongs to it ------------------------------------------------------------


def configure(name: str, value: Any) -> Callable[[Files], None]:
    def forge(files: Files) -> None:
        files.config[name] = value

    return forge


def describe(name: str, value: Any) -> Callable[[Files], None]:
    def forge(files: Files) -> None:
        files.own[name] = value

    return forge


def weigh(ending: str, change: Callable[[Tensor], Tensor]) -> Callable[[Files], None]:
    def forge(files: Files) -> None:
        name = files.named(ending)
        files.weights[name] = change(files.weights[name].clone())

    return forge


def without(ending: str) -> Callable[[Files], None]:
    return lambda files: files.weights.__delitem__(files.named(ending))


def more(name: str) -> Callable[[Files], None]:
    return lambda files: files.weights.update({name: torch.ones(1)})


def first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


POLICY: dict[str, tuple[tuple[str, ...], Callable[[Files], None], str]] = {
    # another network
    "another rho": (("sort", "hybrid", "image"), configure("rho", 0.9), "state "),
    "a rho of 0": (("sort", "hybrid", "image"), configure("rho", 0.0), "state "),
    "a rho for plain maxima": (("memory",), configure("rho", 0.9), "state "),
    "another scale": (("sort", "hybrid", "image"), configure("scale", 0.1), "the configuration says 0.1"),
    "no scale": (("sort", "hybrid", "image"), configure("scale", 1.0), "factor: expected no such tensor"),
    "a scale of its own": (("memory",), configure("scale", 0.1), "factor: nothing"),
    "a small factor": (("sort", "hybrid", "image"), weigh("factor", lambda t: t / 10), "the configuration says"),
    "a negative factor": (("sort", "hybrid", "image"), weigh("factor", lambda t: -t), "positive"),
    "other pixels": (("memory",), lambda f: f.config["pixels"].reverse(), "state "),
    "other crop": (("image",), configure("crop", [0, 1, 2, 1]), "state "),
    "narrower ramps": (("ramp",), configure("ramp_width", 0.02), "state "),
    "ramps that end later": (("ramp",), configure("ramp_limit", 3.0), "state "),
    "no ramps": (("ramp",), configure("ramp_width", 0.0), "pixels"),
    "ramps for none": (("sort", "hybrid", "image"), configure("ramp_width", 0.1), "ramps"),
    "other centres": (("ramp",), weigh("centres", lambda t: 1 - t), "state "),
    "a centre of NaN": (("ramp",), weigh("centres", first(torch.nan)), "NaN or infinity"),
    "centres of fewer": (("ramp",), weigh("centres", lambda t: t[1:].clone()), "centres: shape"),
    **{f"ramps of {w!r}": (("ramp",), configure("ramp_width", w), "ramp") for w in (-0.1, 1e-9, 1e9, True, "0.1")},
    "other thresholds": (ROUNDED, weigh("thresholds", lambda t: torch.where(t < 1, 1 - t, t)), "state "),
    "thresholds everywhere": (ROUNDED, weigh("thresholds", lambda t: torch.full_like(t, 0.5)), "state "),
    "other weights": (EVERY, weigh("layers.0.weight", lambda t: t.flip(0) * 1.5), "state "),
    "other means": (SORTING, weigh("shifts.0.running_mean", lambda t: t + torch.randn_like(t)), "state "),
    "a head without ReLU's layer": (("hybrid",), configure("hidden", []), "head.layers"),
    "no norm": (("normed",), configure("norm", False), "head.norms.0.bias: expected no such tensor"),
    "a norm": (("rounded",), configure("norm", True), "head.norms.0.bias: nothing"),
    # kinds and formats
    "no head": (("hybrid",), drop("config", "hidden"), "lacks hidden"),
    "a head for none": (SORTING[:2], configure("hidden", [4]), "unknown: hidden"),
    "another kind": (("hybrid",), describe("kind", "sort"), "hidden"),
    "a kind with a head": (("sort", "image", "memory"), describe("kind", "hybrid"), "lacks hidden"),
    "no kind": (("hybrid", *ROUNDED), drop("own", "kind"), "unknown|lacks"),
    "an unknown kind": (EVERY, describe("kind", "linear"), "kind 'linear'"),
    "a kind that is no text": (EVERY, describe("kind", ["sort"]), "kind"),
    "a later format": (EVERY, describe("format", 2), "format '2'"),
    "a format of true": (EVERY, describe("format", True), "format 'True'"),
    "more metadata": (EVERY, describe("eps_scale", 255.0), "unknown: eps_scale"),
    "more settings": (EVERY, configure("temperature", 2.0), "unknown: temperature"),
    "no configuration": (EVERY, describe("config", None), "config"),
    # tensors
    "a tensor more": (EVERY, more("layers.99.weight"), "layers.99.weight: expected no such tensor"),
    "a mix of its own": (EVERY, more("layers.1.mix"), "mix: expected no such tensor"),
    "a mask of its own": (ROUNDED, more("rounding.used"), "used: expected no such tensor"),
    "no normaliser": (EVERY, without("normalizer.scale"), "scale: nothing"),
    "no bias": (EVERY, without("bias"), "bias: nothing"),
    "weights in float64": (EVERY, weigh("layers.0.weight", lambda t: t.double()), "float64"),
    "weights as whole numbers": (EVERY, weigh("layers.0.weight", lambda t: t.long()), "int64"),
    "weights turned round": (EVERY, weigh("layers.0.weight", lambda t: t.transpose(0, 1).contiguous()), "shape|state "),
    "a bias for all": (EVERY, weigh("bias", lambda t: t[:1].clone()), "shape"),
    "a normaliser in float32": (EVERY, weigh("normalizer.mean", lambda t: t.float()), "float32"),
    "thresholds in float64": (ROUNDED, weigh("thresholds", lambda t: t.double()), "float64"),
    "a weight of NaN": (EVERY, weigh("layers.0.weight", first(torch.nan)), "NaN or infinity"),
    "a bias of infinity": (EVERY, weigh("bias", first(torch.inf)), "NaN or infinity"),
    "a threshold of NaN": (ROUNDED, weigh("thresholds", first(torch.nan)), "NaN or infinity"),
    "a mean of NaN": (EVERY, weigh("normalizer.mean", first(torch.nan)), "NaN or infinity"),
    "a scale of 0": (EVERY, weigh("normalizer.scale", first(0.0)), "positive"),
    "a scale below 0": (EVERY, weigh("normalizer.scale", first(-1.0)), "positive"),
    "weights that overflow": (SORTING, weigh("layers.0.weight", lambda t: torch.full_like(t, 3e38)), "state "),
    "a head that overflows": (("hybrid", *ROUNDED), weigh("layers.1.weight", lambda t: t * 1e38), "overflow|state "),
    # settings
    **{f"clip {c!r}": (EVERY, describe("clip", c), "clip") for c in (0, -1.0, "5", True, [1.0])},
    **{f"rho {r!r}": (SORTING, configure("rho", r), "rho") for r in (1.0, -0.1, "0.3", None, True)},
    **{f"scale {s!r}": (SORTING, configure("scale", s), "scale") for s in (0.0, -2.0, "2", None)},
    **{f"n_actions {n!r}": (EVERY, configure("n_actions", n), "n_actions") for n in (1, 3.0, True, "3", None)},
    **{f"depth {d!r}": (SORTING, configure("depth", d), "depth|layers") for d in (0, 2.0, 10**9)},
    **{f"width {w!r}": (SORTING, configure("width", w), "width|shape") for w in (0, 24.0, 10**30)},
    **{f"crop {c!r}": (("image",), configure("crop", c), "crop") for c in ([1, 0, 2], [14, 0, 0, 0], [-1, 1, 0, 0])},
    "crop on vectors": (VECTORS, configure("crop", [1, 0, 0, 0]), "images"),
    "pool on vectors": (VECTORS, configure("pool", 2), "images"),
    "pool beyond the image": (("image",), configure("pool", 20), "leave nothing"),
    "a kernel beyond the image": (("image", *ROUNDED), configure("conv", [[5, 50, 1]]), "kernel"),
    "a stride of 0": (("image", *ROUNDED), configure("conv", [[5, 2, 0]]), "conv"),
    "odd pairs": (("image",), configure("bounded_conv", [[5, 2, 1]]), "pairs"),
    "pixels twice": (("memory",), lambda f: configure("pixels", f.config["pixels"][:1] * 2)(f), "pixels"),
    "pixels from behind": (("memory",), configure("pixels", [-1]), "pixels"),
    "pixels beyond": (("memory",), configure("pixels", [10**6]), "pixels"),
    "levels 0": (ROUNDED, configure("levels", 0), "levels"),
    "norm 1": (ROUNDED, configure("norm", 1), "norm"),
    "observations of another shape": (EVERY, configure("obs_shape", [2, 2, 2]), "shape|images|leave|kernel|pixels"),
}


@pytest.mark.parametrize(
    ("forgery", "kind"), [(forgery, kind) for forgery, (kinds, _, _) in POLICY.items() for kind in kinds]
)
def test_forged_policies_are_caught_although_the_hash_is_theirs(files, forgery, tmp_path):
    _, forge, reason = POLICY[forgery]
    torch.manual_seed(0)
    forge(files)
    files.signed()
    assert_refused(files, tmp_path, reason)


@pytest.mark.parametrize("kind", EVERY)
def test_every_setting_is_needed(genuine, kind, tmp_path):
    later = {"conv", "bounded_conv", "pixels", "ramp_width", "ramp_limit"} if kind in SORTING else {"norm"}
    names = Files.read(genuine[kind]).config.keys() - later
    assert len(names) >= 5
    for name in names:
        files = Files.read(genuine[kind])
        del files.config[name]
        files.signed()
        assert_refused(files, tmp_path, f"lacks .*{name}")
    for name in ("format", "config", "clip"):
        files = Files.read(genuine[kind])
        del files.own[name]
        files.signed()
        assert_refused(files, tmp_path, f"lacks .*{name}")


UNSIGNED: dict[str, Callable[[Files], None]] = {
    "another clip": describe("clip", 3.0),
    "another normaliser": weigh("normalizer.scale", lambda t: t * 2),
    "another bias": weigh("bias", lambda t: t + 1e-7 + t.abs() * 1e-3),
    "a setting of training": lambda f: f.config.update({name: 64 for name in ("mask_chunk",) if name in f.config}),
    "a setting left out": lambda f: f.config.__delitem__("norm" if "norm" in f.config else "bounded_conv"),
}


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("change", UNSIGNED)
def test_the_hash_is_of_configuration_and_weights_together(files, kind, change, tmp_path):
    """All of these leave every score as it is or nearly so, and yet it is another policy."""
    if change == "a setting of training" and kind in ROUNDED:
        change = "another clip"  # a rounded policy has no such setting
    UNSIGNED[change](files)
    assert_refused(files, tmp_path, "has configuration and weights")


# --- rounding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sort", "image", "memory"])
def test_a_radius_of_margin_over_2_l_leaves_nothing_for_float32(files, genuine, kind, tmp_path):
    """In exact arithmetic it would be true."""
    weights, own = read_safetensors(genuine[kind] / "policy.safetensors")
    network = sort_network(weights, described(own, weights))
    seen = network.look(files.tensors["states"].double().numpy())
    exact = network.most(seen, files.tensors["action"].numpy())
    files.tensors["radius"] = torch.where(files.tensors["radius"] > 0, torch.from_numpy(exact), 0.0)
    stated = int((files.tensors["radius"] > 0).sum())
    assert stated > 3
    assert len(verify(files.write(tmp_path)).failures) == stated


def test_tiny_scores_are_lost_in_underflow(tmp_path):
    """Scores of 1e-40 differ in float64; a float32 unit that flushes them to zero sees a tie."""
    policy = HybridPolicy((2,), 2, width=4, depth=1, hidden=()).requires_grad_(False)
    policy.head.layers[0].weight.zero_()
    policy.head.layers[0].bias.copy_(torch.tensor([1e-39, 0.0]))
    policy.save(tmp_path)
    states = torch.randn(5, 2)
    certificate = replace(policy.certify_unit(states), radius=np.full(5, 1e-3))
    save_certificates(tmp_path / "c.safetensors", policy, states, certificate, tmp_path)
    assert len(verify(tmp_path / "c.safetensors").failures) == 5


def test_without_a_radius_only_a_tie_within_rounding_excuses_another_action(tmp_path):
    policy = SortPolicy((3,), 3, width=24, depth=3).requires_grad_(False)
    policy.layers[-1].weight[1] = policy.layers[-1].weight[0]
    policy.bias.copy_(torch.tensor([0.0, 1e-4, 50.0]))  # action 0 leads action 1 by 1e-4, always
    policy.save(tmp_path)
    states = torch.randn(10, 3)
    certificate = policy.certify_unit(states)
    assert (certificate.action == 0).all()
    for lie, ok in ((certificate.action, True), (certificate.runner_up, False)):
        other = replace(certificate, action=lie, runner_up=1 - lie, radius=np.zeros(10))
        save_certificates(tmp_path / "c.safetensors", policy, states, other, tmp_path)
        assert verify(tmp_path / "c.safetensors").ok == ok


@pytest.mark.parametrize("kind", ROUNDED)
def test_thresholds_that_stand_for_none_prove_nothing_near_them(files, kind, tmp_path):
    """Beyond 1000 it matters how a policy treats them; the checker holds with neither way."""
    files.tensors["states"] = files.tensors["states"] + 999.9
    files.tensors["radius"] = torch.full_like(files.tensors["radius"], 1.0)
    assert len(verify(files.write(tmp_path)).failures) == STATES


def test_states_that_are_repeated_are_counted_once(genuine, tmp_path, capsys):
    files = Files.read(genuine["sort"])
    files.tensors = {name: torch.cat([tensor] * 3) for name, tensor in files.tensors.items()}
    verdict = verify(files.write(tmp_path))
    assert (verdict.ok, verdict.states, verdict.distinct) == (True, 3 * STATES, STATES)
    cli.main(["verify", str(tmp_path / "c.safetensors")])
    assert f"{3 * STATES} certificates hold (of {STATES} different states)" in capsys.readouterr().out


# --- the file format underneath -----------------------------------------------------------------------------------------


def raw(content: bytes) -> tuple[str, bytes]:
    size = struct.unpack("<Q", content[:8])[0]
    return content[8 : 8 + size].decode(), content[8 + size :]


def forged_header(edit: Callable[[str, bytes], tuple[str, bytes]]) -> Callable[[bytes], bytes]:
    def forge(content: bytes) -> bytes:
        header, data = edit(*raw(content))
        return struct.pack("<Q", len(header.encode())) + header.encode() + data

    return forge


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[str, bytes], tuple[str, bytes]]:
    def edit(header: str, data: bytes) -> tuple[str, bytes]:
        entries = json.loads(header)
        change(entries)
        return json.dumps(entries), data

    return edit


RAW: dict[str, tuple[Callable[[str, bytes], tuple[str, bytes]], str]] = {
    "a name twice": (
        lambda h, d: (h.rstrip()[:-1] + ', "bias": ' + json.dumps(json.loads(h)["bias"]) + "}", d),
        "twice",
    ),
    "a setting twice": (lambda h, d: (h.replace('\\"rho\\": 0.3', '\\"rho\\": 0.9, \\"rho\\": 0.3'), d), "twice"),
    "a setting that is no JSON": (lambda h, d: (h.replace('\\"rho\\": 0.3', '\\"rho\\": NaN'), d), "no JSON"),
    "bytes behind the last tensor": (lambda h, d: (h, d + bytes(8)), "behind its last tensor"),
    "two tensors in one place": (edited(lambda e: e["p"].update(e["normalizer.mean"], shape=[3])), "overlap|gaps"),
    "a size to be filled in": (edited(lambda e: e["bias"].update(shape=[-1])), "no whole number"),
    "a type that nothing writes": (edited(lambda e: e["bias"].update(dtype="BF16")), "BF16"),
}


@pytest.mark.parametrize("forgery", RAW)
def test_files_that_two_readers_may_read_differently_are_refused(genuine, forgery, tmp_path):
    edit, reason = RAW[forgery]
    shutil.copytree(genuine["sort"], tmp_path / "copy")
    file = tmp_path / "copy" / "policy.safetensors"
    content = file.read_bytes()
    forged = forged_header(edit)(content)
    assert forged != content
    file.write_bytes(forged)
    with pytest.raises(SortRLError, match=reason):
        verify(tmp_path / "copy" / "c.safetensors")


# --- files of the first format ------------------------------------------------------------------------------------------


def first_format(folder: Path, target: Path) -> Files:
    """As version 0.1.0 wrote them: a hash of the weights alone; mixes, constant and shape are stated."""
    files, policy = Files.read(folder), sortrl.load(folder)
    finite = policy.lipschitz if np.isfinite(policy.lipschitz) else None
    del files.metadata["policy_sha256"]
    files.metadata |= {"format": "sortrl-certificates-1", "lipschitz": finite, "obs_shape": list(policy.obs_shape)}
    files.metadata["weights_sha256"] = weights_hash(read_safetensors(folder / "policy.safetensors")[0])
    if not isinstance(policy, ThresholdPolicy):
        files.tensors |= {f"mix.{index}": layer.mix for index, layer in enumerate(policy.trunk.layers)}
    return files


FIRST: dict[str, tuple[tuple[str, ...], Callable[[Files], None], str]] = {
    "a short mix": (("sort", "hybrid"), lambda f: f.tensors.update({"mix.1": torch.ones(1)}), "mix of layer 1"),
    "a small mix": (("sort", "hybrid"), put("mix.1", lambda t: t * 0.9), "mix of layer 1"),
    "a mix of more than 1": (SORTING, put("mix.0", lambda t: t * (1 + 2e-7)), "mix of layer 0"),
    "no mix": (SORTING, drop("tensors", "mix.0"), "mix of layer 0"),
    "a mix too many": (EVERY, lambda f: f.tensors.update({"mix.9": torch.ones(1)}), "mix.9: expected no such"),
    "a small constant": (EVERY, say("lipschitz", 0.01), "lipschitz"),
    "another shape": (EVERY, say("obs_shape", [1]), "obs_shape"),
    "other weights": (EVERY, weigh("bias", lambda t: t + 1e-3), "has weights"),
    "another rho": (("sort", "hybrid"), configure("rho", 0.9), "mix of layer 1"),
    "no head": (("hybrid",), drop("config", "hidden"), "lacks hidden"),
}


@pytest.mark.parametrize("kind", EVERY)
def test_files_of_the_first_format_pass_and_say_what_they_lack(genuine, kind, tmp_path, capsys):
    path = first_format(genuine[kind], tmp_path).write(tmp_path)
    verdict = verify(path)
    assert verdict.ok, verdict.failures
    assert "write the certificates again" in verdict.notes[0]
    cli.main(["verify", str(path)])
    assert "whose hash covers the policy's weights and not its configuration" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("forgery", "kind"), [(forgery, kind) for forgery, (kinds, _, _) in FIRST.items() for kind in kinds]
)
def test_false_statements_of_the_first_format_are_caught(genuine, kind, forgery, tmp_path):
    _, forge, reason = FIRST[forgery]
    files = first_format(genuine[kind], tmp_path)
    forge(files)
    assert_refused(files, tmp_path, reason)


# --- the zoo ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.names())
def test_certificates_of_every_policy_in_the_zoo_pass(name, tmp_path):
    policy, file = sortrl.load(f"zoo:{name}"), zoo.locate(f"zoo:{name}")
    torch.manual_seed(0)
    unit = torch.rand(4, *policy.obs_shape)
    if policy.config.obs_shape == (4,):
        unit = torch.randn(50, 4)
    if isinstance(policy, SortPolicy) and policy.config.pixels:  # what it remembers is what it is certain of
        unit.view(4, -1)[:, list(policy.config.pixels)] = policy.layers[0].weight[:4]
    if isinstance(policy, ThresholdPolicy):
        unit[:2] = 0.0
    certificate = policy.certify_unit(unit)
    save_certificates(tmp_path / "c.safetensors", policy, unit, certificate, file)
    verdict = verify(tmp_path / "c.safetensors")
    assert verdict.ok, verdict.failures
    lie = replace(certificate, radius=certificate.radius * 1.02 + 0.02)
    save_certificates(tmp_path / "c.safetensors", policy, unit, lie, file)
    assert not verify(tmp_path / "c.safetensors").ok
