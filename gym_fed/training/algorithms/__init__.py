"""The training algorithms, one file each: file name = registry name = YAML value. Dropping a file in registers it.

Installed packages add theirs by the entry points ``gym_fed.algorithms``; ``gym_fed.kinds.ALGORITHMS`` finds both.
"""
