"""Recipes for public models: each is loaded as copied, and run for two steps on the tiny sibling of its model.

The recipe stays as it is but for the model's folder, the rows, the device and sizes: batch, steps, lengths, ranks.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.modeling.processors import load_vision_model
from gym_fed.base.models import load_model
from gym_fed.config.recipes import get_recipe, recipes, relocated, sizes_for
from gym_fed.config.train.catalogue import catalogue_entry
from gym_fed.config.train.defaults import LARGE, method_defaults
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import load_config
from gym_fed.core.errors import GymError
from gym_fed.delta.file import DeltaFile
from gym_fed.evaluation.generation import answer
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.training.trainer import Trainer
from tests.support.siblings import SIBLINGS, make_sibling
from tests.support.variants import load

CASES = [
    ("qwen3-lora", "0.6B", "qwen3"),
    ("qwen3-lora", "8B", "qwen3_8b"),
    ("qwen3-qlora", "0.6B", "qwen3"),
    ("qwen3-full", "0.6B", "qwen3"),
    ("qwen3-grpo", "0.6B", "qwen3"),
    ("qwen3-gspo", "8B", "qwen3_8b"),
    ("eco-grpo", "4B", "qwen3"),
    ("agent-dpo", "4B", "qwen3"),
    ("qwen3-moe-lora", "30B-A3B", "qwen3_moe"),
    ("llama3-lora", "1B", "llama3"),
    ("llama3-lora", "8B", "llama3_8b"),
    ("llama3-qlora", "1B", "llama3"),
    ("gemma3-lora", "1B", "gemma3"),
    ("gemma3-vision-lora", "4B", "gemma3_vision"),
    ("mistral-lora", "7B", "mistral"),
    ("mixtral-lora", "8x7B", "mixtral"),
    ("phi-lora", "4-mini", "phi4_mini"),
    ("phi-lora", "3.5-mini", "phi3"),
    ("deepseek-r1-distill-lora", "qwen-1.5B", "deepseek"),
    ("deepseek-r1-distill-lora", "llama-8B", "deepseek_llama"),
    ("llava-lora", "7B", "llava"),
    ("qwen-vl-lora", "2-2B", "qwen2_vl"),
    ("qwen-vl-lora", "2.5-3B", "qwen2_5_vl"),
    ("qwen-vl-lora", "3-2B", "qwen3_vl"),
    ("smollm2-lora", "135M", "smollm2"),
    ("smollm2-full", "135M", "smollm2"),
]
TRIED = [
    case
    for case in CASES
    if case[2] in ("qwen3_moe", "gemma3", "phi4_mini", "deepseek_llama", "llava", "qwen3_vl", "mixtral")
    or case[0] in ("qwen3-qlora", "qwen3-gspo", "agent-dpo")
]
"""In the quick suite: one of each way that a class or a method goes; the others take minutes together."""
QUICK = [case if case in TRIED else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
MODEL_RECIPES = [recipe.name for recipe in recipes() if recipe.file.parent.name == "models"]
GENERAL = ("phi3", "phi4_mini")
"""Classes that packed steps cannot compute, since their frequencies depend on the length (longrope)."""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def reply(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def rows_for(recipe: str, config: TrainingConfig, folder: Path) -> list[dict[str, Any]]:
    """Rows of the kind that the recipe's data set has."""
    if config.algorithm == "dpo":
        pair = {"chosen": [reply("It is 18.")], "rejected": [reply("No idea.")]}
        return [{"prompt": [user(f"What is 9 * {n}?")], **pair} for n in range(4)]
    if config.graders:
        return [{"messages": [user(f"What is 9 * {n}?"), reply(f"9 times.\n#### {9 * n}")]} for n in range(4)]
    if catalogue_entry(config.data[0].name or "").columns.get("images"):
        from PIL import Image

        Image.new("RGB", (28, 28), (200, 20, 20)).save(folder / "red.png")
        messages = [user("<image>Which colour?"), reply("Red."), user("Sure?"), reply("Yes.")]
        return [{"messages": messages, "images": [str(folder / "red.png")]}] * 4
    thought = "<think>\nNine twice.\n</think>\n\n" if recipe.startswith("deepseek") else ""
    return [
        {
            "messages": [
                user(f"What is 9 * {n}?"),
                reply(thought + f"It is {9 * n}."),
                user("Sure?"),
                reply("Yes."),
            ]
        }
        for n in range(4)
    ]


