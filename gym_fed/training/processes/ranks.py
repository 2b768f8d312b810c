"""Read this process's rank from torchrun's environment variables, and launch the processes of ``gym train --nproc N``.

Several machines meet at a key-value store of torch, which one of them serves at a given address. torchrun's default
rendezvous (c10d) is not used, because it unpickles values from the store, which any program that reaches the port can
write. torch is not imported until processes are launched.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.core.child_process import module_command
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_CHECKPOINT_SECONDS = 600
_RENDEZVOUS_SECONDS = 600
_SHOWN_LINES = 20
_MEETING = "give --rdzv-endpoint HOST:PORT: a free port on one of the machines, the same on all"


def world_size() -> int:
    """Return the number of processes that share the run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Return True if this is the main process, which writes and prints."""
    return int(os.environ.get("RANK", "0")) == 0


@dataclass(frozen=True)
class Machines:
    """The machines of a run and the address at which they meet.

    Attributes:
        count: Number of machines, each with the same number of processes.
        host: Name or address of one of them, which all others can reach.
        port: A free port of that machine.
    """

    count: int = 1
    host: str = "127.0.0.1"
    port: int = 0

    @classmethod
    def parse(cls, count: int, endpoint: str | None) -> Machines:
        """Parse ``HOST:PORT``; an IPv6 address must be in brackets.

        Raises:
            GymError: ``USAGE`` if the address is missing, malformed, or given for a single machine.
        """
        if count == 1 and endpoint is None:
            return cls()
        host, _, port = (endpoint or "").rpartition(":")
        refuse_first(
            (count == 1, "--rdzv-endpoint applies only to several machines", "add --nnodes N, or omit it"),
            (endpoint is None, f"--nnodes {count}: --rdzv-endpoint is missing", _MEETING),
            (
                not host or not port.isdecimal() or not 0 < int(port) < 65536,
                f"--rdzv-endpoint {endpoint}: not HOST:PORT",
                _MEETING,
            ),
            code=ErrorCode.USAGE,
        )
        return cls(count, host.strip("[]"), int(port))

    @property
    def endpoint(self) -> str:
        """The address for torch's rendezvous."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def here(self) -> Here:
        """Determine the address at which the other machines reach this one.

        Raises:
            GymError: ``UNAVAILABLE`` if there is none; ``USAGE`` for a name that resolves to a loopback address.
        """
        if self.count == 1:
            return Here(self.host, True)
        remedy = "use an address that every machine can reach, such as 10.0.0.1:29500"
        try:
            family, _, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # selects the network interface; a datagram socket sends nothing here
                own = str(probe.getsockname()[0])
        except OSError as error:
            reason = f"--rdzv-endpoint {self.endpoint}: {error}"
            raise GymError(ErrorCode.UNAVAILABLE, reason, remedy) from error
        if ipaddress.ip_address(own).is_loopback:
            # Debian's /etc/hosts maps a machine's own name to 127.0.1.1, which the other machines cannot reach.
            reason = f"--rdzv-endpoint {self.endpoint}: {self.host} resolves to {own}, a loopback address"
            refuse_first((self.host not in ("localhost", own), reason, remedy), code=ErrorCode.USAGE)
            return Here(own)
        return Here(own, own == address[0])


@dataclass(frozen=True)
class Here:
    """This machine's address in a run, and whether the other machines meet at this one.

    ``is_meeting_point`` is None if several "machines" run on this one; the first to bind the port then serves the
    store.
    """

    address: str
    is_meeting_point: bool | None = None


