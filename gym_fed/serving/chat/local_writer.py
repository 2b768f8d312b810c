"""Chat with a model in this process, through the same service as `gym api`."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.serving.openai.catalogue import LOCAL, Caller
from gym_fed.serving.openai.refusals import RequestError

if TYPE_CHECKING:
    from gym_fed.serving.setup import Serving

_UNSERVABLE = re.compile(r"[^A-Za-z0-9._/-]")


class Service(Protocol):
    """The method of ``OpenAIService`` that a ``LocalWriter`` uses."""

    def stream(self, url: str, body: Any, caller: Caller) -> Generator[dict[str, Any]]: ...


class LocalWriter:
    """A ``Writer`` over a service in this process.

    Args:
        service: The service that generates the answers.
        base: The served name.
        tokenizer: The tokenizer, for counting the tokens of a prompt.
        context: Maximum number of tokens of the prompt and the answer together.
        count: Function that counts the tokens of messages with attachments.
        variants: Function that returns the current names of variants.
        on_close: Function that frees the model and the engine.
        sampling_defaults: The model's own sampling fields, from generation_config.json.
    """

    def __init__(
        self,
        service: Service,
        *,
        base: str,
        tokenizer: Any,
        context: int,
        count: Callable[[list[dict[str, Any]]], int],
        variants: Callable[[], list[str]] = list,
        on_close: Callable[[], None] = lambda: None,
        sampling_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.sampling_defaults = dict(sampling_defaults or {})
        self.base = base
        self.variants = variants
        self.close = on_close
        self._service = service
        self._tokenizer = tokenizer
        self._context = context
        self._count = count

    @property
    def remembers(self) -> bool:
        """True if the tokenizer has a chat template."""
        return bool(self._tokenizer.chat_template)

    def write(self, url: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """Stream an answer; half of the context, or ``max_tokens`` if less, is reserved for it. See ``Writer``."""
        requested = body.get("max_tokens") or self._context
        with _as_too_large():
            length = self._length(body)
        room = self._context - min(requested, self._context // 2)
        if length > room:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"the message takes {counted(length, 'token')}, but the model has room for {room}",
                "shorten it, or lower max_tokens",
            )
        most = min(requested, self._context - length)
        with (
            _as_too_large(),
            closing(self._service.stream(url, {**body, "max_tokens": most}, LOCAL)) as chunks,
        ):
            yield from chunks

    def _length(self, body: dict[str, Any]) -> int:
        """Return the number of tokens of the prompt."""
        from gym_fed.data.encoding import prompt_ids

        messages = body.get("messages")
        if messages is not None and any(not isinstance(message["content"], str) for message in messages):
            return self._count(messages)
        return len(prompt_ids(self._tokenizer, body["prompt"] if messages is None else messages))


@contextmanager
def _as_too_large() -> Iterator[None]:
    """Convert the service's refusal of a prompt that is too long to ``TOO_LARGE``, as ``Writer`` requires."""
    try:
        yield
    except RequestError as error:
        if error.name != "context_length_exceeded":
            raise
        raise GymError(ErrorCode.TOO_LARGE, error.message, error.hint) from error


def open_engine(
    model: str,
    *,
    adapters: Sequence[str] = (),
    variants: Path | None = None,
    device: str = "auto",
    chat_template: str | None = None,
) -> LocalWriter:
    """Open a model and its variants in the engine, for one conversation.

    Args:
        model: A name or folder for ``load_model``; adapters are merged.
        adapters: Further PEFT folders to merge, in this order.
        variants: The folder of a variant store.
        device: See ``pick_device``.
        chat_template: See ``ServingConfig``.

    Raises:
        GymError: Errors from ``open_serving``; ``MODEL_INVALID`` for a model that the engine cannot serve.
    """
    from gym_fed.base.models import model_name
    from gym_fed.config.serving import EngineConfig, ServingConfig
    from gym_fed.serving.openai.tokenizing import TOKENIZE
    from gym_fed.serving.setup import open_serving

    require_store(variants)
    for name in (model, *adapters):
        _require_mergeable(name)
    serving = open_serving(
        ServingConfig(
            base=model,
            adapter=list(adapters),
            chat_template=chat_template,
            served_name=_UNSERVABLE.sub("-", model_name(model)).lstrip("._/-")[:128] or "model",
            variants=variants,
            device=device,
            engine=EngineConfig(max_concurrent=1),
        )
    )
    return LocalWriter(
        serving.service,
        base=serving.served_name,
        tokenizer=serving.tokenizer,
        context=serving.engine.limits.context,
        count=lambda messages: int(
            serving.service.tokenizing.answer(TOKENIZE, {"messages": messages}, LOCAL)["count"]
        ),
        variants=lambda: _names(serving),
        on_close=serving.close,
        sampling_defaults=serving.service.sampling_defaults,
    )


def _names(serving: Serving) -> list[str]:
    """Return the names of the store's variants of this base."""
    if serving.store is None:
        return []
    return [record.name for record in serving.store.list() if record.base_digest == serving.base.digest]


def open_plain(
    model: str, *, adapters: Sequence[str] = (), device: str = "auto", chat_template: str | None = None
) -> LocalWriter:
    """Open a model that the engine cannot serve, with transformers' own ``generate``."""
    from gym_fed.base.models import load_adapted, model_name, resolve
    from gym_fed.config.serving import SamplingConfig
    from gym_fed.data.chat_templates.choice import use_chat_template
    from gym_fed.serving.chat.plain_writer import PlainGeneration
    from gym_fed.serving.setup import sampling_defaults

    loaded = load_adapted(model, adapters, device=device, images=True)
    tokenizer = use_chat_template(loaded.tokenizer, chat_template)
    return LocalWriter(
        PlainGeneration(loaded.model, tokenizer),
        base=model_name(model),
        tokenizer=tokenizer,
        context=int(getattr(loaded.model.config, "max_position_embeddings", 2048)),
        count=_refuse_attachments,
        sampling_defaults=sampling_defaults(Path(resolve(model)), SamplingConfig()),
    )


def _refuse_attachments(_messages: list[dict[str, Any]]) -> int:
    raise GymError(
        ErrorCode.USAGE,
        "attachments are supported only for models that the engine serves",
        "send the message without attachments",
    )


def require_store(folder: Path | None) -> None:
    """Refuse a folder without variants, instead of creating an empty store there.

    Raises:
        GymError: ``FILE_NOT_FOUND``.
    """
    if folder is not None:
        from gym_fed.serving.store.store import VariantStore

        VariantStore.open(folder, create=False).close()


def _require_mergeable(model: str) -> None:
    """Refuse a prompt-learning adapter, which cannot be merged into weights."""
    from gym_fed.base.models import resolve

    folder = Path(resolve(model))
    if not (folder / "adapter_config.json").is_file():
        return
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(folder))
    if config.is_prompt_learning:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{model} cannot be served: {getattr(config.peft_type, 'value', config.peft_type)} does not change weights",
            "serve its base, or use a different type of adapter",
        )
