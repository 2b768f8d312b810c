"""The decoder gives the results of transformers' forward, whatever else is in the batch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from gym_quant.kernels import dispatch
from gym_quant.kernels.decode import NormWeight

from gym_fed.core.errors import GymError
from gym_fed.serving.forward import multi_variant, segments
from gym_fed.serving.forward.chunk import Chunk, HiddenMean
from gym_fed.serving.forward.decoder import Decoder, Norm
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from tests.support.quick import quick
from tests.support.variants import load, write_random_delta
from tests.unit.serving.test_multi_variant_step import RULES

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 84,
    "num_hidden_layers": 3,
    "vocab_size": 97,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    **{f"llama {name}": ("Llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "qwen2": ("Qwen2", {}),
    "qwen2 window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 yarn": ("Qwen3", {"head_dim": 24, "attention_bias": True, "rope_parameters": ROPES["yarn"]}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "mistral no window": ("Mistral", {"sliding_window": None, "head_dim": 20, "num_key_value_heads": 1}),
}
CLOSE = 1e-5


def build(name: str, **sizes: Any) -> Any:
    """A random model whose norms, biases and rotation matter."""
    import transformers

    torch.manual_seed(0)
    kind, changes = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes, **sizes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "embed" not in key:
                parameter.mul_(4)
    return model


def texts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 97, (length,), generator=generator).tolist() for length in lengths]


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def stock(model: Any, text: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([text]), use_cache=False).logits[0].float()
    return logits


def in_chunks(
    served: MultiVariantModel, wholes: list[list[int]], cuts: list[list[int]]
) -> list[torch.Tensor]:
    """Logits of every token, each text in its own chunks, those of all texts beside each other."""
    caches, read = [served.new_cache() for _ in wholes], [0] * len(wholes)
    found: list[list[torch.Tensor]] = [[] for _ in wholes]
    for number in range(max(map(len, cuts))):
        live = [at for at, cut in enumerate(cuts) if number < len(cut)]
        sizes = [cuts[at][number] for at in live]
        chunks = [
            Chunk(wholes[at][read[at] : read[at] + size], caches[at], num_logits=size)
            for at, size in zip(live, sizes, strict=True)
        ]
        parts = served.step(chunks).split(sizes)
        for at, size, part in zip(live, sizes, parts, strict=True):
            found[at].append(part)
            read[at] += size
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("name", MODELS)
def test_packed_chunks_of_every_family_give_transformers_logits(name: str) -> None:
    model = build(name)
    wholes = texts(19, 7, 1, 23)
    wanted = [stock(model, text) for text in wholes]
    with MultiVariantModel(model) as served:
        found = in_chunks(served, wholes, [[5, 9, 1, 1, 3], [1, 1, 1, 1, 3], [1], [20, 1, 1, 1]])
        assert (served.forward, dict(served.forwards)) == (
            "decoder",
            {"decoder": 5, "transformers": 0, "general": 0},
        )
    for a, b in zip(found, wanted, strict=True):
        assert off(a, b) < CLOSE


@pytest.mark.parametrize("path", dispatch.available())
def test_every_path_of_the_kernels_gives_transformers_logits(path: str) -> None:
    model, (text,) = build("qwen3"), texts(23)
    wanted = stock(model, text)
    with dispatch.using(path), MultiVariantModel(model) as served:
        assert off(in_chunks(served, [text], [[20, 1, 1, 1]])[0], wanted) < CLOSE


@pytest.mark.parametrize(
    ("name", "fault"), [("mistral", "window"), ("llama llama3", "rope"), ("qwen3", "norm"), ("qwen2", "bias")]
)
def test_a_wrong_window_rotation_norm_or_bias_would_show(name: str, fault: str) -> None:
    model, (text,) = build(name), texts(23)
    wanted = stock(model, text)
    with MultiVariantModel(model) as served:
        decoder = served._decoder
        assert decoder is not None
        for number, layer in enumerate(decoder.layers):
            changed = {"window": {"window": None}, "norm": {"k_norm": layer.q_norm}}.get(fault, {})
            decoder.layers[number] = type(layer)(**{**vars(layer), **changed})
            if fault == "bias":
                layer.qkv._bias = None
        if fault == "rope":
            decoder._rotary = build("llama").model.rotary_emb
        assert off(in_chunks(served, [text], [[23]])[0], wanted) > 100 * CLOSE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["rope", "norm", "bias", None])
def test_a_fault_of_the_forward_is_refused_at_the_start(
    dtype: str, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Faulty(Decoder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if fault == "rope":
                self._rotary = build(
                    "llama", rope_parameters={"rope_type": "default", "rope_theta": 2e4}
                ).model.rotary_emb
            if fault == "norm":
                weight = self.layers[-1].mlp_norm.weight
                missing = Norm(NormWeight(torch.ones_like(weight.weight), weight.eps), None)
                self.layers[-1] = dataclasses.replace(self.layers[-1], mlp_norm=missing)
            if fault == "bias":
                self.layers[1].down._bias = None

    monkeypatch.setattr(multi_variant, "Decoder", Faulty)
    model = build("llama biases").to(getattr(torch, dtype))
    if fault is None:
        with MultiVariantModel(model) as served:
            assert served.forward == "decoder"
        return
    with pytest.raises(GymError, match="logits in a step by decoder are off by"):
        MultiVariantModel(model)


@pytest.mark.parametrize("name", quick(["llama", "qwen3", "llama biases", "qwen2"], "llama biases", "qwen3"))
def test_variants_of_every_form_get_what_the_hooked_forward_adds(tmp_path: Path, name: str) -> None:
    model = build(name)
    wholes = texts(*range(3, 3 + len(RULES) + 2))
    paths = [
        write_random_delta(model, tmp_path / f"{known}.gymdelta", rule, seed=at)
        for at, (known, rule) in enumerate(RULES.items())
    ]
    with MultiVariantModel(model) as served:
        variants = [*(load(path, served.layout) for path in paths), None]
        variants.append(variants[0])
        found, wanted = [], []
        for into, own in ((found, True), (wanted, False)):
            if not own:
                served._decoder = None
            caches = [served.new_cache() for _ in wholes]
            for part in (slice(0, -1), slice(-1, None)):
                chunks = [
                    Chunk(text[part], cache, variant, num_logits=len(text[part]))
                    for text, cache, variant in zip(wholes, caches, variants, strict=True)
                ]
                into.append(served.step(chunks))
        base = served.step(
            [Chunk(text[:-1], served.new_cache(), num_logits=len(text) - 1) for text in wholes]
        )
        assert served.forwards == {"decoder": 2, "transformers": 3, "general": 0}
    for a, b in zip(found, wanted, strict=True):
        assert off(a, b) < CLOSE
    assert off(found[0], base) > 100 * CLOSE


@pytest.mark.parametrize("kernel", ["exact", "lookup16"])
def test_signs_alone_are_added_by_one_call_a_projection_to_their_own_rows(
    tmp_path: Path, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wholes = build("llama", hidden_size=64, intermediate_size=96), texts(5, 3, 4, 1)
    names = ("tensor", "row", "group")
    paths = [
        write_random_delta(model, tmp_path / f"{name}.gymdelta", RULES[name], seed=at)
        for at, name in enumerate(names)
    ]
    with MultiVariantModel(model, kernel=kernel) as served:
        variants = [load(paths[0], served.layout), None, *(load(path, served.layout) for path in paths[1:])]

        def logits() -> torch.Tensor:
            return served.step(
                [Chunk(t, served.new_cache(), v) for t, v in zip(wholes, variants, strict=True)]
            )

        before = dict(served.sign_products)
        with monkeypatch.context() as patch:
            patch.setattr(segments, "add_linear", lambda *_: 1 / 0)
            found = logits()
        linear = sum(target.kind == "linear" for target in served.layout.target_modules)
        assert served.sign_products[kernel] - before[kernel] == linear
        base = served.step([Chunk(text, served.new_cache()) for text in wholes])
        served._decoder = None
        wanted = logits()
    assert off(found, wanted) < 10 * CLOSE
    assert torch.equal(found[1], base[1])
    assert off(found[[0, 2, 3]], base[[0, 2, 3]]) > 100 * CLOSE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_factors_are_added_by_one_call_a_projection_to_their_own_rows(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama biases", hidden_size=64, intermediate_size=96)
    paths = [write_random_delta(model, tmp_path / f"{n}.gymdelta", RULES["lora"], seed=n) for n in range(3)]
    model, wholes = model.to(getattr(torch, dtype)), texts(5, 3, 40, 1)
    with MultiVariantModel(model) as served:
        variants = [load(paths[0], served.layout), None, *(load(path, served.layout) for path in paths[1:])]

        def logits() -> torch.Tensor:
            chunks = [Chunk(t, served.new_cache(), v) for t, v in zip(wholes, variants, strict=True)]
            return served.step(chunks)

        with monkeypatch.context() as patch:
            patch.setattr(segments, "add_linear", lambda *_: 1 / 0)
            found = logits()
            alone = served.step([Chunk(wholes[2], served.new_cache(), variants[2])])
        linear = sum(target.kind == "linear" for target in served.layout.target_modules)
        assert served.products["factors", "native"] == 2 * linear
        assert served.products["factors", "torch"] == 0
        base = served.step([Chunk(text, served.new_cache()) for text in wholes])
        served._decoder = None
        wanted = logits()
        assert served.products["factors", "torch"] == linear
    assert off(found, wanted) < (10 * CLOSE if dtype == "float32" else 0.05)
    assert torch.equal(found[1], base[1])
    assert off(found[[0, 2, 3]], base[[0, 2, 3]]) > (100 * CLOSE if dtype == "float32" else 0.25)
    if dtype == "float32":
        assert off(alone, found[2:3]) < CLOSE


def test_a_row_gets_the_same_tokens_beside_others_as_alone() -> None:
    model, wholes = build("llama"), texts(9, 4, 12, 6, 1)

    def answers(served: MultiVariantModel, prompts: list[list[int]]) -> list[list[int]]:
        caches = [served.new_cache() for _ in prompts]
        found: list[list[int]] = [[] for _ in prompts]
        news = prompts
        for _ in range(24):
            logits = served.step([Chunk(n, c) for n, c in zip(news, caches, strict=True)])
            news = [[int(row.argmax())] for row in logits]
            for into, new in zip(found, news, strict=True):
                into += new
        return found

    with MultiVariantModel(model) as served:
        assert answers(served, wholes) == [answers(served, [text])[0] for text in wholes]


def test_bfloat16_weights_lose_less_than_in_transformers_forward() -> None:
    model, wholes = build("qwen3"), texts(40, 40, 40)
    wanted = torch.cat([stock(model, text) for text in wholes]).double().log_softmax(-1)

    def divergence(logits: torch.Tensor) -> float:
        found = logits.double().log_softmax(-1)
        return float((wanted.exp() * (wanted - found)).sum(-1).mean())

    model.to(torch.bfloat16)
    theirs = divergence(torch.cat([stock(model, text) for text in wholes]))
    with MultiVariantModel(model) as served:
        assert served.forward == "decoder"
        ours = divergence(torch.cat(in_chunks(served, wholes, [[40]] * 3)))
    assert ours < theirs < 0.1


def test_hidden_states_are_those_of_transformers_forward() -> None:
    model, wholes = build("llama"), texts(9, 4)
    with MultiVariantModel(model) as served:
        found = []
        for forward in ("decoder", "transformers"):
            means = [HiddenMean() for _ in wholes]
            caches = [served.new_cache() for _ in wholes]
            for part in (slice(0, 3), slice(3, None)):
                served.step(
                    [
                        Chunk(text[part], cache, wants_logits=False, hidden=mean)
                        for text, cache, mean in zip(wholes, caches, means, strict=True)
                    ]
                )
            assert served.forwards[forward] == 2
            found.append(torch.stack([mean.unit() for mean in means]))
            served._decoder = None
    assert off(found[0], found[1]) < CLOSE


@pytest.mark.parametrize("change", ["subclass", "activation", "hook", "linear"])
def test_a_model_that_does_something_else_is_left_to_transformers(change: str) -> None:
    from transformers import LlamaForCausalLM

    class Longer(LlamaForCausalLM):
        pass

    model = build("llama")
    if change == "subclass":
        model.__class__ = Longer
    elif change == "activation":
        model.config.hidden_act = "gelu"
        for layer in model.model.layers:
            layer.mlp.act_fn = torch.nn.GELU()
    elif change == "hook":
        model.model.layers[1].mlp.register_forward_hook(lambda _module, _args, output: 2 * output)
    else:
        old = model.model.layers[1].mlp.down_proj
        model.model.layers[1].mlp.down_proj = type("Doubled", (torch.nn.Linear,), {})(84, 48, bias=False)
        model.model.layers[1].mlp.down_proj.weight = old.weight
    (text,) = texts(9)
    wanted = stock(model, text)
    with MultiVariantModel(model) as served:
        assert served.forward == "transformers"
        assert off(in_chunks(served, [text], [[4, 5]])[0], wanted) < CLOSE
        assert served.forwards == {"decoder": 0, "transformers": 2, "general": 0}
