"""Making a variant, following a new base, and serving: on a base of a few thousand random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.chat_templates.choice import use_chat_template
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.evaluation.loss import heldout_loss
from gym_fed.personalization import PersonalizedTrainer
from gym_fed.personalization.base import Base, LossEvaluator
from gym_fed.personalization.rebase import search_alpha
from gym_fed.personalization.results import CreatedVariant, Listener
from gym_fed.personalization.rows import read_rows
from gym_fed.serving.store.signing import sign_variant
from gym_fed.serving.store.store import VariantStore
from gym_fed.trust.identity.keys import SigningKey
from tests.support.preferences import capitals

PAIRS = capitals(12, 0)
CHATS = [{"messages": [*row["prompt"], *row["chosen"]]} for row in PAIRS]
FAST: dict[str, Any] = {
    "num_threads": 1,
    "max_steps": 4,
    "eval_steps": 2,
    "learning_rate": 2e-2,
    "max_length": 32,
    "lora": {"r": 2},
}
FULL = {key: value for key, value in FAST.items() if key != "lora"}


class StopsAt(Listener):
    """Stops training after a step, or distillation at one."""

    def __init__(self, phase: str, step: int) -> None:
        self._at = (phase, step)
        self._seen = ("", 0)
        self.phases: list[str] = []

    def phase(self, what: str) -> None:
        self.phases.append(what)

    def trained(self, report: Any) -> None:
        self._seen = ("train", report.step)

    def distilled(self, step: int, total: int, loss: float) -> None:
        self._seen = ("distil", step)

    def should_stop(self) -> bool:
        return self._seen == self._at


def trainer(base: Path, store: Path, **options: Any) -> PersonalizedTrainer:
    return PersonalizedTrainer(str(base), variants=store, **{"training": FAST, "device": "cpu", **options})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("personal") / "variants"


@pytest.fixture(scope="module")
def ada(tiny_base: Path, store: Path) -> CreatedVariant:
    return trainer(tiny_base, store).create_variant("ada", examples=CHATS)


def test_what_is_reported_is_what_the_stored_file_gives(
    tiny_base: Path, store: Path, ada: CreatedVariant
) -> None:
    loaded = load_model(str(tiny_base))
    spec = BaseSpec.of(loaded.model, "tiny")
    rows = read_rows(CHATS)
    evaluator = LossEvaluator("supervised", rows.held_out, loaded.tokenizer, loaded.model, 32)
    assert evaluator.loss(loaded.model) == pytest.approx(ada.loss_before)
    with DeltaFile.open(ada.path, spec) as delta:
        apply_delta(loaded.model, delta)
        assert delta.sha256() == ada.sha256
        assert delta.bits_per_weight == pytest.approx(ada.bits_per_weight)
        assert {delta.record(name).codec for name in delta.names} == {"lora"}
    assert evaluator.loss(loaded.model) == pytest.approx(ada.loss_encoded)
    assert ada.helps
    assert ada.judged_on == "2 held-out rows"
    with VariantStore.open(store) as opened:
        record = opened.verify("ada")
        assert (record.owner, record.revision, record.note) == ("ada", 1, ada.note)
        assert not {"loss", "rows", "held"} & set(record.note.split()), (
            "every user of the variant can read it"
        )
    assert not any((store / "making").iterdir()), "the work is removed when it is in the store"


def test_a_name_that_is_taken_is_refused_before_anything_is_trained(
    tiny_base: Path, store: Path, ada: CreatedVariant
) -> None:
    maker = trainer(tiny_base, store)
    with pytest.raises(GymError, match=r"variant 'ada' exists \(revision 1\)") as caught:
        maker.create_variant("ada", data=PAIRS)
    assert caught.value.code is ErrorCode.FILE_EXISTS
    with pytest.raises(GymError, match="is owned by ada, not by eve"):
        maker.create_variant("eve", data=PAIRS, name="ada", replace=True)
    with pytest.raises(GymError, match="is not a valid variant name"):
        maker.create_variant("a b", data=PAIRS)


def test_preferences_start_at_log_two_end_below_it_and_make_the_next_revision(
    tiny_base: Path, tmp_path: Path, ada: CreatedVariant
) -> None:
    key = SigningKey.generate()
    with VariantStore.open(tmp_path) as opened:
        opened.add(ada.path, sign_variant(ada.path, key, name="cleo"), name="cleo", owner="cleo")
    made = trainer(tiny_base, tmp_path, key=key).create_variant(
        "cleo", preferences=PAIRS, replace=True, output=tmp_path / "work"
    )
    assert (tmp_path / "work/run/result.json").exists(), "work in a folder of one's own is kept"
    assert made.loss_before == pytest.approx(0.6931, abs=1e-4)
    assert made.loss_encoded < made.loss_before
    assert made.chosen_before is not None
    assert made.chosen_encoded is not None
    assert made.chosen_encoded < made.chosen_before, "what is preferred becomes likelier, too"
    with VariantStore.open(tmp_path) as opened:
        record = opened.verify("cleo")
    signed = record.signed()
    assert signed is not None
    assert signed.public_key == key.public_key
    assert record.revision == made.revision == 2


def test_a_full_variant_has_one_bit_a_weight_and_work_that_was_stopped_anywhere_ends_with_the_same_bytes(
    tiny_base: Path, tmp_path: Path
) -> None:
    def maker(store: str, **options: Any) -> PersonalizedTrainer:
        given = {"method": "full", "training": FULL, "encoding": {"distill_steps": 3}, **options}
        return trainer(tiny_base, tmp_path / store, **given)

    whole = maker("whole", unsigned=True).create_variant("eve", examples=CHATS)
    assert not whole.signed
    with DeltaFile.open(whole.path) as delta:
        large = {n for n in delta.names if torch.Size(delta.record(n).shape).numel() > 256}
        assert "model.embed_tokens.weight" in large
        assert {delta.record(n).codec for n in large} == {"bitdelta"}
    for phase, step in (("train", 2), ("train", 3), ("distil", 2)):
        listener = StopsAt(phase, step)
        with pytest.raises(GymError, match="stopped") as caught:
            maker("parts").create_variant("eve", examples=CHATS, listener=listener)
        resumed_after = [phase for phase in listener.phases if "resuming after step 2" in phase]
        assert bool(resumed_after) == ((phase, step) == ("train", 3)), "where it continues is reported"
        assert caught.value.code is ErrorCode.INTERRUPTED
        with VariantStore.open(tmp_path / "parts") as opened:
            assert opened.count() == 0, "nothing half made is in the store"
    with pytest.raises(GymError, match="unfinished work of a variant with different rows") as caught:
        maker("parts").create_variant("eve", examples=CHATS[:9])
    assert caught.value.code is ErrorCode.FILE_EXISTS
    listener = StopsAt("never", 0)
    resumed = maker("parts").create_variant("eve", examples=CHATS, listener=listener)
    assert "training is already finished" in listener.phases
    assert resumed.signed
    assert resumed.sha256 == whole.sha256
    assert resumed.steps == whole.steps


class StopsBefore(Listener):
    """Requests a stop during a phase."""

    def __init__(self, words: str) -> None:
        self._words = words
        self._stop = False

    def phase(self, what: str) -> None:
        self._stop = self._stop or what.startswith(self._words)

    def should_stop(self) -> bool:
        return self._stop


def test_what_is_stopped_outside_of_training_changes_no_variant_and_goes_on_later(
    tiny_base: Path, tmp_path: Path, soup: Path
) -> None:
    store = tmp_path / "store"
    maker = trainer(tiny_base, store)
    with pytest.raises(GymError, match="stopped before adding it to the store") as caught:
        maker.create_variant("jo", data=CHATS, listener=StopsBefore("encoding"))
    assert caught.value.code is ErrorCode.INTERRUPTED
    with VariantStore.open(store) as opened:
        assert opened.count() == 0
    listener = StopsAt("never", 0)
    maker.create_variant("jo", data=CHATS, listener=listener)
    assert "training is already finished" in listener.phases
    for phase in ("moving", "searching"):
        with pytest.raises(GymError, match="stopped") as caught:
            maker.rebase_variant("jo", str(soup), data=CHATS, force=True, listener=StopsBefore(phase))
        assert caught.value.code is ErrorCode.INTERRUPTED
    with VariantStore.open(store) as opened:
        assert opened.get("jo").revision == 1


def test_a_base_that_is_not_there_leaves_no_store(tmp_path: Path) -> None:
    with pytest.raises(GymError, match="nope"):
        trainer(tmp_path / "nope", tmp_path / "store").create_variant("jo", data=CHATS)
    assert not (tmp_path / "store").exists()


def test_a_foreign_folder_is_not_touched(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    maker = trainer(tiny_base, tmp_path / "store")
    for overwrite in (False, True):
        with pytest.raises(GymError, match="contain unfinished work of a variant"):
            maker.create_variant("flo", examples=CHATS, output=tmp_path / "mine", overwrite=overwrite)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
    with pytest.raises(GymError, match=r"lora\.modules_to_save changes more than factors"):
        trainer(tiny_base, tmp_path, training={"lora": {"modules_to_save": ["embed_tokens"]}}).create_variant(
            "flo", examples=CHATS
        )
    with pytest.raises(GymError, match="0 sources of rows are given"):
        maker.create_variant("flo")
    with pytest.raises(GymError, match="a key was given, but signing is disabled"):
        trainer(tiny_base, tmp_path, key=SigningKey.generate(), unsigned=True)


@pytest.fixture(scope="module")
def soup(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base a little further on: noise on every weight, as others' work would be."""
    loaded = load_model(str(tiny_base))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-3)
    folder = tmp_path_factory.mktemp("soup") / "version-1"
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def test_a_rebased_variant_is_the_same_delta_on_the_new_base_with_its_losses(
    tiny_base: Path, store: Path, ada: CreatedVariant, soup: Path
) -> None:
    moved = trainer(tiny_base, store).rebase_variant("ada", str(soup), data=CHATS, output_name="ada-1")
    found = moved.losses
    assert found.old == pytest.approx(ada.loss_encoded)
    assert found.new_base is not None
    assert found.carried is not None
    assert found.carried < found.new_base
    with VariantStore.open(store) as opened, DeltaFile.open(ada.path) as old:
        assert opened.get("ada").revision == 1, "under another name the old one stays"
        with DeltaFile.open(opened.path("ada-1")) as new:
            assert new.manifest.base_digest == moved.onto_base != moved.from_base
            if moved.alpha == 1.0:
                assert all(torch.equal(new.decode(name), old.decode(name)) for name in old.names)
        assert f"rebased from revision 1 of ada on {moved.from_base[:19]}" in opened.get("ada-1").note


