"""The contributor's software: the Flower client app, the agent, its keys and the `gym-client` command."""

import os

import gym_fed  # noqa: F401  (sets Flower's variables before flwr is imported)

# gRPC's log lines ("Got goaway") would clutter the output; failed calls are reported anyway.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
