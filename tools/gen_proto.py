"""Regenerate gym_fed/trust/wire/_generated from proto/ (`make proto`); `--check` reports whether this is needed.

Only messages are generated; ``gym_fed.trust.wire.service`` reads the calls from the descriptors. Imports are rewritten
to their location in gym_fed: otherwise they would be ``from gym.fed.v1 import ...``, but the top-level module ``gym``
belongs to another well-known package.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROTO = ROOT / "proto"
OUT = ROOT / "gym_fed" / "trust" / "wire" / "_generated"
PACKAGE = "gym_fed.trust.wire._generated"


def generate() -> dict[str, str]:
    """Return the text of every module generated from proto/, by its path below ``OUT``."""
    from grpc_tools import protoc

    names = sorted(str(p.relative_to(PROTO)) for p in PROTO.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi")]
        if protoc.main(["protoc", f"-I{PROTO}", *outputs, *names]):
            raise SystemExit("protoc rejects the definitions in proto/")
        stubs = sorted(p for p in Path(folder).rglob("*.py*"))
        return {
            str(p.relative_to(folder)): re.sub(
                r"^from gym\.", f"from {PACKAGE}.gym.", p.read_text(encoding="utf-8"), flags=re.MULTILINE
            )
            for p in stubs
        }


def main() -> None:
    """Write the modules that differ; with ``--check``, write nothing and exit with 1 if any differ."""
    made = generate()
    present = {
        str(p.relative_to(OUT)): p.read_text(encoding="utf-8")
        for p in OUT.rglob("*_pb2*.py*")
        if p.suffix != ".pyc"
    }
    different = sorted(name for name in made.keys() | present.keys() if made.get(name) != present.get(name))
    if "--check" in sys.argv[1:]:
        if different:
            raise SystemExit(f"out of date: {', '.join(different)}; run `make proto`")
        return
    for name in different:
        if name not in made:
            (OUT / name).unlink()
            continue
        file = OUT / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(made[name], encoding="utf-8")
        for package in [file.parent, *file.parent.parents]:
            (package / "__init__.py").touch()
            if package == OUT:
                break
    print(f"{len(made)} modules, {len(different)} of them changed")


if __name__ == "__main__":
    main()
