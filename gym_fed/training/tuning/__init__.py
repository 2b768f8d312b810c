"""The tuning methods, one per file: file name = registry name = value of ``finetuning``.

Installed packages add theirs by the entry points ``gym_fed.tuning``; ``gym_fed.core.registries.TUNING`` finds both.
"""
