"""Load, initialise, quantise, adapt and save the model of a run."""
