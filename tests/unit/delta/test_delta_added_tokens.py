"""Fine-tunes with added tokens or a padded vocabulary, through encode, show, apply and export."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken
from typer.testing import CliRunner

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.added_tokens import AddedToken as TableToken
from gym_fed.delta.added_tokens import AddedTokens
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.vocabulary import extended_by
from gym_fed.evaluation.scoring.models import ModelRequest, open_models, resolve_model
from gym_fed.evaluation.scoring.scorer import Continuation
from gym_fed.quantization.config import CalibratedPolicy
from gym_fed.quantization.quantizer import Quantizer
from tests.support.added_tokens import save_with_tokens
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("warm_children")

TOKENS = ["<think>", "</think>", "<|step|>"]
TEXT = "<think>one two</think> yes<|step|>"
EXACT = ("--codec", "dense", "--set", "dense_dtype=float32")


@pytest.fixture(scope="module")
def untied_base(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """The tiny base with an output head of its own."""
    folder = tmp_path_factory.mktemp("untied")
    loaded = load_model(str(tiny_base))
    model: Any = loaded.model
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.5)
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def gym(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def rebuilt(base: Path, tuned: Path, folder: Path, *options: str) -> Any:
    """Encode a fine-tune, apply the delta to the base, and load the result."""
    file = folder / "d.gymdelta"
    done = gym("delta", "encode", base, tuned, "-o", file, *options)
    assert done.exit_code == 0, done.exception
    done = gym("delta", "apply", base, file, "-o", folder / "again")
    assert done.exit_code == 0, done.exception
    return load_model(str(folder / "again"))


def same_tokenizer(first: Any, second: Any) -> bool:
    ids = {number: (t.content, t.special) for number, t in first.added_tokens_decoder.items()}
    others = {number: (t.content, t.special) for number, t in second.added_tokens_decoder.items()}
    return bool(
        first.get_vocab() == second.get_vocab()
        and ids == others
        and first(TEXT)["input_ids"] == second(TEXT)["input_ids"]
        and first.eos_token == second.eos_token
    )


@pytest.mark.parametrize(("head", "rows"), [("tied", None), ("untied", "padded")])
def test_a_delta_of_a_model_with_added_tokens_gives_its_logits_and_its_tokenizer(
    tmp_path: Path, tiny_base: Path, untied_base: Path, head: str, rows: str | None
) -> None:
    base = tiny_base if head == "tied" else untied_base
    vocabulary = len(load_model(str(base)).model.get_input_embeddings().weight)
    size = None if rows is None else (vocabulary // 64 + 2) * 64
    tuned = save_with_tokens(base, tmp_path / "tuned", TOKENS, rows=size)
    again = rebuilt(base, tmp_path / "tuned", tmp_path, *EXACT)
    tokenizer = load_tokenizer(str(tmp_path / "tuned"))
    assert same_tokenizer(again.tokenizer, tokenizer)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    assert max(ids[0].tolist()) >= vocabulary
    with torch.inference_mode():
        assert torch.allclose(again.model(ids).logits, tuned.eval()(ids).logits, atol=1e-5)
    assert again.model.config.vocab_size == (size or vocabulary + len(TOKENS))


def test_new_rows_are_exact_under_one_bit_per_weight_and_unnamed_rows_are_listed(
    tmp_path: Path, tiny_base: Path
) -> None:
    vocabulary = len(load_model(str(tiny_base)).model.get_input_embeddings().weight)
    tuned = save_with_tokens(tiny_base, tmp_path / "tuned", TOKENS, rows=vocabulary + 10)
    again = rebuilt(tiny_base, tmp_path / "tuned", tmp_path)
    for part in ("get_input_embeddings", "get_output_embeddings"):
        ours, theirs = getattr(again.model, part)().weight, getattr(tuned, part)().weight
        assert torch.equal(ours[vocabulary:], theirs[vocabulary:])
    shown = json.loads(gym("delta", "show", tmp_path / "d.gymdelta", "--json").output)["vocabulary"]
    assert [token["token"] for token in shown["tokens"]] == TOKENS
    assert shown["tokens"][2]["flags"] == ["special"]
    assert shown["rows"]["without_token"] == f"{vocabulary + 3}-{vocabulary + 9}"
    plain = gym("delta", "show", tmp_path / "d.gymdelta").output
    assert f"without a token: {vocabulary + 3}-{vocabulary + 9}" in plain


def test_an_end_token_that_was_added_ends_the_text_of_the_rebuilt_model(
    tmp_path: Path, tiny_base: Path
) -> None:
    save_with_tokens(tiny_base, tmp_path / "tuned", TOKENS)
    tokenizer = load_tokenizer(str(tmp_path / "tuned"))
    tokenizer.eos_token = "<|step|>"
    tokenizer.save_pretrained(tmp_path / "tuned")
    again = rebuilt(tiny_base, tmp_path / "tuned", tmp_path)
    end = tokenizer.convert_tokens_to_ids("<|step|>")
    assert again.tokenizer.eos_token_id == end
    assert again.model.config.eos_token_id == again.model.generation_config.eos_token_id == end


def test_a_lora_run_with_added_tokens_keeps_its_factors_and_gets_its_rows(
    tmp_path: Path, untied_base: Path
) -> None:
    loaded = load_model(str(untied_base))
    model: Any = loaded.model
    loaded.tokenizer.add_tokens(["<think>"])
    old = len(model.get_input_embeddings().weight)
    model.resize_token_embeddings(old + 1, mean_resizing=False)
    torch.manual_seed(0)
    saved = ["embed_tokens", "lm_head"]
    adapted: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=saved))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn_like(parameter)
    adapted.save_pretrained(tmp_path / "run")
    loaded.tokenizer.save_pretrained(tmp_path / "run")
    ids = torch.tensor([loaded.tokenizer("<think> a")["input_ids"]])
    with torch.inference_mode():
        logits = adapted.eval()(ids).logits
    again = rebuilt(untied_base, tmp_path / "run", tmp_path)
    with DeltaFile.open(tmp_path / "d.gymdelta", added_tokens=True) as delta:
        assert "lora" in {delta.record(name).codec for name in delta.names}
    assert again.tokenizer("<think> a")["input_ids"] == ids[0].tolist()
    with torch.inference_mode():
        assert torch.allclose(again.model(ids).logits, logits, atol=0.05)


def test_a_vocabulary_cut_to_the_tokens_gets_the_rows_of_its_base_again(
    tmp_path: Path, tiny_base: Path
) -> None:
    padded = save_with_tokens(tiny_base, tmp_path / "base", [], rows=640)
    tokens = len(load_tokenizer(str(tiny_base)))
    assert tokens < 640
    tuned = save_with_tokens(tmp_path / "base", tmp_path / "tuned", [], rows=tokens, seed=1)
    again = rebuilt(tmp_path / "base", tmp_path / "tuned", tmp_path, *EXACT)
    ours = again.model.get_input_embeddings().weight
    assert torch.allclose(ours[:tokens], tuned.get_input_embeddings().weight, atol=1e-6)
    assert torch.equal(ours[tokens:], padded.get_input_embeddings().weight[tokens:])


def test_a_tokenizer_of_the_same_size_with_other_ids_is_refused_with_the_first_token_escaped(
    tmp_path: Path, tiny_base: Path
) -> None:
    save_with_tokens(tiny_base, tmp_path / "base", ["\u202eone", "two"])
    save_with_tokens(tiny_base, tmp_path / "tuned", ["two", "\u202eone"])
    done = gym("delta", "encode", tmp_path / "base", tmp_path / "tuned", "-o", tmp_path / "d.gymdelta")
    assert isinstance(done.exception, GymError)
    assert done.exception.code is ErrorCode.BASE_MISMATCH
    assert "the first is '\\\\u202eone'" in done.exception.message
    assert not (tmp_path / "d.gymdelta").exists()


def test_where_only_the_base_vocabulary_can_be_used_the_delta_is_refused_with_its_tokens(
    tmp_path: Path, tiny_base: Path
) -> None:
    save_with_tokens(tiny_base, tmp_path / "tuned", TOKENS)
    rebuilt(tiny_base, tmp_path / "tuned", tmp_path)
    with pytest.raises(GymError, match=r"adds 3 tokens .*'<think>', '</think>'") as error:
        DeltaFile.open(tmp_path / "d.gymdelta")
    assert error.value.code is ErrorCode.BASE_MISMATCH


def test_tokens_without_rows_are_refused_by_name(tmp_path: Path, tiny_base: Path) -> None:
    save_with_tokens(tiny_base, tmp_path / "tuned", [])
    tokenizer = load_tokenizer(str(tiny_base))
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(tmp_path / "tuned")
    done = gym("delta", "encode", tiny_base, tmp_path / "tuned", "-o", tmp_path / "d.gymdelta")
    assert isinstance(done.exception, GymError)
    assert "'<think>'" in done.exception.message


def hostile(file: Path, change: Any) -> bytes:
    """Return a delta whose manifest was changed, with consistent lengths."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    manifest = json.loads(header["__metadata__"]["gymdelta"])
    change(manifest)
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    header["__metadata__"]["gymdelta"] = text
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + data[8 + length :]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["vocabulary"].update(more=1),
        lambda m: m.update(vocabulary=[]),
        lambda m: m.update(vocabulary={"tokens": []}),
        lambda m: m["vocabulary"]["tokens"].reverse(),
        lambda m: m["vocabulary"].update(changed=[]),
        lambda m: m["vocabulary"].update(changed=m["vocabulary"]["tokens"][:1]),
        lambda m: m["vocabulary"].update(changed=[[5, "a", ["single_word"]], [4, "b", []]]),
        lambda m: m["vocabulary"]["tokens"].append(m["vocabulary"]["tokens"][-1]),
        lambda m: m["vocabulary"]["tokens"][0].__setitem__(0, -1),
        lambda m: m["vocabulary"]["tokens"][0].__setitem__(0, 1 << 30),
        lambda m: m["vocabulary"]["tokens"][0].__setitem__(0, True),
        lambda m: m["vocabulary"]["tokens"][0].__setitem__(1, ""),
        lambda m: m["vocabulary"]["tokens"][0].__setitem__(1, "x" * 1000),
        lambda m: m["vocabulary"]["tokens"][0].__setitem__(2, ["evil"]),
        lambda m: m["vocabulary"].update(tokens=[[n, f"t{n}", []] for n in range(70_000)]),
        lambda m: m["vocabulary"].update(roles={"eos_token": 3}),
        lambda m: m["vocabulary"].update(roles={"mask_token": "x"}),
        lambda m: next(r for r in m["tensors"] if "[" in r[0])[1].__setitem__(0, 1 << 38),
        lambda m: next(r for r in m["tensors"] if "[" in r[0]).__setitem__(0, "lm_head.weight[700:]"),
    ],
)
def test_a_hostile_vocabulary_is_refused_when_the_file_is_opened(
    tmp_path: Path, tiny_base: Path, change: Any
) -> None:
    file = tmp_path / "d.gymdelta"
    save_with_tokens(tiny_base, tmp_path / "tuned", TOKENS)
    assert gym("delta", "encode", tiny_base, tmp_path / "tuned", "-o", file).exit_code == 0
    spec = BaseSpec.of(model_tensors(load_model(str(tiny_base)).model), "tiny")
    assert hostile(file, lambda m: None) == file.read_bytes()
    file.write_bytes(hostile(file, change))
    with pytest.raises(GymError) as error:
        DeltaFile.open(file, spec, added_tokens=True)
    assert error.value.code is ErrorCode.DELTA_INVALID


