"""Tokenizers of variants with added tokens: what a server accepts, and who waits while one is built."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta import vocabulary as delta_vocabulary
from gym_fed.delta.added_tokens import MAX_SERVED_TEXT_BYTES, AddedToken, AddedTokens
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.vocabulary import extended_by
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.serving.engine.vocabularies import Vocabularies, Vocabulary
from gym_fed.serving.forward.variant_weights import VariantTokens
from gym_fed.serving.store.store import VariantStore
from tests.support.wait import SECONDS


class Lists:
    """The source of variants of a server, as far as their tokens go."""

    def __init__(self, **variants: AddedTokens) -> None:
        self._variants = variants

    def added_tokens(self, name: str) -> VariantTokens | None:
        return VariantTokens(name, self._variants[name], None)


def vocabularies(**variants: AddedTokens) -> Vocabularies:
    tokenizer = load_tokenizer("gym-nano")
    source: Any = Lists(**variants)
    return Vocabularies(Vocabulary(tokenizer, len(tokenizer), frozenset()), source)


def tokens(*texts: str, flags: tuple[str, ...] = ()) -> AddedTokens:
    first = len(load_tokenizer("gym-nano"))
    return AddedTokens(tuple(AddedToken(first + i, text, flags) for i, text in enumerate(texts)))


def long_texts(size_bytes: int) -> tuple[str, ...]:
    """Different texts of 256 ASCII characters, with this number of bytes in total."""
    return tuple(f"{number:0256d}" for number in range(size_bytes // 256))


def test_texts_of_added_tokens_up_to_the_limit_are_served_and_longer_ones_are_refused_by_name() -> None:
    most = long_texts(MAX_SERVED_TEXT_BYTES)
    served = vocabularies(most=tokens(*most), over=tokens(*most, "x"), wide=tokens("é" * 256, *most[1:], "x"))
    assert served.of("most").tokenizer.convert_tokens_to_ids(most[-1]) == tokens(*most).tokens[-1].id
    for name in ("over", "wide"):
        with pytest.raises(GymError, match=rf"variant '{name}': .*131,?072 bytes") as caught:
            served.of(name)
        assert caught.value.code is ErrorCode.MODEL_INVALID
        assert "gym delta apply" in str(caught.value.hint)


def test_a_store_refuses_a_delta_whose_added_texts_are_too_long(tmp_path: Path, tiny_base: Path) -> None:
    loaded = load_model(str(tiny_base))
    spec = BaseSpec.of(loaded.model, str(tiny_base))
    first = len(loaded.tokenizer)
    texts = (*long_texts(MAX_SERVED_TEXT_BYTES), "x")
    added = AddedTokens(tuple(AddedToken(first + i, text) for i, text in enumerate(texts)))
    (name,) = (
        n for n, p in loaded.model.named_parameters() if p is loaded.model.get_input_embeddings().weight
    )
    width = loaded.model.get_input_embeddings().weight.shape[1]
    rows = DeltaEntry.of(f"{name}[{first}:]", torch.zeros(len(texts), width), "dense", dtype="bfloat16")
    file = tmp_path / "long.gymdelta"
    write_delta(file, [rows], spec, {}, added)
    with VariantStore.open(tmp_path / "store", require_signature=False) as store:
        with pytest.raises(GymError, match=r"long\.gymdelta: the texts of its 513 added tokens"):
            store.add(file, name="long", owner="ann")
        assert not list(store.list())


def test_other_variants_do_not_wait_while_a_tokenizer_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    building, resume, built = threading.Event(), threading.Event(), list[str]()

    def extended(tokenizer: Any, added: AddedTokens, name: str) -> Any:
        built.append(name)
        if "slow" in name:
            building.set()
            assert resume.wait(SECONDS)
        return extended_by(tokenizer, added, name)

    monkeypatch.setattr(delta_vocabulary, "extended_by", extended)
    served = vocabularies(slow=tokens("<a>"), fast=tokens("<b>"))
    same: list[Vocabulary] = []
    waiting = [threading.Thread(target=lambda: same.append(served.of("slow")), daemon=True) for _ in range(2)]
    other = threading.Thread(target=lambda: served.of("fast"), daemon=True)
    try:
        for thread in waiting:
            thread.start()
        assert building.wait(SECONDS)
        other.start()
        other.join(SECONDS / 4)
        assert not other.is_alive(), "it waits for the slow variant"
    finally:
        resume.set()
    for thread in waiting:
        thread.join(SECONDS)
    assert built == ["variant 'slow'", "variant 'fast'"]
    assert len(same) == 2
    assert same[0] is same[1]


def test_special_tokens_among_others_are_compiled_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    base = load_tokenizer("gym-nano")
    calls: list[int] = []
    original = type(base).add_tokens

    def counted_call(self: Any, new: Any, special_tokens: bool = False) -> int:
        calls.append(len(new))
        return original(self, new, special_tokens)

    monkeypatch.setattr(type(base), "add_tokens", counted_call)
    first = len(base)
    mixed = AddedTokens(
        tuple(AddedToken(first + i, f"<{i:02d}>", ("special",) if i % 2 else ()) for i in range(40))
    )
    wider = extended_by(base, mixed, "v")
    assert calls == [40]
    assert [wider.added_tokens_decoder[t.id].special for t in mixed.tokens] == [False, True] * 20
    assert wider.decode([t.id for t in mixed.tokens[:3]], skip_special_tokens=True) == "<00><02>"
