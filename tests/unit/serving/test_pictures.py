"""Pictures in chat: the answers of transformers' own generate, whatever happens to prompt and cache."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText

from gym_fed.base.models import load_model
from gym_fed.config.serving import EngineConfig, ServingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.quantization.config import CalibratedPolicy
from gym_fed.quantization.quantizer import Quantizer
from gym_fed.serving.engine.request import Generation
from gym_fed.serving.forward.chunk import Chunk, Embedded, PlacedPicture, positions_between, rows_between
from gym_fed.serving.openai.catalogue import LOCAL, Caller
from gym_fed.serving.openai.pending import Pending
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.responses import RESPONSES
from gym_fed.serving.openai.service import CHAT
from gym_fed.serving.openai.tokenizing import TOKENIZE
from gym_fed.serving.pictures.decoding import Picture, read_picture
from gym_fed.serving.pictures.embedding import MediumEmbedder, PictureEncoder, _looks_ahead
from gym_fed.serving.pictures.processor import ProcessedPicture
from gym_fed.serving.pictures.reader import PictureReader
from gym_fed.serving.setup import Serving, open_serving
from tests.support.siblings import make_sibling
from tests.support.variants import merged, write_random_delta
from tests.support.vision_models import MAKERS, data_url, drawn, expected, image_part, vision_model

TOKENS = 10
NEEDS = {"smolvlm": "num2words", "mistral3": "torchvision"}
"""What transformers' processors of some families need besides."""


