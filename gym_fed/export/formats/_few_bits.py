"""The base of awq and gptq: 4 or 8 bits in groups, quantised by auto-round, read back by this project's own reader."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from gym_fed.base.models import quiet_loading
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.export.calibration import LENGTH, CalibrationSamples, calibration_of
from gym_fed.export.formats.base import ExportFormat, Options, Tolerance
from gym_fed.export.source import Source

ITERATIONS = 8
"""Steps of SignRound in each block."""
GROUPS = (128, 64, 32)
_MULTIPLE = 32
"""Rows and columns of other sizes are not quantised."""
_LIKE_THE_SOURCE = Tolerance(max=None, top1=0.9, greedy=False)


def of_bits(*bits: int) -> Mapping[str, Tolerance]:
    """Return the quantizations ``w4``, ``w4g128``, ``w4g128_rtn`` and so on, with their tolerances.

    Without ``g`` the largest group that fits all layers is used; ``_rtn`` rounds to the nearest, uncalibrated.
    """
    groups = ("", *(f"g{size}" for size in GROUPS))
    names = [f"w{bit}{group}{how}" for bit in bits for how in ("", "_rtn") for group in groups]
    return MappingProxyType(dict.fromkeys(names, _LIKE_THE_SOURCE))


class FewBits(ExportFormat):
    """A model folder whose linear layers are packed; embeddings, head and norms are float16."""

    merges = True
    calibrates = True
    takes_dtype = False
    requires = ("auto_round",)
    reader = "gym_fed"
    reading = "gym_fed.export.readers.few_bits"
    quantizations = of_bits(4)
    copies_on_disk = 1.0  # the folder that is packed
    bits = MappingProxyType(dict.fromkeys(of_bits(4, 8), 16.0))  # at most: embeddings stay float16

    layout: ClassVar[str]
    """The name of the format in auto-round."""

    symmetric: ClassVar[bool]
    """Whether all zero points are the same."""

    def require_options(self, options: Options) -> None:
        super().require_options(options)
        if options.rows and not self._iterations(options):
            raise GymError(
                ErrorCode.USAGE,
                f"--quantization {options.quantization} rounds to the nearest, which nothing calibrates",
                f"leave --data out, or take {options.quantization.removesuffix('_rtn')}",
            )

    def remedy_of(self, options: Options) -> str:
        quantization = self.quantization(options)
        finer = [] if self._iterations(options) else [f"--quantization {quantization.removesuffix('_rtn')}"]
        if self._bits(options) < 8:
            finer.append("--format gptq --quantization w8")
        finer = finer or ["--format gguf --quantization q8_0"]
        return (
            f"{quantization} loses this of the model: take {' or '.join(finer)}; "
            "--skip-check writes it all the same"
        )

    def use(self, path: Path) -> str:
        return shlex.join(("gym", "chat", str(path)))

    def check(self, source: Source) -> None:
        if hasattr(source.model.config, "vision_config"):
            raise GymError(
                ErrorCode.USAGE,
                f"format {self.name}: {source.name} reads images",
                "export it as huggingface or adapter",
            )
        if not _linear_inputs(source):
            raise GymError(
                ErrorCode.USAGE,
                f"format {self.name}: {source.name} has no linear layer whose sizes are multiples of {_MULTIPLE}",
                "export it as huggingface",
            )

    def write(self, source: Source, target: Path, options: Options) -> None:
        import torch

        group_size, iterations = self.group_size(source, options), self._iterations(options)
        calibration = _calibration(source, options)
        with tempfile.TemporaryDirectory(prefix="gym-export-", dir=target.parent) as scratch:
            folder, out = Path(scratch) / "model", Path(scratch) / "out"
            with quiet_loading():
                source.whole().save_pretrained(str(folder))
            source.write_beside(folder)
            job = {
                "folder": str(folder),
                "out": str(out),
                "format": self.layout,
                "bits": self._bits(options),
                "group_size": group_size,
                "sym": self.symmetric,
                "iters": iterations,
                "ids": calibration.ids,
                "threads": torch.get_num_threads(),
            }
            status, last = options.processes.run("gym_fed.export.quantise", job, options.report)
            configs = sorted(out.rglob("config.json"))
            if status or len(configs) != 1:
                raise GymError(
                    ErrorCode.EXPORT_DIFFERS,
                    f"auto-round failed: {(last or ['no message'])[-1][:500]}; nothing was kept",
                    "report this with the model's name",
                )
            target.mkdir(exist_ok=True)
            for file in configs[0].parent.iterdir():
                file.rename(target / file.name)
        source.write_beside(target)

    def expected(self, source: Source, target: Path, options: Options) -> Any:
        return source.whole()

    def parts(self, source: Source, target: Path) -> dict[str, Any]:
        return {"model": str(target)}

    def facts(self, source: Source, options: Options) -> dict[str, Any]:
        iterations = self._iterations(options)
        record: dict[str, Any] = {
            "bits": self._bits(options),
            "group_size": self.group_size(source, options),
            "symmetric": self.symmetric,
            "rounding": f"SignRound, {iterations} iterations"
            if iterations
            else "to the nearest, uncalibrated",
        }
        if iterations:
            record["calibration"] = _calibration(source, options).record()
        return record

    def _bits(self, options: Options) -> int:
        return int(self.quantization(options)[1])

    def _iterations(self, options: Options) -> int:
        return 0 if self.quantization(options).endswith("_rtn") else ITERATIONS

    def group_size(self, source: Source, options: Options) -> int:
        """Return how many weights share a scale.

        Raises:
            GymError: ``USAGE`` if it does not divide a layer's inputs, naming the layer.
        """
        widths = _linear_inputs(source)
        fits = [size for size in GROUPS if not any(width % size for width in widths.values())]
        named = self.quantization(options).removesuffix("_rtn").partition("g")[2]
        if not named:
            return fits[0]
        if int(named) not in fits:
            layer, width = next((name, width) for name, width in widths.items() if width % int(named))
            raise GymError(
                ErrorCode.USAGE,
                f"--quantization {self.quantization(options)}: {layer} of {source.name} has {width} inputs, "
                f"no multiple of {named}",
                f"take w{self._bits(options)}g{fits[0]}, or w{self._bits(options)}, which finds the group",
            )
        return int(named)


def _linear_inputs(source: Source) -> dict[str, int]:
    """Return the number of inputs of every packed layer, by name."""
    import torch

    model = source.model.get_base_model() if source.adapted else source.model
    head = model.get_output_embeddings()
    return {
        name: int(module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module is not head
        and "lora_" not in name
        and not module.in_features % _MULTIPLE
        and not module.out_features % _MULTIPLE
    }


def _calibration(source: Source, options: Options) -> CalibrationSamples:
    config = source.model.config
    tokenizer = getattr(source.tokenizer, "tokenizer", source.tokenizer)
    positions = getattr(config, "max_position_embeddings", None) or LENGTH
    return calibration_of(tokenizer, positions, options.rows, options.rows_name)
