"""An adapter that PEFT saved is found in its own model, also where transformers renames weights of old checkpoints."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import transformers_weight_conversion as weight_conversion

from gym_fed.base.modeling.adapter_names import own_names_kept
from gym_fed.base.modeling.adapters import load_on, read_adapter
from gym_fed.base.modeling.unadapted import unadapted_names
from tests.support.tiny_models import rows_of_ids, tiny_model


@pytest.mark.parametrize(
    ("targets", "save"),
    [([], {}), ([], {"save_embedding_layers": True}), (["embed_tokens"], {})],
    ids=["factors only", "with the embeddings", "on the embeddings"],
)
def test_an_adapter_of_a_model_whose_names_match_an_old_pattern_is_loaded_as_it_was_saved(
    targets: list[str], save: dict[str, Any], tmp_path: Path
) -> None:
    base = tiny_model("laguna", num_hidden_layers=2)
    excluded = unadapted_names(base)
    model = get_peft_model(
        base, LoraConfig(r=2, target_modules=["gate_proj", "o_proj", *targets], exclude_modules=excluded)
    )
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            torch.nn.init.normal_(weight, std=0.1)
    names = [name for name, _ in model.named_parameters() if "shared_experts" in name and "lora_B" in name]
    assert names, "the layer whose name an old pattern matches has an adapter"
    (ids,) = rows_of_ids(6)
    wanted = model.eval()(ids).logits
    model.save_pretrained(tmp_path, **save)
    loaded = load_on(tiny_model("laguna", num_hidden_layers=2), read_adapter("a", tmp_path)).eval()
    torch.testing.assert_close(loaded(ids).logits, wanted, rtol=0, atol=1e-6)


def test_two_threads_that_load_adapters_at_once_leave_peft_as_it_was() -> None:
    original = weight_conversion.convert_peft_adapter_state_dict_for_transformers
    entered, second_tried = threading.Event(), threading.Event()

    def first() -> None:
        with own_names_kept():
            entered.set()
            second_tried.wait(0.2)  # a second one that does not wait enters meanwhile

    def second() -> None:
        entered.wait()
        with own_names_kept():
            second_tried.set()
            threads[0].join()

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert weight_conversion.convert_peft_adapter_state_dict_for_transformers is original
