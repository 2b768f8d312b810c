"""A vLLM in a separate environment: its version, its import path, and its command line."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import gym_quant

import gym_fed
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.vllm_plugin import ENTRY_POINT

TESTED = "0.32"
"""The release of vLLM that the plug-in is written for."""

_ASK_VERSION = "import importlib.metadata as m; print(m.version('vllm'))"
_ASK_SECONDS = 60
_LAUNCH = "gym_fed.serving.vllm_plugin.launch"
_UPLOADS = "gym_fed.serving.vllm_plugin.uploads.AdapterUploads"
_METADATA = "Metadata-Version: 2.1\nName: gym-fed-vllm\nVersion: 0\n"
_POINTS = f"[vllm.general_plugins]\n{ENTRY_POINT} = gym_fed.serving.vllm_plugin:register\n"
_DROPPED = ("PYTHONHOME", "PYTHONPATH", "PYTHONSAFEPATH", "VIRTUAL_ENV")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers. Embeddings and head are not vLLM's LoRA modules: the plug-in adds their deltas itself."""


@dataclass(frozen=True)
class VllmInstallation:
    """A vLLM and how it computes.

    Attributes:
        python: The interpreter of its environment.
        version: Its version, such as ``0.32.0+cpu``.
    """

    python: Path
    version: str

    @classmethod
    def find(cls, python: Path | None) -> VllmInstallation:
        """Find vLLM.

        Args:
            python: The interpreter of its environment; None: that of `make vllm`, ``.vllm`` next to this environment.

        Raises:
            GymError: ``MISSING_DEPENDENCY`` if it is not there, or of another release.
        """
        path = python or Path(sys.prefix).parent / ".vllm" / "bin" / "python"
        if not path.is_file():
            raise GymError(
                ErrorCode.MISSING_DEPENDENCY,
                f"no Python with vLLM at {path}",
                "run `make vllm`, or set the key python to the interpreter of vLLM's environment",
            )
        try:
            asked = subprocess.run(
                [str(path), "-P", "-c", _ASK_VERSION],
                env=clean_environment(),
                capture_output=True,
                text=True,
                timeout=_ASK_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise GymError(ErrorCode.MISSING_DEPENDENCY, f"{path} cannot be run: {error}") from error
        version = asked.stdout.strip()
        if asked.returncode:
            raise GymError(
                ErrorCode.MISSING_DEPENDENCY,
                f"{path} has no package vllm",
                "run `make vllm`, or install it into that environment",
            )
        require_tested(version, str(path))
        return cls(path, version)

    @property
    def on_cpu(self) -> bool:
        """True for a build for CPUs."""
        return self.version.endswith("+cpu")


def require_tested(version: str, where: str) -> None:
    """Refuse a release whose LoRA classes the plug-in does not know.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` naming both releases.
    """
    if version.split(".")[:2] != TESTED.split("."):
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            f"{where} has vLLM {version}, but the plug-in is for {TESTED}",
            f"install vllm=={TESTED}.*",
        )


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what belongs to its own Python."""
    return {name: value for name, value in os.environ.items() if name not in _DROPPED}


def write_import_path(folder: Path) -> None:
    """Fill a folder for vLLM's ``PYTHONPATH``: links to our packages alone, and the plug-in's entry point.

    The packages of this environment must not be visible to vLLM, which needs other versions.
    """
    for package in (gym_fed, gym_quant):
        assert package.__file__ is not None
        source = Path(package.__file__).resolve().parent
        (folder / source.name).symlink_to(source, target_is_directory=True)
    described = folder / "gym_fed_vllm-0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(_METADATA, encoding="utf-8")
    (described / "entry_points.txt").write_text(_POINTS, encoding="utf-8")


@dataclass(frozen=True)
class VllmOptions:
    """The options of ``vllm serve`` that gym-fed sets.

    Attributes:
        model: The model's folder.
        served_name: The base's name.
        dtype: Type of weights and activations.
        max_context: Maximum tokens of prompt and answer.
        max_concurrent: Maximum number of concurrent requests.
        slots: Variants in one step; 0: only the base is served.
        variants_in_memory: Variants that stay loaded.
        max_lora_rank: Maximum rank of low-rank variants.
        tensor_parallel_size: GPUs (or processes) that share every layer.
        kv_cache_bytes: Bytes of the KV cache; None: vLLM decides.
        max_batch_tokens: Maximum tokens of a step; None: vLLM decides.
        prefix_cache: Whether prompts reuse the KV cache of earlier ones.
        trains: True for a training run: adapters are uploaded, and log-probabilities are those of the sampling.
        arguments: Further words of the command line.
    """

    model: Path
    served_name: str
    dtype: str
    max_context: int
    max_concurrent: int
    slots: int
    variants_in_memory: int
    max_lora_rank: int
    tensor_parallel_size: int
    kv_cache_bytes: int | None
    max_batch_tokens: int | None
    prefix_cache: bool
    trains: bool = False
    arguments: tuple[str, ...] = ()

    def command(self, installation: VllmInstallation, socket: Path) -> list[str]:
        """Return the command line of a vLLM that listens on a Unix socket."""
        words: list[object] = [installation.python, "-P", "-m", _LAUNCH, "serve", self.model]
        words += ["--uds", socket, "--served-model-name", self.served_name, "--dtype", self.dtype]
        words += ["--max-model-len", self.max_context, "--max-num-seqs", self.max_concurrent]
        words += ["--tensor-parallel-size", self.tensor_parallel_size, "--enable-prompt-tokens-details"]
        words += ["--structured-outputs-config.backend", "guidance", "--disable-uvicorn-access-log"]
        words += ["--enable-prefix-caching" if self.prefix_cache else "--no-enable-prefix-caching"]
        if self.slots:
            words += ["--enable-lora", "--max-loras", self.slots, "--max-cpu-loras", self.variants_in_memory]
            words += ["--max-lora-rank", self.max_lora_rank, "--lora-target-modules", *TARGETS]
        if self.trains:
            words += ["--middleware", _UPLOADS, "--logprobs-mode", "processed_logprobs"]
        if self.kv_cache_bytes is not None:
            words += ["--kv-cache-memory-bytes", self.kv_cache_bytes]
        if self.max_batch_tokens is not None:
            words += ["--max-num-batched-tokens", self.max_batch_tokens]
        if installation.on_cpu:
            words.append("--enforce-eager")
        return [str(word) for word in (*words, *self.arguments)]


def vllm_environment(
    imports: Path, key: str, threads: int | None, settings: dict[str, str]
) -> dict[str, str]:
    """Return the environment of vLLM's processes.

    Args:
        imports: The folder that ``write_import_path`` filled.
        key: The API key. In the environment, since command lines are visible to other users.
        threads: Threads on a CPU; None: one per core.
        settings: Of the plug-in.
    """
    return {
        **clean_environment(),
        **settings,
        "PYTHONPATH": str(imports),
        "VLLM_API_KEY": key,
        "VLLM_PLUGINS": ENTRY_POINT,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the plug-in was tried with the first one
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        # vLLM's own binding keeps cores free for processes that it does not start here.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads or os.cpu_count() or 1),
    }
