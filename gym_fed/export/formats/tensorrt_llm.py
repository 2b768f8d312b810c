"""A recipe for TensorRT-LLM: a Hugging Face folder, and the commands that serve it on a machine with an NVIDIA GPU."""

from __future__ import annotations

from pathlib import Path

from gym_fed.export.formats.base import Options, write_recipe
from gym_fed.export.formats.huggingface import HuggingFace
from gym_fed.export.source import Source

_SERVE = """#!/bin/sh
# Serves this folder with OpenAI's API; run it where TensorRT-LLM is installed (a Linux machine with an NVIDIA GPU).
exec trtllm-serve "$(dirname "$0")" --host 127.0.0.1 --port 8000 "$@"
"""
_README = """# TensorRT-LLM: run these commands on a Linux machine with an NVIDIA GPU

gym-fed wrote this folder and has not run TensorRT-LLM. The weights were only read back by transformers, unless
`export.json` says that the check was skipped.

In NVIDIA's container, which has TensorRT-LLM (choose the tag of a release at catalog.ngc.nvidia.com):

    docker run --rm -it --ipc host --gpus all -p 127.0.0.1:8000:8000 -v "$PWD:/model" \\
        nvcr.io/nvidia/tensorrt-llm/release:TAG \\
        trtllm-serve /model --host 0.0.0.0 --port 8000

With TensorRT-LLM installed on the machine itself:

    sh serve.sh

Then send a request:

    curl http://127.0.0.1:8000/v1/models

TensorRT-LLM 1.0 and later load a Hugging Face folder directly (PyTorch backend); no engine is built. Releases before
1.0, and the `tensorrt` backend, build an engine: convert the folder with `convert_checkpoint.py` of the model's
family, in the examples of that release, and then

    trtllm-build --checkpoint_dir CONVERTED --output_dir ENGINE
    trtllm-serve ENGINE --tokenizer .
"""


class TensorRtLlm(HuggingFace):
    """A Hugging Face folder with ``serve.sh`` and ``RECIPE.md``."""

    name = "tensorrt_llm"
    unchecked = "TensorRT-LLM needs an NVIDIA GPU and was not run; only the folder is read back"
    tried = "the folder, by transformers"
    untried = "TensorRT-LLM itself"

    def use(self, path: Path) -> str:
        return f"copy it to a machine with an NVIDIA GPU, and read {path / 'RECIPE.md'}"

    def write(self, source: Source, target: Path, options: Options) -> None:
        super().write(source, target, options)
        write_recipe(target, _README, {"serve.sh": _SERVE})
