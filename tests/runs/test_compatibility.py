"""Files written by every version stay loadable, and mean the same. tests/fixtures/make.py says how they were made."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import sortrl
from sortrl.certify import load_certificates
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_json, read_tensors, write_tensors
from sortrl.core.records import stored_rows
from sortrl.data.dataset import load_demonstrations
from sortrl.report import summary_lines
from sortrl.runs.run import read_run, trained_eps
from sortrl.teachers import Teacher, load_normalizer
from sortrl.verify import verify

VERSIONS = sorted(
    path for path in (Path(__file__).parents[1] / "fixtures").iterdir() if (path / "expected.json").exists()
)


def test_this_version_has_fixtures():
    from sortrl.evaluate.provenance import sortrl_version

    assert sortrl_version() in [path.name for path in VERSIONS], "run: python tests/fixtures/make.py"


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda path: path.name)
def test_files_of_every_version_load_and_mean_the_same(folder):
    expected = json.loads((folder / "expected.json").read_text())
    states = np.array(expected["states"])
    policy = sortrl.load(folder)
    certificate = policy.certify(states)
    assert certificate.action.tolist() == expected["action"]
    assert (certificate.radius > 0).any()
    np.testing.assert_allclose(certificate.radius, expected["radius"], rtol=1e-4, atol=1e-7)
    assert Teacher.load(folder / "teacher").predict(states)[0].tolist() == expected["teacher_action"]
    env_id, _, teacher = read_run(folder)
    assert (env_id, teacher is not None, trained_eps(folder)) == ("CartPole-v1", True, 0.05)
    assert len(load_demonstrations(folder / "data.safetensors")) == 300
    for name in ("normalizer.json", "normalizer.safetensors"):
        normalizer = load_normalizer(folder / name)
        assert np.array_equal(normalizer.scale, policy.normalizer.scale)
    assert len(load_certificates(folder / "certificates.safetensors")[1]) == len(states)
    assert verify(folder / "certificates.safetensors").ok
    assert summary_lines(read_json(folder / "results.json"))
    assert stored_rows(read_json(folder / "evaluation.json"), folder)
    assert stored_rows(read_json(folder / "suite.json")["rows"], folder)


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("policy.safetensors", sortrl.load),
        ("data.safetensors", load_demonstrations),
        ("teacher/teacher.safetensors", Teacher.load),
        ("certificates.safetensors", load_certificates),
        ("certificates.safetensors", verify),
        ("normalizer.safetensors", load_normalizer),
    ],
)
def test_files_carry_a_version_and_later_ones_are_refused(tmp_path, name, load):
    tensors, metadata = read_tensors(VERSIONS[-1] / name)
    later = metadata["format"] + 1 if isinstance(metadata["format"], int) else metadata["format"][:-1] + "9"
    path = tmp_path / Path(name).name
    for version in (later, None):
        write_tensors(path, tensors, metadata | {"format": version})
        with pytest.raises(SortRLError, match="format"):
            load(path)