def small(config: TrainingConfig, model: Path, out: Path) -> TrainingConfig:
    """The recipe, in the sizes of a sibling."""
    values = config.model_dump(exclude_unset=True, exclude={"data", "num_train_epochs"})
    rows = 8 if config.graders else 2
    values |= {
        **{"model": str(model), "output_dir": out, "device": "cpu", "num_threads": 1, "max_steps": 2},
        **{"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1, "max_length": 160},
    }
    if "lora" in values:
        values["lora"] |= {"r": 4}
    if config.graders:
        values[config.algorithm] |= {"max_completion_length": 6}
    return TrainingConfig(**values)


@pytest.mark.few(4, "one path for every family")
@pytest.mark.parametrize(("name", "size", "kind"), QUICK)
def test_a_recipe_trains_its_models_sibling_and_what_it_saves_is_used(
    name: str, size: str, kind: str, tmp_path: Path
) -> None:
    recipe = get_recipe(name)
    text, _ = relocated(recipe, tmp_path / "copied.yaml", size=size)
    (tmp_path / "copied.yaml").write_text(text, encoding="utf-8")
    config = load_config(tmp_path / "copied.yaml", TrainingConfig)
    base = make_sibling(kind, tmp_path / "base")
    trainer = Trainer(small(config, base, tmp_path / "run"))
    result = trainer.train(rows_for(name, config, tmp_path))
    assert result.num_tokens > 0 or config.graders
    assert len(result.losses) == 2
    assert all(math.isfinite(loss) for loss in result.losses)
    if SIBLINGS[kind].pictures:
        names = {name for name, value in result.model.named_parameters() if value.requires_grad}
        assert names
        assert not any("vision_tower" in name or "visual" in name for name in names)
        load_vision_model(str(base), dtype="bfloat16", arguments={})
        if kind != "gemma3_vision":
            with pytest.raises(GymError, match="reads images"):
                trainer.export(tmp_path / "tuned.gymdelta", "delta", check=False)
        return
    tuned = load_model(str(tmp_path / "run"), dtype="float32")
    assert isinstance(answer(tuned.model, tuned.tokenizer, "What is 9 * 2?", max_new_tokens=3), str)
    if config.quantization is not None:
        return
    trainer.export(tmp_path / "tuned.gymdelta", "delta", check=False)
    stock = load_model(str(base), dtype="float32").model
    served = MultiVariantModel(stock)
    assert (served.forward == "general") == (kind in GENERAL)
    same_rewards = bool(config.graders)  # where all answers earn the same, nothing is learned
    with DeltaFile.open(tmp_path / "tuned.gymdelta") as delta:
        assert delta.names or same_rewards
    variant = load(tmp_path / "tuned.gymdelta", served.layout)
    assert variant.resident_bytes > 0 or same_rewards
    assert any("experts" in changed for changed in variant.replaced) == (name == "qwen3-moe-lora")


def test_every_recipe_of_a_public_model_is_run_above() -> None:
    assert {name for name, _, _ in CASES} == set(MODEL_RECIPES)


@pytest.mark.few(6, "one path for every family")
@pytest.mark.parametrize("name", MODEL_RECIPES)
def test_every_size_on_every_machine_is_a_valid_config_of_that_model(name: str, tmp_path: Path) -> None:
    recipe = get_recipe(name)
    sizes = sizes_for(recipe.file)
    assert sizes, "its own model is in the table"
    for size, facts in sizes.items():
        for machine in ("cuda", "mps", "cpu"):
            if machine == "mps" and name.endswith("qlora"):
                with pytest.raises(GymError, match="on CUDA and CPU"):
                    relocated(recipe, tmp_path / "c.yaml", size=size, machine=machine)
                continue
            text, _ = relocated(recipe, tmp_path / "c.yaml", size=size, machine=machine)
            (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
            config = load_config(tmp_path / "c.yaml", TrainingConfig)
            assert (config.model, config.device) == (facts["model"], machine)
            before = load_config(recipe.file, TrainingConfig)
            rows = before.per_device_train_batch_size * before.gradient_accumulation_steps
            assert config.per_device_train_batch_size * config.gradient_accumulation_steps == rows
            assert f"# {facts['licence']}" in text
            assert [source.name for source in config.data] == [source.name for source in before.data]


def test_a_size_changes_sft_alone_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    def rate(name: str, size: str) -> float | None:
        text, _ = relocated(get_recipe(name), tmp_path / "c.yaml", size=size)
        (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
        config = load_config(tmp_path / "c.yaml", TrainingConfig)
        return config.learning_rate if "learning_rate" in config.model_fields_set else None

    assert (rate("qwen3-lora", "14b"), rate("qwen3-lora", "32B"), rate("qwen3-gspo", "32B")) == (
        None,
        1e-4,
        None,
    )
    with pytest.raises(GymError, match="--size 5B: qwen3-lora has no such size"):
        rate("qwen3-lora", "5B")
    with pytest.raises(GymError, match="nano-lora has no such size"):
        rate("nano-lora", "4B")
    with pytest.raises(GymError, match="--on tpu: unknown kind"):
        relocated(get_recipe("qwen3-lora"), tmp_path / "c.yaml", machine="tpu")


def test_weights_of_a_copied_recipe_are_those_of_the_sibling_in_its_own_type(tmp_path: Path) -> None:
    """``base_dtype``: the base stays in bfloat16, the adapter learns in float32."""
    config = load_config(get_recipe("qwen3-lora").file, TrainingConfig)
    trainer = Trainer(small(config, make_sibling("qwen3", tmp_path / "base"), tmp_path / "run"))
    model = trainer.train(rows_for("qwen3-lora", config, tmp_path)).model
    kinds = {p.requires_grad: p.dtype for p in model.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.parametrize("name", sorted({case[0] for case in CASES}))
def test_a_recipe_leaves_the_rate_to_the_defaults_or_names_its_source(name: str) -> None:
    file = get_recipe(name).file
    config = load_config(file, TrainingConfig)
    line = next(
        (line for line in file.read_text(encoding="utf-8").splitlines() if "learning_rate:" in line), ""
    )
    rates = {one.key: one.value for one in method_defaults(config, LARGE + 1)}
    rate = rates.get("learning_rate", config.learning_rate)

    assert ("learning_rate" in rates) == (not line)
    assert not line or "our choice" not in line
    assert 5e-6 <= rate <= 2e-4 if config.finetuning == "lora" else 1e-5 <= rate <= 2e-5
