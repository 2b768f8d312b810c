"""The base class of awq and gptq: 4 or 8 bits in groups, quantised by auto-round and read back by gym-fed's reader.

Token ids calibrate the rounding: from the user's rows, or from the built-in texts. The built-in texts are rows of the
generated tasks and the retention check's questions and texts; exports are not compared on them.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from gym_fed.base.imports.packed import PACKED
from gym_fed.base.imports.quantised import plain_tensors
from gym_fed.base.imports.stored import StoredTensors
from gym_fed.base.modeling.model_class import has_media_part
from gym_fed.base.modeling.vocabulary import text_tokenizer
from gym_fed.base.models import quiet_loading
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.registries import TASKS
from gym_fed.core.text import counted
from gym_fed.data.generated import generate
from gym_fed.data.rows import as_kind
from gym_fed.data.string_rows import as_turns
from gym_fed.export.formats.base import ExportFormat, Options, Tolerance
from gym_fed.export.source import Source, differs

ITERATIONS = 50
"""Steps of SignRound in each block. gym-nano in gptq keeps the likeliest token at 94.0% of positions with 50 and with
200, but at 88.2% with 8, where every weight was rounded as without any steps."""
GROUPS = (128, 64, 32)
_MULTIPLE = 32
"""Matrices whose rows or columns are not a multiple of this size are not quantised."""
_TOLERANCE = Tolerance(max=None, top1=0.9, greedy=False)
_MAX_ERROR = {4: 0.35, 8: 0.05}
"""Maximum error of a packed matrix by bits: the norm of the difference, relative to the source's. 4 bits of SmolLM2 are
about 0.1 off; a matrix of another layer would be 1.4 off."""
_MAX_STEPS = 1.2
"""Maximum error of a packed weight in steps of its group: SignRound rounds up or down, and scales are float16."""
SAMPLES = 32
LENGTH = 128
"""Tokens per sample; fewer if the model has fewer positions."""
OWN = "built-in texts"
_ROWS_OF_A_TASK = 8


@dataclass(frozen=True)
class CalibrationSamples:
    """The samples of a calibration.

    Attributes:
        source: The file, or ``OWN``.
        ids: Token ids of the samples, all of the same length.
    """

    source: str
    ids: list[list[int]]

    def record(self) -> dict[str, Any]:
        """Return the entry of ``export.json``; ``sha256`` is of the ids as JSON."""
        return {
            "source": self.source,
            "samples": len(self.ids),
            "tokens": len(self.ids[0]),
            "sha256": hashlib.sha256(json.dumps(self.ids).encode()).hexdigest(),
        }


def calibration_of(
    tokenizer: Any, positions: int, rows: Sequence[Mapping[str, Any]] = (), name: str = ""
) -> CalibrationSamples:
    """Cut rows, concatenated, into samples; an incomplete last one is dropped.

    Args:
        tokenizer: The tokenizer of the model, with its chat template.
        positions: The model's maximum number of positions.
        rows: Rows of text or conversations; empty for the built-in texts.
        name: The name of the rows, for the record.

    Raises:
        GymError: ``DATA_INVALID`` for rows without text, and for fewer tokens than one sample has.
    """
    source = (name or "rows") if rows else OWN
    texts = _texts_of(rows, tokenizer) if rows else own_texts(tokenizer)
    length = min(LENGTH, positions)
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    stream: list[int] = []
    for text in texts:
        stream += [*tokenizer(text, add_special_tokens=False)["input_ids"], *end]
        if len(stream) >= SAMPLES * length:
            break
    starts = range(0, len(stream) - length + 1, length)
    samples = [stream[start : start + length] for start in starts[:SAMPLES]]
    if not samples:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{source}: {counted(len(stream), 'token')} for calibration, but at least {length} are required",
            "pass more rows, or omit --data to use built-in texts",
        )
    return CalibrationSamples(source, samples)


def own_texts(tokenizer: Any) -> Iterator[str]:
    """Yield conversations of the generated tasks and ordinary texts, alternating, always in the same order."""
    rows = [generate(name, _ROWS_OF_A_TASK) for name in sorted(TASKS.names())]
    drawn = [row for same in zip(*rows, strict=True) for row in same]
    for row, prose in zip_longest(drawn, _ordinary_rows()):
        for present in (row, prose):
            if present is not None:
                yield present["text"] if "text" in present else _text(present, tokenizer)


def _ordinary_rows() -> Iterator[dict[str, Any]]:
    """Yield the packaged texts and conversations on everyday topics."""
    folder = resources.files("gym_fed") / "assets" / "retention"
    for name in ("texts.jsonl", "questions.jsonl"):
        yield from map(json.loads, (folder / name).read_text(encoding="utf-8").splitlines())


def _texts_of(rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> Iterator[str]:
    for row in rows:
        for supervised in as_turns(tokenizer, as_kind([dict(row)], "supervised")):
            yield _text(supervised, tokenizer)


def _text(row: dict[str, Any], tokenizer: Any) -> str:
    """Return a row's text; messages are rendered with the chat template, if there is one."""
    if "text" in row:
        return str(row["text"])
    if "messages" in row:
        messages = row["messages"]
        if tokenizer.chat_template is None:
            return "\n".join(str(message["content"]) for message in messages)
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    if "prompt" in row and isinstance(row["prompt"], str):
        return f"{row['prompt']}{row['completion']}"
    raise GymError(
        ErrorCode.DATA_INVALID,
        f"a row has the keys {', '.join(sorted(row))}, but calibration requires text",
        "use rows with text, messages, or prompt and completion",
    )


