"""A key of a schema whose value is the name of a member, such as an aggregator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gym_quant.registry import Registry
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True)
class MemberOf:
    """``Annotated[str, MemberOf(AGGREGATORS)]``: the value is the name of a member of that kind, ours or installed.

    The JSON schema lists the members of this machine. A member is looked up by name and not imported.

    Attributes:
        kind: The registry.
        also: Further words that the key takes, such as ``none``.
    """

    kind: Registry[Any]
    also: tuple[str, ...] = ()

    def words(self) -> tuple[str, ...]:
        """Everything that the key takes."""
        return (*self.also, *self.kind.names())

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "enum": list(self.words())}

    def _known(self, name: str) -> str:
        if name not in self.words():
            raise ValueError(f"unknown {self.kind.kind} {name!r} (known: {', '.join(self.words())})")
        return name