def test_the_exported_delta_of_a_run_with_added_tokens_is_its_model(tmp_path: Path, tiny_base: Path) -> None:
    tuned = save_with_tokens(tiny_base, tmp_path / "tuned", TOKENS)
    rebuilt(tiny_base, tmp_path / "tuned", tmp_path, *EXACT)
    done = gym(
        "export",
        tmp_path / "d.gymdelta",
        "--base",
        tiny_base,
        "--format",
        "huggingface",
        "-o",
        tmp_path / "hf",
    )
    assert done.exit_code == 0, done.exception
    again = load_model(str(tmp_path / "hf"))
    ids = torch.tensor([load_tokenizer(str(tmp_path / "tuned"))(TEXT)["input_ids"]])
    assert again.tokenizer(TEXT)["input_ids"] == ids[0].tolist()
    with torch.inference_mode():
        assert torch.allclose(again.model(ids).logits, tuned.eval()(ids).logits, atol=1e-5)


def test_a_token_on_an_unused_row_of_a_padded_base_is_exact_too(tmp_path: Path, tiny_base: Path) -> None:
    save_with_tokens(tiny_base, tmp_path / "base", [], rows=300)
    tuned = save_with_tokens(tmp_path / "base", tmp_path / "tuned", ["<think>"], seed=1)
    again = rebuilt(tmp_path / "base", tmp_path / "tuned", tmp_path)
    number = again.tokenizer.convert_tokens_to_ids("<think>")
    assert number < 300
    ours, theirs = again.model.get_input_embeddings().weight, tuned.get_input_embeddings().weight
    assert ours.shape == theirs.shape
    assert torch.equal(ours[number], theirs[number])
    assert not torch.equal(ours[number - 1], theirs[number - 1])  # one bit per weight