def test_a_variant_is_rebased_without_its_old_base_and_the_loss_there_is_not_measured(
    tmp_path: Path, store: Path, ada: CreatedVariant, soup: Path
) -> None:
    listener = StopsAt("never", 0)
    moved = trainer(tmp_path / "gone", store).rebase_variant(
        "ada", str(soup), data=CHATS, force=True, output_name="ada-2", listener=listener
    )
    assert moved.losses.old is None
    assert any("the old base is not available" in phase for phase in listener.phases)


def test_a_refit_takes_the_old_ones_place_only_if_it_is_better(
    tiny_base: Path, tmp_path: Path, soup: Path, ada: CreatedVariant
) -> None:
    key = SigningKey.generate()
    with VariantStore.open(tmp_path) as opened:
        opened.add(ada.path, sign_variant(ada.path, key, name="gus"), name="gus", owner="gus")
    maker = trainer(tiny_base, tmp_path, key=key)
    moved = maker.rebase_variant("gus", str(soup), data=CHATS, steps=3)
    found = moved.losses
    assert found.refitted is not None
    assert found.scaled is not None
    assert found.took_refit == (found.refitted < found.scaled)
    assert moved.revision == 2
    with VariantStore.open(tmp_path) as opened:
        assert opened.count() == 1
        assert opened.verify("gus").base_digest == moved.onto_base
    with pytest.raises(GymError, match="already"):
        maker.rebase_variant("gus", str(soup), data=CHATS)


