"""Parse a hub's announcements in its status: recipe, codec, pay, audits, rounds and downloads."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from gym_client.agent.kept_soups import KeptSoups
from gym_client.hub.replies import parse_object
from gym_client.hub.transport import HubClient
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.audit import AuditTerms
from gym_fed.config.hub.credits import PayTerms
from gym_fed.config.hub.mirrors import MirrorConfig
from gym_fed.config.hub.region import RegionConfig
from gym_fed.config.hub.seeding import SeedingTerms
from gym_fed.config.hub.task import TrainingRecipe
from gym_fed.config.schema.base import StrictModel, first_problem
from gym_fed.config.schema.plugins import only_recorded, plugins_of, recorded_in, require_plugins
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.trust.mirrors.listing import SignedMirrors
from gym_fed.trust.wire.v1 import hub_pb2 as pb

Announced = TypeVar("Announced", bound=StrictModel)

_MAX_ERROR_CHARS = 2000
"""Maximum characters in the description of an invalid recipe, since a hub chooses the number of its errors."""

SOUP_FORMS = {
    "factors": "LoRA factors",
    "values": "full matrices",
    "full": "full updates",
}
"""Descriptions of the forms in which a hub may send its soups. Other values from a hub are ignored."""


def announced_pay(status: pb.StatusReply) -> PayTerms | None:
    """Return the pay terms that the hub announces; None if it announces none.

    Raises:
        GymError: ``POLICY_REFUSED`` for unreadable terms.
    """
    return _announced_terms(status, "pay", PayTerms)


def announced_audit(status: pb.StatusReply) -> AuditTerms | None:
    """Return the audit terms that the hub announces; None if it has no audits.

    Raises:
        GymError: ``POLICY_REFUSED`` for unreadable terms.
    """
    return _announced_terms(status, "audit", AuditTerms)


def announced_mirrors(status: pb.StatusReply) -> list[MirrorConfig]:
    """Return the mirrors that the hub announces. Raises the errors of ``SignedMirrors.verified``."""
    document = parse_object(status.recipe_json or "{}", "a recipe", ErrorCode.POLICY_REFUSED)
    if "mirrors" not in document:
        return []
    return SignedMirrors.verified(document["mirrors"], status.ledger_public_key).mirrors


def announced_region(status: pb.StatusReply) -> RegionConfig | None:
    """Return the root hub that receives this hub's merged rounds; None if it is not a region.

    Raises:
        GymError: ``POLICY_REFUSED`` for unreadable terms.
    """
    return _announced_terms(status, "region", RegionConfig)


def announced_seeding(status: pb.StatusReply) -> SeedingTerms | None:
    """Return the seeding settings that the hub announces; None if it does not allow seeding.

    Raises:
        GymError: ``POLICY_REFUSED`` for unreadable terms.
    """
    return _announced_terms(status, "seeding", SeedingTerms)


def _announced_terms(status: pb.StatusReply, key: str, schema: type[Announced]) -> Announced | None:
    terms = parse_object(status.recipe_json or "{}", "a recipe", ErrorCode.POLICY_REFUSED).get(key)
    if terms is None:
        return None
    try:
        return schema.model_validate(terms)
    except ValidationError as error:
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            f"the {key} terms that the server announces are invalid: {first_problem(error)}",
            "update gym-fed",
        ) from error


def bytes_to_join(client: HubClient, status: pb.StatusReply) -> int:
    """Return the bytes to fetch before the first round: this hub's soups that are missing on this machine."""
    here = 0
    if client.pin.account:
        server, home = client.pin.server, client.home
        soups = [home.objects / name for name in KeptSoups(home).names(server)]
        files = [*soups, *home.versions(server).iterdir()]
        here = sum(path.stat().st_size for path in files if path.is_file())
    return max(0, int(status.join_download_bytes) - here)


def announced_soup_form(status: pb.StatusReply) -> str:
    """Return the form in which the hub sends its soups, a key of ``SOUP_FORMS``; empty if unknown."""
    soup = parse_object(status.recipe_json, "a recipe", ErrorCode.POLICY_REFUSED).get("soup")
    form = soup.get("form") if isinstance(soup, dict) else None
    return form if isinstance(form, str) and form in SOUP_FORMS else ""


def announced_continuous(status: pb.StatusReply) -> dict[str, int] | None:
    """Return ``merge_every`` and ``max_staleness`` if the hub has continuous rounds; None for synchronous rounds."""
    document = parse_object(status.recipe_json or "{}", "a recipe", ErrorCode.POLICY_REFUSED)
    named = document.get("continuous")
    if not isinstance(named, dict):
        return None
    values = {key: named.get(key) for key in ("merge_every", "max_staleness")}
    return {key: value for key, value in values.items() if type(value) is int}


def rounds_to_come(status: pb.StatusReply, limit: int | None) -> int | None:
    """Return the remaining or the requested number of rounds, whichever is less; None if both are unknown."""
    left = max(0, int(status.num_rounds) - int(status.version_height)) if status.num_rounds else None
    document = parse_object(status.recipe_json or "{}", "a recipe", ErrorCode.POLICY_REFUSED)
    announced_left = document.get("rounds_left")  # num_rounds - height would count abandoned versions
    left = announced_left if type(announced_left) is int and announced_left >= 0 else left
    known = [number for number in (left, limit) if number is not None]
    return min(known) if known else None


def announced(status: pb.StatusReply) -> tuple[TrainingRecipe, CodecPolicy]:
    """Return the recipe and codec that the hub announces.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` with the plug-in that is missing or different on this machine;
            ``POLICY_REFUSED`` with unknown keys or invalid values.
    """
    plugins = recorded_in(status.recipe_json)
    require_plugins(plugins, "the hub's recipe")
    try:
        document = parse_object(
            status.recipe_json, "a recipe", ErrorCode.POLICY_REFUSED, recipe=dict, codec=dict
        )
        with only_recorded(plugins, "the hub's recipe"):
            recipe, codec = (
                TrainingRecipe.model_validate(document["recipe"]),
                CodecPolicy.model_validate(document["codec"]),
            )
    except (ValueError, KeyError, TypeError, GymError) as error:
        if isinstance(error, GymError) and error.code is ErrorCode.MISSING_DEPENDENCY:
            raise
        problem = error.message if isinstance(error, GymError) else str(error)
        if isinstance(error, ValidationError):
            problem = "; ".join(
                f"{'.'.join(map(str, e['loc'])) or 'recipe'}: {e['msg']}" for e in error.errors()
            )
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            plain(f"the recipe that the server announces is invalid: {problem}", _MAX_ERROR_CHARS),
            "update gym-fed",
        ) from error
    require_plugins(plugins, "the hub's recipe", plugins_of(recipe, codec))
    return recipe, codec
