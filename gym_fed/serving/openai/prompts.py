"""Render messages or text to token ids with the tokenizer's chat template."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from queue import LifoQueue
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from gym_fed.core.text import counted
from gym_fed.core.tokenizer_errors import tokenizer_errors
from gym_fed.data.encoding import without_second_bos
from gym_fed.serving.engine.detokenizing import TextDecoder
from gym_fed.serving.filter.content_filter import texts_in
from gym_fed.serving.openai.chat_template import ContentParts, TemplateNames
from gym_fed.serving.openai.refusals import RequestError, unsupported_parameter
from gym_fed.serving.openai.schemas import AssistantMessage, Message, ToolMessage, UserMessage, text_of
from gym_fed.serving.openai.tool_template import AUTO, ToolTemplate
from gym_fed.serving.pictures.reader import ExpandedPrompt, MessagePictures, NoPictures, PictureReader
from gym_fed.serving.reasoning.base import TAIL_TOKENS, ReasoningParser, Thinking
from gym_fed.serving.reasoning.detection import NONE, name_of, reasoning_parser

if TYPE_CHECKING:
    from gym_fed.serving.engine.vocabularies import Vocabularies, Vocabulary
    from gym_fed.serving.forward.chunk import PlacedPicture


_COPIES = 2
TEXT_ONLY = NoPictures()
_CHARACTERS_A_TOKEN = 8
"""An upper bound on the characters per token of ordinary text, which determines the prefix that is tokenized first."""


class Prompts:
    """Renders prompts with one tokenizer. Thread-safe.

    Of a text that is too long, only a prefix is tokenized, so that no request occupies a tokenizer for long.

    Only the template writes control tokens. ``<|im_end|>`` in a message is tokenized as plain characters, so that no
    text, such as a tool's result or a quoted page, can end its message and begin another.

    Args:
        tokenizer: The tokenizer of the base model. It is copied, because it may be in use in another thread.
        vocab_size: Number of rows of the model's embedding; token ids must be below it.
        context: Context length in tokens, for the prompt and the answer together; None: only the engine checks lengths.
        tool_format: The format of the model's tool calls; ``auto`` detects it from the template.
        reasoning_parser: The parser of the model's thoughts; ``auto`` detects it from the template.
        pictures: The reader of pictures in messages, or a ``NoPictures`` that refuses them.

    Attributes:
        tools: Tool calls in the format of the template.
        names: The variables of the template.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        context: int | None = None,
        tool_format: str = AUTO,
        reasoning_parser: str = NONE,
        pictures: PictureReader | NoPictures = TEXT_ONLY,
    ) -> None:
        self._vocab_size = vocab_size
        self._context = context
        self._has_template = bool(tokenizer.chat_template)
        # transformers' fast tokenizers must not be used from two threads at once.
        self._free: LifoQueue[Any] = LifoQueue()
        # It is shared because it never changes; with thousands of added tokens, copying it would take most of the time.
        shared = getattr(tokenizer, "init_kwargs", None)
        for _ in range(_COPIES):  # copies of a plain tokenizer share its large parts
            self._free.put(copy.deepcopy(tokenizer, {id(shared): shared}))
        control = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.tools = ToolTemplate(self._render, control, tool_format, lambda: name_of(self.reasoning))
        self._reasoning_parser = reasoning_parser
        self.names = TemplateNames(tokenizer)
        self.pictures = pictures
        self._parts = ContentParts(self._plain) if isinstance(pictures, PictureReader) else None

    @cached_property
    def reasoning(self) -> ReasoningParser | None:
        """The parser of the model's thoughts; None if its answers have none."""
        with self._borrowed_tokenizer() as tokenizer:
            return reasoning_parser(self._reasoning_parser, tokenizer)

    def thinking(
        self, prompt_ids: list[int], budget: int | None, continued: str | None = None
    ) -> Thinking | None:
        """Return how an answer to this prompt may think; None if it cannot think.

        Args:
            prompt_ids: The prompt.
            budget: Maximum number of tokens of the thought.
            continued: The text of the message that the answer continues; None: it begins a message.

        Raises:
            RequestError: For a budget if the model's answers have no thoughts.
        """
        if self.reasoning is None:
            if budget is not None:
                raise unsupported_parameter(
                    "thinking_token_budget",
                    "field 'thinking_token_budget' is not supported: this model's thoughts are not parsed",
                    "omit it, or set the server's reasoning_parser",
                )
            return None
        with self._borrowed_tokenizer() as tokenizer:
            tail = str(tokenizer.decode(prompt_ids[-TAIL_TOKENS:], skip_special_tokens=False))
        return Thinking(self.reasoning, tail, budget, continued)

    def pictures_of(self, messages: list[Message]) -> MessagePictures:
        """Read the pictures of a request.

        Raises:
            RequestError: See ``MessagePictures``.
        """
        return MessagePictures(messages, self.pictures)

    def expanded(self, messages: list[Message], seen: MessagePictures, **how: Any) -> ExpandedPrompt:
        """Render messages as in ``of_messages``, and insert the tokens of their media."""
        return seen.expand(self.of_messages(messages, **how), messages, self._context)

    def placed(self, prompt: ExpandedPrompt, owner: str) -> tuple[PlacedPicture, ...]:
        """Return the pictures of a prompt, with their features, for the engine; ``owner`` is the calling account."""
        return self.pictures.placed(prompt, owner) if isinstance(self.pictures, PictureReader) else ()

    def of_messages(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        *,
        open_call: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Render a conversation to token ids, up to the beginning of the assistant's answer.

        Args:
            messages: The validated messages.
            tools: OpenAI's ``tools``, for the template.
            open_call: True if the answer begins inside a tool call; a thought that the template has opened is then
                closed.
            variables: Further variables that the template uses (``TemplateNames``).
            add_generation_prompt: Whether to add the text that begins an answer.
            continue_final_message: Whether to end within the last message, which the answer continues.

        Raises:
            RequestError: If the model has no chat template, or the template refuses the conversation.
        """
        if not self._has_template:
            raise unsupported_parameter(
                "messages", "this model has no chat template", "POST the text to /v1/completions"
            )
        rows, tools = self.tools.prepare([self._row(message) for message in messages], tools)
        if self._may_be_long(json.dumps([rows, tools])):
            self._require_fits(self._render(rows, tools, **variables), "messages")
        how: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "sanitize_control_tokens": True,
        }
        ids = self._template(rows, tools, **variables, tokenize=True, return_dict=True, **how)["input_ids"]
        opening = self.tools.format.opening if open_call else ""
        if not opening:
            return list(ids)
        thinking = self.thinking(ids, None, text_of(messages[-1].content) if continue_final_message else None)
        splitter = None if thinking is None else thinking.splitter()
        closing = thinking.parser.closing if thinking and splitter and splitter.thinking else ()
        return [*ids, *closing, *self._ids(opening, "messages", special=False)]

    def of_input(self, given: str | list[int], param: str, *, special: bool = True) -> list[int]:
        """Encode a text, or validate token ids; ``special=False`` omits the tokenizer's BOS and EOS tokens.

        Raises:
            RequestError: For a text that is empty or too long, or ids outside the vocabulary.
        """
        if isinstance(given, str):
            self._require_fits(given, param)
            return self._ids(given, param, special=special)
        self.require_known(given, param)
        return given

    def require_known(self, token_ids: Any, param: str) -> None:
        """Refuse token ids outside the vocabulary."""
        for token in token_ids:
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"field {param!r}: token id {token} is outside the vocabulary of {self._vocab_size:,}",
                    param=param,
                )

    def of_question(self, text: str) -> list[int]:
        """Render one user message, up to the beginning of the answer. Raises the errors of ``of_messages``."""
        return self.of_messages([UserMessage(role="user", content=text)])

    def first_id(self, text: str) -> int:
        """Return the first token id of a text inside a prompt."""
        return self._ids(text, "text", special=False)[0]

    def text(self, token_ids: list[int], *, special: bool = False) -> str:
        """Decode token ids; ``special`` includes the text of control tokens."""
        return self._decoder.text(token_ids, special=special)

    @cached_property
    def _decoder(self) -> TextDecoder:
        """The decoder, created on first use because it copies the whole vocabulary."""
        with self._borrowed_tokenizer() as tokenizer:
            return TextDecoder(tokenizer)

    def pieces(self, token_ids: list[int]) -> list[str]:
        """Return each token as written in the vocabulary."""
        with self._borrowed_tokenizer() as tokenizer:
            return list(tokenizer.convert_ids_to_tokens(token_ids))

    def _row(self, message: Message) -> dict[str, Any]:
        """Convert a message to a row for the template, with placeholders for media if the model reads any."""
        text = text_of(message.content) if self._parts is None else self._parts.marked(message.content)
        row = _row(message, text)
        if isinstance(message, AssistantMessage) and message.thoughts is not None:
            row |= dict.fromkeys(self.names.thoughts, message.thoughts)
        return row

    def _render(
        self,
        rows: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        prompt: bool = True,
        **variables: Any,
    ) -> str:
        return str(self._template(rows, tools, tokenize=False, add_generation_prompt=prompt, **variables))

    def _template(self, rows: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **how: Any) -> Any:
        return self._applied(rows if self._parts is None else self._parts.shaped(rows), tools, **how)

    def _plain(self, rows: list[dict[str, Any]]) -> str:
        """Render rows that are already in the template's form."""
        return str(self._applied(rows, None, tokenize=False, add_generation_prompt=False))

    def _applied(self, rows: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **how: Any) -> Any:
        from jinja2 import TemplateError

        try:
            with self._borrowed_tokenizer() as tokenizer:
                return tokenizer.apply_chat_template(rows, tools=tools or None, **how)
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(
                f"this model's chat template rejects the conversation: {error}", param="messages"
            ) from error

    def _ids(self, text: str, param: str, *, special: bool) -> list[int]:
        ids = self._tokens(text, special=special)
        if not ids:
            raise RequestError(
                f"field {param!r} has no tokens", param=param, hint="send at least one character"
            )
        return ids

    def _may_be_long(self, text: str) -> bool:
        return self._context is not None and len(text) > self._context * _CHARACTERS_A_TOKEN

    def _require_fits(self, text: str, param: str) -> None:
        """Refuse a text that is too long for the context, after tokenizing only a prefix of it.

        The limit is 25% above the context, since a prefix may end within a token. The prefix is doubled until it
        exceeds the limit or the text ends, since some texts, such as long runs of spaces, have few tokens.
        """
        if self._context is None:
            return
        length, most = self._context * _CHARACTERS_A_TOKEN, self._context + self._context // 4
        while length < len(text):
            count = len(self._tokens(text[:length], special=False))
            if count > most:
                raise RequestError(
                    f"the first {length:,} of {len(text):,} characters have {counted(count, 'token')}; together "
                    f"with the answer, at most {self._context:,} are allowed",
                    param=param,
                    name="context_length_exceeded",
                    hint="shorten the prompt",
                )
            length *= 2

    def _tokens(self, text: str, *, special: bool) -> list[int]:
        with self._borrowed_tokenizer() as tokenizer:
            ids = list(tokenizer(text, add_special_tokens=special)["input_ids"])
            return without_second_bos(tokenizer, ids) if special else ids

    @contextmanager
    def _borrowed_tokenizer(self) -> Iterator[Any]:
        """Take one of the tokenizers, for exclusive use."""
        tokenizer = self._free.get()
        try:
            with tokenizer_errors(tokenizer):
                yield tokenizer
        finally:
            self._free.put(tokenizer)


def texts_of(messages: list[Message], tools: list[dict[str, Any]] | None) -> Iterator[str]:
    """Yield every text in the prompt of a conversation, including system messages and tools."""
    for message in messages:
        yield text_of(message.content)
        if isinstance(message, AssistantMessage):
            yield from filter(None, (message.thoughts,))
            for call in message.tool_calls or []:
                yield call.function.name
                yield from texts_in(_arguments(call.function.arguments))
    yield from texts_in(tools)


def _row(message: Message, content: str) -> dict[str, Any]:
    """Convert a message to a row for the template, with the arguments of tool calls as objects."""
    if isinstance(message, ToolMessage):
        return {"role": "tool", "content": content, "tool_call_id": message.tool_call_id}
    role = "system" if message.role == "developer" else message.role
    row: dict[str, Any] = {"role": role, "content": content}
    if isinstance(message, AssistantMessage) and message.tool_calls:
        row["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return row


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError("arguments of a tool call are not JSON", param="messages") from error
    if not isinstance(value, dict):
        raise RequestError("arguments of a tool call are not a JSON object", param="messages")
    return value


class VariantPrompts:
    """The prompts of the base and of variants with added tokens. Thread-safe.

    Args:
        base: The prompts of the base.
        vocabularies: The tokenizers of the variants; None: all use the base's.
        more: Further arguments of ``Prompts``.
    """

    def __init__(self, base: Prompts, vocabularies: Vocabularies | None, *more: Any) -> None:
        self._base, self._vocabularies, self._more = base, vocabularies, more
        self._of: WeakKeyDictionary[Vocabulary, Prompts] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def __call__(self, variant: str | None) -> Prompts:
        """Return the prompts of a variant. Raises the errors of ``Vocabularies.of``."""
        vocabulary = None if self._vocabularies is None else self._vocabularies.of(variant)
        if self._vocabularies is None or vocabulary is None or vocabulary is self._vocabularies.base:
            return self._base
        with self._lock:
            prompts = self._of.get(vocabulary)
            if prompts is None:
                prompts = self._of[vocabulary] = Prompts(vocabulary.tokenizer, vocabulary.size, *self._more)
            return prompts

    @property
    def malformed_tool_calls(self) -> int:
        """The number of texts that looked like tool calls but were malformed."""
        with self._lock:
            return sum(prompts.tools.malformed for prompts in (self._base, *self._of.values()))
