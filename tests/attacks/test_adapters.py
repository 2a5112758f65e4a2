"""Policies under other people's attacks: foolbox and the Adversarial Robustness Toolbox reach our verdicts, state by state."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from helpers import balancer
from sortrl import attacks
from sortrl.data.collect import CollectConfig, collect
from sortrl.distill.loop import DistillConfig, distill

STEPS, EPS = 10, 0.3


@pytest.fixture(scope="module")
def student():
    data = collect(balancer(), "CartPole-v1", CollectConfig(states=4000), seed=0)
    config = DistillConfig(eps=0.05, steps=200, batch=256, width=48, depth=3, lambda_end=0.1)
    return distill(data, balancer().normalizer, config).policy


@pytest.fixture(scope="module")
def states(student):
    return student.normalize(collect(balancer(), "CartPole-v1", CollectConfig(states=1000), seed=9).obs)


def assert_same_verdicts(student, states, rival_iterates):
    """``rival_iterates[k]``: what the rival's PGD proposes after k + 1 steps.

    PGD here returns the latest iterate that changes the action; theirs return the last. So the claim is: our verdict
    is "some iterate of theirs changes the action", for every state; and where their last one does (or none does), ours
    IS their last one. The inputs may differ by a few units in the last place (1e-5): ours are rounded so that the budget
    holds in exact arithmetic. The verdicts may not differ at all.
    """
    ours = attacks.PGD(STEPS)(student, states, EPS)
    clean = student.scores(states).argmax(1)
    theirs = torch.stack([student.scores(x).argmax(1) != clean for x in rival_iterates])
    assert 0.05 < ours.changed.mean() < 0.95, "both verdicts must occur"
    assert (torch.from_numpy(ours.changed) == theirs.any(0)).all()
    comparable = theirs[-1] | ~theirs.any(0)
    assert comparable.double().mean() > 0.9
    torch.testing.assert_close(ours.perturbed[comparable], rival_iterates[-1][comparable], atol=1e-5, rtol=0)


def test_foolbox_reaches_the_same_verdicts(student, states):
    foolbox = pytest.importorskip("foolbox", reason="foolbox is not installed: pip install foolbox")
    bounds = (float(states.min()) - 1, float(states.max()) + 1)
    model = foolbox.PyTorchModel(student.as_classifier(), bounds=bounds, device="cpu")
    labels = student.scores(states).argmax(1)
    iterates = []
    for steps in range(1, STEPS + 1):
        attack = foolbox.attacks.LinfPGD(steps=steps, abs_stepsize=EPS / 10, random_start=False)
        _, clipped, successful = attack(model, states, labels, epsilons=EPS)
        assert (successful == (student.scores(clipped).argmax(1) != labels)).all()
        iterates.append(clipped)
    assert_same_verdicts(student, states, iterates)


def test_the_adversarial_robustness_toolbox_reaches_the_same_verdicts(student, states):
    pytest.importorskip("art", reason="ART is not installed: pip install adversarial-robustness-toolbox")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about frameworks that ART could also attack
        from art.attacks.evasion import ProjectedGradientDescent
        from art.estimators.classification import PyTorchClassifier
    classifier = PyTorchClassifier(
        student.as_classifier(), nn.CrossEntropyLoss(), student.obs_shape, student.n_actions, device_type="cpu"
    )
    labels = student.scores(states).argmax(1)
    np.testing.assert_array_equal(classifier.predict(states.numpy()).argmax(1), labels.numpy())
    iterates = []
    for steps in range(1, STEPS + 1):
        attack = ProjectedGradientDescent(
            classifier, eps=EPS, eps_step=EPS / 10, max_iter=steps, batch_size=1024, verbose=False
        )
        iterates.append(torch.from_numpy(attack.generate(states.numpy(), y=labels.numpy())))
    assert_same_verdicts(student, states, iterates)


def test_a_classifier_is_a_frozen_copy(student, states):
    classifier = student.as_classifier()
    assert not classifier.training
    assert torch.equal(classifier(states), student.scores(states))
    assert not any(parameter.requires_grad for parameter in classifier.parameters())
    x = states.clone().requires_grad_()
    classifier(x).sum().backward()
    assert bool((x.grad != 0).any())
    with torch.no_grad():
        next(classifier.parameters()).fill_(9.0)
    assert not torch.equal(classifier(states), student.scores(states))
    assert all(float(parameter.max()) != 9.0 for parameter in student.parameters())
