"""The help of a schema's fields: the docstring below each field, read from the source when a JSON schema is written.

Pydantic's ``use_attribute_docstrings`` reads the source of every class at its creation, so at every start of every
program. That took half of the time to import a config's classes.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping

from pydantic import BaseModel


@functools.cache
def field_help(schema: type) -> Mapping[str, str]:
    """Return the docstrings below the annotated attributes of a schema and its bases, by attribute.

    A class that was created dynamically, such as by ``pydantic.create_model``, has no source; its bases are still read.
    """
    own = (
        base for base in reversed(schema.__bases__) if issubclass(base, BaseModel) and base is not BaseModel
    )
    inherited = [field_help(base) for base in own]
    texts = {name: text for base in inherited for name, text in base.items()}
    try:
        source = inspect.getsource(schema)
    except (OSError, TypeError):
        return texts
    (written,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(written, ast.ClassDef)
    for field, below in zip(written.body, written.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            texts.pop(field.target.id, None)  # a redeclared field has its own help or none
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                texts[field.target.id] = inspect.cleandoc(str(below.value.value))
    return texts
