"""The formats of `gym export`, one file each: its name is the value of ``--format``, and it is registered
automatically.

Installed packages register formats by the entry points ``gym_fed.export_formats``;
``gym_fed.core.registries.EXPORT_FORMATS`` finds both.
"""
