"""A recipe for Core ML: a torch.export program, and a script that converts it to an ``.mlpackage`` on a Mac."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from gym_fed.export.formats.base import Options, write_recipe
from gym_fed.export.formats.torch_export import TorchExport
from gym_fed.export.source import Source

_CONVERT = '''"""Convert model.pt2 to model.mlpackage, and run one forward pass with it; on macOS: python convert.py"""

import coremltools as ct
import numpy as np
import torch

program = torch.export.load("model.pt2").run_decompositions({})
model = ct.convert(program, minimum_deployment_target=ct.target.macOS15)
model.save("model.mlpackage")

ids = np.array([[1, 2, 3, 4], [4, 3, 2, 1]], dtype=np.int32)
actual = next(iter(model.predict({"input_ids": ids, "attention_mask": np.ones_like(ids)}).values()))
expected = program.module()(input_ids=torch.tensor(ids).long(), attention_mask=torch.ones(2, 4, dtype=torch.int64))
print("largest difference of logits:", np.abs(actual - expected["logits"].detach().numpy()).max())
'''
_README = """# Core ML: run these commands on a Mac

gym-fed wrote this folder and has not run Core ML, which only runs on macOS. `model.pt2` was read
back by torch, unless `export.json` says that the check was skipped. The conversion of this model has not been tested.

    python3 -m venv core && . core/bin/activate
    pip install coremltools==9.0 torch=={torch} numpy
    python convert.py

The torch that reads `model.pt2` must be no older than {torch}, which wrote it. coremltools 9.0 was built for an older
torch, and prints a warning. Its support for torch.export programs is in beta; if it refuses an operation, export with
`--format torchscript` and convert `model.pt` with `ct.convert(torch.jit.load("model.pt"), inputs=[...])`.
"""


class CoreMl(TorchExport):
    """A folder with ``model.pt2``, ``convert.py`` and ``RECIPE.md``."""

    name = "coreml"
    suffix = ""
    unchecked = "Core ML only runs on macOS and was not run; only the program is read back"
    tried = "the program, by torch"
    untried = "Core ML itself"

    def use(self, path: Path) -> str:
        return f"copy it to a Mac, and read {path / 'RECIPE.md'}"

    def write(self, source: Source, target: Path, options: Options) -> None:
        super().write(source, target, options)
        torch_version = version("torch").partition("+")[0]
        write_recipe(target, _README.format(torch=torch_version), {"convert.py": _CONVERT})
