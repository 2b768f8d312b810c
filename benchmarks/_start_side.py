"""One start under measurement, in a process of its own: python _start_side.py MODEL FORMAT; prints a line of JSON."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

STATUS = Path("/proc/self/status")


def main() -> None:
    """Load the libraries, open the server's parts, answer once."""
    import torch

    import gym_fed.serving.engine.engine
    import gym_fed.serving.forward.multi_variant  # noqa: F401
    from gym_fed.config.serving import ServingConfig
    from gym_fed.models import load_tokenizer
    from gym_fed.serving.forward.packed_base import packed_home
    from gym_fed.serving.openai.catalogue import LOCAL
    from gym_fed.serving.setup import open_serving

    model, format = sys.argv[1:]
    load_tokenizer(model)
    torch.ones(64, 64) @ torch.ones(64, 64)
    libraries = memory("VmRSS")
    before = {file: file.stat().st_ino for file in packed_home().glob("*")}
    began = time.perf_counter()
    config = ServingConfig(base=model, variants=None, dtype="bfloat16", base_format=format)
    with open_serving(config) as serving:
        seconds = time.perf_counter() - began
        asked = {"model": serving.served_name, "prompt": "The", "max_tokens": 4}
        serving.service.handle("/v1/completions", asked, LOCAL)
        assert serving.served.forwards["decoder"]
        weights = 2 * serving.base.num_parameters
        after = {file: file.stat().st_ino for file in packed_home().glob("*")}
        found = {
            "libraries": libraries,
            "peak": memory("VmHWM"),
            "weights": weights,
            "seconds": seconds,
            "mapped": bool(before) and after == before,
        }
    print(json.dumps(found))


def memory(key: str) -> int:
    """Bytes of a line of the process's status."""
    found = re.search(rf"^{key}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    main()
