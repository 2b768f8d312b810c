"""The schema of `serving.yaml`: the base, its variants, memory, concurrent requests, and the content filter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from gym_fed.config.schema.base import AcceptsAliases, LocalPath, StrictModel
from gym_fed.config.schema.member import MemberOf
from gym_fed.config.schema.proxy import ProxyNetwork, RootPath, WebOrigin
from gym_fed.config.schema.vllm import VllmConnection
from gym_fed.config.train.compute import Dtype
from gym_fed.config.train.tuning import Folders
from gym_fed.core.logs import LogFormat
from gym_fed.core.registries import ENGINES, REASONING_PARSERS, TOOL_FORMATS
from gym_fed.core.text import parse_bytes

LOOPBACK = ("127.0.0.1", "::1", "localhost")


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]

CATEGORY = r"[a-z0-9][a-z0-9_-]{0,31}"
"""Names of categories, which are metric labels and appear in logs."""

Category = Annotated[str, StringConstraints(pattern=f"^{CATEGORY}$")]
Side = bool | Annotated[list[Category], Field(min_length=1)]


class EngineConfig(StrictModel):
    """Settings of the engine: concurrent requests, memory, and computation of the variants' terms."""

    kind: Annotated[str, MemberOf(ENGINES)] = "own"
    """Engine that computes the answers: ``own``, or ``vllm`` behind the same API. ``engine: vllm`` sets only this."""

    max_concurrent: int = Field(default=32, ge=1)
    """Maximum number of requests that generate at the same time, each with its own KV cache."""

    max_queued: int = Field(default=256, ge=0)
    """Maximum number of waiting requests, served fairly between users; more are refused (HTTP 429 with Retry-After)."""

    max_queued_per_user: int = Field(default=64, ge=1)
    """Maximum number of waiting requests of one user."""

    max_batch_tokens: int = Field(default=512, ge=16)
    """Maximum number of tokens per step: one per running request, the rest for chunks of prompts."""

    max_context: int | None = Field(default=None, ge=2)
    """Maximum number of tokens of prompt and answer together; by default the model's limit."""

    kv_cache_size: Annotated[Bytes, Field(gt=0)] = 4 * 2**30
    """Maximum size of all KV caches, a draft's included, in bytes. A request waits until its prompt fits; if a running
    answer no longer fits, another one is preempted, and its tokens are recomputed later."""

    prefix_cache: bool | Literal["shared"] = True
    """True if a prompt reuses keys and values of an earlier prompt with the same prefix, user and variant; with
    ``shared``, of any user. Then the time to the first token can reveal what others sent."""

    step_stretch: Annotated[float, Field(gt=1, le=1000)] | None = 1.8
    """Maximum time of a step with a prompt, as a multiple of a decode-only step. If a step has several prompts, all
    but one count as running answers. null: no limit but ``max_batch_tokens``."""

    speculative: Literal["off", "ngram", "draft"] = "off"
    """Speculative decoding: ngram proposes the tokens that followed an earlier occurrence of the same n-gram, draft
    those of ``draft_model``. The next step verifies them, so answers do not change."""

    draft_model: str | None = Field(default=None, min_length=1)
    """Model for ``speculative: draft``, with the base's tokens; on a CPU, it is packed to 4 bits. null: the base."""

    speculative_tokens: int = Field(default=4, ge=1, le=32)
    """Maximum number of tokens per proposal."""

    kv_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """dtype of keys and values: auto follows ``dtype``; int8 has one scale per token and head."""

    kernel: Literal["auto", "exact", "lookup", "lookup16"] = "auto"
    """Method for multiplying sign deltas: exactly in float32, or by lookup tables of sums in 8 bits (faster, with an
    error of about 1% of the term's norm) or 16 bits (3e-5). Tables also multiply ternary, 2-bit and 4-bit deltas. auto
    is exact for a float32 base, and lookup for any other."""

    @model_validator(mode="after")
    def _validate_draft(self) -> EngineConfig:
        if self.draft_model is not None and self.speculative != "draft":
            raise ValueError(
                f"draft_model is set, but speculative is {self.speculative}: set speculative: draft, or remove it"
            )
        return self


class SamplingConfig(StrictModel):
    """Default sampling parameters of requests. null: the base's generation_config.json, or else OpenAI's."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    """Sampling temperature; 0 = greedy, as is ``do_sample: false`` in the base's file."""

    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the fewest tokens whose probabilities sum to this."""

    top_k: int | None = Field(default=None, ge=-1)
    """Sample from the N most likely tokens; 0 and -1 = all."""

    min_p: float | None = Field(default=None, ge=0, le=1)
    """Minimum probability of a token, as a share of the most likely one's."""

    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)
    """Divisor of the logits of tokens that prompt or answer already contain; 1 = off."""


