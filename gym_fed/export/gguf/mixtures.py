"""Which type each tensor of a GGUF file gets, as llama.cpp's own quantiser chooses for its mixtures."""

from __future__ import annotations

BLOCK = 256
"""Values of a block of the K types; a row that is no multiple of it falls back."""
FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""For such rows, as llama.cpp's; of these, blocks have 32 values."""
PLAIN = {"q4_0": "Q4_0", "q8_0": "Q8_0", "q6_k": "Q6_K", "q5_k_m": "Q5_K", "q4_k_m": "Q4_K"}
"""Type of most tensors, by ``--quantization``."""
_MIXED = ("q5_k_m", "q4_k_m")


_PLAIN_MATRICES = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
"""Ends of what is never quantised."""
_VALUES = ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight")
"""What makes the values of attention, alone or with others."""
_EXPERTS = 8
"""Of a model with so many, attention is small beside them and keeps more bits."""


def tensor_type(
    quantization: str,
    tensor: str,
    row: int,
    layer: int | None,
    layers: int,
    *,
    tied: bool,
    experts: int = 0,
) -> str | None:
    """The type of a matrix; None where llama.cpp leaves it as it is.

    Args:
        quantization: Of ``PLAIN``.
        tensor: Its name in the file, as ``blk.3.attn_v.weight``.
        row: Values of a row.
        layer: Its layer; None outside of them.
        layers: Of the model.
        tied: Whether the embeddings are the head, too.
        experts: Of each layer.

    Returns:
        Name of a ``gguf.GGMLQuantizationType``.
    """
    if not tensor.endswith(".weight") or tensor.endswith(_PLAIN_MATRICES):
        return None
    chosen = PLAIN[quantization]
    mixed, bits = quantization in _MIXED, layer is not None and _more_bits(layer, layers)
    if tensor == "output.weight" or (tied and tensor == "token_embd.weight"):
        chosen = "Q8_0" if quantization == "q8_0" or (chosen in FALLBACK and row % BLOCK) else "Q6_K"
    elif tensor.endswith(_VALUES):
        chosen = "Q8_0" if experts == _EXPERTS else "Q6_K" if mixed and bits else chosen
    elif tensor.endswith("attn_k.weight") and experts == _EXPERTS:
        chosen = "Q8_0"
    elif mixed and bits and tensor.endswith(("ffn_down.weight", "ffn_down_exps.weight")):
        chosen = "Q6_K"
    elif quantization == "q4_k_m" and experts == _EXPERTS and tensor.endswith("attn_output.weight"):
        chosen = "Q5_K"
    if row % BLOCK and chosen in FALLBACK:
        chosen = FALLBACK[chosen]
    return chosen if row % 32 == 0 else "F16"


def _more_bits(layer: int, layers: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
