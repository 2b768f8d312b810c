"""The graders that reward answers: the ``rewards`` list of a config, one entry a grader."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gym_fed.config.base import StrictModel

Device = Literal["auto", "cpu", "cuda", "mps"]


class GraderConfig(StrictModel):
    """What every entry has beside the keys of its own grader."""

    weight: float = 1.0
    """The grader's value is multiplied by this; a negative weight is a penalty."""

    clip: tuple[float, float] | None = None
    """Lowest and highest value of the grader, before the weight."""

    name: str | None = Field(default=None, min_length=1)
    """How the reward is called in metrics; by default the grader's own name."""

    @model_validator(mode="after")
    def _clip_is_a_range(self) -> GraderConfig:
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError("clip: the first number must be below the second")
        return self


class ExactConfig(GraderConfig):
    """1 where the answer is the reference, else 0."""

    grader: Literal["exact"]
    column: str = "answer"
    """The row's column that holds the reference, or a list of references any of which is right."""

    ignore_case: bool = False
    whitespace: Literal["exact", "strip", "collapse"] = "strip"
    """``strip`` ignores it at both ends, ``collapse`` also makes every run of it one space."""


class RegexConfig(GraderConfig):
    """1 where a pattern is found, and says the reference if ``column`` is given, else 0."""

    grader: Literal["regex"]
    pattern: str
    """Searched anywhere in the answer. With ``column`` its group ``answer``, else its first group, is compared."""

    column: str | None = None
    """The row's column that the group must equal, white space at the ends aside."""

    occurrence: Literal["first", "last"] = "first"
    """Which match is compared."""

    ignore_case: bool = False
    timeout_seconds: float = Field(default=1.0, gt=0)
    """A search that takes longer, as some patterns do on some texts, counts as not found."""


class NumericConfig(GraderConfig):
    """1 where the answer's number is the reference's, else 0."""

    grader: Literal["numeric"]
    column: str = "answer"
    where: Literal["auto", "last", "hashes", "boxed"] = "auto"
    r"""Which number counts: the last one, the one behind ``####`` (GSM8K), or in the last ``\boxed{}``; ``auto`` takes
    ``####`` if there is one, else ``\boxed{}``, else the last."""

    absolute_tolerance: float = Field(default=0.0, ge=0)
    relative_tolerance: float = Field(default=0.0, ge=0)
    """Share of the reference; a number is right when either tolerance allows it."""


class JsonSchemaConfig(GraderConfig):
    """1 where the answer is JSON that a schema allows, else 0."""

    grader: Literal["json_schema"]
    json_schema: dict[str, Any] | None = None
    """The schema of every answer. Either this or ``column``. References outside it are not fetched."""

    column: str | None = None
    """The row's column that holds the schema, as a mapping or as text."""

    parsed_reward: float = Field(default=0.0, ge=0, le=1)
    """For JSON that the schema refuses."""

    @model_validator(mode="after")
    def _one_schema(self) -> JsonSchemaConfig:
        if (self.json_schema is None) == (self.column is None):
            raise ValueError("give either json_schema or column")
        return self


class LengthConfig(GraderConfig):
    """1 where the answer's length is in a range; outside it falls in a straight line to 0."""

    grader: Literal["length"]
    unit: Literal["characters", "words", "tokens"] = "words"
    min: int = Field(default=0, ge=0)
    max: int | None = Field(default=None, ge=0)
    soft: int = Field(default=0, ge=0)
    """How far outside the range the reward is 0 only; 0 makes the edges hard."""

    tokenizer: str | None = None
    """For tokens: the model whose tokenizer counts."""

    @model_validator(mode="after")
    def _range(self) -> LengthConfig:
        if (self.unit == "tokens") != (self.tokenizer is not None):
            raise ValueError("tokenizer belongs to unit tokens, which needs it")
        if self.max is not None and self.max < self.min:
            raise ValueError("max is below min")
        if self.max is None and self.min == 0:
            raise ValueError("give min, max or both")
        return self


class CodeTestsConfig(GraderConfig):
    """1 where the answer's Python code passes the row's tests in a sandbox, else 0."""

    grader: Literal["code_tests"]
    column: str = "tests"
    """The row's column with the tests: Python source, or a list of sources. A HumanEval row's ``entry_point`` is
    called as ``check(entry_point)`` behind them."""

    continues_prompt: bool = False
    """The answer goes on where the prompt's code ends, as in HumanEval; else it stands alone."""

    partial: bool = False
    """Of a list of tests, reward the share that pass, each in a process of its own; else all must pass."""

    isolation: Literal["namespaces", "process"] = "namespaces"
    """``namespaces`` (Linux) cuts off the network and all files but Python's; ``process`` has resource limits only,
    for machines inside which namespaces are forbidden and whose files may be lost."""

    timeout_seconds: float = Field(default=5.0, gt=0, le=600)
    """Wall time for each program; CPU time is limited to the same, rounded up."""

    memory_bytes: int = Field(default=512 * 2**20, ge=64 * 2**20)
    """Address space of each process."""

    max_file_bytes: int = Field(default=16 * 2**20, ge=1)
    """Largest file; under ``namespaces`` all files together."""

    max_processes: int = Field(default=16, ge=1)
    """Processes and threads a program may have. Under ``process`` all of the user's count, so there it is often
    the machine's other work that reaches it, and root is not bound by it."""

    workers: int = Field(default=2, ge=1, le=256)
    """Programs that run at once."""


