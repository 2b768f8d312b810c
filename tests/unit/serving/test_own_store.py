"""The default variant store, and the base that its variants need."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_fed.cli.api.settings import serving_config, with_own_variants
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.serving.store.naming import base_of_store, present_store, variants_folder
from gym_fed.serving.store.store import VariantStore
from tests.support.small_variants import SHAPES, small_delta


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("GYM_VARIANTS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def put(folder: Path, name: str, base: str = "gym-nano", digit: str = "a") -> None:
    spec = BaseSpec(base, "sha256:" + digit * 64, dict(SHAPES))
    delta = small_delta(Path(f"{name}.gymdelta"), base=spec)
    with VariantStore.open(folder, require_signature=False) as store:
        store.add(delta, name=name, owner="ada")


def refusal(folder: Path) -> GymError:
    with pytest.raises(GymError) as caught:
        base_of_store(folder)
    assert caught.value.code is ErrorCode.USAGE
    return caught.value


def test_one_folder_is_found_by_flag_variable_and_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert variants_folder() == home / "variants"
    assert present_store() is None
    put(home / "variants", "ada")
    assert present_store() == home / "variants"
    monkeypatch.setenv("GYM_VARIANTS", "elsewhere")
    assert variants_folder() == Path("elsewhere")
    assert present_store() is None
    assert variants_folder(Path("named")) == Path("named")


def test_a_stores_base_is_the_one_of_all_its_variants(home: Path) -> None:
    with VariantStore.open(home / "variants"):
        pass
    assert base_of_store(home / "variants") is None
    put(home / "variants", "ada")
    put(home / "variants", "bo")
    assert base_of_store(home / "variants") == "gym-nano"


def test_several_bases_are_named_and_none_is_chosen(home: Path) -> None:
    put(home / "variants", "ada")
    put(home / "variants", "bo", "other", "b")
    error = refusal(home / "variants")
    assert "2 bases: gym-nano (sha256:" in error.message
    assert "other (sha256:bbbb" in error.message
    assert "--base MODEL" in error.hint


def test_a_base_that_only_its_folder_names_is_asked_for(home: Path) -> None:
    put(home / "variants", "ada", "version-1")
    Path("version-1").mkdir()
    assert "version-1" in refusal(home / "variants").message


def test_a_server_without_settings_takes_the_store_and_its_base(home: Path) -> None:
    assert with_own_variants(serving_config(None, [])).variants is None
    put(home / "variants", "ada", "other")
    with pytest.raises(GymError, match="other"):
        with_own_variants(serving_config(None, []))
    named = with_own_variants(serving_config(None, ["base=gym-nano"]))
    assert (named.base, named.variants) == ("gym-nano", home / "variants")
    alone = with_own_variants(serving_config(None, ["variants=null"]))
    assert (alone.base, alone.variants) == ("gym-nano", None)
