"""Console entry point of `gym`, with minimal imports."""

from __future__ import annotations

from typing import NoReturn

from gym_fed.core.entry import run


def main() -> NoReturn:
    """See ``gym_fed.core.entry.run``."""
    run("gym_fed.cli.main")


if __name__ == "__main__":
    main()
