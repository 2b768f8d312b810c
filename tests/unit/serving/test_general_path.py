"""Models that packed steps cannot compute are served by transformers' own cache, with variants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_tokenizer
from gym_fed.cli.api.app import _description
from gym_fed.config.serving import EngineConfig, ServingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.engine.limits import DEFAULT_CONTEXT
from gym_fed.serving.engine.request import GenerationRequest, SamplingParams
from gym_fed.serving.forward import attention
from gym_fed.serving.forward.chunk import Chunk, HiddenMean
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.forward.state_pool import StateCache, StatePool
from gym_fed.serving.openai.catalogue import LOCAL
from gym_fed.serving.openai.service import COMPLETIONS, EMBEDDINGS
from gym_fed.serving.setup import open_serving
from gym_fed.serving.store.store import VariantStore
from tests.support.small_classes import build
from tests.support.variants import Coding, load, merged, off, write_random_delta

PROMPT = [5, 9, 2, 44, 17, 3, 8, 1, 60, 61, 62]
TOKENS = 5


def dense(name: str, shape: tuple[int, ...]) -> Coding:
    """Every parameter: experts, convolutions and state parameters, too."""
    del name, shape
    return "dense", {"dtype": "float32"}


def factors(name: str, shape: tuple[int, ...]) -> Coding:
    """As an adapter: the projections of attention and of the mixer."""
    adapted = len(shape) == 2 and "proj" in name
    return ("lora", {"rank": 2, "factors": "float32"}) if adapted else None


def generated(model: Any, prompt: list[int]) -> torch.Tensor:
    """The logits ``[TOKENS, vocabulary]`` of transformers' greedy generate."""
    found = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    return torch.stack(found.logits)[:, 0].float()


def greedy(served: MultiVariantModel, texts: list[tuple[list[int], Any]]) -> list[torch.Tensor]:
    """The logits of greedy answers to prompts, each with its variant, that are computed together."""
    caches = [served.new_cache() for _ in texts]
    tokens = [prompt for prompt, _ in texts]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    for _ in range(TOKENS):
        chunks = [Chunk(ids, c, v) for ids, c, (_, v) in zip(tokens, caches, texts, strict=True)]
        logits = served.step(chunks)
        tokens = [[int(row.argmax())] for row in logits]
        for own, row in zip(found, logits, strict=True):
            own.append(row)
    return [torch.stack(own) for own in found]


@pytest.mark.few(5, "one path for every class")
@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        ("Qwen3Next", (True, True)),
        pytest.param("Qwen3_5Text", (True, True), marks=pytest.mark.slow),
        ("Lfm2", (True, True)),
        ("Jamba", (True, False)),
        pytest.param("FalconH1", (True, True), marks=pytest.mark.slow),
        pytest.param("RecurrentGemma", (True, False), marks=pytest.mark.slow),
        pytest.param("StableLm", (True, True), marks=pytest.mark.slow),
        ("Falcon", (True, True)),
        ("Mamba", (True, False)),
        pytest.param("Mamba2", (True, True), marks=pytest.mark.slow),
        ("Bloom", (True, True)),
        pytest.param("Mpt", (True, True), marks=pytest.mark.slow),
        ("GPTJ", (True, True)),
        pytest.param("Zamba2", (True, True), marks=pytest.mark.slow),
        pytest.param("Bamba", (True, True), marks=pytest.mark.slow),
        pytest.param("NemotronH", (True, True), marks=pytest.mark.slow),
        ("Rwkv", (False, True)),
        ("MiniMax", (False, False)),
        ("Llama4Text", (True, True)),
        ("OpenAIGPT", (True, True)),  # no cache at all
    ],
)
def test_answers_of_base_and_variants_equal_those_of_generate(
    tmp_path: Path, kind: str, shares: tuple[bool, bool]
) -> None:
    model = build(kind)
    short = PROMPT[:4]
    paths = [
        write_random_delta(model, tmp_path / f"{n}.gymdelta", rule, seed=n, size=0.05)
        for n, rule in enumerate((factors, dense))
    ]
    tuned = [merged(model, path) for path in paths]
    with MultiVariantModel(model) as served:
        assert served.forward == "general"
        assert served._general is not None
        assert (served._general.batches, served._general.continues) == shares
        adapter, every = (load(path, served.layout) for path in paths)
        texts = [(PROMPT, None), (short, adapter), (PROMPT, every), (short, None), (PROMPT, adapter)]
        found = greedy(served, texts)
    expected = {id(None): model, id(adapter): tuned[0], id(every): tuned[1]}
    for (prompt, variant), logits in zip(texts, found, strict=True):
        wanted = generated(expected[id(variant)], prompt)
        # RWKV in transformers halves its hidden states, which its layer norms' epsilon shows.
        assert off(logits, wanted) < (2e-3 if kind == "Rwkv" else 1e-4) * float(wanted.abs().max())
        assert logits.argmax(dim=1).tolist() == wanted.argmax(dim=1).tolist()


