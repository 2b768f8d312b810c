"""Write a model as a GGUF file: save it as a folder, convert that in another process, and check the metadata.

The converter guesses much of the metadata (special tokens, chat template, licence and base) from files; here it follows
the source's own tokenizer.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from gym_fed.base.modeling.vocabulary import text_tokenizer
from gym_fed.base.models import quiet_loading
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.export.gguf.rope import rope_keys
from gym_fed.export.process import Processes, Report, no_report
from gym_fed.export.source import Source, differs, licences_of

CONVERTER = "gym_fed.export.gguf.convert"
"""The module that runs the converter in a separate process."""
_MAX_LICENSE_TEXT = 1 << 18
"""Maximum number of characters of all licences together."""
LICENSE_TEXT = "gym_fed.license.text"
"""A gym-fed key, since GGUF has a key for a licence's name but not for its text."""


def metadata_of(source: Source, file_type: int) -> dict[str, Any]:
    """Return the metadata that the file must have, by key.

    Args:
        source: The model to export.
        file_type: The number of a ``gguf.LlamaFileType``.
    """
    from gym_fed.export.card import licence_name, lineage
    from gym_fed.registry.card.readme import is_name_of_the_hub

    tokenizer = text_tokenizer(source.tokenizer)
    metadata: dict[str, Any] = {
        "general.name": Path(source.shown_name).name,
        "general.file_type": file_type,
        "general.quantization_version": 2,
        **_special_tokens(tokenizer, source.model),
    }
    template = tokenizer.chat_template
    if isinstance(template, dict):  # of several named templates, this one works without tools
        template = template.get("default")
    if isinstance(template, str):
        metadata["tokenizer.chat_template"] = without_training_marks(template)
    if source.shown_base is not None:
        metadata["general.base_model.count"] = 1
        metadata["general.base_model.0.name"] = Path(source.shown_base).name
        if is_name_of_the_hub(source.shown_base):
            metadata["general.base_model.0.organization"] = source.shown_base.partition("/")[0]
            metadata["general.base_model.0.repo_url"] = f"https://huggingface.co/{source.shown_base}"
    if name := licence_name(source):
        metadata["general.license"] = name
    data = lineage(source)[0].data
    if data:
        metadata["general.dataset.count"] = len(data)
        metadata |= {f"general.dataset.{number}.name": used.name for number, used in enumerate(data)}
    if text := _license_text(source):
        metadata[LICENSE_TEXT] = text
    return metadata


def require_metadata(file: Path, expected: dict[str, Any]) -> None:
    """Read the file with ``gguf`` and compare its metadata with the expected values.

    Raises:
        GymError: ``EXPORT_DIFFERS`` naming the first key with a different value.
    """
    import gguf

    fields = gguf.GGUFReader(file).fields
    for key, value in expected.items():
        written = fields[key].contents() if key in fields else None
        if written != value or type(written) is not type(value):
            problem = f"the file has {key} {str(written)[:80]!r}, not {str(value)[:80]!r}"
            raise differs(problem, is_always_checked=True)


def _special_tokens(tokenizer: Any, model: Any) -> dict[str, Any]:
    """Return special token ids, and whether texts get a begin or end token. ``eot`` and ``eom`` are end tokens too."""
    ids = list(tokenizer("a")["input_ids"])
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    adds_tokens = len(ids) > len(plain)
    generation = getattr(model, "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    all_ends = [ends] if isinstance(ends, int) else list(ends or [])
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else next(iter(all_ends), None)
    others = [number for number in all_ends if number != eos]
    numbers = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": eos,
        "eot_token_id": next(iter(others), None),
        "eom_token_id": next(iter(others[1:]), None),
        "padding_token_id": tokenizer.pad_token_id,
        "unknown_token_id": tokenizer.unk_token_id,
    }
    special: dict[str, Any] = {name: int(number) for name, number in numbers.items() if number is not None}
    special["add_bos_token"] = adds_tokens and ids[0] == tokenizer.bos_token_id
    special["add_eos_token"] = adds_tokens and ids[-1] == tokenizer.eos_token_id
    return {f"tokenizer.ggml.{name}": value for name, value in special.items()}


