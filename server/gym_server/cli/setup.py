"""`gym-server init`: create a hub's folder with keys, certificate, database and a commented config; how to join it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gym_fed.base.modeling.weight_count import count_stored_weights
from gym_fed.config.hub.server import CONFIG_NAME, ServerConfig
from gym_fed.config.schema.endpoint import Endpoint
from gym_fed.config.train.defaults import LARGE, in_words, method_defaults
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import load_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder, write_atomically
from gym_fed.core.registries import AGGREGATORS
from gym_fed.serving.base import require_same_tensors
from gym_fed.trust.wire.limits import DEFAULT_PORT
from gym_server.federation import create_keys
from gym_server.store.database import Database

_AGGREGATOR = "byzantine_evidence"
_SMALL_RECIPE = """\
  per_device_train_batch_size: 16
  max_length: 256"""
_LARGE_RECIPE = """\
  lr_scheduler_type: cosine
  warmup_steps: 5
  per_device_train_batch_size: 4
  gradient_accumulation_steps: 2
  max_length: 512"""
_LEAST_OPEN_PORT = 1024
"""Lowest port that users other than root may listen on."""

TEMPLATE = """\
# Config of a gym-fed hub. Unknown keys are refused; `gym-server run --set a.b=c` overrides a key.

name: {name}
listen: {listen:<22}  # 0.0.0.0:9443 accepts connections from other machines
{advertise}  # address in invites, if it differs from `listen`; required with 0.0.0.0

base_model: {base_model}        # gym-nano, a model folder or a Hugging Face name; all contributors need these weights
# serve_base: auto              # auto | true | false: send the base to contributors who lack it. auto: if the licence
                                # in the model card permits it (apache-2.0, mit, ...); true: you have permission

enrolment:
  policy: {policy}              # open | invite | allow-list
  # allow_list: [c0123456789abcdef0123456789abcdef]   # ids printed by `gym-client id`

rounds:
  num_rounds: {num_rounds}
  min_contributors: {min_contributors:<10}  # minimum quorum; a round with fewer updates at its deadline is aborted
  quorum_share: 0.5             # more than this share of the contributors with the task must answer, too
  deadline_seconds: 1800
  lease_seconds: 60             # a contributor that is silent for this long loses its task
  grace_factor: 1.5             # after the quorum, the others get this multiple of their usual time
  grace_min_seconds: 30         # but at least this long
  # grace_max_seconds: 900      # and at most this long; default: half the deadline
  backoff_seconds: 5            # wait after an aborted round; doubles with each further one in a row
  backoff_max_seconds: 300      # the longest wait
  learning_rate_decay: 1.0      # multiplies the recipe's learning rate after every committed round
  # mode: continuous            # wait for nobody (docs/coordinate.md): a round is merged at this weight of updates,
  # merge_every: 8              # which may be this many versions old
  # max_staleness: 20
  # audit: {{rows: public, auditors: [ID]}}   # repeat drawn training steps of LoRA updates (docs/audits.md)

# How every contributor trains, with the key names of `gym train`.
recipe:
  algorithm: sft                # sft | pretrain | dpo | kto | orpo | simpo | tdpo
  finetuning: {finetuning:<16}  # full | lora, or a method of an installed package
  max_steps: 50
  learning_rate: {learning_rate:<13}  # {rate_reason}
{recipe_rest}
  # keep_optimizer_state: true  # full: contributors keep AdamW's moments on disk, 8 bytes per weight and update

# How updates are encoded: one bit per weight. Error feedback adds the rounding error to the next update.
codec:
  codec: bitdelta               # or another codec of docs/codecs.md or of an installed package
  error_feedback: true

