"""Start a vLLM, or connect to one that runs."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from gym_fed.config.schema.vllm import VllmConnection
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.serving.vllm.client import VllmAddress, VllmClient
from gym_fed.serving.vllm.installation import (
    VllmInstallation,
    VllmOptions,
    require_tested,
    vllm_environment,
    write_import_path,
)
from gym_fed.serving.vllm.process import RemoteVllm, VllmProcess, private_folder


def start_vllm(
    installation: VllmInstallation,
    options: VllmOptions,
    settings: dict[str, str],
    threads: int | None,
    start_seconds: float,
    stack: ExitStack,
) -> VllmProcess:
    """Start a vLLM on a Unix socket in a private folder, with a random key.

    Args:
        installation: The environment of vLLM.
        options: Its command line.
        settings: Environment variables of the plug-in.
        threads: Threads on a CPU; None: one per core.
        start_seconds: Seconds after which the start has failed.
        stack: Deletes the folder; the caller closes the process.

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
    """Connect to the vLLM at ``given.url``, after checking its release and its context.

    Args:
        given: The URL and the file of the key.
        section: The config section of ``given``, for errors.
        context: The tokens of prompt and answer that it must hold.
        shorten: The remedy for a shorter context, with ``{}`` for vLLM's.

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
        raise GymError(ErrorCode.PROTOCOL_MISMATCH, f"vLLM at {url} serves no model")
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
