"""Features of the model's code, one file each: file name = registry name = key of the YAML's top level.

Installed packages add theirs by the entry points ``gym_fed.features``; ``gym_fed.core.registries.FEATURES`` finds both.
"""