def test_requests_of_longrope_do_not_change_each_other() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 8,
    }
    model = build("Phi3", rope_parameters=rope, original_max_position_embeddings=8)
    prompts = [PROMPT, PROMPT[:3], PROMPT[:6]]
    with MultiVariantModel(model) as served:
        found = greedy(served, [(prompt, None) for prompt in prompts])
    for prompt, logits in zip(prompts, found, strict=True):
        assert off(logits, generated(model, prompt)) < 1e-5


@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        ("Falcon", (True, True)),
        ("Mamba", (True, False)),
        ("Jamba", (True, False)),
        ("RecurrentGemma", (True, False)),
        ("Rwkv", (False, False)),
        ("MiniMax", (False, False)),
        ("Git", (False, True)),
    ],
)
def test_rounding_does_not_hide_that_a_class_cannot_share(kind: str, shares: tuple[bool, bool]) -> None:
    with MultiVariantModel(build(kind).to(torch.bfloat16)) as served:
        assert served._general is not None
        assert (served._general.batches, served._general.continues) == shares


def test_requests_in_decode_share_a_forward_and_join_and_leave_it() -> None:
    model = build("Lfm2")
    calls: list[torch.Size] = []
    with MultiVariantModel(model) as served:
        caches = [served.new_cache() for _ in range(3)]
        hook = model.register_forward_pre_hook(
            lambda _module, _args, arguments: calls.append(arguments["input_ids"].shape), with_kwargs=True
        )
        served.step([Chunk(PROMPT, caches[0]), Chunk(PROMPT[:3], caches[1])])
        served.step([Chunk([7], caches[0]), Chunk([8], caches[1]), Chunk(PROMPT[:6], caches[2])])
        served.step([Chunk([9], caches[2]), Chunk([9], caches[1])])
        last = served.step([Chunk([10], cache) for cache in caches])
        hook.remove()
    assert [tuple(shape) for shape in calls] == [(1, 11), (1, 3), (2, 1), (1, 6), (2, 1), (3, 1)]
    texts = [[*PROMPT, 7, 10], [*PROMPT[:3], 8, 9, 10], [*PROMPT[:6], 9, 10]]
    with torch.inference_mode():
        wanted = torch.stack([model(torch.tensor([ids]), use_cache=False).logits[0, -1] for ids in texts])
    assert off(last, wanted) < 1e-5


def test_a_sliding_window_that_is_full_keeps_its_rows_apart() -> None:
    model = build("RecurrentGemma", attention_window_size=4, sliding_window=4)
    with MultiVariantModel(model) as served:
        found = greedy(served, [(PROMPT, None), (PROMPT[:2], None), (PROMPT[:6], None)])
    for prompt, logits in zip((PROMPT, PROMPT[:2], PROMPT[:6]), found, strict=True):
        assert off(logits, generated(model, prompt)) < 1e-4


