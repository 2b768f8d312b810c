"""The formats of `gym export`: file name = registry name = value of ``--format``. A file in this folder is registered
automatically.

Installed packages register formats by the entry points ``gym_fed.export_formats``;
``gym_fed.core.registries.EXPORT_FORMATS`` finds both.
"""
