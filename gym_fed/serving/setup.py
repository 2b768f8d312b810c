"""Assemble the parts of a server: the base in memory, its variants, the engine and the service.

with open_serving(ServingConfig(base="gym-nano", variants="variants")) as serving:
    serving.service.handle("/v1/chat/completions", {"model": serving.served_name, "messages": [...]}, LOCAL)
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from gym_fed.base.models import MAX_ADAPTERS, model_name, resolve
from gym_fed.config.schema.base import first_problem
from gym_fed.config.serving import EngineConfig, SamplingConfig, ServingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.registries import ENGINES
from gym_fed.serving.openai.catalogue import Catalogue
from gym_fed.serving.openai.service import OpenAIService
from gym_fed.serving.openai.stored_answers import StoredAnswers
from gym_fed.serving.pictures.reader import PictureReader

if TYPE_CHECKING:
    from gym_fed.delta.base import BaseSpec
    from gym_fed.serving.engines.base import EngineDescription, EngineKind, ServingEngine
    from gym_fed.serving.filter.content_filter import ContentFilter
    from gym_fed.serving.forward.multi_variant import MultiVariantModel
    from gym_fed.serving.http.usage_log import UsageLog
    from gym_fed.serving.store.store import VariantStore


_SERVED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", re.ASCII)
_FINGERPRINT = slice(len("sha256:"), len("sha256:") + 10)


@dataclass(frozen=True)
class Serving:
    """The parts of a running server; must be closed, or used as a context manager.

    Attributes:
        config: The config that it was opened with.
        served_name: The base's name in the API.
        base: The identity of the base, with the digest of its float32 weights.
        tokenizer: The tokenizer of the base, with the template of the config.
        served: The model; None if it is in another process.
        engine: The engine that generates the answers.
        store: The variants; None if only the base is served.
        service: OpenAI's API over the engine.
        usage_log: The log of each caller's tokens; None if there is none.
        content_filter: The filter of requests and answers; None if it is off.
        description: The description of the engine that `gym api` prints.
    """

    config: ServingConfig
    served_name: str
    base: BaseSpec
    tokenizer: Any
    served: MultiVariantModel | None
    engine: ServingEngine
    store: VariantStore | None
    service: OpenAIService
    usage_log: UsageLog | None
    content_filter: ContentFilter | None
    description: EngineDescription
    _closing: ExitStack

    def close(self) -> None:
        """Cancel the running answers, and free all resources. May be called repeatedly."""
        self._closing.close()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_serving(config: ServingConfig) -> Serving:
    """Load the base, open its variants, and start the engine.

    Raises:
        GymError: Errors from ``sampling_defaults`` and the engine's ``check`` and ``open``; ``CONFIG_INVALID`` without
            ``served_name`` for a base whose name the API cannot use.
    """
    from gym_fed.data.chat_templates.choice import read_chat_template

    name = _served_name(config)
    if config.chat_template is not None:
        read_chat_template(config.chat_template)  # raise before the base is loaded
    content_filter = _content_filter(config)
    defaults = sampling_defaults(Path(resolve(config.base)), config.sampling)
    kind: EngineKind = ENGINES.new(config.engine.kind)
    kind.check(config)
    with ExitStack() as stack:
        opened = kind.open(config, stack)
        base, store, pictures = opened.base, opened.store, opened.pictures
        reads = pictures.kinds if isinstance(pictures, PictureReader) else frozenset()
        usage_log = _usage_log(config, base, stack)
        service = OpenAIService(
            opened.engine,
            Catalogue(name, store, base.digest, reads=reads),
            opened.tokenizer,
            vocab_size=opened.vocab_size,
            fingerprint=f"fp_{base.digest[_FINGERPRINT]}",
            max_at_once=_max_at_once(config.engine),
            context=opened.engine.limits.context,
            on_use=None if usage_log is None else usage_log.write,
            content_filter=content_filter,
            tool_format=config.tool_format,
            reasoning_parser=config.reasoning_parser,
            stored=StoredAnswers(config.stored_answers) if config.stored_answers.bytes_per_key else None,
            embedding_size=opened.embedding_size,
            pictures=pictures,
            sampling_defaults=defaults,
            vocabularies=opened.vocabularies,
        )
        return Serving(
            config,
            name,
            base,
            opened.tokenizer,
            opened.served,
            opened.engine,
            store,
            service,
            usage_log,
            content_filter,
            opened.description,
            stack.pop_all(),
        )
    raise AssertionError("unreachable: an ExitStack without callbacks swallows nothing")


def _served_name(config: ServingConfig) -> str:
    name = config.served_name or model_name(config.base)
    if not _SERVED_NAME.fullmatch(name):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"the base's name {name!r} cannot be used in the API",
            "set served_name to letters, digits, '.', '_', '-' and '/'",
        )
    return name


def _max_at_once(config: EngineConfig) -> int:
    """Return the maximum number of requests that one user can have on an otherwise idle server."""
    return config.max_concurrent + min(config.max_queued, config.max_queued_per_user)


def _content_filter(config: ServingConfig) -> ContentFilter | None:
    if not config.filter.on:
        return None
    from gym_fed.serving.filter.content_filter import ContentFilter

    return ContentFilter(config.filter)


def _usage_log(config: ServingConfig, base: BaseSpec, stack: ExitStack) -> UsageLog | None:
    if config.usage_log is None:
        return None
    from gym_fed.serving.http.usage_log import UsageLog

    log = UsageLog(config.usage_log, base.digest)
    stack.callback(log.close)
    return log


FILE = "generation_config.json"


def sampling_defaults(folder: Path, config: SamplingConfig) -> dict[str, Any]:
    """Collect default sampling fields: those that ``config`` sets, then those of generation_config.json.

    An adapter's folder without such a file uses that of its base. ``do_sample: false`` means temperature 0. Fields that
    neither of them sets are omitted, so that OpenAI's defaults apply.

    Raises:
        GymError: ``MODEL_INVALID`` for a value in the file that requests may not have; errors from ``resolve``.
    """
    set_here = config.model_dump(exclude_none=True)
    file = _file_of(folder)
    if file is None:
        return set_here
    written = read_object(file)
    values = {name: written.get(name) for name in SamplingConfig.model_fields}
    if written.get("do_sample") is False:
        values["temperature"] = 0.0
    theirs = {name: value for name, value in values.items() if value is not None and name not in set_here}
    try:
        checked = SamplingConfig.model_validate(theirs)
    except ValidationError as error:
        problem = first_problem(error)
        name = problem.partition(":")[0]
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{file}: {problem}",
            f"correct it, or serve with --set sampling.{name}=...",
        ) from error
    return {**checked.model_dump(exclude_none=True), **set_here}


def _file_of(folder: Path) -> Path | None:
    """Find the file of a model, an adapter, or the base of an adapter; None if there is none."""
    for _ in range(MAX_ADAPTERS):
        if (file := folder / FILE).is_file():
            return file
        adapter = folder / "adapter_config.json"
        base = read_object(adapter).get("base_model_name_or_path") if adapter.is_file() else None
        if not isinstance(base, str) or not base:
            return None  # loading the model will report the missing base
        folder = Path(resolve(base))
    return None
