"""The pipeline: lazy, in bounds, without duplicates, mixed by weight, packed and cached; the same rows every time."""

from __future__ import annotations

import json
import random
import string
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gym_fed import Trainer, TrainingConfig
from gym_fed.base.models import load_tokenizer
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import DataPipeline, encode_rows
from gym_fed.data.steps import NearDuplicates, rows_per_band, signature


def texts(name: str, count: int) -> list[dict[str, Any]]:
    return [{"text": f"{name} {index}"} for index in range(count)]


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def words(rng: random.Random, count: int) -> list[str]:
    return ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9))) for _ in range(count)]


def test_nothing_is_opened_before_rows_are_taken(tmp_path: Path) -> None:
    pipeline = DataPipeline(sources=[tmp_path / "later.jsonl"])
    with pytest.raises(GymError) as caught:
        next(iter(pipeline))
    assert caught.value.code is ErrorCode.FILE_NOT_FOUND
    write(tmp_path / "later.jsonl", texts("a", 2))
    assert list(pipeline) == texts("a", 2)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_streaming_holds_a_bounded_number_of_rows(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are counted while they are alive: as many for 5000 rows as for any number."""
    import weakref

    from gym_fed.data import sources

    alive = most = 0
    read = sources.iter_rows

    def counting(*arguments: Any, **more: Any) -> Any:
        def gone() -> None:
            nonlocal alive
            alive -= 1

        nonlocal alive
        for place, row in read(*arguments, **more):
            alive += 1
            weakref.finalize(row, gone)
            yield place, row

    monkeypatch.setattr(sources, "iter_rows", counting)
    file = tmp_path / f"a{suffix}"
    rows = texts("a", 5000)
    if suffix == ".jsonl":
        write(file, rows)
    elif suffix == ".csv":
        file.write_text("text\n" + "".join(f"{row['text']}\n" for row in rows))
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=500)
    count = 0
    for _ in DataPipeline(sources=[(file, 1.0)]).dedup(near=None).stream():
        count += 1
        most = max(most, alive)
    assert count == 5000
    assert most <= 3


def test_filters_keep_what_is_in_bounds_and_say_why_the_rest_went(tokenizer: Any) -> None:
    rows = [{"text": "x" * length} for length in (1, 5, 20)] + [{"text": "ban"}]
    pipeline = DataPipeline(sources=[rows], tokenizer=tokenizer)
    kept = (
        pipeline.filter(min_characters=2)
        .filter(max_tokens=len(tokenizer("x" * 5)["input_ids"]) + 1)
        .filter(lambda row: "b" not in row["text"])
    )
    assert list(kept) == [{"text": "xxxxx"}]
    assert kept.report.dropped == {"too few characters": 1, "too many tokens": 1, "filtered": 1}
    assert (kept.report.read, kept.report.kept) == (4, 1)


def test_a_text_that_repeats_itself_is_found_by_its_characters() -> None:
    rng = random.Random(0)
    plain = {"text": " ".join(words(rng, 60))}
    looping = {"text": "to be or not to be, " * 20}
    chinese = {"text": "".join(chr(0x4E00 + rng.randrange(3000)) for _ in range(200))}
    pipeline = DataPipeline(sources=[[plain, looping, chinese]]).filter(max_repetition=0.3)
    assert list(pipeline) == [plain, chinese]


def test_exact_duplicates_are_dropped_across_sources_and_named_by_place(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [*texts("a", 3), {"text": "a 1"}])
    pipeline = (
        DataPipeline(sources=[file, texts("a", 2)]).dedup().mix(stopping="all_exhausted_without_replacement")
    )
    assert sorted(row["text"] for row in pipeline) == ["a 0", "a 1", "a 2"]
    assert pipeline.report.dropped == {"exact duplicate": 3}
    assert {(d.place, d.earlier) for d in pipeline.report.duplicates if "jsonl" in d.place} & {
        (f"{file}:4", f"{file}:2"),
        (f"{file}:4", "row 2"),
    }


def jaccard(a: str, b: str) -> float:
    left, right = ({t[i : i + 5] for i in range(len(t) - 4)} for t in (a, b))
    return len(left & right) / len(left | right)


def test_near_duplicates_are_found_and_different_texts_are_not() -> None:
    """Recall and precision against the true similarity, on texts with one to three words changed, and on others."""
    rng = random.Random(1)
    vocabulary = words(rng, 400)
    originals = [rng.choices(vocabulary, k=80) for _ in range(150)]
    index = NearDuplicates(0.8)
    for original in originals:
        assert index.find_or_add(" ".join(original)) is None
    found = clear = false = 0
    for number, original in enumerate(originals):
        changed = list(original)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(80)] = "".join(rng.choices(string.ascii_lowercase, k=6))
        if jaccard(" ".join(original), " ".join(changed)) >= 0.88:  # two deviations above the threshold
            clear += 1
            hit = index.find_or_add(" ".join(changed))
            found += hit is not None and hit[0] == number
        half = original[:40] + rng.choices(vocabulary, k=40)
        false += index.find_or_add(" ".join(half)) is not None
    assert clear > 80
    assert found / clear > 0.97
    assert false == 0


def test_the_estimate_is_close_to_the_true_similarity() -> None:
    rng = random.Random(2)
    for share in (10, 30, 60):
        left = words(rng, 80)
        right = left[:share] + words(rng, 80 - share)
        truth = jaccard(" ".join(left), " ".join(right))
        estimate = signature(" ".join(left)).jaccard(signature(" ".join(right)))
        assert abs(estimate - truth) < 0.13, share  # three deviations of 128 hash functions


def test_minima_are_the_same_on_every_machine_and_blind_to_case_and_space() -> None:
    minima = signature("the quick brown fox")
    assert minima.hashvalues[:4].tolist() == [245755777, 28674407, 1723476366, 44266469]
    assert signature("The  quick\nbrown FOX") == minima
    assert signature("") == signature("  ")
    assert signature("\ud800") != signature("")


def test_bands_are_as_long_as_the_recall_allows() -> None:
    for threshold in (0.5, 0.8, 0.95):
        rows = rows_per_band(threshold)
        assert 1 - (1 - threshold**rows) ** (128 // rows) >= 0.99
        assert 1 - (1 - threshold ** (rows + 1)) ** (128 // (rows + 1)) < 0.99


def test_dedup_by_near_keeps_the_first_and_names_both() -> None:
    rng = random.Random(3)
    original = words(rng, 60)
    close = [*original[:-1], "changed"]
    rows = [{"text": " ".join(original)}, {"text": " ".join(words(rng, 60))}, {"text": " ".join(close)}]
    pipeline = DataPipeline(sources=[rows]).dedup(exact=True, near=0.8)
    assert list(pipeline) == rows[:2]
    (duplicate,) = pipeline.report.duplicates
    assert (duplicate.place, duplicate.earlier) == ("row 3", "row 1")
    assert 0.8 <= duplicate.similarity < 1


def test_mixing_follows_the_weights_and_the_seed() -> None:
    sources = [(texts("a", 4000), 0.7), (texts("b", 4000), 0.3)]
    mixed = list(DataPipeline(sources=sources, seed=1).take(2000))
    share = sum(row["text"].startswith("a") for row in mixed) / 2000
    assert 0.66 < share < 0.74
    assert mixed == list(DataPipeline(sources=sources, seed=1).take(2000))
    assert mixed != list(DataPipeline(sources=sources, seed=2).take(2000))
    even = DataPipeline(sources=sources).mix([1, 1]).take(2000)
    assert 900 < sum(row["text"].startswith("a") for row in even) < 1100


def test_the_stopping_rules_do_what_their_names_say() -> None:
    sources = [(texts("a", 30), 0.5), (texts("b", 300), 0.5)]

    def counts(stopping: Any) -> Counter[str]:
        return Counter(row["text"] for row in DataPipeline(sources=sources).mix(stopping=stopping))

    first = counts("first_exhausted")
    assert max(first.values()) == 1
    assert sum(name.startswith("a") for name in first) == 30
    assert sum(name.startswith("b") for name in first) < 300
    everything = counts("all_exhausted")
    assert len(everything) == 330
    assert everything["a 0"] > 5
    once = counts("all_exhausted_without_replacement")
    assert len(once) == 330
    assert set(once.values()) == {1}


def test_steps_before_the_mixture_leave_its_shares_alone() -> None:
    half = [{"text": f"a {i}", "drop": i % 2} for i in range(4000)]
    pipeline = DataPipeline(sources=[half, texts("b", 4000)]).filter(lambda row: not row.get("drop"))

    def share(mixed: DataPipeline) -> float:
        return sum(row["text"].startswith("a") for row in mixed.take(1000)) / 1000

    assert 0.45 < share(pipeline.mix()) < 0.55
    assert 0.28 < share(pipeline) < 0.38


def test_rows_are_encoded_and_packed_as_encode_rows_does_it(tokenizer: Any) -> None:
    rows = texts("some words", 2500)  # more than one chunk of the encoder
    pipeline = DataPipeline(sources=[rows], tokenizer=tokenizer, sequence_length=32)
    assert list(pipeline) == encode_rows(tokenizer, rows, max_length=32)
    packed = list(pipeline.pack())
    assert packed == encode_rows(tokenizer, rows, max_length=32, assistant_only=False, packing=True)
    assert {len(row["input_ids"]) for row in packed[:-1]} == {32}


def test_encoded_rows_come_from_the_cache_when_nothing_has_changed(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a.jsonl", texts("a", 50))

    def pipeline(**settings: Any) -> DataPipeline:
        arguments = {"tokenizer": tokenizer, "sequence_length": 16, **settings}
        return DataPipeline(sources=[file], **arguments).dedup().cache(tmp_path / "cache")

    fresh = list(pipeline())
    assert pipeline().is_cached()
    with monkeypatch.context() as patch:  # a hit encodes nothing
        patch.setattr("gym_fed.data.pipeline.iter_encoded", lambda *a, **k: pytest.fail("encoded again"))
        assert list(pipeline()) == fresh

    other = load_tokenizer("gym-nano")
    other.chat_template = "{{ messages }}"
    assert not pipeline(sequence_length=17).is_cached()
    assert not pipeline(tokenizer=other).is_cached()
    assert not pipeline(seed=5).is_cached()
    assert not pipeline().filter(min_characters=1).is_cached()
    stat = file.stat()
    content = file.read_text().replace("a 7", "b 7")  # as long as before, and as old
    file.write_text(content)
    import os

    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert not pipeline().is_cached()
    assert list(pipeline()) != fresh


def test_a_torn_or_damaged_cache_is_never_read(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def pipeline() -> DataPipeline:
        rows = texts("a", 50)
        return DataPipeline(sources=[rows], tokenizer=tokenizer, sequence_length=16).cache(tmp_path)

    rows = iter(pipeline())
    next(rows)
    rows.close()  # type: ignore[attr-defined]
    assert not pipeline().is_cached()
    assert list(tmp_path.iterdir()) == []
    fresh = list(pipeline())
    (file,) = tmp_path.glob("*.arrow")
    written = file.read_bytes()
    data = bytearray(written)
    data[-20] ^= 1
    file.write_bytes(bytes(data))
    assert list(pipeline()) == fresh
    assert "its bytes have changed; it will be rewritten" in " ".join(capsys.readouterr().err.split())
    assert file.read_bytes() == written


def test_a_source_changed_while_it_is_read_is_not_cached(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.jsonl", texts("a", 10))
    pipeline = DataPipeline(sources=[file], tokenizer=tokenizer, sequence_length=16).cache(tmp_path / "cache")
    rows = iter(pipeline)
    next(rows)
    write(file, texts("b", 10))
    list(rows)
    assert not pipeline.is_cached()
    write(file, texts("a", 10))
    assert not pipeline.is_cached()


def test_a_function_is_cached_under_its_key_only(tmp_path: Path, tokenizer: Any) -> None:
    base = DataPipeline(sources=[texts("a", 9)], tokenizer=tokenizer, sequence_length=16).cache(tmp_path)
    with pytest.raises(GymError, match="filter functions cannot be distinguished"):
        list(base.filter(lambda row: True))
    assert list(base.filter(lambda row: True, key="all"))
    assert not base.filter(lambda row: False, key="none").is_cached()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: DataPipeline(sources=[]), "none given"),
        (lambda: DataPipeline(sources=[("a", 0.0)]), "weight 0.0"),
        (lambda: DataPipeline(sources=[3]), "a source has the type int"),  # type: ignore[list-item]
        (lambda: DataPipeline(sources=["a"], sequence_length=8), "needs a tokenizer"),
        (lambda: DataPipeline(sources=["a"]).filter(), "nothing to filter by"),
        (lambda: DataPipeline(sources=["a"]).filter(min_tokens=1), "need a tokenizer"),
        (lambda: DataPipeline(sources=["a"]).dedup(near=1.5), "out of range"),
        (lambda: DataPipeline(sources=["a"]).mix([1, 2]), "1 source needs"),
        (lambda: DataPipeline(sources=["a"]).mix(stopping="never"), "unknown"),  # type: ignore[arg-type]
        (lambda: DataPipeline(sources=["a"]).mix().mix(), "mixed already"),
        (lambda: DataPipeline(sources=["a"]).take(3).dedup(), "take must come after"),
        (lambda: DataPipeline(sources=["a"]).pack(), "sequence_length"),
        (lambda: DataPipeline(sources=["a"]).cache("c"), "sequence_length"),
    ],
)
def test_what_does_not_fit_together_is_refused_at_once(make: Any, problem: str) -> None:
    with pytest.raises(GymError, match=problem) as caught:
        make()
    assert caught.value.code is ErrorCode.USAGE


@pytest.mark.parametrize("encoded", [False, True])
def test_a_trainer_learns_from_a_pipeline(tmp_path: Path, tiny_base: Path, encoded: bool) -> None:
    file = write(tmp_path / "a.jsonl", [{"text": "abc abc abc abc"}] * 8 + [{"text": "drop me"}])
    tokenizer = load_tokenizer(str(tiny_base))
    settings: dict[str, Any] = {"tokenizer": tokenizer, "sequence_length": 16} if encoded else {}
    pipeline = DataPipeline(sources=[file], **settings).filter(lambda row: "drop" not in row["text"])
    config = TrainingConfig(
        model=str(tiny_base),
        output_dir=tmp_path / "run",
        max_steps=12,
        learning_rate=0.02,
        per_device_train_batch_size=4,
        save_steps=0,
    )
    result = Trainer(config).train(dataset=pipeline)
    assert result.num_examples == 8
    assert result.losses[-1] < result.losses[0] - 0.5


def test_rows_encoded_by_another_tokenizer_are_refused(tmp_path: Path, tiny_base: Path) -> None:
    config = TrainingConfig(model=str(tiny_base), output_dir=tmp_path / "run", max_steps=1)
    with pytest.raises(GymError, match=r"row 1 has token id 99999"):
        Trainer(config).train(dataset=[{"input_ids": [1, 99999], "labels": [1, 99999]}])
