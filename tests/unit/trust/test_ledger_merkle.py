"""The tree over the ledger's entries: the roots and proofs of RFC 6962, and no proof of anything else."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_fed.core.errors import GymError
from gym_fed.trust.ledger.merkle import (
    EMPTY_ROOT,
    Frontier,
    Tree,
    leaf_hash,
    node_hash,
    verify_inclusion,
)

# Leaves and roots of Google's Certificate Transparency test data (merkle_tree_test.cc).
LEAVES = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
ROOTS = {
    0: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    2: "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    3: "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
}
HASHES = [hashlib.sha256(bytes([number])).hexdigest() for number in range(70)]
SIZES = st.integers(1, len(HASHES))


def by_definition(hashes: list[str]) -> bytes:
    """RFC 6962, 2.1, as it is written there."""
    if len(hashes) == 1:
        return leaf_hash(hashes[0])
    k = 1
    while 2 * k < len(hashes):
        k *= 2
    return node_hash(by_definition(hashes[:k]), by_definition(hashes[k:]))


@pytest.mark.parametrize("size", ROOTS)
def test_roots_are_those_of_certificate_transparency(size: int) -> None:
    tree, frontier = Tree(LEAVES[:size]), Frontier()
    for leaf in LEAVES[:size]:
        frontier.append(leaf)
    assert tree.root(size) == frontier.root() == ROOTS[size]
    assert ROOTS[0] == EMPTY_ROOT


def test_a_tree_and_a_frontier_that_grow_have_the_root_of_every_size() -> None:
    tree, frontier = Tree(), Frontier()
    for number, entry in enumerate(HASHES):
        tree.append(entry)
        frontier.append(entry)
        frontier = Frontier.from_text(number + 1, frontier.to_text())
        assert tree.root(number + 1) == frontier.root() == by_definition(HASHES[: number + 1]).hex()


@given(SIZES, st.data())
def test_a_leaf_is_proved_where_it_is_and_nowhere_else(size: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    tree = Tree(HASHES)
    path, root = tree.inclusion(index, size), tree.root(size)
    assert len(path) <= size.bit_length()
    assert verify_inclusion(HASHES[index], index, size, path, root)
    assert not verify_inclusion("0" * 64, index, size, path, root)
    assert not verify_inclusion(HASHES[index], index, size, [*path, root], root)
    assert not verify_inclusion(HASHES[index], size, size, path, root)
    if size > 1:
        assert not verify_inclusion(HASHES[index], index ^ 1, size, path, root)
        assert not verify_inclusion(HASHES[index], index, size, path[:-1], root)
        assert not verify_inclusion(HASHES[index], index, size, path, tree.root(size - 1))


@pytest.mark.parametrize("text", ["", "0" * 64, f"{'0' * 64} {'g' * 64}", f"{'0' * 64}  {'0' * 64}"])
def test_a_frontier_of_another_size_is_refused(text: str) -> None:
    with pytest.raises(GymError, match="do not match a tree of that size"):
        Frontier.from_text(3, text)
