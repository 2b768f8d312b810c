"""Create, rebase and serve personal variants of one base.

trainer = PersonalizedTrainer(base_model="gym-nano")
created = trainer.create_variant(user_id="ada", preferences="ada.jsonl")
with trainer.serve_variant("ada") as ada:
    print(ada.chat("How do you do?").text)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import TUNING
from gym_fed.core.text import counted
from gym_fed.personalization.recipe import Method
from gym_fed.personalization.results import CreatedVariant, Listener, Losses, RebasedVariant, require_better
from gym_fed.personalization.rows import PersonalKind, Source, read_rows
from gym_fed.personalization.writer import VariantWriter
from gym_fed.serving.engine.request import CompletionOutput, GenerationRequest, SamplingParams
from gym_fed.serving.store.naming import variants_folder
from gym_fed.trust.identity.keys import SigningKey

if TYPE_CHECKING:
    from gym_fed.personalization.rows import PersonalRows
    from gym_fed.serving.engine.request import Generation
    from gym_fed.serving.setup import Serving


_SAMPLING = {field.name for field in fields(SamplingParams)}


class PersonalizedTrainer:
    """Creates, rebases and serves the variants of one base, in one store.

    Args:
        base_model: ``gym-nano``, a model folder, or a name in the local cache.
        variants: Folder of the variant store, created on first write; by default, the store of `gym variant`.
        method: ``lora``, or ``full`` to train all weights.
        codec: Codec for the variants. ``auto`` selects ``lora`` (quantised factors) or ``bitdelta``, depending on the
            method. Any other codec, built-in or from an installed package, is allowed.
        training: Keys of ``TrainingConfig`` that replace the defaults of ``recipe.training_config``.
        encoding: Keys of ``CodecPolicy`` that replace the defaults of ``codec``.
        key: Key that signs the variants; by default, a key of the store that is created on first use.
        unsigned: True to not sign variants. Unsigned variants are only served if signatures are not required.
        device: Name of the device, as in ``gym_fed.base.models.pick_device``.

    Raises:
        GymError: ``USAGE`` for an unknown method, or a key combined with ``unsigned``.
    """

    def __init__(
        self,
        base_model: str = "gym-nano",
        *,
        variants: str | Path | None = None,
        method: Method = "lora",
        codec: str = "auto",
        training: Mapping[str, Any] | TrainingConfig | None = None,
        encoding: Mapping[str, Any] | CodecPolicy | None = None,
        key: SigningKey | None = None,
        unsigned: bool = False,
        device: str = "auto",
    ) -> None:
        if method not in TUNING or not TUNING.type_of(method).federates:
            known = ", ".join(TUNING.own_with("federates"))
            raise GymError(ErrorCode.USAGE, f"method {method!r} is unknown", f"one of {known}")
        self.base_model = base_model
        self.method: Method = method
        self.codec = codec
        self.device = device
        self._training = training
        self._encoding = encoding
        self._writer = VariantWriter(
            variants_folder(None if variants is None else Path(variants)), key, unsigned=unsigned
        )
        self._shared = SharedServing(self._open_serving)

    def create_variant(
        self,
        user_id: str,
        *,
        preferences: Source | None = None,
        examples: Source | None = None,
        data: Source | None = None,
        name: str | None = None,
        held_out: float = 0.2,
        columns: Mapping[str, str] | None = None,
        as_chat: bool | None = None,
        replace: bool = False,
        output: str | Path | None = None,
        overwrite: bool = False,
        listener: Listener | None = None,
    ) -> CreatedVariant:
        """Train on a user's rows, encode the difference, and add it to the store as a signed variant.

        The same call resumes a stopped run. The store is changed only when the variant is complete.

        Args:
            user_id: Account or local id of the owner; also the name of the variant, unless ``name`` is given.
            preferences: A path, or rows with ``prompt``, ``chosen`` and ``rejected``; trained with DPO.
            examples: A path, or rows with ``messages``, ``prompt`` and ``completion``, or ``text``.
            data: A path, or rows of either kind, which is inferred from their columns.
            name: Name under which the variant is served.
            held_out: Fraction of the rows that is used only for evaluation and early stopping.
            columns: Names of the rows' columns, by the name that the format expects.
            as_chat: True to train prompts and answers that are plain strings as user and assistant turns; False for
                plain text, which ``complete`` continues. Defaults to True if the base has a chat template.
            replace: True to create the next revision of an existing variant.
            output: Folder for intermediate results, which is kept; by default, a folder in the store that is removed at
                the end.
            overwrite: True to discard unfinished work on this variant.
            listener: Receives the progress, and may stop the work.

        Raises:
            GymError: ``FILE_EXISTS`` for an existing variant, or for unfinished work with other rows or settings;
                ``DATA_INVALID`` with the row; ``INTERRUPTED``; ``CONFIG_INVALID`` with the key; ``USAGE`` for
                ``as_chat`` if the base has no chat template.
        """
        rows = self._rows(preferences, examples, data, held_out, columns)
        variant_name = name or user_id
        revision = self._writer.planned_revision(variant_name, user_id, replace=replace)
        from gym_fed.personalization.create import CreateRequest, create

        return create(
            CreateRequest(
                variant_name,
                user_id,
                revision,
                rows,
                as_chat,
                replace,
                None if output is None else Path(output),
                overwrite,
            ),
            base_model=self.base_model,
            writer=self._writer,
            method=self.method,
            codec=self.codec,
            encoding=self._encoding,
            training=self._training,
            device=self.device,
            listener=listener or Listener(),
        )

    def rebase_variant(
        self,
        name: str,
        onto: str,
        *,
        preferences: Source | None = None,
        examples: Source | None = None,
        data: Source | None = None,
        steps: int = 0,
        held_out: float = 0.2,
        columns: Mapping[str, str] | None = None,
        as_chat: bool | None = None,
        force: bool = False,
        output_name: str | None = None,
        overwrite: bool = False,
        listener: Listener | None = None,
    ) -> RebasedVariant:
        """Move a variant to a new global version, and report its loss before and after.

        Signs, codes and factors are transferred unchanged. Their scale is searched on the owner's rows, since the new
        base may already contain part of the delta. With ``steps``, training continues from there, and the better of the
        two results is used. The next revision, for the new base, replaces the old one in the store.

        Args:
            name: Name of the variant.
            onto: The new base: a model folder, ``gym-nano``, or a name in the local cache.
            preferences: The owner's rows, as in ``create_variant``.
            examples: The owner's rows, as in ``create_variant``.
            data: The owner's rows, as in ``create_variant``.
            steps: Maximum number of refit steps; 0 for no refit.
            held_out: Fraction of the rows that is never used for training; the selection is the same as in
                ``create_variant``.
            columns: Names of the rows' columns, as in ``create_variant``.
            as_chat: Form of the rows, as in ``create_variant``; by default, the form stored with the variant.
            force: True to store the result even if it is no better than the new base alone, or was not evaluated.
            output_name: Name of a new variant for the result; by default, the result replaces the old variant.
            overwrite: True to discard an unfinished refit of this variant.
            listener: Receives the progress, and may stop the work.

        Raises:
            GymError: ``UPDATE_REFUSED`` if the result is no better than the new base alone; ``USAGE`` without rows and
                without ``force``; ``BASE_MISMATCH`` with a tensor that has a different shape in the new base;
                ``NOT_FOUND``.
        """
        sources = (preferences, examples, data)
        rows = None if all(s is None for s in sources) else self._rows(*sources, held_out, columns)
        if rows is None and not force:
            require_better(Losses(), False)
        if rows is None and steps:
            raise GymError(ErrorCode.USAGE, f"steps {steps}: there are no rows to refit on", "pass data")
        from gym_fed.personalization.rebase import RebaseRequest, rebase

        return rebase(
            RebaseRequest(name, onto, output_name or name, rows, as_chat, steps, force, overwrite),
            old_base=self.base_model,
            writer=self._writer,
            codec=self.codec,
            encoding=self._encoding,
            training=self._training,
            device=self.device,
            listener=listener or Listener(),
        )

    def serve_variant(self, user_id: str, *, name: str | None = None) -> ServedVariant:
        """Load a variant with its base and serve it in this process.

        Several variants can be served at the same time; the base is in memory only once.

        Args:
            user_id: Name of the variant, or the owner of a single variant.
            name: Name of the variant, if the user has several variants.

        Raises:
            GymError: ``NOT_FOUND``; ``USAGE`` if the user has several variants; errors from ``VariantStore.poll`` for a
                variant that fails verification or belongs to a different base.
        """
        return ServedVariant(name or self._writer.variant_of(user_id), self._shared)

    def _open_serving(self) -> Serving:
        from gym_fed.config.serving import ServingConfig
        from gym_fed.serving.setup import open_serving

        return open_serving(
            ServingConfig(
                base=self.base_model,
                variants=self._writer.folder,
                device=self.device,
                require_signature=self._writer.requires_signatures,
            )
        )

    def _rows(
        self,
        preferences: Source | None,
        examples: Source | None,
        data: Source | None,
        held_out: float,
        columns: Mapping[str, str] | None,
    ) -> PersonalRows:
        sources: list[tuple[Source | None, PersonalKind | None]] = [
            *((preferences, "preference"), (examples, "supervised"), (data, None))
        ]
        given = [(source, kind) for source, kind in sources if source is not None]
        if len(given) != 1:
            reason = f"{counted(len(given), 'source')} of rows are given"
            raise GymError(ErrorCode.USAGE, reason, "pass exactly one of preferences, examples and data")
        source, kind = given[0]
        return read_rows(source, kind=kind, held_out=held_out, columns=columns)


class ServedVariant:
    """A served variant. Use it as a context manager, or call ``close``. Thread-safe.

    The keyword arguments ``sampling`` are fields of ``SamplingParams``: ``max_tokens``, ``temperature``, ``seed``,
    ``stop``, ...

    Attributes:
        name: Name of the variant.
        model: Name of the model in the API: ``<base>:<variant>``.
    """

    def __init__(self, name: str, shared: SharedServing) -> None:
        """Create a served variant; use ``PersonalizedTrainer.serve_variant`` instead."""
        self.name = name
        self._shared = shared
        self._serving: Serving | None = shared.acquire()
        try:
            assert self._serving.store is not None  # the serving of a trainer has a store
            # Acquiring the variant verifies and loads it, or rejects it.
            self._serving.store.release(self._serving.store.acquire(name))
        except BaseException:
            self.close()
            raise
        self.model = f"{self._serving.served_name}:{name}"

    def chat(self, messages: str | Sequence[Mapping[str, Any]], **sampling: Any) -> CompletionOutput:
        """Answer a conversation, or a single user message.

        Raises:
            GymError: ``USAGE`` for unknown or invalid sampling parameters; ``DATA_INVALID`` without a chat template;
                errors of ``Engine.submit``.
        """
        return self._submit(self._conversation(messages), sampling).result()

    def complete(self, prompt: str, **sampling: Any) -> CompletionOutput:
        """Complete a text. Raises the errors of ``chat``."""
        return self._submit(self._text(prompt), sampling).result()

    def stream(self, messages: str | Sequence[Mapping[str, Any]], **sampling: Any) -> Iterator[str]:
        """Stream the answer of ``chat`` in chunks; closing the iterator cancels the answer."""
        return _texts(self._submit(self._conversation(messages), sampling))

    def stream_completion(self, prompt: str, **sampling: Any) -> Iterator[str]:
        """Stream the text of ``complete`` in chunks."""
        return _texts(self._submit(self._text(prompt), sampling))

    def close(self) -> None:
        """Stop serving the variant. The base is freed when the last variant is closed. Idempotent."""
        if self._serving is not None:
            self._serving = None
            self._shared.release()

    def __enter__(self) -> ServedVariant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Serving:
        if self._serving is None:
            raise GymError(
                ErrorCode.USAGE,
                f"variant {self.name!r} is no longer served by this process",
                "serve it again",
            )
        return self._serving

    def _submit(self, prompt_ids: list[int], sampling: Mapping[str, Any]) -> Generation:
        unknown = sorted(set(sampling) - _SAMPLING)
        if unknown:
            raise GymError(
                ErrorCode.USAGE, f"sampling has no {unknown[0]!r}", f"use {', '.join(sorted(_SAMPLING))}"
            )
        values = dict(sampling)
        if isinstance(values.get("stop"), str):
            values["stop"] = (values["stop"],)
        request = GenerationRequest(prompt_ids, SamplingParams(**values), variant=self.name, user=self.name)
        return self._open().engine.submit(request)

    def _conversation(self, messages: str | Sequence[Mapping[str, Any]]) -> list[int]:
        from gym_fed.data.encoding import prompt_ids, require_chat_template

        tokenizer = self._open().tokenizer
        require_chat_template(tokenizer)
        rows = (
            [{"role": "user", "content": messages}]
            if isinstance(messages, str)
            else [dict(m) for m in messages]
        )
        return prompt_ids(tokenizer, rows)

    def _text(self, prompt: str) -> list[int]:
        return list(self._open().tokenizer(prompt)["input_ids"])


class SharedServing:
    """A base, engine and store with a reference count, opened by the first user and closed by the last.

    Args:
        opens: Function that opens and returns them.
    """

    def __init__(self, opens: Callable[[], Serving]) -> None:
        self._opens = opens
        self._lock = threading.Lock()
        self._open: Serving | None = None
        self._users = 0

    def acquire(self) -> Serving:
        """Add a user, and return the shared serving. Raises the errors of ``open_serving``."""
        with self._lock:
            if self._open is None:
                self._open = self._opens()
            self._users += 1
            return self._open

    def release(self) -> None:
        """Remove a user; the last one closes the shared serving."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._open is not None:
                serving, self._open = self._open, None
                serving.close()


def _texts(generation: Generation) -> Iterator[str]:
    try:
        for event in generation:
            if event.text:
                yield event.text
    finally:
        generation.cancel()