def words(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


FIRST, SECOND = drawn(1, 40, 24), drawn(2, 30, 30)
ASKED = [
    {"role": "system", "content": "Be kind."},
    {
        "role": "user",
        "content": [words("What "), image_part(data_url(FIRST)), words("is?"), image_part(data_url(SECOND))],
    },
]
ROWS = [
    {"role": "system", "content": [words("Be kind.")]},
    {"role": "user", "content": [words("What "), {"type": "image"}, words("is?"), {"type": "image"}]},
]


def opened(folder: Path, **changes: Any) -> Serving:
    return open_serving(ServingConfig(base=str(folder), device="cpu", num_threads=1, **changes))


def body(serving: Serving, messages: Any = ASKED, **more: Any) -> dict[str, Any]:
    return {
        "model": serving.served_name,
        "messages": messages,
        "temperature": 0,
        "max_tokens": TOKENS,
        **more,
    }


def answer(
    serving: Serving, messages: Any = ASKED, caller: Caller = LOCAL, **more: Any
) -> tuple[list[int], Any]:
    """The answer's token ids, and the usage."""
    pending = serving.service.begin(CHAT, body(serving, messages, **more), caller)
    usage = pending.run()["usage"]
    return tokens_of(pending), usage


def tokens_of(pending: Pending) -> list[int]:
    """Of its one answer, which is whole."""
    (generation,) = pending._generations
    assert isinstance(generation, Generation)
    return list(generation.result().token_ids)


def reader(serving: Serving) -> PictureReader:
    found = serving.service._prompts.pictures
    assert isinstance(found, PictureReader)
    return found


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_model("llava", tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture(scope="module")
def idefics3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_model("idefics3", tmp_path_factory.mktemp("models") / "idefics3")


@pytest.fixture(scope="module")
def serving(llava: Path) -> Iterator[Serving]:
    with opened(llava) as found:
        yield found


@pytest.mark.parametrize("family", MAKERS)
def test_the_answer_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    if (package := NEEDS.get(family)) is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"transformers' processor of {family} needs {package}")
    folder = vision_model(family, tmp_path / family)
    ids, wanted = expected(folder, ROWS, [FIRST, SECOND], TOKENS)
    with opened(folder) as serving:
        found, usage = answer(serving)
        assert serving.served.forward == "decoder"
        assert (found, usage["prompt_tokens"]) == (wanted, len(ids))
        count = serving.service.tokenizing.answer(TOKENIZE, {"messages": ASKED}, LOCAL)
        assert count["tokens"] == ids
        other = [{"role": "user", "content": "What is?"}]
        text = [{"role": "user", "content": [words("What is?")]}]
        assert answer(serving, other)[0] == expected(folder, text, None, TOKENS)[1]
    assert len(set(wanted)) > 2


@pytest.mark.parametrize("target", [r".*language_model.*(q_proj|v_proj)", r".*vision_tower.*v_proj"])
def test_an_adapter_of_a_vision_model_is_served_as_base_and_on_it(
    target: str, llava: Path, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    config = LoraConfig(
        r=4, lora_alpha=64, target_modules=target, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    tuned = get_peft_model(load_model(str(llava), images=True).model, config)
    tuned.save_pretrained(tmp_path / "adapter")
    shutil.copytree(llava, tmp_path / "merged")
    tuned.merge_and_unload().save_pretrained(tmp_path / "merged")
    _, wanted = expected(tmp_path / "merged", ROWS, [FIRST, SECOND], TOKENS)
    assert wanted != expected(llava, ROWS, [FIRST, SECOND], TOKENS)[1]
    with opened(tmp_path / "adapter") as serving:
        assert answer(serving)[0] == wanted
    with opened(llava, adapter=[str(tmp_path / "adapter")]) as serving:
        assert answer(serving)[0] == wanted


def test_the_general_forward_reads_pictures_too(tmp_path: Path) -> None:
    folder = vision_model("llava", tmp_path / "llava", hidden_act="gelu")
    with opened(folder) as serving:
        assert serving.served.forward == "transformers"
        assert answer(serving)[0] == expected(folder, ROWS, [FIRST, SECOND], TOKENS)[1]


@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_a_chunk_may_end_within_a_picture(tmp_path: Path, act: str) -> None:
    folder = vision_model("llava", tmp_path / "llava", hidden_act=act)
    with opened(folder, engine=EngineConfig(max_batch_tokens=16)) as serving:
        ids = serving.service.tokenizing.answer(TOKENIZE, {"messages": ASKED}, LOCAL)["tokens"]
        places = reader(serving).places
        assert any(places(ids[end - 1 : end + 1], "image") == 2 for end in range(16, len(ids), 16))
        found, _ = answer(serving)
        assert found == expected(folder, ROWS, [FIRST, SECOND], TOKENS)[1]


def test_a_prefix_is_found_again_with_the_same_picture_alone(serving: Serving, llava: Path) -> None:
    user = Caller("prefixes", base=True)
    one = [{"role": "user", "content": [image_part(data_url(FIRST)), words("a" * 40)]}]
    other = [{"role": "user", "content": [image_part(data_url(SECOND)), words("a" * 40)]}]
    rows = [{"role": "user", "content": [{"type": "image"}, words("a" * 40)]}]
    wanted = [expected(llava, rows, [picture], TOKENS)[1] for picture in (FIRST, SECOND)]
    assert wanted[0] != wanted[1]
    cached = []
    for messages, ids in ((one, wanted[0]), (other, wanted[1]), (one, wanted[0]), (other, wanted[1])):
        found, usage = answer(serving, messages, user)
        assert found == ids
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) >= 32


def test_features_are_computed_once_a_picture_and_owner(serving: Serving) -> None:
    pictures = reader(serving)
    messages = [{"role": "user", "content": [image_part(data_url(drawn(9)))] * 2}]
    before = pictures.encoder.computed
    for caller, computed in (("ann", 1), ("ann", 1), ("ben", 2)):
        answer(serving, messages, Caller(caller))
        assert pictures.encoder.computed - before == computed


def test_a_preempted_request_reads_its_picture_again(llava: Path) -> None:
    """There is room for one prompt and a half, and every answer outgrows it."""
    ids, wanted = expected(llava, ROWS, [FIRST, SECOND], 60)
    with opened(llava) as serving:
        per_token = serving.served.bytes_per_token
    room = EngineConfig(kv_cache_size=per_token * 2 * (len(ids) + 40), prefix_cache=False)
    with opened(llava, engine=room) as serving:
        asked = body(serving, max_tokens=60)
        pending = [serving.service.begin(CHAT, asked, Caller(name)) for name in ("ann", "ben")]
        for one in pending:
            one.run()
            assert tokens_of(one) == wanted
        assert serving.engine.stats().preemptions > 0


def sign_rule(name: str, shape: tuple[int, ...]) -> Any:
    return ("bitdelta", {}) if "language_model.layers" in name and len(shape) == 2 else None


def lora_rule(name: str, shape: tuple[int, ...]) -> Any:
    return ("lora", {"rank": 4}) if "language_model.layers" in name and len(shape) == 2 else None


@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_variants_of_the_language_model_read_pictures(llava: Path, tmp_path: Path, act: str) -> None:
    folder = llava if act == "silu" else vision_model("llava", tmp_path / "llava", hidden_act=act)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder).eval()
    deltas = {
        "signs": write_random_delta(model, tmp_path / "signs.gymdelta", sign_rule, seed=1),
        "lora": write_random_delta(model, tmp_path / "lora.gymdelta", lora_rule, seed=2),
    }
    store_of(folder, tmp_path / "store", deltas)
    with opened(folder, variants=tmp_path / "store", require_signature=False) as serving:
        found = {}
        for name, delta in deltas.items():
            _, wanted = expected(folder, ROWS, [FIRST, SECOND], TOKENS, model=merged(model, delta))
            found[name], _ = answer(serving, model=f"{serving.served_name}:{name}")
            assert found[name] == wanted
        found["base"], _ = answer(serving)
    assert len({tuple(ids) for ids in found.values()}) == 3


def test_a_variant_that_changes_how_pictures_are_read_is_refused_when_it_is_added(
    llava: Path, tmp_path: Path
) -> None:
    model: Any = AutoModelForImageTextToText.from_pretrained(llava).eval()

    def rule(name: str, shape: tuple[int, ...]) -> Any:
        return ("bitdelta", {}) if "multi_modal_projector" in name and len(shape) == 2 else None

    delta = write_random_delta(model, tmp_path / "eyes.gymdelta", rule, seed=1)
    with pytest.raises(GymError, match=r"eyes\.gymdelta: 2 tensors.*multi_modal_projector") as caught:
        store_of(llava, tmp_path / "store", {"eyes": delta})
    assert caught.value.code is ErrorCode.MODEL_INVALID


@pytest.mark.parametrize("family", MAKERS)
def test_the_parts_that_no_variant_may_change_are_those_outside_of_the_language_model(
    tmp_path: Path, family: str
) -> None:
    if family in NEEDS:
        pytest.importorskip(NEEDS[family])
    from gym_fed.serving.forward.target_modules import ModelLayout
    from gym_fed.serving.store.verification import _require_language_model

    model = AutoModelForImageTextToText.from_pretrained(vision_model(family, tmp_path / "model")).eval()
    for name, parameter in ModelLayout.of(model).parameters.items():
        with pytest.raises(GymError) if parameter.refusal else nullcontext():
            _require_language_model(tmp_path, [name])


def store_of(folder: Path, where: Path, deltas: dict[str, Path]) -> None:
    """A store of unsigned variants."""
    from gym_fed.serving.base import load_base
    from gym_fed.serving.forward.multi_variant import MultiVariantModel
    from gym_fed.serving.store.store import VariantStore

    model, _, base = load_base(str(folder), [], "float32")
    with (
        MultiVariantModel(model) as served,
        VariantStore.open(
            where, base=base, layout=served.layout, cache_bytes=10**8, require_signature=False
        ) as store,
    ):
        for name, delta in deltas.items():
            store.add(delta, None, name=name, owner="ann")


def test_responses_read_pictures_as_chat_does(serving: Serving) -> None:
    items = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "What is?"},
                {"type": "input_image", "image_url": data_url(FIRST), "detail": "auto"},
            ],
        }
    ]
    chat = [{"role": "user", "content": [words("What is?"), image_part(data_url(FIRST))]}]
    wanted, usage = answer(serving, chat)
    asked = {"model": serving.served_name, "input": items, "temperature": 0, "max_output_tokens": TOKENS}
    pending = serving.service.begin(RESPONSES, {**asked, "store": True}, LOCAL)
    made = pending.run()
    assert tokens_of(pending) == wanted
    assert made["usage"]["input_tokens"] == usage["prompt_tokens"]
    more = {**asked, "input": "And?", "previous_response_id": made["id"]}
    later = serving.service.begin(RESPONSES, more, LOCAL).run()
    assert later["usage"]["input_tokens"] > usage["prompt_tokens"]


