"""VNN-LIB instances mean what they should: read by a parser of our own, run by onnxruntime, judged beside the complete search."""

from __future__ import annotations

import csv
import re

import numpy as np
import pytest
import torch

from sortrl import cli
from sortrl.certify.search import exact_radius
from sortrl.core.errors import SortRLError
from sortrl.nets import SortPolicy
from sortrl.nets.vnnlib import export_vnnlib, instance

onnx = pytest.importorskip("onnx", reason="writing ONNX needs the extra sortrl[onnx]")
onnxruntime = pytest.importorskip("onnxruntime", reason="running ONNX needs the extra sortrl[onnx]")
EPS = 0.12


def parsed(text):
    """(low, high, property): the box, and the pairs (j, a) of which one must have Y_j >= Y_a. Strict: knows nothing else."""
    code = "\n".join(line for line in text.splitlines() if not line.startswith(";"))
    tokens = re.findall(r"[()]|[^\s()]+", code)

    def read(place):
        if tokens[place] != "(":
            return tokens[place], place + 1
        inner, place = [], place + 1
        while tokens[place] != ")":
            item, place = read(place)
            inner.append(item)
        return inner, place + 1

    place, declared, low, high, pairs = 0, [], {}, {}, None
    while place < len(tokens):
        command, place = read(place)
        if command[0] == "declare-const":
            assert command[2] == "Real"
            declared.append(command[1])
            continue
        kind, (relation, *parts) = command
        assert kind == "assert"
        if relation == "or":
            assert pairs is None
            assert all(len(part) == 2 and part[0] == "and" and part[1][0] == ">=" for part in parts)
            pairs = [tuple(int(name.removeprefix("Y_")) for name in part[1][1:]) for part in parts]
        else:
            (low if relation == ">=" else high)[int(parts[0].removeprefix("X_"))] = float(parts[1])
    inputs, outputs = ([name for name in declared if name[0] == kind] for kind in "XY")
    assert inputs == [f"X_{i}" for i in range(len(inputs))]
    assert sorted(low) == sorted(high) == list(range(len(inputs)))
    low, high = (np.array([end[i] for i in range(len(inputs))]) for end in (low, high))
    assert {j for pair in pairs for j in pair} == set(range(len(outputs)))
    return low, high, pairs


def policy_of(n_actions, rho=0.0):
    torch.manual_seed(1)
    policy = SortPolicy((3,), n_actions, width=24, depth=3, rho=rho).eval()
    states = torch.randn(300, 3)
    policy.calibrate(states)
    with torch.no_grad():
        policy.bias.add_(policy.scores(states).mean(0))
    return policy.requires_grad_(False)


@pytest.mark.parametrize(("n_actions", "rho"), [(2, 0.0), (4, 0.0), (3, 0.3)])
def test_instances_agree_with_the_complete_search(n_actions, rho, tmp_path):
    policy, unit = policy_of(n_actions, rho), torch.randn(60, 3, generator=torch.Generator().manual_seed(2))
    bracket = exact_radius(policy, unit, reach=2 * EPS, tolerance=1e-2)
    robust, broken = bracket.lower > EPS, bracket.upper < EPS
    assert robust.sum() > 5
    assert broken.sum() > 5
    files = export_vnnlib(policy, unit, EPS, tmp_path, timeout=60)
    with (tmp_path / "instances.csv").open() as opened:
        listed = list(csv.reader(opened))
    assert [tmp_path / row[1] for row in listed] == files
    assert {(row[0], row[2]) for row in listed} == {("onnx/policy.onnx", "60")}
    session = onnxruntime.InferenceSession(str(tmp_path / listed[0][0]), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)

    def holds(x, pairs, slack=0.0):
        (scores,) = session.run(["Y"], {"X": x.astype(np.float32)[None]})
        # Where distances are summed, runtimes may sum in another order; maxima are the same to the bit.
        return any(scores[0, j] >= scores[0, a] - slack for j, a in pairs)

    for row, file in enumerate(files):
        low, high, pairs = parsed(file.read_text())
        x = unit[row].numpy().astype(np.float64)
        assert (low <= x - EPS).all()
        assert (high >= x + EPS).all()
        assert (high - low < 2 * EPS + 1e-5).all()
        assert {a for _, a in pairs} == {int(policy.scores(unit[row : row + 1]).argmax())}
        assert len(pairs) == n_actions - 1
        assert not holds(x, pairs), "the state itself is answered with the action"
        if broken[row]:
            witness = bracket.counter_example[row].numpy().astype(np.float64)
            assert ((low <= witness) & (witness <= high)).all()
            assert holds(witness, pairs, slack=1e-5 if rho else 0.0), "sat, and the search's counter-example shows it"
        if robust[row]:
            corners = np.array(np.meshgrid(*zip(low, high, strict=True))).reshape(3, -1).T
            inside = rng.uniform(low, high, (40, 3))
            assert not any(holds(point, pairs) for point in (*corners, *inside)), "unsat"


def test_the_network_is_the_policy_and_plain(tmp_path):
    policy = policy_of(3)
    export_vnnlib(policy, torch.zeros(1, 3), 0.1, tmp_path)
    model = onnx.load(tmp_path / "onnx/policy.onnx")
    assert {node.op_type for node in model.graph.node} <= {
        "Flatten", "Unsqueeze", "Sub", "Abs", "ReduceMax", "Add", "Neg", "Identity"
    }  # fmt: skip
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx/policy.onnx"), providers=["CPUExecutionProvider"])
    for unit in torch.randn(20, 1, 3):
        np.testing.assert_array_equal(session.run(["Y"], {"X": unit.numpy()})[0], policy.scores(unit).numpy())


def test_a_wrong_box_would_be_noticed():
    """The parser reads numbers as they are, tiny ones too, which are written without an exponent."""
    low, high, pairs = parsed(instance(torch.tensor([-1e-9, 1.5]), torch.tensor([3e-7, 2.5]), 0, 3, 0.5))
    assert low.tolist() == torch.tensor([-1e-9, 1.5]).tolist()
    assert high.tolist() == torch.tensor([3e-7, 2.5]).tolist()
    assert pairs == [(1, 0), (2, 0)]


def test_wrong_states_are_refused(tmp_path):
    with pytest.raises(SortRLError, match=r"expected torch.float32 \(n, 3\)"):
        export_vnnlib(policy_of(2), torch.zeros(1, 4), 0.1, tmp_path)
    with pytest.raises(SortRLError, match="eps is 0"):
        export_vnnlib(policy_of(2), torch.zeros(1, 3), 0.0, tmp_path)


def test_the_command_writes_them(tmp_path, capsys):
    cli.main(["export", "zoo:cartpole", "--vnnlib", str(tmp_path), "--states", "5"])
    assert "5 instances at eps" in capsys.readouterr().out
    assert len((tmp_path / "instances.csv").read_text().splitlines()) == 5
    assert len(list((tmp_path / "vnnlib").iterdir())) == 5
    with pytest.raises(SystemExit):
        cli.main(["export", "zoo:cartpole", "--vnnlib", str(tmp_path), "--states", "0"])