def test_a_request_whose_step_failed_is_computed_from_its_tokens() -> None:
    model = build("Lfm2")
    with MultiVariantModel(model) as served:
        caches = [served.new_cache(), served.new_cache()]
        served.step([Chunk(PROMPT, cache) for cache in caches])

        def fail(*_: Any) -> None:
            raise RuntimeError("a broken kernel")

        hook = model.model.layers[1].register_forward_pre_hook(fail)  # the first has written its state
        with pytest.raises(RuntimeError, match="broken kernel"):
            served.step([Chunk([7], cache) for cache in caches])
        hook.remove()
        found = served.step([Chunk([7], cache) for cache in caches])
        with torch.inference_mode():
            wanted = model(torch.tensor([[*PROMPT, 7]]), use_cache=False).logits[0, -1]
        assert off(found, wanted.expand(2, -1)) < 1e-5
        assert [cache.length for cache in caches] == [12, 12]


def test_a_step_whose_second_group_failed_computes_no_token_of_the_first_twice(tmp_path: Path) -> None:
    model = build("Lfm2")
    path = write_random_delta(model, tmp_path / "all.gymdelta", dense, seed=1)
    with MultiVariantModel(model) as served:
        variant, caches = load(path, served.layout), [served.new_cache(), served.new_cache()]
        served.step([Chunk(PROMPT, caches[0]), Chunk(PROMPT[:5], caches[1], variant)])
        calls: list[int] = []

        def fail(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("a broken variant")

        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="broken variant"):
            served.step([Chunk([7], caches[0]), Chunk([8], caches[1], variant)])
        hook.remove()
        found = served.step([Chunk([7], caches[0])])
        with torch.inference_mode():
            wanted = model(torch.tensor([[*PROMPT, 7]]), use_cache=False).logits[0, -1:]
        assert off(found, wanted) < 1e-5
        assert isinstance(caches[0], StateCache)
        assert caches[0].ids == [*PROMPT, 7]


def test_a_model_that_gives_nan_for_a_chunk_does_not_continue_its_states() -> None:
    model = build("Lfm2")

    def break_chunks(_module: Any, _args: Any, arguments: Any, output: Any) -> None:
        if arguments.get("past_key_values") is not None and arguments["input_ids"].shape[1] > 1:
            output.logits = output.logits * torch.nan

    model.register_forward_hook(break_chunks, with_kwargs=True)
    with MultiVariantModel(model) as served:
        assert served._general is not None
        assert (served._general.batches, served._general.continues) == (True, False)


@pytest.mark.parametrize("kind", ["Lfm2", "Mamba"])
def test_a_branch_has_its_own_state(kind: str) -> None:
    model = build(kind)
    with MultiVariantModel(model) as served:
        cache = served.new_cache()
        served.step([Chunk(PROMPT[:4], cache)])
        branch = cache.branch()
        served.step([Chunk([90, 91, 92], cache)])
        found = served.step([Chunk(PROMPT[4:], branch, num_logits=3)])
        with torch.inference_mode():
            wanted = model(torch.tensor([PROMPT]), use_cache=False).logits[0, -3:]
    assert off(found, wanted) < 1e-5


def test_an_embedding_in_chunks_is_that_of_the_whole_text() -> None:
    model = build("Lfm2")
    with MultiVariantModel(model) as served:
        found = []
        for parts in ([PROMPT], [PROMPT[:6], PROMPT[6:10], PROMPT[10:]]):
            mean, cache = HiddenMean(), served.new_cache()
            for part in parts:
                served.step([Chunk(part, cache, wants_logits=False, hidden=mean)])
            found.append(mean.unit())
    assert off(found[0], found[1]) < 1e-6


