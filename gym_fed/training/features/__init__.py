"""Optional features of training, one per file: file name = registry name = top-level YAML key.

Installed packages add features through the entry point group ``gym_fed.features``; see ``core.registries.FEATURES``.
"""
