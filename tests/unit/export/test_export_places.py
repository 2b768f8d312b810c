"""An export reveals no paths of this machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_tokenizer
from gym_fed.export.formats.base import Options
from gym_fed.export.formats.onnx import Onnx
from gym_fed.export.formats.torch_export import TorchExport
from gym_fed.export.gguf.write import metadata_of
from gym_fed.export.run import export
from gym_fed.export.source import Source, open_source
from tests.support.adapters import sibling
from tests.support.places import places_in


def test_a_record_names_source_and_base_without_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(name: str) -> str:
        source = Source(name, None, None, name)
        assert source.shown_base == source.shown_name
        return source.shown_name

    (tmp_path / "own/base").mkdir(parents=True)
    (tmp_path / "own/ada.gymdelta").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    for folder in ("", f"{tmp_path}/"):
        assert shown(f"{folder}own/base") == shown(f"{folder}own/base/.") == "base"
        assert shown(f"{folder}own/base:ada") == "base:ada"
        assert shown(f"{folder}own/ada.gymdelta") == "ada.gymdelta"
    assert shown(f"{tmp_path}/gone/run") == "run"
    assert shown("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert shown("gym-nano:ada") == "gym-nano:ada"


def test_the_metadata_of_gguf_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    model = SimpleNamespace(config=SimpleNamespace(), generation_config=None)
    source = Source(f"{tmp_path}/run:ada", model, load_tokenizer("gym-nano"), f"{tmp_path}/base")
    said = metadata_of(source, 0)
    assert (said["general.name"], said["general.base_model.0.name"]) == ("run:ada", "base")
    assert str(tmp_path) not in str(said)


@pytest.mark.parametrize("format", ["torchscript", "huggingface"])
def test_an_export_names_no_folder_of_this_machine(tmp_path: Path, format: str) -> None:
    base = sibling("Llama", tmp_path / "base")
    export(open_source(str(base)), format, tmp_path / "made/out", Options(), check=False)
    assert places_in(tmp_path / "made/out", base, tmp_path) == []


def test_a_trace_without_its_places_is_read_by_torch_and_is_aligned(tmp_path: Path) -> None:
    source = open_source(str(sibling("Llama", tmp_path / "base")))
    ids = torch.arange(10).reshape(2, 5)
    wanted = source.model(input_ids=ids).logits
    export(source, "torchscript", tmp_path / "model.pt", Options(), check=False)
    read: Any = torch.jit.load(tmp_path / "model.pt")  # type: ignore[no-untyped-call]
    torch.testing.assert_close(read(ids, torch.ones_like(ids))["logits"], wanted, rtol=1e-5, atol=1e-6)
    reader = torch._C.PyTorchFileReader(str(tmp_path / "model.pt"))
    tensors = [name for name in reader.get_all_records() if name.startswith(("data/", "constants/"))]
    offsets = [reader.get_record_offset(name) for name in tensors if name[-1].isdigit()]
    assert offsets
    assert not any(offset % 64 for offset in offsets)


class Small(torch.nn.Module):
    def forward(self, input_ids: Any) -> Any:
        return torch.relu(input_ids.float()) + 1


def test_a_program_of_torch_export_names_no_folder_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.exporters.exporter_dynamo import DynamoExporter

    made = torch.export.export(Small(), (torch.ones(2, 3, dtype=torch.int64),))
    assert any("stack_trace" in node.meta for node in made.graph.nodes)
    monkeypatch.setattr(DynamoExporter, "export_program", lambda *_: (made, None))
    TorchExport().write_program(None, tmp_path / "model.pt2", Options())
    assert torch.export.load(tmp_path / "model.pt2").module()(torch.ones(2, 3, dtype=torch.int64)).sum() == 12
    assert places_in(tmp_path) == []


def test_a_program_of_onnx_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    import onnx_ir

    def node(name: str) -> onnx_ir.Node:
        place = f'File "{tmp_path}/model.py", line 3'
        keys = {"pkg.torch.onnx.stack_trace": place, "namespace": "kept"}
        return onnx_ir.Node("", "Relu", [], name=name, doc_string=place, metadata_props=keys)

    own = onnx_ir.Graph([], [], nodes=[node("b")], opset_imports={"": 20}, name="f")
    function = onnx_ir.Function("own", "f", graph=own, attributes=[])
    graph = onnx_ir.Graph([], [], nodes=[node("a")], opset_imports={"": 20, "own": 1}, name="g")
    program = onnx_ir.Model(graph, ir_version=10, functions=[function])
    Onnx().save(program, tmp_path / "model.onnx")
    assert b"kept" in (tmp_path / "model.onnx").read_bytes()
    assert places_in(tmp_path) == []
