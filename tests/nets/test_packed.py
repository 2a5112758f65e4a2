"""One call of the kernels, and the C library, decide as the network does: same actions, same radii, to the bit."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib

import numpy as np
import pytest
import torch

from sortrl import cli
from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.nets import Centre, SortPolicy
from sortrl.nets.packed import export_c, packed
from sortrl.ops import cpu, use_backend

needs_kernels = pytest.mark.skipif(cpu.select().module is None, reason="no kernels")
pytestmark = needs_kernels

IMAGE = (3, 17, 16)
POLICIES = {
    "narrow": lambda: SortPolicy((4,), 2, width=128, depth=5),
    "wide": lambda: SortPolicy((8,), 4, width=640, depth=3, rho=0.5),
    "scaled": lambda: SortPolicy((5,), 3, width=33, depth=4, rho=0.1, scale=2.5),
    "one input": lambda: SortPolicy((1,), 2, width=7, depth=2),
    "one layer": lambda: SortPolicy((6,), 19, width=3, depth=1),
    "images": lambda: SortPolicy(IMAGE, 5, width=40, depth=3, rho=0.0),
    "cut images": lambda: SortPolicy(IMAGE, 5, width=24, depth=3, crop=(1, 2, 0, 3), pool=2, scale=3.0),
    "pixels": lambda: SortPolicy(IMAGE, 4, width=24, depth=2, pixels=(5, 700, 81, 80)),
    "ramps": lambda: SortPolicy(IMAGE, 4, width=24, depth=3, rho=0.0, pixels=(5, 700, 81, 80, 5), ramp_width=0.07),
}


def some_policy(name: str) -> tuple[SortPolicy, np.ndarray]:
    """With weights, units and observations at which actions differ."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    policy = POLICIES[name]()
    shape = policy.obs_shape
    clip = 1.5 if name in ("narrow", "cut images") else np.inf
    normalizer = Normalizer(rng.normal(size=shape), rng.uniform(0.5, 2.0, size=shape), clip)
    policy.normalizer = normalizer
    for part in policy.front:
        if isinstance(part, Centre):
            part.centres.uniform_(-1, 1)
    policy.eval().requires_grad_(False)
    obs = rng.normal(0.5, 2.0, size=(200, *shape))
    policy.calibrate(policy.normalize(obs))
    policy.bias.add_(policy.scores(policy.normalize(obs)).mean(0))  # no favourites
    return policy, obs


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_a_single_observation_is_decided_as_in_a_batch_to_the_bit(name, dtype):
    policy, obs = some_policy(name)
    if dtype == np.uint8:
        policy.normalizer.mean.add_(128.0), policy.normalizer.scale.mul_(40.0)
        obs = np.clip(40 * obs + 128, 0, 255)
    obs = obs.astype(dtype)
    certificate, (actions, _) = policy.certify(obs), policy.predict(obs)
    assert len(np.unique(actions)) > 1
    network = policy.sort_evaluation()
    for row, one in enumerate(obs):
        decided = network.decide_one(one)
        assert decided is not None, "the call did not serve"
        assert decided[0] == certificate.action[row] == actions[row] == policy.predict(one)[0]
        assert decided[2] == certificate.runner_up[row]
        decision = policy.predict_certified(one)
        assert (decision.action, decision.runner_up) == (decided[0], decided[2])
        if network.has_ramps:
            assert decided[1] <= decision.radius
        else:
            assert decided[1] == decision.radius
        # Sums of a batch of float64 numbers may be taken in another order; the radius allows for far more.
        assert decision.radius == pytest.approx(certificate.radius[row], rel=1e-14)
    assert (certificate.radius > 0).mean() > 0.5


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_change_a_decision(threads):
    policy, obs = some_policy("wide")
    expected = policy.certify(obs)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = [policy.sort_evaluation().decide_one(one) for one in obs]
    finally:
        torch.set_num_threads(before)
    assert [one[0] for one in found] == expected.action.tolist()
    assert np.allclose([one[1] for one in found], expected.radius, rtol=1e-12, atol=0)


def test_ties_give_the_first_action_and_radius_0():
    policy = SortPolicy((3,), 4, width=8, depth=2).eval().requires_grad_(False)
    policy.layers[-1].weight.copy_(policy.layers[-1].weight[:1].expand(4, -1))
    decision = policy.predict_certified(np.zeros(3))
    assert (decision.action, decision.runner_up, decision.radius) == (0, 1, 0.0)
    assert policy.sort_evaluation().decide_one(np.zeros(3)) == (0, 0.0, 1)


