"""Merged products of base and delta give the same logits, and leave the base unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gym_fed.base.models import LoadedModel, load_model
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.serving.forward import variant_weights
from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.forward.variant_weights import LoadedVariant, loaded_variant

IDS = [index * 7 % 251 for index in range(40)]


@pytest.fixture
def nano() -> LoadedModel:
    loaded = load_model("gym-nano")
    loaded.model.float().eval()
    return loaded


def _variant(nano: LoadedModel, served: MultiVariantModel, folder: Path, codec: str) -> LoadedVariant:
    base = BaseSpec.of(nano.model, "gym-nano")
    generator = torch.Generator().manual_seed(1)
    entries = [
        DeltaEntry.of(name, 0.02 * torch.randn(shape, generator=generator), codec)
        for name, shape in sorted(base.shapes.items())
        if len(shape) == 2
    ]
    path = folder / f"{codec}.gymdelta"
    write_delta(path, entries, base)
    with DeltaFile.open(path, base) as delta:
        return loaded_variant(codec, delta, served.layout, codec)


def _logits(served: MultiVariantModel, variant: LoadedVariant | None, *, merge: bool) -> torch.Tensor:
    return served.step([Chunk(IDS, served.new_cache(), variant, num_logits=len(IDS))], merge=merge)


@pytest.mark.parametrize("most_kept", [0, variant_weights.MAX_KEPT_BYTES])
@pytest.mark.parametrize("codec", ["bitdelta", "int8"])
def test_merged_products_give_the_logits_of_two_products(
    codec: str, most_kept: int, nano: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variant_weights, "MAX_KEPT_BYTES", most_kept)
    made: list[str] = []
    decoded = variant_weights._decoded
    monkeypatch.setattr(variant_weights, "_decoded", lambda *of: made.append("sum") or decoded(*of))
    with MultiVariantModel(nano.model) as served:
        served._variants.bulk_rows = 1
        variant = _variant(nano, served, tmp_path, codec)
        apart = _logits(served, variant, merge=False)
        assert not made
        once, again = (_logits(served, variant, merge=True) for _ in range(2))
        linear = sum(target.kind == "linear" for target in served.layout.target_modules)
    assert len(made) == linear * (1 if most_kept else 2)
    assert torch.equal(once, again)
    torch.testing.assert_close(once, apart, rtol=1e-4, atol=1e-4)
    assert (once - apart).abs().max() < (once - _logits_of(nano)).abs().max() / 100


def _logits_of(nano: LoadedModel) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = nano.model(torch.tensor([IDS])).logits[0]
    return found


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_base_is_as_before_when_a_merged_forward_is_broken_off(
    error: type[BaseException], nano: LoadedModel, tmp_path: Path
) -> None:
    before = {name: tensor.clone() for name, tensor in nano.model.state_dict().items()}
    held = {name: tensor.data_ptr() for name, tensor in nano.model.state_dict().items()}
    with MultiVariantModel(nano.model) as served:
        variant = _variant(nano, served, tmp_path, "bitdelta")
        base = _logits(served, None, merge=True)
        whole = _logits(served, variant, merge=True)
        modules = [target.module for target in served.layout.target_modules if target.kind == "linear"]

        def broken(*_: object) -> None:
            raise error

        for name in (modules[0], modules[3], modules[-1]):
            handle = nano.model.get_submodule(name).register_forward_pre_hook(broken)
            with pytest.raises(error):
                _logits(served, variant, merge=True)
            handle.remove()
            assert torch.equal(_logits(served, None, merge=True), base)
            assert torch.equal(_logits(served, variant, merge=True), whole)
    for name, tensor in nano.model.state_dict().items():
        assert tensor.data_ptr() == held[name]
        assert torch.equal(tensor, before[name])
