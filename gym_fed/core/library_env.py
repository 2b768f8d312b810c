"""The environment of Flower and of training libraries, which is set before their first import.

``gym_fed`` imports this module first, and all other packages of gym-fed import ``gym_fed`` first. Without the three
variables, every Flower process contacts external hosts for telemetry, update checks and run-time installs.

Optional libraries are imported whenever they are installed. DeepSpeed then prints the detected accelerator to standard
output, and others report kernels that they could not load. A run that needs such a kernel reports the problem itself.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

VARIABLES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}

os.environ.update(VARIABLES)


_NO_NEWS = (
    "Setting accelerator to CPU",
    "Token indices sequence length is longer",  # rows are truncated to max_length after tokenization
)
_OLD_NAME = r"`(is_)?gradient_checkpointing\w*` is deprecated"


def settle() -> None:
    """Apply the settings; repeated calls have no effect."""
    for name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # A filter, because DeepSpeed sets its logger's level itself.
    logging.getLogger("DeepSpeed").addFilter(_is_news)
    logging.getLogger("transformers.tokenization_utils_base").addFilter(_is_news)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # the version of TRL is pinned
    # PEFT, TRL and transformers use names that are deprecated in transformers.
    warnings.filterwarnings("ignore", _OLD_NAME, FutureWarning)
    # PEFT imports bitsandbytes if installed. That imports torch's compiler, which takes seconds at every start.
    import_late("bitsandbytes")


def bound_spinning() -> None:
    """Limit how long idle OpenMP threads spin in this process and its children.

    By default, idle threads of libgomp spin for milliseconds and keep their cores from other threads. Next to another
    busy process, exporting a small model then takes 20 to 40 s of CPU time instead of 7 s. On an idle machine, the
    limit does not change the speed (SmolLM2: 20 ms per token). It must be set before PyTorch is imported. A value set
    by the user is kept.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def import_late(name: str) -> None:
    """Defer the execution of a package to its first attribute access; a missing package stays missing."""
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    module = _Late(name)
    module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, name
    module.__file__ = spec.origin  # ``inspect`` reads it for every module
    sys.modules[name] = module


class _Late(ModuleType):
    """A package that is executed when an attribute (``__path__`` included) is first read.

    Python's ``LazyLoader`` also executes a package for ``__spec__``, which libraries read to see if it is installed.
    """

    def __getattr__(self, attribute: str) -> Any:
        spec = self.__spec__
        if spec is None or spec.loader is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {attribute!r}")
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__dict__.update(vars(importlib.util.module_from_spec(spec)))
        try:
            spec.loader.exec_module(self)
        except BaseException:
            sys.modules.pop(self.__name__, None)
            raise
        return getattr(self, attribute)


def _is_news(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in _NO_NEWS)


@contextmanager
def without_collection(freeze: bool = False) -> Iterator[None]:
    """Disable garbage collection in the block.

    Torch and transformers create a million long-lived objects; scanning them takes a fifth of their import time.

    Args:
        freeze: True to exempt all objects from later collections, for processes that keep what they have loaded. A
            model that is dropped later is then never freed, since models contain reference cycles.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        gc.enable()


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silence transformers' progress bars and advice while a model is loaded; errors still raise."""
    from transformers.utils import logging as library

    level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if bars:
            library.enable_progress_bar()