class ConnectionsConfig(StrictModel):
    """Limits on HTTP connections: their number and their minimum speed."""

    max_connections: int = Field(default=2000, ge=8)
    """Maximum number of connections, within the process's limit of open files. Beyond it, idle ones are closed."""

    max_per_address: int = Field(default=256, ge=4)
    """Maximum number of connections per address, by the same rule; trusted proxies are exempt."""

    header_seconds: float = Field(default=10.0, gt=0)
    """Time limit for a request's headers, and for an idle connection."""

    body_seconds: float = Field(default=10.0, gt=0)
    """Time after which a request's body must average ``min_bytes_per_second``."""

    min_bytes_per_second: int = Field(default=16 << 10, ge=1)
    """Minimum average rate of a request's body after ``body_seconds``."""

    stalled_seconds: float = Field(default=60.0, gt=0)
    """Time after which a client that does not read its answer is disconnected."""


class StoredAnswersConfig(StrictModel):
    """Settings of answers kept in memory, so that later requests may continue them (``store``)."""

    keep_seconds: float = Field(default=86_400.0, gt=0)
    """Maximum age of an answer."""

    bytes_per_key: Bytes = 16 * 2**20
    """Maximum answer bytes per API key; the oldest are deleted first. With 0, ``store: true`` is refused."""

    max_bytes: Bytes = 256 * 2**20
    """Maximum size of all answers, in bytes; the oldest answers of the key with the most bytes are deleted first."""


class TlsConfig(StrictModel):
    """The server's certificate in PEM format; disables plain HTTP."""

    certificate: Path
    """File with the certificate and its intermediate certificates."""

    key: Path
    """File with the private key, without a passphrase."""


class ClassifierConfig(StrictModel):
    """A yes-or-no question for the served model or a variant of it."""

    variant: str | None = None
    """Variant that answers; by default the base."""

    question: str = "Is the following text harmful? Answer yes or no.\n\n{text}"
    """User message, with ``{text}`` for the request or answer."""

    category: Category = "classifier"
    """Category of refused texts."""

    threshold: float = Field(default=0.5, gt=0, lt=1)
    """Probability of yes, relative to yes and no, at or above which a text is refused."""

    @model_validator(mode="after")
    def _validate_place(self) -> ClassifierConfig:
        if self.question.count("{text}") != 1:
            raise ValueError("question must contain the placeholder {text} exactly once")
        return self


class FilterConfig(StrictModel):
    """The content filter of chat and completions, off unless ``input`` or ``output`` is set."""

    input: Side = False
    """Rule categories to check requests against; true for all."""

    output: Side = False
    """Rule categories to check answers against; true for all. Streams are delayed by the longest possible match of a
    rule, in characters."""

    package_rules: bool = True
    """True to use the package's small list of rules."""

    rules: list[Path] = Field(default_factory=list, max_length=32)
    """Additional rule files, read when the server starts."""

    text: str = Field(default="This request or its answer was refused by a content filter.", min_length=1)
    """Text that replaces refused texts."""

    classifier: ClassifierConfig | None = None
    """Classifier of texts that no rule matches. Complete answers are then delayed until it has run."""

    @model_validator(mode="after")
    def _validate_rules(self) -> FilterConfig:
        if not self.on and self.model_fields_set - {"input", "output"}:
            raise ValueError("neither input nor output is on, so nothing is filtered: set one of them")
        if self.on and not (self.rules or self.package_rules or self.classifier):
            raise ValueError("there are no rules: set rules, package_rules: true or a classifier")
        return self

    @property
    def on(self) -> bool:
        return bool(self.input or self.output)


class VllmConfig(VllmConnection):
    """Settings of ``engine: vllm``."""

    variant_slots: int = Field(default=8, ge=1, le=256)
    """Maximum number of variants in one step (``--max-loras``)."""

    variants_in_memory: int = Field(default=64, ge=1)
    """Number of variants that vLLM keeps loaded; the least recently used is unloaded (``--max-cpu-loras``)."""

    max_lora_rank: Literal[8, 16, 32, 64, 128, 256] = 16
    """Maximum rank of low-rank variants; each slot reserves memory for it."""


