"""The optimisers, one a file or a line of ``_table.py``: value of ``optimizer``.

Installed packages add theirs by the entry point group ``gym_fed.optimizers``.
"""
