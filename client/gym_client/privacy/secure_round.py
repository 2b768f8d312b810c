"""The contributor's side of secure aggregation: the secrets of a round on disk, and one message per stage.

``secure/<server>-<round>/state.json`` (mode 0600) contains the round's private keys and commitments. It is written
before any derived data leaves this machine. A restarted agent therefore resumes with the same keys and masks only one
vector. For each other contributor it reveals a share either of the seed or of the mask key, never of both. The state is
not in the task's folder, whose name the hub chooses. It is deleted when the round is over. ``secure/begun.json``
records the last round that was begun with each hub; this round and earlier ones cannot begin again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import MessageType
from pydantic import ValidationError

from gym_client.agent.tasks import TaskFolder, Trained, drop_old
from gym_client.identity.home import Home
from gym_client.privacy.secure_state import Begun, SecureState, rounds_folder
from gym_fed.config.hub.task import TaskSpec
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.files import file_sha256, make_folder, write_atomically
from gym_fed.core.text import counted
from gym_fed.privacy.secure_aggregation.keys import (
    SECRET_BYTES,
    Mask,
    commitment,
    new_secret,
    pair_mask,
    public_of,
    seal,
    share_commitments,
    shared_key,
    unseal,
)
from gym_fed.privacy.secure_aggregation.messages import (
    ACTIONS,
    RECORD,
    STAGES,
    TRAIN,
    Advert,
    Confirmation,
    Masking,
    Participants,
    Revealed,
    SealedShares,
    SignedAdvert,
    Survivors,
    Unmasking,
    check_confirmed,
    check_participants,
    check_tasks,
    parse,
    task_digest,
)
from gym_fed.trust.identity.keys import SigningKey, contributor_id

if TYPE_CHECKING:
    from gym_fed.delta.base import BaseSpec
    from gym_fed.trust.wire.v1 import hub_pb2 as pb

_OPEN = ("", "admitted")


class SecureRound:
    """One round of secure aggregation on this machine.

    Args:
        home: The contributor's home.
        spec: Task of the round, whose ``secure_aggregation`` is set.
        key: Key that signs this contributor's public keys.
    """

    def __init__(self, home: Home, spec: TaskSpec, key: SigningKey) -> None:
        if spec.secure_aggregation is None:
            raise GymError(
                ErrorCode.POLICY_REFUSED,
                "the hub requests a secret for a round that does not use secure aggregation",
                "report it to the coordinator",
            )
        self._spec = spec
        self._threshold = spec.secure_aggregation.threshold
        self._task = task_digest(spec)
        self._key = key
        self._rounds = rounds_folder(home)
        self._folder = self._rounds / f"{spec.server}-{spec.server_round}"
        self._begun = Begun(home, spec.server)
        # The participant name is derived from the account's first key, even if the key is rotated during the round.
        begun = self._load().advert if self._path.exists() else None
        self._me = begun.advert.contributor if begun is not None else contributor_id(key.public_key)
        if begun is not None and begun.advert.task != self._task:
            raise GymError(
                ErrorCode.TASKS_DIFFER,
                f"round {spec.server_round}: the hub now sends a different task from the one that this machine signed "
                "when the round began; no share is revealed",
                "the hub is faulty or malicious; ask its coordinator before you continue",
            )

    def advertise(self) -> SignedAdvert:
        """Return the signed public keys of this round; repeated calls return the same keys.

        Raises:
            GymError: ``UPDATE_REFUSED`` for a round that was already begun and deleted, or for an earlier one.
        """
        if self._path.exists():
            self._begun.note(self._spec.server_round)
            return self._load().advert
        if self._spec.server_round <= self._begun.last:
            raise self._refused(
                f"this machine has already begun round {self._begun.last} of this hub and deleted its secrets; "
                "masking votes a second time would reveal where the two sums differ"
            )
        _drop_earlier(self._rounds, self._spec)
        mask_private, cipher_private, seed = new_secret(), new_secret(), new_secret()
        advert = Advert(
            server=self._spec.server,
            server_round=self._spec.server_round,
            threshold=self._threshold,
            public_key=self._key.public_key.hex(),
            mask_key=public_of(mask_private).hex(),
            cipher_key=public_of(cipher_private).hex(),
            seed_commitment=commitment(seed),
            task=self._task,
        )
        signed = SignedAdvert.sign(advert, self._key)
        state = SecureState(
            mask_private=mask_private.hex(),
            cipher_private=cipher_private.hex(),
            seed=seed.hex(),
            advert=signed,
        )
        self._keep(state)
        self._begun.note(self._spec.server_round)
        failpoint("client-secure-advertised")
        return signed

    def share(self, text: object) -> SealedShares:
        """Split this round's secrets into shares for all participants.

        Raises:
            GymError: ``SIGNATURE_INVALID`` for keys that their owners did not sign; ``UPDATE_REFUSED`` for a list of
                participants that differs from an earlier one, lacks this contributor, or is too long for the threshold;
                ``TASKS_DIFFER`` if participants signed a different task.
        """
        from gym_fed.privacy.secure_aggregation.shares import split_secret

        state, participants = self._load(), parse(Participants, text)
        if state.participants is not None and state.shares is not None:
            if state.participants != participants:
                raise self._refused("the hub's list of participants has changed since the round began")
            return state.shares
        spec = self._spec
        check_participants(participants.adverts, spec.server, spec.server_round, self._threshold, self._task)
        if state.advert not in participants.adverts:
            raise self._refused("the hub's list of participants lacks this contributor's own keys")
        count = len(participants.adverts)
        seeds = split_secret(bytes.fromhex(state.seed), self._threshold, count)
        mask_keys = split_secret(bytes.fromhex(state.mask_private), self._threshold, count)
        sealed, commitments, own = {}, {}, None
        for signed, seed, mask_key in zip(participants.adverts, seeds, mask_keys, strict=True):
            other = signed.advert.contributor
            commitments[other] = share_commitments(seed, mask_key, self._me, other)
            if other == self._me:
                own = (seed.hex(), mask_key.hex())
                continue
            plain = json.dumps([seed.hex(), mask_key.hex()]).encode()
            sealed[other] = seal(self._pair_key(state, signed.advert), plain, self._me, other).hex()
        shares = SealedShares.sign(sealed, commitments, participants, self._key)
        self._keep(state.model_copy(update={"participants": participants, "shares": shares, "own": own}))
        failpoint("client-secure-shared")
        return shares

    def receive(self, text: object) -> None:
        """Store the other participants' shares. Their senders and this contributor are now the ones who mask votes.

        Raises:
            GymError: ``UPDATE_REFUSED`` if a sender is not a participant or there are too few, if the list differs from
                an earlier one, or if a share does not match what its sender sealed or committed to.
        """
        state, masking = self._load(), parse(Masking, text)
        adverts = self._adverts(state)
        if state.received is not None:
            if set(state.received) != {*masking.sealed}:
                raise self._refused("the hub's list of masking participants has changed")
            return
        strangers = {*masking.sealed} - (adverts.keys() - {self._me})
        if strangers:
            raise self._refused(
                f"the hub forwards shares from non-participants: {', '.join(sorted(strangers))}"
            )
        if len(masking.sealed) + 1 < self._threshold:
            raise self._refused(
                f"{counted(len(masking.sealed) + 1, 'contributor', 'mask')}, but the threshold is {self._threshold}"
            )
        received = {}
        for sender, sealed in masking.sealed.items():
            plain = unseal(self._pair_key(state, adverts[sender]), bytes.fromhex(sealed), sender, self._me)
            received[sender] = _pair_of_shares(plain, sender)
            seed, mask_key = map(bytes.fromhex, received[sender])
            if masking.commitments.get(sender) != share_commitments(seed, mask_key, sender, self._me):
                raise self._refused(f"the shares sealed by {sender} do not match its commitments")
        self._keep(state.model_copy(update={"received": received}))

    def mask(self, folder: TaskFolder, trained: Trained, base: BaseSpec, uses: str) -> Trained:
        """Replace the task's encoded update with masked votes.

        Args:
            folder: The task's folder; ``update.gymdelta`` is replaced by the masked votes.
            trained: The encoded update.
            base: Spec of the version that the update is relative to.
            uses: Other inputs that determine the votes, for the error message.

        Returns:
            The masked object, without metrics, since they would describe this contributor alone.

        Raises:
            GymError: ``UPDATE_REFUSED`` if other votes were already masked in this round, since the hub could then
                compute their difference.
        """
        from gym_fed.delta.file import DeltaFile
        from gym_fed.privacy.secure_aggregation.votes import bits_for, signs, write_masked

        state = self._load()
        if state.received is None:
            raise self._refused("the hub requests masked votes before it has forwarded any shares")
        with DeltaFile.open(folder.delta_path, base) as delta:
            digest = hashlib.sha256()
            for name in sorted(base.shapes):
                digest.update(signs(delta, name, base).tobytes())
            if state.votes not in (None, digest.hexdigest()):
                raise self._refused(
                    f"this machine has already masked different votes in this round ({uses} changed since); a second "
                    "vector under the same masks would reveal where the two differ"
                )
            self._keep(state.model_copy(update={"votes": digest.hexdigest()}))
            bits = bits_for(len(state.received) + 1)
            masked = folder.path / "votes.masked"
            write_masked(delta, base, self._masks(state), bits, masked)
        failpoint("client-secure-masked")
        size = masked.stat().st_size
        sha256 = file_sha256(masked)
        masked.replace(folder.delta_path)
        return Trained(sha256, size, 1, {})

    def confirm(self, text: object) -> Confirmation:
        """Sign the list of survivors, at most one list per round.

        Raises:
            GymError: ``UPDATE_REFUSED`` for a second, different list; for a list that is too short; or for one without
                this contributor, whose votes the hub has.
        """
        state, reported = self._load(), parse(Survivors, text)
        if state.received is None or state.own is None or state.votes is None:
            raise self._refused(
                "the hub requests unmasking of a round in which this contributor masked nothing"
            )
        members, survivors = {*state.received, self._me}, sorted(set(reported.survivors))
        if state.survivors not in (None, survivors):
            raise self._refused(
                "the hub's list of survivors has changed: both answers together would unmask a contributor"
            )
        if self._me not in survivors or not {*survivors} <= members:
            raise self._refused(
                "the hub's list of survivors has contributors who did not mask, or lacks this contributor"
            )
        if len(survivors) < self._threshold:
            raise self._refused(
                f"{counted(len(survivors), 'survivor')}, fewer than the threshold {self._threshold}"
            )
        self._keep(state.model_copy(update={"survivors": survivors}))
        failpoint("client-secure-confirmed")
        return Confirmation.sign(survivors, self._participants(state), self._key)

    def unmask(self, text: object) -> Revealed:
        """Reveal a share for each participant: of its seed if the sum contains its votes, otherwise of its mask key.

        Raises:
            GymError: ``UPDATE_REFUSED`` for a list that this contributor did not sign, or that too few participants
                signed; ``SIGNATURE_INVALID`` for an invalid signature.
        """
        state, request = self._load(), parse(Unmasking, text)
        if state.survivors is None or state.survivors != request.survivors:
            raise self._refused(
                "the hub's list of survivors differs from the list that this contributor signed"
            )
        check_confirmed(request, self._participants(state), self._threshold)
        assert state.received is not None
        assert state.own is not None
        members, survivors = {*state.received, self._me}, state.survivors
        failpoint("client-secure-unmasking")
        own_and_received = {**state.received, self._me: state.own}
        return Revealed(
            seeds={other: own_and_received[other][0] for other in survivors},
            mask_keys={other: own_and_received[other][1] for other in sorted(members - {*survivors})},
        )

    @property
    def _path(self) -> Path:
        return self._folder / "state.json"

    def _load(self) -> SecureState:
        try:
            return SecureState.model_validate_json(self._path.read_bytes())
        except FileNotFoundError as error:
            raise self._refused(
                "this machine has no keys for the round (it joined late, or its folder is new)"
            ) from error
        except ValidationError as error:
            raise GymError(
                ErrorCode.STATE_CORRUPT, f"{self._path}: {error}", "delete the folder to skip this round"
            ) from error

    def _keep(self, state: SecureState) -> None:
        make_folder(self._folder, 0o700)
        write_atomically(self._path, state.model_dump_json().encode(), mode=0o600)

    def _participants(self, state: SecureState) -> Participants:
        if state.participants is None:
            raise self._refused("the hub sends shares before it has listed the participants")
        check_tasks(
            state.participants.adverts, self._task
        )  # checked before every stage that reveals anything
        return state.participants

    def _adverts(self, state: SecureState) -> dict[str, Advert]:
        return self._participants(state).of()

    def _pair_key(self, state: SecureState, other: Advert) -> bytes:
        private, public = bytes.fromhex(state.cipher_private), bytes.fromhex(other.cipher_key)
        return shared_key(private, public, "share", self._spec.server, self._spec.server_round)

    def _masks(self, state: SecureState) -> list[Mask]:
        private, adverts = bytes.fromhex(state.mask_private), self._adverts(state)
        assert state.received is not None
        masks = [Mask(bytes.fromhex(state.seed))]
        for other in sorted(state.received):
            public = bytes.fromhex(adverts[other].mask_key)
            masks.append(
                pair_mask(self._me, other, private, public, self._spec.server, self._spec.server_round)
            )
        assert all(len(mask.key) == SECRET_BYTES for mask in masks)
        return masks

    def _refused(self, why: str) -> GymError:
        return GymError(
            ErrorCode.UPDATE_REFUSED,
            f"round {self._spec.server_round}: {why}",
            "this contributor skips the round; if this happens again, report it to the coordinator",
        )


def _pair_of_shares(plain: bytes, sender: str) -> tuple[str, str]:
    try:
        seed, mask_key = json.loads(plain)
        return bytes.fromhex(seed).hex(), bytes.fromhex(mask_key).hex()
    except (ValueError, RecursionError, TypeError) as error:
        raise GymError(ErrorCode.UPDATE_REFUSED, f"{sender} did not seal two valid shares") from error


def stage_of(task: pb.Task) -> str | None:
    """Return the secure aggregation stage of a task; None for any other task."""
    kind = task.metadata.message_type
    if kind == MessageType.TRAIN:
        return TRAIN if RECORD in task.content.configs else None
    return next((stage for stage, action in ACTIONS.items() if kind == f"{MessageType.QUERY}.{action}"), None)


def titled(task: pb.Task) -> str:
    """Describe a task by its round and, in a secure round, its stage."""
    stage, title = stage_of(task), f"round {task.metadata.group_id}: task {task.message_id[:12]}"
    return title if stage is None else f"{title} ({stage}, stage {STAGES.index(stage) + 1} of {len(STAGES)})"


def forget(home: Home, server: str, verdicts: Iterable[dict[str, Any]]) -> None:
    """Delete the secrets of rounds that have a final verdict or were not used for a week."""
    if rounds_folder(home).exists():
        drop_old(rounds_folder(home))
    for verdict in verdicts:
        if str(verdict.get("verdict", "")) not in _OPEN:
            folder = rounds_folder(home) / f"{server}-{int(verdict.get('server_round', 0))}"
            if folder.exists():
                shutil.rmtree(folder)


def _drop_earlier(rounds: Path, spec: TaskSpec) -> None:
    """Delete the rounds before the round of ``spec``; a hub that opens a round has ended all earlier ones."""
    stem = f"{spec.server}-"
    for folder in rounds.glob(f"{stem}*"):
        number = folder.name.removeprefix(stem)
        if number.isdecimal() and int(number) < spec.server_round:
            shutil.rmtree(folder)
