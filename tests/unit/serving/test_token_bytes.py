"""The bytes of each token, for every kind of tokenizer, and texts that are decoded from them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gym_fed.base.models import load_tokenizer
from gym_fed.serving.engine.detokenizing import TextDecoder, byte_level_alphabet

TEXTS = (
    "Once upon a time, Zoë saw 日本 and ran  home.",
    "naïve cafè 🙂👩‍👩‍👧 end",
    "it 's a dog . do n't !",
    " leading and trailing ",
    "\tline\n\nline \ufffd",
)
WORDS = [
    "a",
    "time",
    "dog",
    "home",
    "upon",
    "ran",
    "line",
    "end",
    "café",
    "it",
    "s",
    ".",
    "!",
    ",",
    "'",
    "do",
    "n't",
]


def wrapped(backend: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend)


def byte_level() -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens(["café", "õ", "日本", "<tool>", "     "])
    backend.add_special_tokens(["<|end|>", "<｜fin▁de▁tour｜>"])
    return wrapped(backend)


def byte_fallback(scheme: str = "always") -> Any:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"▁abcdefghijklmnopqrstuvwxyzOZë.,!'", "▁a", "▁ti", "me", "▁Zo", "ho", "ran", "▁ran"]
    pairs = [("▁", "a"), ("h", "o")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if scheme == "always":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    backend.add_tokens([AddedToken("café", normalized=False)])
    return wrapped(backend)


def metaspace() -> Any:
    pieces = [
        ("<unk>", 0.0),
        *((f"▁{word}", -2.0) for word in WORDS),
        *((char, -6.0) for char in "▁abcdefghi.,!'Zë"),
    ]
    backend = Tokenizer(models.Unigram(pieces, 0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return wrapped(backend)


def word_piece() -> Any:
    pieces = [
        "[UNK]",
        "[SEP]",
        *WORDS,
        *"abcdefghijklmnopqrstuvwxyz",
        *(f"##{char}" for char in "abcdeghimnoprstuy"),
    ]
    backend = Tokenizer(
        models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[SEP]"])
    return wrapped(backend)


def end_of_word() -> Any:
    pieces = [
        "<unk>",
        *"abcdefghijklmnopqrstuvwxyz",
        *(f"{char}</w>" for char in "abcdefghijklmnopqrstuvwxyz."),
    ]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    return wrapped(backend)


def no_decoder() -> Any:
    backend = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(["?", *WORDS])}, unk_token="?")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return wrapped(backend)


KINDS: dict[str, Callable[[], Any]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_fallback_first": lambda: byte_fallback("first"),
    "metaspace": metaspace,
    "word_piece": word_piece,
    "end_of_word": end_of_word,
    "no_decoder": no_decoder,
}


@cache
def tokenizer_of(kind: str) -> SimpleNamespace:
    tokenizer = KINDS[kind]()
    return SimpleNamespace(hf=tokenizer, ours=TextDecoder(tokenizer))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_transformers_whole_and_continued(kind: str, text: str) -> None:
    one = tokenizer_of(kind)
    ids = one.hf.encode(text, add_special_tokens=False)
    whole = one.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert one.ours.text(ids) == whole
    for cut in range(len(ids)):
        stream = one.ours.stream(ids[:cut])
        prompt = one.ours.text(ids[:cut]).rstrip("\ufffd")
        assert prompt + "".join(map(stream.push, ids[cut:])) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_every_whole_token_has_the_text_that_transformers_decodes_after_another(kind: str) -> None:
    one = tokenizer_of(kind)
    before = one.hf.encode("a", add_special_tokens=False)[-1]
    start = len(one.hf.decode([before]))
    compared = 0
    for token_id in one.hf.get_vocab().values():
        text = one.hf.decode([before, token_id], clean_up_tokenization_spaces=False)[start:]
        if "\ufffd" not in text:
            assert one.ours.token(token_id).decode() == text
            compared += 1
    assert compared > 15


def test_parts_of_characters_have_their_bytes() -> None:
    level, fallback = tokenizer_of("byte_level"), tokenizer_of("byte_fallback")
    for char, byte in byte_level_alphabet().items():
        if char != "õ":  # an added token, which is that character
            assert level.ours.token(level.hf.get_vocab()[char]) == bytes([byte])
    for byte in range(256):
        assert fallback.ours.token(1 + byte) == bytes([byte])


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_a_text_are_its_utf_8(text: str) -> None:
    one = tokenizer_of("byte_level")
    ids = one.hf.encode(text, add_special_tokens=False)
    assert b"".join(map(one.ours.token, ids)) == text.encode()


def test_added_tokens_decode_completely() -> None:
    for kind, texts in {
        "byte_level": ["café", "õ", "日本", "<tool>", "     "],
        "byte_fallback": ["café"],
    }.items():
        one = tokenizer_of(kind)
        for text in texts:
            (token_id,) = one.hf.encode(f"a{text}", add_special_tokens=False)[-1:]
            assert one.hf.convert_ids_to_tokens(token_id) == text
            assert one.ours.token(token_id) == text.encode()
            assert one.ours.stream([token_id]).push(token_id) == text


def test_special_tokens_have_bytes_and_are_shown_only_on_request() -> None:
    one = tokenizer_of("byte_level")
    text = "a<|end|>b<｜fin▁de▁tour｜>"
    ids = one.hf.encode(text, add_special_tokens=False)
    assert "".join(map(one.ours.stream([]).push, ids)) == one.ours.text(ids) == "ab"
    assert (
        "".join(map(one.ours.stream([], special=True).push, ids)) == one.ours.text(ids, special=True) == text
    )
    assert b"".join(map(one.ours.token, ids)) == text.encode()


def test_an_id_outside_the_vocabulary_has_no_bytes() -> None:
    assert tokenizer_of("byte_level").ours.token(99_999) == b""


def test_a_character_that_the_prompt_began_is_completed_or_not_the_answer_s() -> None:
    one = tokenizer_of("byte_level")
    first, *rest = (one.hf.get_vocab()[char] for char in "æĹ¥")  # 日
    stream = one.ours.stream([first])
    assert [stream.push(token_id) for token_id in rest] == ["", "日"]
    other = one.ours.stream([first])
    assert other.push(one.hf.get_vocab()["a"]) == "a"
    assert other.span == (0, 1)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_tokens_stream_to_the_text_of_their_bytes(data: Any) -> None:
    one = tokenizer_of(data.draw(st.sampled_from(list(KINDS))))
    known = st.sampled_from(sorted(one.hf.get_vocab().values()))
    prompt, ids = data.draw(st.lists(known, max_size=4)), data.draw(st.lists(known, max_size=24))
    stream = one.ours.stream(prompt)
    text, joined, last = "", b"", 0
    for token_id in ids:
        hidden, added = stream.hides(token_id), stream.bytes_of(token_id)
        text += stream.push(token_id)
        if hidden:
            continue
        joined += added
        start, end = stream.span
        assert last <= start <= end <= stream.position + 1
        last = start
        assert stream.position == len(text)
    if not stream_continues_prompt(one, prompt):
        assert joined.decode(errors="replace").startswith(text)
        assert len(joined.decode(errors="replace")) - len(text) <= 1


def stream_continues_prompt(one: SimpleNamespace, prompt: list[int]) -> bool:
    return one.ours.text(prompt).endswith("\ufffd")


@pytest.mark.shared
@pytest.mark.parametrize("name", ["stories260K"])
def test_real_tokenizers_agree_with_transformers(shared_folder: Any, name: str) -> None:
    tokenizer = load_tokenizer(str(shared_folder / "models" / name))
    decoder = TextDecoder(tokenizer)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert decoder.text(ids) == tokenizer.decode(ids)
        assert b"".join(map(decoder.token, ids)) == f" {text}".encode()