def test_an_evaluation_scores_a_delta_with_added_tokens_as_its_fine_tune(
    tmp_path: Path, tiny_base: Path
) -> None:
    tuned = save_with_tokens(tiny_base, tmp_path / "tuned", TOKENS).eval()
    rebuilt(tiny_base, tmp_path / "tuned", tmp_path, *EXACT)
    opened = open_models(resolve_model(ModelRequest(str(tmp_path / "d.gymdelta"), base=str(tiny_base))))
    ids = load_tokenizer(str(tmp_path / "tuned"))(TEXT)["input_ids"]
    ((_, found),) = opened.scorer.loglikelihoods([Continuation(tuple(ids[:2]), tuple(ids[2:]))])
    with torch.inference_mode():
        logprobs = tuned(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = sum(float(logprobs[at - 1, ids[at]]) for at in range(2, len(ids)))
    assert found["d"].logprob == pytest.approx(expected, abs=1e-3)
    assert opened.identities["d"]["delta"] != "none"


def test_a_token_of_the_base_that_became_an_added_token_is_one_in_the_rebuilt_tokenizer(
    tmp_path: Path, tiny_base: Path
) -> None:
    save_with_tokens(tiny_base, tmp_path / "base", ["word"])
    save_with_tokens(tmp_path / "base", tmp_path / "tuned", ["<think>"])
    tokenizer = load_tokenizer(str(tmp_path / "tuned"))
    tokenizer.add_tokens([AddedToken("word", special=True)], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "tuned")
    again = rebuilt(tmp_path / "base", tmp_path / "tuned", tmp_path).tokenizer
    expected = load_tokenizer(str(tmp_path / "tuned"))
    assert again.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    ids = again("a word<think>")["input_ids"]
    assert "word" not in again.decode(ids, skip_special_tokens=True)


def test_a_changed_token_that_the_base_lacks_is_refused_before_anything_is_written(
    tmp_path: Path, tiny_base: Path
) -> None:
    file = tmp_path / "d.gymdelta"
    save_with_tokens(tiny_base, tmp_path / "tuned", TOKENS)
    assert gym("delta", "encode", tiny_base, tmp_path / "tuned", "-o", file).exit_code == 0
    file.write_bytes(hostile(file, lambda m: m["vocabulary"].update(changed=[[5, "<zzz>", ["special"]]])))
    done = gym("delta", "apply", tiny_base, file, "-o", tmp_path / "again")
    assert isinstance(done.exception, GymError)
    assert "changes the token '<zzz>'" in done.exception.message
    assert not (tmp_path / "again").exists()


def test_a_row_that_is_not_finite_is_refused_by_its_token_and_an_older_file_stays(
    tmp_path: Path, tiny_base: Path
) -> None:
    file = tmp_path / "d.gymdelta"
    model = save_with_tokens(tiny_base, tmp_path / "tuned", TOKENS)
    assert gym("delta", "encode", tiny_base, tmp_path / "tuned", "-o", file).exit_code == 0
    before = file.read_bytes()
    with torch.no_grad():
        model.get_input_embeddings().weight[-3] = torch.inf
    model.save_pretrained(tmp_path / "tuned")
    done = gym("delta", "encode", tiny_base, tmp_path / "tuned", "-o", file, "--overwrite")
    assert isinstance(done.exception, GymError)
    assert "('<think>') of model.embed_tokens.weight is not finite" in done.exception.message
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [file.name]
    assert file.read_bytes() == before


def test_thousands_of_added_tokens_take_seconds(tiny_base: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_base))
    first = len(tokenizer)
    tokens = AddedTokens(tuple(TableToken(first + n, f"<extra{n}>") for n in range(20_000)))
    started = time.process_time()
    assert len(extended_by(tokenizer, tokens, "many")) == first + 20_000
    assert time.process_time() - started < 5.0


