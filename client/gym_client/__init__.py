"""The agent: Flower client app, keystore, policy, upload, `gym-client`."""

import gym_fed  # noqa: F401  (sets Flower's variables before flwr is imported)
