"""What is shown before joining: the size of an update is the size that training then makes."""

from __future__ import annotations

import json
import shutil
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gym_client.agent.global_model import GlobalModel
from gym_client.agent.policy import Policy
from gym_client.cli.announced import announced, announced_continuous, rounds_to_come
from gym_client.cli.costs import RoundTime, update_bytes
from gym_client.cli.offer import Offer, _in_words
from gym_client.cli.terms_in_words import offer_lines, offer_panel, terms_in_words
from gym_client.hub.traffic import Bandwidth
from gym_client.privacy.terms import PrivacyTerms, Promises, SecureTerms, require_sums
from gym_client.seeding.policy import SeedingPolicy
from rich.console import Console
from safetensors.torch import load_file, save_file

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.audit import AuditTerms
from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.config.hub.privacy import SecureTask
from gym_fed.config.hub.task import LoraRecipe, TrainingRecipe
from gym_fed.config.train.training import LoraSettings
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import readable_bytes
from gym_fed.data.row_counts import RowCounts
from gym_fed.delta.encode import encode_delta, lora_delta
from gym_fed.privacy.secure_aggregation.votes import bits_for, masked_bytes
from gym_fed.training.tuning.lora import add_lora, lora_factors
from gym_fed.trust.wire.v1 import hub_pb2 as pb

PAY = RewardsConfig(score="estimate").terms().model_dump()
FINGERPRINT = "sha256:" + "0123456789abcdef" * 4


@pytest.fixture(scope="module")
def model(tiny_base: Path) -> GlobalModel:
    return GlobalModel(str(tiny_base))


@pytest.mark.parametrize(
    "codec",
    [
        CodecPolicy(error_feedback=False),
        CodecPolicy(error_feedback=False, group_size=8, small_tensors="bitdelta"),
        CodecPolicy(error_feedback=False, codec="dense"),
        CodecPolicy(error_feedback=False, codec="int4", embeddings="int8"),
        CodecPolicy(error_feedback=False, codec="ternary", scale_dtype="bfloat16"),
    ],
)
def test_the_size_of_a_full_update_is_exact(model: GlobalModel, codec: CodecPolicy, tmp_path: Path) -> None:
    tuned = {name: tensor + 0.1 for name, tensor in model.tensors.items()}
    report = encode_delta(tuned, model.tensors, codec, tmp_path / "delta", model.base)
    assert update_bytes(model, TrainingRecipe(), codec) == report.size_bytes


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_the_size_of_a_lora_update_is_exact(
    tiny_base: Path, targets: list[str] | str, tmp_path: Path
) -> None:
    model = GlobalModel(str(tiny_base))
    recipe = TrainingRecipe(finetuning="lora", lora=LoraRecipe(r=2, lora_alpha=6, target_modules=targets))
    predicted = update_bytes(model, recipe, CodecPolicy())
    adapted = add_lora(model.model, LoraSettings(**recipe.lora.model_dump()), seed=0)
    assert lora_delta(lora_factors(adapted), tmp_path / "delta", model.base).size_bytes == predicted


@pytest.mark.parametrize("factors", ["float32", "int8", "int4", "binary", "auto"])
def test_the_size_of_factors_in_any_form_is_reported(tiny_base: Path, factors: str, tmp_path: Path) -> None:
    model = GlobalModel(str(tiny_base))
    recipe = TrainingRecipe(finetuning="lora", lora=LoraRecipe(r=2))
    codec = CodecPolicy(factors=factors, error_feedback=False)
    predicted = update_bytes(model, recipe, codec)
    adapted = add_lora(model.model, LoraSettings(**recipe.lora.model_dump()), seed=0)
    generator = torch.Generator().manual_seed(0)
    found = {
        name: (torch.randn(a.shape, generator=generator), torch.randn(b.shape, generator=generator), scaling)
        for name, (a, b, scaling) in lora_factors(adapted).items()
    }
    size = lora_delta(found, tmp_path / "delta", model.base, policy=codec).size_bytes
    assert (
        size == predicted if factors != "auto" else size < 1.2 * predicted
    )  # tiny tensors may not be worth their bytes


def test_a_budget_caps_the_size(model: GlobalModel) -> None:
    codec = CodecPolicy(max_bits_per_weight=2.0)
    assert update_bytes(model, TrainingRecipe(), codec) <= model.base.num_parameters * 2 // 8


def test_a_recipe_with_an_unknown_key_is_refused_by_name() -> None:
    with pytest.raises(GymError, match="shell") as caught:
        announced(pb.StatusReply(recipe_json='{"recipe": {"shell": "x"}, "codec": {}}'))
    assert caught.value.code is ErrorCode.POLICY_REFUSED


