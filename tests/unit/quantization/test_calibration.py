"""Calibration by activations on gym-nano: what is collected, and that it lowers the error of layers' outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from gym_quant import CodecError, compensation, get_codec
from gym_quant.calibration import collect_input_moments, output_error
from torch import nn

from gym_fed.base.models import load_model

TEXT = "upper: a quick brown fox\nreverse: stream of bytes\nsort: 5 3 9 1\ncopy: what is said is said\n"


@dataclass
class Tuned:
    """A fine-tune of a few steps: its model, the deltas of a block's linear layers, and the token ids."""

    model: nn.Module
    ids: torch.Tensor
    deltas: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    loaded = load_model("gym-nano")
    model: nn.Module = loaded.model
    ids = torch.tensor(loaded.tokenizer(TEXT * 4)["input_ids"])[:256].reshape(8, 32)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        optimiser.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimiser.step()
    names = [f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    weights = dict(model.named_parameters())
    deltas = {name: weights[name].detach() - before[name] for name in names if ".layers.1." in name}
    return Tuned(model, ids, deltas)


def inputs_of(tuned: Tuned, name: str) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    layer = tuned.model.get_submodule(name.removesuffix(".weight"))
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    with torch.no_grad():
        tuned.model(tuned.ids)
    handle.remove()
    return seen[0].reshape(-1, seen[0].shape[-1])


def test_moments_are_the_mean_squares_of_what_a_layer_is_fed(tuned: Tuned) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    found = collect_input_moments(tuned.model, tuned.ids.chunk(3), [name])
    assert list(found) == [name]
    torch.testing.assert_close(found[name], inputs_of(tuned, name).square().mean(0), rtol=1e-4, atol=1e-9)


def test_no_more_sequences_are_used_than_were_asked_for(tuned: Tuned) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    first = collect_input_moments(tuned.model, [tuned.ids[:3]], [name])
    cut = collect_input_moments(tuned.model, tuned.ids.chunk(4), [name], samples=3)
    torch.testing.assert_close(cut[name], first[name])


def test_the_models_mode_and_hooks_are_as_before(tuned: Tuned) -> None:
    tuned.model.train()
    collect_input_moments(tuned.model, [tuned.ids])
    assert tuned.model.training
    assert not any(module._forward_pre_hooks for module in tuned.model.modules())


@pytest.mark.parametrize("codec", ["int2", "int4"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_calibration_lowers_the_error_of_layers_outputs(tuned: Tuned, codec: str, symmetric: bool) -> None:
    moments = collect_input_moments(tuned.model, [tuned.ids])
    estimated, real = [0.0, 0.0], [0.0, 0.0]
    for name, delta in tuned.deltas.items():
        inputs = inputs_of(tuned, name)
        for place, importance in enumerate((None, moments[name])):
            params = {"group_size": delta.shape[1], "symmetric": symmetric}
            encoded = get_codec(codec).encode(delta, importance=importance, **params)
            decoded = get_codec(codec).decode(encoded.payload, tuple(delta.shape), encoded.params)
            share = output_error(delta, torch.zeros_like(delta), moments[name])
            estimated[place] += output_error(delta, decoded, moments[name]) / share
            outputs = inputs @ (decoded - delta).T
            real[place] += float(outputs.square().sum() / (inputs @ delta.T).square().sum())
    assert estimated[1] < estimated[0]
    assert real[1] < real[0]


@pytest.mark.parametrize("codec", ["int2", "int4", "ternary"])
def test_codes_that_make_up_for_each_other_lower_the_output_error_much_more(tuned: Tuned, codec: str) -> None:
    moments = collect_input_moments(tuned.model, [tuned.ids], full=True)
    real = [0.0, 0.0]
    for name, delta in tuned.deltas.items():
        inputs = inputs_of(tuned, name)
        torch.testing.assert_close(moments[name], inputs.T @ inputs / len(inputs), rtol=1e-3, atol=1e-4)
        for place, importance in enumerate((None, moments[name])):
            encoded = get_codec(codec).encode(delta, importance=importance, group_size=64)
            decoded = get_codec(codec).decode(encoded.payload, tuple(delta.shape), encoded.params)
            error = float((inputs @ (decoded - delta).T).square().sum())
            assert error / len(inputs) == pytest.approx(output_error(delta, decoded, moments[name]), rel=1e-2)
            real[place] += error / float((inputs @ delta.T).square().sum())
    assert real[1] < 0.8 * real[0]


def test_second_moments_that_are_none_are_refused() -> None:
    with pytest.raises(CodecError, match="not positive semidefinite"):
        get_codec("int4").encode(torch.ones(2, 2), importance=torch.tensor([[1.0, 3.0], [3.0, 1.0]]))


def test_inputs_that_do_not_correlate_change_no_code() -> None:
    delta = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    moments = torch.rand(24, generator=torch.Generator().manual_seed(1)) + 0.1
    for name in ("binary", "int2", "int4", "int8", "ternary"):
        for params in ({}, {"group_size": 24}, {"group_size": 5, "symmetric": False}):
            plain = get_codec(name).encode(delta, importance=moments, **params)
            full = get_codec(name).encode(delta, importance=moments.diag(), **params)
            assert all(torch.equal(plain.payload[key], full.payload[key]) for key in plain.payload)


def test_the_output_error_counts_each_columns_error_by_its_moment() -> None:
    delta, decoded = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [2.0, 4.0]])
    assert output_error(delta, decoded) == 5.0
    assert output_error(delta, decoded, torch.tensor([10.0, 0.5])) == 12.0


def test_what_cannot_be_calibrated_is_refused_by_name(tuned: Tuned) -> None:
    with pytest.raises(CodecError, match=r"'model\.norm\.weight' is not the weight of a linear layer"):
        collect_input_moments(tuned.model, [tuned.ids], ["model.norm.weight"])
    with pytest.raises(CodecError, match="no sequence"):
        collect_input_moments(tuned.model, [])


@pytest.mark.parametrize("cols", [128, 129, 256, 300])
def test_a_columns_error_is_carried_to_every_later_column_of_whatever_block(cols: int) -> None:
    """Against the same without blocks, column by column over the whole matrix (GPTQ, eq. 2-3)."""
    random = np.random.default_rng(0)
    values = random.standard_normal((3, cols)).astype(np.float32)
    inputs = random.standard_normal((cols * 2, 8)) @ random.standard_normal((8, cols))
    moments = inputs.T @ inputs / len(inputs)
    step = 0.8

    def rounded(column: Any, number: int) -> Any:
        codes = np.clip(np.rint(column / step) + 8, 0, 15).astype(np.uint8)
        return codes, (codes.astype(np.float32) - 8) * step

    upper = compensation._factor(moments)
    left = values.astype(np.float64)
    expected = np.empty((3, cols), dtype=np.uint8)
    for j in range(cols):
        expected[:, j : j + 1], decoded = rounded(left[:, j : j + 1].astype(np.float32), j)
        left[:, j:] -= (left[:, j : j + 1] - decoded) / upper[j, j] * upper[j, j:]
    found = compensation.compensated_codes(values, moments, rounded)
    assert (found != expected).mean() < 0.01, "but for sums in another order at the edge of a level"
    plain, _ = rounded(values, 0)
    assert (plain != expected).mean() > 0.05, "the carry counts here"
