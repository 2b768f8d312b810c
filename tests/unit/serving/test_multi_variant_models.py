"""Models that can be served with variants, and models and tensors that are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gym_quant.kernels import MODES, ResidentSigns

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.forward.chunk import Chunk, HiddenMean
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.forward.target_modules import ModelLayout
from gym_fed.serving.forward.variant_weights import FactorWeight, LoadedVariant, PackedWeight
from tests.support.variants import Coding, load, merged, off, write_random_delta

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 84,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = [5, 9, 2, 44, 17, 3, 8, 1, 60, 61, 62]


def build(kind: str, **changes: Any) -> Any:
    """A random model of a family, norms and biases not at their fresh values."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def rows(name: str, shape: tuple[int, ...]) -> Coding:
    del name
    return ("bitdelta", {"group_size": 1 << 20}) if len(shape) == 2 else ("dense", {"dtype": "float32"})


def factors(name: str, shape: tuple[int, ...]) -> Coding:
    del name
    return ("lora", {"rank": 3, "factors": "float32"}) if len(shape) == 2 else None


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen3", {}),  # norms of query and key, a head at a time
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),  # biases
        ("Mistral", {"sliding_window": 4, "tie_word_embeddings": False}),
        (
            "Gemma2",
            {"sliding_window": 4, "query_pre_attn_scalar": 12},
        ),  # capped scores, scaled embedding, 1 + w
        (
            "GPT2",
            {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64},
        ),  # Conv1D, positions, LayerNorm
    ],
)
def test_a_family_s_rows_equal_its_merged_models(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    model = build(kind, **changes)
    paths = [
        write_random_delta(model, tmp_path / f"{n}.gymdelta", rule, seed=n, size=0.03)
        for n, rule in enumerate((rows, factors))
    ]
    ids = torch.tensor([IDS])
    with torch.inference_mode():
        wanted = [
            tuned(ids, use_cache=False).logits[0, 7:] for tuned in (*(merged(model, p) for p in paths), model)
        ]
    with MultiVariantModel(model) as served:
        variants = [load(path, served.layout) for path in paths] + [None]
        caches = [served.new_cache() for _ in variants]
        found = []
        for part in (IDS[:6], IDS[6:8], IDS[8:9], IDS[9:10], IDS[10:]):
            chunks = [Chunk(part, c, v) for c, v in zip(caches, variants, strict=True)]
            found.append(served.step(chunks))
    for number, logits in enumerate(wanted):
        assert off(torch.stack([step[number] for step in found[1:]]), logits) < 1e-4, number


def test_a_model_whose_frequencies_depend_on_earlier_requests_is_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(GymError, match="rope type dynamic") as error:
        MultiVariantModel(build("Llama", rope_parameters=rope))
    assert error.value.code is ErrorCode.MODEL_INVALID


def test_a_model_with_state_outside_of_its_cache_is_computed_without_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build("Llama")

    def carry(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.cumsum(dim=1)  # what an earlier token leaves behind

    model.model.layers[0].mlp.register_forward_hook(carry)
    with torch.inference_mode():
        wanted = model(torch.tensor([IDS]), use_cache=False).logits[0, -2:]
    with MultiVariantModel(model) as served:
        cache = served.new_cache()
        found = [served.step([Chunk(part, cache)]) for part in (IDS[:-1], IDS[-1:])]
    assert off(torch.cat(found), wanted) < 1e-5
    assert "its cache cannot be used" in caplog.text
    assert model.config._attn_implementation != "gym_fed_packed"


def test_a_model_whose_tokens_see_later_ones_is_refused() -> None:
    model = build("Llama")

    def look_ahead(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output - output.mean(dim=1, keepdim=True)

    model.model.layers[0].mlp.register_forward_hook(look_ahead)
    with pytest.raises(GymError, match="its tokens attend to later ones") as error:
        MultiVariantModel(model)
    assert error.value.code is ErrorCode.MODEL_INVALID
    assert not model.model.norm._forward_hooks


def test_a_window_that_the_attention_does_not_use_is_left_to_transformers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"), MultiVariantModel(build("Llama", sliding_window=8)) as served:
        assert served.forward == "general"  # Llama's attention knows no windows
    assert "layer 0 should have a sliding window of 8" in caplog.text


def test_adapters_routers_and_half_precision_are_refused() -> None:
    from gym_fed.base.modeling.mixture_of_depths import convert_to_mixture_of_depths

    adapted = build("Llama")
    adapted.peft_config = {"default": object()}  # as peft and transformers mark a model with an adapter
    for model in (adapted, torch.nn.ModuleList([adapted])):
        with pytest.raises(GymError, match="not a plain transformers model"):
            MultiVariantModel(model)
    routed = build("Llama")
    convert_to_mixture_of_depths(routed, capacity=0.5, every=2, router_loss_weight=0.1)
    with pytest.raises(GymError, match="mixture of depths"):
        MultiVariantModel(routed)
    with pytest.raises(GymError, match="its weights are float16"):
        MultiVariantModel(build("Llama").half())


def test_a_model_is_served_by_one_at_a_time_and_is_itself_again_after_close() -> None:
    model = build("Qwen3")
    ids = torch.tensor([IDS])
    with torch.inference_mode():
        before = model(ids).logits
    served = MultiVariantModel(model)
    with pytest.raises(GymError, match="already being served") as error:
        MultiVariantModel(model)
    assert error.value.code is ErrorCode.USAGE
    with pytest.raises(GymError, match="packed step"), torch.inference_mode():
        model(ids)
    served.close()
    served.close()
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, before)
    assert not any(module._forward_hooks for module in model.modules())


def test_bfloat16_rows_are_as_near_to_the_truth_as_their_merged_models(tmp_path: Path) -> None:
    """Truth: the merged model of the same bfloat16 weights, computed in float32."""
    model = build("Llama", tie_word_embeddings=True).to(torch.bfloat16)
    paths = [
        write_random_delta(model, tmp_path / f"{n}.gymdelta", r, seed=n)
        for n, r in enumerate((rows, factors))
    ]
    wide = build("Llama", tie_word_embeddings=True).to(torch.bfloat16).to(torch.float32)
    ids = torch.tensor([IDS])
    with torch.inference_mode():
        truth = [merged(wide, p)(ids).logits[0, -1] for p in paths]
        rounded = [merged(model, p)(ids).logits[0, -1].float() for p in paths]
    with MultiVariantModel(model) as served:
        found = served.step([Chunk(IDS, served.new_cache(), load(p, served.layout)) for p in paths])
    for row, true, peer in zip(found, truth, rounded, strict=True):
        assert off(row, true) < 2 * off(peer, true) + 1e-3
        assert off(row, true) < 0.03 * float(true.abs().max())


def test_a_cache_grows_without_changing_what_it_holds() -> None:
    with MultiVariantModel(build("Llama")) as served:
        wanted = served.step([Chunk(list(range(3, 43)), served.new_cache(), num_logits=40)])
        small, others = served.new_cache(), [served.new_cache() for _ in range(30)]
        blocks = served.pool.num_blocks
        for at in range(40):
            if at == 20:
                served.step([Chunk([at + 3], other, None, False) for other in others])
            logits = served.step([Chunk([at + 3], small)])
            assert off(logits[0], wanted[at]) < 1e-5
        assert (small.length, small.capacity) == (40, 48)
        assert small.bytes == 48 * served.bytes_per_token
        assert served.pool.num_blocks > blocks


def test_a_cache_that_is_cut_back_goes_on_from_there() -> None:
    with MultiVariantModel(build("Llama")) as served:
        cache = served.new_cache()
        first = served.step([Chunk(IDS[:4], cache)])
        served.step([Chunk([7, 7, 7], cache, None, False)])
        cache.truncate(3)
        assert off(served.step([Chunk(IDS[3:4], cache)]), first) < 1e-5
        with pytest.raises(ValueError, match="length 9"):
            cache.truncate(9)


def test_a_step_that_fails_can_be_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with MultiVariantModel(build("Llama")) as served:
        cache, other = served.new_cache(), served.new_cache()
        wanted = served.step([Chunk(IDS[:4], other)])
        with monkeypatch.context() as patch:
            assert served._decoder is not None
            patch.setattr(served._decoder.head, "project", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                served.step([Chunk(IDS[:4], cache)])
        assert cache.length == 0
        assert torch.equal(served.step([Chunk(IDS[:4], cache)]), wanted)
        with pytest.raises(GymError, match="same cache"):
            served.step([Chunk([1], cache), Chunk([2], cache)])
        with pytest.raises(GymError, match="at least one token"):
            served.step([Chunk([], served.new_cache())])


def test_no_logits_are_computed_where_none_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    with MultiVariantModel(build("Llama")) as served:
        sizes: list[int] = []
        assert served._decoder is not None
        head, project = served._decoder.head, served._decoder.head.project
        monkeypatch.setattr(head, "project", lambda x, *rest: (sizes.append(len(x)), project(x, *rest)))
        found = served.step([Chunk(IDS[:4], served.new_cache(), None, False)])
        assert (found.shape, sizes) == ((0, 97), [])
        served.step([Chunk(IDS[:4], served.new_cache(), None, n == 1) for n in range(3)])
        assert sizes == [1]


def test_layouts_are_made_without_serving_and_know_a_tied_head() -> None:
    model = build("Llama", tie_word_embeddings=True)
    layout = ModelLayout.of(model)
    assert set(layout.parameters) == set(dict(model.named_parameters()))
    assert not any(parameter.refusal for parameter in layout.parameters.values())
    assert (
        len([target for target in layout.target_modules if target.weight == "model.embed_tokens.weight"]) == 2
    )


def test_weights_are_of_the_codec_s_kind_and_other_bases_are_refused(tmp_path: Path) -> None:
    model = build("Llama")
    layout = ModelLayout.of(model)
    signs = load(write_random_delta(model, tmp_path / "s.gymdelta", rows, seed=0), layout)
    lora = load(write_random_delta(model, tmp_path / "l.gymdelta", factors, seed=0), layout)
    key = "model.layers.0.mlp.up_proj.weight"
    packed, low_rank = signs.weights[key], lora.weights[key]
    assert isinstance(packed, PackedWeight)
    assert isinstance(packed.held, ResidentSigns)
    assert isinstance(low_rank, FactorWeight)
    assert signs.resident_bytes == sum(o.resident_bytes for o in signs.weights.values())
    other = ModelLayout.of(build("Llama", intermediate_size=88))
    with pytest.raises(GymError, match=r"mlp\.down_proj\.weight.*does not fit the base") as error:
        load(tmp_path / "s.gymdelta", other)
    assert error.value.code is ErrorCode.BASE_MISMATCH


def test_look_up_refuses_groups_that_it_cannot_read_and_is_near_to_exact(tmp_path: Path) -> None:
    model = build("Llama")
    odd = write_random_delta(
        model,
        tmp_path / "odd.gymdelta",
        lambda _, s: ("bitdelta", {"group_size": 5}) if len(s) == 2 else None,
        seed=0,
    )
    whole = write_random_delta(model, tmp_path / "rows.gymdelta", rows, seed=0)
    found = {}
    for kernel in MODES:
        with MultiVariantModel(model, kernel=kernel) as served:
            found[kernel] = served.step([Chunk(IDS, served.new_cache(), load(whole, served.layout))])
            if kernel != "exact":
                with pytest.raises(GymError, match="group_size 5 is not a multiple of 8") as error:
                    load(odd, served.layout)
                assert error.value.code is ErrorCode.DELTA_INVALID
    assert 0 < off(found["lookup"], found["exact"]) < 0.1 * float(found["exact"].abs().max())
    assert 0 < off(found["lookup16"], found["exact"]) < 1e-3 * float(found["exact"].abs().max())
    assert 0 < off(found["lookup16"], found["exact"]) < 1e-3 * float(found["exact"].abs().max())


def embedded(served: MultiVariantModel, variant: LoadedVariant | None = None) -> torch.Tensor:
    """As the engine makes one: in chunks, without logits."""
    hidden, cache = HiddenMean(), served.new_cache()
    for part in (IDS[:3], IDS[3:]):
        served.step([Chunk(part, cache, variant, False, hidden)])
    return hidden.unit()


def test_an_embedding_of_a_text_has_length_one_and_is_the_variant_s(tmp_path: Path) -> None:
    model = build("Llama")
    path = write_random_delta(model, tmp_path / "v.gymdelta", rows, seed=0)
    with torch.inference_mode():
        hidden = merged(model, path).model(torch.tensor([IDS])).last_hidden_state[0].mean(dim=0)
    with MultiVariantModel(model) as served:
        found = embedded(served, load(path, served.layout))
        assert off(found, hidden / hidden.norm()) < 1e-5
        assert off(found, embedded(served)) > 1e-3


def test_a_variant_of_signs_takes_less_than_a_fifteenth_of_the_bfloat16_model(tmp_path: Path) -> None:
    model = build(
        "Llama", vocab_size=512, hidden_size=768, intermediate_size=1024, num_hidden_layers=1, head_dim=192
    )
    path = write_random_delta(
        model, tmp_path / "v.gymdelta", lambda _, s: ("bitdelta" if len(s) == 2 else "dense", {}), seed=0
    )
    variant = load(path, ModelLayout.of(model))
    assert 15 < 2 * sum(p.numel() for p in model.parameters()) / variant.resident_bytes < 16
