"""`gym data convert`, `mix` and `dedup`: write one dataset from others, atomically."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from gym_fed.cli.options import OverwriteOption
from gym_fed.core.console import AsJson, MemberName, err, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import AgreeOption, ColumnsOption, FormatOption
from gym_fed.core.progress import progress_bar
from gym_fed.core.registries import FORMATS
from gym_fed.core.text import counted, harmless

_EXAMPLES = 5
_SHOWN_CHARACTERS = 100

T = TypeVar("T")

OutOption = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="FILE", help="A .jsonl, .json, .csv, .parquet or .jsonl.gz file."),
]


def with_progress(items: Iterable[T]) -> Iterator[T]:
    """Yield rows unchanged, and show their number."""
    with progress_bar("rows") as update:
        for number, item in enumerate(items, 1):
            yield item
            update(number)


class StoppingRule(StrEnum):
    """The rule that ends a mixture."""

    first_exhausted = "first_exhausted"
    all_exhausted = "all_exhausted"
    all_exhausted_without_replacement = "all_exhausted_without_replacement"


def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help="A data file, folder, pattern or URL.")],
    file: Annotated[
        Path, typer.Argument(metavar="OUT", help="A .jsonl, .json, .csv, .parquet or .jsonl.gz file.")
    ],
    to: Annotated[str, typer.Option("--to", click_type=MemberName(FORMATS), help="Format to write.")],
    format: FormatOption = "auto",
    columns: ColumnsOption = None,
    allow_loss: Annotated[
        bool,
        typer.Option("--allow-loss", help="Also convert pairs to judgements, or to their chosen answer."),
    ] = False,
    overwrite: OverwriteOption = False,
    yes: AgreeOption = False,
    as_json: AsJson = False,
) -> None:
    """Write a dataset in another format. A row that would lose information is refused, with its position."""
    from gym_fed.data.column_question import agreed_columns
    from gym_fed.data.formats.base import BadRow
    from gym_fed.data.reading import iter_rows, parse_columns, renaming
    from gym_fed.data.rows import unread_in_words, unread_keys
    from gym_fed.data.writing import check_output, convert_row, write_rows

    check_output(file, overwrite)
    rename = renaming(agreed_columns(source, format, parse_columns(columns), yes=yes))
    unread: Counter[str] = Counter()

    def converted() -> Iterator[dict[str, Any]]:
        for place, row in with_progress(iter_rows(source, format, rename=rename)):
            unread.update(unread_keys([row]))
            try:
                yield from convert_row(row, to, allow_loss=allow_loss)
            except BadRow as bad:
                raise GymError(ErrorCode.DATA_INVALID, f"{place}: {bad.problem}", bad.remedy) from bad

    count = write_rows(file, converted(), overwrite=overwrite)
    figures = {"file": str(file), "num_rows": count, "format": to, "unread": dict(unread)}
    lines = (f"{counted(count, 'row')} in {file}", unread_in_words(unread))
    _print_figures(as_json, figures, [line for line in lines if line])


def mix(
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE[:WEIGHT]...", help="Files, folders, patterns or URLs.")
    ],
    file: OutOption,
    num: Annotated[
        int | None,
        typer.Option("--num", "-n", min=1, help="Number of rows.", show_default="until a source ends"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the row order.")] = 0,
    stopping: Annotated[
        StoppingRule, typer.Option("--stopping", help="When to stop.")
    ] = StoppingRule.first_exhausted,
    overwrite: OverwriteOption = False,
    as_json: AsJson = False,
) -> None:
    """Mix datasets: each row comes from a source with a probability proportional to its weight."""
    from gym_fed.data.pipeline import DataPipeline
    from gym_fed.data.writing import check_output, write_rows

    check_output(file, overwrite)
    pairs = [_weighted(source) for source in sources]
    pipeline = DataPipeline(sources=pairs, seed=seed).mix(stopping=stopping.value)
    if num is not None:
        pipeline = pipeline.take(num)
    counts = [0] * len(pairs)

    def taken() -> Iterator[dict[str, Any]]:
        for index, row in with_progress(pipeline.numbered()):
            counts[index] += 1
            yield row

    count = write_rows(file, taken(), overwrite=overwrite)
    shares = {path: part for (path, _), part in zip(pairs, counts, strict=True)}
    lines = [f"{counted(count, 'row')} in {file}"]
    lines += [f"  {part:8} ({part / max(count, 1):.1%}) from {path}" for path, part in shares.items()]
    if num is not None and count < num:
        lines.append(f"fewer rows than --num {num}: a source has ended; see --stopping")
    ended = pipeline.report.ended
    if ended is not None:
        every = StoppingRule.all_exhausted_without_replacement.value
        lines.append(
            f"{ended} has ended, but other sources may have rows left; to use them: --stopping {every}"
        )
    figures = {"file": str(file), "num_rows": count, "rows_of_sources": shares, "seed": seed, "ended": ended}
    _print_figures(as_json, figures, lines)


def dedup(
    source: Annotated[str, typer.Argument(metavar="IN", help="A data file, folder, pattern or URL.")],
    file: OutOption,
    near: Annotated[
        float | None,
        typer.Option(
            "--near",
            min=0.3,
            max=0.99,
            help="Also drop rows at least this similar to an earlier one, such as 0.8.",
        ),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact/--no-exact", help="Drop exact duplicates of earlier rows.")
    ] = True,
    format: FormatOption = "auto",
    overwrite: OverwriteOption = False,
    as_json: AsJson = False,
) -> None:
    """Drop duplicate rows (and near-duplicates, with --near) and show what was dropped."""
    from gym_fed.data.reading import iter_raw
    from gym_fed.data.steps import DedupStep, Report, text_of
    from gym_fed.data.writing import check_output, write_rows

    if not exact and near is None:
        raise GymError(ErrorCode.USAGE, "--no-exact without --near drops nothing", "add --near 0.8")
    check_output(file, overwrite)
    report = Report()
    texts: list[str] = []
    duplicate_reason = DedupStep(exact, near).start(None, report)

    def unique_rows() -> Iterator[dict[str, Any]]:
        for place, raw, row in with_progress(iter_raw(source, format)):
            report.read += 1
            reason = duplicate_reason(place, row)
            if reason is None:
                yield raw
                continue
            report.dropped[reason] += 1
            if len(texts) < _EXAMPLES:
                texts.append(text_of(row))

    count = write_rows(file, unique_rows(), overwrite=overwrite)
    figures = {
        "file": str(file),
        "rows_read": report.read,
        "num_rows": count,
        "dropped": dict(report.dropped),
        "duplicates": [vars(duplicate) for duplicate in report.duplicates],
    }
    dropped = ", ".join(counted(number, reason) for reason, number in sorted(report.dropped.items()))
    lines = [f"{count} of {counted(report.read, 'row')} in {file}; dropped: {dropped or 'nothing'}"]
    for duplicate, text in zip(report.duplicates, texts, strict=False):
        alike = "equals" if duplicate.similarity == 1 else f"is {duplicate.similarity:.0%} similar to"
        lines += [f"  {duplicate.place} {alike} {duplicate.earlier}", f"    {_excerpt(text)}"]
    if len(report.duplicates) > len(texts):
        lines.append(f"  ... and {len(report.duplicates) - len(texts)} more; --json lists all")
    _print_figures(as_json, figures, lines)


def _weighted(source: str) -> tuple[str, float]:
    """Split ``PATH:0.7`` into path and weight; the default weight is 1."""
    path, colon, weight = source.rpartition(":")
    if not colon or weight.startswith("//"):
        return source, 1.0
    try:
        return path, float(weight)
    except ValueError as error:
        if Path(source).exists() or "://" in source:
            return source, 1.0
        raise GymError(
            ErrorCode.USAGE, f"{source}: {weight!r} is not a weight", "write PATH:WEIGHT, such as a.jsonl:0.7"
        ) from error


def _excerpt(text: str) -> str:
    line = " ".join(harmless(text).split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."


def _print_figures(as_json: bool, figures: dict[str, Any], lines: list[str]) -> None:
    """Print the figures with ``--json``, otherwise the lines, the first of them to standard error."""
    if not as_json:
        err.print(lines[0])
    print_result(as_json, figures, *lines[1:])