def of_bits(*bits: int) -> Mapping[str, Tolerance]:
    """Return the quantizations ``w4``, ``w4g128``, ``w4g128_rtn`` and so on, with their tolerances.

    Without ``g`` the largest group that fits all layers is used; ``_rtn`` rounds to nearest without calibration.
    """
    groups = ("", *(f"g{size}" for size in GROUPS))
    names = [f"w{bit}{group}{suffix}" for bit in bits for suffix in ("", "_rtn") for group in groups]
    return MappingProxyType(dict.fromkeys(names, _TOLERANCE))


class FewBits(ExportFormat):
    """A model folder whose linear layers are packed; embeddings, head and norms are float16."""

    merges = True
    calibrates = True
    takes_dtype = False
    requires = ("auto_round",)
    reader = "gym_fed"
    quantizations = of_bits(4)
    copies_on_disk = 1.0  # the folder that is packed
    bits = MappingProxyType(dict.fromkeys(of_bits(4, 8), 16.0))  # at most: embeddings stay float16

    layout: ClassVar[str]
    """The name of the format in auto-round."""

    symmetric: ClassVar[bool]
    """True if all zero points are the same."""

    def require_options(self, options: Options) -> None:
        super().require_options(options)
        if options.rows and not self._iterations(options):
            raise GymError(
                ErrorCode.USAGE,
                f"--quantization {options.quantization} rounds to nearest, without calibration",
                f"omit --data, or use {options.quantization.removesuffix('_rtn')}",
            )

    def remedy_of(self, options: Options) -> str:
        quantization = self.quantization(options)
        finer = [] if self._iterations(options) else [f"--quantization {quantization.removesuffix('_rtn')}"]
        if self._bits(options) < 8:
            finer.append("--format gptq --quantization w8")
        finer = finer or ["--format gguf --quantization q8_0"]
        return f"{quantization} loses too much of the model: use {' or '.join(finer)}; --skip-check writes it anyway"

    def use(self, path: Path) -> str:
        return shlex.join(("gym", "chat", str(path)))

    def check(self, source: Source) -> None:
        if has_media_part(source.model.config):
            raise self.refusal(source, "reads images or audio", "export it as huggingface or adapter")
        if not _linear_inputs(source):
            why = f"has no linear layer whose sizes are multiples of {_MULTIPLE}"
            raise self.refusal(source, why, "export it as huggingface")

    def write(self, source: Source, target: Path, options: Options) -> None:
        import torch

        group_size, iterations = self.group_size(source, options), self._iterations(options)
        calibration = _calibration(source, options)
        with tempfile.TemporaryDirectory(prefix="gym-export-", dir=target.parent) as scratch:
            folder, out = Path(scratch) / "model", Path(scratch) / "out"
            with quiet_loading():
                source.whole().save_pretrained(str(folder))
            source.write_companions(folder)
            job = {
                "folder": str(folder),
                "out": str(out),
                "format": self.layout,
                "bits": self._bits(options),
                "group_size": group_size,
                "sym": self.symmetric,
                "iters": iterations,
                "ids": calibration.ids,
                "threads": torch.get_num_threads(),
            }
            status, last = options.processes.run("gym_fed.export.quantise", job, options.report)
            configs = sorted(out.rglob("config.json"))
            if status or len(configs) != 1:
                raise GymError(
                    ErrorCode.EXPORT_DIFFERS,
                    f"auto-round failed: {(last or ['no message'])[-1][:500]}; nothing was written",
                    "report this with the model's name",
                )
            target.mkdir(exist_ok=True)
            for file in configs[0].parent.iterdir():
                file.rename(target / file.name)
        source.write_companions(target)

    def expected(self, source: Source, target: Path, options: Options) -> Any:
        return source.whole()

    def stored(self, source: Source, expected: Any, target: Path, options: Options) -> dict[str, Any]:
        return {"tensors": compare_packed(target, expected, _MAX_ERROR[self._bits(options)])}

    def parts(self, source: Source, target: Path) -> dict[str, Any]:
        return {"model": str(target), "packed": True}

    def facts(self, source: Source, options: Options) -> dict[str, Any]:
        iterations = self._iterations(options)
        record: dict[str, Any] = {
            "bits": self._bits(options),
            "group_size": self.group_size(source, options),
            "symmetric": self.symmetric,
            "rounding": f"SignRound, {iterations} iterations"
            if iterations
            else "round to nearest, uncalibrated",
        }
        if iterations:
            record["calibration"] = _calibration(source, options).record()
        return record

    def _bits(self, options: Options) -> int:
        return int(self.quantization(options)[1])

    def _iterations(self, options: Options) -> int:
        return 0 if self.quantization(options).endswith("_rtn") else ITERATIONS

    def group_size(self, source: Source, options: Options) -> int:
        """Return the number of weights that share a scale.

        Raises:
            GymError: ``USAGE`` if the number does not divide a layer's inputs, naming the layer.
        """
        widths = _linear_inputs(source)
        fits = [size for size in GROUPS if not any(width % size for width in widths.values())]
        named = self.quantization(options).removesuffix("_rtn").partition("g")[2]
        if not named:
            return fits[0]
        if int(named) not in fits:
            layer, width = next((name, width) for name, width in widths.items() if width % int(named))
            raise GymError(
                ErrorCode.USAGE,
                f"--quantization {self.quantization(options)}: {layer} of {source.name} has {width} inputs, "
                f"not a multiple of {named}",
                f"use w{self._bits(options)}g{fits[0]}, or w{self._bits(options)}, which selects the group size",
            )
        return int(named)


