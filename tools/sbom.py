"""Write an SBOM and checksums next to a built wheel: ``python -m tools.sbom WHEEL [SDIST ...]``.

``WHEEL.cdx.json`` is a CycloneDX 1.6 document of the wheel and its dependencies, with the installed versions, which are
those of constraints.txt. ``SHA256SUMS`` covers the given files and the SBOM; check it with
``sha256sum -c SHA256SUMS``.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterable
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gym_fed.core.files import file_sha256

SUMS = "SHA256SUMS"


def main(wheel: Path, *others: Path) -> None:
    sbom = write_sbom(wheel)
    sums = write_checksums([wheel, *others, sbom])
    print(f"sbom: {sbom.name} and {sums.name} in {wheel.parent}")


def write_sbom(wheel: Path) -> Path:
    """Write ``WHEEL.cdx.json`` next to the wheel and return its path.

    Raises:
        SystemExit: If a requirement is not installed, or the document does not match the CycloneDX schema.
    """
    headers = _headers(wheel)
    root = _component(str(headers["Name"]), str(headers["Version"]), file_sha256(wheel))
    bom = Bom()
    bom.metadata.component = root
    components = {"": root}
    _add(bom, components, root, headers.get_all("Requires-Dist") or [], extras=frozenset())
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2)
    if (problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        sys.exit(f"sbom: not a valid CycloneDX document: {problem}")
    path = wheel.with_name(wheel.name + ".cdx.json")
    path.write_text(text + "\n", encoding="utf-8")
    return path


def write_checksums(files: Iterable[Path]) -> Path:
    """Write ``SHA256SUMS``, in the format of ``sha256sum``, next to the first file."""
    files = list(files)
    path = files[0].with_name(SUMS)
    path.write_text("".join(f"{file_sha256(file)}  {file.name}\n" for file in files), encoding="utf-8")
    return path


def _add(
    bom: Bom, known: dict[str, Component], parent: Component, lines: Iterable[str], extras: frozenset[str]
) -> None:
    """Add the installed distributions that ``lines`` require, recursively, with the dependency edges."""
    children = []
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            continue
        name = canonicalize_name(requirement.name)
        # A distribution that is required again with more extras brings more requirements.
        key = f"{name}[{','.join(sorted(requirement.extras))}]"
        if key not in known:
            try:
                found = metadata.distribution(name)
            except metadata.PackageNotFoundError:
                sys.exit(f"sbom: {name} is required by {parent.name}, but not installed; run make install")
            known[key] = known.setdefault(name, _component(name, found.version))
            _add(bom, known, known[key], found.requires or [], frozenset({"", *requirement.extras}))
        children.append(known[key])
    bom.components.update(children)
    bom.register_dependency(parent, children)


def _component(name: str, version: str, sha256: str = "") -> Component:
    purl = PackageURL("pypi", None, canonicalize_name(name), version)
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else []
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        purl=purl,
        bom_ref=purl.to_string(),
        hashes=hashes,
    )


def _headers(wheel: Path) -> metadata.PackageMetadata:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode("utf-8"))  # type: ignore[return-value]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