def _engine_of_kind(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


class ServingConfig(AcceptsAliases):
    """The config of `gym api` and `gym batch`."""

    base: str = "gym-nano"
    """Base model: gym-nano, a model folder, or a name in the local cache."""

    adapter: Folders = Field(default_factory=list)
    """PEFT folders to merge into the base, in order; variants then apply to the merged model."""

    chat_template: str | None = Field(default=None, min_length=1)
    """Chat template instead of the model's: a name such as ``chatml``, a Jinja file, or Jinja text."""

    tool_format: Annotated[str, MemberOf(TOOL_FORMATS, also=("auto",))] = "auto"
    """Format of the model's tool calls. auto follows its chat template; without tools in the template it is
    ``described``: a system message describes them."""

    reasoning_parser: Annotated[str, MemberOf(REASONING_PARSERS, also=("auto", "none"))] = "auto"
    """Parser that separates a model's thought (``reasoning_content``) from its answer. auto follows its chat template;
    none returns the thought as part of the answer."""

    served_name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")
    """Name of the base in the API; a variant is ``<served_name>:<variant>``. By default the base's own name."""

    dtype: Dtype = "float32"
    """dtype of the base's weights."""

    base_format: Literal["auto", "bfloat16", "int8", "int4"] = "auto"
    """Format of the linear layers of Llama, Qwen2, Qwen3 and Mistral on the CPU. auto follows ``dtype``; int8 and int4
    lose a little accuracy. The value projections under int8 and int4 are bfloat16, and so is the head, or int8 under
    int4."""

    packed_size: Bytes = 20 * 10**9
    """Disk space in ~/.gym-fed/packed for bases packed in int8 and int4, which later runs read; the least recently
    used are deleted first. 0: none is written or read."""

    device: str = "auto"
    """Device: ``cpu``, ``cuda`` or ``mps``; auto selects the best one."""

    num_threads: int | None = Field(default=None, ge=1)
    """Number of threads on the CPU; by default torch's own."""

    variants: LocalPath | None = None
    """Folder of the variant store, written by `gym variant`; None to serve only the base.

    Without this key, `gym api` and `gym batch` use the store of `gym variant`, if there is one.
    """

    cache_size: Bytes = 10 * 10**9
    """Maximum memory of variants; the least used are unloaded first, with older uses counting less."""

    require_signature: bool = True
    """True to refuse variants without their owner's valid signature."""

    adapters_folder: LocalPath | None = None
    """Folder of the deltas that keys with ``--manage-variants`` may add over HTTP; None disables this."""

    sampling: SamplingConfig = SamplingConfig()
    engine: Annotated[EngineConfig, BeforeValidator(_engine_of_kind)] = EngineConfig()
    vllm: VllmConfig = VllmConfig()

    host: str = "127.0.0.1"
    """Address to listen on, by default loopback; any other needs API keys."""

    port: int = Field(default=8000, ge=0, le=65_535)
    """Port; 0 selects a free one and prints it."""

    tls: TlsConfig | None = None
    """Certificate and key of HTTPS; None for plain HTTP."""

    root_path: RootPath = ""
    """Path prefix of the URLs at a reverse proxy, such as ``/gym``; the proxy may remove it or pass it on."""

    trusted_proxies: list[ProxyNetwork] = Field(default_factory=list, max_length=64)
    """IP addresses and networks of reverse proxies: from them, ``X-Forwarded-Prefix``, ``X-Forwarded-For`` and
    ``X-Forwarded-Proto`` are used, and ``connections.max_per_address`` does not apply. Needs ``api_keys``."""

    cors_origins: list[WebOrigin] = Field(default_factory=list, max_length=64)
    """Origins of web pages that may call this API from a browser, such as ``https://chat.example.org``."""

    api_keys: LocalPath | None = None
    """File of hashed API keys, written by `gym api keys`; None to accept every client on this machine."""

    usage_log: LocalPath | None = None
    """JSON lines file for usage per user and version, for `gym-server ledger attribute --usage`. Lines that cannot be
    written are counted in ``gym_api_usage_lost_total``."""

    log_format: LogFormat = "text"
    """Format of the log on standard error: lines of text, or one JSON object a line."""

    request_timeout_seconds: float = Field(default=600.0, gt=0)
    """Time limit for a request; then it ends with HTTP 504."""

    connections: ConnectionsConfig = ConnectionsConfig()
    stored_answers: StoredAnswersConfig = StoredAnswersConfig()
    filter: FilterConfig = FilterConfig()

    @model_validator(mode="after")
    def _validate_host(self) -> ServingConfig:
        if self.api_keys is None and self.host not in LOOPBACK:
            raise ValueError(
                f"host {self.host} is open to others, but api_keys is not set: create a key with `gym api keys add`, "
                "or serve on 127.0.0.1"
            )
        if self.api_keys is None and self.trusted_proxies:
            raise ValueError(
                "trusted_proxies opens this server to others, but api_keys is not set: create a key with `gym api "
                "keys add`"
            )
        return self

    @model_validator(mode="after")
    def _validate_vllm(self) -> ServingConfig:
        if self.engine.kind != "vllm" and "vllm" in self.model_fields_set and self.vllm != VllmConfig():
            raise ValueError(
                f"vllm is set, but engine.kind is {self.engine.kind}: set engine: vllm, or remove it"
            )
        return self
