"""An exported policy decides as the policy does, and its radii are no larger than they may be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers import balancer
from sortrl import cli
from sortrl.core.files import write_json
from sortrl.core.normalizer import Normalizer
from sortrl.data.collect import CollectConfig, collect
from sortrl.distill.loop import DistillConfig, distill
from sortrl.nets import SortPolicy
from sortrl.nets.float_bounds import rounding_error, stages, traced_scores

onnx = pytest.importorskip("onnx", reason="writing ONNX needs the extra sortrl[onnx]")
onnxruntime = pytest.importorskip("onnxruntime", reason="running ONNX needs the extra sortrl[onnx]")

ENV = "CartPole-v1"


@pytest.fixture(scope="module")
def student():
    data = collect(balancer(), ENV, CollectConfig(states=3000), seed=0)
    config = DistillConfig(eps=0.05, steps=200, batch=256, width=24, depth=3, lambda_end=0.1)
    return distill(data, balancer().normalizer, config).policy


def _pixels(**layers):
    """A policy of images with every front end, a clipping normalizer and an odd size."""
    torch.manual_seed(0)
    shape = (3, 17, 16)
    normalizer = Normalizer(np.full(shape, 100.0), np.full(shape, 60.0), clip=1.5)
    front = {"crop": (1, 2, 0, 3), "pool": 2, "scale": 3.0}
    policy = SortPolicy(shape, 5, width=24, depth=3, **front, **layers, normalizer=normalizer).eval()
    obs = np.random.default_rng(0).integers(0, 256, (300, *shape)).astype(np.float32)
    policy.calibrate(policy.normalize(obs))
    return policy, obs


def run(policy, obs, path):
    policy.export_onnx(path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    parts = [session.run(None, {"obs": part}) for part in np.array_split(obs, -(-len(obs) // 500))]
    return dict(zip(names, map(np.concatenate, zip(*parts, strict=True)), strict=True))


@torch.no_grad()
def compare(policy, obs, found):
    """Both computations are rounded, each by at most the proven error; nothing else may tell them apart."""
    certificate = policy.certify(obs)
    unit = policy.normalize(obs)
    scores, magnitudes = traced_scores(policy, unit)
    allowed = 2 * rounding_error(stages(policy), magnitudes).numpy()
    margin = np.diff(np.sort(scores.double().numpy(), axis=1)[:, -2:], axis=1)[:, 0]
    assert (np.abs(found["scores"] - scores.numpy()).max(1) <= allowed).all()
    assert (np.abs(found["margin"] - margin) <= 2 * allowed).all()
    differs = found["action"] != certificate.action
    assert (margin[differs] <= 2 * allowed[differs]).all()
    assert (np.abs(found["radius"] - certificate.radius) <= 2 * allowed / policy.lipschitz).all()
    top = found["scores"].astype(np.float64)
    assert (found["action"] == top.argmax(1)).all()
    assert (found["margin"] == np.diff(np.sort(top, axis=1)[:, -2:], axis=1)[:, 0]).all()
    assert (
        found["runner_up"][~differs & (margin > allowed)] == certificate.runner_up[~differs & (margin > allowed)]
    ).mean() > 0.99
    return allowed


def test_a_student_decides_the_same_on_ten_thousand_states(student, tmp_path):
    obs = collect(balancer(), ENV, CollectConfig(states=10_000), seed=5).obs[:10_000]
    found = run(student, obs, tmp_path / "student.onnx")
    allowed = compare(student, obs, found)
    assert allowed.max() < 2e-4, "the tolerance must stay far below any eps of interest"
    assert (found["action"] == student.predict(obs)[0]).mean() > 0.9999
    assert (found["radius"] > 0.05).mean() > 0.2


@pytest.mark.parametrize("conv", [(), ((6, 3, 1), (4, 2, 2))])
@pytest.mark.parametrize("bounded_conv", [(), ((8, 2, 1),)])
def test_images_with_every_front_end(conv, bounded_conv, tmp_path):
    policy, obs = _pixels(conv=conv, bounded_conv=bounded_conv)
    compare(policy, obs, run(policy, obs, tmp_path / "pixels.onnx"))


def test_chosen_pixels(tmp_path):
    policy, obs = _pixels(pixels=(100, 3, 57))
    compare(policy, obs, run(policy, obs, tmp_path / "pixels.onnx"))


@pytest.mark.parametrize(("depth", "n_actions"), [(1, 2), (2, 3), (4, 18)])
def test_shapes(depth, n_actions, tmp_path):
    torch.manual_seed(depth)
    policy = SortPolicy((5,), n_actions, width=12, depth=depth).eval()
    obs = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
    policy.calibrate(torch.from_numpy(obs))
    compare(policy, obs, run(policy, obs, tmp_path / "policy.onnx"))


def test_the_exported_radius_is_sound_for_what_the_runtime_computes(student, tmp_path):
    """States moved by just under their radius, to the corners and at random, keep their action."""
    obs = collect(balancer(), ENV, CollectConfig(states=1500), seed=8).obs
    unit = student.normalize(obs).double().numpy()
    found = run(student, obs, tmp_path / "student.onnx")
    safe = found["radius"] > 1e-3
    assert safe.sum() > 200
    generator = np.random.default_rng(0)
    for trial in range(12):
        direction = generator.choice([-1.0, 1.0], unit.shape) if trial % 2 else generator.uniform(-1, 1, unit.shape)
        moved = unit + 0.999 * found["radius"][:, None] * direction
        raw = student.normalizer.to_raw(torch.from_numpy(moved)).numpy().astype(np.float32)
        assert (run(student, raw, tmp_path / "student.onnx")["action"][safe] == found["action"][safe]).all()


@pytest.mark.parametrize("clip", [2.0, np.inf])
def test_nothing_is_certified_on_what_is_not_a_number(clip, tmp_path):
    policy = SortPolicy((3,), 2, width=8, depth=2, normalizer=Normalizer(np.zeros(3), np.ones(3), clip)).eval()
    obs = np.zeros((5, 3), dtype=np.float32)
    obs[0, 0], obs[1, 1], obs[2, 2], obs[3, 0] = np.nan, np.inf, -np.inf, 1e30
    radius = run(policy, obs, tmp_path / "policy.onnx")["radius"]
    assert (radius[:3] == 0).all()
    assert radius[4] > 0
    assert (radius[3] == 0) == np.isinf(clip), "a clip brings a huge but finite value back into range"


def test_only_standard_operators_and_a_free_batch(student, tmp_path):
    student.export_onnx(tmp_path / "student.onnx")
    model = onnx.load(tmp_path / "student.onnx")
    assert {node.domain for node in model.graph.node} == {""}
    assert [opset.domain for opset in model.opset_import] == [""]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert not list(tmp_path.glob("*.tmp"))


def test_export_command(capsys, student, tmp_path):
    student.save(tmp_path / "run")
    write_json(tmp_path / "run" / "run.json", {"identity": {"env": ENV, "config": {"eps": 0.05}}})
    cli.main(["export", str(tmp_path / "run"), "--onnx", str(tmp_path / "deep" / "policy.onnx")])
    assert "policy.onnx" in capsys.readouterr().out
    onnx.checker.check_model(onnx.load(tmp_path / "deep" / "policy.onnx"))
