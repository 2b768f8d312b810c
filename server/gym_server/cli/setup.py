"""Create a hub's folder (`gym-server init`) with keys, certificate, database and a commented config."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gym_fed.base.modeling.weight_count import count_stored_weights
from gym_fed.config.hub.privacy import PrivacyConfig, ReleasePrivacy
from gym_fed.config.hub.server import CONFIG_NAME, ServerConfig
from gym_fed.config.schema.endpoint import Endpoint
from gym_fed.config.train.defaults import LARGE, in_words, method_defaults
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import load_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder, write_atomically
from gym_fed.core.registries import AGGREGATORS, TUNING
from gym_fed.core.text import counted
from gym_fed.serving.base import require_same_tensors
from gym_fed.trust.wire.limits import DEFAULT_PORT
from gym_server.cli.template import FROZEN_A, LARGE_RECIPE, SMALL_RECIPE, TEMPLATE
from gym_server.federation import create_keys
from gym_server.store.database import Database

_AGGREGATOR = "byzantine_evidence"
_LEAST_OPEN_PORT = 1024
"""Lowest port that unprivileged users may listen on."""

_PRIVATE = {
    "norm_ratio": "null",
    "screen_updates": "false",
    "similarity_threshold": "null",
    "together_threshold": "null",
    "stale_threshold": "null",
    "min_norm_ratio": "0",
    "score": "participation",
}
"""Config values with differential privacy, which rules out all checks and scores that compare updates."""


@dataclass(frozen=True)
class HubChoices:
    """The settings that `gym-server init` offers; all others have a default and a comment in the config file."""

    base_model: str = "gym-nano"
    name: str = "a gym-fed community"
    enrolment: str = "invite"
    address: str = f"127.0.0.1:{DEFAULT_PORT}"
    """Address ``host:port`` at which contributors reach the hub."""
    heldout: str | None = None
    root_data: str | None = None
    """File of trusted rows against which updates of unusual length are judged."""
    num_rounds: int = 10
    min_contributors: int = 3
    epsilon: float | None = None
    """Differential privacy budget for all rounds; None disables differential privacy."""

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the address."""
        return Endpoint.parse(self.address).is_loopback

    @property
    def listen(self) -> str:
        """The address if it is local, else its port on all interfaces (the default port if it is below 1024)."""
        if self.is_local:
            return self.address
        host, port = Endpoint.parse(self.address)
        everywhere = "[::]" if host.startswith("[") else "0.0.0.0"
        return f"{everywhere}:{port if port >= _LEAST_OPEN_PORT else DEFAULT_PORT}"

    @property
    def aggregator(self) -> str:
        """The aggregation rule; with ``epsilon``, the private rule that keeps the most accuracy under attack."""
        if self.epsilon is None:
            return _AGGREGATOR
        return ReleasePrivacy().best_rule(has_root=self.root_data is not None)

    @property
    def num_malicious_nodes(self) -> int:
        """Return the number of malicious updates that a round of the minimum size can tolerate."""
        return int(AGGREGATORS.type_of(self.aggregator).default_malicious(self.min_contributors))

    def _privacy(self) -> dict[str, str]:
        """Return the values of ``privacy`` and the keys it depends on; without ``epsilon``, those of the comments."""
        if self.epsilon is None:
            return {
                "norm_ratio": "4.0",
                "screen_updates": "true",
                "similarity_threshold": "0.9",
                "together_threshold": "0.6",
                "stale_threshold": "0.999",
                "min_norm_ratio": "0.01",
                "score": "estimate" if self.heldout else "participation",
                "on": "# ",
                "noise_multiplier": "1.0",
                "epsilon": "8.0",
            }
        from gym_fed.privacy.accountant import noise_multiplier_for

        target_delta = PrivacyConfig.model_fields["target_delta"].default
        least = noise_multiplier_for(self.epsilon, target_delta, count=self.num_rounds)
        multiplier = math.ceil(least * 1e4) / 1e4
        return {**_PRIVATE, "on": "", "noise_multiplier": f"{multiplier:g}", "epsilon": f"{self.epsilon:g}"}

    def _recipe(self) -> dict[str, str]:
        """Return the recipe values for the base; a base that is not on this machine counts as large."""
        weights = count_stored_weights(self.base_model)
        draft = TrainingConfig(model=self.base_model)
        chosen = {
            default.key: default
            for default in method_defaults(draft, LARGE + 1 if weights is None else weights)
        }
        if not chosen:
            return {
                "finetuning": draft.finetuning,
                "learning_rate": f"{draft.learning_rate:.1e}".replace("e-0", "e-"),
                "rate_reason": f"for a model of at most {in_words(LARGE)} weights",
                "recipe_rest": SMALL_RECIPE,
            }
        rate = chosen["learning_rate"]
        frozen = self.epsilon is not None and TUNING.type_of(chosen["finetuning"].value).sends_factors
        return {
            "finetuning": chosen["finetuning"].value,
            "learning_rate": f"{rate.value:.1e}".replace("e-0", "e-"),
            "rate_reason": rate.reason,
            "recipe_rest": f"{LARGE_RECIPE}\n{FROZEN_A}" if frozen else LARGE_RECIPE,
        }

    def config_text(self) -> str:
        """Return the commented config file."""
        lines = {
            **self._recipe(),
            "listen": _quoted(self.listen) if self.listen.startswith("[") else self.listen,
            "advertise": "# advertise: hub.example.org:9443"
            if self.is_local
            else f"advertise: {_quoted(self.address)}",
            "heldout": f"heldout: {_quoted(self.heldout)}" if self.heldout else "# heldout: heldout.jsonl",
            "root": f"root:\n  data: {_quoted(self.root_data)}"
            if self.root_data
            else "# root:\n#   data: root.jsonl",
            **self._privacy(),
        }
        return TEMPLATE.format(
            name=_quoted(self.name),
            base_model=_quoted(self.base_model),
            policy=self.enrolment,
            aggregator=self.aggregator,
            num_rounds=self.num_rounds,
            min_contributors=self.min_contributors,
            num_malicious_nodes=self.num_malicious_nodes,
            **lines,
        )


