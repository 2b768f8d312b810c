"""Endpoints that tokenize and count tokens without running the model, and vLLM's endpoints for LoRA adapters.

A request for an adapter adds or removes a variant. It carries no weights: it names a `.gymdelta` in one folder on the
server. Next to it is the manifest that its owner signed, ``NAME.gymdelta.json``, written by `gym variant sign`.
Without that file the variant is unsigned, and a store that requires signatures refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field, model_validator

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.openai.catalogue import Caller, Catalogue
from gym_fed.serving.openai.fields import PromptEndFields, RequestModel, off, only, parse, unsupported
from gym_fed.serving.openai.prompts import Prompts, VariantPrompts
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.responses import RESPONSES, ResponsesAsChat, earlier_turns
from gym_fed.serving.openai.responses_request import RESPONSES_NEUTRAL, ResponsesRequest
from gym_fed.serving.openai.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    InstructionMessage,
    Message,
    TokenId,
    Tool,
    UserMessage,
)
from gym_fed.serving.openai.stored_answers import StoredAnswers
from gym_fed.serving.openai.tool_template import ToolUse
from gym_fed.serving.pictures.reader import ExpandedPrompt
from gym_fed.trust.identity.variant import MAX_MANIFEST_BYTES, SignedVariant

if TYPE_CHECKING:
    from gym_fed.serving.store.store import VariantStore


TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
MAX_TOKEN_IDS = 2**20


class TokenizeRequest(PromptEndFields):
    """A text, or messages to be rendered with the chat template."""

    model: Annotated[str, Field(max_length=256)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    """True to add the tokenizer's BOS and EOS tokens to a text; a chat template adds its own."""

    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _validate_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise off("prompt", "send prompt or messages")
        if self.messages is None and self.tools is not None:
            raise off("tools", "tools need messages")
        if self.messages is None and not self.prompt_end["add_generation_prompt"]:
            field = "continue_final_message" if self.continue_final_message else "add_generation_prompt"
            raise off(field, f"{field} needs messages")
        if self.messages is not None and self.add_special_tokens:
            raise off("add_special_tokens", "the chat template adds them; omit it, or send false")
        return self


class DetokenizeRequest(RequestModel):
    """Token ids to decode."""

    model: Annotated[str, Field(max_length=256)] | None = None
    tokens: list[TokenId] = Field(max_length=MAX_TOKEN_IDS)


class Tokenizing:
    """Answers ``/tokenize`` and ``/detokenize``.

    Args:
        catalogue: The models that may be named; the base is the default.
        prompts: Function that returns the prompts of a variant, or of the base for None.
        context: Tokens of the prompt and the answer together.
    """

    def __init__(
        self, catalogue: Catalogue, prompts: Callable[[str | None], Prompts], context: int | None
    ) -> None:
        self._catalogue = catalogue
        self._prompts = prompts
        self._context = context

    def answer(self, url: str, body: Any, caller: Caller) -> dict[str, Any]:
        """Answer a request without running the model.

        Raises:
            RequestError: If it is refused, for the same reasons as a completion's prompt.
        """
        if url == DETOKENIZE:
            given = parse(DetokenizeRequest, body, {})
            prompts = self._prompts_of(given.model, caller)
            prompts.require_known(given.tokens, "tokens")
            return {"prompt": prompts.text(given.tokens, special=True)}
        request = parse(TokenizeRequest, body, {})
        prompts = self._prompts_of(request.model, caller)
        ids = _ids_of(request, prompts)
        strings = prompts.pieces(ids) if request.return_token_strs else None
        return {"count": len(ids), "max_model_len": self._context, "tokens": ids, "token_strs": strings}

    def _prompts_of(self, name: str | None, caller: Caller) -> Prompts:
        model = self._catalogue.resolve(name or self._catalogue.served_name, caller)
        return self._prompts(model.variant)


def _ids_of(request: TokenizeRequest, prompts: Prompts) -> list[int]:
    if request.messages is not None:
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or []]
        seen = prompts.pictures_of(request.messages)
        return prompts.expanded(request.messages, seen, tools=tools or None, **request.prompt_end).ids
    if not request.prompt:
        return []
    return prompts.of_input(request.prompt, "prompt", special=request.add_special_tokens is not False)


