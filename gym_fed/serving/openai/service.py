"""The service: a request's URL, body and caller in, OpenAI's answer out; whole, or as a stream.

``handle`` and ``stream`` are for callers with threads, such as ``gym batch``; ``begin`` is for a server that waits
for many answers at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.engine.guided import MAX_SCHEMA_CHARACTERS
from gym_fed.serving.engine.request import GenerationRequest, SamplingParams
from gym_fed.serving.filter.classifier import Classifier, JudgedGeneration
from gym_fed.serving.openai.answers import Answer, AnswerChoice, ChatAnswer, CompletionAnswer, StreamChunk
from gym_fed.serving.openai.catalogue import Caller, Catalogue, Model
from gym_fed.serving.openai.fields import SamplingFields, parse
from gym_fed.serving.openai.filtered import Screening
from gym_fed.serving.openai.pending import Pending, PendingRefusal, PendingVectors
from gym_fed.serving.openai.prompts import CALL_CLOSE, Prompts, texts_of
from gym_fed.serving.openai.refusals import RequestError, model_not_found
from gym_fed.serving.openai.schemas import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    DEFAULT_MAX_TOKENS,
    EMBEDDING_NEUTRAL,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    as_list,
)
from gym_fed.serving.openai.tokenizing import Tokenizing
from gym_fed.serving.openai.tools import FreeCalls, RequiredCall, schema_of_calls, shown_tools

if TYPE_CHECKING:
    from gym_fed.serving.engine.engine import Engine
    from gym_fed.serving.engine.generation import Generation, PendingEmbedding
    from gym_fed.serving.filter.content_filter import ContentFilter

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
URLS = (CHAT, COMPLETIONS, EMBEDDINGS)


@dataclass(frozen=True)
class Use:
    """The usage of one request.

    Attributes:
        url: The kind of request.
        model: The requested name.
        caller: Name of the caller.
        end_user: The request's ``user``, if any.
        prompt_tokens: Tokens of the prompts.
        completion_tokens: Tokens of the answers, also of cancelled ones.
    """

    url: str
    model: str
    caller: str
    end_user: str | None
    prompt_tokens: int
    completion_tokens: int


OnUse = Callable[[Use], None]


class OpenAIService:
    """OpenAI's API over one engine.

    Args:
        engine: Generates the answers.
        catalogue: The names that can be requested.
        tokenizer: Of the base.
        vocab_size: Token ids that the model has.
        fingerprint: Names the weights of the base (``system_fingerprint``).
        max_at_once: Most answers of one request; more could never be queued together.
        context: Tokens of prompt and answer together; far longer prompts are refused early.
        on_use: Gets the usage of each request, once it has ended.
        content_filter: Refuses requests and answers for text; None lets everything through.
    """

    def __init__(
        self,
        engine: Engine,
        catalogue: Catalogue,
        tokenizer: Any,
        *,
        vocab_size: int,
        fingerprint: str,
        max_at_once: int,
        context: int | None = None,
        on_use: OnUse | None = None,
        content_filter: ContentFilter | None = None,
    ) -> None:
        self.catalogue = catalogue
        self._engine = engine
        self._prompts = Prompts(tokenizer, vocab_size, context)
        self.tokenizing = Tokenizing(catalogue, self._prompts, context)
        self._fingerprint = fingerprint
        self._max_at_once = max_at_once
        self._on_use = on_use or (lambda use: None)
        self._screening = None if content_filter is None else self._screening_by(content_filter)

    def handle(self, url: str, body: Any, caller: Caller) -> dict[str, Any]:
        """Answer a request as a whole; waits for it.

        Args:
            url: One of ``URLS``.
            body: The parsed JSON.
            caller: The authenticated user.

        Raises:
            GymError: Why it is refused; a ``RequestError`` names the field. ``BUSY`` when too many are waiting.
        """
        if url == EMBEDDINGS:
            return self.begin_vectors(body, caller).run()
        if isinstance(body, dict) and body.get("stream"):
            raise RequestError(
                "field 'stream' is not possible here: the answer is given whole", param="stream"
            )
        return self.begin(url, body, caller).run()

    def stream(self, url: str, body: Any, caller: Caller) -> Generator[StreamChunk]:
        """Answer a request chunk by chunk, whether or not ``stream`` is set; raises as ``handle``."""
        return self.begin(url, body, caller).chunks()

    def begin(self, url: str, body: Any, caller: Caller) -> Pending:
        """Accept a request for text, without waiting for its answer; raises as ``handle``."""
        if url == CHAT:
            return self._chat(parse(ChatRequest, body, CHAT_NEUTRAL), caller)
        if url == COMPLETIONS:
            return self._completion(parse(CompletionRequest, body, COMPLETION_NEUTRAL), caller)
        raise RequestError(
            f"no such URL: {url}", code=ErrorCode.NOT_FOUND, hint=f"there are {', '.join(URLS)}"
        )

    def begin_vectors(self, body: Any, caller: Caller) -> PendingVectors:
        """Accept a request for embeddings, without waiting for them; raises as ``handle``.

        They are the means of the model's last hidden states, scaled to length one.
        """
        request = parse(EmbeddingRequest, body, EMBEDDING_NEUTRAL)
        model = self.catalogue.resolve(request.model, caller)
        given = as_list(request.input)
        self._require_room_for(len(given), "texts in one request:", "input")
        prompts = [self._prompts.of_input(one, "input") for one in given]
        refusals = _EngineErrors(model, "input")
        started: list[PendingEmbedding] = []
        try:
            for ids in prompts:
                with refusals:
                    started.append(self._engine.embed(ids, model.variant, caller.name))
        except BaseException:
            for embedding in started:
                embedding.cancel()
            raise

        def on_end(tokens: int) -> None:
            self._on_use(Use(EMBEDDINGS, model.name, caller.name, request.user, tokens, 0))

        encoding = request.encoding_format or "float"
        lengths = [len(ids) for ids in prompts]
        return PendingVectors(model.name, started, lengths, encoding, refusals.translate, on_end)

    def _chat(self, request: ChatRequest, caller: Caller) -> Pending:
        model = self.catalogue.resolve(request.model, caller)
        tools, forced = shown_tools(request), schema_of_calls(request)
        ids = self._prompts.of_messages(request.messages, tools, open_call=forced is not None)
        schema = forced if forced is not None else request.json_schema
        one_call = bool(tools) and forced is None and request.parallel_tool_calls is False
        schema_text = None if schema is None else json.dumps(schema)
        if schema_text is not None and len(schema_text) > MAX_SCHEMA_CHARACTERS:
            raise RequestError(
                f"a JSON schema of {len(schema_text):,} characters; {MAX_SCHEMA_CHARACTERS:,} are allowed",
                param="response_format" if forced is None else "tools",
                name="invalid_json_schema",
            )
        sampling = request.sampling(
            max_tokens=request.longest,
            logprobs=request.num_logprobs,
            json_schema=schema_text,
            also_stop=(CALL_CLOSE,) if one_call else (),
        )
        answer = partial(
            ChatAnswer,
            model.name,
            with_logprobs=bool(request.logprobs),
            include_usage=request.include_usage,
            fingerprint=self._fingerprint,
        )
        screening = self._screening
        if screening is not None and screening.refuses(texts_of(request.messages, tools), caller.name):
            return PendingRefusal(answer(0, screening.refusals(request.n or 1)))
        refusals = _EngineErrors(model, "messages", "response_format" if forced is None else "tools")
        generations = self._submit([ids], sampling, request, model, caller, "messages", refusals)
        names = {tool.function.name for tool in request.tools or []}

        def parser() -> FreeCalls | RequiredCall | None:
            if forced is not None:
                return RequiredCall()
            return FreeCalls(names) if tools else None

        choices = [self._choice(parser()) for _ in generations]
        return self._pending(CHAT, answer(len(ids), choices), generations, request, caller, refusals)

    def _completion(self, request: CompletionRequest, caller: Caller) -> Pending:
        model = self.catalogue.resolve(request.model, caller)
        given = as_list(request.prompt)
        prompts = [self._prompts.of_input(one, "prompt") for one in given]
        sampling = request.sampling(
            max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
            logprobs=request.logprobs,
        )
        needed = request.echo or self._screening is not None
        times = request.n or 1
        texts = [one if isinstance(one, str) else self._prompts.text(one) if needed else "" for one in given]
        texts = [text for text in texts for _ in range(times)]
        answer = partial(
            CompletionAnswer,
            model.name,
            echoes=texts if request.echo else [""] * len(texts),
            with_logprobs=request.logprobs is not None,
            include_usage=request.include_usage,
            fingerprint=self._fingerprint,
        )
        if self._screening is not None and self._screening.refuses(dict.fromkeys(texts), caller.name):
            return PendingRefusal(answer(0, self._screening.refusals(len(texts))))
        refusals = _EngineErrors(model, "prompt")
        generations = self._submit(prompts, sampling, request, model, caller, "prompt", refusals)
        choices = [self._choice(before=text) for text in texts]
        prompt_tokens = sum(map(len, prompts))
        return self._pending(
            COMPLETIONS, answer(prompt_tokens, choices), generations, request, caller, refusals
        )

    def _choice(self, parser: FreeCalls | RequiredCall | None = None, before: str = "") -> AnswerChoice:
        """One that is filtered where answers are; ``before`` is the text that it continues."""
        return AnswerChoice(parser) if self._screening is None else self._screening.choice(parser, before)

    def _screening_by(self, content_filter: ContentFilter) -> Screening:
        config = content_filter.config.classifier
        if config is None:
            return Screening(content_filter, None)
        yes, no = map(self._prompts.first_id, ("yes", "no"))
        return Screening(content_filter, Classifier(config, self._engine, self._prompts.of_question, yes, no))

    def _submit(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        request: SamplingFields,
        model: Model,
        caller: Caller,
        param: str,
        refusals: _EngineErrors,
    ) -> list[Generation]:
        """One generation for each prompt and choice, or none at all. Choice i has the seed plus i."""
        answers = len(prompts) * (request.n or 1)
        self._require_room_for(answers, "prompts times n is", param if len(prompts) > 1 else "n")
        self._prompts.require_known(sampling.logit_bias, "logit_bias")
        self._prompts.require_known(sampling.stop_token_ids, "stop_token_ids")
        started: list[Generation] = []
        try:
            for ids in prompts:
                for number in range(request.n or 1):
                    seed = None if sampling.seed is None else sampling.seed + number
                    wanted = GenerationRequest(
                        list(ids), replace(sampling, seed=seed), model.variant, caller.name
                    )
                    with refusals:
                        started.append(self._engine.submit(wanted))
        except BaseException:
            for generation in started:
                generation.cancel()
            raise
        return started

    def _require_room_for(self, number: int, what: str, param: str) -> None:
        """Refuse more answers than an idle server could queue together."""
        if number > self._max_at_once:
            raise RequestError(
                f"{what} {number}; this server has room for {self._max_at_once} at once",
                param=param,
                hint="request fewer at once",
            )

    def _pending(
        self,
        url: str,
        answer: Answer,
        generations: list[Generation],
        request: SamplingFields,
        caller: Caller,
        refusals: _EngineErrors,
    ) -> Pending:
        def on_end() -> None:
            tokens = answer.prompt_tokens, answer.completion_tokens
            self._on_use(Use(url, answer.model, caller.name, request.user, *tokens))

        answers: Sequence[Generation | JudgedGeneration] = generations
        if self._screening is not None:
            answers = self._screening.judged(generations, caller.name)
        return Pending(answer, answers, refusals.translate, on_end)


class _EngineErrors:
    """The engine's errors in OpenAI's form; as a context manager, those of ``submit`` and ``embed``.

    Args:
        model: The requested model.
        param: The field that has the text.
        schema_param: The field that has the schema.
    """

    def __init__(self, model: Model, param: str, schema_param: str = "response_format") -> None:
        self._model = model
        self._param = param
        self._schema_param = schema_param

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, GymError):
            return
        if (
            error.code is ErrorCode.TOO_LARGE
        ):  # after submission it is the variant that is too large, not the text
            raise RequestError(
                error.message, param=self._param, name="context_length_exceeded", hint=error.hint
            ) from error
        if (translated := self.translate(error)) is not error:
            raise translated from error

    def translate(self, error: GymError) -> GymError:
        """An error of any time, after submission too."""
        if error.code is ErrorCode.NOT_FOUND:  # removed since it was looked up
            return model_not_found(self._model.name)
        if error.code is ErrorCode.DATA_INVALID:
            return RequestError(
                error.message, param=self._schema_param, name="invalid_json_schema", hint=error.hint
            )
        return error
