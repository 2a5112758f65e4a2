"""Training one's own SortNet, on classes of any kind."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import sortrl
from sortrl.core.errors import SortRLError
from sortrl.distill import DistillConfig, fit

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
SHORT = DistillConfig(eps=0.1, steps=60, batch=128, lambda_end=1.0, final_share=0.3, exact_share=0.1)


def halves(n=512):
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return x, (x[:, 0] > 0).long()


def network():
    torch.manual_seed(1)
    return sortrl.SortPolicy((2,), 2, width=24, depth=2, rho=0.0)


def test_a_network_is_trained_calibrated_and_certified():
    x, label = halves()
    trained = network()
    before = (trained.predict(x)[0] == label.numpy()).mean()
    curve = fit(trained, x, label, SHORT)
    certificate = trained.certify(x)
    right = certificate.action == label.numpy()
    assert right.mean() > max(0.9, before)
    assert certificate.certified_at(0.1).mean() > 0.5
    assert (curve[0]["p"], curve[-1]["p"]) == (8.0, 1e9)
    # Half the distance to the border is the most that any certificate of the truth can reach.
    assert (certificate.radius[right] <= x[:, 0].abs().numpy()[right] + 0.2).all()


def test_the_seed_fixes_the_result_and_a_stopped_training_continues(tmp_path):
    x, label = halves()
    once, again, other = network(), network(), network()
    fit(once, x, label, SHORT, seed=3)
    fit(again, x, label, SHORT, seed=3, out_dir=tmp_path)
    fit(other, x, label, SHORT, seed=4)
    assert torch.equal(once.scores(x), again.scores(x))
    assert not torch.equal(once.scores(x), other.scores(x))
    resumed = network()
    fit(resumed, x, label, SHORT, seed=3, out_dir=tmp_path)  # from the checkpoint of a finished one
    assert torch.equal(resumed.scores(x), once.scores(x))


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (torch.zeros(5, 3), torch.zeros(5).long(), r"inputs have shape \(5, 3\)"),
        (torch.zeros(5, 2), torch.zeros(4).long(), r"labels \(4,\)"),
        (torch.zeros(5, 2), torch.full((5,), 2), r"expected whole numbers in 0\.\.1"),
        (torch.zeros(5, 2), torch.zeros(5), "labels are torch.float32"),
    ],
)
def test_wrong_inputs_are_named(inputs, labels, message):
    with pytest.raises(SortRLError, match=message):
        fit(network(), inputs, labels, SHORT)


def test_soft_targets_need_scores():
    with pytest.raises(SortRLError, match="Give them"):
        fit(network(), *halves(), DistillConfig(steps=1, soft_targets=0.5))


def test_the_digits_example_learns():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    right, certified = runpy.run_path(str(DIGITS))["main"](steps=150)
    assert right > 0.85
    assert certified > 0.6


@pytest.mark.slow
def test_the_digits_example_reaches_what_the_guide_says():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    right, certified = runpy.run_path(str(DIGITS))["main"]()
    assert right > 0.96
    assert certified >= 0.95


def test_margins_are_asked_for_little_by_little_if_eps_rises():
    x, label = halves()

    def extra(eps_rise: float) -> list[float]:
        """What the loss has beside the cross-entropy, step by step."""
        rows = fit(network(), x, label, DistillConfig(eps=0.5, steps=4, batch=64, mu_start=1.0, eps_rise=eps_rise))
        return [row["loss"] - row["lambda"] * row["cross_entropy"] for row in rows]

    plain, rising = extra(0.0), extra(1.0)
    assert plain[0] < -1e-4
    assert rising[0] == pytest.approx(0.0, abs=1e-6)
    assert rising[-1] < -1e-4
