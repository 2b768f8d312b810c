"""`gym-server init`: keys, certificate, database and a commented config in a new folder."""

from __future__ import annotations

import json
from collections.abc import Callable
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
from gym_fed.serving.base_spec import require_all_tensors
from gym_fed.trust.wire.limits import DEFAULT_PORT
from gym_server.federation import create_keys
from gym_server.store.database import Database

_AGGREGATOR = "byzantine_robust"
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
"""Below it only root may listen."""

TEMPLATE = """\
# The config of a gym-fed hub. Unknown keys are refused; `gym-server run --set a.b=c` overrides one.

name: {name}
listen: {listen:<22}  # 0.0.0.0:9443 opens the hub to other machines
{advertise}  # what invites carry, when it differs from `listen`; needed with 0.0.0.0

base_model: {base_model}        # gym-nano, a model folder or a name of the Hub; everybody has these weights
# serve_base: auto              # auto | true | false: hand the base to contributors who lack it. auto does it when the
                                # model card names apache-2.0, mit or the like; true says that you may pass it on

enrolment:
  policy: {policy}              # open | invite | allow-list
  # allow_list: [c0123456789abcdef0123456789abcdef]   # ids, as `gym-client id` prints them

rounds:
  num_rounds: {num_rounds}
  min_contributors: {min_contributors:<10}  # least quorum; with fewer updates at the deadline the round is aborted
  quorum_share: 0.5             # and more than this share of those given the task must answer
  deadline_seconds: 1800
  lease_seconds: 60             # who is silent for this long loses the task, and nobody waits
  grace_factor: 1.5             # with the quorum there, the others have this many times what they take
  grace_min_seconds: 30         # and at least this long
  # grace_max_seconds: 900      # and at most; without it half the deadline
  backoff_seconds: 5            # wait after an aborted round, twice as long after each further one in a row
  backoff_max_seconds: 300      # but never longer
  learning_rate_decay: 1.0      # times the recipe's learning rate, after every committed round

# How every contributor trains. Names are those of `gym train`.
recipe:
  algorithm: sft                # sft | pretrain | dpo | kto | orpo | simpo | tdpo
  finetuning: {finetuning:<16}  # full | lora, or what an installed package adds
  max_steps: 50
  learning_rate: {learning_rate:<13}  # {rate_reason}
{recipe_rest}

# How an update is written down: one bit a weight, and what that loses is added to the next one.
codec:
  codec: bitdelta               # or any other of docs/codecs.md, or of an installed package
  error_feedback: true

# How updates become one soup.
soup:
  aggregator: {aggregator:<16}  # any of `gym soup rules`: mean, trimmed_mean, multi_krum, ... With a hundred clean
                                # rows of your own in `root` below, fltrust_caf withstands more (docs/robustness.md)
  num_malicious_nodes: {num_malicious_nodes:<7}  # malicious updates it must withstand; needs 2f+1 updates
  # pre_aggregators: [nnm]      # steps before the aggregator
  # server_optimizer: momentum  # none | momentum | adam | yogi
  server_learning_rate: 1.0
  codec:
    codec: as-merged            # how the soup travels back: LoRA factors with finetuning: lora, else the values

# The hub sees the sum of the updates' signs alone (docs/secure-aggregation.md). It wants what `privacy` below wants,
# but soup.aggregator mean or majority_vote, and soup.num_malicious_nodes: 0.
# secure_aggregation:
#   threshold: 3                # who must stay to the end of a round; more than half of those who begin
#   step_norm: 1.0              # L2 norm of the step that one contributor's signs stand for

admission:
  max_update_bytes: 2147483648
  norm_ratio: 4.0               # an update this many times larger than the median is rejected

# The held-out set, which decides whether a soup is kept. None: every soup is.
gate:
  {heldout:<28}  # Alpaca, ShareGPT, messages or text; or task:NAME,task:NAME
  max_loss_increase: 0.02       # nats
  screen_updates: true          # also try each update alone, at its share of the soup
  max_update_loss_increase: 0.05 # nats
  # evals: [{{suite: tiny, limit: 64, max_drop: 0.02}}]  # tasks that no soup may lower (docs/evaluation-gate.md)
  # safety: {{max_margin_drop: 0.2}}  # nats a token; a soup may not refuse less by more (docs/safety.md)

# At the end of the run: held-out loss and retained knowledge of the newest version, compared with version 0.
check: true

# A hundred clean rows or more, others than gate.heldout's, for soup.aggregator fltrust_caf: the hub trains on them as
# contributors train, and hears the updates that point its own update's way.
# root:
#   data: root.jsonl

rewards:
  pool: 1000                    # credits of one round
  score: {score:<16}       # how updates are measured on gate.heldout; participation: not at all (docs/rewards.md)
  # quality_weight: 0.8         # with a score, its share of the pool; the rest goes to all who were merged
  # credits_per_nat: 10000      # the most that scores pay for a nat of held-out loss; what is left waits in the pool
  similarity_threshold: 0.9     # cosine from which two updates are one: the later is rejected
  together_threshold: 0.3       # how far beyond the round's background updates are paid as one
  stale_threshold: 0.999        # cosine from which an update is an earlier one sent again
  min_norm_ratio: 0.01          # below this share of the median norm an update counts as one of zeros
  hold_seconds: 604800          # before credits can be moved, and before a transfer settles (docs/keys.md)

# Differential privacy of the soups (docs/privacy.md). It wants soup.aggregator root_gate with `root` above (which
# withstands malicious clients best), or mean, trimmed_mean or median;
# admission.norm_ratio: null; gate.screen_updates: false; and under rewards similarity_threshold, together_threshold and
# stale_threshold: null, min_norm_ratio: 0.
# privacy:
#   noise_multiplier: 1.0       # the noise, over the most that one contributor can change
#   clipping_norm: 1.0          # every update is scaled down to this L2 norm
#   epsilon: 8.0                # budget of the whole run: the round that would exceed it is not begun
#   end_when_spent: false       # true: num_rounds may be more than the budget pays for
#   target_delta: 1.0e-5

# Variants that contributors keep here for themselves and each other (docs/coordinate.md).
# variants:
#   max_per_contributor: 100
#   max_bytes_per_contributor: 4294967296
#   max_total_bytes: 68719476736

# What one account, or one address, may use of the hub (docs/coordinate.md).
# limits:
#   nodes_per_account: 8        # installations of one account
#   streams_per_account: 4      # of these, how many wait for work at once
#   calls_per_account: 8        # under way at once
#   calls_per_second_of_account: 10
#   calls_per_second: 30        # of one address before it has logged in
#   calls_per_address: 64       # under way at once, before login: raise it for a class behind one address
#   connections: 8000           # in all
#   connections_per_address: 256
#   handshake_seconds: 5        # a connection without a finished TLS handshake is closed
#   idle_upload_seconds: 30     # an upload that stands still is ended, and can be resumed
#   enrolments_per_minute: 6    # new accounts and guesses of invites, from one address
#   enrolment_work_bits: 20     # policy open: proof of work, about a second of one core
#   account_changes_per_hour: 12 # how often one account may replace its key, or come back after it left
#   transfers_per_hour: 60      # of credits, by one account
#   unreferenced_bytes_per_account: 4294967296 # of uploads that are not merged

storage:
  database: sqlite:///hub.db    # or postgresql+psycopg://USER@HOST/DATABASE, the password in PGPASSFILE
  objects: objects              # a folder, or s3://BUCKET/PREFIX (docs/coordinate.md)
  # max_local_copy_bytes: 8589934592 # of what is on S3: copies on this machine
  # keep_unneeded_seconds: 86400 # refused updates and unused uploads are deleted after this time
  # reserve_bytes: 268435456    # free space left on the disks: below it no upload begins and no round opens

# Pages for the browser beside the rounds (docs/dashboard.md); as `gym-server run --dashboard`.
# dashboard:
#   listen: 127.0.0.1:9444      # another address needs a key: gym-server dashboard-keys add
#   public: false               # true: everybody may look
#   ask: false                  # true: the newest version answers prompts, from a process of its own
#   prompts: []                 # at most 10, answered after every round
"""


