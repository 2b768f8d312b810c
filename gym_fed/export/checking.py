"""Comparison of an export with its source: another process reads the export with its own library."""

from __future__ import annotations

import copy
import gc
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gym_fed.base.modeling.model_class import has_media_part
from gym_fed.base.modeling.vocabulary import text_tokenizer
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.export.folder_files import compare_folder
from gym_fed.export.formats.base import READ_BACK, ExportFormat, Options, Tolerance
from gym_fed.export.probe_texts import probe_texts, vocabulary_ids
from gym_fed.export.readers.reading import GREEDY_TOKENS, PASSAGE, POSITIONS, PROMPTS, RUN_FAILED, answers
from gym_fed.export.readers.transformers import TransformersExport
from gym_fed.export.source import Source, cast

MERGED_TOLERANCE = Tolerance(max=1e-3, greedy=False)
"""Tolerance of a merged adapter's logits, compared with the unmerged ones."""
_ROWS = 32
_VOCABULARY = "logits.vocabulary"
_SAME = {
    "special_tokens": "special.", "chat_template": "template", "weights": "weights", "passage_ids": "ids.passage",
}  # fmt: skip
"""The prefixes of ``answers`` that are compared if both sides have them."""


class ReadBack:
    """Compares an export with the expected answers.

    Args:
        chosen: The format.
        source: The exported model; modified if it is owned.
        options: The options of the export.
    """

    def __init__(self, chosen: ExportFormat, source: Source, options: Options) -> None:
        self._chosen, self._source, self._options = chosen, source, options
        self._passage = passage_ids(source)
        # Ids of pictures and sounds are refused without them.
        added = not has_media_part(source.model.config)
        tokenizer = text_tokenizer(source.tokenizer)
        drawn = vocabulary_ids(tokenizer, len(self._passage), added=added)
        self._vocabulary = [number for number in drawn if number < _num_rows(source.model)]
        self._probes = probe_texts(tokenizer)
        self._own: dict[str, Any] | None = None
        self._untuned: dict[str, Any] | None = None

    def before_merging(self) -> None:
        """Compute the answers of source and base before the adapter is merged; merging must change almost nothing.

        Raises:
            GymError: ``EXPORT_DIFFERS`` if the merged model answers differently.
        """
        chosen, source = self._chosen, self._source
        if not (source.adapted and chosen.merges):
            return
        self._own = self._answers(source.model, "computing the source's answers")
        if chosen.stored_as(self._options) is None:
            with source.model.disable_adapter():
                self._untuned = self._answers(source.model, "computing the base's answers", tokens=0)
        self._options.report("merging", 0, 0)
        merged = compared(self._own, self._answers(source.whole(), "computing the merged model's answers"))
        _require_equal(merged, MERGED_TOLERANCE, "merging the adapter gives", ExportFormat.remedy)

    def before_writing(self, options: Options) -> None:
        """Compute the source's answers if writing modifies it, and its base's if the delta is quantised in blocks.

        Args:
            options: The resolved options.
        """
        chosen, source, self._options = self._chosen, self._source, options
        if self._own is None and chosen.changes(source, options):
            self._own = self._answers(source.model, "computing the source's answers")
        in_blocks = chosen.merges and chosen.stored_as(options) is None
        if in_blocks and source.delta is not None and source.read_base is not None:
            self._untuned = self._answers(source.read_base(), "computing the base's answers", tokens=0)

    def of(self, part: Path) -> dict[str, Any]:
        """Read ``part`` back and compare.

        Returns:
            ``prompts``, ``read_by``, ``read_back`` (see ``compared``, with its ``tolerance``), the result of the
            format's ``stored``, ``folder`` (see ``compare_folder``), ``against_the_source`` if the expected model is
            not the source itself, and ``effect_kept`` of a delta in blocks of few bits.

        Raises:
            GymError: ``EXPORT_DIFFERS``; ``EXPORT_UNCHECKED`` if the reader fails, which proves nothing about the
                export.
        """
        chosen, source, options = self._chosen, self._source, self._options
        begun, reader = time.monotonic(), chosen.reader_of(source)
        result: dict[str, Any] = {
            "prompts": list(PROMPTS),
            "texts": len(self._probes),
            "positions": len(self._passage) + len(self._vocabulary),
            "read_by": _readers(reader),
        }
        expected = chosen.expected(source, part, options)
        result.update(chosen.stored(source, expected, part, options))
        if chosen.merges and not chosen.is_file:
            result["folder"] = compare_folder(part, source, expected)
        if self._own is None and expected is not source.model:
            self._own = self._answers(source.model, "computing the source's answers")
        parts = {"reading": chosen.reading, **chosen.parts(source, part)}
        ours = self._answers(expected, "computing the expected answers", hashed=parts.get("hashed", False))
        if self._own is not None:
            result["against_the_source"] = compared(self._own, ours)
        del expected
        own, self._own = self._own or ours, None
        source.forget()
        gc.collect()
        there = self._in_a_fresh_process(parts, part.parent)
        result["read_back"] = compared(ours, there)
        limits = chosen.limits(options)
        result["read_back"]["tolerance"] = asdict(limits)
        if self._untuned is not None:
            result["effect_kept"] = effect_kept(self._untuned, own, there)
        if number := result["read_back"].pop("other_text", None):
            result["read_back"]["text"] = self._probes[number - 1]
        _require_equal(result["read_back"], limits, f"{reader} reads back", chosen.remedy_of(options))
        result["seconds"] = round(time.monotonic() - begun, 1)
        return result

    def _answers(
        self, model: Any, stage: str, tokens: int = GREEDY_TOKENS, *, hashed: bool = False
    ) -> dict[str, Any]:
        """Compute answers in float32, like the other process."""
        import torch

        if next(model.parameters()).dtype is not torch.float32:
            is_own = self._source.owned and model is self._source.model
            model = cast(model if is_own else copy.deepcopy(model), "float32")

        def report(_: str, done: int, total: int) -> None:
            self._options.report(stage, done, total)

        reading = TransformersExport(model.eval(), self._source.tokenizer, hashed=hashed)
        job = self._job(tokens)
        rows = _num_rows(model)  # a base may have fewer
        job["vocabulary"] = [number for number in self._vocabulary if number < rows]
        return answers(reading, job, report)

    def _job(self, tokens: int) -> dict[str, Any]:
        """Return the questions of ``answers``."""
        ids = {"passage": self._passage, "vocabulary": self._vocabulary}
        return {"prompts": PROMPTS, **ids, "texts": self._probes, "tokens": tokens}

    def _in_a_fresh_process(self, parts: Mapping[str, Any], scratch: Path) -> dict[str, Any]:
        """Return the answers of the other process, which it writes to ``scratch``, a folder deleted with the export's.

        Raises:
            GymError: ``EXPORT_UNCHECKED``.
        """
        import torch
        from safetensors.torch import load_file

        with tempfile.TemporaryDirectory(prefix="answer-", dir=scratch) as folder:
            answer = Path(folder) / "answer.safetensors"
            settings = {"parts": parts, "threads": torch.get_num_threads(), "answer": str(answer)}
            job = self._job(GREEDY_TOKENS) | settings
            try:
                status, last = self._options.processes.run(READ_BACK, job, self._options.report)
                why = (last or ["no message"])[-1][:500] if status else ""
            except GymError as error:
                status, why = 1, error.message
            if status == RUN_FAILED:
                raise GymError(
                    ErrorCode.EXPORT_DIFFERS,
                    f"the program fails for texts whose length differs from the recorded one: {why}; nothing "
                    "was written",
                    "export it as huggingface or gguf",
                )
            if why:
                raise GymError(
                    ErrorCode.EXPORT_UNCHECKED,
                    f"the export could not be read back: {why}",
                    "--skip-check writes it without this check; then compare its answers in the program that "
                    "will use it",
                )
            tensors: dict[str, Any] = load_file(answer)
            return tensors