class RewardModelConfig(GraderConfig):
    """The score of a trained reward model."""

    grader: Literal["reward_model"]
    model: str
    """A finished run of ``algorithm: reward_model``, full or adapter, or another sequence classifier with one label."""

    batch_size: int = Field(default=16, ge=1)
    max_length: int = Field(default=1024, ge=8)
    """Longer conversations lose their beginning."""

    device: Device = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


_JUDGE_PROMPT = """You judge answers. Below are a question, a reference answer (which may be empty) and an answer.
Say in one sentence what is right and wrong about the answer, then end with a line of the form "Score: N", \
where N is a number from 0 (useless) to 10 (perfect).

Question:
{prompt}

Reference answer:
{answer}

Answer:
{completion}
"""


class JudgeConfig(GraderConfig):
    """What another model thinks of the answer, asked through any OpenAI-compatible endpoint."""

    grader: Literal["judge"]
    model: str
    base_url: str = Field(pattern=r"^https?://")
    """Such as ``http://localhost:8000/v1``."""

    api_key_env: str | None = None
    """The environment variable that holds the key. The key itself is never in a config."""

    prompt: str = _JUDGE_PROMPT
    """What the judge is asked; ``{prompt}``, ``{completion}`` and ``{answer}`` (the row's, or nothing) are put in."""

    score_pattern: str = r"[Ss]core:\s*(-?\d+(?:\.\d+)?)"
    """Where the score stands in what the judge says: the first group of the last match."""

    score_range: tuple[float, float] = (0.0, 10.0)
    """Scores become 0 to 1; one outside the range counts as none."""

    unscored_reward: float | None = None
    """For answers to which the judge gave no score; by default that is an error."""

    temperature: float = Field(default=0.0, ge=0)
    max_tokens: int = Field(default=512, ge=1)
    retries: int = Field(default=4, ge=0)
    """After time-outs, lost connections, and statuses 408, 409, 429 and 5xx, waiting longer each time."""

    timeout_seconds: float = Field(default=60.0, gt=0)
    workers: int = Field(default=8, ge=1, le=256)
    """Questions at once."""

    cache: Path | None = None
    """A file in which what the judge said is kept, for this run and others; by default only while this one lasts."""

    @model_validator(mode="after")
    def _asks_about_the_answer(self) -> JudgeConfig:
        if "{completion}" not in self.prompt:
            raise ValueError("prompt does not contain {completion}, so the judge would not see the answer")
        if not self.score_range[0] < self.score_range[1]:
            raise ValueError("score_range: the first number must be below the second")
        return self


class RemoteConfig(GraderConfig):
    """What a reward server says."""

    grader: Literal["remote"]
    url: str = Field(pattern=r"^https?://")
    """Where samples are posted; docs/graders.md has the wire format."""

    token_env: str | None = None
    """The environment variable whose value is sent as a bearer token."""

    batch_size: int = Field(default=64, ge=1)
    """Samples in one request."""

    retries: int = Field(default=4, ge=0)
    """After lost connections and statuses 429 and 5xx, waiting longer each time."""

    timeout_seconds: float = Field(default=60.0, gt=0)
    max_request_bytes: int = Field(default=16 * 2**20, ge=1)
    max_response_bytes: int = Field(default=2**20, ge=1)


AnyGraderConfig = (
    ExactConfig
    | RegexConfig
    | NumericConfig
    | JsonSchemaConfig
    | LengthConfig
    | CodeTestsConfig
    | RewardModelConfig
    | JudgeConfig
    | RemoteConfig
)


class RewardSections(StrictModel):
    """Keys of the YAML's top level."""

    rewards: list[Annotated[AnyGraderConfig, Field(discriminator="grader")]] = Field(default_factory=list)
    """What rewards an answer, for ``ppo``, ``grpo``, ``gspo`` and ``rloo``; the rewards are summed by weight."""

    @model_validator(mode="after")
    def _names_differ(self) -> RewardSections:
        names = [entry.name or entry.grader for entry in self.rewards]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"rewards: two graders are called {twice!r}; give one of them another name")
        if self.rewards and all(entry.weight == 0 for entry in self.rewards):
            raise ValueError("rewards: every weight is 0")
        return self
