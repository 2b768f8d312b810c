"""Estimate a run before it starts (`gym train --plan`): memory by formula, time by calibration.

- ``sizes``: the weights of a config's model, counted on the meta device: none is loaded.
- ``memory``: bytes of weights, gradients, state, activations and logits.
- ``plan``: both for one config, with floating-point operations and the time of a step.
"""
