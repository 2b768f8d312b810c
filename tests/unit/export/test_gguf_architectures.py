"""Architectures that the converter names and the installed gguf does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gym_fed.export.gguf.convert import _model_class


@pytest.mark.parametrize("error", [AttributeError("FC"), KeyError("Glm4ForCausalLM"), None])
def test_an_architecture_that_this_gguf_does_not_name_has_no_class(error: Exception | None) -> None:
    def found(_name: str) -> Any:
        if error is not None:
            raise error
        return SimpleNamespace(model_arch=None)

    assert _model_class(SimpleNamespace(get_model_class=found), "Glm4ForCausalLM") is None
    known = SimpleNamespace(model_arch="llama")
    assert _model_class(SimpleNamespace(get_model_class=lambda _name: known), "LlamaForCausalLM") is known
