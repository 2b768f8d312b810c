"""Import models of other formats as model folders, converted once and cached for all commands.

    folder = imported(Path("model.gguf"))    # $GYM_HOME/imports/<sha256 of the file>/

``gym_fed.base.models.resolve`` uses it for ``.gguf`` files, and for folders with quantised weights that need
conversion. A new format is a module with an ``Importer`` and a line in ``formats.py``.
"""
