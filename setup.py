"""Builds the native kernels of gym_quant, where there is a compiler; everything else stands in pyproject.toml.

The extension is optional: where it cannot be built the package installs all the same and computes with torch
(`gym doctor` reports which). One build serves every processor: the instruction set is picked at run time.
"""

import os
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

# Sums must not depend on the instruction set, so no -march, no -ffast-math and no fused multiply-add.
GCC = ["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"]
MSVC = ["/std:c++17", "/O2", "/fp:precise", "/EHsc"]
SOURCES = ["module", "pool", "signs", "counts", "matmul", "mixing", "order", "sums"]


class BuildWithRecipes(build_py):
    """Puts the recipes of configs/ where an installed package finds them; an editable install reads configs/."""

    def run(self):
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "gym_fed", "assets", "configs")
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree("configs", folder)


setup(
    cmdclass={"build_py": BuildWithRecipes},
    ext_modules=[
        Extension(
            "gym_quant.kernels._native",
            sources=[f"quant/csrc/{name}.cpp" for name in SOURCES],
            depends=["quant/csrc/common.h", "quant/csrc/mixing_body.h", "quant/csrc/order_body.h"],
            extra_compile_args=MSVC if os.name == "nt" else GCC,
            extra_link_args=[] if os.name == "nt" else ["-pthread"],
            language="c++",
            optional=True,
        )
    ],
)
