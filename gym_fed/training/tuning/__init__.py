"""Tuning methods, one per file: file name = registry name = value of ``finetuning``.

Installed packages add methods through the entry point group ``gym_fed.tuning``; see ``gym_fed.core.registries.TUNING``.
"""