def an_offer(**changes: object) -> Offer:
    offer = Offer(
        server="s",
        address="h:1",
        fingerprint=FINGERPRINT,
        contributor="c1",
        name="me",
        base_model="tiny",
        base_digest="d",
        recipe=TrainingRecipe().model_dump(),
        codec=CodecPolicy().model_dump(),
        update_bytes=1000,
        bf16_bytes=16_000,
        device="cpu",
        data="my.jsonl",
        num_examples=3,
        privacy=PrivacyTerms(None, None, 0.0, None, None, 1, None, None),
    )
    return replace(offer, **changes)


def test_the_panel_shows_the_whole_fingerprint_on_a_narrow_terminal() -> None:
    console = Console(record=True, width=60, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(offer_panel(an_offer()))
    shown = "".join(c for c in console.export_text() if c.isalnum() or c in ":.,")
    assert FINGERPRINT in shown
    assert "16.0xlarger" in shown


def shown_at_80_columns(offer: Offer) -> list[str]:
    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(offer_panel(offer))
    return console.export_text().splitlines()


def a_usual_offer() -> Offer:
    offer = an_offer(
        server="our community",
        address="hub.example.org:9443",
        contributor="c2354f318d9f2f582aafa98cf55b67e4f",
        base_model="SmolLM2-135M-Instruct",
        recipe=TrainingRecipe(finetuning="lora", lora=LoraRecipe(), learning_rate=2e-4).model_dump(),
        update_bytes=4_885_248,
        bf16_bytes=269_000_000,
        device="cpu (2 threads)",
        rounds=10,
        join_download_bytes=24_400_000,
        round_download_bytes=14_700_000,
        soup_form="factors",
        pay=PAY,
    )
    timed = RoundTime(760.0, "2 steps of 16 rows")
    costed = offer.with_costs(timed, 269_000_000, Bandwidth(5e6, "just measured"))
    return replace(costed, rows_in_words=("40 rows, all used", "7,817 labelled tokens"))


@pytest.mark.parametrize("name", ["ann", "c2354f318d9f2f582aafa98cf55b67e4f"])
def test_the_terms_of_a_hub_that_pays_for_lora_fit_15_lines_of_80_columns_and_begin_with_what_leaves(
    name: str,
) -> None:
    shown = shown_at_80_columns(replace(a_usual_offer(), name=name))
    assert len(shown) <= 15, "\n".join(shown)
    assert shown[0] == 'join hub.example.org:9443: "our community"'
    assert shown[1].startswith("leaves this machine: ")
    text = " ".join(" ".join(shown).split())
    for fact in (
        "public key c2354f318d9f...",
        "a delta of at most 4.9 MB, a signed manifest (round, digests, loss, time, row and token counts)",
        "LoRA factors in bfloat16, the bf16 model is 55.1 x larger",
        "never leaves: your data and private key",
        "no noise anywhere (epsilon is infinite); the hub sees your update",
        "440.4 MB (about 88 s) in 10 rounds, 48.9 MB up",
        "14.7 MB a round (LoRA factors), 24.4 MB to join, the base's 269.0 MB, at 5.0 MB/s (just measured)",
        "sft, lora, about 13 min a round on cpu (2 threads); 10 rounds (2 h 7 min) or until you stop",
        'base model "SmolLM2-135M-Instruct"; 50 steps of 16 x 256 tokens a round; learning rate 0.0002',
        "timed: 2 steps of 16 rows",
        "up to 1,000 credits a round, 10,000 per nat gained: 80% by estimate, 20% to all merged",
        "my.jsonl; 40 rows, all used; 7,817 labelled tokens",
        f"hub key: {FINGERPRINT}",
    ):
        assert fact in text, fact
    assert "--json" not in text, "nothing is left out"


NOISE = {"noise_multiplier": 1.0, "target_delta": 1e-5, "max_grad_norm": 1.0}
CENTRAL = {"epsilon": 18.25, "target_delta": 1.25e-5, "aggregator": "byzantine_evidence"}
SPENT = (0.53, 113.2, 12.3, 125.5, 1.25e-5, 100, NOISE)
FULL = TrainingRecipe(finetuning="full").model_dump()
LOST = RowCounts(
    rows=1400,
    learned=1102,
    cut=388,
    dropped=298,
    tokens=81_342,
    tokens_cut=112_801,
    lengths=array("Q", [300] * 1400),
    unread={"metadata": 1400, "id": 3},
)
LONG: dict[str, dict[str, Any]] = {
    "name": {"name": "n" * 80},
    "hub": {"server": "s" * 100, "address": "hub.a-rather-long-domain-name.example.org:9443"},
    "base": {"base_model": "m" * 96},
    "rows": {"rows_in_words": _in_words(LOST, TrainingRecipe()), "data": f"/home/{'d' * 100}/my.jsonl"},
    "pay": {"pay": RewardsConfig(score="estimate", pool=100_000).terms().model_dump()},
    "continuous": {"continuous": {"max_staleness": 20}},
    "moments": {"kept_bytes": 1_080_000_000, "recipe": FULL},
    "region": {"region": {"root": "s0123456789abcdef"}, "recipe": FULL, "soup_form": "full"},
    "seeding": {"seeding": tuple(SeedingPolicy(listen="0.0.0.0:9445").in_words())},
    "mirrors": {"mirrors": tuple(f"mirror-{n}.example.org:9450" for n in range(5))},
    "changes": {"changes": ("recipe.max_steps: 40 -> 50", "pay.pool: 10 -> 1000", "codec.codec: 1 -> 2")},
}
PRIVATE: dict[str, dict[str, Any]] = {
    "none": {},
    "local": {"privacy": PrivacyTerms(*SPENT, None)},
    "central": {"privacy": PrivacyTerms(None, None, 0.0, None, None, 100, None, CENTRAL)},
    "both": {"privacy": PrivacyTerms(*SPENT, CENTRAL)},
    "masked": {"secure": SecureTerms(9), "privacy": PrivacyTerms(*SPENT, CENTRAL, 9), "recipe": FULL},
    "audits": {"audit": AuditTerms(rows="disclosed").model_dump()},
}


def combinations() -> list[tuple[str, ...]]:
    """Everything that goes together, without each part in turn; and nothing at all."""
    found = set()
    for private in PRIVATE:
        for left_out in LONG:
            for one in ("continuous", "region"):
                chosen = [name for name in LONG if name != left_out]
                if one in chosen:
                    chosen.remove(one)
                if private in ("local", "both", "masked") and "moments" in chosen:
                    chosen.remove("moments")
                if private == "audits":
                    chosen = [name for name in chosen if name not in ("moments", "region")]
                found.add((private, *chosen))
        found.add((private,))
    return sorted(found)


@pytest.mark.parametrize(
    ("tokens", "max_steps", "words"),
    [
        (706, 2, ("80 rows, all used", "706 labelled tokens")),
        (706, 40, ("80 rows, all used", "706 labelled tokens, each 8 times a round")),
        (0, 2, ("80 rows, all used",)),
        (0, 40, ("80 rows, all used", "each 8 times a round")),
    ],
)
def test_terms_say_once_that_all_rows_are_learned(
    tokens: int, max_steps: int, words: tuple[str, ...]
) -> None:
    counts = RowCounts(rows=80, learned=80, tokens=tokens)
    assert _in_words(counts, TrainingRecipe(max_steps=max_steps)) == words


def test_no_combination_of_terms_takes_more_than_15_lines_or_hides_what_must_be_known() -> None:
    chosen = combinations()
    assert len(chosen) > 80
    for private, *names in chosen:
        parts = [PRIVATE[private], *(LONG[name] for name in names)]
        offer = replace(a_usual_offer(), **{key: value for part in parts for key, value in part.items()})
        shown = shown_at_80_columns(offer)
        assert len(shown) <= 15, "\n".join([private, *names, *shown])
        assert max(map(len, shown)) <= 80
        text = " ".join(" ".join(shown).split())
        facts = [term.text for term in terms_in_words(offer)]
        assert not [fact for fact in facts if fact not in text], text
        assert [line for line in shown if not line.startswith("  ")][1].startswith("leaves this machine: ")
        assert shown[-1] == f"hub key: {FINGERPRINT}"
        assert all(term.details in text for term in terms_in_words(offer)) or " (more: --json) leaves" in text


def test_names_of_a_hostile_hub_start_no_line_end_no_quotes_and_cut_no_facts() -> None:
    fake = f'{" " * 60}pays: 1000 credits a round{" " * 54}hub key: sha256:of-somebody-else" learning rate 1'
    hostile = replace(
        a_usual_offer(), base_model=f"m{fake}" * 20, server=f"s{fake}" * 20, address="h" * 90 + ":1"
    )
    shown = shown_at_80_columns(hostile)
    assert len(shown) <= 15, "\n".join(shown)
    begun = [line.split(":")[0] for line in shown if not line.startswith("  ")]
    assert begun == [
        "join",
        "leaves this machine",
        "never leaves",
        "privacy",
        "download",
        "runs here",
        "pays",
        "data",
        "hub key",
    ]
    text = " ".join(" ".join(shown).split())
    assert "h" * 90 + ":1:" in "".join(line.strip() for line in shown)
    assert "sft, lora, about 13 min a round on cpu (2 threads); 10 rounds" in text
    quotes = [text for _, text in offer_lines(hostile) if '"' in text]
    assert [text.count('"') for text in quotes] == [2]
    assert 'base model "m pays: 1000 credits a round hub key: sha256:of-somebody-..."' in quotes[0]


def test_moments_that_are_kept_between_rounds_are_shown_and_checked_before_consent(
    model: GlobalModel,
) -> None:
    weights = sum(tensor.numel() for tensor in model.tensors.values())
    offer = an_offer(kept_bytes=model.moments_bytes())
    shown = " ".join(" ".join(shown_at_80_columns(offer)).split())
    assert f"{readable_bytes(8 * weights)} of AdamW's moments stay here" in shown
    offer.check(Policy(max_optimizer_state_bytes=8 * weights))
    with pytest.raises(GymError, match="max_optimizer_state_bytes") as caught:
        offer.check(Policy(max_optimizer_state_bytes=8 * weights - 1))
    assert caught.value.code is ErrorCode.POLICY_REFUSED


def test_details_that_do_not_fit_are_in_the_lines_for_programs() -> None:
    offer = replace(a_usual_offer(), mirrors=("m.example.org:9450",), continuous={"max_staleness": 4})
    text = " ".join(" ".join(shown_at_80_columns(offer)).split())
    assert "your address: to mirror m.example.org:9450" in text
    assert text.startswith('join hub.example.org:9443: "our community" (more: --json) leaves')
    assert "4 versions old" not in text
    assert any("an update counts until it is 4 versions old" in line for _, line in offer_lines(offer))


def test_where_the_hub_sums_masked_votes_the_terms_are_those_of_votes_shares_and_a_bare_manifest(
    model: GlobalModel,
) -> None:
    secure = SecureTerms.parse('{"secure_aggregation": {"threshold": 3}}')
    assert secure is not None
    size = secure.update_bytes(model.base)
    assert size == masked_bytes(model.base, bits_for(5))  # of up to five, or a hub could split them
    privacy = PrivacyTerms(None, None, 0.0, None, None, 1, None, None, secure.threshold)
    offer = an_offer(secure=secure, update_bytes=size, privacy=privacy)
    shown = "\n".join(text for _, text in offer_lines(offer))
    assert "masked votes of at most" in shown
    assert "5.0 kB of sealed keys, a signed manifest (round, digests, time); keys for up to 4 others" in shown
    assert "the hub sees sums of 3 or more" in shown
    assert "a delta of" not in shown
    offer.check(Policy(max_update_bytes=size))
    with pytest.raises(GymError, match="max_update_bytes") as caught:
        offer.check(Policy(max_update_bytes=size - 1))
    assert caught.value.code is ErrorCode.POLICY_REFUSED
    assert SecureTerms.parse("") is SecureTerms.parse('{"central": {}}') is None
    with pytest.raises(GymError, match="does not state its threshold"):
        SecureTerms.parse('{"secure_aggregation": true}')


def test_a_task_that_gives_the_hub_more_than_the_sum_that_was_shown_is_refused() -> None:
    promised = Promises.parse('{"secure_aggregation": {"threshold": 3}}')
    for asked in (SecureTask(threshold=3), SecureTask(threshold=4)):
        require_sums(promised, asked)
    for less, message in ((None, "the update itself"), (SecureTask(threshold=2), "a sum of 2")):
        with pytest.raises(GymError, match=message) as caught:
            require_sums(promised, less)
        assert caught.value.code is ErrorCode.POLICY_REFUSED
    require_sums(Promises.parse(""), None)


@pytest.mark.parametrize(
    ("recipe", "limit", "rounds"),
    [({}, None, 6), ({"rounds_left": 0}, None, 0), ({"rounds_left": 5}, 3, 3), ({"rounds_left": -1}, 7, 6)],
)
def test_the_rounds_to_come_are_those_that_the_hub_announces_or_fewer(
    recipe: dict[str, int], limit: int | None, rounds: int
) -> None:
    status = pb.StatusReply(num_rounds=10, version_height=4, recipe_json=json.dumps(recipe))
    assert rounds_to_come(status, limit) == rounds


@pytest.mark.parametrize(
    ("recipe", "found"),
    [
        ({}, None),
        ({"continuous": 5}, None),
        ({"continuous": {"merge_every": 8, "max_staleness": 20}}, {"merge_every": 8, "max_staleness": 20}),
        ({"continuous": {"merge_every": "8", "max_staleness": 20}}, {"max_staleness": 20}),
    ],
)
def test_continuous_rounds_are_read_from_the_hubs_announcement(
    recipe: dict[str, object], found: dict[str, int] | None
) -> None:
    assert announced_continuous(pb.StatusReply(recipe_json=json.dumps(recipe))) == found


def test_a_base_is_read_again_from_disk_and_refused_once_it_has_changed_there(
    tiny_base: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_base, tmp_path / "base")
    model = GlobalModel(str(folder))
    model.reload()
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(GymError, match="changed on disk") as caught:
        model.reload()
    assert caught.value.code is ErrorCode.BASE_MISMATCH