def _num_rows(model: Any) -> int:
    """Return the number of tokens that have an embedding, which may be fewer than the tokenizer has."""
    return len(model.get_input_embeddings().weight)


def passage_ids(source: Source) -> list[int]:
    """Return the first tokens of the passage, at most as many as the model has positions."""
    config = source.model.config
    positions = getattr(getattr(config, "text_config", config), "max_position_embeddings", None) or POSITIONS
    return list(text_tokenizer(source.tokenizer)(PASSAGE)["input_ids"])[: min(POSITIONS, positions)]


def _readers(reader: str) -> str:
    """Return the versions of the packages that read the export back."""
    names = []
    for module in dict.fromkeys(("transformers", reader)):
        name = module.replace("_", "-")
        with suppress(PackageNotFoundError):
            name = f"{name} {version(name)}"
        names.append(name)
    return ", ".join(names)


def compared(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two sets of ``answers``.

    Returns:
        ``max`` and ``mean`` distance of the logits, the ``largest`` logit, ``top1`` (share of positions with the same
        most likely token), ``kl`` (mean over positions, in nats), and whether token ids and greedy tokens are the same;
        special tokens, chat template and the digest of all weights only if both sides have them. ``vocabulary`` has
        ``max`` and ``largest`` for tokens of the whole vocabulary; these are not text, so the limits of rounding do not
        apply to them.
    """
    import torch

    both = [name for name in expected if name in actual]
    for name in both:
        if name.startswith("ids.") and not torch.equal(expected[name], actual[name]):
            text = _first_other_text(expected[name], actual[name]) if name == "ids.texts" else None
            return {"same_token_ids": False, **({} if text is None else {"other_text": text})}
    sums = {"distance": 0.0, "top1": 0.0, "kl": 0.0}
    furthest, largest, positions, width = 0.0, 0.0, 0, 1
    for ours, other in _rows(expected, actual, _texts(both)):
        distance = (ours - other).abs()
        furthest = _larger(furthest, float(distance.max()))
        largest = _larger(largest, float(ours.abs().max()))
        sums["distance"] += float(distance.sum())
        sums["top1"] += float((ours.argmax(-1) == other.argmax(-1)).sum())
        p, q = ours.log_softmax(-1), other.log_softmax(-1)
        sums["kl"] += float((p.exp() * (p - q)).sum())
        positions, width = positions + len(ours), ours.shape[-1]
    return {
        "max": furthest,
        "mean": sums["distance"] / (positions * width),
        "largest": largest,
        "top1": sums["top1"] / positions,
        "kl": sums["kl"] / positions,
        "vocabulary": _vocabulary_distances(expected, actual) if _VOCABULARY in both else {},
        "same_token_ids": True,
        "same_greedy_tokens": bool(torch.equal(expected["greedy"], actual["greedy"])),
        **{
            f"same_{text}": all(torch.equal(expected[name], actual[name]) for name in names)
            for text, start in _SAME.items()
            if (names := [name for name in both if name.startswith(start)])
        },
    }


def _first_other_text(expected: Any, actual: Any) -> int:
    """Return the number of the first text with different ids, counted from 1; texts end with -1."""
    pairs = enumerate(zip(expected.tolist(), actual.tolist(), strict=False))
    at = next((number for number, (ours, other) in pairs if ours != other), len(actual))
    return 1 + int((expected[:at] == -1).sum())


def effect_kept(
    base: Mapping[str, Any], tuned: Mapping[str, Any], written: Mapping[str, Any]
) -> float | None:
    """Compute the preserved share of a delta's effect on the logits: ``1 - |written - tuned| / |tuned - base|``.

    Args:
        base: The ``answers`` of the base.
        tuned: The ``answers`` of the exact model.
        written: The ``answers`` of the export.

    Returns:
        None if the delta has no effect, or token ids differ.
    """
    from gym_fed.delta.kept import KeptDelta

    ratio = KeptDelta()
    for name in _texts(tuned):
        if base[name].shape != tuned[name].shape or written[name].shape != tuned[name].shape:
            return None
        ratio.add(base[name], tuned[name], written[name])
    return ratio.share


def _vocabulary_distances(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest distance of the logits for tokens of the whole vocabulary, and the largest logit."""
    furthest, largest = 0.0, 0.0
    for ours, other in _rows(expected, actual, [_VOCABULARY]):
        furthest = _larger(furthest, float((ours - other).abs().max()))
        largest = _larger(largest, float(ours.abs().max()))
    return {"max": furthest, "largest": largest}


def _texts(names: Iterable[str]) -> list[str]:
    """Return the names of logits of texts."""
    return [name for name in names if name.startswith("logits.") and name != _VOCABULARY]


def _rows(
    expected: Mapping[str, Any], actual: Mapping[str, Any], names: Iterable[str]
) -> Iterator[tuple[Any, Any]]:
    """Yield logits of a few positions at a time, since several copies of all logits take gigabytes."""
    for name in names:
        pairs = zip(expected[name].split(_ROWS), actual[name].split(_ROWS), strict=True)
        yield from ((ours.float(), other.float()) for ours, other in pairs)


def _larger(first: float, second: float) -> float:
    """Return the larger number, or NaN if either is NaN."""
    return second if second != second or second > first else first


def _require_equal(figures: Mapping[str, Any], limits: Tolerance, subject: str, remedy: str) -> None:
    if (why := limits.problem(figures)) is None:
        return
    raise GymError(ErrorCode.EXPORT_DIFFERS, f"{subject} {why}; nothing was written", remedy)
