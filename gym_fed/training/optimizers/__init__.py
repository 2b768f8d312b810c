"""The optimisers, one a file or a line of ``_table.py``: value of ``optimizer``.

Installed packages add theirs by the entry points ``gym_fed.optimizers``; ``gym_fed.kinds.OPTIMIZERS`` finds them all.

Neighbours: imports run; imported by none.
"""
