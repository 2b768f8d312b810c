"""`gym data show`: print rows as the model sees them, with learned tokens in colour, and their lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.cli.data.files import with_progress
from gym_fed.cli.options import LIMIT, refuse_options
from gym_fed.core.console import AsJson, err, out, print_json
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import AgreeOption, ColumnsOption, FormatOption, IgnoreUnsupported, SetOption
from gym_fed.core.text import counted, harmless

if TYPE_CHECKING:
    from gym_fed.config.train.training import TrainingConfig
    from gym_fed.data.preview import PreviewedSequence, Segment
    from gym_fed.data.row_counts import RowCounts
    from gym_fed.evaluation.contamination_check import ContaminationCheck, ContaminationReport
    from gym_fed.training.vision.picture_check import PictureCheck


_LEARNT, _READ = "bold green", "dim"


def show(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|CONFIG", help="A data file, folder, pattern or URL; or a config of gym train."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Model whose tokenizer to use.",
            show_default="the config's, or gym-nano",
        ),
    ] = None,
    num: Annotated[int, typer.Option("--num", "-n", min=0, help="Number of rows to show.")] = 3,
    format: FormatOption = "auto",
    columns: ColumnsOption = None,
    max_length: Annotated[
        int | None,
        typer.Option("--max-length", min=2, help="Maximum number of tokens per row; longer rows are cut."),
    ] = None,
    limit: Annotated[int | None, LIMIT] = None,
    set_: SetOption = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against",
            metavar="A,B",
            help="Search for rows of these evaluation suites or tasks.",
            show_default="every suite on this machine",
        ),
    ] = None,
    ignore_unsupported: IgnoreUnsupported = False,
    yes: AgreeOption = False,
    as_json: AsJson = False,
) -> None:
    """Show rows as the model sees them: learned tokens in colour, all others dim; and the rows' lengths."""
    from gym_fed.evaluation.contamination_check import ContaminationCheck, filters_here

    contamination = ContaminationCheck(filters_here(_names(against)))
    if source.endswith((".yaml", ".yml")):
        of_files = {"--format": format != "auto", "--columns": columns, "--max-length": max_length}
        refuse_options(of_files, "applies only to data files", "set them in the config instead")
        from gym_fed.config.training_file import load_training_config

        config, notes = load_training_config(source, set_ or [], ignore_unsupported=ignore_unsupported)
        for note in notes:
            err.print(f"note: {note}")
        view = _config_rows(config, model, limit, contamination)
    else:
        of_configs = {"--set": set_, "--ignore-unsupported": ignore_unsupported}
        refuse_options(of_configs, "applies only to training configs", "omit it")
        view = _file_view(source, model, format, columns, yes, max_length, limit, contamination)

    from gym_fed.base.models import quiet_loading
    from gym_fed.data.preview import Statistics
    from gym_fed.data.row_counts import RowCounts

    statistics = Statistics()
    shown: list[tuple[str, list[PreviewedSequence]]] = []
    with quiet_loading():  # transformers warns about long rows, which are counted here
        for place, sequences in with_progress(view.rows):
            statistics.add(sequences)
            if len(shown) < num:
                shown.append((place, sequences))
    if not statistics.rows:
        raise GymError(ErrorCode.DATA_INVALID, f"{source} contains no rows", "add at least one row")
    counts = view.counts or statistics.counts
    counts.unread, counts.forms = dict(view.unread), dict(view.forms)
    report, pictures = contamination.report, view.pictures
    figures = {
        **statistics.summary(),
        "learned": counts.as_dict(),
        "contamination": asdict(report),
        "pictures": asdict(pictures),
    }
    if as_json:
        rows = [_as_json(place, sequences, view.tokenizer) for place, sequences in shown]
        print_json({"source": source, "model": view.model, **figures, "rows_shown": rows})
        return
    for place, sequences in shown:
        for sequence in sequences:
            _print(place, sequence, view.tokenizer)
    _print_figures(figures, view.model, view.max_length)
    if statistics.prompts == statistics.rows:
        out.print("all rows are prompts, for training with rewards; sft also needs completions")
        counts = RowCounts(unread=counts.unread, forms=counts.forms)
    _print_counts(counts, view.max_length)
    _print_contamination(report)
    if pictures.broken:
        err.print(f"warning: {pictures.describe()}", style="yellow")
        for problem in pictures.first:
            err.print(f"  {problem}", markup=False)