def test_delta_compare_reports_the_errors_of_a_fine_tune_with_added_tokens(
    tmp_path: Path, tiny_base: Path
) -> None:
    save_with_tokens(tiny_base, tmp_path / "tuned", TOKENS)
    rebuilt(tiny_base, tmp_path / "tuned", tmp_path, *EXACT)
    done = gym("delta", "compare", tiny_base, tmp_path / "tuned", tmp_path / "d.gymdelta", "--json")
    assert done.exit_code == 0, done.exception
    (found,) = json.loads(done.stdout).values()
    assert all(tensor["weight_error"] < 1e-6 for tensor in found["tensors"])


def test_an_exported_lora_run_with_resized_embeddings_keeps_its_factors_and_its_rows(
    tmp_path: Path, untied_base: Path
) -> None:
    loaded = load_model(str(untied_base))
    model: Any = loaded.model
    loaded.tokenizer.add_tokens(["<think>"])
    model.resize_token_embeddings(len(loaded.tokenizer), mean_resizing=False)
    adapted: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "run", save_embedding_layers=True)
    loaded.tokenizer.save_pretrained(tmp_path / "run")
    file = tmp_path / "run.gymdelta"
    done = gym("export", tmp_path / "run", "--format", "delta", "-o", file)
    assert done.exit_code == 0, done.exception
    with DeltaFile.open(file, added_tokens=True) as delta:
        assert [token.text for token in delta.vocabulary.tokens] == ["<think>"]
        assert "lora" in {delta.record(name).codec for name in delta.names}