# How updates are merged into one soup.
soup:
  aggregator: {aggregator:<18} # see `gym soup rules`: mean, trimmed_mean, multi_krum, ... With a hundred clean rows
                                # in `root` below it judges long updates by their effect (docs/robustness.md)
  num_malicious_nodes: {num_malicious_nodes:<7}  # number f of malicious updates to withstand; needs 2f+1 updates
  # pre_aggregators: [nnm]      # steps before the aggregator
  # server_optimizer: momentum  # none | momentum | nesterov | adam | yogi
  server_learning_rate: 1.0
  # codec: {{codec: lattice}}     # how soups are sent back; by default integers on a lattice, and with finetuning: lora
                                # LoRA factors (as-merged)

# The hub sees only the sum of the updates' signs (docs/secure-aggregation.md). It needs the settings that `privacy`
# below needs, except for soup: aggregator mean or majority_vote, and num_malicious_nodes: 0.
# secure_aggregation:
#   threshold: 3                # contributors that must finish a round; more than half of those that start it
#   step_norm: 1.0              # L2 norm of the step that the signs of one contributor represent

admission:
  max_update_bytes: 2147483648
  norm_ratio: 4.0               # an update this many times larger than the median is rejected

# The held-out set decides whether a soup is kept. Without it every soup is kept.
gate:
  {heldout:<28}  # Alpaca, ShareGPT, messages or text; or task:NAME,task:NAME
  max_loss_increase: 0.02       # nats
  screen_updates: true          # also test each update alone, at its share of the soup
  max_update_loss_increase: 0.05 # nats
  # evals: [{{suite: tiny, limit: 64, max_drop: 0.02}}]  # tasks that a soup must not worsen (docs/evaluation-gate.md)
  # safety: {{max_margin_drop: 0.2}}  # nats per token: maximum drop of the refusal margin (docs/safety.md)

# At the end of the run: held-out loss and retained knowledge of the newest version, compared with version 0.
check: true

# A hundred or more clean rows that are not in gate.heldout. The hub trains on them like a contributor: updates that
# point away from its own have no weight, and one that is longer than most keeps its length if that lowers the loss on
# the rows. The soup gets the length with the lowest loss. Rare knowledge keeps its weight and attacks lose theirs, if
# the rows cover all that contributors may know.
{root}

rewards:
  pool: 1000                    # credits per round
  score: {score:<16}       # how updates are scored on gate.heldout; participation: no scoring (docs/rewards.md)
  # quality_weight: 0.8         # share of the pool paid by score; the rest goes to all merged contributors
  # credits_per_nat: 10000      # limit on pay by score, per nat of held-out loss; the rest stays in the pool
  similarity_threshold: 0.9     # cosine above which the later of two updates is rejected as a copy
  together_threshold: 0.6       # excess over the round's typical cosine above which updates are paid as one
  stale_threshold: 0.999        # cosine above which an update counts as an earlier one sent again
  min_norm_ratio: 0.01          # below this fraction of the median norm an update counts as zero
  hold_seconds: 604800          # delay before credits can be transferred, and before a transfer settles (docs/keys.md)

# Differential privacy of the soups (docs/privacy.md). It needs soup.aggregator root_gate with `root` above (the most
# robust to malicious clients), or mean, trimmed_mean or median;
# admission.norm_ratio: null; gate.screen_updates: false; and under rewards similarity_threshold, together_threshold and
# stale_threshold: null, min_norm_ratio: 0.
# privacy:
#   noise_multiplier: 1.0       # standard deviation of the noise over the sensitivity to one contributor
#   clipping_norm: 1.0          # updates with a larger L2 norm are scaled down to it
#   epsilon: 8.0                # budget of the whole run; a round that would exceed it does not start
#   end_when_spent: false       # true: num_rounds may exceed the budget; the run then ends early
#   target_delta: 1.0e-5

# Personal variants that contributors store on the hub (docs/coordinate.md).
# variants:
#   max_per_contributor: 100
#   max_bytes_per_contributor: 4294967296
#   max_total_bytes: 68719476736

