"""The parts of secure aggregation: masks cancel, shares join, and nothing that was tampered with is taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gym_fed.config.delta import CodecPolicy
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_delta
from gym_fed.delta.file import DeltaFile
from gym_fed.privacy.secure_aggregation.keys import (
    Mask,
    MaskSum,
    commitment,
    new_secret,
    pair_mask,
    public_of,
    seal,
    shared_key,
    unseal,
)
from gym_fed.privacy.secure_aggregation.messages import Advert, SignedAdvert, check_participants
from gym_fed.privacy.secure_aggregation.shares import join_secret, split_secret
from gym_fed.privacy.secure_aggregation.votes import (
    bits_for,
    check_masked,
    fold,
    require_votes,
    signs,
    sum_masked,
    write_masked,
)
from gym_fed.trust.identity.keys import SigningKey

SERVER, ROUND = "s" + "0" * 16, 3
IDS = ["c1", "c2", "c3", "c4"]


@pytest.fixture
def base() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.zeros(12, 13), "b": torch.zeros(5), "never.trained": torch.zeros(4, 4)}


@pytest.fixture
def spec(base: dict[str, torch.Tensor]) -> BaseSpec:
    return BaseSpec.of(base, "base")


def update(base: dict[str, torch.Tensor], spec: BaseSpec, seed: int, path: Path) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tuned = {
        name: tensor if name == "never.trained" else torch.randn(tensor.shape, generator=generator)
        for name, tensor in base.items()
    }
    tuned["b"][0] = 0.0  # a dense zero
    policy = CodecPolicy(error_feedback=False, small_max_elements=4)
    encode_delta(tuned, base, policy, path, spec)
    return path


def masks_of(private: dict[str, bytes], own: str) -> list[Mask]:
    return [
        pair_mask(own, other, private[own], public_of(private[other]), SERVER, ROUND)
        for other in private
        if other != own
    ]


def test_masks_of_all_pairs_cancel_and_leave_the_sum_of_the_votes(
    base: dict[str, torch.Tensor], spec: BaseSpec, tmp_path: Path
) -> None:
    private, seeds = {c: new_secret() for c in IDS}, {c: new_secret() for c in IDS}
    bits, files, plain = bits_for(len(IDS)), [], []
    for number, own in enumerate(IDS):
        delta = update(base, spec, number, tmp_path / f"{own}.gymdelta")
        with DeltaFile.open(delta, spec) as opened:
            plain.append({name: signs(opened, name, spec).astype(int) for name in spec.shapes})
            masks = [*masks_of(private, own), Mask(seeds[own])]
            write_masked(opened, spec, masks, bits, tmp_path / own)
        files.append(tmp_path / own)
    found = dict(sum_masked(files, spec, [Mask(seed).inverse for seed in seeds.values()], bits))
    for name in spec.shapes:
        assert (found[name] == sum(votes[name] for votes in plain)).all()
    assert set(plain[0]["a.weight"].tolist()) == {-1, 1}
    assert plain[0]["b"][0] == 0
    assert not plain[0]["never.trained"].any()


def test_the_masks_of_who_went_are_taken_off_with_its_key(
    base: dict[str, torch.Tensor], spec: BaseSpec, tmp_path: Path
) -> None:
    private = {c: new_secret() for c in IDS}
    bits, gone, stayed = bits_for(len(IDS)), IDS[1], [IDS[0], *IDS[2:]]
    want = 0
    for number, own in enumerate(stayed):
        delta = update(base, spec, number, tmp_path / f"{own}.gymdelta")
        with DeltaFile.open(delta, spec) as opened:
            want = want + signs(opened, "a.weight", spec).astype(int)
            write_masked(opened, spec, masks_of(private, own), bits, tmp_path / own)
    files = [tmp_path / own for own in stayed]
    masked = dict(sum_masked(files, spec, [], bits))
    with pytest.raises(GymError, match="not votes"):
        require_votes("a.weight", masked["a.weight"], len(stayed))
    # What the survivors hold against the one who went, taken off with its private key and their public ones.
    off = [
        pair_mask(own, gone, private[gone], public_of(private[own]), SERVER, ROUND).inverse for own in stayed
    ]
    found = dict(sum_masked(files, spec, off, bits))
    assert (found["a.weight"] == want).all()


def test_a_masked_coordinate_looks_uniform_and_no_stream_repeats() -> None:
    one, two = MaskSum([Mask(new_secret())], 4), MaskSum([Mask(new_secret())], 4)
    first, second = one.take(1 << 14), one.take(1 << 14)
    counts = np.bincount(first & 15, minlength=16)
    assert counts.min() > 850
    assert counts.max() < 1200
    assert (first != second).mean() > 0.98
    assert (first != two.take(1 << 14)).mean() > 0.98


def test_pairs_agree_on_a_key_of_their_own_for_every_round_and_purpose() -> None:
    one, two = new_secret(), new_secret()
    key = shared_key(one, public_of(two), "mask", SERVER, ROUND)
    assert key == shared_key(two, public_of(one), "mask", SERVER, ROUND)
    assert key != shared_key(one, public_of(two), "mask", SERVER, ROUND + 1)
    assert key != shared_key(one, public_of(two), "share", SERVER, ROUND)
    with pytest.raises(GymError, match="not a public key"):
        shared_key(one, bytes(32), "mask", SERVER, ROUND)


def test_a_threshold_of_shares_gives_the_secret_and_too_few_or_false_ones_name_their_dealer() -> None:
    secret = new_secret()
    shares = split_secret(secret, 11, 20)

    def right(found: bytes) -> bool:
        return commitment(found) == commitment(secret)

    assert join_secret(shares[1:12], 11, right, "c1", "the seed") == secret
    forged = shares[0][:4] + bytes(byte ^ 1 for byte in shares[0][4:])
    for dealt, why in (
        (shares[:10], "10 shares, but 11 are needed"),
        ([forged, *shares[1:]], "that c1 dealt"),
        ([shares[1], *shares[1:]], "that c1 dealt"),
        ([b""] * 11, "that c1 dealt"),
    ):
        with pytest.raises(GymError, match=why) as refused:
            join_secret(dealt, 11, right, "c1", "the seed")
        assert refused.value.code is ErrorCode.ROUND_ABORTED
        assert "the seed of c1" in refused.value.message


def test_a_share_that_was_tampered_with_or_misdirected_is_refused() -> None:
    key = new_secret()
    sealed = seal(key, b"share", "c1", "c2")
    assert unseal(key, sealed, "c1", "c2") == b"share"
    for bad, sender, receiver in (
        (sealed[:-1] + bytes([sealed[-1] ^ 1]), "c1", "c2"),
        (sealed, "c3", "c2"),
        (sealed, "c1", "c3"),
        (b"", "c1", "c2"),
    ):
        with pytest.raises(GymError) as refused:
            unseal(key, bad, sender, receiver)
        assert refused.value.code is ErrorCode.UPDATE_REFUSED


TASK = "7a" * 32


def advert(key: SigningKey, **changes: object) -> SignedAdvert:
    fields = {
        "server": SERVER,
        "server_round": ROUND,
        "threshold": 2,
        "public_key": key.public_key.hex(),
        "mask_key": public_of(new_secret()).hex(),
        "cipher_key": public_of(new_secret()).hex(),
        "seed_commitment": commitment(new_secret()),
        "task": TASK,
    }
    return SignedAdvert.sign(Advert.model_validate({**fields, **changes}), key)


def participants(*adverts: SignedAdvert) -> list[SignedAdvert]:
    return sorted(adverts, key=lambda signed: signed.advert.contributor)


def test_keys_that_their_owner_did_not_sign_for_this_round_are_refused() -> None:
    key, other = SigningKey.generate(), SigningKey.generate()
    honest, second = advert(key), advert(other)
    check_participants(participants(honest, second), SERVER, ROUND, 2, TASK)
    swapped = honest.model_copy(
        update={"advert": honest.advert.model_copy(update={"mask_key": public_of(new_secret()).hex()})}
    )
    stolen = SignedAdvert.sign(honest.advert, other)
    for forged in (swapped, stolen, advert(key, server_round=ROUND - 1), advert(key, threshold=3)):
        with pytest.raises(GymError) as refused:
            check_participants(participants(forged, second), SERVER, ROUND, 2, TASK)
        assert refused.value.code is ErrorCode.SIGNATURE_INVALID


def test_a_list_that_a_hub_could_split_in_two_is_refused() -> None:
    three = participants(*(advert(SigningKey.generate()) for _ in range(3)))
    check_participants(three, SERVER, ROUND, 2, TASK)
    four = participants(*three, advert(SigningKey.generate()))
    with pytest.raises(GymError, match="not more than half of the 4"):
        check_participants(four, SERVER, ROUND, 2, TASK)
    with pytest.raises(GymError, match="twice or out of order"):
        check_participants([three[0], three[0], three[1]], SERVER, ROUND, 2, TASK)
    with pytest.raises(GymError, match="1 contributor began"):
        check_participants(three[:1], SERVER, ROUND, 2, TASK)


def test_a_file_that_is_no_masked_votes_is_refused(spec: BaseSpec, tmp_path: Path) -> None:
    path = tmp_path / "object"
    for data in (b"", b"gymvotes" + bytes(16), bytes(200)):
        path.write_bytes(data)
        with pytest.raises(GymError, match="not a file of masked votes"):
            check_masked(path, spec, 4)


@pytest.mark.parametrize(("voters", "bits"), [(2, 3), (3, 4), (4, 4), (7, 5), (8, 5), (500, 11)])
def test_as_many_bits_as_the_folded_sum_needs_and_no_more(voters: int, bits: int) -> None:
    assert bits_for(voters) == bits
    assert (1 << bits) >= 4 * voters > 1 << bits - 1


@pytest.mark.parametrize("voters", [2, 3, 4, 7])
def test_one_vote_moves_a_folded_sum_by_one_at_most_whatever_a_malicious_client_adds(voters: int) -> None:
    bits = bits_for(voters)
    modulus = 1 << bits
    everything = np.arange(modulus)  # any sum of the others and a malicious client
    centred = np.where(everything >= modulus // 2, everything - modulus, everything).astype(np.int16)
    folded = fold(centred, bits)
    assert np.abs(folded - np.roll(folded, 1)).max() == 1
    honest = np.arange(-voters, voters + 1).astype(np.int16)
    assert (fold(honest, bits) == honest).all()
    require_votes("w", honest, voters)
    with pytest.raises(GymError, match="not votes"):
        require_votes("w", centred, voters)
