"""The sections of the hub's YAML file, including the gate's evaluations."""

from __future__ import annotations

import difflib
import math
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.audit import AuditConfig
from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.config.hub.mirrors import MAX_MIRRORS, MirrorConfig
from gym_fed.config.hub.privacy import PrivacyConfig, SecureAggregationConfig
from gym_fed.config.hub.region import RegionConfig
from gym_fed.config.hub.seeding import SeedingConfig
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.config.hub.task import TrainingRecipe
from gym_fed.config.observe import ObserveConfig
from gym_fed.config.schema.base import StrictModel
from gym_fed.config.schema.endpoint import Endpoint
from gym_fed.config.schema.proxy import ProxyNetwork, RootPath
from gym_fed.config.train.data_source import DataFormat
from gym_fed.core.text import counted

_REGISTRY = Path(__file__).parents[2] / "assets" / "suites" / "registry.yaml"


class EnrolmentConfig(StrictModel):
    """Settings that decide who may contribute."""

    policy: Literal["open", "invite", "allow-list"] = "invite"
    allow_list: list[str] = Field(default_factory=list)
    """Contributor ids for the policy ``allow-list``; ``gym-client id`` prints them."""

    @model_validator(mode="after")
    def _validate_policy(self) -> EnrolmentConfig:
        if self.allow_list and self.policy != "allow-list":
            raise ValueError(f"allow_list is given but policy is {self.policy!r}; set policy: allow-list")
        return self


class RoundsConfig(StrictModel):
    """Settings of rounds: quorum, deadlines and pauses."""

    num_rounds: int = Field(10, ge=1)
    mode: Literal["synchronous", "continuous"] = "synchronous"
    """``continuous``: merge as soon as updates of weight ``merge_every`` are admitted, and let the others keep
    working. Their updates are added to a later version, with less weight (docs/coordinate.md). Quorum share and grace
    period then have no effect, and a task may take the deadline times ``1 + max_staleness``."""
    merge_every: int = Field(8, ge=1)
    """Continuous rounds: admitted weight at which a round is merged. An update weighs ``1 / sqrt(1 + staleness)``
    times its share under the rule (1 is an equal share, 2 is the maximum)."""
    max_staleness: int = Field(20, ge=0, le=1000)
    """Continuous rounds: maximum age of an update, in versions. Older updates are refused. The rules weigh the updates
    of the last N merges."""
    min_contributors: int = Field(3, ge=1)
    """Minimum quorum: a round with fewer admitted updates at its deadline is aborted."""
    quorum_share: float = Field(0.5, ge=0.5, lt=1)
    """More than this fraction of the contributors with the task must send an update, so that a fast minority cannot
    complete a round. Contributors that failed, left, or did not respond in three of the last ten rounds do not
    count."""
    deadline_seconds: float = Field(1800, gt=0)
    lease_seconds: float = Field(60, ge=1)
    """Time without a heartbeat after which a contributor loses its task."""
    grace_factor: float = Field(1.5, ge=1)
    """After the quorum, each contributor still training gets this many times its usual time, estimated from its tasks
    of the last ten rounds and the training steps in its heartbeats. A newcomer's usual time is a quarter of the
    deadline. A contributor that did not answer three tasks in a row gets ``grace_min_seconds``."""
    grace_min_seconds: float = Field(30, ge=0)
    """Minimum time after the quorum."""
    grace_max_seconds: float | None = Field(None, gt=0)
    """Maximum time after the quorum, within the deadline. By default, contributors are awaited for at most half the
    deadline if they left their last task unanswered and never took longer for an answer."""
    backoff_seconds: float = Field(5, gt=0)
    """Pause after an aborted round; it doubles with each consecutive one and ends when a new contributor connects."""
    backoff_max_seconds: float = Field(300, gt=0)
    learning_rate_decay: float = Field(1.0, gt=0, le=1)
    """Factor of the recipe's learning rate after every committed round. FedAvg on data that differs between
    contributors converges only with a decaying rate (Li et al. 2020, arXiv:1907.02189, theorem 4)."""
    audit: AuditConfig | None = None
    """Audits of updates (docs/audits.md): only for rows that are public, or that contributors disclose. By default
    none."""

    def quorum(self, num_tasks: int) -> int:
        """Return the number of updates that a round needs if N contributors have the task."""
        if self.mode == "continuous":
            return self.merge_every
        return max(self.min_contributors, math.floor(self.quorum_share * num_tasks) + 1 if num_tasks else 0)

    def in_words(self) -> str:
        """Return the mode in words."""
        if self.mode == "continuous":
            oldest = counted(self.max_staleness, "version")
            return f"continuous: merged at weight {self.merge_every}, updates up to {oldest} old"
        return "synchronous"

    @model_validator(mode="after")
    def _validate_bounds(self) -> RoundsConfig:
        if self.grace_max_seconds is not None and self.grace_max_seconds < self.grace_min_seconds:
            raise ValueError(f"grace_max_seconds is below grace_min_seconds ({self.grace_min_seconds:g})")
        if self.backoff_max_seconds < self.backoff_seconds:
            raise ValueError(f"backoff_max_seconds is below backoff_seconds ({self.backoff_seconds:g})")
        for key in ("merge_every", "max_staleness"):
            if self.mode != "continuous" and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect on synchronous rounds; set mode: continuous")
        return self