@dataclass(frozen=True)
class _View:
    """The rows to show with their places, tokenized."""

    model: str
    tokenizer: Any
    max_length: int | None
    rows: Iterator[tuple[str, list[PreviewedSequence]]]
    unread: Counter[str]
    forms: Counter[str]
    pictures: PictureCheck
    counts: RowCounts | None = None


def _names(texts: list[str] | None) -> list[str] | None:
    """Return the names of ``--against`` without duplicates; None without the option."""
    if texts is None:
        return None
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    if not names:
        raise GymError(ErrorCode.USAGE, "--against: no suite given", "gym eval list shows the suites")
    return list(dict.fromkeys(names))


def _file_view(
    source: str,
    model: str | None,
    format: str,
    columns: str | None,
    yes: bool,
    max_length: int | None,
    limit: int | None,
    contamination: ContaminationCheck,
) -> _View:
    from gym_fed.base.models import load_tokenizer
    from gym_fed.data.column_question import agreed_columns
    from gym_fed.data.preview import sequences_of
    from gym_fed.data.reading import iter_rows, parse_columns, renaming
    from gym_fed.data.rows import Row, unread_keys
    from gym_fed.data.string_rows import count_forms
    from gym_fed.training.vision.picture_check import PictureCheck

    rename = renaming(agreed_columns(source, format, parse_columns(columns), yes=yes))
    name = model or "gym-nano"
    tokenizer = load_tokenizer(name)
    unread: Counter[str] = Counter()
    forms: Counter[str] = Counter()
    pictures = PictureCheck()

    def noted(place: str, row: Row) -> Row:
        unread.update(unread_keys([row]))
        forms.update(count_forms(tokenizer, [row]))
        contamination.find(place, row)
        pictures.add(place, row)
        return row

    rows = (
        (place, sequences_of(tokenizer, noted(place, row), max_length=max_length))
        for place, row in islice(iter_rows(source, format, rename=rename), limit)
    )
    return _View(name, tokenizer, max_length, rows, unread, forms, pictures)


def _config_rows(
    config: TrainingConfig, model: str | None, limit: int | None, contamination: ContaminationCheck
) -> _View:
    """Return the rows of ``data:`` in the form that the config's algorithm reads."""
    from gym_fed.base.models import load_tokenizer
    from gym_fed.core.registries import ALGORITHMS
    from gym_fed.data.preview import sequences_of
    from gym_fed.data.row_counts import counts_of
    from gym_fed.data.rows import place_of, unread_keys
    from gym_fed.data.string_rows import count_forms
    from gym_fed.training.model.template_tokens import template_tokenizer
    from gym_fed.training.rows.encode_part import rows_to_encode
    from gym_fed.training.rows.run_rows import rows_of, rows_to_learn
    from gym_fed.training.vision.picture_check import PictureCheck

    algorithm = ALGORITHMS.new(config.algorithm)
    configured = config.model if config.model_init is None else config.model_init.tokenizer
    name = model or configured or "gym-nano"
    tokenizer = template_tokenizer(load_tokenizer(name), config)
    learned = rows_to_learn(config, rows_of(config))[:limit]
    forms = Counter(count_forms(tokenizer, learned))
    rows = rows_to_encode(config, tokenizer, learned)
    pictures = PictureCheck()
    for number, row in enumerate(rows, 1):
        contamination.find(place_of(row, number), row)
        pictures.add(place_of(row, number), row)
    assistant_only = config.assistant_only_loss
    if assistant_only is None:
        assistant_only = algorithm.assistant_only_default and not config.packing
    packing = config.packing
    if packing is None:
        packing = algorithm.packing_default and not assistant_only
    unread, counts = unread_keys(rows), None
    if packing:  # only the algorithm knows how rows are joined
        encoded = algorithm.encode(config, tokenizer, rows)
        rows, counts = encoded, counts_of(encoded, len(rows))
    previews = (
        (
            f"packed row {number}" if packing else place_of(row, number),
            sequences_of(
                tokenizer,
                row,
                max_length=config.max_length,
                assistant_only=assistant_only,
                mask_history=config.mask_history,
                reasoning=config.reasoning,
            ),
        )
        for number, row in enumerate(rows, 1)
    )
    return _View(name, tokenizer, config.max_length, previews, unread, forms, pictures, counts)


