"""From nothing to a certified CartPole policy: a teacher is trained, a student distilled, a decision certified."""

import gymnasium as gym

import sortrl

policy = sortrl.robustify(None, env="CartPole-v1", eps=0.1)  # or the path of your Stable-Baselines3 zip
obs, _ = gym.make("CartPole-v1").reset(seed=0)
action, _ = policy.predict(obs)
cert = policy.certify(obs[None])
print(f"action {action}: no perturbation below {cert.radius[0]:.3f} standard deviations per sensor can change it")
attacked = sortrl.evaluate(policy, "CartPole-v1", attack=sortrl.attacks.PGD(steps=10), eps=0.1, episodes=20, seed=0)
print(f"return under PGD-10 at eps 0.1: {attacked.mean:.0f}")