class AdmissionConfig(StrictModel):
    """Limits on an update."""

    max_update_bytes: int = Field(2 << 30, ge=1024)
    """Size limit of one update. Updates are also limited to 8 bytes per weight of the base plus about 1 MiB.
    Contributors are shown the lower limit."""
    max_norm: float | None = Field(None, gt=0)
    """Maximum L2 norm of an update; larger ones are refused."""
    norm_ratio: float | None = Field(4.0, gt=1)
    """Maximum norm as a multiple of the round's median norm; larger updates are rejected (from 3 updates on)."""


class GateEvaluation(StrictModel):
    """A suite on which every soup is compared with the previous version, on the same rows."""

    suite: str
    """Name of a suite, group or task (``gym eval list`` prints them), or a task file relative to the hub's folder."""

    limit: int = Field(64, ge=8, le=100_000)
    """Rows per task, drawn for every round with a secret seed."""

    max_drop: float = Field(0.02, ge=0)
    """Tolerated decrease of a task's metric: a soup with a larger one, at ``confidence``, is rolled back."""

    confidence: float = Field(0.95, gt=0.5, lt=1)
    """Confidence of the one-sided test of the paired difference over the drawn rows."""

    apply_chat_template: bool | None = None
    """True if prompts use the model's chat template; None for only those of conversation tasks."""

    @field_validator("suite")
    @classmethod
    def _validate_name(cls, name: str) -> str:
        names, beginnings = evaluation_names()
        if name in names or name.endswith((".yaml", ".yml")) or name.startswith(beginnings):
            return name
        close = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
        near = f"; did you mean {', '.join(close)}?" if close else "; gym eval list prints them"
        raise ValueError(f"no suite or task has this name{near}")


@cache
def evaluation_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of suites and tasks, and prefixes of group members, which the hub looks up when it starts.

    The registry is read as plain YAML, so that a config does not import the evaluation code.
    """
    registry = yaml.safe_load(_REGISTRY.read_text(encoding="utf-8"))
    groups = [
        entry["dataset"] if entry.get("each") == "task" else name
        for name, entry in registry["tasks"].items()
        if entry.get("each") or "*" in entry.get("harness", "")
    ]
    return (*registry["suites"], *registry["tasks"]), tuple(f"{group}_" for group in groups)


class SafetyGateConfig(StrictModel):
    """The safety probe as a gate: a soup is rolled back if the model refuses less after it."""

    max_margin_drop: Annotated[float, Field(ge=0)]
    """Tolerated decrease of the refusal margin in nats per token; a soup above it, at ``confidence``, is undone."""

    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    """Confidence of the drop's lower bound, paired by prompt."""

    prompts: str | None = None
    """CSV or JSONL file of requests to refuse, relative to the hub's folder; by default the built-in prompts."""


class GateConfig(StrictModel):
    """Limits on a soup: loss on the coordinator's held-out set, evaluations, refusal margin."""

    heldout: str | None = None
    """Data file, or ``task:NAME`` entries joined by commas for the generated text tasks; none disables the gate."""
    format: DataFormat = "auto"
    max_examples: int = Field(200, ge=1)
    """Maximum number of rows. From a longer file, evenly spaced rows are taken; repeated answers keep
    their proportions."""
    max_length: int = Field(256, ge=8)
    max_loss_increase: float = Field(0.02, ge=0)
    """Tolerated increase of the held-out loss, in nats; a soup with more is rolled back."""
    screen_updates: bool = True
    """Also test each update alone at its share of the soup, and reject it above ``max_update_loss_increase``."""
    max_update_loss_increase: float = Field(0.05, ge=0)
    evals: list[GateEvaluation] = Field(default_factory=list, max_length=16)
    """Suites on which a soup must not get worse; single updates are screened only by loss."""
    evals_data: str | None = None
    """Folder of evaluation sets, searched before those of ``gym eval fetch``; relative to the hub's folder."""
    safety: SafetyGateConfig | None = None
    """Limits on the decrease of the refusal margin; by default no safety gate."""

    @model_validator(mode="after")
    def _validate_suites(self) -> GateConfig:
        names = [evaluation.suite for evaluation in self.evals]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"evals: suite {repeated!r} is listed twice")
        return self