def test_another_table_that_grew_with_the_vocabulary_is_refused_when_it_is_encoded(tmp_path: Path) -> None:
    base, tuned = tiny_model("llama"), tiny_model("llama")
    rows = len(base.get_input_embeddings().weight)
    tuned.resize_token_embeddings(rows + 2, mean_resizing=False)
    for model in (base, tuned):  # as Gemma 3n's embeddings per layer
        model.model.embed_tokens_per_layer = torch.nn.Embedding(len(model.get_input_embeddings().weight), 8)
    out = tmp_path / "d.gymdelta"
    with pytest.raises(GymError, match=r"'model\.embed_tokens_per_layer\.weight' has shape") as caught:
        Quantizer(CalibratedPolicy(codec="bitdelta")).quantize(base, tuned, out=out, progress=False)
    assert caught.value.code is ErrorCode.BASE_MISMATCH
    assert not out.exists()


def test_a_vocabulary_that_was_cut_is_refused_where_the_tokens_of_the_base_are_not_known(
    tmp_path: Path,
) -> None:
    base, tuned = tiny_model("llama"), tiny_model("llama")
    rows = len(base.get_input_embeddings().weight)
    tuned.resize_token_embeddings(rows - 2, mean_resizing=False)
    with pytest.raises(GymError, match=f"have {rows - 2} rows, .* the base's tokenizer is unknown") as caught:
        Quantizer(CalibratedPolicy(codec="bitdelta")).quantize(
            base, tuned, out=tmp_path / "d", progress=False
        )
    assert "by name" in str(caught.value.hint)


def test_a_processor_gets_the_tokens_in_a_copy_of_its_tokenizer() -> None:
    pytest.importorskip("PIL")
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    image = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    processor = LlavaProcessor(image, load_tokenizer("gym-nano"))
    number = len(processor.tokenizer)
    tokens = AddedTokens((TableToken(number, "<think>", ("special",)),), {"eos_token": "<think>"})
    extended = extended_by(processor, tokens, "a fine-tune")
    assert isinstance(extended, LlavaProcessor)
    assert extended.tokenizer("<think>")["input_ids"][-1] == extended.tokenizer.eos_token_id == number
    assert len(processor.tokenizer) == number
