"""The formats of `gym export`: file name = registry name = value of ``--format``. Dropping a file in registers it.

Installed packages add theirs by the entry points ``gym_fed.export_formats``;
``gym_fed.core.registries.EXPORT_FORMATS`` finds both.
"""