class RootConfig(StrictModel):
    """The coordinator's clean rows, for ``byzantine_evidence`` and other aggregators that compare updates with one that
    the hub trains on these rows."""

    data: str
    """Data file, or ``task:NAME`` entries joined by commas; it must differ from the gate's held-out set."""
    format: DataFormat = "auto"
    max_examples: int = Field(200, ge=1)
    """Same as ``gate.max_examples``."""


class VariantsConfig(StrictModel):
    """Personal variants that contributors store on the hub, for their other machines and for each other."""

    enabled: bool = True
    max_per_contributor: int = Field(100, ge=1)
    max_bytes: int | None = Field(None, ge=1024)
    """Size limit of one variant; by default ``admission.max_update_bytes``."""
    max_bytes_per_contributor: int = Field(4 << 30, ge=1024)
    """Size limit of all variants of one contributor together."""
    max_total_bytes: int = Field(64 << 30, ge=1024)
    """Size limit of all current variants. Files of replaced and removed ones, and unused uploads, are bounded by
    ``limits.unreferenced_bytes_per_account``."""
    max_changes_per_hour: int = Field(100, ge=1)
    """Maximum puts and removals per contributor and hour, each a ledger entry; further puts are refused."""


class LimitsConfig(StrictModel):
    """Limits per account, per address and in total. A call beyond a limit is refused with ``busy`` or
    ``quota-exceeded``; others are not slowed down."""

    nodes_per_account: int = Field(8, ge=1)
    """Maximum installations (``instance``) per account; beyond it, the longest-idle one is removed."""
    streams_per_account: int = Field(4, ge=1)
    """Maximum concurrent work streams. One node per account gets a round's task."""
    calls_per_account: int = Field(8, ge=1)
    """Maximum concurrent calls."""
    calls_per_second_of_account: float = Field(10, gt=0)
    """Calls per second per account; bursts of eight seconds' worth are accepted."""
    calls_per_second: float = Field(30, gt=0)
    """Calls per second per address without a login; bursts of four seconds' worth are accepted."""
    calls_per_address: int = Field(64, ge=1)
    """Maximum concurrent calls without a login, and logins, per address."""
    connections: int = Field(8000, ge=16)
    """Maximum number of TCP connections, within the process's limit of open files."""
    connections_per_address: int = Field(256, ge=1)
    """Maximum connections per address; those without a call are closed first. A school or company may need more."""
    handshake_seconds: float = Field(5, gt=0)
    """Time limit of a TLS handshake."""
    idle_upload_seconds: float = Field(30, gt=0)
    """Time without a byte after which an upload is closed; it can be resumed."""
    enrolments_per_minute: float = Field(6, gt=0)
    """Maximum enrolments of new accounts per address; wrong invites count too."""
    enrolment_work_bits: int = Field(20, ge=0, le=24)
    """Proof of work for enrolment under the policy ``open``: 2**bits hashes; 20 bits take about a second on one
    core."""
    account_changes_per_hour: int = Field(12, ge=1)
    """Maximum key replacements, and returns after leaving, per account; each is a ledger entry."""
    transfers_per_hour: int = Field(60, ge=1)
    """Maximum credit transfers per account; each is two ledger entries."""
    unreferenced_bytes_per_account: int = Field(4 << 30, ge=1 << 20)
    """Maximum total size, in bytes, of an account's uploads that no merged update or variant uses: unfinished uploads,
    updates waiting for their round, and refused or rejected ones until they are deleted
    (``storage.keep_unneeded_seconds``)."""


class StorageConfig(StrictModel):
    """Storage of the hub's state; relative paths are inside the hub's folder."""

    database: str = Field("sqlite:///hub.db", repr=False)
    """``sqlite:///FILE``, or ``postgresql+psycopg://USER@HOST/DATABASE`` with the password in ``PGPASSFILE``."""
    objects: str = "objects"
    """Folder, ``s3://BUCKET/PREFIX`` with the credentials in the environment, or any fsspec URL."""
    max_local_copy_bytes: int = Field(8 << 30, ge=1 << 20)
    """Cache limit for a remote object store: local copies beyond it are deleted, the least recently used first."""
    reserve_bytes: int = Field(256 << 20, ge=0)
    """Minimum free disk space; below it, no upload starts and no round opens."""
    keep_unneeded_seconds: float = Field(86400, ge=3600)
    """Time since its upload after which an unreferenced file is deleted: refused updates, unused uploads, files of
    replaced and removed variants. The hub checks every ten minutes; ``gym-server gc`` deletes them immediately."""