def _as_json(place: str, sequences: list[PreviewedSequence], tokenizer: Any) -> dict[str, Any]:
    return {
        "place": place,
        "sequences": [
            {
                "name": sequence.name,
                "tokens": len(sequence.encoded["input_ids"]),
                "tokens_cut": sequence.cut,
                "segments": [{"text": s.text, "learnt": s.learnt} for s in sequence.segments(tokenizer)],
            }
            for sequence in sequences
        ],
    }


def _print(place: str, sequence: PreviewedSequence, tokenizer: Any) -> None:
    """Mark learned tokens by colour on a terminal, and by >>> and <<< otherwise."""
    length = len(sequence.encoded["input_ids"])
    cut = f", the last {sequence.cut} cut off" if sequence.cut else ""
    name = "" if sequence.name == "row" else f" {sequence.name}"
    out.print(f"{place}{name}: {counted(length, 'token')}{cut}", style="bold")
    for segment in sequence.segments(tokenizer):
        out.print(_visible(segment), style=_LEARNT if segment.learnt else _READ, end="")
    out.print("\n")


def _visible(segment: Segment) -> str:
    text = harmless(segment.text)
    return f">>>{text}<<<" if segment.learnt and not out.is_terminal else text


def _print_figures(figures: dict[str, Any], model: str, max_length: int | None) -> None:
    lengths = f"mean {figures['tokens_mean']:.1f}, 95% within {figures['tokens_p95']}, longest {figures['tokens_max']}"
    out.print(
        f"{counted(figures['rows'], 'row')}, {counted(figures['tokens'], 'token')} of {model}: {lengths}"
    )
    out.print(f"{figures['share_learnt']:.1%} of the tokens are trained on")
    if max_length is not None:
        out.print(f"{counted(figures['sequences_cut'], 'sequence', 'are')} cut at max_length={max_length}")
    if figures["nothing_to_learn"]:
        err.print(
            f"{counted(figures['nothing_to_learn'], 'sequence', 'have')} no tokens to train on",
            style="yellow",
        )


def _print_contamination(report: ContaminationReport) -> None:
    """Describe the rows that contain evaluation rows; results on those suites would be meaningless."""
    if not report.contaminated:
        out.print(report.describe())
        return
    err.print(f"warning: {report.describe()}", style="yellow")
    for match in report.first:
        err.print(f"  {match.place}: {match.suite}: ... {match.words} ...")


def _print_counts(counts: RowCounts, max_length: int | None) -> None:
    """Describe what would be trained on and what is not read, with a warning if much is lost."""
    from gym_fed.data.rows import unread_in_words
    from gym_fed.data.string_rows import forms_in_words

    if counts.rows:
        out.print(counts.describe(max_length))
    for sentence in forms_in_words(counts.forms):
        out.print(sentence)
    if (unread := unread_in_words(counts.unread)) is not None:
        out.print(unread)
    if (problem := counts.warning(max_length)) is not None:
        err.print(f"warning: {problem}", style="yellow")
