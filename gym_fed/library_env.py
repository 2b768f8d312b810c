"""Training libraries, hushed before their first import: nothing on standard output, no advice to their callers.

Optional libraries are imported by others whenever they are installed. DeepSpeed then announces on standard output which
accelerator it found, and others tell of kernels that they could not load; a run that needs one of these says so itself.
"""

from __future__ import annotations

import logging
import os
import warnings

_NO_NEWS = (
    "Setting accelerator to CPU",
    "Token indices sequence length is longer",  # rows are cut to max_length after they are encoded
)
_OLD_NAME = r"`(is_)?gradient_checkpointing\w*` is deprecated"


def settle() -> None:
    """Calling again changes nothing."""
    for name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # A filter, for DeepSpeed sets its logger's level itself.
    logging.getLogger("DeepSpeed").addFilter(_is_news)
    logging.getLogger("transformers.tokenization_utils_base").addFilter(_is_news)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # its versions are pinned here
    # PEFT, TRL and transformers itself use names that transformers has given up.
    warnings.filterwarnings("ignore", _OLD_NAME, FutureWarning)


def _is_news(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in _NO_NEWS)
