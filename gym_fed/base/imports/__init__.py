"""Models in other formats as model folders: read once into a cache, from where every command loads them.

    folder = imported(Path("model.gguf"))    # $GYM_HOME/imports/<sha256 of the file>/

``gym_fed.base.models.resolve`` comes here for a ``.gguf`` file, and for a folder of quantised weights that needs a
reader. A new format is a module with an ``Importer`` and a line in ``formats.py``.
"""