def test_changes_are_noticed():
    policy, obs = some_policy("narrow")
    before = policy.predict_certified(obs[0])
    policy.normalizer.scale.mul_(3.0)
    assert policy.predict_certified(obs[0]).radius == policy.certify(obs[:1]).radius[0] != before.radius
    policy.layers[1].weight.mul_(2.0)
    changed = policy.predict_certified(obs[0]).radius
    assert changed == policy.certify(obs[:1]).radius[0]
    assert policy.sort_evaluation().decide_one(obs[0])[1] == changed


def test_wrong_observations_are_errors_as_ever():
    policy, obs = some_policy("narrow")
    for wrong in (np.nan, np.inf, -np.inf):
        bad = obs[0].copy()
        bad[1] = wrong
        assert policy.sort_evaluation().decide_one(bad) is None
        for ask in (policy.predict, policy.predict_certified):
            with pytest.raises(SortRLError, match="NaN or infinity"):
                ask(bad)
    policy = SortPolicy((4,), 2, width=8, depth=2, scale=100.0).eval().requires_grad_(False)
    with pytest.raises(SortRLError, match="NaN or infinity"):
        policy.predict_certified(np.array([3e38, -3e38, 0, 0]))


def test_a_chosen_backend_and_other_types_are_respected():
    policy, obs = some_policy("narrow")
    with use_backend("reference"):
        assert policy.sort_evaluation().decide_one(obs[0]) is None
        assert policy.predict(obs[0])[0] == policy.certify(obs[:1]).action[0]
    assert policy.predict(obs[0].astype(np.int64))[0] == policy.predict(np.trunc(obs[0]))[0]
    double = SortPolicy((4,), 2, width=8, depth=2).double().eval()
    assert double.sort_evaluation().decide_one(obs[0]) is None


@pytest.mark.parametrize(
    "options",
    [{"conv": ((4, 3, 1),)}, {"bounded_conv": ((4, 3, 1),)}, {"rho": 0.9}],
    ids=["conv", "bounded", "long mix"],
)
def test_what_has_no_place_goes_the_ordinary_way(options):
    policy = SortPolicy((2, 6, 6), 3, width=150, depth=2, **options).eval().requires_grad_(False)
    obs = np.random.default_rng(0).uniform(size=(2, 6, 6))
    assert policy.sort_evaluation().decide_one(obs) is None
    assert policy.predict_certified(obs).radius == policy.certify(obs[None]).radius[0]
    network = policy.sort_evaluation()
    with pytest.raises(SortRLError, match="what can be packed"):
        packed(network, network.bound, policy.normalizer)


def _bytes(name: str = "narrow") -> bytes:
    policy, _ = some_policy(name)
    network = policy.sort_evaluation()
    return packed(network, network.bound, policy.normalizer)


