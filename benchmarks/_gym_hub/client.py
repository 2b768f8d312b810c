"""One contributor's transfer in a process of its own: `gym_client`'s transport, timed, and nothing else.

python client.py up   ADDRESS FINGERPRINT HOME RESULT FILE
python client.py down ADDRESS FINGERPRINT HOME RESULT SHA256 SIZE
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from gym_client.address import Address
from gym_client.downloads import ObjectCache, download, file_sha256
from gym_client.home import Home
from gym_client.transport import HubClient
from gym_client.trust import establish
from gym_client.uploads import upload


def main(direction: str, address: str, fingerprint: str, home: str, result: str, *what: str) -> None:
    """Connect, enrol, open a session and transfer; the seconds of all of that go to the file ``result``."""
    started = time.perf_counter()
    folder, where = Home.open(home), Address.parse(address)
    pin = establish(folder, where, fingerprint, confirm=lambda _: False)
    with HubClient(folder, where, pin) as client:
        client.enrol("benchmark")
        client.authenticate()
        if direction == "up":
            path = Path(what[0])
            sha256 = file_sha256(path)
            upload(client, sha256, path)
        else:
            sha256 = what[0]
            path = download(client, ObjectCache(folder.objects), sha256, int(what[1]))
    seconds = time.perf_counter() - started
    draft = Path(f"{result}.draft")
    draft.write_text(json.dumps({"seconds": seconds, "sha256": sha256, "size": path.stat().st_size}))
    draft.rename(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
