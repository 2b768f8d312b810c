"""A base that a contributor lacks: what is offered, asked, fetched, refused and kept. The hub may be anybody."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gym_client.agent.global_model import global_model
from gym_client.base import fetching
from gym_client.base.offer import BaseOffer
from gym_client.base.store import BaseStore
from gym_client.cli import costs
from gym_client.cli.costs import RoundTime
from gym_client.cli.join import join
from gym_client.cli.join_options import JoinOptions
from gym_client.hub.traffic import total_of
from gym_client.identity.home import Home

from gym_fed.base.files import BaseFile, listing_sha256, names_in
from gym_fed.base.models import load_model
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.task import TrainingRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec, digests_by_tensor
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.agent_scene import Recorder
from tests.support.model_hub import ModelHub, Repo
from tests.support.tiny_hub import TinyHub
from tests.unit.client.test_client_waiting import Yes

RECIPE = json.dumps(
    {
        "recipe": TrainingRecipe(max_length=64).model_dump(mode="json"),
        "codec": CodecPolicy().model_dump(mode="json"),
    }
)
NAME = "a-base-of-our-own"


class BaseHub(TinyHub):
    """Announces a base and serves its files, as a test changes them."""

    def offer_base(self, folder: Path, digest: str, **changes: object) -> None:
        """Take the files of a folder; ``changes`` are of the offer."""
        self.files = []
        for name in names_in(folder):
            self.put(name, (folder / name).read_bytes())
        model = load_model(str(folder)).model
        self.tensors = [pb.BaseTensor(name=n, digest=d) for n, d in digests_by_tensor(model).items()]
        self.announces = {"recipe_json": RECIPE, "base_model": NAME, "base_digest": digest}
        self.changes = changes
        self.announce()

    def put(self, name: str, data: bytes) -> None:
        """Another file, or another content of one."""
        sha256 = hashlib.sha256(data).hexdigest()
        self.objects[sha256] = data
        self.files = [file for file in self.files if file.name != name]
        self.files.append(BaseFile(name, len(data), sha256))

    def announce(self) -> None:
        """Bring status and listing up to date with the files."""
        size = sum(file.size_bytes for file in self.files)
        offer = {"licence": "mit", "bytes": size, "files": len(self.files)}
        offer |= {"listing_sha256": listing_sha256(self.files), **self.changes}
        self.announces["base_json"] = json.dumps(offer)
        files = [pb.BaseFile(name=f.name, size_bytes=f.size_bytes, sha256=f.sha256) for f in self.files]
        self.base = [pb.BasePart(files=files), pb.BasePart(tensors=self.tensors)]


class Accepting(Yes):
    """Says yes to the base, or no, and no to the terms that follow, so that nothing is trained."""

    def __init__(self, to_base: bool = True) -> None:
        self.to_base, self.offered = to_base, list[BaseOffer]()

    def base(self, offer: object) -> bool:
        assert isinstance(offer, BaseOffer)
        self.offered.append(offer)
        return self.to_base

    def offer(self, offer: object) -> bool:
        return False


@pytest.fixture(scope="module")
def digest(tiny_base: Path) -> str:
    return BaseSpec.of(load_model(str(tiny_base)).model, "").digest


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path, digest: str) -> Iterator[BaseHub]:
    hub = BaseHub(tmp_path / "hub")
    hub.start()
    hub.offer_base(tiny_base, digest)
    yield hub
    hub.stop()


def refused(hub: TinyHub, home: Home, consent: Yes | None = None, model: str | None = None) -> GymError:
    """How a join ends."""
    options = JoinOptions(server=hub.address, fingerprint=hub.fingerprint, model=model, wait=False)
    with pytest.raises(GymError) as caught:
        join(home, options, consent or Accepting(), Recorder())
    return caught.value


def kept(home: Home) -> list[str]:
    """Names in the folder of bases."""
    return sorted(path.name for path in home.bases.iterdir())


def test_a_hostile_name_stays_in_quotes_where_its_base_is_offered(digest: str) -> None:
    announced = json.dumps({"bytes": 1, "files": 1, "listing_sha256": "0" * 64, "licence": "mit"})
    named = f'm"{" " * 40}licence: apache-2.0{"!" * 100}'
    offer = BaseOffer.of(pb.StatusReply(base_model=named, base_digest=digest, base_json=announced))
    assert offer is not None
    assert offer.lines()[0].startswith("The hub trains \"m' licence: apache-2.0!!!")
    assert offer.lines()[0].endswith('!...", which is not on this machine.')


def test_an_accepted_base_is_whole_checked_counted_and_found_the_next_time(
    hub: BaseHub, home: Home, tiny_base: Path, digest: str
) -> None:
    consent = Accepting()
    assert "terms were not accepted" in refused(hub, home, consent).message
    (offer,) = consent.offered
    assert (offer.licence, offer.size_bytes) == ("mit", sum(file.size_bytes for file in hub.files))
    assert any("mit" in line for line in offer.lines())
    assert kept(home) == [digest.removeprefix("sha256:")]
    folder = Path(str(BaseStore(home).find(digest)))
    assert {path.name for path in folder.iterdir()} == {file.name for file in hub.files}
    assert (folder / "model.safetensors").read_bytes() == (tiny_base / "model.safetensors").read_bytes()
    assert total_of(home, hub.server).down == offer.size_bytes
    # The model was loaded from the folder where its files arrived, which is gone; libraries read its config again.
    model = global_model(str(folder)).model
    assert model.name_or_path == model.config._name_or_path == str(folder)

    again = Accepting(to_base=False)
    hub.download_offsets.clear()
    assert "terms were not accepted" in refused(hub, home, again).message
    assert not again.offered
    assert not hub.download_offsets


@pytest.mark.parametrize("is_accepted", [True, False])
def test_no_steps_are_timed_for_terms_that_were_accepted_before(
    hub: BaseHub, home: Home, monkeypatch: pytest.MonkeyPatch, is_accepted: bool
) -> None:
    timed: list[object] = []

    def time_round(*given: object) -> RoundTime:
        timed.append(given)
        return RoundTime(1.0, "2 steps of 2 rows")

    class Accepted(Accepting):
        def accepts_offer(self, offer: object) -> bool:
            return is_accepted

    monkeypatch.setattr(costs, "time_round", time_round)
    assert "terms were not accepted" in refused(hub, home, Accepted()).message
    assert bool(timed) is not is_accepted


def test_without_a_yes_nothing_is_fetched_and_nobody_enrolled(hub: BaseHub, home: Home) -> None:
    error = refused(hub, home, Accepting(to_base=False))
    assert error.code is ErrorCode.PERMISSION_DENIED
    assert "--base" in str(error)
    assert not hub.download_offsets
    assert not hub.enrolled
    assert not kept(home)


def test_a_hub_that_offers_no_base_is_left_with_the_remedy(hub: BaseHub, home: Home) -> None:
    hub.announces["base_json"] = ""
    consent = Accepting()
    error = refused(hub, home, consent)
    assert error.code is ErrorCode.MODEL_NOT_FOUND
    assert not consent.offered


def test_a_broken_line_is_resumed_at_its_byte(hub: BaseHub, home: Home) -> None:
    hub.break_download_after = 9_000
    assert refused(hub, home).code is ErrorCode.UNAVAILABLE
    (partial,) = home.bases.iterdir()
    came = {path.name: path.stat().st_size for path in partial.glob("*.part")}
    assert partial.suffix == ".partial"
    assert came
    hub.download_offsets.clear()
    assert "terms were not accepted" in refused(hub, home).message
    assert hub.download_offsets[0] == sum(came.values()) > 0


HOSTILE = {
    "../evil.safetensors": b"x",
    "/etc/evil.safetensors": b"x",
    "sub/model.safetensors": b"x",
    "..": b"x",
    "modeling_evil.py": b"import os",
    "pytorch_model.bin": b"\x80\x04",
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": b"x",
    "CONFIG.JSON": b"{}",
    "evil.safetensors\n": b"x",
    "\u202egpj.safetensors": b"x",
    ".hidden.safetensors": b"x",
    "x" * 200 + ".safetensors": b"x",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_no_file_of_a_base_is_refused_before_a_byte_is_fetched(
    hub: BaseHub, home: Home, name: str
) -> None:
    hub.put(name, HOSTILE[name])
    hub.announce()
    error = refused(hub, home)
    assert error.code is ErrorCode.MODEL_INVALID
    assert error.message.isprintable()
    assert len(error.message) < 500
    assert not hub.download_offsets
    assert not kept(home)


def test_a_listing_other_than_the_one_that_was_accepted_is_refused(hub: BaseHub, home: Home) -> None:
    hub.put("LICENSE", b"pay the hub")
    files = [pb.BaseFile(name=f.name, size_bytes=f.size_bytes, sha256=f.sha256) for f in hub.files]
    hub.base = [pb.BasePart(files=files)]
    error = refused(hub, home)
    assert error.code is ErrorCode.HASH_MISMATCH
    assert not hub.download_offsets
    assert not kept(home)


def test_a_listing_without_end_is_refused(hub: BaseHub, home: Home) -> None:
    hub.base = [pb.BasePart(files=[pb.BaseFile(name="a.safetensors")] * 300)] * 7
    assert refused(hub, home).code is ErrorCode.TOO_LARGE


def test_other_bytes_than_the_sha256_names_are_dropped(hub: BaseHub, home: Home) -> None:
    hub.serve = lambda data: data[:-1] + bytes([data[-1] ^ 1])
    assert refused(hub, home).code is ErrorCode.HASH_MISMATCH
    hub.serve, hub.announced_size = (lambda data: data + b"x"), lambda size: size - 1
    assert refused(hub, home).code is ErrorCode.TOO_LARGE
    (partial,) = home.bases.iterdir()
    assert partial.suffix == ".partial"
    assert not list(partial.iterdir())


def test_another_model_than_the_digest_names_is_deleted(hub: BaseHub, home: Home) -> None:
    hub.announces["base_digest"] = "sha256:" + "7" * 64
    error = refused(hub, home)
    assert error.code is ErrorCode.BASE_MISMATCH
    assert "7777" in error.message
    assert not kept(home)


def config_of(tiny_base: Path, **changes: object) -> bytes:
    return json.dumps({**json.loads((tiny_base / "config.json").read_text()), **changes}).encode()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "evil/repo--modeling.Evil"}}, "auto_map"),
        ({"quantization_config": {"quant_method": "evil"}}, "quantization_config"),
        ({"vocab_size": 900_000_000}, "values"),
        ({"num_hidden_layers": 1_000_000_000, "layer_types": None}, "num_hidden_layers"),
        ({"text_config": [{"num_local_experts": 5_000}]}, "num_local_experts"),
        ({"model_type": "no-such-type"}, "not describe a model"),
    ],
)
def test_a_config_that_leads_to_code_or_fills_the_memory_is_never_loaded(
    hub: BaseHub, home: Home, tiny_base: Path, changes: dict[str, object], words: str
) -> None:
    hub.put("config.json", config_of(tiny_base, **changes))
    hub.announce()
    error = refused(hub, home)
    assert error.code is ErrorCode.MODEL_INVALID, error
    assert words in error.message
    (partial,) = home.bases.iterdir()
    assert partial.suffix == ".partial"


def test_an_index_that_names_a_file_elsewhere_is_refused(hub: BaseHub, home: Home) -> None:
    hub.put(
        "model.safetensors.index.json", json.dumps({"weight_map": {"a": "../../secret.safetensors"}}).encode()
    )
    hub.announce()
    error = refused(hub, home)
    assert error.code is ErrorCode.MODEL_INVALID
    assert "secret" in error.message


def test_a_full_disk_is_named_before_a_byte_is_fetched(
    hub: BaseHub, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "SPARE_BYTES", shutil.disk_usage(home.folder).total)
    error = refused(hub, home)
    assert error.code is ErrorCode.DISK_FULL
    assert str(home.bases) in error.message
    assert not hub.download_offsets


def test_a_base_over_the_policys_limit_is_not_asked_for(hub: BaseHub, home: Home) -> None:
    home.policy_path.write_text("max_base_bytes: 1000\n")
    consent = Accepting()
    error = refused(hub, home, consent)
    assert error.code is ErrorCode.POLICY_REFUSED
    assert "max_base_bytes" in error.message
    assert not consent.offered


def test_a_damaged_byte_is_found_and_only_that_file_is_fetched_again(
    hub: BaseHub, home: Home, digest: str
) -> None:
    refused(hub, home)
    weights = Path(str(BaseStore(home).find(digest))) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    _forget_loaded()
    hub.download_offsets.clear()
    consent = Accepting()
    assert "terms were not accepted" in refused(hub, home, consent).message
    assert len(consent.offered) == 1
    assert len(hub.download_offsets) == 1
    assert weights.read_bytes() == whole


def test_a_folder_with_other_weights_is_refused_by_the_name_of_the_tensor(
    hub: BaseHub, home: Home, tiny_base: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    loaded = load_model(str(tiny_base))
    loaded.model.model.norm.weight.data[3] += 1
    loaded.model.save_pretrained(other)
    loaded.tokenizer.save_pretrained(other)
    consent = Accepting()
    error = refused(hub, home, consent, str(other))
    assert error.code is ErrorCode.BASE_MISMATCH
    assert "tensor 'model.norm.weight' differs in values" in error.message
    assert not consent.offered, "a folder that was named is not passed over"
    hub.base = hub.base[:1]  # a hub that knows no tensors still has its files
    assert (
        f"{other / 'model.safetensors'} is missing, or differs from the hub's file"
        in refused(hub, home, None, str(other)).message
    )


def test_the_base_under_another_path_joins_without_an_offer(
    hub: BaseHub, home: Home, tiny_base: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "somewhere else"
    shutil.copytree(tiny_base, copied)
    consent = Accepting()
    assert "terms were not accepted" in refused(hub, home, consent, str(copied)).message
    assert not consent.offered
    assert not hub.download_offsets
    assert not kept(home)


OFFERS: list[Callable[[BaseHub], object]] = [
    lambda hub: hub.announces.update(base_json="[]"),
    lambda hub: hub.announces.update(base_json="{"),
    lambda hub: hub.changes.update(bytes=-1),
    lambda hub: hub.changes.update(bytes="many"),
    lambda hub: hub.changes.update(files=True),
    lambda hub: hub.changes.update(listing_sha256="../x"),
    lambda hub: hub.changes.update(licence=["mit"]),
    lambda hub: hub.changes.update(public_name="../../etc/passwd"),
    lambda hub: hub.changes.update(commit="main"),
]


@pytest.mark.parametrize("number", range(len(OFFERS)))
def test_an_offer_that_is_not_of_its_form_is_refused(hub: BaseHub, home: Home, number: int) -> None:
    OFFERS[number](hub)
    if hub.announces["base_json"] not in ("[]", "{"):
        hub.announce()
    consent = Accepting()
    assert refused(hub, home, consent).code is ErrorCode.POLICY_REFUSED
    assert not consent.offered


def _forget_loaded() -> None:
    """A new process would have no model in memory."""
    from gym_client.agent import global_model

    global_model._loaded.clear()


PUBLIC = "acme/tiny-chat"


@pytest.fixture
def public(tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    """The base under a public name, at a Hugging Face Hub on loopback."""
    with ModelHub({PUBLIC: Repo.of(tiny_base, card={"license": "apache-2.0"})}) as found:
        found.stand_in(monkeypatch, tmp_path / "cache")
        yield found


def test_a_base_with_a_public_name_comes_from_there_and_is_found_the_next_time(
    hub: BaseHub, home: Home, public: ModelHub, digest: str
) -> None:
    hub.changes["public_name"] = PUBLIC
    hub.announce()
    consent = Accepting()
    assert "terms were not accepted" in refused(hub, home, consent).message
    (offer,) = consent.offered
    assert any("apache-2.0" in line and PUBLIC in line for line in offer.lines())
    assert not hub.enrolled, "the hub is not needed for it"
    assert str(BaseStore(home).find(digest)).startswith(str(home.folder.parent / "cache"))
    public.requests.clear()
    again = Accepting()
    refused(hub, home, again)
    assert not again.offered
    assert not public.requests


def test_a_public_name_that_became_another_model_is_not_used_and_the_hub_serves_it(
    hub: BaseHub, home: Home, public: ModelHub, digest: str
) -> None:
    weights = bytearray(public.repos[PUBLIC].files["model.safetensors"])
    weights[-1] ^= 1
    public.repos[PUBLIC].files["model.safetensors"] = bytes(weights)
    hub.changes["public_name"] = PUBLIC
    hub.announce()
    consent = Accepting()
    assert "terms were not accepted" in refused(hub, home, consent).message
    assert [bool(offer.source) for offer in consent.offered] == [True, False], "asked for each source"
    assert kept(home) == [digest.removeprefix("sha256:")]


def test_no_to_a_public_base_is_no_to_every_source(hub: BaseHub, home: Home, public: ModelHub) -> None:
    hub.changes["public_name"] = PUBLIC
    hub.announce()
    consent = Accepting(to_base=False)
    assert refused(hub, home, consent).code is ErrorCode.PERMISSION_DENIED
    assert len(consent.offered) == 1
    assert not public.gets("model.safetensors")
    assert not hub.enrolled


def test_an_adapter_under_a_public_name_is_refused_before_anything_is_fetched(
    hub: BaseHub, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "adapter_config.json": json.dumps({"base_model_name_or_path": "acme/elsewhere"}).encode(),
        "adapter_model.safetensors": b"x" * 5000,
    }
    with ModelHub({"acme/adapter": Repo(files)}) as public:
        public.stand_in(monkeypatch, tmp_path / "cache")
        hub.changes = {"public_name": "acme/adapter", "bytes": 0, "files": 0, "listing_sha256": ""}
        hub.announce()
        error = refused(hub, home)
        assert public.gets("adapter_model.safetensors") == []
    assert error.code is ErrorCode.MODEL_INVALID
    assert "is an adapter" in error.message


def test_a_listing_of_endless_names_is_not_taken_into_memory(hub: BaseHub, home: Home, digest: str) -> None:
    long = "x" * (1 << 20)
    hub.base = [pb.BasePart(tensors=[pb.BaseTensor(name=f"{at}{long}", digest=b"")]) for at in range(200)]
    error = refused(hub, home)
    assert error.code is ErrorCode.TOO_LARGE
    assert "lists more for its base" in error.message
