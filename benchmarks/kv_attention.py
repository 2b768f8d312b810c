"""Loss of a KV cache in bfloat16 or int8: the same tokens scored through caches of every dtype.

    python benchmarks/kv_attention.py --model FOLDER --text FILE [--json] [--plot FILE]

The figures are the KL divergence from float32, the share of positions with the same most likely token, and the bytes
per token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from _report import Report, options
from gym_quant.kernels import KV_DTYPES
from transformers import AutoModelForCausalLM, AutoTokenizer

from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.forward.multi_variant import MultiVariantModel

CHUNK, CONTEXT = 256, 1024


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, metavar="FOLDER", required=True)
    parser.add_argument("--text", type=Path, metavar="FILE", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("kv_attention")
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    text = arguments.text.read_text(encoding="utf-8")[:40_000]
    ids = AutoTokenizer.from_pretrained(arguments.model)(text)["input_ids"][: 2 * CONTEXT]
    found: dict[str, torch.Tensor] = {}
    for dtype in KV_DTYPES:
        rows = []
        with MultiVariantModel(model, kv_dtype=dtype) as served:
            for start in range(0, len(ids), CONTEXT):
                cache = served.new_cache()
                for at in range(start, min(start + CONTEXT, len(ids)), CHUNK):
                    part = ids[at : min(at + CHUNK, start + CONTEXT)]
                    rows.append(served.step([Chunk(part, cache, num_logits=len(part))]).log_softmax(dim=1))
            report.figure(f"bytes_per_token_{dtype}", served.bytes_per_token)
        found[dtype] = torch.cat(rows)
    truth = found["float32"]
    for dtype in KV_DTYPES[1:]:
        divergence = float((truth.exp() * (truth - found[dtype])).sum(dim=1).mean())
        same = float((truth.argmax(dim=1) == found[dtype].argmax(dim=1)).float().mean())
        report.compare(f"KL of {dtype} over {len(ids)} tokens, 1e-6", 1e6 * divergence)
        report.compare(f"the same likeliest token, {dtype}", 100 * same, unit="%", better="higher")
    report.finish(arguments)


if __name__ == "__main__":
    main()
