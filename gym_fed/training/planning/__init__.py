"""Estimate a run before it starts (`gym train --plan`): memory by formula, time by calibration.

- ``sizes``: the weights of a config's model, counted on the meta device: none is loaded.
- ``memory``: bytes of weights, gradients, state, activations and logits.
- ``duration``: floating-point operations, and how many this machine does in a second.
- ``plan``: both, for one config.
"""
