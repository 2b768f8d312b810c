"""The hub: the server that admits updates, merges them in rounds and keeps the ledger."""

import gym_fed  # noqa: F401  (sets Flower's variables before flwr is imported)
