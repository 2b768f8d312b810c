"""Tokens per second against llama.cpp: one base for 1, 8 and 32 users, and eight users with something of their own.

    python benchmarks/serving_peers.py [--model FOLDER] [--peer PYTHON] [--native PYTHON] [--users 1 8] [--turns 3]
        [--threads 2] [--layers-7b] [--prompt TOKENS] [--only WORD] [--quick]

The model is SmolLM2-135M-Instruct unless a folder is given; `gym export` writes its GGUF files once to
``runs/serving-peers``. With ``--layers-7b``, it is two layers of a 7B Llama with random weights and that model's
tokenizer, and turns have 8 + 8 tokens.

Our sides are the base in bfloat16, int8 and int4, eight one-bit variants of all weights, and eight LoRA variants of
rank 16. The sides of llama.cpp (``xllamacpp`` from PyPI, built only for AVX2) are bf16, Q8_0, Q4_K_M, and eight LoRA
adapters of rank 16 with the same weights as ours. ``--prompt N`` measures prompts: each request has N tokens, its
answer has one, and the rate counts both. ``--native`` adds a second peer, a Python whose ``llama-cpp-python`` was built
on this machine (``CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python``).

Each side is a process with the same prompts, greedy decoding, 32 + 32 tokens and no prompt cache; ours asserts that it
computed every prompt token. The first turn of each side, with two tokens, is not counted. The sides alternate. The
script prints how a peer was built; a native one must use AVX-512 if the processor has it. The compared figure is tokens
per CPU second, including prompts; wall time is printed next to it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _peer import Peer, WaitingPeer, in_turns, script, spread
from _report import Report, options
from _report import show as show_table
from _serving_models import adapters, one_bit, saved, seven_b_layers
from _smollm2 import read_gguf

VARIANTS = 8
CONTEXT = 128
FORMATS = {"bf16": "bfloat16", "q8_0": "int8", "q4_k_m": "int4"}
PAIRS: tuple[tuple[str, str, dict[int, float]], ...] = (
    ("ours bfloat16", "llama.cpp bf16", {1: 1.0, 8: 1.5}),
    ("ours int8", "llama.cpp q8_0", {1: 1.0, 8: 1.5}),
    ("ours int4", "llama.cpp q4_k_m", {1: 1.0, 8: 1.5}),
    ("ours int8, one-bit variants", "llama.cpp q8_0, LoRA", {8: 2.5}),
    ("ours bfloat16, one-bit variants", "llama.cpp bf16, LoRA", {8: 2.5}),
    ("ours bfloat16, LoRA variants", "llama.cpp bf16, LoRA", {1: 1.0}),
    ("ours int8, LoRA variants", "llama.cpp q8_0, LoRA", {1: 1.0}),
)
"""Our side, the peer's side, and the aim for the ratio by number of users."""
Found = dict[str, dict[int, WaitingPeer]]
"""Peers by name and number of users."""


@dataclass(frozen=True)
class Side:
    """The process of one side.

    Attributes:
        program: The interpreter and the script.
        settings: Settings for the script, without users and prompts.
    """

    name: str
    program: list[str]
    settings: dict[str, Any]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2"), help="model folder")
    parser.add_argument("--layers-7b", action="store_true", help="two layers of a 7B instead of the model")
    parser.add_argument("--prompt", type=int, metavar="TOKENS", help="measure prompts of this length")
    parser.add_argument("--native", metavar="PYTHON", help="a Python with llama-cpp-python, built here")
    parser.add_argument("--only", metavar="WORD", help="sides whose names have it, such as LoRA or int8")
    parser.add_argument("--peer", default=sys.executable, metavar="PYTHON", help="a Python with xllamacpp")
    parser.add_argument("--folder", type=Path, default=Path("runs/serving-peers"), help="for files")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    report = Report("serving_peers", peer="llama.cpp (xllamacpp)")
    turns = 1 if arguments.quick else arguments.turns
    prompt, new = (8, 8) if arguments.layers_7b else (32, 8 if arguments.quick else 32)
    if arguments.prompt:
        prompt, new = arguments.prompt, 1
    sides = [side for side in all_sides(arguments) if not arguments.only or arguments.only in side.name]
    found: Found = {side.name: {} for side in sides}
    for users in arguments.users:
        generator = torch.Generator().manual_seed(users)  # random tokens without special ones
        prompts = torch.randint(10, 246, (users, prompt), generator=generator).tolist()
        load = {"users": users, "prompts": prompts, "new": new}
        taking = [side for side in sides if users <= VARIANTS or not is_own(side)]
        with ExitStack() as stack:
            running = []
            for side in taking:
                running.append(opened(side, load, arguments.folder))
                stack.callback(running[-1].close)
            in_turns(running, turns)
        for peer in running:
            found[peer.name][users] = peer
            for result in peer.results if arguments.prompt else ():
                result["tokens"] += users * prompt
    show_builds(found)
    show(found, arguments.users, arguments.threads)
    compare(found, report)
    report.finish(arguments)


def opened(side: Side, load: dict[str, Any], folder: Path) -> WaitingPeer:
    place = folder / "sides" / side.name.replace(" ", "-").replace(",", "")
    return WaitingPeer(side.name, side.program, {**side.settings, **load}, place)


