"""The process that follows a hub for `gym-server mirror`; the parent closes its standard input to stop it."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from pathlib import Path

from gym_client.cli.join import enter
from gym_client.cli.join_options import JoinOptions, find_target
from gym_client.display import make_display
from gym_client.hub.backoff import Outage, retry_at_known_hub, retry_while_away
from gym_client.hub.transport import HubClient
from gym_client.identity.home import Home
from gym_client.identity.pins import ServerPin
from gym_client.identity.trust import establish
from gym_client.mirror.follower import Follower
from gym_fed.core.child_process import leave_at_eof
from gym_fed.core.console import err, report_error
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.mirrors.folder import MirrorFolder

NAME = "mirror"
"""Name of the mirror's account on the hub."""


def follow(out: Path, server: str, fingerprint: str | None, invite: str | None) -> None:
    """Follow a hub until SIGTERM.

    Raises:
        GymError: Errors from ``Follower.follow``; ``PERMISSION_DENIED`` if the hub's key is neither given nor pinned.
    """
    folder, stop = MirrorFolder(out), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    leave_at_eof()
    home, display = Home.open(folder.home), make_display(err, False)
    target = find_target(JoinOptions(server=server, invite=invite, fingerprint=fingerprint))
    outage = Outage(display)

    def trusted() -> ServerPin:
        return establish(home, target.address, target.fingerprint, lambda _: False)

    with home.locked():
        pin = retry_while_away(stop, outage, trusted, lambda: None)
        with HubClient(home, target.address, pin) as client:
            retry_at_known_hub(client, stop, outage, lambda: enter(client, NAME, target.token, stop.is_set))
            Follower(folder, client, display, stop).follow()


def main() -> int:
    """Run the process and return its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fingerprint")
    arguments = parser.parse_args()
    try:
        follow(arguments.out, arguments.server, arguments.fingerprint, os.environ.get("GYM_INVITE"))
    except GymError as error:
        if error.code is ErrorCode.INTERRUPTED:
            return 0
        report_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
