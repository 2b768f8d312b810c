"""Optimisers (values of ``optimizer``), one per file or per entry of ``_table.py``.

Installed packages add optimisers through the entry point group ``gym_fed.optimizers``.
"""
