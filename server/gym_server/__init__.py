"""The hub: admission, rounds, store, ledger, Flower grid, `gym-server`."""

import gym_fed  # noqa: F401  (sets Flower's variables before flwr is imported)
