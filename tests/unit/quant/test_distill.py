"""Scale distillation on a small random Llama: what trains, what is frozen, what is promised."""

from __future__ import annotations

import pytest
import torch
from gym_quant import CodecError, Encoded, get_codec
from gym_quant.distill import Batch, Distilled, distill_scales
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

Coded = dict[str, tuple[str, tuple[int, ...], Encoded]]


def llama(seed: int, tied: bool = True) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def tuned_from(base: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {n: w + 0.05 * torch.randn(w.shape, generator=generator) ** 3 for n, w in base.items()}


def coded(
    base: dict[str, Tensor], tuned: dict[str, Tensor], codec: str = "bitdelta", **params: object
) -> Coded:
    found: Coded = {}
    for name, weight in base.items():
        which, own = (codec, params) if weight.ndim > 1 else ("dense", {})
        found[name] = (which, tuple(weight.shape), get_codec(which).encode(tuned[name] - weight, **own))
    return found


def text(count: int = 4, padding: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(count):
        ids = torch.randint(64, (4, 16), generator=generator)
        mask = torch.ones(4, 16, dtype=torch.bool)
        if padding:
            mask[:, -padding:] = False
        batches.append(Batch(ids, mask, mask))
    return batches


def distilled(tied: bool = True, codec: str = "bitdelta", **options: object) -> tuple[Coded, Distilled]:
    model = llama(0, tied)
    base = parameters(model)
    tuned = tuned_from(base)
    params = options.pop("params", {})
    before = coded(base, tuned, codec, **params)  # type: ignore[arg-type]
    return before, distill_scales(model, base, tuned, before, text(), **{"steps": 20, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", ["mse", "kl"])
@pytest.mark.parametrize("tied", [True, False])
def test_distillation_lowers_the_loss_and_trains_scales_only(loss: str, tied: bool) -> None:
    before, result = distilled(tied, loss=loss)
    assert result.loss_after < 0.97 * result.loss_before
    assert ("lm_head.weight" in result.trained) != tied
    assert result.flipped == 0.0
    for name, (codec, _, old) in before.items():
        new = result.encoded[name]
        assert new.params == old.params
        for field, values in new.payload.items():
            trains = codec == "bitdelta" and field == "scales"
            assert torch.equal(values, old.payload[field]) != trains, (name, field)


@pytest.mark.parametrize(
    ("codec", "params"),
    [
        ("bitdelta", {"group_size": 7}),
        ("bitdelta", {"group_size": 24, "scale_dtype": "bfloat16"}),
        ("int8", {"group_size": 8}),
        ("int4", {"group_size": 10, "symmetric": False}),
        ("int2", {}),
        ("ternary", {"symmetric": False}),
        ("binary", {"symmetric": False}),
    ],
)
def test_scales_of_every_codec_that_has_them_train_and_never_make_it_worse(
    codec: str, params: dict[str, object]
) -> None:
    before, result = distilled(codec=codec, params=params)
    assert result.loss_after <= result.loss_before
    assert len(result.trained) == sum(name != "dense" for name, _, _ in before.values())
    for name, (which, shape, _) in before.items():
        get_codec(which).check(result.encoded[name].payload, shape, result.encoded[name].params)


def test_the_loss_it_reports_is_that_of_the_scales_it_returns() -> None:
    model = llama(0)
    base = parameters(model)
    tuned = tuned_from(base)
    before = coded(base, tuned, scale_dtype="bfloat16")
    first = distill_scales(model, base, tuned, before, text(), steps=20)
    again = {n: (c, s, first.encoded[n]) for n, (c, s, _) in before.items()}
    assert distill_scales(model, base, tuned, again, text(), steps=0).loss_before == pytest.approx(
        first.loss_after, rel=1e-5
    )


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    results = [distilled(seed=seed, bit_lr=0.02)[1] for seed in (0, 0, 1)]
    first, second, third = ([t for e in r.encoded.values() for t in e.payload.values()] for r in results)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, third, strict=True))


def test_bits_train_only_where_they_are_asked_to_and_then_keep_more() -> None:
    _, scales = distilled(steps=40)
    before, both = distilled(steps=40, bit_lr=0.02)
    assert both.loss_after < scales.loss_after
    assert 0.0 < both.flipped < 0.5
    name = both.trained[0]
    assert not torch.equal(both.encoded[name].payload["bits"], before[name][2].payload["bits"])


def test_a_learning_rate_that_only_harms_leaves_the_scales_as_encoded() -> None:
    before, result = distilled(codec="int8", params={"group_size": 24}, steps=2, lr=5.0)
    assert result.loss_after == result.loss_before
    for name, (_, _, old) in before.items():
        assert all(torch.equal(v, old.payload[f]) for f, v in result.encoded[name].payload.items())


def test_padding_does_not_count() -> None:
    model = llama(0)
    base = parameters(model)
    tuned = tuned_from(base)
    one = coded(base, tuned)
    losses = []
    for filler in (0, 63):
        batches = text(2, padding=5)
        for batch in batches:
            batch.ids[~batch.mask] = filler
        losses.append(distill_scales(model, base, tuned, one, batches, steps=0).loss_before)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_model_itself_does_not_change() -> None:
    model = llama(0)
    base = parameters(model)
    tuned = tuned_from(base)
    distill_scales(model, base, tuned, coded(base, tuned), text(), steps=3, bit_lr=0.01)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, base[name]), name
        assert parameter.grad is None


def test_no_text_and_unknown_tensors_are_refused() -> None:
    model = llama(0)
    base = parameters(model)
    tuned = tuned_from(base)
    with pytest.raises(CodecError, match="at least one batch"):
        distill_scales(model, base, tuned, coded(base, tuned), [])
    stranger = {"stranger": ("bitdelta", (2, 2), get_codec("bitdelta").encode(torch.ones(2, 2)))}
    with pytest.raises(CodecError, match="'stranger'"):
        distill_scales(model, base, tuned, stranger, text())