def test_a_broken_picture_is_refused_by_its_place(serving: Serving) -> None:
    good, cut = image_part(data_url(FIRST)), data_url(drawn(5))[:-400]
    cut += "=" * (-len(cut.partition(",")[2]) % 4)
    places = (
        (CHAT, "messages", [{"role": "user", "content": [good, image_part(cut)]}]),
        (
            RESPONSES,
            "input",
            [
                {
                    "role": "user",
                    "content": [
                        words("x") | {"type": "input_text"},
                        {"type": "input_image", "image_url": cut},
                    ],
                }
            ],
        ),
    )
    for url, field, value in places:
        with pytest.raises(RequestError, match="broken") as caught:
            serving.service.handle(url, {"model": serving.served_name, field: value}, LOCAL)
        assert caught.value.code.http_status == 400
        assert str(caught.value.param).startswith(f"{field}[0].content[1]")


def test_a_places_text_from_a_user_is_text(serving: Serving, llava: Path) -> None:
    said = "is <image> one?"
    found, usage = answer(serving, [{"role": "user", "content": [words(said), image_part(data_url(FIRST))]}])
    plain, _ = answer(serving, [{"role": "user", "content": said}])
    assert usage["prompt_tokens"] > 16
    assert found != plain
    ids = serving.service.tokenizing.answer(
        TOKENIZE, {"messages": [{"role": "user", "content": said}]}, LOCAL
    )["tokens"]
    assert reader(serving).places(ids, "image") == 0