def require_new(folder: Path) -> None:
    """Raise ``FILE_EXISTS`` if the folder already contains a hub."""
    if (folder / CONFIG_NAME).exists() or (folder / "keys").exists():
        raise GymError(ErrorCode.FILE_EXISTS, f"{folder} already contains a hub", "choose another folder")


def init_hub(
    folder: Path, choices: HubChoices, passphrase: Callable[[], bytes] | None = None
) -> tuple[str, str]:
    """Create a hub's folder; keys are encrypted if ``passphrase`` is given, with the passphrase that it returns.

    Returns:
        The hub's id and its TLS fingerprint.

    Raises:
        GymError: ``FILE_EXISTS`` if the folder already has a hub; ``CONFIG_INVALID`` for values that the schema
            refuses; ``MODEL_INVALID`` for a base with missing or extra tensors.
    """
    require_new(folder)
    require_same_tensors(choices.base_model)
    make_folder(folder, 0o700)
    text = choices.config_text()
    draft = folder / f".{CONFIG_NAME}.draft"
    draft.write_text(text, encoding="utf-8")
    try:
        config = load_config(draft, ServerConfig)
    finally:
        draft.unlink()
    ids = create_keys(folder, passphrase() if passphrase else None)
    Database.open(config.storage.database, folder).close()
    write_atomically(folder / CONFIG_NAME, text.encode(), 0o600)  # it may get passwords
    return ids


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def join_commands(
    folder: Path, config: ServerConfig, fingerprint: str, port: int = 0
) -> list[tuple[str, str]]:
    """Return the commands to join, each with a label.

    Args:
        folder: The hub's folder, as the coordinator names it.
        fingerprint: Fingerprint of the hub's TLS key; empty for plain text.
        port: Port that the hub listens on, if the config does not set it.
    """
    file, address = folder / CONFIG_NAME, _address(config, port)
    if address is None:
        return [
            ("nobody can join yet", f"set advertise: HOST:PORT in {file}, this machine's address for others")
        ]
    plain_text = "" if fingerprint else " --insecure"
    here = Endpoint.parse(address).is_loopback
    friend = "on this machine type" if here else "a friend types"
    if config.enrolment.policy == "invite":
        return [
            ("invite a friend", f"gym-server invites create --dir {shlex.quote(str(folder))}"),
            (friend, f"gym-client join --invite INVITE --data FILE{plain_text}"),
        ]
    known = f" --fingerprint {fingerprint}" if fingerprint else plain_text
    steps = [(friend, f"gym-client join --server {address} --data FILE{known}")]
    if config.enrolment.policy == "allow-list":
        steps.insert(
            0, ("list a friend", f"add the output of gym-client id to enrolment.allow_list in {file}")
        )
    return steps


