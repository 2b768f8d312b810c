"""Import ``.gguf`` files, single or split into parts, as model folders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.base.imports.importer import Importer, Report
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.system_errors import is_panic, system_error
from gym_fed.core.text import counted, plain

if TYPE_CHECKING:
    from gym_fed.base.imports.gguf.header import Header

_MAX_LICENCE = 200


class GgufImporter(Importer):
    """Importer for the architectures in ``config.ARCHITECTURES``, in all types that ``gguf`` can dequantise."""

    name = "gguf"
    version = 1

    def takes(self, source: Path) -> bool:
        return is_gguf(source) and source.is_file()

    def files(self, source: Path) -> list[Path]:
        return parts_of(source)

    def require_header(self, source: Path) -> None:
        with _refused_by_name(source):
            self._header(source)

    def bytes_needed(self, source: Path) -> int:
        from gym_fed.base.imports.gguf.tensors import mapped_tensors

        with _refused_by_name(source):
            header = self._header(source)
            config = transformers_config(header)
            tokens = sum(len(str(token)) for token in header.values.get("tokenizer.ggml.tokens") or [])
            return sum(tensor.bytes for tensor in mapped_tensors(header, config)) + 8 * tokens + (1 << 20)

    def describe(self, source: Path) -> str:
        from gguf import GGMLQuantizationType

        header = self._header(source)
        kinds = {tensor.type for tensor in header.tensors.values()}
        shown = ", ".join(sorted(GGMLQuantizationType(kind).name.lower() for kind in kinds))
        return f"GGUF of {shown}" + ("" if kinds <= {0, 1, 30} else "; quantised tensors become float16")

    def write(self, source: Path, folder: Path, report: Report) -> None:
        from gym_fed.base.imports.gguf.tensors import write_tensors
        from gym_fed.base.imports.gguf.tokenizer import end_tokens, write_tokenizer

        with _refused_by_name(source):
            header = self._header(source)
            config = transformers_config(header)
            write_tokenizer(header, folder, config.max_position_embeddings)
            config.dtype = write_tensors(header, config, folder, report)
            config.save_pretrained(str(folder))
            ends = end_tokens(header)
            generation = {
                "bos_token_id": config.bos_token_id,
                "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
                "pad_token_id": config.pad_token_id,
            }
            (folder / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")
            _write_card(header.values, source.name, folder)

    def _header(self, source: Path) -> Header:
        """Merge the headers of all parts into one.

        Raises:
            GymError: ``MISSING_DEPENDENCY``; ``MODEL_INVALID``; ``UNAVAILABLE`` for a file that is not a language
                model.
        """
        if find_spec("gguf") is None:
            raise GymError(
                ErrorCode.MISSING_DEPENDENCY,
                f"{source}: reading GGUF needs the package gguf",
                "pip install 'gym-fed[export]', with -c constraints.txt in a checkout",
            )
        from gym_fed.base.imports.gguf.header import Header, invalid, read_header

        headers = [read_header(file) for file in self.files(source)]
        first = headers[0]
        kind = first.values.get("general.type", "model")
        if kind != "model" or first.values.get("general.architecture") == "clip":
            descriptions = {"adapter": "a LoRA adapter", "mmproj": "an image projector"}
            description = descriptions.get(str(kind), plain(str(kind), 40))
            raise GymError(
                ErrorCode.UNAVAILABLE,
                f"{source}: is {description}, not a language model",
                "use the base's .gguf, and set adapter to a PEFT folder of the adapter",
            )
        parts = first.values.get("split.count", 1)
        if parts != len(headers):
            raise invalid(
                source,
                f"is one of {plain(str(parts), 40)} parts, but the folder has {len(headers)}",
                "keep the names that it was published with: NAME-00001-of-0000N.gguf",
            )
        tensors: dict[str, Any] = {}
        for header in headers:
            if again := tensors.keys() & header.tensors.keys():
                raise invalid(
                    header.file, f"has the tensor {plain(min(again), 80)}, which is also in another part"
                )
            tensors |= header.tensors
        return Header(first.file, first.values, tensors)


@contextmanager
def _refused_by_name(source: Path) -> Iterator[None]:
    """Reject a file whose values make a library fail, such as a list instead of a number.

    Raises:
        GymError: ``MODEL_INVALID``; operating system errors pass through.
    """
    try:
        yield
    except BaseException as error:
        is_interrupt = not isinstance(error, Exception) and not is_panic(error)
        if is_interrupt or isinstance(error, MemoryError) or system_error(error) is not None:
            raise
        why = plain(str(error), 200) or type(error).__name__
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{source}: cannot be read: {why}",
            "fetch the file again, or use another one",
        ) from error


def transformers_config(header: Header) -> Any:
    """Convert a header to a transformers config.

    Raises:
        GymError: See ``config.config_of``.
    """
    from transformers import AutoConfig

    from gym_fed.base.imports.gguf.config import config_of
    from gym_fed.base.imports.gguf.tensors import values_of

    values = config_of(header, lambda name: values_of(header.tensors[name]).reshape(-1))
    return AutoConfig.for_model(**values)


def _write_card(values: Mapping[str, Any], name: str, folder: Path) -> None:
    """Write a model card with the licence in the file."""
    lines = []
    for key, own in (("general.license", "license"), ("general.license.name", "license_name")):
        if isinstance(value := values.get(key), str) and value:
            lines.append(f"{own}: {json.dumps(plain(value, _MAX_LICENCE))}")
    if isinstance(link := values.get("general.license.link"), str) and link:
        lines.append(f"license_link: {json.dumps(plain(link, _MAX_LICENCE))}")
    matter = "---\n" + "\n".join(lines) + "\n---\n\n" if lines else ""
    title = plain(str(values.get("general.name") or name), 200)
    text = f"{matter}# {title}\n\nRead from the GGUF file {plain(name, 200)} by gym-fed.\n"
    (folder / "README.md").write_text(text, encoding="utf-8")


SUFFIX = ".gguf"
_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})", re.DOTALL)
_SHOWN = 8


def is_gguf(path: Path) -> bool:
    """Return True if a path has the GGUF suffix."""
    return path.suffix.lower() == SUFFIX


def only_gguf(folder: Path) -> Path | None:
    """Return the first part of the only GGUF model in a folder; None if there is none.

    Raises:
        GymError: ``MODEL_INVALID`` if there are several.
    """
    models = sorted(file for file in folder.iterdir() if is_gguf(file) and file.is_file() and _is_first(file))
    if len(models) > 1:
        shown = ", ".join(plain(file.name, 80) for file in models[:_SHOWN])
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{folder}: contains {counted(len(models), 'GGUF file')}: {shown}",
            f"choose one of them: {folder / models[0].name}",
        )
    return models[0] if models else None


def parts_of(file: Path) -> list[Path]:
    """Return the files of a model: ``NAME-00001-of-00003.gguf`` and the other parts, or the single file.

    Raises:
        GymError: ``MODEL_INVALID`` with a missing part.
    """
    match = _PART.fullmatch(file.stem)
    if match is None or not int(match[3]):
        return [file]
    stem, count = match[1], int(match[3])
    parts = [
        file.with_name(f"{stem}-{number:05}-of-{match[3]}{file.suffix}") for number in range(1, count + 1)
    ]
    for part in parts:
        if not part.is_file():
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"{part}: no such file",
                f"fetch all {counted(count, 'part')} of the model",
            )
    return parts


def _is_first(file: Path) -> bool:
    match = _PART.fullmatch(file.stem)
    return match is None or int(match[2]) == 1
