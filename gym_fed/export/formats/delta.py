"""A ``.gymdelta``: the difference to the base, for a federation, a soup or a variant."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

from gym_fed.base.models import load_tokenizer, model_name, resolve
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.export.formats.base import ExportFormat, Options, Tolerance
from gym_fed.export.source import Source


class Delta(ExportFormat):
    """A delta that keeps 99% of each tensor by default, or follows a codec policy; read back by gym-fed itself."""

    name = "delta"
    reader = "gym_fed"
    tolerance = Tolerance(max=0.0)
    is_file = True
    takes_dtype = False
    suffix = ".gymdelta"
    finer = "no codec policy, or one with a finer codec,"
    tried = "LoRA, full"
    untried = ""

    def use(self, path: Path) -> str:
        return shlex.join(("gym", "variant", "add", str(path), "--name", path.stem))

    def check(self, source: Source) -> None:
        if source.base is None or source.read_base is None:
            raise GymError(
                ErrorCode.USAGE,
                f"format delta: the base is unknown: the files of {source.name} do not record it",
                f"use a run or an adapter, or run: gym delta encode BASE {source.name} -o FILE.gymdelta",
            )
        if source.base_changed:
            raise GymError(
                ErrorCode.USAGE,
                "rope_scaling: a delta holds only differences of weights, so the scaling would be lost",
                "export it as huggingface or adapter",
            )

    def write(self, source: Source, target: Path, options: Options) -> None:
        if source.delta is not None and not source.below and options.codec is None:
            shutil.copyfile(source.delta, target)  # byte for byte: it is not re-encoded
            return
        from gym_fed.delta.base import BaseSpec, model_tensors
        from gym_fed.delta.encode import encode_delta, lora_delta
        from gym_fed.delta.factors import LoraChange, is_plain_lora, lora_change, lora_factors
        from gym_fed.delta.vocabulary import attach_vocabulary, split_vocabulary
        from gym_fed.soup.compact import encode_compact

        base = _base_of(source)
        tensors = model_tensors(base)
        spec = BaseSpec.of(tensors, model_name(str(source.base)))
        tokenizers = (load_tokenizer(str(source.base)), source.tokenizer)
        if is_plain_lora(source.model) and not source.below:
            change = LoraChange(lora_factors(source.model), {})
            rows = {len(m.get_input_embeddings().weight) for m in (source.model.get_base_model(), base)}
            if len(rows) > 1:
                change = lora_change(source.model, tensors, tokenizers=tokenizers)
            if options.codec is None:
                encode_compact(change.factors, change.values, target, spec)
            else:
                lora_delta(change.factors, target, spec, policy=options.codec, values=change.values)
            if change.added:
                attach_vocabulary(target, spec, change.added)
        else:
            split, added = split_vocabulary(source.whole(), tensors, tokenizers, source.name)
            if options.codec is None:
                encode_compact({}, _changes(split, tensors, spec), target, spec)
            else:
                encode_delta(split, tensors, options.codec, target, spec)
            if added:
                attach_vocabulary(target, spec, added)

    def kept(self, source: Source, target: Path) -> float | None:
        from gym_fed.delta.base import model_tensors
        from gym_fed.delta.file import DeltaFile
        from gym_fed.delta.kept import KeptDelta

        total, tuned = KeptDelta(), model_tensors(source.whole())
        with DeltaFile.open(target, added_tokens=True) as delta:
            for name, old in model_tensors(_base_of(source)).items():
                exact = tuned[name][: len(old)] if old.ndim else tuned[name]
                written = old.float() + delta.decode(name).to(old.device) if name in delta else old
                total.add(old, exact, written)
        return total.share

    def expected(self, source: Source, target: Path, options: Options) -> Any:
        from gym_fed.delta.base import BaseSpec
        from gym_fed.delta.file import DeltaFile, apply_delta

        base = _base_of(source)
        spec = BaseSpec.of(base, model_name(str(source.base)))
        with DeltaFile.open(target, spec, added_tokens=True) as opened:
            apply_delta(base, opened)
        return base

    def parts(self, source: Source, target: Path) -> dict[str, Any]:
        return {"model": resolve(str(source.base)), "delta": str(target)}


def _changes(tuned: Any, base: Any, spec: Any) -> dict[str, Any]:
    """Return the differences of all changed tensors in float32."""
    from gym_fed.delta.base import checked_tensors

    found = checked_tensors(tuned, spec, "tuned")
    differences = {name: found[name].cpu().float() - base[name].cpu().float() for name in base}
    return {name: difference for name, difference in differences.items() if bool(difference.any())}


def _base_of(source: Source) -> Any:
    assert source.read_base is not None  # checked
    return source.read_base()
