"""Settings of the training libraries that must stand before they are imported: nothing on standard output, no advice.

Optional libraries are imported by others whenever they are installed. DeepSpeed then announces on standard output which
accelerator it found, and others tell of kernels that they could not load; a run that needs one of these says so itself.
"""

from __future__ import annotations

import logging
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
for _name in ("bitsandbytes", "deepspeed", "torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
