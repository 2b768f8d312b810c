"""A hub opened from its folder, with its config, keys, database, objects and services.

hub/
    gym-server.yaml     the config, commented
    hub.db              rounds, versions, updates, ledger, credits
    objects/            objects named by sha256
    keys/               ledger.pem, tls.key, tls.crt, session.key; the newest signed head
    staging/ residuals/ unfinished uploads; the server's error feedback, one file per version
    newest-model/       the newest version as a model folder, and its answers, if `dashboard.ask` is on
    hub.lock            held while `gym-server run` is running
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_bytes
from typing import IO

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from gym_fed.config.hub.server import CONFIG_NAME, ServerConfig
from gym_fed.config.yaml.strict import read_config_text
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder, write_atomically
from gym_fed.core.progress import spinner
from gym_fed.core.text import plain
from gym_fed.delta.base import BaseSpec
from gym_fed.trust.identity.keys import (
    SigningKey,
    encrypted_pem,
    is_encrypted,
    plain_pem,
    read_private_key,
    server_id,
)
from gym_fed.trust.identity.login import PLAIN_TEXT
from gym_fed.trust.identity.passphrase import PassphraseSource
from gym_fed.trust.identity.tls import fingerprint
from gym_server.accounts.accounts import Accounts
from gym_server.accounts.keys import Keys
from gym_server.clock import HubClock
from gym_server.clock_watch import ContributorClocks
from gym_server.evaluations.seeds import promise_seed
from gym_server.ledger.chain import Ledger
from gym_server.rewards.audits import AuditVerdicts, draw_audits
from gym_server.rewards.payouts import Payouts
from gym_server.rounds.admission import Admission
from gym_server.rounds.continuous import carry_tasks
from gym_server.rounds.queue import MessageQueue
from gym_server.rounds.recipes import ConfigText, LiveConfig, RecipeChanges, settings_in
from gym_server.rounds.round_store import RoundStore
from gym_server.rounds.steering import Steering
from gym_server.state import HubState
from gym_server.store.database import Database
from gym_server.store.hub_lock import HubLock, locked_file
from gym_server.store.objects import ObjectStore
from gym_server.store.unavailable import StoreUnavailable
from gym_server.strategy.lease_history import LeaseHistoryCache
from gym_server.traffic import HubTraffic
from gym_server.variants.variants import HubVariants

log = logging.getLogger("gym_server")


SESSION_KEY_NAME = "session.key"
PASSPHRASE_VARIABLE = "GYM_SERVER_PASSPHRASE"
RUN_ID = 1
"""Flower's run id, which is constant: a hub's folder holds one federation, which is one run."""


class Federation:
    """An opened hub: its state, config and services. Close it, or use it as a context manager.

    The commands, the strategy and the gRPC service use it directly. Other functions take only the parts that they need.
    """

    def __init__(
        self,
        folder: Path,
        live_config: LiveConfig,
        base: BaseSpec,
        database: Database,
        insecure: bool = False,
    ) -> None:
        self.folder = folder
        self.live_config = live_config
        config = live_config.current
        self.base = base
        self.database = database
        self.sends_arrays = False
        """True if a strategy other than DeltaSoup runs: tasks and replies then contain arrays instead of deltas."""
        self.clock = HubClock(database)
        self.contributor_clocks = ContributorClocks()
        self.traffic = HubTraffic()
        self.passphrase = PassphraseSource(PASSPHRASE_VARIABLE)
        self.key = SigningKey.load(folder / "keys" / "ledger.pem", self.passphrase.get)
        self.server = server_id(self.key.public_key)
        self.fingerprint = fingerprint((folder / "keys" / "tls.crt").read_bytes())
        self.store = ObjectStore(
            objects_url(folder, config),
            folder / "staging",
            config.storage.max_local_copy_bytes,
            database.read_only,
        )
        private = config.privacy is not None or config.secure_aggregation is not None
        now = self.clock.now
        self.ledger = Ledger(
            database, self.key, folder / "keys" / "newest-head.json", private=private, clock=now
        )
        self.queue = MessageQueue(database, config.rounds.lease_seconds, now)
        self.lease_histories = LeaseHistoryCache(config.rounds.lease_seconds)
        self.round_store = RoundStore(database, self.ledger, base.digest, now)
        self.state = HubState(
            folder, self.server, base, database, self.ledger, self.store, self.round_store, self.clock
        )
        hold = config.rewards.hold_seconds
        tls = PLAIN_TEXT if insecure else self.fingerprint
        limits = config.limits
        self.recipes = RecipeChanges(database, self.ledger)
        self.steering = Steering(database, self.ledger, self.round_store, self.queue)
        self.payouts = Payouts(
            database, self.ledger, self.server, tls, hold, limits.transfers_per_hour, clock=now
        )
        self.round_store.at_commit.append(self.payouts.settle)
        self.round_store.at_commit.append(lambda tx: draw_audits(tx, self.ledger))
        if config.draws_by_seed:
            self.round_store.at_open.append(lambda tx, number: promise_seed(tx, self.ledger, number))
        max_staleness = config.rounds.max_staleness if config.rounds.mode == "continuous" else None
        if max_staleness is not None:
            oldest, pay = max_staleness, config.rewards.terms()
            self.round_store.at_open.append(
                lambda tx, number: carry_tasks(tx, number, base.digest, oldest, pay)
            )
        else:  # continuous rounds before this start may have left open tasks
            self.round_store.at_open.append(lambda tx, number: self.queue.close_group_in(tx, str(number - 1)))
        self.keys = Keys(
            database,
            self.ledger,
            self.server,
            tls,
            self.payouts,
            hold,
            limits.account_changes_per_hour,
            clock=now,
        )
        self.accounts = Accounts(
            database,
            self.ledger,
            self.keys,
            config.enrolment,
            self.server,
            tls,
            token_bytes(32) if database.read_only else session_key(folder / "keys", self.passphrase),
            limits.enrolment_work_bits,
            limits.nodes_per_account,
            now,
        )
        self.admission = Admission(
            database,
            self.ledger,
            self.store,
            config.admission,
            self.server,
            base,
            config.privacy is not None,
            config.secure_aggregation is not None,
            now,
            max_staleness,
        )
        self.audits = AuditVerdicts(
            database, self.ledger, self.server, config.rounds.audit, config.rewards, now
        )
        self.variants = HubVariants(database, self.ledger, self.store, base, config, now)

    @classmethod
    def open(
        cls, folder: Path, overrides: tuple[str, ...] = (), insecure: bool = False, read_only: bool = False
    ) -> Federation:
        """Open a folder created by ``gym-server init``.

        Args:
            folder: The hub's folder.
            overrides: ``a.b=value`` settings that override the config file.
            insecure: True if the hub serves without TLS on loopback; statements signed by contributors then name no TLS
                key.
            read_only: Leave the folder and the database unchanged; writes raise ``PERMISSION_DENIED``.

        Raises:
            GymError: ``FILE_NOT_FOUND`` if there is no hub; ``CONFIG_INVALID``; ``STATE_CORRUPT``; ``BASE_MISMATCH`` if
                the config's base is not the one that the federation started with.
        """
        folder = folder.resolve()
        source = config_text(folder, overrides)
        database = Database.open(source.config().storage.database, folder, read_only)
        settings = settings_in(database)
        config = source.config(settings)
        live_config = LiveConfig(database, source, settings, config)
        return cls(folder, live_config, _base_spec(database, config), database, insecure)

    @property
    def config(self) -> ServerConfig:
        """Return the current config."""
        return self.live_config.current

    @config.setter
    def config(self, config: ServerConfig) -> None:
        self.live_config.current = config

    @property
    def source(self) -> ConfigText:
        """Return the text of the config file, with the command line's overrides."""
        return self.live_config.source

    @contextmanager
    def hub_lock(self) -> Iterator[HubLock]:
        """Hold the exclusive lock for running this federation's rounds, among all hubs on the same database.

        Raises:
            GymError: ``STATE_LOCKED`` if another hub holds it.
        """
        try:
            lock = HubLock(self.database)
        except StoreUnavailable as away:
            raise away.refusal from None
        try:
            yield lock
        finally:
            lock.release()

    @property
    def max_update_bytes(self) -> int:
        """Return the size limit of a contributor's object; arrays of other strategies may exceed the base's size."""
        if self.sends_arrays:
            return self.config.admission.max_update_bytes
        return self.config.max_update_bytes(self.base.shapes)

    def close(self) -> None:
        self.database.close()

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def folder_lock(folder: Path) -> IO[str]:
    """Lock a hub's folder for a single `gym-server run`, until the returned file is closed.

    Raises:
        GymError: ``STATE_LOCKED`` if another one runs.
    """
    what, hint = f"another gym-server is running on {folder}", "stop it first, or use another folder"
    return locked_file(folder / "hub.lock", GymError(ErrorCode.STATE_LOCKED, what, hint))


