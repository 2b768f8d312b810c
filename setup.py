"""Builds the native kernels of gym_quant, where there is a compiler; everything else stands in pyproject.toml.

The extension is optional: where it cannot be built the package installs all the same and computes with torch
(`gym doctor` reports which). One build serves every processor: the instruction set is picked at run time.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

# Sums must not depend on the instruction set, so no -march, no -ffast-math and no fused multiply-add.
GCC = ["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"]
MSVC = ["/std:c++17", "/O2", "/fp:precise", "/EHsc"]
SOURCES = [
    "module",
    "attention",
    "factors",
    "pool",
    "signs",
    "counts",
    "linear",
    "linear_pack",
    "program",
    "matmul",
    "lookup",
    "tiles",
    "decode",
    "mixing",
    "order",
    "sums",
]


class BuildWithRecipes(build_py):
    """Puts recipes and guides where an installed package finds them; an editable install reads configs/ and docs/."""

    def run(self):
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "gym_fed", "assets", "configs")
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree("configs", folder)
            put_guides(folder.parent)


class BuildOrReport(build_ext):
    """Reports an extension that could not be built, and what that costs; pip shows it with -v."""

    def run(self):
        super().run()
        if any(not Path(self.get_ext_fullpath(one.name)).exists() for one in self.extensions):
            print(
                "gym-fed: the native kernels were not built (no C++17 compiler?). Everything works; torch computes "
                "instead, and merges and serves one-bit deltas more slowly. Install a compiler (g++, clang++ or "
                "MSVC's Build Tools), then the package again; `gym doctor` reports which kernels are in use.",
                file=sys.stderr,
            )


def put_guides(assets):
    """Put in the guides as Markdown and, where MkDocs and this package are installed, as a site.

    The reference pages (config, api, ...) are built from the code: the site has them, and `gym docs` prints them.
    """
    for name in ("docs", "site"):
        shutil.rmtree(assets / name, ignore_errors=True)
    shutil.copytree("docs", assets / "docs")
    if all(find_spec(module) for module in ("mkdocs", "material", "mkdocstrings_handlers", "gym_client")):
        site = (assets / "site").resolve()
        subprocess.run([sys.executable, "-m", "mkdocs", "build", "-q", "-d", site], check=True)
        shutil.rmtree(site / "assets" / "javascripts" / "lunr")  # other languages than the guides'
        for unused in [*site.rglob("*.map"), *site.glob("sitemap*")]:
            unused.unlink()


setup(
    cmdclass={"build_ext": BuildOrReport, "build_py": BuildWithRecipes},
    ext_modules=[
        Extension(
            "gym_quant.kernels._native",
            sources=[f"quant/csrc/{name}.cpp" for name in SOURCES],
            depends=[
                "quant/csrc/attention_body.h",
                "quant/csrc/factors_body.h",
                "quant/csrc/lanes.h",
                "quant/csrc/sign_tiles.h",
                "quant/csrc/common.h",
                "quant/csrc/linear.h",
                "quant/csrc/mixing_body.h",
                "quant/csrc/order_body.h",
            ],
            extra_compile_args=MSVC if os.name == "nt" else GCC,
            extra_link_args=[] if os.name == "nt" else ["-pthread"],
            language="c++",
            optional=True,
        )
    ],
)
