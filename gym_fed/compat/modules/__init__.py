"""What ``gym_fed.train`` and ``gym_fed.hparams`` are, modules that are expected under these names.

Neighbours: imports flags; imported by none.
"""
