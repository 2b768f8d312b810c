"""LoRA factors on a layer that is narrower than their rank, such as a projection to a few heads, and on GPT-2's."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.encode import lora_delta
from gym_fed.delta.factors import is_plain_lora, lora_factors
from gym_fed.delta.file import DeltaFile
from tests.support.tiny_models import tiny_model


def test_factors_of_a_higher_rank_than_the_weight_are_written_with_the_rank_of_the_weight(
    tmp_path: Path,
) -> None:
    base = tiny_model("llama", num_key_value_heads=1, head_dim=4)
    spec = BaseSpec.of(base, "base")
    before = {name: tensor.clone() for name, tensor in model_tensors(base).items()}
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["k_proj", "o_proj"]))
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    assert is_plain_lora(model)
    factors = lora_factors(model)
    assert {name.split(".")[-2]: a.shape[0] for name, (a, _, _) in factors.items()} == {
        "k_proj": 4,
        "o_proj": 8,
    }
    lora_delta(factors, tmp_path / "a.gymdelta", spec)
    merged = model_tensors(model.merge_and_unload())
    with DeltaFile.open(tmp_path / "a.gymdelta", spec) as delta:
        for name in factors:
            change = merged[name] - before[name]
            torch.testing.assert_close(
                delta.decode(name), change, rtol=0, atol=0.01 * float(change.abs().max())
            )


def test_the_product_of_16_bit_factors_of_a_narrow_layer_is_not_rounded_to_16_bits() -> None:
    narrow = tiny_model("llama", num_key_value_heads=1, head_dim=4)
    model = get_peft_model(narrow, LoraConfig(r=8, target_modules=["k_proj"])).to(torch.bfloat16)
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    layers = dict(model.get_base_model().named_modules())
    for name, (a, b, _) in lora_factors(model).items():
        layer = layers[name.removesuffix(".weight")]
        trained = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
        torch.testing.assert_close(b.double() @ a.double(), trained, rtol=0, atol=1e-7)


def test_factors_on_weights_stored_as_in_by_out_are_transposed(tmp_path: Path) -> None:
    base = tiny_model("gpt2")
    spec = BaseSpec.of(base, "base")
    before = {name: tensor.clone() for name, tensor in model_tensors(base).items()}
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    factors = lora_factors(model)
    assert all(a.is_contiguous() and b.is_contiguous() for a, b, _ in factors.values())
    lora_delta(factors, tmp_path / "a.gymdelta", spec)
    merged = model_tensors(model.merge_and_unload())
    with DeltaFile.open(tmp_path / "a.gymdelta", spec) as delta:
        for name in factors:
            change = merged[name] - before[name]
            torch.testing.assert_close(
                delta.decode(name), change, rtol=0, atol=0.01 * float(change.abs().max())
            )
