"""The GPU checks that need processes: an API server, and a hub with contributors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import yaml

BIN = Path(sys.executable).parent
PROMPTS = ("shout: dxec", "copy: Ab 3!", "size: abcd")


def served_answers(device: str, folder: Path) -> str:
    """Compare greedy answers of `gym api` on the device and on the CPU, for the base and a one-bit variant."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"shout: {word}"},
                {"role": "assistant", "content": f"{word.upper()}!"},
            ]
        }
        for word in ("ab", "dxec", "tree", "gym", "fed", "cat", "dog", "sun")
    ]
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows * 4), encoding="utf-8")
    variants = folder / "variants"
    command = [
        "variant",
        "create",
        "--data",
        data,
        "--user",
        "ada",
        "--store",
        variants,
        "--method",
        "full",
        "--codec",
        "bitdelta",
    ]
    command += ["--steps", "20"]
    _run([BIN / "gym", *command])
    found = _answers(device, variants)
    expected = found if device == "cpu" else _answers("cpu", variants)
    assert found == expected, f"{found} against {expected}"
    assert found["gym-nano"] != found["gym-nano:ada"], f"the variant answers as its base does: {found}"
    return f"{sum(map(len, found.values()))} answers equal"


def _answers(device: str, variants: Path) -> dict[str, list[str]]:
    """Return greedy answers by model, from a server that runs only for this call."""
    config = variants.parent / f"serving-{device}.yaml"
    config.write_text(
        yaml.safe_dump({"base": "gym-nano", "variants": str(variants), "device": device, "port": 0}),
        encoding="utf-8",
    )
    command = [str(BIN / "gym"), "api", str(config), "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment())
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        return {
            model: [_ask(url, model, prompt) for prompt in PROMPTS] for model in ("gym-nano", "gym-nano:ada")
        }
    finally:
        server.terminate()
        server.wait(timeout=60)


def _ask(url: str, model: str, prompt: str) -> str:
    body = {"model": model, "temperature": 0, "messages": [{"role": "user", "content": prompt}]}
    request = urllib.request.Request(
        f"{url}/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: Any = json.load(answer)
    return str(found["choices"][0]["message"]["content"])


def federation_round(device: str, folder: Path) -> str:
    """Run one round of four steps with a hub and two `gym-client join --device`."""
    from demo.processes import run_federation
    from gym_fed.data import generate
    from gym_fed.local_federation import ask, join_command

    names = ("ada", "ben")
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate((*names, "heldout")):
        rows = generate("shout", 32, seed=number)
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    _run([BIN / "gym-server", "init", "--dir", folder / "hub"])
    config = {
        "listen": "127.0.0.1:0",
        "base_model": "gym-nano",
        "enrolment": {"policy": "open"},
        "rounds": {"num_rounds": 1, "min_contributors": len(names), "deadline_seconds": 300},
        "recipe": {
            "algorithm": "sft",
            "max_steps": 4,
            "learning_rate": 1e-3,
            "per_device_train_batch_size": 4,
            "max_length": 64,
        },
        "soup": {"aggregator": "mean"},
        "gate": {"heldout": "../heldout.jsonl", "max_length": 64},
    }
    (folder / "hub" / "gym-server.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def joiner(name: str) -> Any:
        return lambda address, key: join_command(folder, name, address, key, "--device", device)

    states: list[str] = []
    run_federation(
        folder, {name: joiner(name) for name in names}, lambda event: states.append(event["state"])
    )
    found = ask(folder, "rounds")
    assert states == ["committed"], states
    assert len(found[0]["updates"]) == len(names), found
    return f"held-out loss {found[0]['heldout_before']:.3f} -> {found[0]['heldout_after']:.3f}"


def _run(command: list[Any]) -> None:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=_environment(), check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stderr[-1000:]}"


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
