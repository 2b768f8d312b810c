"""The first value beyond a limit, of rules, codecs and proofs that are otherwise tested far from it."""

from __future__ import annotations

import hashlib

import pytest
import torch
from gym_quant import get_codec

from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import GymError
from gym_fed.soup.building import build_aggregator
from gym_fed.trust.ledger.entries import Chain, Entry
from gym_fed.trust.ledger.merkle import Tree, leaf_hash, node_hash, verify_inclusion


def test_a_proof_that_ends_before_the_root_of_its_size_is_none() -> None:
    """The path of a tree of two leaves, claimed for one of more."""
    hashes = [hashlib.sha256(bytes([n])).hexdigest() for n in range(2)]
    root, path = Tree(hashes).root(2), [leaf_hash(hashes[1]).hex()]
    assert verify_inclusion(hashes[0], 0, 2, path, root)
    for size in (3, 4, 5, 8):
        assert not verify_inclusion(hashes[0], 0, size, path, root)
    assert node_hash(leaf_hash(hashes[0]), leaf_hash(hashes[1])).hex() == root


def test_an_entry_of_another_chain_does_not_follow_though_its_number_fits() -> None:
    ours, theirs = (Entry.following(None, "note", {"text": text}) for text in ("ours", "theirs"))
    chain = Chain()
    chain.add(ours)
    with pytest.raises(GymError, match="does not follow entry 1"):
        chain.add(Entry.following((1, theirs.hash), "note", {"text": "next"}))
    chain.add(Entry.following((1, ours.hash), "note", {"text": "next"}))


@pytest.mark.parametrize("trim", [1, 2])
def test_a_trim_that_leaves_nothing_is_refused_and_one_that_leaves_one_is_not(trim: int) -> None:
    recipe = SoupRecipe(
        aggregator="trimmed_mean",
        aggregator_options={"trim": trim},
        num_malicious_nodes=0,
        pre_aggregators=[],
    )
    rule = build_aggregator(recipe)
    with pytest.raises(GymError, match="leaves none of"):
        rule.check(torch.ones(2 * trim))
    rule.check(torch.ones(2 * trim + 1))


@pytest.mark.parametrize("cols", [8, 9, 12, 15])
def test_the_norm_counts_the_columns_of_a_last_group_that_is_shorter(cols: int) -> None:
    codec = get_codec("bitdelta")
    tensor = torch.randn(3, cols, generator=torch.Generator().manual_seed(0))
    encoded = codec.encode(tensor, group_size=8)
    decoded = codec.decode(encoded.payload, tensor.shape, encoded.params)
    norm = codec.norm(encoded.payload, tuple(tensor.shape), encoded.params)
    assert norm == pytest.approx(float(decoded.norm()), rel=1e-6)
