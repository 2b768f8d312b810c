"""Pre-training: next-token loss on every token of texts that are joined and cut into rows of ``max_length``."""

from __future__ import annotations

from gym_fed.training.algorithms.sft import Sft as _Sft


class Pretrain(_Sft):
    """``sft`` with the defaults of pre-training; also trains models with random weights (``model_init``)."""

    assistant_only_default = False
    packing_default = True
    reads_images = False
    takes_reference = False
    tried = "every method, optimiser and feature; two processes; federated rounds"
    untried = ""