def by_cpu(peer: Peer) -> list[float]:
    """Return the tokens per CPU second of every turn."""
    return [result["tokens"] / result["cpu_seconds"] for result in peer.results]


def by_wall(peer: Peer) -> list[float]:
    return [result["tokens"] / result["seconds"] for result in peer.results]


def is_own(side: Side) -> bool:
    """Return True if every user has its own variant or adapter."""
    return bool(side.settings.get("variants") or side.settings.get("adapters"))


def all_sides(arguments: Any) -> Iterator[Side]:
    """Yield our sides and the peer's, writing the files that they read."""
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    read_gguf(arguments.model)
    model = arguments.model
    if arguments.layers_7b:
        folder = folder / "layers-7b"
        model = folder / "model"
        if not model.exists():
            seven_b_layers(arguments.model, model)
    base = saved(model.name, model)
    folder = folder / base.spec.digest.removeprefix("sha256:")[:12]  # a separate folder per model
    folder.mkdir(exist_ok=True)
    one_bits = [str(one_bit(base, folder, number)) for number in range(VARIANTS)]
    made = adapters(base, folder, VARIANTS)
    ours = script("_engine_side.py")
    programs = {"llama.cpp": [arguments.peer, *script("_llama_cpp_side.py")[1:]]}
    if arguments.native:
        programs["native llama.cpp"] = [arguments.native, *script("_llama_cpp_native_side.py")[1:]]
    common = {"threads": arguments.threads}
    for quantization, form in FORMATS.items():
        mine = {**common, "model": str(model), "format": form, "folder": str(folder), "kernel": "lookup"}
        yield Side(f"ours {form}", ours, {**mine, "variants": [], "kind": "base"})
        own = form != "int4" and not arguments.prompt
        if own:
            yield Side(
                f"ours {form}, one-bit variants", ours, {**mine, "variants": one_bits, "kind": "signs"}
            )
            loras = [str(delta) for _, delta in made]
            yield Side(f"ours {form}, LoRA variants", ours, {**mine, "variants": loras, "kind": "lora"})
        gguf = exported(model, folder / f"{quantization}.gguf", ["--quantization", quantization])
        peers = {**common, "model": gguf, "context": max(CONTEXT, 2 * (arguments.prompt or 0))}
        loras = [
            exported(
                model, folder / f"lora{n}.gguf", ["--adapter", str(made[n][0]), "--format", "gguf_adapter"]
            )
            for n in range(VARIANTS)
        ]
        for name, program in programs.items():
            yield Side(f"{name} {quantization}", program, {**peers, "adapters": []})
            if own:
                yield Side(f"{name} {quantization}, LoRA", program, {**peers, "adapters": loras})


def exported(model: Path, file: Path, words: list[str]) -> str:
    """Write a GGUF file with `gym export` unless it exists; return its path."""
    if not file.exists():
        gym = Path(sys.executable).with_name("gym")
        command = [str(gym), "export", str(model), "-o", str(file), *words, "--skip-check"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return str(file)


def show_builds(found: Found) -> None:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    for name, by_users in found.items():
        for build in sorted({r["build"] for peer in by_users.values() for r in peer.results if "build" in r}):
            print(f"{name}: {build}")
            if name.startswith("native") and "avx512f" in flags and "AVX512 = 1" not in build:
                raise SystemExit(f"{name} was built without AVX-512: build it with GGML_NATIVE=ON")


def show(found: Found, users: list[int], threads: int) -> None:
    """Print tokens per CPU second and per second of wall time."""
    for rate, unit in ((by_cpu, "CPU second"), (by_wall, "second")):
        rows = []
        for name, by_users in found.items():
            rates = {count: spread(rate(peer)) for count, peer in by_users.items()}
            rows.append([name, *(rates.get(count, "-") for count in users)])
        title = f"{threads} thread(s): tokens a {unit}, median (least-most)"
        show_table(title, ("", *(f"{count} users" for count in users)), rows)


def compare(found: Found, report: Report) -> None:
    """Report ratios by turn, since slow periods of the machine affect both sides."""
    pairs = [*PAIRS, *((ours, f"native {theirs}", aims) for ours, theirs, aims in PAIRS)]
    for ours, theirs, aims in pairs:
        for users in found.get(ours, {}):
            if users not in found.get(theirs, {}):
                continue
            mine, peer = found[ours][users], found[theirs][users]
            rates = [statistics.median(by_cpu(one)) for one in (mine, peer)]
            what = f"{users} users, {ours} against {theirs}"
            report.compare(what, *rates, unit="tokens/CPU s", better="higher")
            ratio = statistics.median(a / b for a, b in zip(by_cpu(mine), by_cpu(peer), strict=True))
            if users in aims:
                report.aim(what, ratio, aims[users], better="higher")
    for name, by_users in found.items():
        for users, peer in by_users.items():
            key = f"{name} {users} users".replace(" ", "_").replace(",", "")
            report.figure(f"{key}_tokens_cpu_s", statistics.median(by_cpu(peer)))
            report.figure(f"{key}_tokens_s", statistics.median(by_wall(peer)))
            report.figure(
                f"{key}_first_token_s", statistics.median(statistics.median(r["first"]) for r in peer.results)
            )


if __name__ == "__main__":
    main()