@pytest.mark.parametrize("kind", ["Lfm2", "Mamba"])
def test_answers_under_preemption_equal_those_of_generate(tokenizer: Any, kind: str) -> None:
    model = build(kind, vocab_size=262)
    with MultiVariantModel(model) as served:
        pool = served.new_pool()
        room = 2 * pool.fixed_blocks + (4 if kind == "Lfm2" else 0)
        config = EngineConfig(kv_cache_size=room * pool.block_bytes, max_batch_tokens=16)
        sampling = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
        prompts = [PROMPT, PROMPT[:3], PROMPT * 3, PROMPT[2:]]
        with Engine(served, tokenizer, config=config) as engine:
            answers = engine.submit_all([GenerationRequest(ids, sampling) for ids in prompts])
            found = [answer.result() for answer in answers]
            assert (engine.stats().preemptions > 0) == (kind == "Lfm2")
            assert engine.stats().forwards["general"] > 0
    for ids, answer in zip(prompts, found, strict=True):
        wanted = model.generate(
            torch.tensor([ids]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert list(answer.token_ids) == wanted[0, len(ids) :].tolist()
        assert answer.cached_tokens == 0


def test_the_state_of_a_request_counts_towards_the_memory() -> None:
    model = build("Mamba")
    with MultiVariantModel(model) as served:
        cache = served.new_cache()
        served.step([Chunk(PROMPT, cache)])
        assert isinstance(cache, StateCache)
        assert cache.row is not None
        growing, fixed = cache.row.batch.bytes()
        assert growing == 0
        assert cache.bytes == fixed
        with pytest.raises(GymError, match="less than the state of one request") as error:
            served.new_pool(fixed // 2)
    assert error.value.code is ErrorCode.CONFIG_INVALID


def test_a_cache_of_one_state_serves_texts_of_any_length_one_after_another(tokenizer: Any) -> None:
    model = build("Mamba", vocab_size=262, state_size=16)
    with MultiVariantModel(model) as served:
        pool = served.new_pool()
        config = EngineConfig(kv_cache_size=pool.fixed_blocks * pool.block_bytes)
        with Engine(served, tokenizer, config=config) as engine:
            sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
            answers = engine.submit_all([GenerationRequest(PROMPT * 3, sampling) for _ in range(2)])
            assert [len(answer.result().token_ids) for answer in answers] == [40, 40]


def test_a_model_without_cache_answers_a_request_that_names_no_length(tokenizer: Any) -> None:
    with (
        MultiVariantModel(build("OpenAIGPT", vocab_size=262, n_positions=24)) as served,
        Engine(served, tokenizer, config=EngineConfig(max_context=24)) as engine,
    ):
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        answer = engine.submit(GenerationRequest(PROMPT, sampling)).result()
    assert len(answer.token_ids) == 24 - len(PROMPT)


def test_a_branch_without_room_is_refused() -> None:
    with MultiVariantModel(build("Lfm2")) as served:
        unlimited = served.new_pool()
        assert isinstance(unlimited, StatePool)
        cache = served.new_pool(unlimited.blocks_for(11) * unlimited.block_bytes).new_cache()
        served.step([Chunk(PROMPT, cache)])
        with pytest.raises(GymError, match="no room for 11 more tokens") as error:
            cache.branch()
    assert error.value.code is ErrorCode.BUSY


def test_padding_to_a_long_text_at_most_doubles_the_keys_in_memory() -> None:
    model = build("Falcon", max_position_embeddings=1024)
    lengths = [700, *[2] * 8, 500]
    with MultiVariantModel(model) as served:
        pool = served.new_pool(64 << 20)
        caches = [pool.new_cache() for _ in lengths]
        texts = [[1 + at % 90 for at in range(length)] for length in lengths]
        served.step([Chunk(ids, cache) for ids, cache in zip(texts, caches, strict=True)])
        found = served.step([Chunk([7], cache) for cache in caches])
        batches = {}
        for cache in caches:
            assert isinstance(cache, StateCache)
            assert cache.row is not None
            batches[id(cache.row.batch)] = cache.row.batch
        assert sum(batch.bytes()[0] for batch in batches.values()) <= 2 * pool.bytes_used
        assert [batch.size for batch in batches.values()] == [2, 8]
    with torch.inference_mode():
        wanted = [model(torch.tensor([[*ids, 7]]), use_cache=False).logits[0, -1] for ids in texts]
    assert off(found, torch.stack(wanted)) < 1e-4


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"speculative": "ngram"}, "engine.speculative"), ({"kv_cache_size": 64}, "state of one request")],
)
def test_a_setting_that_the_state_does_not_allow_is_refused(
    tokenizer: Any, settings: dict[str, Any], named: str
) -> None:
    with (
        MultiVariantModel(build("Mamba", vocab_size=262)) as served,
        pytest.raises(GymError, match=named) as error,
    ):
        Engine(served, tokenizer, config=EngineConfig(**settings))
    assert error.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("settings", [{"kv_dtype": "int8"}, {"base_format": "int8"}])
