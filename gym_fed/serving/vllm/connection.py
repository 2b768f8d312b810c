"""Start a vLLM server from its own environment, or connect to a running one."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gym_quant

import gym_fed
from gym_fed.config.schema.vllm import VllmConnection
from gym_fed.core.child_process import run_process
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.serving.vllm.client import VllmAddress, VllmClient
from gym_fed.serving.vllm.process import RemoteVllm, VllmProcess, private_folder
from gym_fed.serving.vllm_plugin import ENTRY_POINT

TESTED = "0.32"
"""The release of vLLM that the plug-in supports."""

_ASK_VERSION = "import importlib.metadata as m; print(m.version('vllm'))"
_ASK_SECONDS = 60
_LAUNCH = "gym_fed.serving.vllm_plugin.launch"
_UPLOADS = "gym_fed.serving.vllm_plugin.uploads.AdapterUploads"
_METADATA = "Metadata-Version: 2.1\nName: gym-fed-vllm\nVersion: 0\n"
_POINTS = f"[vllm.general_plugins]\n{ENTRY_POINT} = gym_fed.serving.vllm_plugin:register\n"
_DROPPED = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers to which vLLM applies LoRA. vLLM does not adapt the embeddings and the head; the plug-in adds
their deltas itself."""


@dataclass(frozen=True)
class VllmInstallation:
    """An installation of vLLM.

    Attributes:
        python: The interpreter of its environment.
        version: The version, such as ``0.32.0+cpu``.
    """

    python: Path
    version: str

    @classmethod
    def find(cls, python: Path | None) -> VllmInstallation:
        """Find vLLM.

        Args:
            python: The interpreter of its environment; None: ``.vllm`` next to this environment, from `make vllm`.

        Raises:
            GymError: ``MISSING_DEPENDENCY`` if vLLM is missing, or is a different release.
        """
        path = python or Path(sys.prefix).parent / ".vllm" / "bin" / "python"
        if not path.is_file():
            raise GymError(
                ErrorCode.MISSING_DEPENDENCY,
                f"no Python with vLLM at {path}",
                "run `make vllm`, or set `python` to the interpreter of vLLM's environment",
            )
        try:
            query = run_process(
                [path, "-P", "-c", _ASK_VERSION], env=clean_environment(), text=True, timeout=_ASK_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise GymError(ErrorCode.MISSING_DEPENDENCY, f"{path} cannot be run: {error}") from error
        version = query.stdout.strip()
        if query.returncode:
            raise GymError(
                ErrorCode.MISSING_DEPENDENCY,
                f"vllm is not installed for {path}",
                "run `make vllm`, or install it into that environment",
            )
        require_tested(version, str(path))
        return cls(path, version)

    @property
    def on_cpu(self) -> bool:
        """True for a CPU build."""
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
    """Return this process's environment without the variables of its own Python."""
    return {name: value for name, value in os.environ.items() if name not in _DROPPED}


def write_import_path(folder: Path) -> None:
    """Fill a folder for vLLM's ``PYTHONPATH`` with links to only gym-fed's packages and the plug-in's entry point.

    The other packages of this environment must not be visible to vLLM, which needs different versions.
    """
    for package in (gym_fed, gym_quant):
        assert package.__file__ is not None
        source = Path(package.__file__).resolve().parent
        (folder / source.name).symlink_to(source, target_is_directory=True)
    info = folder / "gym_fed_vllm-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(_METADATA, encoding="utf-8")
    (info / "entry_points.txt").write_text(_POINTS, encoding="utf-8")


@dataclass(frozen=True)
class VllmOptions:
    """The options of ``vllm serve`` that gym-fed sets.

    Attributes:
        model: The model's folder.
        served_name: The base's name.
        dtype: Type of weights and activations.
        max_context: Maximum number of tokens of the prompt and the answer.
        max_concurrent: Maximum number of concurrent requests.
        slots: Maximum number of variants in one step; 0: only the base is served.
        variants_in_memory: Number of variants that stay loaded.
        max_lora_rank: Maximum rank of low-rank variants.
        tensor_parallel_size: Number of GPUs (or processes) that share every layer.
        kv_cache_bytes: Bytes of the KV cache; None: vLLM decides.
        max_batch_tokens: Maximum number of tokens of a step; None: vLLM decides.
        prefix_cache: True if prompts reuse the KV cache of earlier ones.
        trains: True if this is for a training run, which uploads adapters and needs the sampler's log-probabilities.
        arguments: Additional command-line arguments.
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
        """Return the command line of a vLLM server on a Unix socket."""
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
        key: The API key, which is not on the command line because other users can read that.
        threads: Threads on a CPU; None: one per core.
        settings: The variables of the plug-in.
    """
    return {
        **clean_environment(),
        **settings,
        "PYTHONPATH": str(imports),
        "VLLM_API_KEY": key,
        "VLLM_PLUGINS": ENTRY_POINT,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the plug-in is tested only with the V1 model runner
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        # vLLM's own CPU binding reserves cores for processes that are not started here.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads or os.cpu_count() or 1),
    }


def start_vllm(
    installation: VllmInstallation,
    options: VllmOptions,
    settings: dict[str, str],
    threads: int | None,
    start_seconds: float,
    stack: ExitStack,
) -> VllmProcess:
    """Start a vLLM server on a Unix socket in a private folder, with a random key.

    Args:
        installation: The environment of vLLM.
        options: The command-line options of the server.
        settings: Environment variables of the plug-in.
        threads: Threads on a CPU; None: one per core.
        start_seconds: Seconds to wait before the start counts as failed.
        stack: The stack that deletes the folder; the caller must close the process.

    Raises:
        GymError: ``UNAVAILABLE`` if it does not start, with the last lines of its log.
    """
    home = Path(stack.enter_context(private_folder()))
    imports = home / "imports"
    imports.mkdir()
    write_import_path(imports)
    key = secrets.token_urlsafe(32)
    return VllmProcess(
        partial(options.command, installation),
        vllm_environment(imports, key, threads, settings),
        home,
        options.served_name,
        key,
        start_seconds,
    )


def connect_vllm(given: VllmConnection, section: str, context: int, shorten: str) -> RemoteVllm:
    """Check the release and the context of the vLLM server at ``given.url``, and connect to it.

    Args:
        given: The URL and the key file.
        section: The config section of ``given``, for errors.
        context: The required context in tokens.
        shorten: The remedy if vLLM's context is shorter, with ``{}`` for its length.

    Raises:
        GymError: ``FILE_NOT_FOUND`` for the key's file; ``UNAVAILABLE``, ``UNAUTHENTICATED``, ``MISSING_DEPENDENCY``,
            ``PROTOCOL_MISMATCH``; ``CONFIG_INVALID`` for a shorter context.
    """
    url, file = given.url, given.api_key_file
    assert url is not None
    key = ""
    if file is not None:
        try:
            key = file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise GymError(
                ErrorCode.FILE_NOT_FOUND, f"{section}.api_key_file: {file}: {error.strerror}"
            ) from error
    address = VllmAddress(url.rstrip("/").removesuffix("/v1"), None, key)
    version, models = asyncio.run(_ask(address))
    require_tested(version, url)
    if not models:
        raise GymError(ErrorCode.PROTOCOL_MISMATCH, f"vLLM at {url} serves no models")
    name, longest = next(iter(models.items()))
    if context > longest:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"vLLM at {url} has a context of {counted(longest, 'token')}, less than {context:,}",
            shorten.format(longest),
        )
    return RemoteVllm(address, name)


async def _ask(address: VllmAddress) -> tuple[str, dict[str, int]]:
    client = VllmClient(address)
    try:
        return await client.version(), await client.models()
    finally:
        await client.close()
