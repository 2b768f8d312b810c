"""An adapter that PEFT saved is found in its own model, also where transformers renames weights of old checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from gym_fed.base.modeling.adapters import load_on, read_adapter
from gym_fed.base.modeling.unadapted import unadapted_names
from tests.support.tiny_models import rows_of_ids, tiny_model


def test_an_adapter_of_a_model_whose_names_match_an_old_pattern_is_loaded_as_it_was_saved(
    tmp_path: Path,
) -> None:
    base = tiny_model("laguna", num_hidden_layers=2)
    excluded = unadapted_names(base)
    model = get_peft_model(
        base, LoraConfig(r=2, target_modules=["gate_proj", "o_proj"], exclude_modules=excluded)
    )
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    names = [name for name, _ in model.named_parameters() if "shared_experts" in name and "lora_B" in name]
    assert names, "the layer whose name an old pattern matches has an adapter"
    (ids,) = rows_of_ids(6)
    wanted = model.eval()(ids).logits
    model.save_pretrained(tmp_path)
    loaded = load_on(tiny_model("laguna", num_hidden_layers=2), read_adapter("a", tmp_path)).eval()
    torch.testing.assert_close(loaded(ids).logits, wanted, rtol=0, atol=1e-6)
