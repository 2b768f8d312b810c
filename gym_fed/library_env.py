"""Loggers of training libraries, hushed before their first import: nothing on standard output, no advice.

Optional libraries are imported by others whenever they are installed. DeepSpeed then announces on standard output which
accelerator it found, and others tell of kernels that they could not load; a run that needs one of these says so itself.
"""

from __future__ import annotations

import logging

_FOUND = "Setting accelerator to CPU"


def settle() -> None:
    """Calling again changes nothing."""
    for name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # A filter, for DeepSpeed sets its logger's level itself.
    logging.getLogger("DeepSpeed").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return _FOUND not in record.getMessage()
