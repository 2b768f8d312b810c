"""AWQ's 4-bit GEMM layout with zero points, for vLLM, SGLang, TGI and transformers with gptqmodel."""

from __future__ import annotations

from gym_fed.export.formats._few_bits import FewBits


class Awq(FewBits):
    """A model folder; auto-round finds the rounding (SignRound), the layout is AutoAWQ's."""

    name = "awq"
    layout = "auto_awq"
    symmetric = False
    tried = "Qwen3, Llama; groups of 128, 64 and 32"
    untried = "mixtures of experts; vLLM's kernels"