def _sealed(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


@pytest.mark.parametrize("name", ["narrow", "cut images", "ramps"])
def test_damaged_bytes_are_refused(name):
    good, read = _bytes(name), cpu.select().module.PackedPolicy
    read(good)
    for bad in (b"", good[:11], good[:-1], good + b"x", b"x" + good, good[:99] + bytes([good[99] ^ 1]) + good[100:]):
        with pytest.raises(SortRLError, match="damaged"):
            read(bad)
    rng, refused = np.random.default_rng(0), 0
    for place in range(300):  # well sealed, and wrong: sizes, kinds and indices are checked one by one
        body = bytearray(good[:-4])
        at = 8 + 4 * (place // 8 if place < 24 else int(rng.integers(len(body) // 4 - 3)))
        body[at : at + 4] = struct.pack(
            "<I", int(rng.choice([0, 1, 5, 2**31 - 1, 2**32 - 1, int(rng.integers(2**32))]))
        )
        try:
            read(_sealed(bytes(body)))
        except SortRLError:
            refused += 1
    for size in range(8, len(good) - 4, max(1, len(good) // 200)):
        with pytest.raises(SortRLError, match="damaged"):
            read(_sealed(good[:size]))
    assert refused > 3


needs_compiler = pytest.mark.skipif(shutil.which("make") is None or shutil.which("c++") is None, reason="no compiler")


@needs_compiler
def test_the_c_example_decides_as_predict_certified(tmp_path, capsys):
    policies = {name: some_policy(name) for name in ("narrow", "cut images", "ramps")}
    policies["wide"] = some_policy("wide")
    for index, (name, (policy, obs)) in enumerate(policies.items()):
        folder = tmp_path / str(index)
        export_c(policy, folder)
        if index == 0:
            built = subprocess.run(["make", "-C", str(folder)], capture_output=True, text=True, check=False)
            assert built.returncode == 0, built.stderr
            assert "warning" not in built.stderr
        single = obs.astype(np.float32)
        program = [str(tmp_path / "0" / "decide"), str(folder / "policy.bin")]
        found = subprocess.run(program, input=single.tobytes(), capture_output=True, check=True)
        rows = [line.split() for line in found.stdout.decode().splitlines()]
        assert len(rows) == len(obs)
        for one, (action, radius, runner_up) in zip(single, rows, strict=True):
            expected = policy.predict_certified(one)
            assert (int(action), int(runner_up)) == (expected.action, expected.runner_up), name
            # A compiler may fuse other sums for another processor, which moves scores by roundings that the radius allows for.
            assert float(radius) <= expected.radius * (1 + 1e-3) + 1e-6
            assert name == "ramps" or float(radius) == pytest.approx(expected.radius, rel=1e-3, abs=1e-6)
    bad = single.copy()
    bad[0, 0] = np.nan
    found = subprocess.run(program, input=bad.tobytes(), capture_output=True, check=True)
    assert found.stdout.decode().splitlines()[0] == "no decision: status 1"
    (tmp_path / "broken.bin").write_bytes((folder / "policy.bin").read_bytes()[:-9])
    found = subprocess.run([program[0], str(tmp_path / "broken.bin")], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "damaged" in found.stderr
    missing = subprocess.run([program[0], str(tmp_path / "nothing")], capture_output=True, text=True, check=False)
    assert "cannot be opened" in missing.stderr


COUNTING = r"""
#include <stdio.h>
#include <stdlib.h>
#include "policy.h"
static long calls;
void *__real_malloc(size_t); void *__real_aligned_alloc(size_t, size_t); void *__real__Znwm(size_t);
void *__wrap_malloc(size_t n) { ++calls; return __real_malloc(n); }
void *__wrap_aligned_alloc(size_t a, size_t n) { ++calls; return __real_aligned_alloc(a, n); }
void *__wrap__Znwm(size_t n) { ++calls; return __real__Znwm(n); }
int main(int argc, char **argv) {
  char error[200];
  sortrl_policy *policy = sortrl_open(argv[argc - 1], error, sizeof error);
  if (!policy) return 1;
  const long loading = calls;
  double *observation = calloc((size_t)sortrl_observation_size(policy), sizeof *observation);
  sortrl_decision decision;
  calls = 0;
  for (int i = 0; i < 100; ++i)
    if (sortrl_decide_double(policy, observation, &decision) != SORTRL_DECIDED) return 2;
  printf("%ld %ld\n", loading, calls);
  free(observation);
  sortrl_close(policy);
  return 0;
}
"""


@needs_compiler
@pytest.mark.parametrize("name", ["wide", "cut images"])
def test_a_decision_allocates_nothing(name, tmp_path):
    policy, _ = some_policy(name)
    export_c(policy, tmp_path)
    (tmp_path / "count.c").write_text(COUNTING)
    wrap = [f"-Wl,--wrap={symbol}" for symbol in ("malloc", "aligned_alloc", "_Znwm")]
    for command in (
        ["cc", "-c", "count.c", "-o", "count.o"],
        ["make", "policy.o", "pool.o"],
        ["c++", "-o", "count", "count.o", "policy.o", "pool.o", "-pthread", *wrap],
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    found = subprocess.run([tmp_path / "count", tmp_path / "policy.bin"], capture_output=True, text=True, check=True)
    loading, deciding = map(int, found.stdout.split())
    assert loading > 10, "the count sees nothing"
    assert deciding == 0


def test_the_command_wants_to_know_what_to_write(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["export", str(tmp_path)])
    assert "--onnx FILE, --c DIR" in capsys.readouterr().err
