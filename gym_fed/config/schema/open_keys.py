"""Keys that registries add to a schema: sections of algorithms and tuning methods, and keys of features.

Built-in keys are fields, so that ``config.lora.r`` has a type. A member without a field of its name comes from an
installed package or an added file. Its attribute ``Settings`` is the class of its section. The section is checked
against that class, and an error in it is reported as for a field, with file, line and column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetJsonSchemaHandler,
    TypeAdapter,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError

from gym_fed.config.schema.base import AcceptsAliases
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALGORITHMS, TUNING, Kind


@dataclass(frozen=True)
class _Added:
    """The value of a key that is not a field.

    Attributes:
        value: Raw value.
        type: Type of the value; None for a key that nothing reads.
        idle: What is chosen instead, such as ``algorithm is sft``; empty if the key's member is chosen.
    """

    value: Any
    type: Any = None
    idle: str = ""

    def __repr__(self) -> str:
        return repr(self.value)  # quoted in error messages


def _checked(added: Any) -> Any:
    """Validate the value with its member's class."""
    if not isinstance(added, _Added):
        return added
    if added.idle:
        raise PydanticCustomError(
            "idle_section", "is given, but {chosen}; remove the section", {"chosen": added.idle}
        )
    if added.type is None:
        raise PydanticKnownError("extra_forbidden")
    return TypeAdapter(added.type).validate_python(added.value)


class OpenModel(AcceptsAliases):
    """A schema with a section for each chosen member; every other key that is not a field is refused.

    Only the sections of chosen members may be given; they exist even if none of their keys is set.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Any, BeforeValidator(_checked)]]

    choices: ClassVar[tuple[tuple[str, Kind[Any]], ...]] = (("algorithm", ALGORITHMS), ("finetuning", TUNING))
    """The keys that choose a member, with the member's kind; each has a default."""

    sections_choose: ClassVar[frozenset[str]] = frozenset()
    """Keys of ``choices`` that a member's section sets if they are unset."""

    features: ClassVar[Kind[Any] | None] = None
    """The registry kind whose members are keys of the schema."""

    @classmethod
    def sections(cls, kind: Kind[Any]) -> list[str]:
        """Return the fields that are sections of built-in members."""
        return [name for name in kind.own() if name in cls.model_fields]

    @classmethod
    def added_key(cls, name: str) -> Any:
        """Return the type of the key ``name``, which is not a field; None if no member has a section of that name.

        Raises:
            GymError: ``MISSING_DEPENDENCY`` for a member of another package that cannot be used.
        """
        settings_types = [kind.type_of(name).Settings for _, kind in cls.choices if name in kind]
        if cls.features is not None and name in cls.features:
            settings_types.append(cls.features.type_of(name).Settings or bool)
        settings_types = [settings for settings in settings_types if settings is not None]
        if len(settings_types) > 1:
            reason = f"{name}: two members of this name have a section"
            raise GymError(
                ErrorCode.MISSING_DEPENDENCY, reason, "remove one of the packages that provide them"
            )
        return settings_types[0] if settings_types else None

    def chosen_sections(self) -> dict[str, Any]:
        """Return the sections of the chosen members by name; members without a section are omitted."""
        fields, added = type(self).model_fields, self.__pydantic_extra__ or {}
        chosen = [(kind, getattr(self, key)) for key, kind in self.choices]
        return {name: added[name] for _, name in chosen if name in added} | {
            name: getattr(self, name) for kind, name in chosen if name in kind.own() and name in fields
        }

    @model_validator(mode="before")
    @classmethod
    def _resolve_sections(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        filled = values = cls._chosen_by_sections(values)
        for key, kind in cls.choices:
            chosen = values.get(key, cls.model_fields[key].default)
            if not isinstance(chosen, str) or chosen not in kind:
                continue  # refused at its own key
            if chosen in kind.own() and chosen in cls.model_fields:
                if cls.model_fields[chosen].default is None and filled.get(chosen) is None:
                    filled[chosen] = {}
            elif chosen not in kind.own() and kind.type_of(chosen).Settings is not None:
                if chosen in cls.model_fields:
                    raise kind.broken(
                        chosen, f"{kind.kind} {chosen!r}: gym-fed has a key of this name", "rename it"
                    )
                filled[chosen] = {} if filled.get(chosen) is None else filled[chosen]
        return {
            key: value
            if not isinstance(key, str) or key in cls.model_fields
            else cls._added(key, value, values)
            for key, value in filled.items()
        }

    @classmethod
    def _chosen_by_sections(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return a copy in which a section such as ``lora: {r: 16}`` chooses its method; see ``sections_choose``."""
        filled = dict(values)
        for key, kind in cls.choices:
            if key not in cls.sections_choose or values.get(key) is not None:
                continue
            given = [name for name in cls.sections(kind) if isinstance(values.get(name), dict | BaseModel)]
            if len(given) == 1:
                filled[key] = given[0]
        return filled

    @classmethod
    def _added(cls, name: str, value: Any, values: dict[str, Any]) -> _Added:
        if isinstance(value, _Added):
            return value
        for key, kind in cls.choices:
            chosen = values.get(key, cls.model_fields[key].default)
            if name in kind and name != chosen:
                return _Added(value, idle=f"{key} is {chosen}")
        return _Added(value, type=cls.added_key(name))

    @model_validator(mode="after")
    def _validate_sections(self) -> OpenModel:
        """Refuse a section that would have no effect."""
        for key, kind in self.choices:
            chosen = getattr(self, key)
            for name in self._idle(kind, chosen):
                raise ValueError(f"{name} is given, but {key} is {chosen}; remove the section")
        return self

    def _idle(self, kind: Kind[Any], chosen: str) -> Iterator[str]:
        fields = type(self).model_fields
        for name in self.sections(kind):
            if name != chosen and fields[name].default is None and getattr(self, name) is not None:
                yield name

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the fields and the keys of built-in members; other packages' members are listed but not imported."""
        resolved = handler.resolve_ref_schema(super().__get_pydantic_json_schema__(schema, handler))
        resolved["additionalProperties"] = False
        for key, kind in cls.choices:
            for name in kind.names():
                if name not in cls.model_fields and (name not in kind.own() or kind.type_of(name).Settings):
                    resolved["properties"].setdefault(
                        name, {"type": "object", "description": f"Settings of {key}: {name}."}
                    )
        for name in () if cls.features is None else cls.features.names():
            if name not in cls.model_fields:
                resolved["properties"].setdefault(name, {"description": f"The feature {name}."})
        return resolved
