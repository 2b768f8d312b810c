"""Whole models merged by a method: tensor by tensor, exactly, and with the statistics that real text gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import LoadedModel, load_model
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import METHODS
from gym_fed.data import encode_rows
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.evaluation import heldout_loss
from gym_fed.evaluation.merge_statistics import (
    SoupLoss,
    StatisticsFile,
    fisher_diagonals,
    input_moments,
    kind_of,
    save_statistics,
)
from gym_fed.soup.building import build
from gym_fed.soup.merging import merge
from gym_fed.soup.method import MergeMethod, TensorTask
from gym_fed.soup.model_merging import merge_models
from gym_fed.soup.parts import parts

SHAPES = {"embed": (4, 8, 5), "layers.0.down": (16, 20), "norm": (16,), "scale": ()}
SPEC = BaseSpec.of({name: torch.zeros(shape) for name, shape in SHAPES.items()}, "tiny")
EXACT = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)
ROWS = [{"text": "to be or not to be"}, {"text": "that is the question"}, {"text": "whether"}]


def noise(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.01 * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.fixture
def updates(tmp_path: Path) -> Iterator[list[DeltaFile]]:
    """Three deltas; the last leaves a tensor out."""
    with ExitStack() as stack:
        opened = []
        for seed in range(3):
            entries = [
                DeltaEntry.of(name, delta, "dense", dtype="float32")
                for name, delta in noise(seed).items()
                if (seed, name) != (2, "norm")
            ]
            write_delta(tmp_path / f"{seed}.gymdelta", entries, SPEC)
            opened.append(stack.enter_context(DeltaFile.open(tmp_path / f"{seed}.gymdelta", SPEC)))
        yield opened


def method(name: str, **settings: Any) -> MergeMethod:
    return build(METHODS.type_of(name), settings, "settings")


def stacked(name: str) -> torch.Tensor:
    values = torch.stack([noise(seed)[name] for seed in range(3)])
    if name == "norm":
        values[2] = 0.0
    return values


@pytest.mark.parametrize(
    "name", ["linear", "task_arithmetic", "ties", "dare_ties", "karcher", "model_stock", "sce"]
)
def test_a_merge_of_files_is_the_merge_of_their_tensors(
    name: str, updates: list[DeltaFile], tmp_path: Path
) -> None:
    report = merge_models(updates, [1.0] * 3, method(name), EXACT, tmp_path / "soup.gymdelta", SPEC)
    assert report.update_norms == tuple(update.norm() for update in updates)
    with DeltaFile.open(tmp_path / "soup.gymdelta", SPEC) as soup:
        assert soup.sha256() == report.sha256
        for tensor, shape in SHAPES.items():
            rows = stacked(tensor).reshape(3, -1, shape[-1] if shape else 1)
            task = TensorTask(tensor, rows, torch.ones(3, dtype=torch.float64))
            wanted = method(name).merge_tensor(task).reshape(shape)
            found = soup.decode(tensor) if tensor in soup else torch.zeros(shape)
            assert torch.equal(found, wanted), tensor


def test_tensors_are_merged_one_after_the_other_and_reported(
    updates: list[DeltaFile], tmp_path: Path
) -> None:
    seen: list[str] = []
    merge_models(
        updates, [1, 2, 3], method("linear"), EXACT, tmp_path / "s.gymdelta", SPEC, on_tensor=seen.append
    )
    assert seen == sorted(SHAPES)


def test_an_update_of_another_base_is_refused(updates: list[DeltaFile], tmp_path: Path) -> None:
    other = BaseSpec.of({name: torch.ones(shape) for name, shape in SHAPES.items()}, "other")
    with pytest.raises(GymError, match=r"0\.gymdelta was made for base") as caught:
        merge_models(updates, [1.0] * 3, method("linear"), EXACT, tmp_path / "s.gymdelta", other)
    assert caught.value.code is ErrorCode.BASE_MISMATCH


def statistics_of(name: str) -> list[dict[str, torch.Tensor]]:
    return [{"layers.0.down": torch.ones(16, 20) if name == "fisher" else torch.eye(20)} for _ in range(3)]


@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [
        ("fisher", {}, "needs fisher diagonals of 3 models, but those of 0"),
        ("linear", {"statistics": statistics_of("fisher")}, "needs no statistics"),
        ("greedy_soup", {}, "selects by held-out data"),
        ("linear", {"score": lambda _: 0.0}, "does not use held-out data"),
        ("linear", {"gate": lambda _: None}, "does not use held-out data"),
    ],
)
def test_what_a_method_needs_is_asked_for_and_what_it_does_not_is_refused(
    name: str, extra: dict[str, Any], message: str, updates: list[DeltaFile], tmp_path: Path
) -> None:
    with pytest.raises(GymError, match=message) as caught:
        merge_models(updates, [1.0] * 3, method(name), EXACT, tmp_path / "s.gymdelta", SPEC, **extra)
    assert caught.value.code is ErrorCode.USAGE
    assert not (tmp_path / "s.gymdelta").exists()


def test_regmean_reports_which_tensors_had_no_moments(updates: list[DeltaFile], tmp_path: Path) -> None:
    statistics = statistics_of("regmean")
    report = merge_models(
        updates, [1.0] * 3, method("regmean"), EXACT, tmp_path / "s.gymdelta", SPEC, statistics=statistics
    )
    assert report.found == {"merged_by_mean": ["embed", "norm", "scale"]}


def test_the_part_of_an_update_is_its_coefficient(updates: list[DeltaFile], tmp_path: Path) -> None:
    path = tmp_path / "s.gymdelta"
    merge_models(updates, [1.0, 2.0, 5.0], method("linear", scale=0.5), EXACT, path, SPEC)
    with DeltaFile.open(path, SPEC) as soup:
        assert parts(updates, soup) == pytest.approx([0.0625, 0.125, 0.3125], rel=1e-4)
        twice = parts([updates[0], updates[0], *updates[1:]], soup)
        assert twice == pytest.approx([0.03125, 0.03125, 0.125, 0.3125], rel=1e-4)


@pytest.fixture(scope="module")
def tiny(tiny_base: Path) -> LoadedModel:
    return load_model(str(tiny_base))


def test_fisher_diagonals_are_the_mean_squares_of_the_gradients_of_each_row(tiny: LoadedModel) -> None:
    found = fisher_diagonals(tiny.model, tiny.tokenizer, ROWS)
    encoded = encode_rows(tiny.tokenizer, ROWS, max_length=256)
    wanted = {name: torch.zeros_like(p) for name, p in tiny.model.named_parameters()}
    for row in encoded:
        tiny.model.zero_grad()
        logits = tiny.model(torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
        likelihood = sum(logits[at, token] for at, token in enumerate(row["labels"][1:]))
        likelihood.backward()
        for name, parameter in tiny.model.named_parameters():
            assert parameter.grad is not None
            wanted[name] += parameter.grad.square() / len(encoded)
    tiny.model.zero_grad()
    assert found.keys() == model_tensors(tiny.model).keys()
    for name, diagonal in found.items():
        torch.testing.assert_close(diagonal, wanted[name], rtol=1e-3, atol=1e-7)
    assert not tiny.model.training


def test_moments_are_those_of_the_linear_layers_that_have_a_name_of_their_own(tiny: LoadedModel) -> None:
    found = input_moments(tiny.model, tiny.tokenizer, ROWS)
    linear = {f"{n}.weight" for n, m in tiny.model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert found.keys() == linear - {"lm_head.weight"}
    seen: list[torch.Tensor] = []
    layer = tiny.model.model.layers[0].mlp.down_proj
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()[0]))
    for row in encode_rows(tiny.tokenizer, ROWS, max_length=256):
        tiny.model(torch.tensor([row["input_ids"]]))
    handle.remove()
    tokens = torch.cat(seen)
    torch.testing.assert_close(
        found["model.layers.0.mlp.down_proj.weight"], tokens.T @ tokens / len(tokens), rtol=1e-4, atol=1e-7
    )


def test_statistics_come_back_from_the_file_and_not_for_another_method(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    found = fisher_diagonals(tiny.model, tiny.tokenizer, ROWS[:1])
    save_statistics(tmp_path / "a.safetensors", "fisher", found)
    back = StatisticsFile(tmp_path / "a.safetensors", kind_of("fisher diagonals"))
    assert set(back) == set(found)
    assert "nonsense" not in back
    assert all(torch.equal(back[name], found[name]) for name in found)
    with pytest.raises(GymError, match="contains fisher diagonals, but input second moments") as caught:
        StatisticsFile(tmp_path / "a.safetensors", kind_of(str(METHODS.type_of("regmean").statistics)))
    assert "--kind moments" in caught.value.hint
    (tmp_path / "b.safetensors").write_bytes(b"nothing of the kind")
    for name, code in (("b", ErrorCode.DATA_INVALID), ("c", ErrorCode.FILE_NOT_FOUND)):
        with pytest.raises(GymError) as caught:
            StatisticsFile(tmp_path / f"{name}.safetensors", "fisher")
        assert caught.value.code is code


def test_statistics_with_a_size_beyond_64_bits_are_refused(tmp_path: Path) -> None:
    tensor = {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}
    header = json.dumps({"__metadata__": {"gym_statistics": "fisher"}, "a": tensor}).encode()
    header += b" " * (-len(header) % 8)
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(GymError, match="a cannot be read") as refused:
        StatisticsFile(tmp_path / "a.safetensors", "fisher")["a"]
    assert refused.value.code is ErrorCode.DATA_INVALID


@pytest.mark.parametrize("name", [n for n in METHODS.names() if METHODS.type_of(n).statistics is not None])
def test_what_a_method_needs_can_be_measured(name: str) -> None:
    assert kind_of(str(METHODS.type_of(name).statistics)) in ("fisher", "moments")
    with pytest.raises(GymError, match="cannot measure 'charm'"):
        kind_of("charm")


def test_the_loss_of_a_combination_is_that_of_the_model_and_leaves_the_base_as_it_was(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    spec = BaseSpec.of(tiny.model, "tiny")
    base = {name: tensor.clone() for name, tensor in model_tensors(tiny.model).items()}
    deltas = []
    with ExitStack() as stack:
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            own = {name: 0.1 * torch.randn(t.shape, generator=generator) for name, t in base.items()}
            path = tmp_path / f"{seed}.gymdelta"
            write_delta(path, [DeltaEntry.of(n, d, "dense", dtype="float32") for n, d in own.items()], spec)
            deltas.append((own, stack.enter_context(DeltaFile.open(path, spec))))
        loss = SoupLoss(tiny.model, tiny.tokenizer, [file for _, file in deltas], ROWS)
        found = loss(torch.tensor([0.25, 0.75], dtype=torch.float64))
    assert all(torch.equal(tensor, base[name]) for name, tensor in model_tensors(tiny.model).items())
    assert loss.of_base() == heldout_loss(tiny.model, tiny.tokenizer, ROWS)
    with torch.no_grad():
        for name, tensor in model_tensors(tiny.model).items():
            tensor.add_(0.25 * deltas[0][0][name] + 0.75 * deltas[1][0][name])
    try:
        assert found == pytest.approx(heldout_loss(tiny.model, tiny.tokenizer, ROWS), rel=1e-5)
    finally:
        with torch.no_grad():
            for name, tensor in model_tensors(tiny.model).items():
                tensor.copy_(base[name])


def test_methods_and_aggregators_write_the_same_mean(updates: list[DeltaFile], tmp_path: Path) -> None:
    merge_models(updates, [1.0] * 3, method("linear"), EXACT, tmp_path / "a.gymdelta", SPEC)
    merge(updates, [1.0] * 3, SoupRecipe(codec=EXACT), tmp_path / "b.gymdelta", SPEC)
    with DeltaFile.open(tmp_path / "a.gymdelta") as a, DeltaFile.open(tmp_path / "b.gymdelta") as b:
        for name in SHAPES:
            torch.testing.assert_close(a.decode(name), b.decode(name))
