"""Bases in 4 and 8 bits: an adapter learns on them, they are smaller, and the adapter fits the base as it was."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import TUNING
from gym_fed.evaluation import heldout_loss
from gym_fed.training.model.loading import load_for_training
from gym_fed.training.model.lora_starts import loftq
from gym_fed.training.model.packed_layers import packed_by
from gym_fed.training.planning.memory import _quantised_bytes
from gym_fed.training.trainer import Trainer
from tests.support.tuning_cases import ROWS, config, train

pytest.importorskip("bitsandbytes")

CASES: dict[str, dict[str, Any]] = {
    "nf4": {"finetuning": "lora", "quantization": {"bits": 4}},
    "fp4": {"finetuning": "lora", "quantization": {"quant_type": "fp4", "double_quant": False}},
    "int8": {"finetuning": "lora", "quantization": {"bits": 8}},
    "dora": {"finetuning": "lora", "lora": {"use_dora": True}, "quantization": {}},
    "loftq": {
        "finetuning": "lora",
        "lora": {"init_lora_weights": "loftq", "loftq_iter": 2},
        "quantization": {},
    },
    "oft": {"finetuning": "oft", "oft": {"oft_block_size": 4}, "learning_rate": 5e-2, "quantization": {}},
    "vera": {"finetuning": "vera", "vera": {"r": 16}, "learning_rate": 2e-1, "quantization": {"bits": 8}},
}


def logits(loaded: Any) -> torch.Tensor:
    with torch.no_grad():
        return loaded.model(loaded.tokenizer("hello world", return_tensors="pt")["input_ids"]).logits


@pytest.mark.few(4, "one path for every method")
@pytest.mark.parametrize("name", CASES)
def test_the_loss_falls_and_the_adapter_fits_the_original_base(
    tiny_base: Path, tmp_path: Path, name: str
) -> None:
    result = train(tiny_base, tmp_path / "run", **{"learning_rate": 2e-2, **CASES[name]})
    plain = load_model(str(tiny_base))
    before = heldout_loss(plain.model, plain.tokenizer, ROWS)
    assert heldout_loss(result.model, result.tokenizer, ROWS) < before - 0.005
    again = load_model(str(tmp_path / "run"))
    assert not getattr(again.model.get_base_model(), "is_quantized", False)
    assert heldout_loss(again.model, again.tokenizer, ROWS) < before - 0.005
    assert float((logits(again) - logits(result)).abs().max()) < 0.2
    learnt = {value.dtype for value in result.model.parameters() if value.requires_grad}
    assert learnt == {torch.float32}, "adapters keep dtype"
    if name == "loftq":
        values = json.loads((tmp_path / "run/adapter_config.json").read_text())
        assert (values["r"], values["lora_alpha"], values["init_lora_weights"]) == (16, 32, True)


@pytest.mark.parametrize(("bits", "share"), [(4, 0.30), (8, 0.45)])
def test_a_base_in_few_bits_takes_less_room(bits: int, share: float) -> None:
    def room(model: Any) -> int:
        linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        tied = model.get_output_embeddings()
        return sum(m.weight.numel() * m.weight.element_size() for m in linear if m is not tied)

    chosen = TrainingConfig(model="gym-nano", finetuning="lora", quantization={"bits": bits}, device="cpu")
    quantised, _ = load_for_training(chosen)
    plain = load_model("gym-nano").model
    assert room(quantised) < share * room(plain)


@pytest.mark.parametrize("iterations", [1, 4])
def test_loftq_makes_up_for_what_quantising_lost(tiny_base: Path, iterations: int) -> None:
    from bitsandbytes.functional import dequantize_4bit

    chosen = TrainingConfig(
        model="gym-nano",
        finetuning="lora",
        lora={"r": 24, "init_lora_weights": "loftq", "loftq_iter": iterations},
        quantization={},
        device="cpu",
    )
    plain = load_model("gym-nano").model
    nf4, _ = load_for_training(chosen)
    adapted = TUNING.new("lora").prepare(load_for_training(chosen)[0], chosen)
    for name, layer in adapted.get_base_model().named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        weight = plain.get_submodule(name).weight
        held = nf4.get_submodule(name).weight
        base = layer.get_base_layer().weight
        b_a = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
        lost = weight - dequantize_4bit(held.data, held.quant_state)
        left = weight - (dequantize_4bit(base.data, base.quant_state) + b_a)
        assert float(left.detach().norm()) < 0.9 * float(lost.detach().norm())
        if iterations == 1:
            best = torch.linalg.svdvals(lost.float())[24:].norm()
            assert float(left.detach().norm()) == pytest.approx(float(best.detach()), rel=1e-3)


def test_a_model_in_memory_that_is_not_quantised_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    loaded = load_model(str(tiny_base))
    trainer = Trainer(
        config(tmp_path / "run", **CASES["nf4"]), model=loaded.model, tokenizer=loaded.tokenizer
    )
    with pytest.raises(GymError, match="the model in memory is not quantised"):
        trainer.train(ROWS)


def marked(tiny_base: Path, folder: Path, method: str) -> str:
    """The tiny model's folder with the mark of a quantisation method."""
    shutil.copytree(tiny_base, folder)
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": method, "bits": 4}
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize(
    ("method", "package"),
    [("aqlm", "aqlm"), ("eetq", "kernels")],
)
def test_a_model_quantised_elsewhere_is_held_against_what_is_installed(
    tiny_base: Path, tmp_path: Path, method: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = marked(tiny_base, tmp_path / "model", method)
    with pytest.raises(GymError, match=f"is quantised by {method}|quantised by {method}") as caught:
        Trainer(TrainingConfig(model=name, finetuning="full"))
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    if importlib.util.find_spec(package) is None:
        with pytest.raises(GymError, match=f"needs the package {package}") as caught:
            Trainer(TrainingConfig(model=name, finetuning="lora"))
        assert caught.value.code is ErrorCode.MISSING_DEPENDENCY
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    if not torch.cuda.is_available():
        with pytest.raises(GymError, match="needs a CUDA GPU"):
            Trainer(TrainingConfig(model=name, finetuning="lora"))
    with pytest.raises(GymError, match=f"is already quantised by {method}"):
        Trainer(TrainingConfig(model=name, finetuning="lora", quantization={}))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_packed_weights_stay_packed_where_gptqmodel_runs_them(
    tiny_base: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = marked(tiny_base, tmp_path / "model", method)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(GymError, match=f"quantised by {method}"):
        Trainer(TrainingConfig(model=name, finetuning="full"))
    with pytest.raises(GymError, match=f"is already quantised by {method}"):
        Trainer(TrainingConfig(model=name, finetuning="lora", quantization={}))


def test_a_model_stored_by_hqq_is_refused_since_transformers_cannot_load_it(
    tiny_base: Path, tmp_path: Path
) -> None:
    name = marked(tiny_base, tmp_path / "model", "hqq")
    with pytest.raises(GymError, match=r"quantised by hqq, which transformers 5\.23 cannot load"):
        Trainer(TrainingConfig(model=name, finetuning="lora"))


def test_an_unknown_method_is_refused_by_name(tiny_base: Path, tmp_path: Path) -> None:
    name = marked(tiny_base, tmp_path / "model", "quip9")
    with pytest.raises(GymError, match="is quantised by quip9, which gym train does not support"):
        Trainer(TrainingConfig(model=name, finetuning="lora"))


@pytest.mark.parametrize("key", ["quant_type", "double_quant", "compute_dtype"])
def test_settings_of_4_bits_are_refused_with_8(key: str) -> None:
    value = {"quant_type": "fp4", "double_quant": False, "compute_dtype": "bfloat16"}[key]
    with pytest.raises(ValueError, match=f"{key} applies only to 4-bit bitsandbytes"):
        TrainingConfig(finetuning="lora", quantization={"bits": 8, key: value})


def test_loftq_quantises_again_what_the_factors_do_not_hold() -> None:
    """Algorithm 1 alternates: Q of ``W - BA`` and not of W, else every pass finds what the first did."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn.modules import Params4bit

    torch.manual_seed(0)
    weight = torch.randn(64, 8) @ torch.randn(8, 64) + 0.1 * torch.randn(64, 64)
    like = Params4bit(weight, requires_grad=False, quant_type="nf4").to("cpu")
    left = []
    for iterations in (1, 2, 5):
        quantised, a, b = loftq(weight, like, 16, iterations)
        held = dequantize_4bit(quantised.data, quantised.quant_state).float()
        left.append(float((weight - held - b @ a).norm()))
        if iterations == 2:
            _, first_a, first_b = loftq(weight, like, 16, 1)
            again = Params4bit(weight - first_b @ first_a, requires_grad=False, quant_type="nf4").to("cpu")
            assert torch.equal(held, dequantize_4bit(again.data, again.quant_state).float())
    assert left[1] < left[0]
    assert left[2] < 0.98 * left[0]


@pytest.fixture(scope="module")
def wide_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose layers have whole groups of weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    folder = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer = load_tokenizer("gym-nano")
    set_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("method", ["hqq", "torchao"])
def test_an_adapter_learns_on_layers_that_are_packed_after_loading(
    wide_base: Path, tmp_path: Path, method: str, bits: int
) -> None:
    pytest.importorskip(method)
    section = {"method": method, "bits": bits, "group_size": 16}
    result = train(wide_base, tmp_path / "run", finetuning="lora", learning_rate=2e-2, quantization=section)
    assert packed_by(result.model.get_base_model()) == method
    plain = load_model(str(wide_base))
    before = heldout_loss(plain.model, plain.tokenizer, ROWS)
    assert heldout_loss(result.model, result.tokenizer, ROWS) < before
    again = load_model(str(tmp_path / "run"))
    assert packed_by(again.model.get_base_model()) is None
    assert heldout_loss(again.model, again.tokenizer, ROWS) < before


def test_fewer_bits_of_hqq_take_less_room_and_as_much_as_is_planned(tmp_path: Path) -> None:
    pytest.importorskip("hqq")
    sizes = {}
    for bits in (2, 4, 8):
        section = {"method": "hqq", "bits": bits, "group_size": 16}
        chosen = TrainingConfig(model="gym-nano", finetuning="lora", quantization=section, device="cpu")
        model, _ = load_for_training(chosen)
        layers = [module for module in model.modules() if type(module).__name__ == "HQQLinear"]
        held = [
            t for layer in layers for t in (layer.W_q, *layer.meta.values()) if isinstance(t, torch.Tensor)
        ]
        weights = sum(layer.in_features * layer.out_features for layer in layers)
        sizes[bits] = sum(tensor.nbytes for tensor in held) / weights
        assert sizes[bits] == pytest.approx(_quantised_bytes(chosen), rel=0.05)
    assert sizes[2] < sizes[4] < sizes[8]


def test_methods_and_bits_that_no_library_has_are_refused_with_the_reason() -> None:
    for method in ("quanto", "aqlm", "eetq", "gptq", "awq"):
        with pytest.raises(ValueError, match=f"{method} is not supported"):
            TrainingConfig(finetuning="lora", quantization={"method": method})
    with pytest.raises(ValueError, match=r"bits: bitsandbytes supports 4, 8, not 3; use hqq or torchao"):
        TrainingConfig(finetuning="lora", quantization={"bits": 3})
    with pytest.raises(ValueError, match="group_size applies only to hqq and torchao"):
        TrainingConfig(finetuning="lora", quantization={"group_size": 32})


def test_packed_layers_are_refused_with_other_methods_and_groups_that_do_not_fit(
    tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    section = {"method": "torchao", "bits": 3, "group_size": 56}
    name = str(tiny_base)
    with pytest.raises(GymError, match="tested only with plain LoRA"):
        Trainer(TrainingConfig(model=name, finetuning="vera", quantization=section))
    chosen = TrainingConfig(model=name, finetuning="lora", quantization=section, device="cpu")
    with pytest.raises(GymError, match=r"group_size: 56 does not divide model\.layers\.0"):
        load_for_training(chosen)
