"""Messages between contributors and hub in a secure round, as strictly validated JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError

from gym_fed.config.hub.task import TaskSpec
from gym_fed.config.schema.base import StrictModel, first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_digest
from gym_fed.core.text import counted
from gym_fed.privacy.secure_aggregation.keys import require_shareable
from gym_fed.trust.identity.keys import CONTRIBUTOR_PATTERN, SigningKey, contributor_id, verify_signature

ADVERTISE, SHARE, TRAIN, CONFIRM, UNMASK = "advertise", "share", "train", "confirm", "unmask"
STAGES = (ADVERTISE, SHARE, TRAIN, CONFIRM, UNMASK)
RECORD = "secure"
"""Name of the config record that contains these messages, under the single key ``json``."""
ACTIONS = {ADVERTISE: "advertise_keys", SHARE: "share_keys", CONFIRM: "confirm", UNMASK: "unmask"}
"""Flower's query action for each stage, except for training, which uses Flower's own ``train``."""

MAX_CONTRIBUTORS = 400
Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
Key = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Id = Annotated[str, Field(pattern=f"^{CONTRIBUTOR_PATTERN}$")]
ShareCommitments = tuple[Key, Key]
"""Commitments to the shares of a seed and of a mask key for one holder."""
T = TypeVar("T", bound=StrictModel)
Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})+$", max_length=1024)]


class Advert(StrictModel):
    """The public keys of one contributor for one round."""

    format: Literal["gym-secagg-1", "gym-secagg-2"] = "gym-secagg-2"
    server: str = Field(max_length=64)
    server_round: int = Field(ge=1)
    threshold: int = Field(ge=2)
    public_key: Key
    """The signing key. Its hash is the contributor's id in the round, so no separate list of ids is needed."""
    mask_key: Key
    cipher_key: Key
    seed_commitment: Key
    task: Key | None = None
    """``task_digest`` of the task that the owner received; None in ``gym-secagg-1``, of which rounds can only be
    replayed."""

    @property
    def contributor(self) -> str:
        return contributor_id(bytes.fromhex(self.public_key))


class SignedAdvert(StrictModel):
    """An advert, signed with its owner's Ed25519 key."""

    advert: Advert
    signature: Signature

    @classmethod
    def sign(cls, advert: Advert, key: SigningKey) -> SignedAdvert:
        return cls(advert=advert, signature=key.sign(advert.model_dump(mode="json")).hex())

    def verify(self, server: str, server_round: int, threshold: int) -> None:
        """Raise ``SIGNATURE_INVALID`` unless the owner signed it for this hub, round and threshold.

        The keys must also be able to share a secret, since a single bad key would end the round for all who receive it.
        """
        advert = self.advert
        claimed = (advert.server, advert.server_round, advert.threshold)
        if claimed != (server, server_round, threshold):
            raise GymError(
                ErrorCode.SIGNATURE_INVALID,
                f"keys of {advert.contributor} are for hub, round and threshold {claimed}, "
                f"not {(server, server_round, threshold)}",
                "the hub forwards keys of a different round; report it to its coordinator",
            )
        verify_signature(
            bytes.fromhex(advert.public_key), advert.model_dump(mode="json"), bytes.fromhex(self.signature)
        )
        for key in (advert.mask_key, advert.cipher_key):
            require_shareable(bytes.fromhex(key))


class Participants(StrictModel):
    """Hub to contributor, stage share: the adverts of the contributors that started."""

    adverts: list[SignedAdvert] = Field(max_length=MAX_CONTRIBUTORS)

    @property
    def digest(self) -> str:
        """The digest that identifies one run of a round, since keys are generated for each run."""
        return canonical_digest(self.model_dump(mode="json"))

    def of(self) -> dict[str, Advert]:
        """Return the adverts by contributor id."""
        return {signed.advert.contributor: signed.advert for signed in self.adverts}


