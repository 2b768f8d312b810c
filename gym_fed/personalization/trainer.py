"""Create, rebase and serve personal variants of one base.

trainer = PersonalizedTrainer(base_model="gym-nano")
created = trainer.create_variant(user_id="ada", preferences="ada.jsonl")
with trainer.serve_variant("ada") as ada:
    print(ada.chat("How do you do?").text)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import TUNING
from gym_fed.personalization.recipe import Method
from gym_fed.personalization.results import CreatedVariant, Listener, Losses, RebasedVariant, require_better
from gym_fed.personalization.rows import PersonalKind, Source, read_rows
from gym_fed.personalization.served import ServedVariant, SharedServing
from gym_fed.personalization.writer import VariantWriter
from gym_fed.serving.store.naming import variants_folder
from gym_fed.trust.identity.keys import SigningKey

if TYPE_CHECKING:
    from gym_fed.personalization.rows import PersonalRows
    from gym_fed.serving.setup import Serving


class PersonalizedTrainer:
    """Create variants of one base in one store.

    Args:
        base_model: ``gym-nano``, a model folder, or a name in the local cache.
        variants: Folder of the variant store, created when first written to; defaults to that of `gym variant`.
        method: ``lora``, or ``full`` for all weights.
        codec: Codec of the variants: ``auto`` is ``lora`` (quantised factors) or ``bitdelta`` by the method; or any
            other, ours or of an installed package.
        training: Keys of ``TrainingConfig`` that differ from the defaults of ``recipe.training_config``.
        encoding: Keys of ``CodecPolicy`` that differ from what ``codec`` stands for.
        key: Signs the variants; by default a key of the store's own, made on first use.
        unsigned: Sign nothing; such variants are served only where signatures are not required.
        device: As for ``gym_fed.base.models.pick_device``.

    Raises:
        GymError: ``USAGE`` for a method that is unknown, or for a key that is to sign nothing.
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
        """Train on a user's rows, encode the change, and add it to the store, signed.

        A run that was stopped is continued by the same call. Nothing is in the store before the variant is whole.

        Args:
            user_id: Whose it is, an account or a plain id; its name too, unless ``name`` is given.
            preferences: A path, or rows with ``prompt``, ``chosen`` and ``rejected``: learnt by DPO.
            examples: A path, or rows with ``messages``, ``prompt`` and ``completion``, or ``text``.
            data: A path, or rows of either kind, recognized by their columns.
            name: The name it is served under.
            held_out: Share of the rows that is never trained on: it measures, and chooses the step to stop at.
            columns: Names of the rows' columns, by the name that the format expects.
            as_chat: Whether prompts and answers that are plain strings are a user's turn and the assistant's answer;
                False for bare text, which ``complete`` continues. By default where the base has a chat template.
            replace: Make the next revision of a variant that exists.
            output: Where the work is kept, and left; by default inside the store, and removed at the end.
            overwrite: Forget unfinished work of this variant.
            listener: Follows the progress, and may stop it.

        Raises:
            GymError: ``FILE_EXISTS`` for a variant that exists, or unfinished work of other rows or settings;
                ``DATA_INVALID`` naming the row; ``INTERRUPTED``; ``CONFIG_INVALID`` naming the key; ``USAGE`` for
                ``as_chat`` with a base that has no chat template.
        """
        rows = self._rows(preferences, examples, data, held_out, columns)
        chosen = name or user_id
        revision = self._writer.planned_revision(chosen, user_id, replace=replace)
        from gym_fed.personalization.create import CreateRequest, create

        return create(
            CreateRequest(
                chosen,
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

        Signs, codes and factors are carried as they are; their scale is searched on the owner's rows, for the new base
        may have learnt of the delta already. With ``steps`` it is then trained on from there, and the better of the
        two is kept. The next revision, for the new base, takes the old one's place in the store.

        Args:
            name: Name of the variant.
            onto: The new base: a model folder, ``gym-nano``, or a name in the local cache.
            preferences: The owner's rows, as for ``create_variant``.
            examples: The same.
            data: The same.
            steps: Most steps of a refit; 0 for none.
            held_out: Share of the rows that is never trained on; the same rows are held out as when it was made.
            columns: As for ``create_variant``.
            as_chat: As for ``create_variant``; by default as it was there, which the variant remembers.
            force: Put it into the store even if it is no better than the new base alone, or nobody knows.
            output_name: Add it under another name, and leave the old one.
            overwrite: Forget an unfinished refit of this variant.
            listener: Follows the progress, and may stop it.

        Raises:
            GymError: ``UPDATE_REFUSED`` when it is no better than the new base alone; ``USAGE`` without rows and
                ``force``; ``BASE_MISMATCH`` naming a tensor that the new base has in another shape; ``NOT_FOUND``.
        """
        sources = (preferences, examples, data)
        rows = None if all(s is None for s in sources) else self._rows(*sources, held_out, columns)
        if rows is None and not force:
            require_better(Losses(), False)
        if rows is None and steps:
            raise GymError(ErrorCode.USAGE, f"steps {steps}: there are no rows to refit on", "give data")
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
        """Load a variant with the base and serve it in this process.

        Several may be served at a time: the base is in memory once.

        Args:
            user_id: Whose it is: the variant of that name, or else the only one that the user owns.
            name: The variant's, if the user has several.

        Raises:
            GymError: ``NOT_FOUND``; ``USAGE`` when the user has several; as ``VariantStore.poll`` for one that does not
                verify, or belongs to another base.
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
        given: list[tuple[Source, PersonalKind | None]] = []
        for source, kind in ((preferences, "preference"), (examples, "supervised"), (data, None)):
            if source is not None:
                given.append((source, kind))  # type: ignore[arg-type]  # the words of PersonalKind
        if len(given) != 1:
            raise GymError(
                ErrorCode.USAGE,
                f"{len(given)} sources of rows are given",
                "give exactly one of preferences, examples and data",
            )
        return read_rows(given[0][0], wanted=given[0][1], held_out=held_out, columns=columns)
