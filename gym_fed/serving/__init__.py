"""One base model in memory, thousands of personal variants beside it. Names are imported on first use.

with VariantStore.open("variants", base=spec, layout=mixed.layout) as store, Engine(mixed, tokenizer, store) as engine:
    print(engine.submit(GenerationRequest(prompt_ids=ids, variant="alice")).result().text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.serving.engine import Engine
    from gym_fed.serving.generation import Generation
    from gym_fed.serving.loaded import LoadedVariant, VariantSource
    from gym_fed.serving.mixed import MixedModel, Piece
    from gym_fed.serving.model_layout import ModelLayout
    from gym_fed.serving.request import GenerationRequest, SamplingParams
    from gym_fed.serving.store import VariantStore

__all__ = [
    "Engine",
    "Generation",
    "GenerationRequest",
    "LoadedVariant",
    "MixedModel",
    "ModelLayout",
    "Piece",
    "SamplingParams",
    "VariantSource",
    "VariantStore",
]

__getattr__ = lazy(
    __name__,
    Engine="gym_fed.serving.engine",
    Generation="gym_fed.serving.generation",
    GenerationRequest="gym_fed.serving.request",
    LoadedVariant="gym_fed.serving.loaded",
    MixedModel="gym_fed.serving.mixed",
    ModelLayout="gym_fed.serving.model_layout",
    Piece="gym_fed.serving.mixed",
    SamplingParams="gym_fed.serving.request",
    VariantSource="gym_fed.serving.loaded",
    VariantStore="gym_fed.serving.store",
)