def _license_text(source: Source) -> str:
    """Return the licences and notices that accompany the model.

    Raises:
        GymError: ``USAGE`` for more than ``_MAX_LICENSE_TEXT``.
    """
    text = "\n\n".join(file.read_text("utf-8", errors="replace") for file in licences_of(source).values())
    if len(text) > _MAX_LICENSE_TEXT:
        raise GymError(
            ErrorCode.USAGE,
            f"format gguf: {source.name}: its licences have {counted(len(text), 'character')}; at most "
            f"{_MAX_LICENSE_TEXT:,} are allowed",
            "export it as huggingface, which copies them as files",
        )
    return text


_TRAINING_MARKS = re.compile(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}")
"""Tags that transformers adds to jinja2 to mark the tokens to learn, with adjacent white space."""


def without_training_marks(template: str) -> str:
    """Return a chat template with the same result that plain jinja2 can render."""
    return _TRAINING_MARKS.sub(r"{%\1 if true \2%}{% endif %}", template)


def write_gguf(
    source: Source,
    target: Path,
    quantization: str,
    report: Report = no_report,
    processes: Processes | None = None,
) -> None:
    """Write the new file ``target``; ``source`` is merged.

    Args:
        source: A model that the converter knows.
        target: The new file; its folder is used for temporary files.
        quantization: One of ``convert.FILE_TYPES``.
        report: Called with the number of converted tensors.
        processes: Child processes; the converter may already be among them.

    Raises:
        GymError: ``USAGE`` if the converter cannot write the model, ``EXPORT_DIFFERS`` for any other failure.
    """
    import gguf

    from gym_fed.export.gguf.convert import FILE_TYPES

    metadata = metadata_of(source, int(getattr(gguf.LlamaFileType, FILE_TYPES[quantization])))
    with tempfile.TemporaryDirectory(prefix="gym-export-", dir=target.parent) as scratch:
        folder = Path(scratch) / "model"
        report("saving", 0, 0)
        with quiet_loading():
            source.whole().save_pretrained(str(folder))
        source.write_companions(folder)
        job = {
            "folder": str(folder),
            "file": str(target),
            "quantization": quantization,
            "metadata": metadata,
            "rope": rope_keys(source.model.config),
        }
        _convert(job, source, report, processes or Processes())
    require_metadata(target, metadata)


def bytes_in_8_bits(file: Path) -> int:
    """Return the size that a file of unquantised weights would have as q8_0.

    That is 34 bytes for 32 weights of a matrix, and float16 if its rows are not a multiple of 32.
    """
    import gguf

    size = file.stat().st_size
    for tensor in gguf.GGUFReader(file).tensors:
        if len(tensor.shape) > 1:
            bytes_each = 2 if int(tensor.shape[0]) % 32 else 34 / 32
            size += int(int(tensor.n_elements) * bytes_each) - int(tensor.n_bytes)
    return size


def refused(source: Source, why: str) -> GymError:
    """Return the error for a model that cannot be written as a GGUF file."""
    return GymError(
        ErrorCode.USAGE, f"format gguf: {source.name}: {why}", "export it as huggingface or adapter"
    )


def _convert(job: dict[str, Any], source: Source, report: Report, processes: Processes) -> None:
    """Run the converter.

    Raises:
        GymError: See ``write_gguf``.
    """
    from gym_fed.export.gguf.convert import UNSUPPORTED

    status, last = processes.run(CONVERTER, job, report)
    if not status:
        return
    why = (last or ["no message"])[-1][:500]
    if status == UNSUPPORTED:
        raise refused(source, why)
    raise GymError(
        ErrorCode.EXPORT_DIFFERS, f"llama.cpp's converter failed: {why}; nothing was written", "report this"
    )
