"""Packed weights in huge pages are ordinary tensors, and small ones share a page."""

from __future__ import annotations

import mmap

import pytest
import torch
from gym_quant import huge_pages
from gym_quant.huge_pages import in_huge_pages
from gym_quant.linear import get_linear

linux = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages are Linux's")


@linux
def test_tensors_lie_behind_each_other_from_the_start_of_a_page() -> None:
    with in_huge_pages():
        first = huge_pages.empty((3, 5), torch.bfloat16)
        second = huge_pages.empty((100,), torch.uint8)
        large = huge_pages.empty((40 << 20,), torch.uint8)
    assert first.shape == (3, 5)
    assert first.dtype is torch.bfloat16
    assert first.data_ptr() % huge_pages.PAGE == 0
    assert second.data_ptr() == first.data_ptr() + 64
    assert large.data_ptr() % huge_pages.PAGE == 0
    large[-1] = 7
    outside = huge_pages.empty((100,), torch.uint8)
    outside_bytes = outside.untyped_storage().nbytes()  # pytest would print a large storage
    assert outside_bytes == 100


@linux
def test_memory_is_marked_for_huge_pages_and_begins_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    advice: list[int] = []

    class Watched(mmap.mmap):
        def madvise(self, *options: int) -> None:
            advice.extend(options)
            super().madvise(*options)

    real = torch.frombuffer
    monkeypatch.setattr(huge_pages.mmap, "mmap", Watched)
    monkeypatch.setattr(  # memory that begins one ordinary page later
        huge_pages.torch, "frombuffer", lambda memory, dtype: real(memory, dtype=dtype)[mmap.PAGESIZE :]
    )
    with in_huge_pages():
        tensor = huge_pages.empty((40 << 20,), torch.uint8)
    assert advice == [mmap.MADV_HUGEPAGE]
    assert tensor.data_ptr() % huge_pages.PAGE == 0
    assert len(tensor) == 40 << 20


@linux
def test_a_kernel_without_huge_pages_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError("no huge pages")

    monkeypatch.setattr(huge_pages.mmap, "mmap", Without)
    with in_huge_pages():
        huge_pages.empty((8,), torch.float32).fill_(1)


def test_products_are_those_of_weights_in_ordinary_pages() -> None:
    made = torch.Generator().manual_seed(0)
    weight, x = torch.randn(70, 40, generator=made), torch.randn(3, 40, generator=made)
    found = []
    for format in ("bfloat16", "int8"):
        ordinary = get_linear(format).pack(weight)
        with in_huge_pages():
            huge = get_linear(format).pack(weight)
        for packed in (ordinary, huge):
            y = torch.empty(3, 70)
            packed.multiply(x, y)
            found.append(y)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
