"""Check which implementation gym_quant's kernels use: native code or the torch reference."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from gym_fed.doctor.check import Check, Finding, Level

_BUILD = "for native code, install a C++ compiler, then reinstall the package: pip install ."


class Kernels(Check):
    """Query ``gym_quant.kernels``; fails if GYM_KERNELS names an unavailable implementation."""

    def findings(self) -> Iterator[Finding]:
        try:
            quant = importlib.import_module("gym_quant.kernels")
        except (ImportError, OSError) as error:
            yield Finding("kernels", Level.FAIL, f"gym_quant cannot be imported: {error}", "make install")
            return
        refused: type[Exception] = importlib.import_module("gym_quant").CodecError
        try:
            path, described = quant.path(), quant.describe()
        except refused as error:
            yield Finding(
                "kernels", Level.FAIL, str(error), "unset GYM_KERNELS, or set it to an available one"
            )
            return
        not_built = quant.available() == ("torch",)
        yield Finding("kernels", Level.OK, described, _BUILD if not_built and path == "torch" else "")
