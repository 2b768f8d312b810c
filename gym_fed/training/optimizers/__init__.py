"""Optimisers (the values of ``optimizer``), one per file or per entry in ``_table.py``.

Installed packages add optimisers through the entry point group ``gym_fed.optimizers``.
"""