class SealedShares(StrictModel):
    """Contributor to hub, stage share: a sealed pair of shares for each other contributor, by id."""

    sealed: dict[Id, Hex] = Field(max_length=MAX_CONTRIBUTORS)
    commitments: dict[Id, ShareCommitments] = Field(max_length=MAX_CONTRIBUTORS)
    """The commitments to the shares of all participants, including the sender; see ``share_commitment``."""
    signature: Signature

    @classmethod
    def sign(
        cls,
        sealed: dict[str, str],
        commitments: dict[str, ShareCommitments],
        participants: Participants,
        key: SigningKey,
    ) -> SealedShares:
        signature = key.sign(_dealt(commitments, participants)).hex()
        return cls(sealed=sealed, commitments=commitments, signature=signature)

    def verify(self, dealer: Advert, participants: Participants) -> None:
        """Check that every other contributor gets a sealed pair, and check the dealer's commitments to the pairs.

        Raises:
            GymError: ``UPDATE_REFUSED`` or ``SIGNATURE_INVALID``.
        """
        everybody = {*participants.of()}
        if {*self.sealed} != everybody - {dealer.contributor} or {*self.commitments} != everybody:
            raise GymError(
                ErrorCode.UPDATE_REFUSED,
                f"{dealer.contributor} does not deal shares to exactly the {counted(len(everybody), 'participant')}",
            )
        signed = _dealt(self.commitments, participants)
        verify_signature(bytes.fromhex(dealer.public_key), signed, bytes.fromhex(self.signature))


class Masking(StrictModel):
    """Hub to contributor, stage train: the receiver's sealed shares, by sender. Senders and receiver mask votes."""

    sealed: dict[Id, Hex] = Field(max_length=MAX_CONTRIBUTORS)
    commitments: dict[Id, ShareCommitments] = Field(max_length=MAX_CONTRIBUTORS)
    """Each sender's commitments to its pair of shares in ``sealed``, as it sent them to the hub."""


class Survivors(StrictModel):
    """Hub to contributor, stage confirm: the ids of the contributors whose masked votes the hub has received."""

    survivors: list[Id] = Field(max_length=MAX_CONTRIBUTORS)


class Confirmation(StrictModel):
    """Contributor to hub, stage confirm: a signature over the list of survivors and the digest of the participants."""

    signature: Signature

    @classmethod
    def sign(cls, survivors: Sequence[str], participants: Participants, key: SigningKey) -> Confirmation:
        return cls(signature=key.sign(_confirmed(survivors, participants)).hex())

    def verify(self, advert: Advert, survivors: Sequence[str], participants: Participants) -> None:
        """Raise ``SIGNATURE_INVALID`` unless the advert's owner signed this list for this run of the round."""
        signed = _confirmed(survivors, participants)
        verify_signature(bytes.fromhex(advert.public_key), signed, bytes.fromhex(self.signature))


class Unmasking(StrictModel):
    """Hub to contributor, stage unmask: the list of survivors again, with the signatures over it."""

    survivors: list[Id] = Field(max_length=MAX_CONTRIBUTORS)
    confirmations: dict[Id, Confirmation] = Field(max_length=MAX_CONTRIBUTORS)


class Revealed(StrictModel):
    """Contributor to hub, stage unmask: shares of the survivors' seeds and of the other participants' mask keys."""

    seeds: dict[Id, Hex] = Field(max_length=MAX_CONTRIBUTORS)
    mask_keys: dict[Id, Hex] = Field(max_length=MAX_CONTRIBUTORS)


def _confirmed(survivors: Sequence[str], participants: Participants) -> dict[str, object]:
    return {"gym-secagg-1 survivors": list(survivors), "roster": participants.digest}


def _dealt(commitments: dict[str, ShareCommitments], participants: Participants) -> dict[str, object]:
    dealt = {holder: list(pair) for holder, pair in commitments.items()}
    return {"gym-secagg-1 shares": dealt, "roster": participants.digest}


