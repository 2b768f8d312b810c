"""Variants added and removed over HTTP: permissions, paths, signatures, and effect on every server."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gym_fed.config.serving import ServingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.http.app import create_app
from gym_fed.serving.http.gateway import Gateway
from gym_fed.serving.http.keys import Authenticator, KeyFile
from gym_fed.serving.http.server import run_server
from gym_fed.serving.openai.catalogue import LOCAL, Catalogue
from gym_fed.serving.openai.service import COMPLETIONS, OpenAIService
from gym_fed.serving.openai.tokenizing import LOAD, UNLOAD, manifest_path
from gym_fed.serving.store.signing import undo
from gym_fed.serving.store.store import VariantStore
from gym_fed.trust.identity.keys import SigningKey
from tests.support.scripted_engine import ScriptedEngine
from tests.support.small_variants import fake_loader, signed_small_delta, small_base, small_delta
from tests.unit.serving.test_api_app import Letters

KEY = SigningKey.generate()


class Server:
    """The application over a store of its own view, and a client of it."""

    def __init__(self, folder: Path, *, adapters: bool = True, require_signature: bool = True) -> None:
        self.store = VariantStore.open(
            folder / "store", base=small_base(), loader=fake_loader, require_signature=require_signature
        )
        self.keys = KeyFile(folder / "keys.json")
        engine = ScriptedEngine()
        catalogue = Catalogue("nano", self.store, small_base().digest)
        service = OpenAIService(
            engine, catalogue, Letters(), vocab_size=256, fingerprint="fp_1", max_at_once=20
        )
        gateway = Gateway(Authenticator(self.keys), request_timeout_seconds=60)
        (folder / "adapters").mkdir(exist_ok=True)
        config = SimpleNamespace(adapters_folder=folder / "adapters" if adapters else None)
        gateway.serving = SimpleNamespace(  # type: ignore[assignment]
            service=service,
            engine=engine,
            store=self.store,
            config=config,
            usage_log=None,
            content_filter=None,
        )
        transport = httpx.ASGITransport(create_app(gateway), raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def post(self, key: str, url: str, **body: Any) -> httpx.Response:
        return await self._client.post(url, json=body, headers={"authorization": f"Bearer {key}"})

    async def models(self, key: str) -> list[str]:
        answer = await self._client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        return [model["id"] for model in answer.json()["data"]]


def signed(folder: Path, name: str, *, revision: int = 1, key: SigningKey = KEY) -> str:
    """A delta in the folder of adapters, with its manifest beside it; returns its name there."""
    path = folder / "adapters" / f"{name}-{revision}.gymdelta"
    _, manifest = signed_small_delta(path, key, name, revision=revision, seed=revision)
    manifest_path(path).write_text(f"{manifest.to_json()}\n")
    return path.name


async def test_a_key_with_the_right_adds_replaces_and_removes_a_variant(tmp_path: Path) -> None:
    server = Server(tmp_path)
    key = server.keys.add("admin", everything=True, manage_variants=True)
    added = await server.post(key, LOAD, lora_name="ada", lora_path=signed(tmp_path, "ada"))
    assert (added.status_code, added.text) == (200, "Success: LoRA adapter 'ada' added successfully.")
    assert await server.models(key) == ["nano", "nano:ada"]
    assert server.store.get("ada").owner == KEY.contributor
    newer = signed(tmp_path, "ada", revision=2)
    again = await server.post(key, LOAD, lora_name="ada", lora_path=newer)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "file_exists")
    inplace = await server.post(
        key, LOAD, lora_name="nano:ada", lora_path=str(tmp_path / "adapters" / newer), load_inplace=True
    )
    assert inplace.status_code == 200
    assert server.store.get("ada").revision == 2
    removed = await server.post(key, UNLOAD, lora_name="nano:ada")
    assert (removed.status_code, removed.text) == (
        200,
        "Success: LoRA adapter 'nano:ada' removed successfully.",
    )
    assert await server.models(key) == ["nano"]
    assert (await server.post(key, UNLOAD, lora_name="ada")).status_code == 404


async def test_without_the_right_or_a_folder_nothing_is_added_or_removed(tmp_path: Path) -> None:
    server = Server(tmp_path)
    manager = server.keys.add("admin", manage_variants=True)
    path = signed(tmp_path, "ada")
    plain = server.keys.add("ann", everything=True)
    for url, body in ((LOAD, {"lora_name": "ada", "lora_path": path}), (UNLOAD, {"lora_name": "ada"})):
        assert (await server.post(plain, url, **body)).status_code == 403
        assert (await server.post("wrong", url, **body)).status_code == 401
    assert server.store.count() == 0
    assert not LOCAL.manage_variants
    assert (await server.post(manager, LOAD, lora_name="ada", lora_path=path)).status_code == 200
    assert (await server.post(manager, UNLOAD, lora_name="ada")).status_code == 404, "it may not use it"
    bare = Server(tmp_path, adapters=False)
    refused = await bare.post(manager, LOAD, lora_name="b", lora_path=path)
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "lora_path")
    assert bare.store.count() == 1


async def test_what_lies_outside_the_folder_is_refused_in_the_words_of_what_is_not_there(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path)
    key = server.keys.add("admin", everything=True, manage_variants=True)
    outside = small_delta(tmp_path / "outside.gymdelta")
    (tmp_path / "adapters" / "link.gymdelta").symlink_to(outside)
    (tmp_path / "adapters" / "text.txt").write_text("x")
    (tmp_path / "adapters" / "folder.gymdelta").mkdir()
    paths = [
        "../outside.gymdelta",
        str(outside),
        "link.gymdelta",
        "text.txt",
        "folder.gymdelta",
        "none.gymdelta",
        "~/x.gymdelta",
        "a\0b.gymdelta",
        "x" * 3000 + ".gymdelta",
        ".",
    ]
    answers = {(await server.post(key, LOAD, lora_name="ada", lora_path=path)).text for path in paths}
    assert len(answers) == 1
    assert "adapters_folder" in answers.pop()
    assert server.store.count() == 0


async def test_the_rules_of_signatures_are_those_of_gym_variant_add(tmp_path: Path) -> None:
    server = Server(tmp_path)
    key = server.keys.add("admin", everything=True, manage_variants=True)
    folder = tmp_path / "adapters"
    small_delta(folder / "bare.gymdelta")
    other = signed(tmp_path, "other")
    swapped = signed(tmp_path, "swapped")
    small_delta(folder / swapped, seed=9)
    broken = signed(tmp_path, "broken")
    manifest_path(folder / broken).write_bytes(b"\xff")
    small_delta(folder / "elsewhere.gymdelta", base=small_base("b"))
    (folder / "noise.gymdelta").write_bytes(b"noise")
    manifest_path(folder / "noise.gymdelta").write_text(manifest_path(folder / other).read_text())
    for path, name, code in (
        ("bare.gymdelta", "bare", "signature_invalid"),
        (other, "mine", "signature_invalid"),
        (swapped, "swapped", "hash_mismatch"),
        (broken, "broken", "signature_invalid"),
        ("noise.gymdelta", "other", "hash_mismatch"),
        (other, "no/name", "invalid_value"),
    ):
        answer = await server.post(key, LOAD, lora_name=name, lora_path=path)
        assert answer.status_code >= 400
        assert answer.json()["error"]["code"] in (code, "delta_invalid"), (path, answer.text)
        assert str(tmp_path) not in answer.text
        assert not re.search(r"[0-9a-f]{12}", answer.text), answer.text
    assert server.store.count() == 0
    lax = Server(tmp_path, require_signature=False)
    assert (await lax.post(key, LOAD, lora_name="bare", lora_path="bare.gymdelta")).status_code == 200
    assert lax.store.get("bare").owner == "admin"
    mismatch = await lax.post(key, LOAD, lora_name="elsewhere", lora_path="elsewhere.gymdelta")
    assert (mismatch.status_code, mismatch.json()["error"]["code"]) == (409, "base_mismatch")
    assert not re.search(r"[0-9a-f]{12}|gymdelta", mismatch.text), mismatch.text


async def test_what_is_added_undone_or_removed_elsewhere_is_felt_by_the_next_request(tmp_path: Path) -> None:
    first, second = Server(tmp_path), Server(tmp_path)
    key = first.keys.add("admin", everything=True, manage_variants=True)

    def served(server: Server) -> str:
        variant = server.store.acquire("ada")
        server.store.release(variant)
        return variant.delta_sha256

    async def status(server: Server) -> int:
        return (await server.post(key, COMPLETIONS, model="nano:ada", prompt="x")).status_code

    assert await status(second) == 404
    one, two = signed(tmp_path, "ada"), signed(tmp_path, "ada", revision=2)
    await first.post(key, LOAD, lora_name="ada", lora_path=one)
    assert await status(second) == 200
    before = served(second)
    await first.post(key, LOAD, lora_name="ada", lora_path=two, load_inplace=True)
    after = served(second)
    assert after != before
    with VariantStore.open(tmp_path / "store") as operator:
        undo(operator, "ada", KEY)
    assert served(first) == served(second) == before
    assert (await first.post(key, UNLOAD, lora_name="ada")).status_code == 200
    assert await status(second) == 404
    with pytest.raises(GymError) as caught:
        served(second)
    assert caught.value.code is ErrorCode.NOT_FOUND


@pytest.mark.parametrize(("name", "problem"), [("none", "does not exist"), ("file", "is not a folder")])
def test_a_server_whose_folder_of_adapters_cannot_be_used_does_not_start(
    tmp_path: Path, name: str, problem: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GymError, match=f"adapters_folder: .*{name} {problem}") as caught:
        run_server(ServingConfig(port=0, adapters_folder=tmp_path / name))
    assert caught.value.code is ErrorCode.FILE_NOT_FOUND
    assert "mkdir" in str(caught.value.hint)


def test_gym_variant_sign_writes_what_the_server_reads(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from gym_fed.cli.main import app
    from gym_fed.serving.openai.tokenizing import _signed_manifest

    delta, pem = small_delta(tmp_path / "x.gymdelta"), tmp_path / "key.pem"
    KEY.save(pem)
    words = ["variant", "sign", str(delta), "--name", "ada", "--key", str(pem), "--revision", "3"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    found = _signed_manifest(delta)
    assert found is not None
    found.verify()
    assert (found.manifest.variant, found.manifest.revision, found.manifest.owner) == (
        "ada",
        3,
        KEY.contributor,
    )
