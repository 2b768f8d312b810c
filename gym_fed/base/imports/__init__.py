"""Import models of other formats as model folders, converted once into a cache that every command loads from.

    folder = imported(Path("model.gguf"))    # $GYM_HOME/imports/<sha256 of the file>/

``gym_fed.base.models.resolve`` comes here for a ``.gguf`` file, and for a folder of quantised weights that needs a
reader. A new format is a module with an ``Importer`` and a line in ``formats.py``.
"""
