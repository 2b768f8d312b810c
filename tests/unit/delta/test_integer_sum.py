"""Soups that add up: any split of rounds gives the same sum, digest and tensors, on whatever grids they were made."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gym_fed.config.delta import CodecPolicy
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_source
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.integer_sum import IntegerSum, read_sum
from gym_fed.delta.writer import DeltaEntry, write_delta

SPEC = BaseSpec("tiny", "sha256:" + "ab" * 32, {"a.weight": (6, 10), "b.norm": (5,)})
LATTICE = CodecPolicy(codec="lattice")
NO_FEEDBACK = CodecPolicy(codec="lattice", error_feedback=False)


def deltas(seed: int, size: float) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) * size for name, shape in SPEC.shapes.items()}


def rounds_of(folder: Path, sizes: list[float]) -> list[Path]:
    """A soup for each round, coded with error feedback."""
    paths, residual = [], ErrorFeedback.load(folder / "residual", SPEC.digest)
    residual.reset()
    for number, size in enumerate(sizes):
        paths.append(folder / f"{number}.gymdelta")
        changes = deltas(number, size)
        encode_source(changes.__getitem__, LATTICE, paths[-1], SPEC, residual)
        residual.save()
    return paths


def sum_of(paths: list[Path]) -> IntegerSum:
    with ExitStack() as stack:
        return IntegerSum.of(*(stack.enter_context(DeltaFile.open(path, SPEC)) for path in paths))


def applied(total: IntegerSum) -> dict[str, torch.Tensor]:
    model = deltas(99, 1.0)
    total.apply(model)
    return model


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([1e-2, 3e-3, 1e-5, 0.0]), min_size=2, max_size=6), st.data())
def test_any_split_of_the_rounds_gives_the_same_sum(
    tmp_path: Path, sizes: list[float], data: st.DataObject
) -> None:
    paths = rounds_of(tmp_path, sizes)
    whole = sum_of(paths)
    cut = data.draw(st.integers(1, len(paths) - 1))
    parts = [tmp_path / "first", tmp_path / "second"]
    for part, some in zip(parts, (paths[:cut], paths[cut:]), strict=True):
        sum_of(some).write(part, SPEC)
    joined = sum_of(parts)
    assert joined.digest() == whole.digest()
    one, other = applied(joined), applied(whole)
    assert all(torch.equal(one[name], other[name]) for name in one)
    whole.write(tmp_path / "whole", SPEC)
    rest = sum_of([tmp_path / "whole"])
    with DeltaFile.open(parts[0], SPEC) as first:
        rest.add(first, -1)
    assert rest.digest() == sum_of([parts[1]]).digest()


def test_a_version_is_rounded_once(tmp_path: Path) -> None:
    paths = rounds_of(tmp_path, [1e-2] * 5)
    exact = {name: tensor.double() for name, tensor in deltas(99, 1.0).items()}
    for path in paths:
        with DeltaFile.open(path, SPEC) as soup:
            for name in soup.names:
                exact[name] += soup.decode(name).double()
    found = applied(sum_of(paths))
    assert all(torch.equal(found[name], exact[name].float()) for name in found)


def test_what_the_sum_of_many_rounds_lacks_of_their_true_sum_is_the_residual(tmp_path: Path) -> None:
    sizes = [1e-2] * 8
    total = sum_of(rounds_of(tmp_path, sizes))
    model = {name: torch.zeros(shape) for name, shape in SPEC.shapes.items()}
    total.apply(model)
    residual = ErrorFeedback.load(tmp_path / "residual", SPEC.digest)
    for name in model:
        true = sum(deltas(number, size)[name] for number, size in enumerate(sizes))
        kept = residual.residual(name)
        assert kept is not None
        torch.testing.assert_close(model[name] + kept, true, rtol=0, atol=1e-6)


def test_exponents_are_kept_in_the_residual_s_file_until_it_is_reset(tmp_path: Path) -> None:
    rounds_of(tmp_path, [1e-2, 1e-2])
    residual = ErrorFeedback.load(tmp_path / "residual", SPEC.digest)
    assert set(residual.exponents) == set(SPEC.shapes)
    before = dict(residual.exponents)
    encode_source(deltas(1, 2e-2).__getitem__, LATTICE, tmp_path / "large", SPEC, residual)
    residual.save()
    assert residual.exponents == before
    residual.reset()
    assert residual.exponents == {}


@pytest.mark.parametrize("small", [1e-6, 1e-16])
def test_rounds_after_a_small_one_have_the_size_of_those_before_and_add_up(
    tmp_path: Path, small: float
) -> None:
    paths = rounds_of(tmp_path, [small, 1e-3, 1e-3, small, 1e-3, 1e-3])
    sizes = [path.stat().st_size for path in paths]
    assert max(sizes[-1], sizes[2]) <= 1.05 * sizes[1]
    assert sum_of(paths).shapes == SPEC.shapes


def test_deltas_that_decay_add_up_for_any_number_of_rounds(tmp_path: Path) -> None:
    assert sum_of(rounds_of(tmp_path, [1e-2 * 0.5**i for i in range(40)])).shapes == SPEC.shapes


def test_a_delta_beyond_the_largest_step_is_refused_by_name(tmp_path: Path) -> None:
    changes = deltas(0, 3e37)
    with pytest.raises(GymError, match=r"tensor 'a\.weight': ") as caught:
        encode_source(changes.__getitem__, NO_FEEDBACK, tmp_path / "huge", SPEC)
    assert caught.value.code is ErrorCode.DELTA_INVALID


def test_a_delta_of_another_codec_does_not_add_up(tmp_path: Path) -> None:
    write_delta(tmp_path / "dense", [DeltaEntry.of("b.norm", torch.ones(5), "dense")], SPEC)
    with pytest.raises(GymError, match=r"tensor 'b\.norm' is not integers") as caught:
        sum_of([tmp_path / "dense"])
    assert caught.value.code is ErrorCode.DELTA_INVALID


def test_large_steps_are_written_and_sums_beyond_31_bits_and_grids_too_far_apart_refused(
    tmp_path: Path,
) -> None:
    from gym_quant.codecs.lattice import Lattice

    def written(name: str, code: int, exponent: int) -> Path:
        encoded = Lattice().encode_integers(torch.full((5,), code), exponent)
        entry = DeltaEntry("b.norm", (5,), "lattice", encoded.params, lambda: encoded.payload)
        write_delta(tmp_path / name, [entry], SPEC)
        return tmp_path / name

    even = sum_of([written("even", 64, 98)])
    even.write(tmp_path / "sum", SPEC)
    assert sum_of([tmp_path / "sum"]).digest() == even.digest() == sum_of([written("one", 16, 100)]).digest()
    largest, fine = written("largest", 2**31 - 1, 0), written("fine", 1, -40)
    for pair in ([largest, largest], [largest, fine]):
        with pytest.raises(GymError, match=r"'b\.norm' has a sum of more than 31 bits"):
            sum_of(pair)


def test_a_sum_of_another_version_or_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    paths = rounds_of(tmp_path, [1e-2, 1e-2])
    sum_of(paths).write(tmp_path / "sum", SPEC)
    model = deltas(99, 1.0)
    with pytest.raises(GymError, match="has digest"):
        read_sum([(tmp_path / "sum", SPEC)], sum_of(paths[:1]).digest())
    other, digest = BaseSpec("tiny", "sha256:" + "cd" * 32, SPEC.shapes), sum_of(paths).digest()
    with pytest.raises(GymError, match="was made for base"):
        read_sum([(tmp_path / "sum", other)], digest)
    with pytest.raises(GymError, match=r"'b\.norm'"):
        sum_of(paths).apply({"a.weight": model["a.weight"]})
    assert all(torch.equal(model[name], tensor) for name, tensor in deltas(99, 1.0).items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"sizes":[', '"sizes":[1,'), "'sizes' has"),
        (lambda text: text.replace('"sizes":[', '"sizes":[-'), "is not a positive integer"),
        (lambda text: text.replace('"bytes":0', '"bytes":1'), "canonical"),
        (lambda text: text.replace('"sizes":', '"sized":'), "unknown key 'sized'"),
    ],
)
def test_manifests_whose_sizes_do_not_fit_are_refused(tmp_path: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    from gym_fed.delta.manifest import Manifest

    (path,) = rounds_of(tmp_path, [1e-2])
    with DeltaFile.open(path, SPEC) as soup:
        text = soup.manifest.to_json()
    with pytest.raises(GymError, match=message):
        Manifest.parse(change(text), 10).require_canonical(change(text))
