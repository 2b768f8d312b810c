"""A single start of one side of ``data.py``, in its own process; the last line of output is JSON."""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import psutil

LENGTH, BATCH, STEPS = 256, 8, 3


def main() -> None:
    """Train three steps with the JSON settings in ``sys.argv[1]``; print seconds, CPU seconds, memory and losses."""
    warnings.simplefilter("ignore")
    work = json.loads(sys.argv[1])
    memory = PeakMemory()
    losses, rows = (ours if work["side"] == "ours" else theirs)(work)
    memory.stop()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    report = {
        "seconds": time.time() - psutil.Process().create_time(),
        "cpu_seconds": sum(each.ru_utime + each.ru_stime for each in used),
        "pss_mb": memory.pss,
        "losses": losses,
        "rows": rows,
    }
    print(json.dumps(report))


class PeakMemory:
    """The peak proportional set size of this process in MB, which divides shared pages among processes."""

    def __init__(self) -> None:
        self.pss = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while True:
            text = Path("/proc/self/smaps_rollup").read_text()
            match = re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)
            assert match is not None
            self.pss = max(self.pss, int(match[1]) / 1024)
            if self._done.wait(0.1):
                return

    def stop(self) -> None:
        self._done.set()
        self._thread.join()


def ours(work: dict[str, Any]) -> tuple[list[float], int]:
    """Train with ``gym_fed.Trainer``."""
    from gym_fed import Trainer, TrainingConfig

    config = TrainingConfig(
        algorithm="pretrain",
        model=work["model"],
        data=[{"path": work["data"]}],
        output_dir=Path(work["folder"]),
        max_steps=STEPS,
        max_length=LENGTH,
        per_device_train_batch_size=BATCH,
        streaming=work.get("streaming", False),
        device="cpu",
        save_final=False,
    )
    result = Trainer(config).train()
    assert result.rows is not None
    return result.losses, result.rows.rows


def theirs(work: dict[str, Any]) -> tuple[list[float], int]:
    """Train with ``datasets`` and TRL, which cache the rows, the token ids and the packed rows."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch
    import trl
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data: Any = load_dataset("json", data_files=work["data"], split="train")
    arguments = trl.SFTConfig(
        output_dir=work["folder"],
        max_steps=STEPS,
        max_length=LENGTH,
        packing=True,
        packing_strategy="wrapped",
        per_device_train_batch_size=BATCH,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], len(data)


if __name__ == "__main__":
    main()