# Limits per account and per address (docs/coordinate.md).
# limits:
#   nodes_per_account: 8        # installations of one account
#   streams_per_account: 4      # installations that wait for work at the same time
#   calls_per_account: 8        # concurrent calls
#   calls_per_second_of_account: 10
#   calls_per_second: 30        # from one address before login
#   calls_per_address: 64       # concurrent calls before login; raise it for a class behind one address
#   connections: 8000           # in total
#   connections_per_address: 256
#   handshake_seconds: 5        # a connection without a finished TLS handshake is closed
#   idle_upload_seconds: 30     # an upload without data for this long is closed; it can be resumed
#   enrolments_per_minute: 6    # new accounts and wrong invites, per address
#   enrolment_work_bits: 20     # policy open: bits of the proof of work; 20 take a core about a second
#   account_changes_per_hour: 12 # key replacements, and returns after leaving, per account
#   transfers_per_hour: 60      # credit transfers per account
#   unreferenced_bytes_per_account: 4294967296 # uploads that no merged update or variant uses

storage:
  database: sqlite:///hub.db    # or postgresql+psycopg://USER@HOST/DATABASE with the password in PGPASSFILE
  objects: objects              # a folder, or s3://BUCKET/PREFIX (docs/coordinate.md)
  # max_local_copy_bytes: 8589934592 # limit on local copies of remote objects
  # keep_unneeded_seconds: 86400 # refused updates and unused uploads are deleted after this time
  # reserve_bytes: 268435456    # minimum free disk space: below it no upload begins and no round opens

# Web pages of the hub (docs/dashboard.md); the same as `gym-server run --dashboard`.
# dashboard:
#   listen: 127.0.0.1:9444      # another address needs a key: gym-server dashboard-keys add
#   public: false               # true: no key is needed to view the pages
#   ask: false                  # true: a separate process answers prompts with the newest version
#   prompts: []                 # at most 10, answered after every round
"""


@dataclass(frozen=True)
class HubChoices:
    """The settings that `gym-server init` offers; all others have a default and a comment in the file."""

    base_model: str = "gym-nano"
    name: str = "a gym-fed community"
    enrolment: str = "invite"
    address: str = f"127.0.0.1:{DEFAULT_PORT}"
    """Address ``host:port`` at which contributors reach the hub."""
    heldout: str | None = None
    root: str | None = None
    """Clean rows on which long updates are judged."""
    num_rounds: int = 10
    min_contributors: int = 3

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
    def num_malicious_nodes(self) -> int:
        """Return the number of malicious updates that the smallest round can outvote."""
        return int(AGGREGATORS.type_of(_AGGREGATOR).default_malicious(self.min_contributors))

    def _recipe(self) -> dict[str, str]:
        """Return the recipe's values for the base; a base that is not on this machine counts as large."""
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
                "recipe_rest": _SMALL_RECIPE,
            }
        rate = chosen["learning_rate"]
        return {
            "finetuning": chosen["finetuning"].value,
            "learning_rate": f"{rate.value:.1e}".replace("e-0", "e-"),
            "rate_reason": rate.reason,
            "recipe_rest": _LARGE_RECIPE,
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
            "root": f"root:\n  data: {_quoted(self.root)}" if self.root else "# root:\n#   data: root.jsonl",
            "score": "estimate" if self.heldout else "participation",
        }
        return TEMPLATE.format(
            name=_quoted(self.name),
            base_model=_quoted(self.base_model),
            policy=self.enrolment,
            aggregator=_AGGREGATOR,
            num_rounds=self.num_rounds,
            min_contributors=self.min_contributors,
            num_malicious_nodes=self.num_malicious_nodes,
            **lines,
        )


def require_new(folder: Path) -> None:
    """Raise ``FILE_EXISTS`` if the folder already contains a hub."""
    if (folder / CONFIG_NAME).exists() or (folder / "keys").exists():
        raise GymError(ErrorCode.FILE_EXISTS, f"{folder} already holds a hub", "choose another folder")


