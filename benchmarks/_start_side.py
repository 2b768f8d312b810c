"""Measure one start in its own process (python _start_side.py MODEL FORMAT) and print a line of JSON."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

from gym_fed.base.models import NANO, load_tokenizer, resolve
from gym_fed.config.serving import ServingConfig
from gym_fed.serving.forward.packed_base import packed_home
from gym_fed.serving.forward.plain_config import plain_config
from gym_fed.serving.openai.catalogue import LOCAL
from gym_fed.serving.plain_tokenizer import plain_tokenizer
from gym_fed.serving.setup import open_serving

STATUS = Path("/proc/self/status")


def main() -> None:
    """Serve gym-nano, which loads the libraries, and read the tokenizer; then serve the model and answer once."""
    model, format = sys.argv[1:]
    served(NANO, format)
    read_tokenizer(Path(resolve(model)))
    libraries = memory("VmRSS")
    before = {file: file.stat().st_ino for file in packed_home().glob("*")}
    weights, seconds = served(model, format)
    after = {file: file.stat().st_ino for file in packed_home().glob("*")}
    found = {
        "libraries": libraries,
        "peak": memory("VmHWM"),
        "weights": weights,
        "seconds": seconds,
        "stored": bool(before) and after == before,
    }
    print(json.dumps(found))


def read_tokenizer(folder: Path) -> None:
    """Read the tokenizer and drop it, so that the allocator keeps its memory for the server's tokenizer."""
    plain = plain_config(folder)
    if plain is None or plain_tokenizer(folder, plain.architecture) is None:
        load_tokenizer(str(folder))


def served(model: str, format: str) -> tuple[int, float]:
    """Start and answer once; return the bytes of the weights in bfloat16, and the seconds of the start."""
    began = time.perf_counter()
    config = ServingConfig(base=model, variants=None, dtype="bfloat16", base_format=format)
    with open_serving(config) as serving:
        seconds = time.perf_counter() - began
        asked = {"model": serving.served_name, "prompt": "The", "max_tokens": 4}
        serving.service.handle("/v1/completions", asked, LOCAL)
        assert serving.served is not None
        assert serving.served.forwards["decoder"]
        return 2 * serving.base.num_parameters, seconds


def memory(key: str) -> int:
    """Return the bytes in one line of the process's status."""
    found = re.search(rf"^{key}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    main()