def steps_after_init(folder: Path, config: ServerConfig, fingerprint: str) -> list[tuple[str, str]]:
    """Return the commands that a coordinator runs next, each with a label."""
    return [
        ("serve the hub", f"gym-server run --dir {shlex.quote(str(folder))}"),
        *join_commands(folder, config, fingerprint),
        ("every setting", f"{folder / CONFIG_NAME}, each with a comment"),
    ]


def notes_after_init(config: ServerConfig) -> list[str]:
    """Return notes on consequences of the settings that may surprise the coordinator."""
    from gym_fed.base.files import REDISTRIBUTABLE, licence_of
    from gym_fed.base.models import NANO, resolve

    notes = []
    try:
        folder = resolve(config.base_model)
        licence = "" if config.base_model == NANO else licence_of(Path(folder))
        if config.base_model != NANO and config.serve_base == "auto" and licence not in REDISTRIBUTABLE:
            notes.append(
                "the model card has no licence that allows the hub to serve the base: contributors need their own "
                "copy, and must pass --base FOLDER; serve_base: true serves the base anyway"
            )
    except GymError as error:
        notes.append(f"the hub cannot run yet: {error.message}; {error.hint}")
    quorum, f = config.rounds.min_contributors, config.soup.num_malicious_nodes
    if config.privacy is not None:
        notes += _privacy_notes(config)
    elif f == 0:
        notes.append(
            f"with a quorum of {quorum} nobody can be outvoted, so soup.num_malicious_nodes is 0; "
            "a quorum of 3 outvotes one malicious update"
        )
    if config.gate.heldout is None:
        notes.append("without held-out rows (gate.heldout) every version is kept, even if it is worse")
    if config.root is None and config.privacy is None:
        notes.append(
            "with a hundred clean rows (root.data), a sole holder of some knowledge keeps its weight in the soup, "
            "and attacks do less harm (docs/robustness.md)"
        )
    if Endpoint.parse(config.listen, least_port=0).is_loopback:
        notes.append(
            "only this machine can reach the hub; for others: --address HOST:PORT, or `listen` and `advertise`"
        )
    return notes


def _privacy_notes(config: ServerConfig) -> list[str]:
    """Return notes on the selected private rule, its cost, and the noise in a round of the minimum size."""
    from gym_fed.privacy.accountant import NoiseEvent, epsilon

    privacy, rounds = config.privacy, config.rounds.num_rounds
    assert privacy is not None
    event = NoiseEvent(mechanism=privacy.mechanism, noise_multiplier=privacy.noise_multiplier, count=rounds)
    rule = (
        f"privacy: the rule is {config.soup.aggregator}; noise_multiplier {privacy.noise_multiplier:g} gives epsilon "
        f"{epsilon([event], privacy.target_delta):.3g} for {counted(rounds, 'round')} (delta {privacy.target_delta:g})"
    )
    if config.root is None:
        rule += "; with a hundred clean rows (root.data) the rule is root_gate, which withstands more attacks"
    quorum, weights = config.rounds.min_contributors, count_stored_weights(config.base_model)
    if weights is None or config.recipe.sends_factors:
        return [rule]
    longer = privacy.noise_multiplier * math.sqrt(weights) / quorum
    return [
        rule,
        f"with {counted(quorum, 'update')} to a base of {in_words(weights)} weights the noise is {longer:.3g} times as "
        "long as the longest update; more contributors, fewer weights (LoRA) or a larger epsilon lower it "
        "(docs/privacy.md)",
    ]


def short_join_command(steps: Sequence[tuple[str, str]]) -> str:
    """Return the first step on one line, without the fingerprint, which the client then asks the user to compare."""
    label, command = steps[0]
    return f"{label}: {command.partition(' --fingerprint')[0]}"


def _address(config: ServerConfig, port: int) -> str | None:
    """Return the address that others connect to; None if the config has none."""
    if config.advertise is not None:
        return config.advertise
    host, configured = where = Endpoint.parse(config.listen, least_port=0)
    return None if where.is_everywhere or not (configured or port) else f"{host}:{configured or port}"
