"""Read exported programs with their own runtimes and the tokenizer's files, without importing transformers."""

from __future__ import annotations

import json
import sys
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from gym_fed.core.bounded.chat import render_chat
from gym_fed.export.readers.reading import SPECIAL, LoadedExport

LIBRARIES = ("torch", "tokenizers")
"""Libraries that the reading process imports before its job arrives."""
PADDING = 3


def load(parts: dict[str, Any]) -> LoadedExport:
    """Load ``parts["program"]`` with ``parts["runtime"]``, and the tokenizer of ``parts["model"]``."""
    program = RUNTIMES[parts["runtime"]](Path(parts["program"]), Path(parts["model"]))
    assert "transformers" not in sys.modules
    return program


class ProgramExport(LoadedExport):
    """A program from token ids to logits.

    Every second call is padded, in a batch of ``rows``, to detect a program that works only for one shape.

    Args:
        folder: The folder with the tokenizer's files.
    """

    is_program = True
    rows: ClassVar[int] = 2

    def __init__(self, folder: Path) -> None:
        self._tokens = Tokens(folder)
        self._readings = 0

    @abstractmethod
    def run(self, ids: Any, mask: Any) -> Any:
        """Run on numpy ``[batch, length] int64``, and return ``[batch, length, vocabulary] float32``."""

    def ids(self, prompt: str) -> list[int]:
        return self._tokens.ids(prompt)

    def text_ids(self, text: str) -> list[int]:
        return self._tokens.text_ids(text)

    def special_ids(self) -> dict[str, int]:
        return self._tokens.special_ids()

    def chat_template(self) -> str | None:
        return self._tokens.chat_template()

    def logits(self, ids: list[int]) -> Any:
        import numpy as np
        import torch

        self._readings += 1
        length = len(ids)
        padded = self._readings % 2 == 0
        shape = (self.rows, length + PADDING) if padded else (1, length)
        rows, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        rows[:-1, :length], mask[:-1, :length] = ids, 1
        rows[-1, shape[1] - length :], mask[-1, shape[1] - length :] = ids, 1
        output = self.run(rows, mask)[-1, shape[1] - length :]
        return torch.tensor(output, dtype=torch.float32)


class OnnxProgram(ProgramExport):
    """A program on the CPU, with as many threads as torch has."""

    def __init__(self, program: Path, folder: Path) -> None:
        import onnxruntime
        import torch

        super().__init__(folder)
        onnxruntime.disable_telemetry_events()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session = onnxruntime.InferenceSession(program, options, providers=["CPUExecutionProvider"])

    def run(self, ids: Any, mask: Any) -> Any:
        return self._session.run(["logits"], {"input_ids": ids, "attention_mask": mask})[0]


class OpenVinoProgram(ProgramExport):
    """A program on the CPU in float32, with as many threads as torch has. The runtime alone sends no telemetry."""

    def __init__(self, program: Path, folder: Path) -> None:
        import openvino
        import torch

        super().__init__(folder)
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        self._compiled = openvino.Core().compile_model(str(program), "CPU", settings)

    def run(self, ids: Any, mask: Any) -> Any:
        return self._compiled({"input_ids": ids, "attention_mask": mask})["logits"]


class ExecuTorchProgram(ProgramExport):
    """A program in ExecuTorch's own threads, one text at a time."""

    rows = 1

    def __init__(self, program: Path, folder: Path) -> None:
        from executorch.runtime import Runtime

        super().__init__(folder)
        self._forward = Runtime.get().load_program(program).load_method("forward")

    def run(self, ids: Any, mask: Any) -> Any:
        import torch

        return self._forward.execute([torch.from_numpy(ids), torch.from_numpy(mask)])[0].numpy()


class TorchProgram(ProgramExport):
    """A traced or exported program."""

    def __init__(self, program: Path, folder: Path) -> None:
        import torch

        super().__init__(folder)
        if program.suffix == ".pt2":
            self._forward: Any = torch.export.load(program).module()
        else:
            self._forward = torch.jit.load(program)  # type: ignore[no-untyped-call]

    def run(self, ids: Any, mask: Any) -> Any:
        import torch

        with torch.inference_mode():
            output = self._forward(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
        return output["logits"].numpy()


RUNTIMES: dict[str, Callable[[Path, Path], ProgramExport]] = {
    "onnxruntime": OnnxProgram,
    "openvino": OpenVinoProgram,
    "executorch": ExecuTorchProgram,
    "torch": TorchProgram,
}
"""The readers by name of their runtime, which is a format's ``reader``."""


class Tokens:
    """The tokenizer of a folder, without transformers: ``tokenizers`` and the chat template.

    Args:
        folder: A folder with ``tokenizer.json``; the chat template is in ``chat_template.jinja`` or
            ``tokenizer_config.json``.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._config: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        template = folder / "chat_template.jinja"
        self._template = (
            template.read_text("utf-8") if template.is_file() else self._config.get("chat_template")
        )

    def ids(self, prompt: str) -> list[int]:
        """See ``LoadedExport.ids``."""
        if self._template is None:
            return list(self._tokenizer.encode(prompt).ids)
        text = rendered(str(self._template), prompt, self._special())
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text_ids(self, text: str) -> list[int]:
        """See ``LoadedExport.text_ids``."""
        return list(self._tokenizer.encode(text).ids)

    def special_ids(self) -> dict[str, int]:
        """See ``LoadedExport.special_ids``."""
        texts = {name: self._special().get(f"{name}_token") for name in SPECIAL}
        numbers = {
            name: self._tokenizer.token_to_id(text) for name, text in texts.items() if text is not None
        }
        return {name: number for name, number in numbers.items() if number is not None}

    def chat_template(self) -> str | None:
        """See ``LoadedExport.chat_template``."""
        return self._template if isinstance(self._template, str) else None

    def _special(self) -> dict[str, str]:
        return {
            key: value if isinstance(value, str) else value["content"]
            for key, value in self._config.items()
            if key.endswith("_token") and value is not None and not isinstance(value, bool)
        }


def rendered(template: str, prompt: str, special: dict[str, str]) -> str:
    """Render a user's message with a chat template, up to where the answer begins."""
    messages, tokens = [{"role": "user", "content": prompt}], dict[str, Any](special)
    return render_chat([messages], chat_template=template, add_generation_prompt=True, **tokens)[0][0]
