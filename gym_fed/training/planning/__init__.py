"""Estimate a run before it starts (`gym train --plan`): memory by formula, time by measurement.

- ``sizes``: the weights of a config's model, counted on the meta device without loading any.
- ``memory``: the bytes of weights, gradients, optimiser state, activations and logits.
- ``plan``: both for one config, with the floating-point operations and the time of a step.
"""