def compare_packed(folder: Path, model: Any, max_error: float) -> dict[str, Any]:
    """Compare every tensor of a folder, dequantised, with the model.

    Args:
        folder: The written folder.
        model: The model that it must hold.
        max_error: Maximum relative error of a packed matrix; the others are rounded to float16.

    Returns:
        ``compared`` tensors, the ``largest_error`` of a packed matrix, and ``not_compared`` with the reason if some
        do not match the names of the model's parameters, such as the experts of a mixture.

    Raises:
        GymError: ``EXPORT_DIFFERS`` naming the tensor that differs or is missing.
    """
    import torch

    parameters, unknown, largest, seen = model.state_dict(), 0, 0.0, set()
    with StoredTensors(folder) as tensors:
        for name, value in plain_tensors(tensors, read_object(folder / "config.json")["quantization_config"]):
            if (ours := parameters.get(name)) is None:
                unknown += 1
                continue
            seen.add(name)
            stem, expected, written = name.removesuffix("weight"), ours.detach().float(), value.float()
            if expected.shape != written.shape:
                raise _tensor_differs(name)
            if f"{stem}{PACKED}" not in tensors:
                if not torch.allclose(written, expected, rtol=2**-10, atol=1e-6):
                    raise _tensor_differs(name)
                continue
            error = float((written - expected).norm() / expected.norm().clamp(min=1e-30))
            largest = max(largest, error)
            if not error <= max_error or _beyond_a_step(expected, written, tensors[f"{stem}scales"]):
                raise _tensor_differs(name)
    places = {parameters[name].data_ptr() for name in seen}  # a tied head is stored once
    missing = [name for name, tensor in parameters.items() if tensor.data_ptr() not in places]
    if missing and not unknown:
        raise _tensor_differs(missing[0], "is missing")
    result: dict[str, Any] = {"compared": len(seen), "largest_error": largest}
    if unknown:
        result["not_compared"] = (
            f"{counted(unknown, 'tensor')} do not match the names of the model's parameters"
        )
    return result


def _beyond_a_step(expected: Any, written: Any, scales: Any) -> bool:
    """Return True if a weight is more than a step off, except by being cut to the range of its group.

    Args:
        expected: ``[outputs, inputs]`` float32.
        written: The dequantised weights.
        scales: ``[groups, outputs]``, the steps.
    """
    groups, outputs = scales.shape
    ours, stored = (weights.reshape(outputs, groups, -1) for weights in (expected, written))
    steps = scales.float().abs().T[:, :, None]
    low, high = stored.amin(-1, keepdim=True), stored.amax(-1, keepdim=True)
    is_cut = ((stored == high) & (ours > stored)) | ((stored == low) & (ours < stored))
    return bool((((ours - stored).abs() > _MAX_STEPS * steps) & ~is_cut).any())


def _tensor_differs(name: str, why: str = "differs by more than the rounding error of its type") -> GymError:
    return differs(f"the files differ from the source: tensor {name} {why}")


def _linear_inputs(source: Source) -> dict[str, int]:
    """Return the number of inputs of every packed layer, by name."""
    import torch

    model = source.model.get_base_model() if source.adapted else source.model
    head = model.get_output_embeddings()
    return {
        name: int(module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module is not head
        and "lora_" not in name
        and not module.in_features % _MULTIPLE
        and not module.out_features % _MULTIPLE
    }


def _calibration(source: Source, options: Options) -> CalibrationSamples:
    positions = getattr(source.model.config, "max_position_embeddings", None) or LENGTH
    return calibration_of(text_tokenizer(source.tokenizer), positions, options.rows, options.rows_name)
