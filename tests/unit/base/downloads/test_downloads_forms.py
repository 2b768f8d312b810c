"""Forms of repositories that load after the download: mixtures of experts, tied heads, shards, adapters with a base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.downloads import DownloadOffer, ensure_model, missing_model
from gym_fed.base.downloads.offer import offer_model
from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.core.errors import GymError
from tests.support.model_hub import ModelHub, Repo
from tests.unit.base.downloads.conftest import NAME

_SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def yes(offer: DownloadOffer) -> bool:
    return True


def _sibling(kind: str, folder: Path) -> Path:
    """A tiny random model of a published class, saved as its publisher does."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    tokenizer = load_tokenizer("gym-nano")
    size = {"vocab_size": len(tokenizer), **_SHAPE}
    model: Any
    if kind == "mixture of experts":
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**size, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
        )
    else:
        model = LlamaForCausalLM(LlamaConfig(**size, tie_word_embeddings=kind == "tied"))
    model.save_pretrained(folder, max_shard_size="20KB" if kind == "sharded" else "5GB")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["mixture of experts", "tied", "sharded"])
def test_forms_load_after_the_download(hub: ModelHub, tmp_path: Path, kind: str) -> None:
    folder = _sibling(kind, tmp_path / "published")
    shards = [path.name for path in folder.glob("model-*-of-*.safetensors")]
    assert (len(shards) > 1) is (kind == "sharded")
    hub.repos["acme/sibling"] = Repo.of(folder)
    fetched = ensure_model("acme/sibling", consent=yes)
    assert set(shards) == {path.name for path in fetched.glob("model-*-of-*.safetensors")}
    ids = torch.arange(6)[None]
    with torch.no_grad():
        ours = load_model("acme/sibling").model(ids).logits
        theirs = load_model(str(folder)).model(ids).logits
    assert torch.equal(ours, theirs)


def test_shards_that_the_index_does_not_name_are_left(hub: ModelHub, tmp_path: Path) -> None:
    repo = hub.repos["acme/sibling"] = Repo.of(_sibling("sharded", tmp_path / "published"))
    repo.files["model-00009-of-00009.safetensors"] = b"old"
    repo.files["consolidated.safetensors"] = b"copy"
    paths = {file.path for file in offer_model("acme/sibling").files}
    assert not paths & {"model-00009-of-00009.safetensors", "consolidated.safetensors"}


def test_a_missing_shard_is_known_before_the_download(hub: ModelHub, tmp_path: Path) -> None:
    repo = hub.repos["acme/sibling"] = Repo.of(_sibling("sharded", tmp_path / "published"))
    shard = next(path for path in sorted(repo.files) if "-of-" in path)
    del repo.files[shard]
    with pytest.raises(GymError, match=f"lists '{shard}', which is not in the repository"):
        ensure_model("acme/sibling", consent=yes)


def test_a_shard_that_is_gone_from_the_cache_makes_a_model_missing(hub: ModelHub, tmp_path: Path) -> None:
    hub.repos["acme/sibling"] = Repo.of(_sibling("sharded", tmp_path / "published"))
    folder = ensure_model("acme/sibling", consent=yes)
    shard = next(iter(folder.glob("model-*-of-*.safetensors")))
    blob = shard.resolve()
    size = blob.stat().st_size
    shard.unlink()
    blob.unlink()
    assert missing_model("acme/sibling")
    offers: list[DownloadOffer] = []
    ensure_model("acme/sibling", consent=lambda offer: offers.append(offer) or True)
    assert offers[0].missing_bytes == size
    assert "are missing" in offers[0].describe()
    assert shard.is_file()


def test_an_adapter_brings_its_base_by_an_offer_of_its_own(
    hub: ModelHub, tiny_base: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    peft = get_peft_model(load_model(str(tiny_base)).model, LoraConfig(r=2, target_modules=["q_proj"]))
    peft.save_pretrained(tmp_path / "adapter")
    settings = tmp_path / "adapter" / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"base_model_name_or_path": NAME}))
    hub.repos["acme/adapter"] = Repo.of(tmp_path / "adapter")
    offered: list[str] = []
    ensure_model("acme/adapter", consent=lambda offer: offered.append(offer.name) or True)
    assert offered == ["acme/adapter", NAME]
    assert load_model("acme/adapter").model.peft_config
    assert not missing_model("acme/adapter")
