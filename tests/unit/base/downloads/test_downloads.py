"""Models of the Hub: offered, fetched with consent, resumed, verified, in the cache that other programs read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, hf_hub_download, snapshot_download

from gym_fed.base.downloads import DownloadOffer, ensure_dataset, ensure_model, missing_model, pull_model
from gym_fed.base.downloads.hub import FoundModel, search_models
from gym_fed.base.downloads.offer import offer_model
from gym_fed.base.models import load_model, resolve
from gym_fed.core.errors import ErrorCode, GymError
from tests.support.model_hub import ModelHub, Repo
from tests.unit.base.downloads.conftest import NAME

WEIGHTS = "model.safetensors"


def yes(offer: DownloadOffer) -> bool:
    return True


def blobs(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models--acme--tiny-chat" / "blobs"


def test_a_fetched_model_computes_what_its_folder_does(hub: ModelHub, tiny_base: Path) -> None:
    folder = ensure_model(NAME, consent=yes)
    assert folder == Path(resolve(NAME))
    ids = torch.arange(5)[None]
    with torch.no_grad():
        ours, theirs = load_model(NAME).model(ids).logits, load_model(str(tiny_base)).model(ids).logits
    assert torch.equal(ours, theirs)


def test_only_the_files_that_a_model_needs_are_fetched(hub: ModelHub) -> None:
    folder = ensure_model(NAME, consent=yes)
    names = {file.name for file in folder.iterdir()}
    assert {"config.json", WEIGHTS, "tokenizer.json"} <= names
    assert not names & {"pytorch_model.bin", "modeling_tiny.py", "original", "model.gguf"}


def test_a_model_that_is_here_costs_no_request_and_no_question(hub: ModelHub) -> None:
    ensure_model(NAME, consent=yes)
    hub.requests.clear()

    def asked(offer: DownloadOffer) -> bool:
        raise AssertionError("asked again")

    ensure_model(NAME, consent=asked)
    assert hub.requests == []


def test_the_offer_has_commit_bytes_and_licence(hub: ModelHub, repo: Repo) -> None:
    offer = offer_model(NAME)
    assert offer.commit == repo.commit
    assert offer.total_bytes == offer.missing_bytes == sum(len(repo.files[file.path]) for file in offer.files)
    assert offer.licence == "apache-2.0"
    text = offer.describe()
    assert NAME in text
    assert repo.commit[:12] in text
    assert "licence: apache-2.0" in text
    assert hub.url in text


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ({}, None),
        ({"license": ["mit", "cc-by-4.0"]}, "mit, cc-by-4.0"),
        ({"license": "other", "license_name": "tiny-community"}, "tiny-community"),
        ({"license": "mit\x1b[2J\u202e" + "x" * 500}, "mit\\x1b[2J\\u202e"),
    ],
)
def test_the_licence_is_what_the_card_says_made_harmless(
    hub: ModelHub, repo: Repo, card: dict[str, object], licence: str | None
) -> None:
    repo.card = card
    found = offer_model(NAME)
    assert (found.licence or "").startswith(licence or "")
    assert len(found.licence or "") <= 80
    assert found.describe().isprintable()
    if licence is None:
        assert found.licence is None
        assert "licence: not stated" in found.describe()


def test_without_consent_nothing_is_fetched(hub: ModelHub, tmp_path: Path) -> None:
    with pytest.raises(GymError) as raised:
        ensure_model(NAME, consent=lambda offer: False)
    assert raised.value.code is ErrorCode.MODEL_NOT_FOUND
    assert f"gym models pull {NAME}" in raised.value.hint
    assert hub.gets(WEIGHTS) == []
    assert not blobs(tmp_path).exists()


def test_a_lost_connection_is_resumed_at_the_byte(hub: ModelHub, repo: Repo) -> None:
    repo.cut[WEIGHTS] = [5000]
    folder = ensure_model(NAME, consent=yes)
    assert hub.gets(WEIGHTS) == [None, "bytes=5000-"]
    assert (folder / WEIGHTS).read_bytes() == repo.files[WEIGHTS]


def test_a_part_of_an_earlier_run_is_continued(hub: ModelHub, repo: Repo, tmp_path: Path) -> None:
    digest = next(file.digest for file in offer_model(NAME).files if file.path == WEIGHTS)
    blobs(tmp_path).mkdir(parents=True)
    (blobs(tmp_path) / f"{digest}.incomplete").write_bytes(repo.files[WEIGHTS][:4000])
    folder = ensure_model(NAME, consent=yes)
    assert hub.gets(WEIGHTS) == ["bytes=4000-"]
    assert (folder / WEIGHTS).read_bytes() == repo.files[WEIGHTS]
    assert list(blobs(tmp_path).glob("*.incomplete")) == []


def test_a_damaged_part_is_fetched_anew(hub: ModelHub, repo: Repo, tmp_path: Path) -> None:
    digest = next(file.digest for file in offer_model(NAME).files if file.path == WEIGHTS)
    blobs(tmp_path).mkdir(parents=True)
    (blobs(tmp_path) / f"{digest}.incomplete").write_bytes(b"0" * 4000)
    remarks: list[str] = []
    folder = ensure_model(NAME, consent=yes, report=lambda done, total, remark: remarks.append(remark))
    assert hub.gets(WEIGHTS) == ["bytes=4000-", None]
    assert (folder / WEIGHTS).read_bytes() == repo.files[WEIGHTS]
    assert any(WEIGHTS in remark and "fetching it again" in remark for remark in remarks)


@pytest.mark.parametrize(
    ("path", "change", "what"),
    [
        (WEIGHTS, lambda data: data[:-10], "bytes instead of"),
        (WEIGHTS, lambda data: data + b"more", "bytes instead of"),
        (WEIGHTS, lambda data: data[:-1] + bytes([data[-1] ^ 1]), "a different checksum"),
        ("generation_config.json", lambda data: data.replace(b"{", b"[", 1), "a different checksum"),
    ],
)
def test_a_file_that_is_not_what_the_hub_names_is_refused_and_not_kept(
    hub: ModelHub, repo: Repo, tmp_path: Path, path: str, change, what: str
) -> None:
    repo.sent[path] = change(repo.files[path])
    with pytest.raises(GymError) as raised:
        ensure_model(NAME, consent=yes)
    assert raised.value.code is ErrorCode.HASH_MISMATCH
    assert path in raised.value.message
    assert NAME in raised.value.message
    assert what in raised.value.message
    assert missing_model(NAME)
    del repo.sent[path]
    assert (ensure_model(NAME, consent=yes) / path).read_bytes() == repo.files[path]


def test_a_damaged_file_of_the_cache_is_found_and_fetched_again(hub: ModelHub, repo: Repo) -> None:
    folder = ensure_model(NAME, consent=yes)
    blob = (folder / WEIGHTS).resolve()
    blob.chmod(0o644)
    blob.write_bytes(b"0" * len(repo.files[WEIGHTS]))
    pull_model(NAME, consent=yes)
    assert (folder / WEIGHTS).read_bytes() == repo.files[WEIGHTS]


def test_a_commit_that_is_gone_after_the_offer_is_refused_until_a_new_offer(
    hub: ModelHub, repo: Repo
) -> None:
    def meanwhile(offer: DownloadOffer) -> bool:
        repo.files["generation_config.json"] = b"{}"
        return True

    with pytest.raises(GymError) as raised:
        ensure_model(NAME, consent=meanwhile)
    assert raised.value.code is ErrorCode.STALE
    assert "run the same command again" in raised.value.hint
    assert ensure_model(NAME, consent=yes).name == repo.commit


def test_pulling_again_fetches_what_the_newest_commit_changed(hub: ModelHub, repo: Repo) -> None:
    ensure_model(NAME, consent=yes)
    repo.files["generation_config.json"] = b'{"do_sample": false}'
    offer, folder = pull_model(NAME, consent=yes)
    assert offer.missing_bytes == 20
    assert folder.name == repo.commit
    assert Path(resolve(NAME)) == folder
    assert len(hub.gets(WEIGHTS)) == 1


def test_other_programs_find_the_model_in_the_same_cache(hub: ModelHub) -> None:
    folder = ensure_model(NAME, consent=yes)
    assert snapshot_download(NAME, local_files_only=True) == str(folder)
    hub.requests.clear()
    found = hf_hub_download(NAME, WEIGHTS)  # looks for the newest commit by HEAD
    assert found == str(folder / WEIGHTS)
    assert {method for method, path, _ in hub.requests if NAME in path} == {"HEAD"}


def test_a_snapshot_that_another_program_left_unfinished_is_completed(hub: ModelHub) -> None:
    hf_hub_download(NAME, "config.json")
    assert missing_model(NAME)
    ensure_model(NAME, consent=yes)
    assert load_model(NAME).tokenizer.pad_token is not None


def test_a_gated_model_names_the_page_and_the_token(
    hub: ModelHub, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo.gated, repo.token = "manual", "hf_right"
    with pytest.raises(GymError) as raised:
        ensure_model(NAME, consent=yes)
    assert raised.value.code is ErrorCode.PERMISSION_DENIED
    assert "no token is set" in raised.value.message
    assert f"{hub.url}/{NAME}" in raised.value.hint
    assert "HF_TOKEN" in raised.value.hint
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(GymError, match="has no access"):
        ensure_model(NAME, consent=yes)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert ensure_model(NAME, consent=yes).is_dir()


def test_an_unknown_name_is_refused_with_near_ones(hub: ModelHub) -> None:
    for name in ("acme/tiny-chta", "acme/Tiny-Chatt", "tiny-chat"):
        with pytest.raises(GymError) as raised:
            ensure_model(name, consent=yes)
        assert raised.value.code is ErrorCode.MODEL_NOT_FOUND
        assert name in raised.value.message
        assert NAME in raised.value.hint


def test_a_search_states_the_size_of_the_weights_by_their_types(hub: ModelHub, repo: Repo) -> None:
    assert search_models("TINY") == [FoundModel(NAME, None, None, False)]
    repo.extra = {
        "safetensors": {"parameters": {"BF16": 10, "F32": 1, "F8_E4M3": 3, "BOOL": 2}},
        "downloads": 7,
    }
    repo.extra["gated"] = "manual"
    assert search_models("tiny") == [FoundModel(NAME, 29, 7, True)]
    assert search_models("no such & model?") == []


@pytest.mark.parametrize(
    "extra",
    [
        {"safetensors": {"parameters": {"BF16": -1}}, "downloads": "many"},
        {"safetensors": {"parameters": ["BF16"]}},
        {"safetensors": 3},
        {"safetensors": {"parameters": {"F99999": "x"}}},
    ],
)
def test_a_search_answer_that_is_odd_has_no_size(hub: ModelHub, repo: Repo, extra: dict[str, object]) -> None:
    repo.extra = extra
    assert search_models("tiny") == [FoundModel(NAME, None, None, False)]


def test_a_search_without_a_network_is_refused(hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(GymError) as raised:
        search_models("tiny")
    assert raised.value.code is ErrorCode.UNAVAILABLE
    assert hub.requests == []


def test_offline_is_refused_with_what_to_do_instead(hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(GymError) as raised:
        ensure_model(NAME, consent=yes)
    assert raised.value.code is ErrorCode.UNAVAILABLE
    assert "HF_HUB_OFFLINE" in raised.value.message
    assert f"hf download {NAME}" in raised.value.hint
    assert "HF_ENDPOINT" in raised.value.hint
    assert hub.requests == []


def test_a_data_set_offline_is_refused_with_where_to_put_it(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(GymError) as raised:
        ensure_dataset("someone/words", consent=yes)
    assert raised.value.code is ErrorCode.UNAVAILABLE
    assert "hf download --repo-type dataset someone/words --cache-dir FOLDER" in raised.value.hint
    assert f"to {tmp_path}/datasets--someone--words;" in raised.value.hint
    snapshot = tmp_path / "datasets--someone--words" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "datasets--someone--words" / "refs").mkdir()
    (tmp_path / "datasets--someone--words" / "refs" / "main").write_text("0" * 40)
    ensure_dataset("someone/words", consent=yes)


def test_a_hub_that_cannot_be_reached_is_named(hub: ModelHub) -> None:
    hub.close()
    with pytest.raises(GymError) as raised:
        ensure_model(NAME, consent=yes)
    assert raised.value.code is ErrorCode.UNAVAILABLE
    assert hub.url in raised.value.message


@pytest.mark.parametrize(
    "path", ["../../evil.safetensors", "/etc/passwd", "a\\..\\b", "C:evil", "bell\x07", "a//b"]
)
def test_a_file_name_that_would_leave_its_folder_is_refused(hub: ModelHub, repo: Repo, path: str) -> None:
    repo.files[path] = b"evil"
    with pytest.raises(GymError, match="not a safe path") as raised:
        ensure_model(NAME, consent=yes)
    assert raised.value.code is ErrorCode.MODEL_INVALID
    assert raised.value.message.isprintable()


def test_an_index_that_names_a_path_outside_is_refused(hub: ModelHub, repo: Repo) -> None:
    del repo.files[WEIGHTS]
    repo.files["model.safetensors.index.json"] = json.dumps(
        {"weight_map": {"a": "../../../evil.safetensors"}}
    ).encode()
    with pytest.raises(
        GymError, match=r"lists '\.\./\.\./\.\./evil\.safetensors', which is not in the repository"
    ):
        ensure_model(NAME, consent=yes)


def test_a_huge_list_of_files_is_refused(hub: ModelHub, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"rfilename": "a", "size": 1, "blobId": "0" * 40}
    repo.extra["siblings"] = [one] * 20_001
    with pytest.raises(GymError, match="siblings"):
        ensure_model(NAME, consent=yes)
    monkeypatch.setattr("gym_fed.base.downloads.hub.MAX_INFO_BYTES", 100_000)
    with pytest.raises(GymError) as raised:
        ensure_model(NAME, consent=yes)
    assert raised.value.code is ErrorCode.TOO_LARGE
    assert NAME in raised.value.message


@pytest.mark.parametrize(
    ("extra", "place"),
    [({"sha": "../.."}, "sha"), ({"siblings": [{"rfilename": 3}]}, "siblings.0"), ({"tags": 1}, "tags")],
)
def test_a_description_that_is_no_hubs_is_refused(
    hub: ModelHub, repo: Repo, extra: dict[str, object], place: str
) -> None:
    repo.extra = extra
    with pytest.raises(GymError, match=f"returned an invalid description of it: {place}"):
        ensure_model(NAME, consent=yes)


def test_pickled_weights_are_refused_by_name(hub: ModelHub, repo: Repo) -> None:
    del repo.files[WEIGHTS]
    with pytest.raises(
        GymError, match=r"no safetensors weights \(only model.gguf, original.*, pytorch_model.bin"
    ):
        ensure_model(NAME, consent=yes)


def test_a_model_whose_code_comes_with_it_is_refused_before_its_weights(hub: ModelHub, repo: Repo) -> None:
    repo.files["config.json"] = json.dumps({"model_type": "tinyzilla", "auto_map": {}}).encode()
    with pytest.raises(GymError, match="model_type 'tinyzilla' is unknown to transformers"):
        ensure_model(NAME, consent=yes)
    assert hub.gets(WEIGHTS) == []


def test_too_little_space_is_refused_before_anything_is_fetched(
    hub: ModelHub, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gym_fed.base.downloads.fetch.shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})()
    )
    with pytest.raises(GymError) as raised:
        ensure_model(NAME, consent=yes)
    assert raised.value.code is ErrorCode.DISK_FULL
    assert NAME in raised.value.message
    assert "HF_HOME" in raised.value.hint
    assert hub.gets(WEIGHTS) == []


def test_the_plan_of_a_model_of_the_hub_reads_its_config_and_keeps_nothing(
    hub: ModelHub, tiny_base: Path, tmp_path: Path
) -> None:
    from gym_fed.config.train.training import TrainingConfig
    from gym_fed.training.planning.sizes import sizes_of

    sizes = sizes_of(TrainingConfig(model=NAME))
    assert sizes.total == load_model(str(tiny_base)).model.num_parameters()
    assert not any("safetensors" in str(request) for request in hub.requests)
    assert missing_model(NAME)
