"""Which path do gym_quant's numeric kernels take: native code, or the torch reference?"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator

from gym_fed.doctor.finding import Finding, Level
from gym_fed.doctor.registry import check


@check
def kernels() -> Iterator[Finding]:
    """Ask ``gym_quant.kernels.describe()``; without that module there is the torch reference only."""
    if importlib.util.find_spec("gym_quant.kernels") is None:
        yield Finding("kernels", Level.OK, "torch reference: this build has no native kernels")
        return
    yield Finding("kernels", Level.OK, importlib.import_module("gym_quant.kernels").describe())