def test_detail_is_what_the_model_has(serving: Serving, idefics3: Path) -> None:
    with pytest.raises(RequestError, match="supports only one detail level") as caught:
        answer(serving, [{"role": "user", "content": [image_part(data_url(FIRST), detail="low")]}])
    assert caught.value.param == "messages[0].content[0].image_url"
    rows = [{"role": "user", "content": [{"type": "image"}]}]
    lengths = {}
    with opened(idefics3) as other:
        for detail, parts in (("low", False), ("high", True)):
            asked = [{"role": "user", "content": [image_part(data_url(FIRST), detail=detail)]}]
            found, usage = answer(other, asked)
            ids, wanted = expected(idefics3, rows, [FIRST], TOKENS, do_image_splitting=parts)
            assert (found, usage["prompt_tokens"]) == (wanted, len(ids))
            lengths[detail] = len(ids)
    assert lengths["low"] < lengths["high"]


def test_more_pictures_than_the_context_has_room_for_are_refused_before_they_are_read(llava: Path) -> None:
    with opened(llava, engine=EngineConfig(max_context=64)) as serving:
        with pytest.raises(RequestError, match="tokens or more including its media") as caught:
            answer(serving, [{"role": "user", "content": [image_part(data_url(FIRST))] * 4}])
        assert caught.value.name == "context_length_exceeded"
        assert reader(serving).encoder.computed == 0


def test_a_conversation_that_is_too_long_loses_its_oldest_pictures(serving: Serving) -> None:
    turn = [
        {"role": "user", "content": [{"type": "input_image", "image_url": data_url(FIRST)}]},
        {"role": "assistant", "content": "yes " * 40},
    ]
    last = {"role": "user", "content": [{"type": "input_image", "image_url": data_url(SECOND)}]}
    asked = {"model": serving.served_name, "max_output_tokens": 4, "input": [*turn * 8, last]}
    with pytest.raises(RequestError, match="together with the answer, at most"):
        serving.service.handle(RESPONSES, asked, LOCAL)
    made = serving.service.handle(RESPONSES, {**asked, "truncation": "auto"}, LOCAL)
    assert 16 < made["usage"]["input_tokens"] < 512


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{{ m.content }}", "does not support images"),
        (
            "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}"
            "{% endif %}",
            "0 placeholders for 2 images",
        ),
    ],
)
def test_a_template_without_places_takes_text_alone(llava: Path, content: str, why: str) -> None:
    template = "{% for m in messages %}{{ m.role }}: " + content + "\n{% endfor %}"
    with opened(llava, chat_template=template) as serving:
        assert answer(serving, [{"role": "user", "content": "x"}])[0]
        with pytest.raises(RequestError, match=why) as caught:
            answer(serving)
        assert "chat_template" in caught.value.hint


def test_a_base_of_another_number_format_is_described_as_in_float32(llava: Path) -> None:
    with opened(llava, dtype="bfloat16") as narrow, opened(llava) as wide:
        assert narrow.base == wide.base
        assert any("vision_tower" in name for name in narrow.base.shapes)
        assert len(answer(narrow)[0]) > 0


def test_a_sibling_of_llava_with_its_own_words_and_template_answers_alike(tmp_path: Path) -> None:
    folder = make_sibling("llava", tmp_path / "llava")
    rows = [{"role": "user", "content": [{"type": "image"}, words("What is it?")]}]
    asked = [{"role": "user", "content": [image_part(data_url(FIRST)), words("What is it?")]}]
    ids, wanted = expected(folder, rows, [FIRST], TOKENS)
    with opened(folder) as serving:
        assert serving.service.tokenizing.answer(TOKENIZE, {"messages": asked}, LOCAL)["tokens"] == ids
        assert answer(serving, asked)[0] == wanted


def test_a_family_that_is_served_for_text_refuses_pictures_by_its_name(tmp_path: Path) -> None:
    with opened(make_sibling("gemma3_vision", tmp_path / "gemma3")) as serving:
        assert answer(serving, [{"role": "user", "content": "x"}])[0]
        with pytest.raises(RequestError, match="bidirectional attention"):
            answer(serving)


