"""The base class of formats that store a program from token ids and mask to logits, for any batch and length."""

from __future__ import annotations

import copy
import io
import logging
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import IO, Any, BinaryIO, ClassVar, cast
from warnings import catch_warnings, simplefilter

from gym_fed.base.modeling.model_class import has_media_part
from gym_fed.base.models import quiet_loading
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.system_errors import system_error
from gym_fed.export.formats.base import ExportFormat, Options, Tolerance
from gym_fed.export.program_weights import StoredWeight, compare_weights
from gym_fed.export.source import Source

PROGRAM_TOLERANCE = Tolerance(max=1e-5)
_OTHERS = ("huggingface", "gguf", "torch_export", "onnx")
"""Formats to suggest instead of one that cannot represent a model."""


class ProgramFormat(ExportFormat):
    """A folder with a program, the tokenizer's files and the configs; or the program alone, if the path has its suffix.

    The program takes ``input_ids`` and ``attention_mask`` ``[batch, length] int64`` and returns ``logits``
    ``[batch, length, vocabulary] float32``. Padding may be on either side; positions are computed from the mask. It
    has no cache.
    """

    merges = True
    reading = "gym_fed.export.readers.program"
    tolerance = PROGRAM_TOLERANCE

    program: ClassVar[str]
    """The name of the program's file."""

    def require_options(self, options: Options) -> None:
        super().require_options(options)
        if options.dtype not in (None, "float32"):
            raise GymError(
                ErrorCode.USAGE,
                f"format {self.name} is written in float32, not in {options.dtype}",
                "omit --dtype (save_dtype in a training file)",
            )

    def check(self, source: Source) -> None:
        from gym_fed.base.modeling.mixture_of_depths import MODEL_TYPE as MIXTURE_OF_DEPTHS

        config = source.model.config
        remedy = "export it as huggingface or adapter"
        if has_media_part(config):
            raise self.refusal(source, "reads images or audio", remedy)
        if getattr(config, "model_type", "") == MIXTURE_OF_DEPTHS:
            raise self.refusal(source, "is a mixture of depths", remedy)

    def use(self, path: Path) -> str:
        return f"load {self._program(path)} with {self.reader}: input_ids and attention_mask in, logits out"

    def write(self, source: Source, target: Path, options: Options) -> None:
        folder = self._folder(target)
        folder.mkdir(exist_ok=True)
        model = source.whole()
        try:
            with quiet_loading(), _quiet_tracing(), program_of(model):
                self.write_program(model, self._program(target), options)
        except Exception as error:  # each exporter raises its own exceptions
            if system_error(error) is not None:  # also a GymError
                raise
            reason = (str(error).strip().splitlines() or ["no reason given"])[0][:300]
            raise self.refusal(
                source,
                f"cannot be recorded as a program: {type(error).__name__}: {reason}",
                f"export it as {' or '.join(name for name in _OTHERS if name != self.name)}",
            ) from error
        model.config.save_pretrained(str(folder))
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(str(folder))
        source.write_companions(folder)

    @abstractmethod
    def write_program(self, model: Any, file: Path, options: Options) -> None:
        """Record the forward pass of ``model``, prepared by ``program_of``, into the new ``file``."""

    def expected(self, source: Source, target: Path, options: Options) -> Any:
        return source.whole()

    def stored(self, source: Source, expected: Any, target: Path, options: Options) -> dict[str, Any]:
        weights = self.weights(self._program(target))
        return {} if weights is None else {"tensors": compare_weights(weights, expected)}

    def weights(self, file: Path) -> Iterator[StoredWeight] | None:
        """Yield the weights in a program's file; None if its runtime does not give them."""
        return None

    def parts(self, source: Source, target: Path) -> dict[str, Any]:
        model, program = str(self._folder(target)), str(self._program(target))
        return {"model": model, "program": program, "runtime": self.reader}

    def facts(self, source: Source, options: Options) -> dict[str, Any]:
        note = "a single file has no tokenizer, chat template or config; export a folder to include them"
        return {"notes": [note]} if self.is_file else {}

    def at(self, path: Path) -> ExportFormat:
        if not self.suffix or path.suffix.lower() != self.suffix:
            return self
        alone = copy.copy(self)
        alone.is_file = True
        return alone

    def _program(self, target: Path) -> Path:
        return target if self.is_file else target / self.program

    def _folder(self, target: Path) -> Path:
        """Return the folder of the other files; for a single file, a temporary folder of its export."""
        return target.with_name("companions") if self.is_file else target


def example_inputs(batch: int = 2) -> dict[str, Any]:
    """Return ``[batch, 7] int64`` inputs for tracing: a size of 1 would be traced as a constant."""
    import torch

    mask = torch.ones(batch, 7, dtype=torch.int64)
    mask[0, :2] = 0
    ids = torch.arange(mask.numel()).reshape(mask.shape) % 11 + 1
    return {"input_ids": ids, "attention_mask": mask}


def any_shape() -> dict[str, Any]:
    """Return the dynamic dimensions of ``example_inputs`` for ``torch.export``."""
    import torch

    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    return dict.fromkeys(("input_ids", "attention_mask"), sizes)


def without_source_paths(program: Any) -> None:
    """Remove from a ``torch.export`` program the source lines and paths of this machine."""
    import torch

    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)


@contextmanager
def program_of(model: Any) -> Iterator[None]:
    """Within the block, make ``model(input_ids, attention_mask)`` return ``{"logits": float32}``, without a cache.

    Attention and experts use plain matrix products, which every tracer records for all sizes.
    """
    forward, attention = model.forward, model.config._attn_implementation
    experts = getattr(model.config, "_experts_implementation", None)

    def program(input_ids: Any, attention_mask: Any) -> dict[str, Any]:
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        output = forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False
        )
        return {"logits": output.logits.float()}

    model.set_attn_implementation("eager")
    if experts is not None:
        model.set_experts_implementation("batched_mm")
    model.forward = program
    try:
        yield
    finally:
        del model.forward
        model.set_attn_implementation(attention)
        if experts is not None:
            model.set_experts_implementation(experts)


@contextmanager
def _quiet_tracing() -> Iterator[None]:
    """Silence the tracers' own messages; errors still raise."""
    names = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")
    levels = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    try:
        for logger, _ in levels:
            logger.setLevel(logging.ERROR)
        with catch_warnings(), redirect_stdout(io.StringIO()):
            simplefilter("ignore")
            yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)


@contextmanager
def archive_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for torch's archive writer.

    Raises:
        OSError: When the block ends, if writing has failed.
    """
    with path.open("wb") as file:
        archive = _Archive(file)
        yield cast("IO[bytes]", archive)
        archive.require_whole()


class _Archive(io.RawIOBase):
    """Stores the error of the first failed write, to raise it later.

    torch's writer finishes its archive in its destructor, and aborts the process if that fails.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._failed: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        if self._failed is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._failed = error
        return memoryview(data).nbytes

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Seek in the file, as torch does after the last write; ignored after a failed write."""
        return 0 if self._failed is not None else self._file.seek(offset, whence)

    def require_whole(self) -> None:
        """Raise the error of the first failed write, if any."""
        if self._failed is not None:
            raise self._failed