def init_hub(
    folder: Path, choices: HubChoices, passphrase: Callable[[], bytes] | None = None
) -> tuple[str, str]:
    """Create a hub's folder; keys are encrypted with the passphrase that ``passphrase`` returns, if it is given.

    Returns:
        The hub's id and its TLS fingerprint.

    Raises:
        GymError: ``FILE_EXISTS`` if there is a hub already; ``CONFIG_INVALID`` for values that the schema refuses;
            ``MODEL_INVALID`` for a base with missing or extra tensors.
    """
    require_new(folder)
    require_same_tensors(choices.base_model)
    make_folder(folder)
    text = choices.config_text()
    draft = folder / f".{CONFIG_NAME}.draft"
    draft.write_text(text, encoding="utf-8")
    try:
        config = load_config(draft, ServerConfig)
    finally:
        draft.unlink()
    ids = create_keys(folder, passphrase() if passphrase else None)
    Database.open(config.storage.database, folder).close()
    write_atomically(folder / CONFIG_NAME, text.encode())
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
        port: The hub's port, if the config leaves it open.
    """
    file, address = folder / CONFIG_NAME, _address(config, port)
    if address is None:
        return [("nobody can join yet", f"set advertise: HOST:PORT in {file}, as others reach this machine")]
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
            0, ("list a friend", f"the output of gym-client id, under enrolment.allow_list in {file}")
        )
    return steps


def steps_after_init(folder: Path, config: ServerConfig, fingerprint: str) -> list[tuple[str, str]]:
    """Return the commands that a coordinator runs next, each with a label."""
    return [
        ("serve the hub", f"gym-server run --dir {shlex.quote(str(folder))}"),
        *join_commands(folder, config, fingerprint),
        ("every setting", f"{folder / CONFIG_NAME}, with a comment each"),
    ]


def notes_after_init(config: ServerConfig) -> list[str]:
    """Return notes on consequences of the choices that may be surprising."""
    from gym_fed.base.files import REDISTRIBUTABLE, licence_of
    from gym_fed.base.models import NANO, resolve

    notes = []
    try:
        folder = resolve(config.base_model)
        licence = "" if config.base_model == NANO else licence_of(Path(folder))
        if config.base_model != NANO and config.serve_base == "auto" and licence not in REDISTRIBUTABLE:
            notes.append(
                "the model card names no licence that allows the hub to serve the base: contributors need their own "
                "copy, and pass --base FOLDER; serve_base: true serves it anyway"
            )
    except GymError as error:
        notes.append(f"the hub cannot run yet: {error.message}; {error.hint}")
    quorum, f = config.rounds.min_contributors, config.soup.num_malicious_nodes
    if f == 0:
        notes.append(
            f"with a quorum of {quorum} nobody can be outvoted, so soup.num_malicious_nodes is 0; "
            "a quorum of 3 outvotes one malicious update"
        )
    if config.gate.heldout is None:
        notes.append("without held-out rows (gate.heldout) every version is kept, even if it is worse")
    if config.root is None:
        notes.append(
            "with a hundred clean rows (root.data), a sole holder of some knowledge keeps its weight in the soup, "
            "and attacks do less harm (docs/robustness.md)"
        )
    if Endpoint.parse(config.listen, least_port=0).is_loopback:
        notes.append(
            "only this machine can reach the hub; for others: --address HOST:PORT, or `listen` and `advertise`"
        )
    return notes


def short_join_command(steps: Sequence[tuple[str, str]]) -> str:
    """Return the first step on one line, without the fingerprint, which the client then shows for comparison."""
    label, command = steps[0]
    return f"{label}: {command.partition(' --fingerprint')[0]}"


def _address(config: ServerConfig, port: int) -> str | None:
    """Return the address that others connect to; None if the config has none."""
    if config.advertise is not None:
        return config.advertise
    host, configured = where = Endpoint.parse(config.listen, least_port=0)
    return None if where.is_everywhere or not (configured or port) else f"{host}:{configured or port}"
