"""GPTQ's symmetric layout of 4 or 8 bits, for vLLM, SGLang, TGI and transformers with gptqmodel."""

from __future__ import annotations

from gym_fed.export.formats._few_bits import FewBits, of_bits


class Gptq(FewBits):
    """A model folder; auto-round finds the rounding (SignRound), the layout is AutoGPTQ's original one."""

    name = "gptq"
    layout = "auto_gptq"
    symmetric = True
    quantizations = of_bits(4, 8)
    tried = "Qwen3, Llama; groups of 128, 64 and 32"
    untried = "mixtures of experts; vLLM's kernels"
