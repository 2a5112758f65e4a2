"""The independent checker accepts what is true and catches what was tampered with, whatever part it is."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import sortrl.verify
from sortrl import cli
from sortrl.certify import load_certificates, save_certificates
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_tensors, write_tensors
from sortrl.core.normalizer import Normalizer
from sortrl.nets import SortPolicy
from sortrl.verify import read_safetensors, verify


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    policy = SortPolicy((3,), 3, width=24, depth=3, scale=2.0).requires_grad_(False)
    policy.calibrate(torch.randn(200, 3))
    policy.save(tmp_path / "run")
    states = torch.randn(60, 3)
    path = tmp_path / "certificates.safetensors"
    save_certificates(path, policy, states, policy.certify_unit(states), tmp_path / "run")
    return path, policy, states


def change(path: Path, name: str, value) -> None:
    """Rewrite one tensor of a file, keeping everything else."""
    tensors, metadata = read_tensors(path)
    tensors[name] = value(tensors[name].clone())
    write_tensors(path, tensors, metadata)


def test_what_is_true_passes(saved):
    path, policy, states = saved
    verdict = verify(path)
    assert verdict.ok
    assert verdict.states == 60
    assert verdict.lipschitz == pytest.approx(policy.lipschitz, rel=1e-12)
    assert 0 < verdict.smallest_spare < 1e-3, "the radius is below margin / (2 L), by the rounding slack alone"
    loaded, certificate, metadata = load_certificates(path)
    assert torch.equal(loaded, states)
    assert (certificate.radius == policy.certify_unit(states).radius).all()
    assert (certificate.radius > 0.01).any()
    assert metadata["policy"] == "run/policy.safetensors"


@pytest.mark.parametrize("conv", [(), ((5, 2, 1), (3, 2, 2))])
@pytest.mark.parametrize("bounded_conv", [(), ((6, 2, 1), (4, 2, 1))])
def test_images_pass_too(tmp_path, conv, bounded_conv):
    torch.manual_seed(1)
    shape = (2, 15, 16)
    front = {"crop": (1, 0, 2, 1), "pool": 2, "scale": 0.5, "conv": conv, "bounded_conv": bounded_conv}
    policy = SortPolicy(shape, 4, width=10, depth=2, **front, normalizer=Normalizer.from_pixels(shape))
    policy.requires_grad_(False)
    policy.save(tmp_path)
    states = policy.normalize(torch.randint(0, 256, (20, *shape)))
    save_certificates(tmp_path / "c.safetensors", policy, states, policy.certify_unit(states), tmp_path)
    assert verify(tmp_path / "c.safetensors").ok


def test_chosen_pixels_pass_and_others_are_found_out(tmp_path):
    torch.manual_seed(1)
    policy = SortPolicy((2, 6, 6), 3, width=10, depth=2, pool=2, pixels=(7, 0, 9, 15)).requires_grad_(False)
    policy.save(tmp_path)
    states = torch.rand(20, 2, 6, 6)
    certificate = policy.certify_unit(states)
    assert (certificate.radius > 0.01).any()
    save_certificates(tmp_path / "c.safetensors", policy, states, certificate, tmp_path)
    assert verify(tmp_path / "c.safetensors").ok
    tensors, metadata = read_tensors(tmp_path / "policy.safetensors")

    def with_pixels(pixels):
        metadata["config"]["pixels"] = pixels
        write_tensors(tmp_path / "policy.safetensors", tensors, metadata)
        return verify(tmp_path / "c.safetensors")

    assert not with_pixels([7, 1, 9, 15]).ok, "other pixels make other scores"
    assert not with_pixels([7, 0, 9]).ok
    for hostile in ([7, 0, 9, 18], [7, 0, 9, -3], [7, 0, 9, 9], [7, 0, 9, 15.0], None, 4):
        with pytest.raises(SortRLError, match=r"is no policy that can be checked .*pixels"):
            with_pixels(hostile)


def at(index: int, value: float):
    def put(tensor: torch.Tensor) -> torch.Tensor:
        tensor[index] = value
        return tensor

    return put


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 1.02 + 1e-4


TAMPERED = {
    "one radius": ("certificates.safetensors", "radius", lambda t: torch.where(t == t.max(), t * 1.01, t), "radius"),
    "every radius by 2 %": ("certificates.safetensors", "radius", doubled, "can be proven"),
    "a NaN radius": ("certificates.safetensors", "radius", at(0, float("nan")), "state 0: its radius is nan"),
    "a negative radius": ("certificates.safetensors", "radius", at(5, -1.0), "state 5: its radius is -1"),
    "one action": ("certificates.safetensors", "action", lambda t: (t + 1) % 3, "the scores say"),
    "one state": ("certificates.safetensors", "states", at(2, 9.0), "state 2"),
    "a state without number": ("certificates.safetensors", "states", at(2, float("inf")), "NaN or infinity"),
    "a state dropped": ("certificates.safetensors", "states", lambda t: t[1:].clone(), "states: shape (59, "),
    "one weight, slightly": ("run/policy.safetensors", "layers.1.weight", at(0, 0.25), "weights"),
    "the bias": ("run/policy.safetensors", "bias", lambda t: t + torch.tensor([0.0, 5.0, 0.0]), "weights"),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_tampering_is_caught(saved, case, capsys):
    path = saved[0]
    file, name, value, message = TAMPERED[case]
    change(path.parent / file, name, value)
    verdict = verify(path)
    assert not verdict.ok
    assert any(message in line for line in verdict.failures), verdict.failures
    with pytest.raises(SystemExit) as stopped:
        cli.main(["verify", str(path)])
    assert stopped.value.code == 1
    assert "sortrl: " in capsys.readouterr().err


def test_the_command_says_what_it_checked(saved, capsys, tmp_path):
    cli.main(["verify", str(saved[0]), "--json", str(tmp_path / "v.json")])
    out = capsys.readouterr().out
    assert "60 certificates hold" in out
    moved = tmp_path / "elsewhere.safetensors"
    (tmp_path / "run" / "policy.safetensors").rename(moved)
    cli.main(["verify", str(saved[0]), "--policy", str(moved)])
    with pytest.raises(SystemExit):
        cli.main(["verify", str(saved[0])])


def test_files_are_read_without_help(saved):
    path = saved[0]
    ours, _ = read_safetensors(path)
    theirs = safetensors.torch.load_file(path)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert np.array_equal(ours[name], theirs[name].numpy())
    content = path.read_bytes()
    for broken in (b"", content[:6], content[:100], content[:-20], b"\xff" * 64):
        path.write_bytes(broken)
        with pytest.raises(SortRLError, match="safetensors"):
            verify(path)
    with pytest.raises(SortRLError, match="Cannot read"):
        verify(path.with_name("absent"))


def test_only_certificates_of_this_very_policy_are_saved(saved, tmp_path):
    path, policy, states = saved
    certificate = policy.certify_unit(states)
    policy.bias.add_(0.1)
    with pytest.raises(SortRLError, match="other weights"):
        save_certificates(path, policy, states, certificate, tmp_path / "run")
    policy.save(tmp_path / "run")
    with pytest.raises(SortRLError, match="60 certificates for states"):
        save_certificates(path, policy, states[1:], certificate, tmp_path / "run")
    with pytest.raises(SortRLError, match="holds no certificates"):
        verify(tmp_path / "run" / "policy.safetensors")
    with pytest.raises(SortRLError, match="holds no certificates"):
        load_certificates(tmp_path / "run" / "policy.safetensors")


def test_a_near_tie_without_certificate_is_not_a_failure(saved):
    path, policy, states = saved
    policy.layers[-1].weight[1] = policy.layers[-1].weight[0]
    policy.bias.zero_()
    policy.save(path.parent / "run")
    certificate = policy.certify_unit(states)
    tied = certificate.action == 0
    assert tied.any()
    swapped = replace(
        certificate,
        action=np.where(tied, 1, certificate.action),
        runner_up=np.where(tied, 0, certificate.runner_up),
    )
    save_certificates(path, policy, states, swapped, path.parent / "run")
    assert verify(path).ok


def test_the_checker_shares_no_code_with_what_it_checks():
    allowed, files = ("sortrl.core.errors", "sortrl.verify"), list(Path(sortrl.verify.__file__).parent.glob("*.py"))
    assert len(files) > 3
    for file in files:
        tree = ast.parse(file.read_text())
        names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        assert not [n for n in names if "torch" in n or (n.startswith("sortrl") and not n.startswith(allowed))]