@dataclass(frozen=True)
class HubChoices:
    """The settings that `gym-server init` offers; all others have a default and a comment in the file."""

    base_model: str = "gym-nano"
    name: str = "a gym-fed community"
    enrolment: str = "invite"
    address: str = f"127.0.0.1:{DEFAULT_PORT}"
    """host:port as contributors reach the hub."""
    heldout: str | None = None
    num_rounds: int = 10
    min_contributors: int = 3

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the address."""
        return Endpoint.parse(self.address).is_loopback

    @property
    def listen(self) -> str:
        """The address itself on this machine, else its port on every address; the usual port for one of root's."""
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
        """The recipe's values for this base; one that is not on this machine counts as large."""
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
        """The commented config file."""
        lines = {
            **self._recipe(),
            "listen": _quoted(self.listen) if self.listen.startswith("[") else self.listen,
            "advertise": "# advertise: hub.example.org:9443"
            if self.is_local
            else f"advertise: {_quoted(self.address)}",
            "heldout": f"heldout: {_quoted(self.heldout)}" if self.heldout else "# heldout: heldout.jsonl",
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
    """Raise ``FILE_EXISTS`` where there is a hub already."""
    if (folder / CONFIG_NAME).exists() or (folder / "keys").exists():
        raise GymError(ErrorCode.FILE_EXISTS, f"{folder} already holds a hub", "choose another folder")


def init_hub(
    folder: Path, choices: HubChoices, passphrase: Callable[[], bytes] | None = None
) -> tuple[str, str]:
    """Make a hub's folder; its keys are under the passphrase that ``passphrase`` gives, if there is one.

    Returns:
        The hub's id and its TLS fingerprint.

    Raises:
        GymError: ``FILE_EXISTS`` when there is a hub already; ``CONFIG_INVALID`` for values the schema refuses;
            ``MODEL_INVALID`` for a base that lacks a tensor.
    """
    require_new(folder)
    require_all_tensors(choices.base_model)
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
