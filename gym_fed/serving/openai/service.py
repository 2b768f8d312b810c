"""The OpenAI service, which takes a request's URL, body and caller, and returns the answer, complete or as a stream.

Callers with threads, such as ``gym batch``, use ``handle`` and ``stream``; a server that waits for many answers
concurrently uses ``begin``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.request import GenerationRequest, SamplingParams
from gym_fed.serving.filter.content_filter import Classifier, JudgedGeneration, texts_in
from gym_fed.serving.http.usage_log import OnUse, Use
from gym_fed.serving.openai.answers import Answer, AnswerChoice, ChatAnswer, CompletionAnswer, StreamChunk
from gym_fed.serving.openai.catalogue import Caller, Catalogue, Model
from gym_fed.serving.openai.fields import SamplingFields, parse
from gym_fed.serving.openai.filtered import Screening
from gym_fed.serving.openai.guided_fields import (
    EngineErrors,
    GuidedFields,
    refusal_name,
    require_small_multiples,
)
from gym_fed.serving.openai.pending import Pending, PendingRefusal, PendingVectors
from gym_fed.serving.openai.prompts import TEXT_ONLY, Prompts, VariantPrompts, texts_of
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.responses import RESPONSES, ChatForm, begin_response, store_of
from gym_fed.serving.openai.schemas import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    DEFAULT_MAX_TOKENS,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    as_list,
)
from gym_fed.serving.openai.stored_answers import StoredAnswer, StoredAnswers
from gym_fed.serving.openai.tokenizing import Tokenizing, chat_prompt, count_input_tokens
from gym_fed.serving.openai.tool_formats.base import CallParser
from gym_fed.serving.openai.tool_template import AUTO
from gym_fed.serving.pictures.reader import NoPictures, PictureReader, count_pictures
from gym_fed.serving.reasoning.detection import NONE, name_of

if TYPE_CHECKING:
    from gym_fed.serving.engine.request import Generation, PendingEmbedding
    from gym_fed.serving.engine.vocabularies import Vocabularies
    from gym_fed.serving.engines.base import ServingEngine
    from gym_fed.serving.filter.content_filter import ContentFilter
    from gym_fed.serving.forward.chunk import PlacedPicture

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
URLS = (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES)
STORED = {CHAT: "chatcmpl-", RESPONSES: "resp_"}
"""URLs of stored answers, with the id prefix of each kind."""


class OpenAIService:
    """OpenAI's API over one engine.

    Args:
        engine: The engine that generates the answers.
        catalogue: The model names that can be requested.
        tokenizer: The tokenizer of the base.
        vocab_size: The number of token ids that the model has.
        fingerprint: The identifier of the base's weights (``system_fingerprint``).
        max_at_once: Maximum number of answers per request, bounded by the size of the queue.
        context: Maximum number of tokens of the prompt and the answer together; far longer prompts are refused early.
        on_use: Called with the usage of each request after it ends.
        content_filter: The filter of requests and answers by their text; None: no filter.
        stored: The store of answers for later requests; None: answers are not stored.
        embedding_size: The size of an embedding; None: unknown.
        tool_format: The format of the model's tool calls; ``auto`` detects it from the chat template.
        reasoning_parser: The parser of the model's reasoning; ``auto`` detects it from the chat template.
        pictures: The reader of pictures in messages, or a ``NoPictures`` that refuses them.
        sampling_defaults: Defaults of sampling fields; missing ones have OpenAI's defaults.
        vocabularies: The tokenizers of variants with added tokens; None: all use the base's.
    """

    def __init__(
        self,
        engine: ServingEngine,
        catalogue: Catalogue,
        tokenizer: Any,
        *,
        vocab_size: int,
        fingerprint: str,
        max_at_once: int,
        context: int | None = None,
        on_use: OnUse | None = None,
        content_filter: ContentFilter | None = None,
        stored: StoredAnswers | None = None,
        embedding_size: int | None = None,
        tool_format: str = AUTO,
        reasoning_parser: str = NONE,
        pictures: PictureReader | NoPictures = TEXT_ONLY,
        sampling_defaults: Mapping[str, Any] | None = None,
        vocabularies: Vocabularies | None = None,
    ) -> None:
        self.catalogue = catalogue
        self._engine = engine
        more = (context, tool_format, reasoning_parser, pictures)
        self._prompts = Prompts(tokenizer, vocab_size, *more)
        self._prompts_of = VariantPrompts(self._prompts, vocabularies, *more)
        self.tokenizing = Tokenizing(catalogue, self._prompts_of, context)
        self._fingerprint = fingerprint
        self._max_at_once = max_at_once
        self._context = context
        self._stored = stored
        self._embedding_size = embedding_size
        self.sampling_defaults = dict(sampling_defaults or {})
        self._on_use = on_use or (lambda use: None)
        self._screening = None if content_filter is None else self._screening_by(content_filter)

    @property
    def malformed_tool_calls(self) -> int:
        """The number of texts in answers that looked like tool calls but were malformed."""
        return self._prompts_of.malformed_tool_calls

    @property
    def reasoning_parser(self) -> str:
        """The name of the reasoning parser; ``none`` without one."""
        return name_of(self._prompts.reasoning)

    def pictures_to_read(self, body: Any) -> int:
        """Count the pictures in a request body that the model may have to encode, which is slow."""
        return count_pictures(body) if isinstance(self._prompts.pictures, PictureReader) else 0

    def handle(self, url: str, body: Any, caller: Caller) -> dict[str, Any]:
        """Answer a request, and return the complete answer, which is not stored.

        Args:
            url: One of ``URLS``.
            body: The parsed JSON.
            caller: The authenticated user.

        Raises:
            GymError: If the request is refused; a ``RequestError`` names the field. ``BUSY`` if too many are waiting.
        """
        if url == EMBEDDINGS:
            return self.begin_vectors(body, caller).run()
        if isinstance(body, dict) and body.get("stream"):
            message = "field 'stream' is not supported: the answer is returned as a whole"
            raise RequestError(message, param="stream")
        return self._begin(url, body, caller, None).run()

    def stream(self, url: str, body: Any, caller: Caller) -> Generator[StreamChunk]:
        """Stream the answer to a request even if ``stream`` is not set. Raises the errors of ``handle``."""
        return self.begin(url, body, caller).chunks()

    def begin(self, url: str, body: Any, caller: Caller) -> Pending:
        """Accept a request for text, without waiting for its answer. Raises the errors of ``handle``."""
        return self._begin(url, body, caller, self._stored)

    def input_tokens(self, body: Any, caller: Caller) -> dict[str, Any]:
        """Count the input tokens of a request to the Responses API. Raises the errors of ``handle``."""
        return count_input_tokens(body, caller, self.catalogue, self._prompts_of, self._context, self._stored)

    def stored(self, url: str, answer_id: str, caller: Caller) -> dict[str, Any]:
        """Return the body of an answer that this caller has stored. Raises the errors of ``stored_answer``."""
        return self.stored_answer(url, answer_id, caller).to_dict()

    def stored_answer(self, url: str, answer_id: str, caller: Caller) -> StoredAnswer:
        """Return an answer that this caller has stored.

        Args:
            url: One of ``STORED``.
            answer_id: The id of the answer.
            caller: The authenticated user.

        Raises:
            GymError: ``NOT_FOUND`` if it does not exist or is another caller's.
        """
        return self._storage().get(caller, answer_id, STORED[url])

    def delete_stored(self, url: str, answer_id: str, caller: Caller) -> dict[str, Any]:
        """Delete a stored answer. Raises the errors of ``stored``."""
        self._storage().delete(caller, answer_id, STORED[url])
        kind = "response" if url == RESPONSES else "chat.completion.deleted"
        return {"id": answer_id, "object": kind, "deleted": True}

    def forget_old_answers(self) -> None:
        """Delete expired answers."""
        if self._stored is not None:
            self._stored.forget_old()

    def _storage(self) -> StoredAnswers:
        if self._stored is None:
            raise RequestError("this server does not store answers", code=ErrorCode.NOT_FOUND)
        return self._stored

    def _begin(self, url: str, body: Any, caller: Caller, stored: StoredAnswers | None) -> Pending:
        if url == RESPONSES:
            return begin_response(body, caller, self._chat, stored, self.sampling_defaults)
        if url == CHAT:
            request = parse(ChatRequest, body, CHAT_NEUTRAL).filled(self.sampling_defaults)
            keeping = store_of(request.store, stored, default=False)
            keep = None if keeping is None else partial(keeping.put, caller)
            form = ChatForm(CHAT, partial(ChatAnswer, metadata=request.metadata, keep=keep))
            return self._chat(request, caller, form)
        if url == COMPLETIONS:
            completion = parse(CompletionRequest, body, COMPLETION_NEUTRAL).filled(self.sampling_defaults)
            return self._completion(completion, caller)
        raise RequestError(f"no such URL: {url}", code=ErrorCode.NOT_FOUND, hint=f"use {', '.join(URLS)}")

    def begin_vectors(self, body: Any, caller: Caller) -> PendingVectors:
        """Accept a request for embeddings, without waiting for them. Raises the errors of ``handle``.

        An embedding is the mean of the model's last hidden states, normalised.
        """
        request = parse(EmbeddingRequest, body, {})
        model = self.catalogue.resolve(request.model, caller)
        inputs = as_list(request.input)
        self._require_room_for(len(inputs), "texts in one request:", "input")
        size, requested = self._embedding_size, request.dimensions
        if requested is not None and size is not None and requested > size:
            raise RequestError(
                f"field 'dimensions': {requested} exceeds the model's {size}",
                param="dimensions",
                hint="lower it, or omit it",
            )
        own = self._prompts_of(model.variant)
        prompts = [own.of_input(item, "input") for item in inputs]
        refusals = EngineErrors(model, "input")
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

        lengths, encoding = [len(ids) for ids in prompts], request.encoding_format or "float"
        return PendingVectors(
            model.name, started, lengths, encoding, refusals.translate, on_end, request.dimensions
        )

    def _chat(self, request: ChatRequest, caller: Caller, form: ChatForm) -> Pending:
        model = self.catalogue.resolve(request.model, caller)
        prompts = self._prompts_of(model.variant)
        prompt, tools, variables = chat_prompt(prompts, request, self._context if form.truncate else None)
        thinking = prompts.thinking(prompt.ids, request.budget, request.continued)
        sampling = request.sampling(
            max_tokens=request.longest,
            logprobs=request.num_logprobs,
            thinking=None if tools.opens_call else thinking,
            **request.guiding(),
            **tools.sampling(),
        )
        held_field = "tools" if tools.held else request.guiding_field
        require_small_multiples(sampling.held_to, held_field, refusal_name(held_field))
        answer = partial(
            form.answer,
            model.name,
            with_logprobs=bool(request.logprobs),
            include_usage=request.include_usage,
            fingerprint=self._fingerprint,
            per_prompt=request.n or 1,
        )
        screening = self._screening
        texts = (*texts_of(request.messages, tools.shown), *texts_in(variables))
        if screening is not None and screening.refuses(texts, caller.name):
            return PendingRefusal(answer(0, screening.refusals(request.n or 1)))
        refusals = EngineErrors(model, "messages", held_field)
        if prompt.runs:  # do not encode pictures for a request that the engine would refuse
            with refusals:
                self._engine.require_room(prompt.ids, caller.name, model.variant)
        placed = prompts.placed(prompt, f"{caller.key_sha256}:{caller.name}")
        generations = self._submit(
            [prompt.ids], sampling, request, model, caller, "messages", refusals, placed
        )
        parser = partial(tools.parser, fragments=screening is None)
        choices = [self._choice(parser(), request.continued or "") for _ in generations]
        for choice in choices:
            choice.with_reasoning = request.include_reasoning is not False
        return self._pending(
            form.url, answer(len(prompt), choices), generations, request, caller, refusals, form.renamed
        )

    def _completion(self, request: CompletionRequest, caller: Caller) -> Pending:
        model = self.catalogue.resolve(request.model, caller)
        own = self._prompts_of(model.variant)
        inputs = as_list(request.prompt)
        prompts = [own.of_input(item, "prompt") for item in inputs]
        sampling = request.sampling(
            max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
            logprobs=request.logprobs,
            **request.guiding(),
        )
        require_small_multiples(sampling.held_to, request.guiding_field, refusal_name(request.guiding_field))
        decode = request.echo or self._screening is not None
        times = request.n or 1
        prompt_texts = [
            item if isinstance(item, str) else own.text(item) if decode else "" for item in inputs
        ]
        texts = [text for text in prompt_texts for _ in range(times)]
        answer = partial(
            CompletionAnswer,
            model.name,
            echoes=texts if request.echo else [""] * len(texts),
            with_logprobs=request.logprobs is not None,
            include_usage=request.include_usage,
            fingerprint=self._fingerprint,
            per_prompt=times,
        )
        if self._screening is not None and self._screening.refuses(dict.fromkeys(texts), caller.name):
            return PendingRefusal(answer(0, self._screening.refusals(len(texts))))
        refusals = EngineErrors(model, "prompt", request.guiding_field)
        generations = self._submit(prompts, sampling, request, model, caller, "prompt", refusals)
        choices = [self._choice(before=text) for text in texts]
        full_answer = answer(sum(map(len, prompts)), choices)
        return self._pending(COMPLETIONS, full_answer, generations, request, caller, refusals)

    def _choice(self, parser: CallParser | None = None, before: str = "") -> AnswerChoice:
        """Create a choice, with the filter if answers are filtered; ``before`` is the text that it continues."""
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
        request: GuidedFields,
        model: Model,
        caller: Caller,
        param: str,
        refusals: EngineErrors,
        pictures: tuple[PlacedPicture, ...] = (),
    ) -> list[Generation]:
        """Submit one generation for each prompt and choice, or none at all. Choice i uses the seed plus i."""
        answers = len(prompts) * (request.n or 1)
        self._require_room_for(answers, "prompts times n is", param if len(prompts) > 1 else "n")
        own = self._prompts_of(model.variant)
        own.require_known(sampling.logit_bias, "logit_bias")
        own.require_known(sampling.stop_token_ids, "stop_token_ids")
        started: list[Generation] = []
        try:
            for ids in prompts:
                for number in range(request.n or 1):
                    seed = None if sampling.seed is None else sampling.seed + number
                    generation_request = GenerationRequest(
                        list(ids),
                        replace(sampling, seed=seed),
                        model.variant,
                        caller.name,
                        request.cache_key,
                        pictures,
                        key_digest=caller.key_sha256,
                    )
                    with refusals:
                        started.append(self._engine.submit(generation_request))
        except BaseException:
            for generation in started:
                generation.cancel()
            raise
        return started

    def _require_room_for(self, number: int, noun: str, param: str) -> None:
        """Refuse more answers than an idle server can queue."""
        if number > self._max_at_once:
            raise RequestError(
                f"{noun} {number}; this server accepts at most {self._max_at_once} at once",
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
        refusals: EngineErrors,
        renamed: Callable[[GymError], GymError] = lambda error: error,
    ) -> Pending:
        def on_end() -> None:
            more = answer.completion_tokens, request.safety_identifier, request.metadata
            self._on_use(Use(url, answer.model, caller.name, request.user, answer.prompt_tokens, *more))

        answers: Sequence[Generation | JudgedGeneration] = generations
        if self._screening is not None:
            answers = self._screening.judged(generations, caller.name)
        return Pending(answer, answers, lambda error: renamed(refusals.translate(error)), on_end)