def read_config(folder: Path, overrides: tuple[str, ...] = ()) -> ServerConfig:
    """Read the config of a hub's folder.

    Raises:
        GymError: ``FILE_NOT_FOUND`` with the command that creates a hub, ``CONFIG_INVALID``.
    """
    return config_text(folder, overrides).config()


def config_text(folder: Path, overrides: tuple[str, ...] = ()) -> ConfigText:
    """Read the text of a hub's config file; ``ConfigText.config`` parses it.

    Raises:
        GymError: ``FILE_NOT_FOUND`` with the command that creates a hub, ``CONFIG_INVALID``.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise GymError(
            ErrorCode.FILE_NOT_FOUND, f"no hub in {folder}", f"create one: gym-server init --dir {folder}"
        )
    return ConfigText(path, read_config_text(path), overrides)


def create_keys(folder: Path, passphrase: bytes | None = None) -> tuple[str, str]:
    """Create a hub's ledger and TLS keys, encrypted if a passphrase is given; return its id and TLS fingerprint."""
    from gym_fed.trust.identity.tls import create_certificate

    keys = folder / "keys"
    make_folder(keys, 0o700)
    key = SigningKey.generate()
    key.save(keys / "ledger.pem", passphrase)
    create_session_key(keys, passphrase)
    return server_id(key.public_key), create_certificate(keys / "tls.key", keys / "tls.crt", passphrase)


