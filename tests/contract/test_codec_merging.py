"""Every codec in a round, one of another package too: admitted, merged, clipped, noised, written again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gym_quant.registry import CODECS, get_codec

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.privacy import ReleasePrivacy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import AGGREGATORS
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.soup.compact import EXACT, write_compact
from gym_fed.soup.gram import Needs
from gym_fed.soup.merging import merge
from gym_fed.soup.private import PrivateMerge
from tests.support.codec_settings import settings_of
from tests.support.installed import install
from tests.unit.soup.test_soup_stacks import SPEC, recipe, written

STEPS = '''
"""A codec with nothing but what the interface requires: whole steps of one size, as int8."""

import torch
from gym_quant.codec import Codec, Encoded, as_matrix, check_finite, only_known, to_matrix


class Steps(Codec):
    name = "steps"

    def normalise(self, params, shape):
        only_known(params, (), self.name)
        return {}

    def payload_spec(self, shape, params):
        return {"step": (torch.float32, (1,)), "counts": (torch.int8, as_matrix(shape))}

    def encode(self, tensor, **params):
        self.normalise(params, tuple(tensor.shape))
        matrix = to_matrix(tensor)
        step = (matrix.abs().max() / 100).reshape(1)
        return Encoded({}, {"step": step, "counts": (matrix / step).nan_to_num().round().to(torch.int8)})

    def decode_rows(self, payload, shape, params, start, stop):
        return payload["counts"][start:stop].float() * payload["step"]

    def check(self, payload, shape, params):
        check_finite(payload["step"], "step")

    def norm(self, payload, shape, params):
        return float(self.decode(payload, shape, params).double().norm())
'''
NAMES = (*CODECS.own(), "steps")
SEED = b"s" * 32


def setting_of(name: str) -> dict[str, Any]:
    """The usual one, of a rank that the smallest tensor has."""
    return {**settings_of(name)[0], **({"rank": 3} if get_codec(name).low_rank else {})}


@pytest.fixture
def _installed_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "gym_more_steps.py").write_text(STEPS, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(CODECS, "_types", dict(CODECS._types))
    install(monkeypatch, {"gym_fed.codecs": {"steps": "gym_more_steps:Steps"}})
    get_codec.cache_clear()
    yield
    get_codec.cache_clear()


pytestmark = pytest.mark.usefixtures("_installed_steps")


@contextlib.contextmanager
def rounds_of(folder: Path, name: str) -> Iterator[tuple[list[DeltaFile], list[DeltaFile]]]:
    """Ten updates of a codec, and the same decoded to float32."""
    with written(folder, [(name, setting_of(name))] * 10) as updates, contextlib.ExitStack() as stack:
        floats = []
        for at, update in enumerate(updates):
            path = folder / f"floats-{at}.gymdelta"
            entries = [DeltaEntry.of(n, update.decode(n), "dense", dtype="float32") for n in update.names]
            write_delta(path, entries, SPEC)
            floats.append(stack.enter_context(DeltaFile.open(path, SPEC)))
        yield updates, floats


def soup_of(
    updates: Sequence[DeltaFile], path: Path, wanted: SoupRecipe, private: PrivateMerge | None = None
) -> dict[str, torch.Tensor]:
    """Of nine updates; the tenth is the root where the rule needs one."""
    root = updates[9] if AGGREGATORS.type_of(wanted.aggregator).needs is Needs.ROOT else None
    merge(updates[:9], [1.0] * 9, wanted, path, SPEC, root=root, private=private)
    with DeltaFile.open(path, SPEC) as found:
        return {name: found.decode(name) for name in found.names}


def largest(updates: Sequence[DeltaFile]) -> float:
    return max(float(update.decode(name).abs().max()) for update in updates for name in update.names)


@pytest.mark.few(5, "one decoder for every codec")
@pytest.mark.parametrize("name", NAMES)
def test_every_rule_makes_of_any_codec_the_soup_of_the_decoded_updates(tmp_path: Path, name: str) -> None:
    with rounds_of(tmp_path, name) as (updates, floats):
        for rule in AGGREGATORS.names():
            clipped = [{"max_norm": 0.5 * updates[0].norm()}] if rule in ("mean", "median") else []
            for more in ({}, *clipped):
                wanted = recipe(aggregator=rule, **more)
                found = soup_of(updates, tmp_path / "soup.gymdelta", wanted)
                expected = soup_of(floats, tmp_path / "expected.gymdelta", wanted)
                assert set(found) == set(expected), rule
                for tensor in found:
                    torch.testing.assert_close(
                        found[tensor],
                        expected[tensor],
                        rtol=0,
                        atol=2e-4 * largest(updates),
                        msg=f"{rule} {more}",
                    )


@pytest.mark.few(6, "one merge for every codec")
@pytest.mark.parametrize("mechanism", ["gaussian", "discrete_gaussian"])
@pytest.mark.parametrize("name", NAMES)
def test_a_private_soup_is_that_of_the_decoded_updates_under_the_same_noise(
    tmp_path: Path, name: str, mechanism: str
) -> None:
    privacy = ReleasePrivacy(mechanism=mechanism, noise_multiplier=0.5, clipping_norm=0.7)  # type: ignore[arg-type]
    private = PrivateMerge(privacy, SEED, tuple(SPEC.shapes))
    with rounds_of(tmp_path, name) as (updates, floats):
        found = soup_of(updates, tmp_path / "soup.gymdelta", recipe(aggregator="mean"), private)
        expected = soup_of(floats, tmp_path / "expected.gymdelta", recipe(aggregator="mean"), private)
    assert max(float(found[tensor].abs().max()) for tensor in found) > 0
    for tensor in found:
        torch.testing.assert_close(found[tensor], expected[tensor], rtol=0, atol=1e-6)


@pytest.mark.few(4, "one writer for every codec")
@pytest.mark.parametrize("name", NAMES)
def test_a_soup_in_any_codec_is_made_again_to_the_bit_and_comes_down_as_it_was_written(
    tmp_path: Path, name: str
) -> None:
    """What a round does after admission: merge, write small in the soup's codec, and the same again for a replay."""

    def whole_round(folder: Path, wanted: SoupRecipe) -> tuple[str, bytes]:
        folder.mkdir()
        opened = [DeltaFile.open(update.path, SPEC) for update in updates]
        try:
            merged = merge(opened[:9], [1.0] * 9, wanted, folder / "soup.gymdelta", SPEC).sha256
            exactly = wanted.model_copy(update={"codec": EXACT})
            merge(opened[:9], [1.0] * 9, exactly, folder / "exact.gymdelta", SPEC)
            with DeltaFile.open(folder / "exact.gymdelta", SPEC) as exact:
                write_compact(exact, folder / "small.gymdelta", SPEC)
        finally:
            for one in opened:
                one.close()
        with DeltaFile.open(folder / "soup.gymdelta", SPEC) as down:
            assert {down.record(n).codec for n in down.names if len(SPEC.shapes[n]) == 2} == {name}
            assert down.norm() > 0
        return merged, (folder / "small.gymdelta").read_bytes()

    rank = {"lora_rank": 3} if get_codec(name).low_rank else {}
    written_as = CodecPolicy(codec=name, error_feedback=False, small_max_elements=0, **rank)
    rule = "mean" if get_codec(name).sparse else "median"
    wanted = SoupRecipe(aggregator=rule, codec=written_as)
    with rounds_of(tmp_path, name) as (updates, _):
        first = whole_round(tmp_path / "first", wanted)
        again = whole_round(tmp_path / "again", SoupRecipe.recorded(wanted.model_dump(mode="json")))
    assert first == again


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_admitted_by_its_codecs_own_checks(tmp_path: Path, name: str) -> None:
    def broken(update: DeltaFile) -> dict[str, Any]:
        payload = {key: field.clone() for key, field in update.payload("down").items()}
        number = next(key for key, field in payload.items() if field.is_floating_point())
        payload[number].reshape(-1)[0] = float("nan")
        return payload

    with written(tmp_path, [(name, setting_of(name))]) as (update,):
        record = update.record("down")
        entry = DeltaEntry("down", record.shape, name, record.params, functools.partial(broken, update))
        write_delta(tmp_path / "broken.gymdelta", [entry], SPEC)
    with pytest.raises(GymError, match="tensor 'down'") as caught:
        DeltaFile.open(tmp_path / "broken.gymdelta", SPEC)
    assert caught.value.code is ErrorCode.DELTA_INVALID


def test_who_lacks_the_package_refuses_its_files_by_the_codecs_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with written(tmp_path, [("steps", {})]) as (update,):
        path = update.path
    install(monkeypatch, {})
    get_codec.cache_clear()
    with pytest.raises(GymError, match="unknown codec 'steps'"):
        DeltaFile.open(path, SPEC)
