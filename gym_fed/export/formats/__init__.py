"""The formats of `gym export`: file name = registry name = value of ``--format``. Dropping a file in registers it.

Installed packages add theirs by the entry points ``gym_fed.export_formats``;
``gym_fed.kinds.EXPORT_FORMATS`` finds both.

Neighbours: imports few_bits, gguf, kept, nearest, needs, options, process, recipe, source, tolerance;
imported by card, checking, choice, listing, room, run.
"""
