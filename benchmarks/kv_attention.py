"""Attention over a paged KV cache: time of a layer against torch's, and what a cache in bfloat16 or int8 loses.

    python benchmarks/kv_attention.py [--quick] [--json] [--plot FILE] [--model FOLDER --text FILE]

Heads are those of SmolLM2-135M (9 query heads, 3 key heads of 64). A step appends one token of each request and attends
to all before it, or appends and attends to a chunk of a prompt. The peer is a loop over the requests with contiguous
caches of the same dtype, by torch's ``scaled_dot_product_attention`` (bfloat16 for int8, which it lacks). Layers take
turns, so that no layer's cache stays near the processor. Times are CPU time, the median of the turns.

With --model the same tokens are scored through caches of every dtype: KL divergence from float32 and agreement of the
likeliest token.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _report import Report, options
from gym_quant import kernels
from gym_quant.kernels import BLOCK_TOKENS, KV_DTYPES, PagedLayer, PagedSpans, attend
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

HEADS, KV_HEADS, DIM = 9, 3, 64
SCALE = DIM**-0.5
CASES = [
    (1, 64, 1),
    (1, 512, 1),
    (1, 4096, 1),
    (8, 64, 1),
    (8, 512, 1),
    (8, 4096, 1),
    (1, 0, 512),
    (1, 1024, 256),
]
QUICK_CASES = [(1, 64, 1), (8, 512, 1), (1, 0, 256)]
"""Requests, tokens in the cache, new tokens of each."""
LAYERS, TURNS, QUICK_TURNS = 6, 15, 5
CHUNK, CONTEXT = 256, 1024


def main() -> None:
    """Measure all cases and dtypes, and the loss where a model is given."""
    parser = options(__doc__)
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="score a text through caches of every dtype"
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="the text")
    arguments = parser.parse_args()
    if (arguments.model is None) != (arguments.text is None):
        parser.error("--model and --text go together")
    torch.set_num_threads(1)
    report = Report("kv_attention", peer="torch, a loop over requests")
    for case in QUICK_CASES if arguments.quick else CASES:
        for dtype in KV_DTYPES:
            ours, theirs = measure(*case, dtype, QUICK_TURNS if arguments.quick else TURNS)
            requests, length, new = case
            what = f"{requests} x {length} tokens, {new} new each, {dtype}"
            report.compare(what, 1e6 * ours, 1e6 * theirs, unit="us")
            report.aim(what, ours / theirs, 1.0)
    if arguments.model is not None:
        lose(report, arguments.model, arguments.text.read_text(encoding="utf-8"))
    print(f"kernels: {kernels.describe()}; one thread")
    report.finish(arguments)


def measure(requests: int, length: int, new: int, dtype: str, turns: int) -> tuple[float, float]:
    """Median CPU seconds of a layer: ours and the peer's."""
    made = torch.Generator().manual_seed(0)
    rows, total = requests * new, length + new
    query = torch.randn(rows, HEADS, DIM, generator=made)
    key, value = (torch.randn(rows, KV_HEADS, DIM, generator=made) for _ in range(2))
    runs: list[tuple[Callable[[], object], Callable[[], object]]] = []
    blocks = -(-total // BLOCK_TOKENS)
    for _ in range(LAYERS):
        layer = PagedLayer(requests * blocks, KV_HEADS, DIM, DIM, dtype)
        layer.data.zero_()
        order = torch.randperm(requests * blocks, generator=made).tolist()
        tables = [array("i", order[at * blocks : (at + 1) * blocks]) for at in range(requests)]
        old = [torch.randn(2, length, KV_HEADS, DIM, generator=made) for _ in range(requests)]
        for table, (keys, values) in zip(tables, old, strict=True):
            if length:
                layer.append(table, 0, keys, values)
        spans = PagedSpans([(at * new, (at + 1) * new, length, table) for at, table in enumerate(tables)])
        out = torch.empty(rows, HEADS, DIM)
        runs.append((ours(layer, spans, query, key, value, out), theirs(old, query, key, value, new, dtype)))
    seen: list[tuple[float, float]] = []
    for turn in range(1 + turns):
        for pair in runs:
            times = []
            for run in pair:
                started = time.process_time()
                run()
                times.append(time.process_time() - started)
            if turn:  # the first warms up
                seen.append((times[0], times[1]))
    return statistics.median(a for a, _ in seen), statistics.median(b for _, b in seen)


def ours(layer: PagedLayer, spans: PagedSpans, *tensors: Tensor) -> Callable[[], None]:
    """A step of one layer."""
    query, key, value, out = tensors
    return lambda: attend(layer, spans, query, key, value, out, scale=SCALE)


def theirs(
    old: list[Tensor], query: Tensor, key: Tensor, value: Tensor, new: int, dtype: str
) -> Callable[[], Tensor]:
    """The same over contiguous caches; query heads that share a key head lie along the positions."""
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    length = old[0].shape[1]
    held = [torch.empty(2, KV_HEADS, length + new, DIM, dtype=kind) for _ in old]
    for cache, before in zip(held, old, strict=True):
        cache[:, :, :length] = before.transpose(1, 2)
    q, k, v = query.to(kind), key.to(kind), value.to(kind)
    mask = None
    if new > 1:
        hidden = torch.arange(length, length + new)[:, None] < torch.arange(length + new)
        mask = torch.zeros(new, length + new, dtype=kind).masked_fill_(hidden, float("-inf"))
        mask = mask.repeat(HEADS // KV_HEADS, 1)

    def step() -> Tensor:
        parts = []
        for at, cache in enumerate(held):
            part = slice(at * new, (at + 1) * new)
            cache[0, :, length:], cache[1, :, length:] = k[part].transpose(0, 1), v[part].transpose(0, 1)
            grouped = q[part].transpose(0, 1).reshape(1, KV_HEADS, -1, DIM)
            found = scaled_dot_product_attention(
                grouped, cache[0, None], cache[1, None], attn_mask=mask, scale=SCALE
            )
            parts.append(found.reshape(HEADS, new, DIM).transpose(0, 1))
        return torch.cat(parts)

    return step


def lose(report: Report, folder: Path, text: str) -> None:
    """KL divergence and agreement of caches in bfloat16 and int8 with one in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gym_fed.serving.forward.chunk import Chunk
    from gym_fed.serving.forward.multi_variant import MultiVariantModel

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(text[:40_000])["input_ids"][: 2 * CONTEXT]
    found: dict[str, Tensor] = {}
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


if __name__ == "__main__":
    main()
