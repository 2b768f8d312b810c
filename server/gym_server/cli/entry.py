"""Console entry point of `gym-server`, with minimal imports."""

from __future__ import annotations

from typing import NoReturn

from gym_fed.core.entry import run


def main() -> NoReturn:
    """Run the command line; see ``gym_fed.core.entry.run``."""
    run("gym_server.cli.main")


if __name__ == "__main__":
    main()
