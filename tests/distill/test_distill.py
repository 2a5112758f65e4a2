"""The training stage: the printed loss, its schedules, and a resume that changes nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import balancer
from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.data.collect import CollectConfig, collect
from sortrl.data.dataset import split
from sortrl.distill.loop import EXPONENTS, PRESETS, DistillConfig, distill, imitation_loss, margins, robust_loss

TINY = DistillConfig(eps=0.05, steps=40, batch=64, width=24, depth=3)


@pytest.fixture(scope="module")
def data():
    return split(collect(balancer(), "CartPole-v1", CollectConfig(states=3000), seed=0), 0.2, 0)


def test_robust_loss_is_the_printed_one():
    scores = torch.tensor([[1.0, 0.4, 0.0], [1.0, 0.0, -1.0], [0.0, 1.0, 0.5], [0.5, 0.5, 0.0]])
    labels = torch.zeros(4, dtype=torch.long)
    margin = margins(scores, labels)
    torch.testing.assert_close(margin, torch.tensor([0.6, 1.0, -1.0, 0.0]))
    # theta = 0.8: the first counts with -0.6; the second is wide enough; the third disagrees; the tie counts with 0.
    assert float(robust_loss(margin, 0.8)) == pytest.approx(-0.6 / 4)


def test_soft_targets_blend_into_the_cross_entropy():
    logits, labels, teacher = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2]), torch.randn(6, 3)
    hard, soft = (imitation_loss(logits, labels, teacher, share) for share in (0.0, 1.0))
    expected = -(teacher.softmax(1) * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(soft, expected)
    torch.testing.assert_close(imitation_loss(logits, labels, teacher, 0.25), 0.75 * hard + 0.25 * soft)


def test_schedules():
    config = DistillConfig(steps=1000)
    exponents = [config.p_at(step) for step in range(1000)]
    assert exponents[0] == 8
    assert set(exponents) == {*map(float, EXPONENTS), math.inf}
    assert exponents == sorted(exponents)
    assert config.lambda_at(0) == config.lambda_start
    assert config.lambda_at(999) == pytest.approx(config.lambda_end)
    assert config.cosine(0) == 1.0
    assert config.cosine(1000) == pytest.approx(0.0)
    assert config.theta == 2 * config.eps
    assert PRESETS["paper"].width == 640


def test_a_student_learns_and_is_certified(data):
    training, held_out = data
    config = replace(TINY, steps=500, width=64, depth=4, batch=256, lambda_end=0.3)
    result = distill(training, balancer().normalizer, config, held_out=held_out)
    majority = max(np.bincount(held_out.actions)) / len(held_out)
    assert result.held_out["agreement"] > max(0.85, majority + 0.2)
    assert result.held_out["certified"] > 0.3
    assert [row["step"] for row in result.history] == sorted(row["step"] for row in result.history)
    assert not result.policy.training


def test_a_stopped_run_resumes_to_the_same_bits(data, tmp_path):
    training, _ = data
    normalizer = balancer().normalizer
    undisturbed = distill(training, normalizer, TINY, seed=3)

    class Stop(Exception):
        pass

    def stop_at_23(row):
        if row["step"] >= 23:
            raise Stop

    with pytest.raises(Stop):
        distill(training, normalizer, TINY, seed=3, out_dir=tmp_path, progress=stop_at_23)
    resumed = distill(training, normalizer, TINY, seed=3, out_dir=tmp_path)
    for (name, a), b in zip(undisturbed.policy.state_dict().items(), resumed.policy.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert resumed.history == undisturbed.history
    other = distill(training, normalizer, TINY, seed=4)
    assert not torch.equal(other.policy.layers[0].weight, resumed.policy.layers[0].weight)


def test_a_checkpoint_of_another_run_is_refused(data, tmp_path):
    training, _ = data
    distill(training, balancer().normalizer, TINY, out_dir=tmp_path)
    with pytest.raises(SortRLError, match="other settings, seed or data"):
        distill(training, balancer().normalizer, replace(TINY, eps=0.2), out_dir=tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eps", -0.1),
        ("eps", math.nan),
        ("steps", 0),
        ("batch", -1),
        ("learning_rate", 0),
        ("warm_share", 0.95),
        ("soft_targets", 2.0),
    ],
)
def test_bad_settings_are_named(field, value):
    with pytest.raises(SortRLError, match=field):
        DistillConfig(**{field: value})


def test_a_normalizer_of_another_task_is_refused(data):
    with pytest.raises(SortRLError, match="normalizer"):
        distill(data[0], Normalizer.identity((7,)), TINY)
