"""The optimisers, one per file or line of ``_table.py``: value of ``optimizer``.

Installed packages add theirs by the entry point group ``gym_fed.optimizers``.
"""