def launch(arguments: Sequence[str], nproc: int, machines: Machines | None = None) -> int:
    """Run ``gym ARGUMENTS`` in ``nproc`` processes of this machine and wait for them.

    The first process writes to the terminal. The output of any other process is shown only if it fails first. Ctrl-C or
    SIGTERM is sent to each process once, and leaves it time for a checkpoint.

    Args:
        arguments: The command line after ``gym``, without the options for launching.
        nproc: Number of processes on this machine.
        machines: The machines of the run, each of which runs this command; by default only this machine.

    Returns:
        The exit code of this machine's first process that failed, 128 + N after signal N, or 0.

    Raises:
        GymError: ``UNAVAILABLE`` if the machines do not meet.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from gym_fed.training.processes.peers import MEETING, announce

    machines = machines or Machines()
    here = machines.here()
    try:
        store, number = _join(machines, here)
    except (DistError, OSError) as error:
        raise _not_met(machines, error) from error
    if number >= machines.count:
        reason = f"{counted(machines.count, 'machine')} have already met at {machines.endpoint}"
        raise GymError(ErrorCode.UNAVAILABLE, reason, "end the run on all machines before starting it again")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # Otherwise every process would use all cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    if machines.count > 1:
        os.environ[MEETING] = f"{machines.host} {machines.port}"
    if interface := _interface_of(here.address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # the default is the host name's interface
    with tempfile.TemporaryDirectory(prefix="gym-train-") as folder:
        quiet = {rank: Std.ALL for rank in range(1, nproc)}
        config = LaunchConfig(
            min_nodes=machines.count,
            max_nodes=machines.count,
            nproc_per_node=nproc,
            run_id="gym-train",
            rdzv_backend="static",
            rdzv_endpoint=replace(machines, port=store.port).endpoint,
            rdzv_configs={"rank": number, "timeout": _RENDEZVOUS_SECONDS},
            local_addr=here.address,
            max_restarts=0,
            shutdown_timeout=_CHECKPOINT_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=quiet),
        )
        try:
            elastic_launch(config, sys.executable)(*module_command("gym_fed.cli.main", *arguments)[1:])
        except SignalException as stopped:
            return 128 + stopped.sigval
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            if failure.local_rank != 0:
                _print_log_end(Path(folder), failure.local_rank, rank)
            if machines.count > 1:
                announce(f"process {rank} of another machine, {here.address}, has ended")
            return _exit_code(failure.exitcode, rank)
        except DistError as error:
            raise _not_met(machines, error) from error
    return 0


def _join(machines: Machines, here: Here) -> tuple[TCPStore, int]:
    """Serve or join the run's store. Return it with this machine's number, which is 0 for the one that serves it.

    The store listens only on the address of this machine in the run, not on its other networks.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # With multi_tenant, torch's launcher in this process uses the same store.
    options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True}
    options["timeout"] = timedelta(seconds=_RENDEZVOUS_SECONDS)
    if here.is_meeting_point is not False:
        try:
            family = socket.AF_INET6 if ":" in here.address else socket.AF_INET
            listener = socket.create_server((here.address, machines.port), family=family)
        except OSError:
            if here.is_meeting_point:
                raise
        else:
            port = listener.getsockname()[1]
            descriptor = listener.detach()
            return TCPStore(machines.host, port, is_master=True, master_listen_fd=descriptor, **options), 0
    store = TCPStore(machines.host, machines.port, is_master=False, **options)
    return store, store.add("gym_fed/machines", 1)


def _not_met(machines: Machines, error: Exception) -> GymError:
    reason = f"{counted(machines.count, 'machine')} did not meet at {machines.endpoint}: {error}"
    remedy = "start the same command on each machine, and open the port in its firewall"
    return GymError(ErrorCode.UNAVAILABLE, reason, remedy)


def _interface_of(address: str) -> str:
    """Return the name of the network interface that has an address; empty if there is none."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(other.address.partition("%")[0] == address for other in addresses):
            return str(name)
    return ""


def _exit_code(status: int, rank: int) -> int:
    """Return the exit code of a process, or raise an error if a signal ended it."""
    if status >= 0:
        return status
    reason = f"process {rank} was ended by signal {-status}"
    remedy = "if the machine ran out of memory, use smaller batches or fewer processes"
    raise GymError(ErrorCode.INTERNAL, reason, remedy)


def _print_log_end(folder: Path, local_rank: int, rank: int) -> None:
    """Print the last log lines of a process that does not write to the terminal."""
    for file in sorted(folder.rglob(f"{local_rank}/stderr.log")):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
        sys.stderr.write("".join(f"[process {rank}] {line}\n" for line in lines))
