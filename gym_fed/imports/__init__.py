"""Models in other formats as model folders: read once into a cache, from where every command loads them.

    folder = imported(Path("model.gguf"))    # $GYM_HOME/imports/<sha256 of the file>/

``gym_fed.models.resolve`` comes here for a ``.gguf`` file, and for a folder whose weights are quantised in a way that
needs a reader. A new format is a module with an ``Importer`` and a line in ``formats.py``.

Neighbours: imports console, errors, file_lock, files, json_files, library_env, modeling, system_errors, text;
imported by downloads, export, models.
"""
