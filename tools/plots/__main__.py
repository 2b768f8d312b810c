"""Draw the plots of docs/plots/ from the tables that the pages of docs/ quote.

    python -m tools.plots

A plot has only the figures of its page; nothing is measured. ``tools/plots/plots.yaml`` lists the plots.
"""

from __future__ import annotations

from tools.plots.drawing import drawn
from tools.plots.tables import FOLDER, plots


def main() -> None:
    """Draw and write all plots; remove plots that are no longer listed."""
    FOLDER.mkdir(exist_ok=True)
    every = plots()
    for file in FOLDER.glob("*.svg"):
        if file.stem not in every:
            file.unlink()
    for name, plot in every.items():
        (FOLDER / f"{name}.svg").write_text(drawn(plot), encoding="utf-8")


if __name__ == "__main__":
    main()
