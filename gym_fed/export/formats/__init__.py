"""The formats of `gym export`, one file each, registered automatically under its name, the value of ``--format``.

Installed packages register formats by the entry points ``gym_fed.export_formats``;
``gym_fed.core.registries.EXPORT_FORMATS`` finds both.
"""
