"""Measure the share of a small change that each model writer keeps by default, from the written files.

A bfloat16 model is trained for a few steps, once with LoRA and twice fully. Each writer is a separate command with its
default options. Its output is compared in float64 with the base plus the change: the kept share is one minus the norm
of the error over the norm of the change. A hub's version is written in this process, since real rounds take long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from _peer import ENVIRONMENT
from _report import Report
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from gym_fed.base.models import load_model
from gym_fed.delta.base import model_tensors
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.kept import KeptDelta

Tensors = Mapping[str, Tensor]
RATE, LENGTH, ROWS = 2e-4, 64, 4


class Writers:
    """Runs every writer on a bfloat16 base.

    Args:
        report: Report that gets a row per writer, in percent.
        base: Folder of the base.
        folder: An existing folder.
        text: Training text, whose last quarter is held out.
        steps: Number of steps of each fine-tune.
    """

    def __init__(self, report: Report, base: Path, folder: Path, text: str, steps: int) -> None:
        self.report, self.folder, self.steps = report, folder, steps
        self.base = _in_bfloat16(base, folder / "base")
        self.old = {name: t.double() for name, t in model_tensors(load_model(str(self.base)).model).items()}
        cut = len(text) * 3 // 4
        self.text = text[:cut]
        (folder / "heldout.txt").write_text(text[cut:], encoding="utf-8")

    def go(self) -> None:
        lora, full = self.folder / "lora", [self.folder / "full-0", self.folder / "full-1"]
        self._train(lora, 0, get_lora)
        for seed, path in enumerate(full):
            self._train(path, seed, lambda model: model)
        self._exports(lora)
        self._deltas(lora, full)
        self._soups(lora, full)
        self._registry()
        self._hub(self._change_of_lora(lora))

    def _exports(self, lora: Path) -> None:
        change = self._change_of_lora(lora)
        self._wrote(
            "export, folder", self._gym("export", lora, "-o", "whole", "--skip-check"), "whole", change
        )
        # transformers reads few GGUF files of Qwen3
        if load_model(str(self.base)).model.config.model_type == "llama":
            found = self._gym("export", lora, "-o", "it.gguf", "--skip-check")
            self._wrote("export, GGUF", found, "it.gguf", change)
        bfloat16 = ("--dtype", "bfloat16", "--skip-check")
        found = self._gym("export", lora, "-o", "coarse", *bfloat16)
        self._wrote("export --dtype bfloat16", found, "coarse", change)
        self._gym("export", lora, "-o", "adapter", "--format", "adapter", "--skip-check")
        self._kept("export, adapter", None, self._change_of_lora(self.folder / "adapter"), change)
        found = self._gym("export", lora, "-o", "e.gymdelta", "--format", "delta", "--skip-check")
        self._kept("export, delta", found["kept"]["share"], self._decoded("e.gymdelta"), change)

    def _deltas(self, lora: Path, full: list[Path]) -> None:
        for name, tuned, change in (
            ("a LoRA", lora, self._change_of_lora(lora)),
            ("a full fine-tune", full[0], self._change(_tensors(full[0]))),
        ):
            heldout = ("--data", "heldout.txt", "--set", "distill_steps=0", "--set", "calibration_samples=16")
            for words in ((), ("--codec", "bitdelta")):
                out = f"{tuned.name}{'-'.join(words)}.gymdelta"
                found = self._gym("delta", "encode", self.base, tuned, "-o", out, *words, *heldout)
                what = " ".join(("delta encode", *words, "of", name))
                self._kept(what, found["kept"], self._decoded(out), change)
                if found["gain_kept"] is not None:
                    self.report.figure(f"{what} gain", 100 * found["gain_kept"])
                self.report.figure(f"{what} bits", found["bits_per_weight"])
        given = self._decoded("lora.gymdelta")
        found = self._gym("delta", "apply", self.base, "lora.gymdelta", "-o", "applied")
        self._wrote("delta apply, of the file", found, "applied", given)
        self._gym("variant", "add", "lora.gymdelta", "--unsigned", "--user", "ana", "--variants", "variants")
        variant = ("--variant", "lora", "--variants", "variants", "--skip-check")
        found = self._gym("export", self.base, "-o", "variant", *variant)
        self._wrote("export of a variant, of the file", found, "variant", given)

    def _soups(self, lora: Path, full: list[Path]) -> None:
        signs = []
        for path in full:
            signs.append(f"{path.name}-signs.gymdelta")
            self._gym("delta", "encode", self.base, path, "-o", signs[-1], "--codec", "bitdelta")
        for what, updates in (("two one-bit deltas", signs), ("a LoRA", [lora]), ("two fine-tunes", full)):
            out = f"soup of {what}.gymdelta"
            changes = [self._decoded(u) if isinstance(u, str) else self._change_given(u) for u in updates]
            mean = {name: torch.stack([change[name] for change in changes]).mean(0) for name in self.old}
            words = ("--rule", "mean", "--base", self.base, "-o", out)
            found = self._gym("soup", "merge", *updates, *words)
            self._kept(f"soup merge of {what}", found["kept"], self._decoded(out), mean)
            self.report.figure(f"soup of {what} bits", found["bits_per_weight"])

    def _registry(self) -> None:
        given = self._decoded("lora.gymdelta")
        store = ("--registry", "models")
        self._gym("models", "push", "me/it", "lora.gymdelta", "--base", self.base, "--licence", "MIT", *store)
        words = ("--base", self.base, "--yes", *store)
        found = self._gym("models", "pull", "me/it", "-o", "pulled", *words)
        self._wrote("models pull, of the file", found, "pulled", given)
        found = self._gym("models", "push", "me/it@1", "--to", "hf", "-o", "hub-folder", *words)
        self._wrote("models push --to hf, of the file", found, "hub-folder", given)

    def _hub(self, change: Tensors) -> None:
        from gym_server.cli.setup import HubChoices, init_hub
        from gym_server.federation import Federation
        from gym_server.rounds.hub_model import HubModel

        init_hub(self.folder / "hub", HubChoices(str(self.base), "h", "open"))
        with Federation.open(self.folder / "hub") as hub:
            for asked, name in ((None, "version"), ("bfloat16", "coarse-version")):
                model = HubModel(hub.base, hub.config.base_model, hub.store, hub.config.gate, hub.folder)
                with torch.no_grad():
                    for tensor, value in model_tensors(model.model).items():
                        value.add_(change[tensor])
                _, share = model.save(self.folder / name, asked)
                what = "gym-server model" if asked is None else f"gym-server model --dtype {asked}"
                self._kept(what, share, self._change(_tensors(self.folder / name)), change)

    def _train(self, out: Path, seed: int, adapted: Callable[[Any], Any]) -> None:
        loaded = load_model(str(self.base))
        torch.manual_seed(seed)
        model = adapted(loaded.model).train()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=RATE if len(trained) < len(self.old) else RATE / 10)
        ids = torch.tensor(loaded.tokenizer(self.text, add_special_tokens=False)["input_ids"])
        for _ in range(self.steps):
            starts = torch.randint(0, len(ids) - LENGTH, (ROWS,)).tolist()
            batch = torch.stack([ids[at : at + LENGTH] for at in starts])
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(str(out))
        loaded.tokenizer.save_pretrained(str(out))

    def _gym(self, *words: object) -> dict[str, Any]:
        command = [str(Path(sys.executable).with_name("gym")), *map(str, words), "--json"]
        done = subprocess.run(
            command, cwd=self.folder, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        return found

    def _wrote(self, what: str, found: dict[str, Any], name: str, change: Tensors) -> None:
        share = found["kept"]["share"] if isinstance(found["kept"], dict) else found["kept"]
        self._kept(what, share, self._change(_tensors(self.folder / name)), change)

    def _kept(self, what: str, printed: float | None, written: Tensors, change: Tensors) -> None:
        """Add a row with the share in the written tensors, next to the share that the command printed."""
        total = KeptDelta()
        for name, old in self.old.items():
            total.add(torch.zeros_like(old), change[name], written[name])
        share = total.share
        assert share is not None
        print(f"{what}: {share:.4%} kept", file=sys.stderr, flush=True)  # a run takes half an hour
        self.report.compare(f"{what}: kept", 100 * share, unit="%", better="higher")
        if printed is not None:
            self.report.figure(f"{what} printed", 100 * printed)
            assert abs(printed - share) < 0.005, f"{what}: printed {printed:.4%}, and {share:.4%} is there"

    def _change(self, tensors: Tensors) -> Tensors:
        return {name: tensors[name].double() - old for name, old in self.old.items()}

    def _change_given(self, path: Path) -> Tensors:
        if (path / "adapter_config.json").is_file():
            return self._change_of_lora(path)
        return self._change(_tensors(path))

    def _change_of_lora(self, folder: Path) -> Tensors:
        """Return the products of an adapter's factors, computed by PEFT in float64."""
        model = PeftModel.from_pretrained(load_model(str(self.base)).model.double(), str(folder))
        return self._change(model_tensors(model.merge_and_unload()))

    def _decoded(self, name: str) -> Tensors:
        with DeltaFile.open(self.folder / name) as delta:
            return {
                tensor: delta.decode(tensor).double() if tensor in delta else torch.zeros_like(old)
                for tensor, old in self.old.items()
            }


def get_lora(model: Any) -> Any:
    """Return the model with LoRA on all linear layers, as `gym train` uses by default."""
    return get_peft_model(
        model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def _in_bfloat16(base: Path, folder: Path) -> Path:
    loaded = load_model(str(base))
    loaded.model.to(torch.bfloat16).save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def _tensors(path: Path) -> Tensors:
    """Return the weights of a model folder or a GGUF file, as read by transformers."""
    from transformers import AutoModelForCausalLM

    where = {"pretrained_model_name_or_path": str(path)}
    if path.is_file():
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return model_tensors(AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32))
