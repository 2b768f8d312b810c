"""Quantise a model folder with auto-round, run as ``python -m gym_fed.export.quantise`` in its own process.

auto-round takes seconds to import, patches other libraries and prints to the console. The job is ``{"folder", "out",
"format", "bits", "group_size", "sym", "iters", "ids", "threads"}``.

With ``iters`` steps per block it implements Cheng et al. 2024, "Optimize Weight Rounding via Signed Gradient Descent
for the Quantization of LLMs" (SignRound); with none, weights are rounded to nearest.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gym_fed.core.bounded.chat import bind_templates
from gym_fed.export.process import Report, child_job, leave

_BATCH = 4


def main() -> None:
    """Run the quantisation job that the parent process sends."""
    with child_job() as (job, say):
        say("loading auto-round", 0, 0)
        _quantise(job, say)


def _quantise(job: dict[str, Any], say: Report) -> None:
    import torch

    torch.set_num_threads(job["threads"])
    import auto_round.compressors.orchestrator as blocks
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    from gym_fed.base.modeling.model_class import class_for

    blocks.tqdm = _bar(say)
    folder = job["folder"]
    model = class_for(Path(folder)).from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    bind_templates(tokenizer, str(folder))
    ids = [torch.tensor([row]) for row in job["ids"]]
    plain: dict[str, Any] = {} if job["iters"] else {"disable_opt_rtn": True}
    AutoRound(
        model,
        tokenizer,
        bits=job["bits"],
        group_size=job["group_size"],
        sym=job["sym"],
        iters=job["iters"],
        dataset=ids,
        nsamples=len(ids),
        seqlen=ids[0].shape[1],
        batch_size=min(_BATCH, len(ids)),
        device_map="cpu",
        low_cpu_mem_usage=False,
        amp=False,
        enable_torch_compile=False,
        trust_remote_code=False,
        **plain,
    ).quantize_and_save(job["out"], format=job["format"])
    say("writing", 0, 0)
    for config in Path(job["out"]).rglob("config.json"):
        _drop_tied_head(config)


def _bar(say: Report) -> Any:
    """Return a replacement for tqdm's bar that reports finished blocks."""

    class Bar:
        def __init__(self, numbers: Any, *_args: Any, **_kwargs: Any) -> None:
            self._numbers = numbers
            self._done = 0
            self.update(0)

        def update(self, count: int = 1) -> None:
            self._done += count
            say("quantising blocks", self._done, len(self._numbers))

        def set_description(self, _text: str) -> None:
            pass

        def close(self) -> None:
            pass

    return Bar


def _drop_tied_head(file: Path) -> None:
    """Remove the copy of a tied head that auto-round writes."""
    from safetensors.torch import load_file, save_file

    if not json.loads(file.read_text(encoding="utf-8")).get("tie_word_embeddings"):
        return
    for weights in file.parent.glob("*.safetensors"):
        tensors = load_file(weights)
        if tensors.pop("lm_head.weight", None) is not None:
            save_file(tensors, f"{weights}.new", metadata={"format": "pt"})
            os.replace(f"{weights}.new", weights)
    index = file.parent / "model.safetensors.index.json"
    if index.is_file():
        values = json.loads(index.read_text(encoding="utf-8"))
        values["weight_map"].pop("lm_head.weight", None)
        index.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
    leave()