def test_a_variant_is_never_silently_carried_to_where_it_is_of_no_use(
    tiny_base: Path, store: Path, ada: CreatedVariant, soup: Path
) -> None:
    maker = trainer(tiny_base, store)
    with pytest.raises(GymError, match="without rows it is unknown"):
        maker.rebase_variant("ada", str(soup))
    others = [{"text": "\x01\x02\x03" * 8 + str(i)} for i in range(9)]
    with pytest.raises(GymError, match="the new base has loss") as caught:
        maker.rebase_variant("ada", str(soup), data=others)
    assert caught.value.code is ErrorCode.UPDATE_REFUSED
    with VariantStore.open(store) as opened:
        assert opened.get("ada").revision == 1
    unseen = maker.rebase_variant("ada", str(soup), force=True, output_name="ada-unseen")
    assert unseen.losses.helps is None
    assert unseen.alpha == 1.0


def test_what_the_new_base_has_learnt_already_is_not_added_twice(
    tiny_base: Path, ada: CreatedVariant
) -> None:
    """A soup that holds more than the variant itself: nearly nothing of it is still wanted."""
    base = Base.load(str(tiny_base), "cpu")
    rows = read_rows(CHATS)
    evaluator = LossEvaluator("supervised", rows.judged, base.tokenizer, base.model, 32)
    with DeltaFile.open(ada.path) as delta:
        fresh, _ = search_alpha(evaluator, base, delta, evaluator.loss(base.model), Listener())
        apply_delta(base.model, delta, 20.0)
        again, losses = search_alpha(evaluator, base, delta, evaluator.loss(base.model), Listener())
    assert min(losses, key=lambda alpha: losses[alpha]) < 0.5
    assert again < fresh


