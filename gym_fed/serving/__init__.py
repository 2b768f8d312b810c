"""One base model in memory, thousands of personal variants beside it. Names are imported on first use.

with VariantStore.open("variants", base) as store, Engine(model, tokenizer, store) as engine:
    print(engine.submit(GenerationRequest(prompt_ids=ids, variant="alice")).result().text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.serving.loaded import LoadedVariant, VariantSource
    from gym_fed.serving.request import GenerationRequest, SamplingParams

__all__ = ["GenerationRequest", "LoadedVariant", "SamplingParams", "VariantSource"]

__getattr__ = lazy(
    __name__,
    GenerationRequest="gym_fed.serving.request",
    LoadedVariant="gym_fed.serving.loaded",
    SamplingParams="gym_fed.serving.request",
    VariantSource="gym_fed.serving.loaded",
)