class DashboardConfig(StrictModel):
    """The pages that ``gym-server run`` serves (docs/dashboard.md)."""

    listen: str = "127.0.0.1:9444"
    """Address as host:port; port 0 selects a free one. An address that others can reach needs keys."""
    public: bool = False
    """True if viewing needs no key; changes always need one."""
    root_path: RootPath = ""
    """Path prefix of the pages at a reverse proxy, such as ``/hub``; the proxy may remove it or pass it on."""
    trusted_proxies: list[ProxyNetwork] = Field(default_factory=list, max_length=64)
    """IP addresses and networks of proxies whose ``X-Forwarded-Prefix``, ``-For`` and ``-Proto`` are used. Needs
    keys."""
    ask: bool = False
    """True if the newest version answers ``prompts`` after every round, and prompts from operators. Its separate
    process needs the memory of one more model (docs/dashboard.md)."""
    prompts: list[Annotated[str, Field(min_length=1, max_length=500)]] = Field(
        default_factory=list, max_length=10
    )
    """Prompts that every version answers, with greedy decoding."""
    ask_by: Literal["operators", "viewers"] = "operators"
    """Who may ask the newest version their own questions, if ``ask`` is true. With ``viewers``, viewers may too at hubs
    with ``enrolment.policy: open``: all of them together one question at a time and six per minute."""
    public_url: Annotated[str, Field(pattern=r"^https?://[^\s/?#]+(/[^\s?#]*)?$", max_length=500)] | None = (
        None
    )
    """The address at which others reach the pages, such as ``https://hub.example.org``; it is in invites and on the
    page for members."""
    install: str | None = Field(None, min_length=1, max_length=500, pattern=r"^[^\r\n]+$")
    """The command that installs the client, in invites and on the page for members. Default: ``pip install gym-fed`` if
    this hub's gym-fed came from a package index, else ``pip install WHEEL`` for the file that you send along."""

    @field_validator("listen")
    @classmethod
    def _validate_listen(cls, text: str) -> str:
        Endpoint.parse(text, least_port=0)
        return text

    @field_validator("prompts")
    @classmethod
    def _validate_prompts(cls, prompts: list[str]) -> list[str]:
        if not all(prompt.strip() for prompt in prompts):
            raise ValueError("a prompt is empty")
        if len(set(prompts)) < len(prompts):
            raise ValueError("a prompt is listed twice")
        return prompts


class ServerSections(StrictModel):
    """The keys of ``gym-server.yaml``; ``ServerConfig`` checks combinations."""

    name: str = Field("a gym-fed community", max_length=80)
    listen: str = "127.0.0.1:9443"
    """Address as host:port; port 0 selects a free one."""
    advertise: str | None = None
    """Address (host:port) in invites, if it differs from ``listen``."""
    base_model: str = "gym-nano"
    """Base model: ``gym-nano``, a model folder, or a hub name in the local cache."""
    serve_base: bool | Literal["auto"] = "auto"
    """True if contributors can download the base from the hub. ``auto``: True if the licence in its model card allows
    redistribution (``gym_fed.base.files.REDISTRIBUTABLE``)."""
    enrolment: EnrolmentConfig = EnrolmentConfig()
    rounds: RoundsConfig = RoundsConfig()
    recipe: TrainingRecipe = TrainingRecipe()
    codec: CodecPolicy = CodecPolicy()
    soup: SoupRecipe = SoupRecipe()
    admission: AdmissionConfig = AdmissionConfig()
    root: RootConfig | None = None
    gate: GateConfig = GateConfig()
    check: bool = True
    """At the end of the run, compare the newest version with version 0: held-out loss and general knowledge."""
    rewards: RewardsConfig = RewardsConfig()
    privacy: PrivacyConfig | None = None
    """Contributor-level differential privacy of the soups; by default none."""
    secure_aggregation: SecureAggregationConfig | None = None
    """Hide single updates from the hub; by default it sees them, as robust rules require."""
    variants: VariantsConfig = VariantsConfig()
    seeding: SeedingConfig | None = None
    """Let contributors fetch the base and soups from each other; by default only from the hub."""
    mirrors: list[MirrorConfig] = Field(default_factory=list, max_length=MAX_MIRRORS)
    """Mirrors from which contributors download the base and soups first; by default only the hub. A mirror learns the
    addresses of those who download from it."""
    region: RegionConfig | None = None
    """Make this hub a region of another hub; by default it is independent."""
    limits: LimitsConfig = LimitsConfig()
    storage: StorageConfig = StorageConfig()
    dashboard: DashboardConfig | None = None
    """Settings of the dashboard; without them it is off, unless ``gym-server run --dashboard`` gives an address."""
    observe: ObserveConfig = ObserveConfig()