def check_confirmed(request: Unmasking, participants: Participants, threshold: int) -> None:
    """Check that ``threshold`` contributors have signed the same survivors for these participants.

    A contributor signs one list of survivors per run. While the threshold is more than half of the participants, no two
    lists can collect enough signatures. Without this check, a hub could send different survivors to each contributor.
    From shares that were meant for different sums, it could learn a sum of fewer votes than the threshold. The
    participants' keys are generated for one run, so a signature from another run of the round does not count.

    Raises:
        GymError: ``SIGNATURE_INVALID`` or ``UPDATE_REFUSED``.
    """
    adverts = participants.of()
    for signer, confirmation in request.confirmations.items():
        if signer not in adverts:
            raise GymError(ErrorCode.UPDATE_REFUSED, f"{signer} confirms survivors, but did not begin")
        confirmation.verify(adverts[signer], request.survivors, participants)
    if len(request.confirmations) < threshold:
        raise GymError(
            ErrorCode.UPDATE_REFUSED,
            f"{counted(len(request.confirmations), 'contributor')} confirmed the survivors, "
            f"fewer than the threshold {threshold}",
        )


def parse(kind: type[T], text: object) -> T:
    """Parse a message with strict validation.

    Raises:
        GymError: ``UPDATE_REFUSED`` with the first invalid field.
    """
    try:
        return kind.model_validate_json(text if isinstance(text, str) else "null")
    except ValidationError as error:
        why = first_problem(error, "message")
        raise GymError(ErrorCode.UPDATE_REFUSED, f"secure aggregation: {kind.__name__}: {why}") from error


def check_majority(threshold: int, began: int) -> None:
    """Raise ``UPDATE_REFUSED`` if the hub could send different lists of survivors to two groups of contributors.

    To learn the votes of one contributor, a hub must list it as a survivor to ``threshold`` contributors, and as
    dropped out to ``threshold`` others. No two such groups exist while the threshold is more than half of the
    contributors.
    """
    if began < threshold:
        raise GymError(
            ErrorCode.UPDATE_REFUSED,
            f"{counted(began, 'contributor')} began a round whose threshold is {threshold}",
        )
    if 2 * threshold <= began:
        raise GymError(
            ErrorCode.UPDATE_REFUSED,
            f"threshold {threshold} is not more than half of the {counted(began, 'participant')}: a hub could "
            "name a contributor as a survivor to one half of them and as dropped out to the other, and learn its votes",
            "the coordinator must raise secure_aggregation.threshold",
        )


def task_digest(spec: TaskSpec) -> str:
    """Compute the digest of a secure round's task, without its deadline.

    It covers the hub, the round, base model, version and soups, the recipe with its seed, the codec, the size limit and
    the threshold. ``deadline_seconds`` is omitted, since no vote depends on it and a hub may change it.

    Returns:
        The hex SHA-256 of the canonical JSON.
    """
    return canonical_digest({"gym-secagg-2 task": spec.model_dump(mode="json", exclude={"deadline_seconds"})})


def check_tasks(participants: Sequence[SignedAdvert], task: str) -> None:
    """Check that all participants signed the same task. The caller must have verified the signatures.

    If a hub gave one participant a different model, learning rate or data seed, it could learn that participant's
    contribution from the sum.

    Raises:
        GymError: ``TASKS_DIFFER`` with the participants that have a different task.
    """
    others = sorted(signed.advert.contributor for signed in participants if signed.advert.task != task)
    if others:
        raise GymError(
            ErrorCode.TASKS_DIFFER,
            f"the hub gave {', '.join(others[:8])}{' and others' if len(others) > 8 else ''} a different task from "
            f"{task[:16]}, the one that it gave this contributor, in the same secure round; nothing was revealed",
            "no participant is at fault: the hub is cheating or defective; ask its coordinator before you continue",
        )


def check_participants(
    participants: Sequence[SignedAdvert], server: str, server_round: int, threshold: int, task: str
) -> None:
    """Check that participants are unique and sorted by id, that their keys are signed, and that their tasks agree.

    Raises:
        GymError: ``SIGNATURE_INVALID``, ``UPDATE_REFUSED`` or ``TASKS_DIFFER``.
    """
    ids = [signed.advert.contributor for signed in participants]
    if ids != sorted(set(ids)):
        raise GymError(ErrorCode.UPDATE_REFUSED, "the hub's list has a contributor twice or out of order")
    check_majority(threshold, len(ids))
    for signed in participants:
        signed.verify(server, server_round, threshold)
    check_tasks(participants, task)
