"""Whether llama.cpp is there to read what was written."""

from __future__ import annotations

from importlib.metadata import distributions


def has_llama_cpp() -> bool:
    """Whether llama-cpp-python is installed; a folder that is only called ``llama_cpp`` does not count."""
    return any(distributions(name="llama-cpp-python"))
