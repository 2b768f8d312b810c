"""Folders of this machine in files that are given away."""

from __future__ import annotations

import os
import site
import sys
import zipfile
from pathlib import Path


def places_in(folder: Path, *others: Path) -> list[str]:
    """Files below ``folder``, members of archives too, that name a folder of this machine, or one of ``others``."""
    folders = {
        str(folder),
        *map(str, others),
        str(Path.home()),
        str(Path.cwd()),
        sys.prefix,
        *site.getsitepackages(),
    }
    wanted = [place.encode() for place in folders | {os.path.realpath(place) for place in folders}]
    found = []
    for file in (file for file in folder.rglob("*") if file.is_file()):
        texts = {file.name: file.read_bytes()}
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                texts |= {name: archive.read(name) for name in archive.namelist()}
        found += [name for name, text in texts.items() if any(place in text for place in wanted)]
    return found
