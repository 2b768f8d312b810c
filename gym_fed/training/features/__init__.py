"""Features of the model's code, one file each: file name = registry name = key of the YAML's top level.

Installed packages add theirs by the entry points ``gym_fed.features``; ``gym_fed.kinds.FEATURES`` finds both.

Neighbours: imports run; imported by active_features, model.
"""
