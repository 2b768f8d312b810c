"""ExecuTorch, torch's runtime for phones and boards: token ids to logits, lowered to XNNPACK."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.export.formats._program import ProgramFormat, example_inputs
from gym_fed.export.formats.base import Options, Tolerance

MAX_TOKENS = 512
"""Maximum number of tokens of a text; the program's memory is planned for this length."""


class ExecuTorch(ProgramFormat):
    """A ``model.pte`` for one text at a time with at most ``MAX_TOKENS`` tokens."""

    name = "executorch"
    program = "model.pte"
    suffix = ".pte"
    requires = ("executorch",)
    install = "pip install executorch==1.5.1"
    reader = "executorch"
    tolerance = Tolerance(max=1e-3)
    tried = "Llama, where executorch is installed"
    untried = "Qwen3, Mistral, Gemma"

    def write_program(self, model: Any, file: Path, options: Options) -> None:
        import torch
        from transformers.exporters import ExecutorchConfig
        from transformers.exporters.exporter_executorch import ExecutorchExporter

        options.report("recording the forward pass", 0, 0)
        length = {1: torch.export.Dim("length", max=MAX_TOKENS)}
        config = ExecutorchConfig(
            dynamic=True,
            dynamic_shapes={"input_ids": length, "attention_mask": length},
            prefer_deferred_runtime_asserts_over_guards=True,
        )
        program, _ = ExecutorchExporter().export_program(model, example_inputs(batch=1), config)
        options.report("writing the program", 0, 0)
        ExecutorchExporter.save_program(program, file)
