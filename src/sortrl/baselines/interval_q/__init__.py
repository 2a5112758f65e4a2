"""Robust training of ordinary networks with interval bounds: SA-DQN, RADIAL, WocaR, CAR-DQN, RS-DQN and BCL, written from their papers.

Each method is one module that holds its loss; :mod:`.training` is the loop they share, :mod:`.making` makes an agent by name.
"""
