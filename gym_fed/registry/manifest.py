"""Manifests of model versions and tags, their signatures, and their strict parsing from untrusted bytes.

A version is one JSON file with three keys: ``manifest``, ``public_key`` and ``signature``. The signature covers the
canonical JSON of ``manifest``, exactly as in the file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from gym_fed.config.schema.base import StrictModel, first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import is_safe_path
from gym_fed.core.json_files import MAX_DEPTH, canonical_digest, canonical_json, is_deeper
from gym_fed.core.text import plain
from gym_fed.trust.identity.keys import SigningKey, contributor_id, verify_signature

MAX_MANIFEST_BYTES = 4 << 20
MAX_FILES = 2_000
MAX_FILE_BYTES = 1 << 42
NOT_STATED = "LicenseRef-not-stated"
CARD = "README.md"
DELTA_FILE = "model.gymdelta"

_NUMBERS_END = 2**53
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}(/[a-z0-9][a-z0-9._-]{0,63})?", re.ASCII)
_TAG = re.compile(r"[a-z][a-z0-9._-]{0,63}", re.ASCII)
_FILE = re.compile(
    r"(base_adapters/\d{1,3}/|additional_chat_templates/|evals/)?"
    r"(\w[\w.-]{0,200}\.(safetensors|json|jinja|model|txt|md|yaml|gymdelta)"
    r"|(LICEN[CS]E|NOTICE|COPYING|USE_POLICY)[\w.-]{0,64})",
    re.ASCII,
)

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ModelDigest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Line = Annotated[str, Field(max_length=300)]
Seconds = Annotated[int, Field(ge=0, lt=_NUMBERS_END)]
Kind = Literal["weights", "adapter", "delta"]


class ModelFile(StrictModel):
    """One file of a model."""

    path: str
    """The path in the model's folder, with ``/``: weights, settings, tokenizer, licence, card or evaluation."""
    sha256: Sha256
    num_bytes: int = Field(ge=0, le=MAX_FILE_BYTES)

    @field_validator("path")
    @classmethod
    def _validate_path(cls, value: str) -> str:
        if not is_safe_path(value) or not _FILE.fullmatch(value):
            raise ValueError("is not a file that a model may contain")
        return value


class BaseUsed(StrictModel):
    """The model that an adapter or a delta belongs to."""

    name: Line
    """The name that the publisher uses: gym-nano, or a name on the Hub or in this registry."""
    digest: ModelDigest | None = None
    """The digest of its tensors in float32; None if the base was not available."""
    version: str | None = Field(default=None, max_length=160)
    """``name@version`` in the same registry, if it contains the base."""
    licence: Line = NOT_STATED


class DataUsed(StrictModel):
    """Rows that a model was trained on."""

    name: Line
    licence: Line | None = None
    """The SPDX identifier; None if it is not stated."""
    sha256: Sha256 | None = None
    hub: Line | None = None
    """The name on the Hugging Face Hub, if the rows are from there."""


class Parent(StrictModel):
    """A version that this one was derived from."""

    version: str = Field(max_length=160)
    """``name@version``."""
    sha256: Sha256
    """The digest of its manifest."""


class Lineage(StrictModel):
    """The recorded origin of a model."""

    parents: list[Parent] = Field(default_factory=list, max_length=64)
    global_version: ModelDigest | None = None
    """The digest of the hub's global version that the model is or was derived from."""
    soups: list[ModelDigest] = Field(default_factory=list, max_length=4096)
    """Digests of the soups in the model, oldest first."""
    data: list[DataUsed] = Field(default_factory=list, max_length=256)
    data_sha256: Sha256 | None = None
    """The digest of all rows together, as the run recorded it."""
    config_sha256: Sha256 | None = None
    method: Line = ""
    """The algorithm and tuning method of the run."""


class ModelManifest(StrictModel):
    """One version of a model."""

    format: Literal["gym-model-1"] = "gym-model-1"
    name: str
    version: int = Field(ge=1, lt=_NUMBERS_END)
    kind: Kind
    digest: ModelDigest | None = None
    """The digest of the tensors in float32 that the version represents, with a delta added to its base.

    None for models other than text models, for adapters, and for low-rank deltas, whose product differs in its last
    bits between machines.
    """
    licence: Line
    description: str = Field(max_length=2000)
    base: BaseUsed | None = None
    files: list[ModelFile] = Field(min_length=1, max_length=MAX_FILES)
    lineage: Lineage = Field(default_factory=Lineage)
    created_at: Seconds

    @field_validator("name")
    @classmethod
    def _validate_name(cls, value: str) -> str:
        if not is_model_name(value):
            raise ValueError("is not a valid model name")
        return value

    @field_validator("files")
    @classmethod
    def _validate_files(cls, value: list[ModelFile]) -> list[ModelFile]:
        paths = [file.path.lower() for file in value]
        if len(set(paths)) < len(paths):
            raise ValueError("lists a file twice")
        return value

    @model_validator(mode="after")
    def _validate_kind(self) -> ModelManifest:
        paths = {file.path for file in self.files}
        if self.kind == "delta":
            if DELTA_FILE not in paths or any(path.endswith((".safetensors", ".model")) for path in paths):
                raise ValueError(f"a delta consists of {DELTA_FILE} without weights")
            if self.base is None or self.base.digest is None:
                raise ValueError("a delta needs the digest of its base")
        return self

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files)

    def same_content(self, other: ModelManifest) -> bool:
        """Return True if the two differ only in number and time."""
        skipped = {"version", "created_at"}
        return self.model_dump(exclude=skipped) == other.model_dump(exclude=skipped)


