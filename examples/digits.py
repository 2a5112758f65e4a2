"""A SortNet of one's own, without any agent: handwritten digits (8 x 8), most of them certified at a tenth of a standard deviation.

Needs scikit-learn, which has the digits: pip install scikit-learn
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import sortrl
from sortrl.core.normalizer import Normalizer
from sortrl.distill import DistillConfig, fit


def main(steps: int = 1200) -> tuple[float, float]:
    """Train and test; returns the shares of the test digits that are read right, and that are certified at 0.1."""
    images, digits = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    train, test, train_digits, test_digits = train_test_split(images, digits, test_size=0.25, random_state=0)

    # One centre and one spread for all pixels, in which eps and radii are stated. They are kept inside the network.
    units = Normalizer(np.full(64, float(train.mean())), np.full(64, float(train.std())))
    torch.manual_seed(0)
    network = sortrl.SortPolicy((64,), 10, width=256, depth=3, rho=0.0, normalizer=units)
    config = DistillConfig(
        eps=0.1,  # margins are widened for this radius ...
        theta_factor=8.0,  # ... and beyond: up to 0.4
        lambda_end=0.3,  # weight of the cross-entropy against the margins, at the end
        steps=steps,
        batch=256,
        learning_rate=0.08,
        final_share=0.3,  # of the steps, at p = infinity
        exact_share=0.1,  # of the steps, on the very network that is certified
    )
    fit(network, train, train_digits, config)

    certificate = network.certify(test)
    right = certificate.action == test_digits.numpy()
    certified = certificate.certified_at(0.1)
    print(f"{right.mean():.1%} right, {certified.mean():.1%} certified at 0.1, {(right & certified).mean():.1%} both")
    return float(right.mean()), float(certified.mean())


if __name__ == "__main__":
    main()