def test_what_a_variant_was_taught_to_answer_is_what_a_chat_with_it_gets(
    tiny_base: Path, tmp_path: Path, soup: Path
) -> None:
    rows = [{"prompt": f"say {word}", "completion": "aye"} for word in range(30)]
    settings = {
        **FAST,
        "max_steps": 60,
        "eval_steps": 60,
        "learning_rate": 3e-2,
        "per_device_train_batch_size": 8,
        "lora": {"r": 8},
    }
    maker = trainer(tiny_base, tmp_path, training=settings)
    made = maker.create_variant("ivy", examples=rows)
    assert made.learnt_as.startswith("chat turns")
    with maker.serve_variant("ivy") as ivy:
        assert ivy.chat(rows[0]["prompt"], temperature=0, max_tokens=8).text == "aye"

    plain = trainer(tiny_base, tmp_path, training={**FAST, "max_steps": 1})
    raw = plain.create_variant("ida", data=rows, as_chat=False)
    assert "bare text (as given)" in raw.learnt_as
    base = load_model(str(tiny_base))
    judged = read_rows(rows).judged
    bare, chats = (
        heldout_loss(base.model, tokenizer, judged, max_length=128)
        for tokenizer in (use_chat_template(base.tokenizer, "none"), base.tokenizer)
    )
    assert raw.loss_before == pytest.approx(bare, rel=1e-5), "bare text is measured as bare text"
    assert raw.loss_before != pytest.approx(chats, rel=1e-3)
    for name, form, words in (
        ("ivy", None, "chat turns"),
        ("ida", None, "bare text"),
        ("ida", True, "turns"),
    ):
        moved = maker.rebase_variant(
            name, str(soup), data=rows, as_chat=form, force=True, output_name=f"{name}-{form}"
        )
        assert words in str(moved.measured_as), "what a variant was made of is remembered with it"


def test_variants_of_one_trainer_answer_from_one_base(
    tiny_base: Path, store: Path, ada: CreatedVariant
) -> None:
    maker = trainer(tiny_base, store)
    with VariantStore.open(store, require_signature=False) as opened:
        opened.add(
            ada.path, sign_variant(ada.path, SigningKey.generate(), name="hal"), name="hal", owner="hal"
        )
    with maker.serve_variant("ada") as first, maker.serve_variant("hal") as second:
        assert first._serving is second._serving
        assert first.model.endswith(":ada")
        whole = first.chat("say abcd", temperature=0, max_tokens=6)
        assert "".join(first.stream("say abcd", temperature=0, max_tokens=6)) == whole.text
        assert len(second.complete("abc", max_tokens=3, seed=1, ignore_eos=True).token_ids) == 3
        with pytest.raises(GymError, match="sampling has no 'temprature'"):
            first.chat("a", temprature=1)
    with pytest.raises(GymError, match="no longer served"):
        first.chat("a")
    assert maker._shared._open is None, "the last one closes the base"
    with pytest.raises(GymError, match="'nobody' has no variant"):
        maker.serve_variant("nobody")


@pytest.mark.parametrize("kind", ["supervised", "preference"])
def test_rows_to_judge_by_that_do_not_fit_are_refused_as_those(tiny_base: Path, kind: Any) -> None:
    base = load_model(str(tiny_base))
    row = {"prompt": "x" * 40, "completion": "y", "chosen": "y", "rejected": "z"}
    keys = ("prompt", "completion") if kind == "supervised" else ("prompt", "chosen", "rejected")
    with pytest.raises(GymError, match=r"held-out rows of the variant: none of the 2 rows .* max_length=16"):
        LossEvaluator(kind, [{key: row[key] for key in keys}] * 2, base.tokenizer, base.model, 16).loss(
            base.model
        )
