"""Policies under other people's attacks: foolbox and the Adversarial Robustness Toolbox reach our verdicts, state by state."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers import balancer
from sortrl import attacks
from sortrl.data.collect import CollectConfig, collect

STEPS, EPS = 10, 0.3


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


@pytest.mark.parametrize(("name", "package"), [("foolbox_pgd", "foolbox"), ("art_pgd", "art")])
def test_the_documented_adapters_change_actions_but_none_that_is_certified(student, states, name, package):
    pytest.importorskip(package, reason=f"{package} is not installed")
    page = (Path(__file__).parents[2] / "docs" / "guides" / "attack.md").read_text()
    code = re.search(r"```python\n(def foolbox_pgd.*?)\n\n\nchanged = ", page, re.S)
    assert code is not None
    documented: dict[str, Any] = {"torch": torch}
    exec(code[1], documented)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about frameworks that ART could also attack
        changed = documented[name](student, states[:300], EPS)
    certified = student.certify_unit(states[:300]).certified_at(EPS)
    assert changed.sum() > 10
    assert certified.sum() > 10
    assert not (changed & certified).any()


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
