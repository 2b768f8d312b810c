"""Variants with added tokens, served next to others: their own tokenizer, embeddings and head."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.cli.main import app
from gym_fed.config.serving import ServingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.vocabulary import apply_with_tokens
from gym_fed.serving.engine.request import GenerationRequest, SamplingParams
from gym_fed.serving.openai.catalogue import LOCAL
from gym_fed.serving.openai.service import CHAT, COMPLETIONS, EMBEDDINGS
from gym_fed.serving.setup import open_serving
from tests.support.added_tokens import save_with_tokens
from tests.support.quick import quick
from tests.support.wait import SECONDS

TOKENS = ["<tool>", "<|mark|>", "café"]
LENGTH = 10


def small_base(folder: Path, **settings: Any) -> Path:
    """A byte-level model with gym-nano's tokenizer; ``vocab_size`` may be larger than the tokenizer."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    tokenizer = load_tokenizer("gym-nano")
    more = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "head_dim": 8, **settings}
    config = CONFIG_MAPPING[more.pop("model_type")](
        hidden_size=16,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=160,
        pad_token_id=tokenizer.pad_token_id,
        **more,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


BASES: dict[str, dict[str, Any]] = {
    "tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "untied and padded": {"model_type": "llama", "tie_word_embeddings": False, "vocab_size": 264},
    "scaled embeddings": {"model_type": "gemma3_text", "tie_word_embeddings": True, "sliding_window": 64},
}


@pytest.fixture(scope="module", params=quick(BASES, "untied and padded", "scaled embeddings"))
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of three variants: ``tools`` and ``more`` add tokens, ``plain`` does not."""
    folder = tmp_path_factory.mktemp("added")
    base = small_base(folder / "base", **BASES[request.param])
    files = {}
    for seed, (name, tokens) in enumerate(
        {"tools": TOKENS, "more": ["<a>", *TOKENS, "<z>"], "plain": []}.items()
    ):
        save_with_tokens(base, folder / name, tokens, seed=seed)
        files[name] = folder / f"{name}.gymdelta"
        run("delta", "encode", str(base), str(folder / name), "-o", str(files[name]))
        words = ["--name", name, "--user", "ann", "--unsigned", "--store", str(folder / "store")]
        run("variant", "add", str(files[name]), *words)
    config = ServingConfig(
        base=str(base), variants=folder / "store", require_signature=False, device="cpu", dtype="float32"
    )
    with open_serving(config) as serving:
        yield SimpleNamespace(
            serving=serving, base=base, files=files, name=serving.service.catalogue.served_name
        )


def run(*words: str) -> None:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output or done.exception


def merged(scene: Any, name: str | None) -> Any:
    """The model and tokenizer of transformers with the variant's delta."""
    loaded = load_model(str(scene.base))
    if name is None:
        return loaded
    spec = BaseSpec.of(loaded.model, str(scene.base))
    return apply_with_tokens(loaded, scene.files[name], spec)


def reference(one: Any, ids: list[int]) -> tuple[list[int], list[list[float]]]:
    """The greedy answer of a model, and the log-probabilities of every token at every position."""
    with torch.no_grad():
        found = one.model.eval().generate(
            torch.tensor([ids]),
            do_sample=False,
            max_new_tokens=LENGTH,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
            pad_token_id=0,
        )
    logprobs = [step[0].float().log_softmax(-1).tolist() for step in found.logits]
    return found.sequences[0, len(ids) :].tolist(), logprobs


def test_greedy_answers_and_logprobs_in_one_batch_are_those_of_the_merged_models(scene: Any) -> None:
    names = ["tools", None, "more", "plain", "tools"]
    models = {name: merged(scene, name) for name in set(names)}
    sampling = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=3)
    texts = ["say <tool> café", "plain text", "x<z>y<|mark|>", "<tool>", "ab"]
    prompts = [models[name].tokenizer.encode(text) for name, text in zip(names, texts, strict=True)]
    requests = [
        GenerationRequest(ids, sampling, name, "ann") for name, ids in zip(names, prompts, strict=True)
    ]
    answers = [one.result(SECONDS) for one in scene.serving.engine.submit_all(requests)]
    emitted = set()
    for name, ids, answer in zip(names, prompts, answers, strict=True):
        tokens, logprobs = reference(models[name], ids)
        assert list(answer.token_ids) == tokens
        for token, all_of in zip(answer.logprobs, logprobs, strict=True):
            assert token.logprob == pytest.approx(all_of[token.token_id], abs=2e-3)
            assert [value for *_, value in token.top] == pytest.approx(sorted(all_of)[:-4:-1], abs=2e-3)
        emitted |= {(name, token) for token in tokens}
    base_size = len(load_tokenizer("gym-nano"))
    assert any(name == "tools" and token >= base_size for name, token in emitted), (
        "no added token was written"
    )
    for name in (None, "plain"):
        assert all(token < scene.serving.served.vocabulary for owner, token in emitted if owner == name)