def test_a_format_that_only_packed_steps_have_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(GymError, match="int8") as error:
        MultiVariantModel(build("Lfm2"), **settings)
    assert error.value.code is ErrorCode.CONFIG_INVALID


def test_a_model_that_states_no_context_has_one(tokenizer: Any) -> None:
    with (
        MultiVariantModel(build("Mamba", vocab_size=262, max_position_embeddings=None)) as served,
        Engine(served, tokenizer) as engine,
    ):
        assert engine.limits.context == DEFAULT_CONTEXT


@pytest.mark.parametrize("kind", ["Lfm2", "Jamba"])
def test_a_server_answers_for_base_and_variant_as_generate_does(tmp_path: Path, kind: str) -> None:
    model = build(kind, vocab_size=320)
    model.generation_config.update(eos_token_id=2, pad_token_id=0, do_sample=False)
    model.save_pretrained(tmp_path / "base")
    load_tokenizer("gym-nano").save_pretrained(tmp_path / "base")
    delta = write_random_delta(model, tmp_path / "all.gymdelta", dense, seed=1, size=0.05)
    with VariantStore.open(tmp_path / "store", require_signature=False) as store:
        store.add(delta, None, name="all", owner="ann")
    config = ServingConfig(
        base=str(tmp_path / "base"),
        variants=tmp_path / "store",
        require_signature=False,
        device="cpu",
        num_threads=1,
    )
    with open_serving(config) as serving:
        assert serving.served.described.startswith(f"{kind}ForCausalLM: steps by general, as its ")
        described = _description("http://localhost", serving)
        assert (described["forward"], described["prefix_cache"]) == ("general", False)
        for name, tuned in (("base", model), ("base:all", merged(model, delta))):
            asked = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
            pending = serving.service.begin(COMPLETIONS, asked, LOCAL)
            usage = pending.run()["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), TOKENS)
            found = [token for one in pending._generations for token in one.result().token_ids]
            assert found == generated(tuned, PROMPT).argmax(dim=1).tolist()
            embedded = serving.service.handle(EMBEDDINGS, {"model": name, "input": PROMPT}, LOCAL)
            vector = torch.tensor(embedded["data"][0]["embedding"])
            with torch.inference_mode():
                states = tuned.base_model(torch.tensor([PROMPT]), use_cache=False).last_hidden_state[0]
            mean = states.mean(dim=0)
            assert off(vector, mean / mean.norm()) < 1e-5


def test_a_class_whose_prefix_names_no_part_gives_embeddings_and_skips_its_head() -> None:
    model, shapes = build("Llama4Text"), []
    model.lm_head.register_forward_hook(lambda _module, _args, output: shapes.append(output.shape))
    with MultiVariantModel(model) as served:
        shapes.clear()
        mean = HiddenMean()
        served.step([Chunk(PROMPT, served.new_cache(), wants_logits=False, hidden=mean)])
        assert not shapes
        with torch.inference_mode():
            states = model.model(torch.tensor([PROMPT]), use_cache=False).last_hidden_state[0]
    wanted = states.mean(dim=0)
    assert off(mean.unit(), wanted / wanted.norm()) < 1e-5


def test_a_setting_of_rwkv_in_the_config_of_another_class_is_ignored() -> None:
    with MultiVariantModel(build("Llama", rescale_every=6)) as served:
        assert served.forward == "decoder"


def test_closing_restores_the_rescaling_of_rwkv() -> None:
    model = build("Rwkv")
    with MultiVariantModel(model):
        assert model.config.rescale_every == 0
    assert model.config.rescale_every == 1


def test_a_refused_model_can_be_opened_again() -> None:
    model = build("Rwkv")
    for _ in range(2):
        with pytest.raises(GymError, match="int8") as error:
            MultiVariantModel(model, kv_dtype="int8")
        assert error.value.code is ErrorCode.CONFIG_INVALID
    assert model.config.rescale_every == 1


def without_packed_attention(kind: str) -> Any:
    """A model whose attention cannot be replaced, which transformers says only when it is tried."""
    model = build(kind)
    replace = model.set_attn_implementation

    def refuse(name: str) -> None:
        if name == attention.NAME:
            raise ValueError(f"no attention {name}")
        replace(name)

    model.set_attn_implementation = refuse
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_that_packed_steps_cannot_compute_is_served_by_the_general_path(dtype: torch.dtype) -> None:
    model = without_packed_attention("Llama").to(dtype)
    old = model.config._attn_implementation
    with MultiVariantModel(model) as served:
        assert served.forward == "general"
        assert "no attention" in served.described
        logits = served.step([Chunk(PROMPT, served.new_cache())])
    assert model.config._attn_implementation == old
    with torch.inference_mode():
        wanted = model(torch.tensor([PROMPT]), use_cache=False).logits[0, -1:].float()
    assert off(logits, wanted) <= (1e-5 if dtype == torch.float32 else 0.05)


def test_a_lack_of_memory_while_opening_is_not_taken_for_a_missing_feature() -> None:
    model = build("Lfm2")

    def fail(_module: Any, _args: Any, arguments: Any) -> None:
        if arguments.get("use_cache"):
            raise torch.OutOfMemoryError("no memory")

    model.register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(torch.OutOfMemoryError):
        MultiVariantModel(model)


def test_trying_the_cache_of_a_model_keeps_no_activations_for_gradients() -> None:
    model, recorded = build("Lfm2"), []

    def record(_module: Any, _args: Any, arguments: Any, output: Any) -> None:
        if arguments.get("use_cache"):
            recorded.append(output.logits.requires_grad)

    model.register_forward_hook(record, with_kwargs=True)
    with MultiVariantModel(model):
        pass
    assert recorded
    assert not any(recorded)


def test_forwards_of_the_general_path_are_counted_one_by_one() -> None:
    with MultiVariantModel(build("Lfm2")) as served:
        caches = [served.new_cache() for _ in range(3)]
        served.step([Chunk(PROMPT, cache) for cache in caches])
        assert served.forwards["general"] == 3
        served.step([Chunk([7], cache) for cache in caches])
        assert served.forwards["general"] == 4


def test_a_cache_that_cannot_be_copied_is_not_used() -> None:
    class Holder:
        def __init__(self) -> None:
            self.tensor = torch.zeros(1)

    model = build("Lfm2")

    def hide(_module: Any, _args: Any, output: Any) -> None:
        if output.past_key_values is not None:
            output.past_key_values.holder = Holder()

    model.model.register_forward_hook(hide)
    with MultiVariantModel(model) as served:
        assert "without a cache" in served.described


def test_a_variant_that_replaces_parameters_is_refused_in_a_forward_with_others(tmp_path: Path) -> None:
    model = build("Mixtral")
    paths = [
        write_random_delta(model, tmp_path / f"{n}.gymdelta", rule, seed=n)
        for n, rule in enumerate((factors, dense))
    ]
    with MultiVariantModel(model) as served:
        adapter, every = (load(path, served.layout) for path in paths)
        rows = served._variants.rows([(adapter, 1, 1), (every, 1, 1)], False)
        assert served._hooked is not None
        with pytest.raises(GymError, match="'1' replaces parameters") as error:
            served._hooked.forward([5, 6], [0, 0], rows, [0, 1])
    assert error.value.code is ErrorCode.USAGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["BigBird", "XLMRoberta", "CpmAnt"])
def test_a_model_whose_tokens_see_later_ones_is_refused_in_any_dtype(kind: str, dtype: torch.dtype) -> None:
    model = build(kind).to(dtype)
    with pytest.raises(GymError, match="its tokens attend to later ones") as error:
        MultiVariantModel(model)
    assert error.value.code is ErrorCode.MODEL_INVALID


def test_an_encoder_that_is_made_a_decoder_is_served() -> None:
    with MultiVariantModel(build("XLMRoberta", is_decoder=True).to(torch.bfloat16)) as served:
        assert served.forward == "transformers"
