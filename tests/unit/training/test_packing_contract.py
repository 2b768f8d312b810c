"""Packed rows have the loss and gradient of single ones for each listed architecture; the others are refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from gym_fed.base.modeling.attention_state import ISOLATES_ROWS, carried_state
from gym_fed.base.models import load_tokenizer
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.training.rows.packing import pack_best_fit
from gym_fed.training.run.checks import check_config
from gym_fed.training.trainer import Trainer
from tests.support.quick import quick
from tests.support.tiny_models import farthest, gradients, rows_of_ids, tiny_config, tiny_model

USUAL = (
    *(
        "cohere",
        "deepseek_v2",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "granite",
        "llama",
        "mistral",
    ),
    *("mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "starcoder2"),
)
RECURRENT = (
    *(
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "mamba",
    ),
    *(
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
    ),
    *("xlstm", "zamba", "zamba2"),
)
LAYERS = {"lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}}


def nll(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed over the labelled tokens of ``[1, t]``."""
    return torch.nn.functional.cross_entropy(
        logits[0, :-1].float(), labels[0, 1:], ignore_index=-100, reduction="sum"
    )


def losses_apart(model: Any, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [nll(model(input_ids=row, use_cache=False).logits, row) for row in rows]


def losses_packed(model: Any, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same, of rows that share one sequence as TRL's collator lays it out."""
    encoded = [{"input_ids": row[0].tolist(), "labels": row[0].tolist()} for row in rows]
    (packed,) = pack_best_fit(encoded, sum(row.shape[1] for row in rows))
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([packed])
    labels = batch.pop("labels")
    assert labels.shape[0] == 1
    logits = model(**batch, use_cache=False).logits
    starts = [0, *torch.tensor(packed["seq_lengths"]).cumsum(0).tolist()]
    found = {
        tuple(batch["input_ids"][0, start:end].tolist()): nll(logits[:, start:end], labels[:, start:end])
        for start, end in pairwise(starts)
    }
    return [found[tuple(row[0].tolist())] for row in rows]


@pytest.mark.parametrize("kind", quick(sorted(ISOLATES_ROWS), *USUAL))
def test_each_row_of_a_listed_architecture_has_the_loss_and_the_gradient_it_has_alone(kind: str) -> None:
    model, rows = tiny_model(kind), rows_of_ids(7, 5, 9)
    assert carried_state(model.config) is None
    apart = losses_apart(model, rows)
    torch.stack(apart).sum().backward()
    expected = gradients(model)
    packed = losses_packed(model, rows)
    torch.stack(packed).sum().backward()
    assert [x.item() for x in packed] == pytest.approx([x.item() for x in apart], abs=1e-4)
    assert farthest(gradients(model), expected) < 1e-4


@pytest.mark.parametrize("kind", ["opt", "bloom", "mpt", "falcon", "gpt_oss"])
def test_an_attention_architecture_whose_packed_rows_see_each_other_is_not_listed(kind: str) -> None:
    model, rows = tiny_model(kind), rows_of_ids(7, 5, 9)
    assert carried_state(model.config) is None
    assert kind not in ISOLATES_ROWS
    with torch.no_grad():
        apart, packed = losses_apart(model, rows), losses_packed(model, rows)
    assert max(abs(float(a - b)) for a, b in zip(apart, packed, strict=True)) > 1e-2


@pytest.mark.parametrize("kind", RECURRENT)
def test_state_besides_attention_is_found_in_the_config(kind: str) -> None:
    config = tiny_config(kind, **LAYERS.get(kind, {})) if kind in LAYERS else default_config(kind)
    assert carried_state(config)


def default_config(kind: str) -> Any:
    from transformers import CONFIG_MAPPING

    if kind == "lfm2":
        return tiny_config(kind)
    return CONFIG_MAPPING[kind]()


def folder_of(kind: str, folder: Path) -> Path:
    """A model folder without weights: what is refused is refused before they are read."""
    values = tiny_config(kind).to_diff_dict()
    values.pop("layers_block_type", None)  # transformers writes RecurrentGemma's, and cannot read it
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**values, "model_type": kind}))
    load_tokenizer("gym-nano").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["mamba", "lfm2", "qwen3_next", "recurrent_gemma", "falcon_h1"])
@pytest.mark.parametrize(
    "changes",
    [
        {"packing": True},
        {"packing": "bfd"},
        {"algorithm": "pretrain"},
        {"algorithm": "pretrain", "packing": "bfd"},
    ],
)
def test_packing_of_a_model_with_state_is_refused_before_it_is_loaded(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = folder_of(kind, tmp_path / "model")
    with pytest.raises(GymError, match=rf"packing: (true|bfd): {kind} carries state") as caught:
        Trainer(TrainingConfig(model=str(model), output_dir=tmp_path / "run", **changes))
    assert (caught.value.code, caught.value.hint) == (ErrorCode.CONFIG_INVALID, "set packing: false")
    check_config(TrainingConfig(model=str(model), **{**changes, "packing": False}))


@pytest.mark.parametrize("kind", ["opt", "bloom", "falcon"])
def test_bfd_of_an_architecture_that_is_not_listed_is_refused_and_true_is_not(
    kind: str, tmp_path: Path
) -> None:
    model = str(folder_of(kind, tmp_path / "model"))
    with pytest.raises(GymError, match=rf"packing: bfd: {kind} is not among the architectures") as caught:
        check_config(TrainingConfig(model=model, packing="bfd"))
    assert "packing: true" in caught.value.hint
    check_config(TrainingConfig(model=model, packing=True))
    check_config(TrainingConfig(model=model, algorithm="pretrain"))


def test_the_base_of_an_adapter_decides(tmp_path: Path) -> None:
    folder_of("mamba", tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(
        f'{{"base_model_name_or_path": "{tmp_path / "base"}", "peft_type": "LORA"}}'
    )
    with pytest.raises(GymError, match="mamba carries state"):
        check_config(TrainingConfig(model=str(tmp_path / "adapter"), finetuning="full", packing="bfd"))


def test_a_model_in_memory_is_checked_before_the_first_step(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("gym-nano")
    model = tiny_model("mamba", vocab_size=len(tokenizer))
    config = TrainingConfig(
        output_dir=tmp_path / "run", packing="bfd", max_steps=1, device="cpu", num_threads=1
    )
    with pytest.raises(GymError, match="packing: bfd: mamba carries state"):
        Trainer(config, model=model, tokenizer=tokenizer).train(generate("copy", 8))
    assert not (tmp_path / "run").exists()


def test_bfd_of_a_mixture_of_depths_is_refused() -> None:
    with pytest.raises(
        GymError, match="routers of mixture_of_depths select from the tokens of all packed rows"
    ):
        check_config(TrainingConfig(model="gym-nano", packing="bfd", mixture_of_depths={}))