def test_others_never_emit_added_tokens(scene: Any) -> None:
    first = len(load_tokenizer("gym-nano"))
    size = scene.serving.served.vocabulary
    bias = {} if size == first else dict.fromkeys(range(first, size), -100.0)  # padding is never trained
    requests = [
        GenerationRequest(
            [65, 66],
            SamplingParams(
                temperature=2.0,
                seed=seed,
                max_tokens=30,
                ignore_eos=True,
                logit_bias=bias if name is None else {},
            ),
            name,
            "ann",
        )
        for seed, name in enumerate(["tools", None, "plain", None])
    ]
    answers = [one.result(SECONDS) for one in scene.serving.engine.submit_all(requests)]
    for answer in (answers[1], answers[3]):
        assert max(answer.token_ids) < first
    assert max(answers[2].token_ids) < size
    alone = scene.serving.engine.submit(requests[1]).result(SECONDS)
    assert alone.token_ids == answers[1].token_ids  # a seed gives the same answer next to larger vocabularies


def test_texts_are_read_and_written_with_the_variant_s_own_tokenizer(scene: Any) -> None:
    service, name = scene.serving.service, scene.name
    theirs = merged(scene, "tools").tokenizer
    text = "use <tool> and café"
    ids = service.tokenizing.answer("/tokenize", {"model": f"{name}:tools", "prompt": text}, LOCAL)["tokens"]
    assert ids == theirs.encode(text)
    of_base = service.tokenizing.answer("/tokenize", {"model": name, "prompt": text}, LOCAL)["tokens"]
    assert max(of_base) < len(load_tokenizer("gym-nano"))
    back = {"model": f"{name}:tools", "tokens": ids}
    assert service.tokenizing.answer("/detokenize", back, LOCAL)["prompt"] == text
    body = {
        "model": f"{name}:tools",
        "prompt": ids,
        "temperature": 0,
        "max_tokens": LENGTH,
        "ignore_eos": True,
    }
    tokens, _ = reference(merged(scene, "tools"), ids)
    known = {
        number: token.content for number, token in theirs.added_tokens_decoder.items() if not token.special
    }
    special = {number for number, token in theirs.added_tokens_decoder.items() if token.special}
    joined = b"".join(
        known[token].encode() if token in known else bytes([token])
        for token in tokens
        if (token not in special and token < 256) or token in known
    )
    answer = service.handle(COMPLETIONS, body, LOCAL)["choices"][0]["text"]
    assert joined.decode(errors="replace").startswith(answer)
    assert any(text in answer for text in known.values())


def test_an_added_token_stops_biases_and_is_refused_elsewhere(scene: Any) -> None:
    service, name = scene.serving.service, scene.name
    theirs = merged(scene, "tools").tokenizer
    mark = theirs.convert_tokens_to_ids("<|mark|>")
    body = {"model": f"{name}:tools", "prompt": "ab", "temperature": 0, "max_tokens": LENGTH}
    stopped = {**body, "logit_bias": {str(mark): 100}, "stop": "<|mark|>"}
    (choice,) = service.handle(COMPLETIONS, stopped, LOCAL)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    with pytest.raises(GymError, match="outside the vocabulary"):
        service.handle(COMPLETIONS, {**body, "model": name, "prompt": [65, mark + 40]}, LOCAL)


def test_schemas_chats_and_embeddings_work_with_added_tokens(scene: Any) -> None:
    service, name = scene.serving.service, f"{scene.name}:tools"
    messages = [{"role": "user", "content": "use <tool>"}]
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [4, 5]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    blanks = dict.fromkeys(("9", "10", "32"), -100)
    body = {
        "model": name,
        "messages": messages,
        "response_format": form,
        "temperature": 0,
        "logit_bias": blanks,
    }
    assert json.loads(service.handle(CHAT, body, LOCAL)["choices"][0]["message"]["content"])["n"] in (4, 5)
    (vector,) = service.handle(EMBEDDINGS, {"model": name, "input": "a <tool>"}, LOCAL)["data"]
    one = merged(scene, "tools")
    with torch.no_grad():
        states = (
            one.model.model(torch.tensor([one.tokenizer.encode("a <tool>")])).last_hidden_state[0].mean(0)
        )
    assert vector["embedding"] == pytest.approx((states / states.norm()).tolist(), abs=1e-3)


def test_a_head_whose_output_is_changed_is_refused_by_name(tmp_path: Path) -> None:
    base = small_base(
        tmp_path / "base", model_type="gemma2", final_logit_softcapping=3.0, initializer_range=0.5
    )
    save_with_tokens(base, tmp_path / "tuned", ["<tool>"])
    file, store = tmp_path / "d.gymdelta", tmp_path / "store"
    run("delta", "encode", str(base), str(tmp_path / "tuned"), "-o", str(file))
    run("variant", "add", str(file), "--name", "v", "--user", "u", "--unsigned", "--store", str(store))
    config = ServingConfig(
        base=str(base), variants=store, require_signature=False, device="cpu", dtype="float32"
    )
    with open_serving(config) as serving:
        for variant, ends in ((None, "length"), ("v", None), (None, "length")):
            asked = serving.engine.submit(
                GenerationRequest([65], SamplingParams(max_tokens=2, ignore_eos=True), variant)
            )
            if ends is None:
                with pytest.raises(GymError, match="changes the output of its head") as caught:
                    asked.result(SECONDS)
                assert caught.value.code is ErrorCode.MODEL_INVALID
            else:
                assert asked.result(SECONDS).finish_reason == ends
