"""Settings of the training libraries that must stand before they are imported: nothing on standard output, no advice.

Optional libraries are imported by others whenever they are installed. DeepSpeed then announces on standard output which
accelerator it found, and others tell of kernels that they could not load; a run that needs one of these says so itself.
"""

from __future__ import annotations

import logging
import os


def settle() -> None:
    """Call before the first import of transformers, TRL or PEFT in a process; calling again changes nothing."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name in ("bitsandbytes", "deepspeed", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