def create_session_key(keys: Path, passphrase: bytes | None) -> None:
    """Write a new ``session.key`` into the folder of keys, which ends all sessions.

    It is 32 random bytes, written as the seed of an Ed25519 key, so that it is encrypted like ``ledger.pem``.
    """
    key = Ed25519PrivateKey.generate()
    pem = plain_pem(key) if passphrase is None else encrypted_pem(key, passphrase)
    write_atomically(keys / SESSION_KEY_NAME, pem, mode=0o600)


def session_key(keys: Path, passphrase: PassphraseSource) -> bytes:
    """Return the 32 bytes of ``session.key``, creating it if it is missing.

    Raises:
        GymError: ``KEY_LOCKED``; ``STATE_CORRUPT`` if the file is not a key.
    """
    path = keys / SESSION_KEY_NAME
    if not path.exists():
        is_hidden = is_encrypted((keys / "ledger.pem").read_bytes())
        create_session_key(keys, passphrase.get(str(path)) if is_hidden else None)
    try:
        key = read_private_key(path.read_bytes(), str(path), passphrase.get)
    except GymError as error:
        if error.code is not ErrorCode.STATE_CORRUPT:
            raise
        raise GymError(error.code, error.message, "delete the file; this only ends all sessions") from error
    return key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())


def objects_url(folder: Path, config: ServerConfig) -> str:
    """Return the location of a hub's objects: the config's URL, or a folder inside the hub's folder."""
    url = config.storage.objects
    return url if "://" in url else str(folder / url)


def _base_spec(database: Database, config: ServerConfig) -> BaseSpec:
    """Return the spec of the base that the federation started with; only the first call reads it from the model."""
    stored = database.setting(f"base:{config.base_model}", "")
    if stored:
        return BaseSpec.from_dict(json.loads(stored))
    with spinner(f"reading the base model {plain(config.base_model, 80)}"):
        from gym_fed.base.models import load_model, resolve
        from gym_fed.serving.base import spec_of_files

        spec = spec_of_files(Path(resolve(config.base_model)), config.base_model) or BaseSpec.of(
            load_model(config.base_model).model, config.base_model
        )
    began_with = database.setting("base_digest", spec.digest)
    if began_with != spec.digest:
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"base_model {config.base_model!r} has digest {spec.digest}, but the federation began with {began_with}",
            "restore the original base_model in the config, or start another hub with `gym-server init`",
        )
    if not database.read_only:
        database.set(f"base:{config.base_model}", json.dumps(spec.to_dict()))
    return spec