PromptT = TypeVar("PromptT", bound=Sized)
Render = Callable[[list[Message]], PromptT]
"""A function that renders messages to a prompt of token ids; raises ``context_length_exceeded`` if it is far too
long."""

_ROOM = 4
"""Divisor of the context: at most a quarter of it is reserved for an answer."""


def ids_that_fit(
    messages: Sequence[Message], render: Render[PromptT], context: int | None, max_tokens: int | None
) -> PromptT:
    """Render a conversation, dropping as many of its oldest turns as needed to fit.

    A turn is a question and everything up to the next one, so calls stay with their results. System messages and the
    last turn are always included.

    Args:
        messages: The conversation.
        render: Function that renders a part of the conversation.
        context: Tokens of the prompt and the answer together; None: nothing is dropped.
        max_tokens: Maximum number of tokens of the answer, for which at most a quarter of the context is reserved.

    Raises:
        RequestError: Errors from ``render``; ``context_length_exceeded`` only for the last turn alone.
    """
    if context is None:
        return render(list(messages))
    starts = [index for index, message in enumerate(messages) if isinstance(message, UserMessage)]
    max_prompt = context - min(max_tokens or context, context // _ROOM)

    def from_turn(turn: int) -> list[Message]:
        if turn == 0:
            return list(messages)
        first = starts[turn]
        return [
            item
            for index, item in enumerate(messages)
            if index >= first or isinstance(item, InstructionMessage)
        ]

    def fitting(turn: int) -> PromptT | None:
        try:
            ids = render(from_turn(turn))
        except RequestError as error:
            if error.name != "context_length_exceeded":
                raise
            return None
        return ids if len(ids) <= max_prompt else None

    if (prompt := fitting(0)) is not None:
        return prompt
    low, high = 1, len(starts)  # binary search for the first turn from which the conversation fits
    while low < high:
        middle = (low + high) // 2
        if (ids := fitting(middle)) is not None:
            prompt, high = ids, middle
        else:
            low = middle + 1
    return prompt if prompt is not None else render(from_turn(max(len(starts) - 1, 0)))


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_SUFFIX = ".gymdelta"


class LoadRequest(RequestModel):
    """The body of a request to add a variant."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool | None = None
    """True to replace the variant with this name."""

    base_model_name: Annotated[Any, only()] = None


class UnloadRequest(RequestModel):
    """The body of a request to remove a variant."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: Annotated[Any, only()] = None


class Adapters:
    """Adds variants to a store, and removes them.

    Args:
        store: The store; None: only the base is served.
        folder: The folder that holds the deltas; None: nothing can be added.
        catalogue: The catalogue of the same store.
    """

    def __init__(self, store: VariantStore | None, folder: Path | None, catalogue: Catalogue) -> None:
        self._store = store
        self._folder = folder
        self._catalogue = catalogue

    def answer(self, url: str, body: Any, caller: Caller) -> str:
        """Add or remove a variant, durably on return and in effect from the next request to any server.

        Raises:
            GymError: ``PERMISSION_DENIED`` for a key without this permission; errors from ``VariantStore.add``.
        """
        if not caller.manage_variants:
            raise RequestError(
                "this key may not add or remove variants",
                code=ErrorCode.PERMISSION_DENIED,
                hint="create one that may: gym api keys add NAME --manage-variants",
            )
        if self._store is None:
            raise RequestError("this server serves only its base", hint="start it with variants")
        if url == LOAD:
            return self._load(self._store, parse(LoadRequest, body, {}), caller)
        return self._unload(self._store, parse(UnloadRequest, body, {}), caller)

    def _load(self, store: VariantStore, request: LoadRequest, caller: Caller) -> str:
        name = self._variant(request.lora_name)
        delta = self._inside(request.lora_path)
        signed = _signed_manifest(delta)
        owner = caller.name if signed is None else signed.manifest.owner
        store.add(delta, signed, name=name, owner=owner, replace=bool(request.load_inplace))
        return f"Success: LoRA adapter '{request.lora_name}' added successfully."

    def _unload(self, store: VariantStore, request: UnloadRequest, caller: Caller) -> str:
        model = self._catalogue.resolve(
            f"{self._catalogue.served_name}:{self._variant(request.lora_name)}", caller
        )
        assert model.variant is not None
        store.remove(model.variant)
        return f"Success: LoRA adapter '{request.lora_name}' removed successfully."

    def _variant(self, name: str) -> str:
        """Return a variant's own name, given that name or the API's model name."""
        return name.removeprefix(f"{self._catalogue.served_name}:")

    def _inside(self, given: str) -> Path:
        """Return the path of a file in the folder; missing files and paths outside the folder raise the same error."""
        if self._folder is None:
            raise RequestError(
                "this server has no folder for adapters",
                param="lora_path",
                code=ErrorCode.PERMISSION_DENIED,
                hint="set adapters_folder in serving.yaml",
            )
        try:
            folder = self._folder.expanduser().resolve()
            path = (folder / given).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            path = None
        if path is None or not path.is_relative_to(folder) or path.suffix != _SUFFIX or not path.is_file():
            raise RequestError(
                f"no {_SUFFIX} of that name is in the server's adapters_folder",
                param="lora_path",
                code=ErrorCode.FILE_NOT_FOUND,
                hint="use a file in it; `gym delta encode` creates one from a fine-tune or a LoRA adapter",
            )
        return path


def _signed_manifest(delta: Path) -> SignedVariant | None:
    """Read the signed manifest of a delta, if there is one.

    Raises:
        GymError: See ``SignedVariant.parse``.
    """
    try:
        with manifest_path(delta).open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        return None
    try:
        return SignedVariant.parse(data.decode().strip())
    except UnicodeDecodeError as error:
        raise GymError(ErrorCode.SIGNATURE_INVALID, "the manifest of the delta is not text") from error


def manifest_path(delta: Path) -> Path:
    """Return the path of the manifest next to a delta."""
    return delta.with_name(f"{delta.name}.json")


INPUT_TOKENS = f"{RESPONSES}/input_tokens"
_FIELDS = frozenset(
    {
        *("conversation", "input", "instructions", "model", "parallel_tool_calls", "previous_response_id"),
        *("reasoning", "text", "tool_choice", "tools", "truncation", "chat_template_kwargs"),
    }
)


def count_input_tokens(
    body: Any,
    caller: Caller,
    catalogue: Catalogue,
    prompts: VariantPrompts,
    context: int | None,
    stored: StoredAnswers | None,
) -> dict[str, Any]:
    """Count the input tokens of a request to the Responses API, with the prompt that its answer would have.

    Args:
        body: The parsed JSON.
        caller: The authenticated user.
        catalogue: The models that may be named; the base is the default.
        prompts: The prompts of each variant.
        context: Maximum number of tokens of the prompt and the answer together.
        stored: The store of earlier responses; None if there is none.

    Raises:
        GymError: See ``begin_response``; also for fields that do not apply to a count.
    """
    if isinstance(body, Mapping):
        for name in body.keys() - _FIELDS:
            raise unsupported(str(name)[:80])
        body = {**body, "model": catalogue.served_name if body.get("model") is None else body["model"]}
    request = parse(ResponsesRequest, body, RESPONSES_NEUTRAL)
    as_chat = ResponsesAsChat(request, earlier_turns(request.previous_response_id, caller, stored))
    with as_chat.errors():
        chat = as_chat.chat()
        own = prompts(catalogue.resolve(chat.model, caller).variant)
        prompt, _, _ = chat_prompt(own, chat, context if request.truncation == "auto" else None)
    return {"object": "response.input_tokens", "input_tokens": len(prompt)}


def chat_prompt(
    prompts: Prompts, request: ChatRequest, context: int | None
) -> tuple[ExpandedPrompt, ToolUse, dict[str, Any]]:
    """Render a chat request.

    Args:
        prompts: The prompts of the model.
        request: The request.
        context: The context in tokens, to fit into by dropping the oldest turns; None: keep all turns.

    Returns:
        The prompt, its tools, and the variables of the chat template.
    """
    tools, variables = ToolUse(request, prompts.tools), prompts.names.of(request)
    seen = prompts.pictures_of(request.messages)
    how: dict[str, Any] = {"tools": tools.shown, "open_call": tools.required, "variables": variables}
    how |= request.prompt_end
    render = partial(prompts.expanded, seen=seen, **how)
    return ids_that_fit(request.messages, render, context, request.longest), tools, variables