def test_an_adapter_of_a_vision_model_is_encoded_and_served_with_pictures(
    llava: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    model: Any = AutoModelForImageTextToText.from_pretrained(llava).eval()
    target = r".*language_model.*(q_proj|v_proj|down_proj)"
    tuned: Any = get_peft_model(model, LoraConfig(r=4, target_modules=target, init_lora_weights=False))
    tuned.peft_config["default"].base_model_name_or_path = str(llava)
    tuned.save_pretrained(tmp_path / "run")
    whole: Any = AutoModelForImageTextToText.from_pretrained(llava)
    merged_run: Any = PeftModel.from_pretrained(whole, str(tmp_path / "run")).merge_and_unload().eval()
    _, wanted = expected(llava, ROWS, [FIRST, SECOND], TOKENS, model=merged_run)
    policy = CalibratedPolicy(codec="lora", factors="float32", distill_steps=0, calibration_samples=0)
    Quantizer(policy).quantize(str(llava), str(tmp_path / "run"), out=tmp_path / "run.gymdelta")
    store_of(llava, tmp_path / "store", {"run": tmp_path / "run.gymdelta"})
    with opened(llava, variants=tmp_path / "store", require_signature=False) as serving:
        assert answer(serving)[0] != wanted
        assert answer(serving, model=f"{serving.served_name}:run")[0] == wanted


BYTES = 4 * 8 * 4


class Tower:
    """Four features of eight numbers for every picture, in place of a model's own forward."""

    def embed(self, _processed: ProcessedPicture) -> Embedded:
        return Embedded([0, 1, 2, 3], torch.zeros(4, 8), None)


def features(encoder: PictureEncoder, number: int, owner: str = "ann") -> Any:
    picture = Picture(b"", 1, 1, "auto", bytes([number]))
    return encoder.features(picture, ProcessedPicture([1] * 4, {}), owner)


def test_features_in_the_requests_of_one_owner_are_bounded() -> None:
    encoder = PictureEncoder(cast(MediumEmbedder, Tower()), cache_bytes=2 * BYTES, owner_bytes=3 * BYTES)
    held = [features(encoder, number) for number in range(5)]
    with pytest.raises(GymError) as caught:
        features(encoder, 5)
    assert caught.value.code is ErrorCode.BUSY
    assert caught.value.hint
    assert features(encoder, 5, "ben") is not None
    held.clear()
    assert features(encoder, 5) is not None


def test_placed_features_count_after_they_left_the_cache() -> None:
    encoder = PictureEncoder(cast(MediumEmbedder, Tower()), cache_bytes=0, owner_bytes=2 * BYTES)
    held = [PlacedPicture(0, 4, features(encoder, number), b"") for number in range(2)]
    with pytest.raises(GymError) as caught:
        features(encoder, 2)
    assert caught.value.code is ErrorCode.BUSY
    held.pop()
    assert features(encoder, 2) is not None


def test_features_that_a_request_has_are_found_though_they_are_not_kept() -> None:
    encoder = PictureEncoder(cast(MediumEmbedder, Tower()), cache_bytes=BYTES)
    first = features(encoder, 0)
    for number in range(1, 4):
        features(encoder, number)
    computed = encoder.computed
    assert features(encoder, 0) is first
    assert encoder.computed == computed
    assert encoder._bytes == BYTES


def test_a_picture_embedded_during_a_step_gets_nothing_of_that_step(tmp_path: Path) -> None:
    with opened(make_sibling("qwen2_vl", tmp_path / "qwen")) as serving:
        own = reader(serving)
        mine, other = (
            own.processor.process(read_picture(data_url(drawn(seed, side, side))))
            for seed, side in ((1, 56), (2, 300))
        )
        embedder = own._embedder
        wanted, run = embedder.embed(other), mine.run
        placed = (PlacedPicture(0, len(run), embedder.embed(mine), b""),)
        during: list[Embedded] = []
        layer = serving.served.model.get_decoder().layers[0]
        hook = layer.register_forward_pre_hook(lambda *_: during.append(embedder.embed(other)))
        rows, positions = rows_between(placed, 0, len(run)), positions_between(placed, 0, len(run))
        serving.served.step([Chunk(run, serving.served.new_cache(), pictures=rows, positions=positions)])
        hook.remove()
        (found,) = during
        assert found.places == wanted.places
        assert torch.equal(found.features, wanted.features)


def test_a_causal_mask_with_text_around_a_picture_does_not_look_ahead() -> None:
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    assert not _looks_ahead(causal, 2, 6)
    causal[2:8, 2:8] = True
    assert _looks_ahead(causal, 2, 6)
