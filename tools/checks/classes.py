"""Report classes of the packages that share a name, so that a search for a class has one result.

Names that differ only in a leading ``_`` count as the same.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from tools.checks.files import Finding

PACKAGES = ("gym_fed/", "server/gym_server/", "client/gym_client/", "quant/gym_quant/")


def repeated_classes(files: dict[str, str]) -> Iterator[Finding]:
    """Yield every repeated definition of a class name at the top level of a module."""
    places: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for file, text in files.items():
        if file.endswith(".py") and file.startswith(PACKAGES):
            for number, line in enumerate(text.splitlines(), 1):
                if match := re.match(r"class _*(\w+)", line):
                    places[match[1]].append((file, number))
    for name, (first, *others) in places.items():
        for file, number in others:
            yield Finding(file, number, f"class {name} is also in {first[0]}: rename one of them")