class TagMove(StrictModel):
    """The setting or removal of a tag. Only the newest move is valid, but all are stored."""

    format: Literal["gym-model-tag-1"] = "gym-model-tag-1"
    name: str = Field(max_length=160)
    tag: str = Field(max_length=64)
    number: int = Field(ge=1, lt=_NUMBERS_END)
    version: int | None = Field(default=None, ge=1, lt=_NUMBERS_END)
    """The version that the tag refers to; None if the tag was removed."""
    manifest_sha256: Sha256 | None = None
    """The digest of the version's manifest."""
    created_at: Seconds


SignedT = TypeVar("SignedT", ModelManifest, TagMove)


@dataclass(frozen=True)
class Signer:
    """The owner of the key that signed."""

    public_key: bytes

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the public key, ``sha256:<hex>``."""
        return f"sha256:{hashlib.sha256(self.public_key).hexdigest()}"

    @property
    def contributor(self) -> str:
        """The id of the account that has this key as its first key."""
        return contributor_id(self.public_key)


@dataclass(frozen=True)
class ModelVersion:
    """A version whose signature was checked.

    Attributes:
        manifest: The manifest.
        signer: The key that signed it, which need not be trusted.
        sha256: The digest of the manifest, lower-case hex.
    """

    manifest: ModelManifest
    signer: Signer
    sha256: str

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def reference(self) -> str:
        """``name@version``."""
        return f"{self.name}@{self.version}"


def is_model_name(text: str) -> bool:
    """Return True for a valid model name: lowercase letters, digits, ``. _ -``, and at most one ``/``."""
    return _NAME.fullmatch(text) is not None and not text.endswith(".json")


def is_tag(text: str) -> bool:
    """Return True for a valid tag. An all-digit tag would be a version."""
    return _TAG.fullmatch(text) is not None and not text.endswith(".json")


def sealed(value: ModelManifest | TagMove, key: SigningKey) -> bytes:
    """Sign and serialize a version or a tag's move."""
    plain_data = value.model_dump(mode="json")
    document = {
        "manifest": plain_data,
        "public_key": key.public_key.hex(),
        "signature": key.sign(plain_data).hex(),
    }
    return canonical_json(document)


def opened(data: bytes, kind: type[SignedT], where: str) -> tuple[SignedT, Signer, str]:
    """Parse the output of ``sealed``: the value, its signer, and the digest of the signed bytes.

    Args:
        data: Untrusted bytes, of a size that the caller has limited.
        kind: The expected type.
        where: The location, for messages.

    Raises:
        GymError: ``STATE_CORRUPT`` for other formats; ``SIGNATURE_INVALID``.
    """
    document = _document(data, where)
    values = document["manifest"]
    key, signature = _hex(document["public_key"], 32), _hex(document["signature"], 64)
    if key is None or signature is None:
        raise _corrupt(where, "public_key or signature is not of the right length")
    try:
        verify_signature(key, values, signature)
    except GymError as error:
        raise GymError(
            ErrorCode.SIGNATURE_INVALID,
            f"{where}: {error.message}",
            "it was changed after it was signed; get it from another source, or from its author",
        ) from error
    except (ValueError, TypeError) as error:  # values that JSON allows but canonical JSON does not
        raise _corrupt(where, plain(error)) from error
    try:
        value = kind.model_validate(values)
    except ValidationError as error:
        raise _corrupt(where, plain(first_problem(error))) from error
    return value, Signer(key), canonical_digest(values)


def _document(data: bytes, where: str) -> Mapping[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _corrupt(where, plain(error)) from error
    if not isinstance(document, dict) or is_deeper(document, MAX_DEPTH):
        raise _corrupt(where, "is not a JSON object, or is nested too deeply")
    if document.keys() != {"manifest", "public_key", "signature"} or not isinstance(
        document["manifest"], dict
    ):
        raise GymError(
            ErrorCode.SIGNATURE_INVALID,
            f"{where} is not signed",
            "push the model again with this release, which signs what it pushes",
        )
    return document


def _hex(value: object, num_bytes: int) -> bytes | None:
    if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{2 * num_bytes}}}", value, re.ASCII):
        return None
    return bytes.fromhex(value)


def _corrupt(where: str, problem: str) -> GymError:
    return GymError(
        ErrorCode.STATE_CORRUPT,
        f"{where}: {problem}",
        "restore the file, or push the model again as a new version",
    )
