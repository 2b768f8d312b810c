"""A program of ``torch.export``: token ids to logits; only torch reads, compiles and lowers it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gym_fed.export.formats._program import (
    ProgramFormat,
    any_shape,
    archive_file,
    example_inputs,
    without_source_paths,
)
from gym_fed.export.formats.base import Options
from gym_fed.export.program_weights import StoredWeight


class TorchExport(ProgramFormat):
    """A folder with ``model.pt2``, recorded by transformers' exporter."""

    name = "torch_export"
    program = "model.pt2"
    suffix = ".pt2"
    reader = "torch"
    reader_libraries = ("torch.export",)
    tried = "Qwen3, Llama, Mistral, a mixture of experts; sliding windows"
    untried = "Gemma; models larger than gym-nano"

    def write_program(self, model: Any, file: Path, options: Options) -> None:
        import torch
        from transformers.exporters import DynamoConfig
        from transformers.exporters.exporter_dynamo import DynamoExporter

        options.report("recording the forward pass", 0, 0)
        config = DynamoConfig(
            dynamic=True, dynamic_shapes=any_shape(), prefer_deferred_runtime_asserts_over_guards=True
        )
        program, _ = DynamoExporter().export_program(model, example_inputs(), config)
        without_source_paths(program)
        with archive_file(file) as archive:
            torch.export.save(program, archive)

    def weights(self, file: Path) -> Iterator[StoredWeight]:
        import torch

        program = torch.export.load(file)
        for name, values in (*program.state_dict.items(), *program.constants.items()):
            if isinstance(values, torch.Tensor) and values.is_floating_point():
                yield StoredWeight(values.detach(), name)
