"""Read an export back in a process of its own, and save its answers.

``checking.py`` starts it as ``python -m gym_fed.export.read_back``. The format's own library reads the export, not this
project's loaders. The job, a line of standard input, names the file for the answer.
"""

from __future__ import annotations

import importlib

from gym_fed.export.process import child_job, leave
from gym_fed.export.readers.reading import answers


def main() -> None:
    """Run the job: ``{"parts", "prompts", "passage", "threads", "answer", "tokens"}``."""
    with child_job() as (job, say):
        import torch
        from safetensors.torch import save_file

        torch.set_num_threads(job["threads"])
        say("reading it back", 0, 0)
        reading = importlib.import_module(job["parts"]["reading"]).load(job["parts"])
        tensors = answers(reading, job["prompts"], job["passage"], job["tokens"], say)
        save_file(tensors, job["answer"])


if __name__ == "__main__":
    main()
    leave()
