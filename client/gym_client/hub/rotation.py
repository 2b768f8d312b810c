"""Rotate and revoke the keys of a home's accounts.

The new key is written to disk before any hub receives it, and each hub's reply is stored immediately. A replaced key is
kept until no hub needs it. If the process is killed, the same command resumes the rotation.
"""

from __future__ import annotations

from typing import Any

from gym_client.hub.replies import parse_object
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.keystore import Keystore
from gym_client.identity.pins import ServerPin, enrolled, with_account
from gym_client.identity.trust import establish
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.statements import Revocation, Rotation
from gym_fed.trust.wire.v1 import hub_pb2 as pb


def rotate(home: Home, another: bool = False) -> dict[str, Any]:
    """Rotate the key of every account, or resume a rotation that some hub has not answered yet.

    Args:
        home: The home with the keys, locked by the caller.
        another: True to create a new key even if some hub still has an older one.

    Returns:
        ``public_key`` (hex) and ``servers``: for each hub its ``address``, ``server`` and ``contributor``, whether it
        was ``rotated``, and the ``error`` if it was not.
    """
    store = Keystore(home.folder)
    if not store.next_path.exists() and (another or not _lagging(home, store)):
        _begin(home, store)
    target = store.next() if store.next_path.exists() else store.main()
    results = []
    for pin in with_account(home):
        error = None if pin.public_key == target.public_key.hex() else _ask(home, store, pin, target)
        results.append(_result(pin, error, "rotated"))
        failpoint("key-rotated-at-a-hub")
    if store.next_path.exists():
        store.promote()
    store.forget_former({pin.public_key for pin in with_account(home)})
    return {"public_key": target.public_key.hex(), "servers": results}


def revoke(
    home: Home, key: SigningKey | None = None, address: Address | None = None, contributor: str = ""
) -> list[dict[str, Any]]:
    """Declare keys lost or stolen.

    Args:
        home: The home with the accounts.
        key: The key that signs the revocation; None for the account's key on each hub.
        address: Address of the hub; None for all hubs.
        contributor: Id of the account, if the home has no account at ``address``.

    Returns:
        For each hub its ``address``, ``server`` and ``contributor``, whether it was ``revoked``, and the ``error`` if
        it was not.

    Raises:
        GymError: ``UNAUTHENTICATED`` if the home has no account whose key could be revoked.
    """
    store = Keystore(home.folder)
    if address is None:
        pins = with_account(home)
    else:
        known = ServerPin.load(home, address)
        if known is not None and not known.account and contributor:
            known = known.but(contributor=contributor)
        pins = [known] if known is not None and known.account else []
    if not pins:
        raise GymError(
            ErrorCode.UNAUTHENTICATED,
            f"{home.folder} has no account{f' at {address}' if address else ''}",
            "pass --home with the folder that joined the hub",
        )
    results = []
    for pin in pins:
        signer = key or (store.find(pin.public_key) if pin.public_key else store.main())
        results.append(_result(pin, _declare(home, pin, signer), "revoked"))
    return results


def _begin(home: Home, store: Keystore) -> None:
    old = store.main().public_key.hex()
    store.keep_main()
    for pin in with_account(home):
        if not pin.public_key:
            pin.but(public_key=old).save(home, Address.parse(pin.address))
    store.prepare(SigningKey.generate())
    failpoint("key-prepared")


def _lagging(home: Home, store: Keystore) -> bool:
    """Return True if some hub where the home is enrolled still has an older key than the home's."""
    newest = store.main().public_key.hex()
    return any(pin.public_key not in ("", newest) for pin in enrolled(home))


def _ask(home: Home, store: Keystore, pin: ServerPin, new: SigningKey) -> GymError | None:
    try:
        old = store.find(pin.public_key) if pin.public_key else store.main()
        with _client(home, pin, old) as client:
            statement = Rotation(
                rotate=pin.account,
                new_key=new.public_key.hex(),
                server=pin.server,
                tls=client.pin.fingerprint,
                issued_at=int(client.now("RotateKey")),
            )
            request = pb.RotateKeyRequest(
                new_public_key=new.public_key,
                statement_json=statement.to_json(),
                signature=statement.sign(old),
                new_signature=statement.sign(new),
            )
            client.call("RotateKey", request)
            failpoint("key-rotation-answered")
            pin_with_key = client.pin.but(public_key=new.public_key.hex())
            pin_with_key.save(home, client.address)
    except GymError as error:
        if error.code is ErrorCode.KEY_LOCKED:
            raise
        return error
    return None


def _declare(home: Home, pin: ServerPin, signer: SigningKey) -> GymError | None:
    try:
        with _client(home, pin, signer) as client:
            statement = Revocation(
                revoke=pin.account,
                key=signer.public_key.hex(),
                server=pin.server,
                tls=pin.fingerprint,
                issued_at=int(client.now("RevokeKey")),
            )
            request = pb.RevokeKeyRequest(
                contributor=pin.account,
                signing_key=signer.public_key,
                statement_json=statement.to_json(),
                signature=statement.sign(signer),
            )
            parse_object(client.call("RevokeKey", request).receipt_json, "a receipt")
    except GymError as error:
        return error
    return None


def _client(home: Home, pin: ServerPin, key: SigningKey) -> HubClient:
    address = Address.parse(pin.address)
    trusted = establish(home, address, None, lambda _: False, insecure=not pin.fingerprint)
    return HubClient(home, address, trusted, key)


def _result(pin: ServerPin, error: GymError | None, done: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        "address": pin.address,
        "server": pin.server,
        "contributor": pin.account,
        done: error is None,
    }
    return result if error is None else {**result, "error": error.to_dict()}
