"""Run a hub (`gym-server run`): the gRPC service on the event loop and the Flower strategy on a thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from flwr.serverapp import Grid
from sqlalchemy.exc import SQLAlchemyError

from gym_fed.config.hub.sections import DashboardConfig, GateConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import raise_file_limit
from gym_fed.core.portable import on_stop_signals
from gym_fed.core.progress import spinner
from gym_fed.core.text import counted, readable_seconds
from gym_fed.trust.wire.limits import server_options
from gym_fed.trust.wire.service import add_health, add_hub
from gym_server.backup.gc import PASS_SECONDS, gc_pass
from gym_server.certificate import note_on_certificate, served_pair
from gym_server.cli.checks_at_start import check_at_start
from gym_server.clock_watch import ClockWatch
from gym_server.federation import Federation, folder_lock
from gym_server.observe.instruments import GC_PASSES
from gym_server.observe.tracing import traced_hub
from gym_server.privacy import budget as privacy
from gym_server.rounds.downloads import Downloads
from gym_server.rounds.recipes import check_soup
from gym_server.rounds.region import Region
from gym_server.rounds.round_store import Round
from gym_server.rpc.auth_interceptor import AuthInterceptor
from gym_server.rpc.connections import ConnectionLimiter, require_free
from gym_server.rpc.health import Health
from gym_server.rpc.hub import Hub
from gym_server.rpc.streams import Wakeups
from gym_server.rpc.threads import heavily
from gym_server.store.hub_lock import HubLock
from gym_server.store.unavailable import StoreUnavailable
from gym_server.strategy.durable import DurableDeltaSoup
from gym_server.strategy.grid import HubGrid

if TYPE_CHECKING:
    from gym_server.evaluations.change import VersionChange
    from gym_server.web.dashboard import Dashboard


log = logging.getLogger("gym_server")
LOG_LEVELS = {
    "gym_server": logging.INFO,
    "gym_fed": logging.WARNING,
    "grpc": logging.WARNING,
    "asyncio": logging.WARNING,
}
"""The minimum level of each logger in a hub's log."""

_GRACE_SECONDS = 5.0
_DRAIN_SECONDS = 3.0
"""How long a finished hub keeps answering, in seconds, so that contributors can fetch their last verdict and balance.
"""

_CALL_THREADS = 8
"""Number of threads for the database work of calls; long work has its own threads (``gym_server.rpc.threads``)."""
_TENURE_SECONDS = 2.0
"""Interval between checks of the database lock, in seconds."""
_AWAY_SECONDS = 3.0
"""How long the strategy waits if the database or the object store is unreachable, in seconds."""

_LOOPBACK = ("127.", "localhost:", "[::1]:")


def run_hub(
    folder: Path,
    overrides: tuple[str, ...] = (),
    *,
    insecure: bool = False,
    exit_when_done: bool = False,
    dashboard: str | None = None,
    on_listening: Callable[[Federation, int], None] = lambda *_: None,
    on_dashboard: Callable[[str], None] = lambda _: None,
    on_round: Callable[[Round], None] = lambda _: None,
    on_change: Callable[[VersionChange], None] | None = None,
    server_app: Callable[[Grid], None] | None = None,
) -> str:
    """Serve until stopped or, with ``exit_when_done``, until all rounds are committed.

    Args:
        folder: The hub's folder, created by `gym-server init`.
        overrides: ``a.b=value`` settings that override the config file.
        insecure: Serve without TLS; only allowed on loopback addresses.
        exit_when_done: Exit when the rounds are done, instead of continuing to serve.
        dashboard: ``host:port`` of the dashboard; None uses the config's.
        on_listening: Called once with the federation and the port.
        on_dashboard: Called once with the URL of the dashboard, if there is one.
        on_round: Called after each ended round.
        on_change: Called with the comparison with version 0 when the rounds are done; the comparison is skipped if this
            is None or the config has ``check: false``.
        server_app: Function that runs on the grid instead of DeltaSoup, such as any Flower strategy's ``start``.

    Returns:
        The reason why the hub finished; empty if it was stopped before.

    Raises:
        GymError: ``STATE_LOCKED``, ``CONFIG_INVALID``, ``ADDRESS_IN_USE``, ``UNAVAILABLE``.
    """
    with (
        folder_lock(folder) if folder.is_dir() else nullcontext(),
        Federation.open(folder, overrides, insecure) as federation,
        federation.hub_lock() as hub_lock,
        traced_hub(federation.config),
        _dashboard_of(federation, dashboard) as pages,
    ):
        federation.clock.start()
        federation.ledger.check_heads()
        if insecure and not federation.config.listen.startswith(_LOOPBACK):
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"--insecure: {federation.config.listen} is not a loopback address",
                "plain text is allowed only on loopback; remove --insecure",
            )

        if not insecure and (soon := note_on_certificate(folder)):
            log.warning("%s", soon)
        if server_app is None:
            with spinner("checking the data, the base model and the rules"):
                notes = check_at_start(federation.state, federation.config, federation.recipes)
            for note in notes:
                log.warning("%s", note)
            if line := gate_line(federation.config.gate):
                log.info("%s", line)
        else:
            federation.sends_arrays = True
            check_soup(federation.config)
            privacy.check_promise(
                federation.config, federation.base, federation.database, federation.round_store
            )
        if server_app is not None and federation.config.privacy is not None:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                "privacy: a strategy other than DeltaSoup neither clips nor adds noise",
                "run DeltaSoup, or remove the privacy section",
            )

        def delta_soup(grid: Grid, should_stop: Callable[[], bool]) -> None:
            DurableDeltaSoup(federation, should_stop=should_stop, on_round=on_round).start(grid)

        def own_app(grid: Grid, should_stop: Callable[[], bool]) -> None:
            assert server_app is not None
            server_app(grid)

        def listening(fed: Federation, port: int) -> None:
            on_listening(fed, port)
            if pages is not None:
                pages.start()
                on_dashboard(pages.url)

        server = _Server(federation, hub_lock, insecure, own_app if server_app else delta_soup, on_change)
        ending = asyncio.run(server.serve(exit_when_done, listening))
    return ending


def _dashboard_of(fed: Federation, listen: str | None) -> AbstractContextManager[Dashboard | None]:
    """Open the dashboard at the address of the command line or the config; None if neither sets one."""
    config = fed.config.dashboard
    if listen is None and config is None:
        return nullcontext()
    from gym_server.web.dashboard import Dashboard

    config = config or DashboardConfig()
    return Dashboard(fed, listen or config.listen, public=config.public, is_running=True)


def gate_line(gate: GateConfig) -> str:
    """Return a line with the tasks that every soup is evaluated on before its commit; empty if there is no gate."""
    parts = [
        f"gate.evals {entry.suite} ({counted(entry.limit, 'row')} of each task, "
        f"a drop of at most {entry.max_drop:g} with "
        f"{entry.confidence:.0%} confidence)"
        for entry in gate.evals
    ]
    if gate.safety is not None:
        parts.append(
            f"gate.safety (the refusal margin drops by at most {gate.safety.max_margin_drop:g} nats with "
            f"{gate.safety.confidence:.0%} confidence)"
        )
    return f"every soup passes {', '.join(parts)}, or is rolled back" if parts else ""


class _Server:
    """One run of the hub."""

    def __init__(
        self,
        federation: Federation,
        hub_lock: HubLock,
        insecure: bool,
        work: Callable[[Grid, Callable[[], bool]], None],
        on_change: Callable[[VersionChange], None] | None,
    ) -> None:
        self._fed = federation
        self._hub_lock = hub_lock
        self._insecure = insecure
        self._work = work
        self._on_change = on_change if federation.config.check else None
        self._wakeups = Wakeups()
        self._stop = threading.Event()
        self._failure: BaseException | None = None

    async def serve(self, exit_when_done: bool, on_listening: Callable[[Federation, int], None]) -> str:
        ending = ""
        loop = asyncio.get_running_loop()
        self._wakeups.bind(loop)
        hub = Hub(self._fed, self._wakeups)
        limits = self._fed.config.limits
        loop.set_default_executor(ThreadPoolExecutor(_CALL_THREADS, "call"))
        limiter = ConnectionLimiter(limits.connections_per_address)
        options = server_options(limits.handshake_seconds, raise_file_limit(limits.connections, log))
        traffic = self._fed.traffic
        traffic.connections = lambda: limiter.open
        interceptor = AuthInterceptor(self._fed.accounts, limits, on_call=limiter.called, traffic=traffic)
        server = grpc.aio.server(interceptors=[interceptor], options=options)
        add_hub(hub, server)
        add_health(Health(self._fed.database), server)
        port = self._bind(server)
        stopping = asyncio.Event()
        on_stop_signals(lambda _: stopping.set())
        await server.start()
        limiter.start(port)
        on_listening(self._fed, port)
        downloads = Downloads(self._fed.live_config, self._fed.base, self._fed.round_store)
        log.log(logging.WARNING if downloads.form.form == "values" else logging.INFO, "%s", downloads.line())
        log.info("%s", hub.base.line())
        done = asyncio.Event()
        thread = threading.Thread(target=self._run_strategy, args=(loop, done), name="strategy", daemon=True)
        thread.start()
        done_waiter = asyncio.create_task(done.wait())
        stop_waiter = asyncio.create_task(stopping.wait())
        hub_lock_keeper = asyncio.create_task(self._keep_hub_lock(done))
        clock_keeper = asyncio.create_task(self._keep_clock())
        collector = asyncio.create_task(self._collect_garbage())
        root_follower = asyncio.create_task(self._follow_root())
        await asyncio.wait({done_waiter, stop_waiter}, return_when=asyncio.FIRST_COMPLETED)
        if done.is_set() and self._failure is None:
            ending = await asyncio.to_thread(
                privacy.end_of_run, self._fed.config, self._fed.database, self._fed.round_store
            )
            log.info("%s", ending)
            hub.finished.set()
            self._wakeups.notify()
            if exit_when_done:
                with spinner("waiting for contributors to fetch their last verdict"):
                    await self._wakeups.drain(_DRAIN_SECONDS)
            await self._report_change(stop_waiter)
            if not exit_when_done:
                log.info("serving until stopped")
                await stop_waiter
        hub_lock_keeper.cancel()
        clock_keeper.cancel()
        collector.cancel()
        root_follower.cancel()
        self._stop.set()
        with spinner("closing connections"):
            await server.stop(_GRACE_SECONDS)
            limiter.stop()
            hub.combined_soups.close()
        with spinner("stopping the rounds"):
            await asyncio.to_thread(thread.join, 60)
        done_waiter.cancel()
        stop_waiter.cancel()
        if self._failure is not None:
            raise self._failure
        return ending

    async def _report_change(self, stop_waiter: asyncio.Task[Any]) -> None:
        """Compare the newest version with version 0 in a separate process, which ends if the hub is stopped."""
        if self._on_change is None:
            return
        from gym_server.evaluations.change_process import ChangeRun

        run = ChangeRun(self._fed.state, self._fed.live_config)
        with spinner("comparing the newest version with version 0"):
            task = asyncio.create_task(asyncio.to_thread(run.result))
            await asyncio.wait({task, stop_waiter}, return_when=asyncio.FIRST_COMPLETED)
            run.stop()
            snapshot = await task
        if snapshot is not None:
            self._on_change(snapshot)

    def _bind(self, server: grpc.aio.Server) -> int:
        address = self._fed.config.listen
        require_free(address)
        try:
            if self._insecure:
                return server.add_insecure_port(address)
            pair = served_pair(self._fed.folder, self._fed.passphrase.get)
            return server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:  # for example, if another process has just taken the port
            require_free(address)
            raise GymError(
                ErrorCode.UNAVAILABLE, f"cannot listen on {address}: {error}", "change `listen`"
            ) from error

    async def _keep_hub_lock(self, done: asyncio.Event) -> None:
        """Stop this hub if another one has taken over its database."""
        while True:
            await asyncio.sleep(_TENURE_SECONDS)
            try:
                await asyncio.to_thread(self._hub_lock.keep)
            except StoreUnavailable as away:
                log.debug("%s", away)  # the strategy reports it
            except GymError as error:
                self._failure = error
                done.set()
                return

    async def _keep_clock(self) -> None:
        """Track the machine's clock, and report if it was set or differs from most contributors' clocks."""
        watch = ClockWatch(self._fed.clock, self._fed.contributor_clocks)
        while True:
            await asyncio.sleep(_TENURE_SECONDS)
            try:
                await asyncio.to_thread(watch.check)
            except (StoreUnavailable, OSError, SQLAlchemyError) as error:
                log.debug("%s", error)  # the strategy reports it

    async def _follow_root(self) -> None:
        """End a region's current round when its root has a new version, and record the root's receipts."""
        region = Region.of(self._fed.state, self._fed.live_config, self._fed.steering)
        while region is not None:
            await asyncio.sleep(_TENURE_SECONDS)
            try:
                await asyncio.to_thread(region.poll_root)
            except (StoreUnavailable, OSError, SQLAlchemyError) as error:
                log.debug("%s", error)  # the strategy reports it

    async def _collect_garbage(self) -> None:
        """Delete unreferenced files at intervals, on the threads for long work."""
        keep = readable_seconds(self._fed.config.storage.keep_unneeded_seconds)
        log.info("unreferenced files are deleted after %s", keep)
        while True:
            try:
                await heavily(gc_pass, self._fed.state, self._fed.config)
            except (StoreUnavailable, GymError, OSError, SQLAlchemyError) as error:
                GC_PASSES.labels("failed").inc()
                log.warning("gc failed; trying again in %s: %s", readable_seconds(PASS_SECONDS), error)
            except Exception:  # one unreadable row must not prevent later passes
                GC_PASSES.labels("failed").inc()
                log.exception("gc failed; nothing was deleted this time")
            await asyncio.sleep(PASS_SECONDS)

    def _run_strategy(self, loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
        try:
            while True:
                try:
                    self._work(
                        HubGrid(
                            self._fed.state,
                            self._fed.live_config,
                            self._fed.queue,
                            self._fed.max_update_bytes,
                            self._wakeups.notify,
                        ),
                        self._stop.is_set,
                    )
                    break
                except StoreUnavailable as away:  # the stored round is resumed, as after a restart
                    log.warning("%s; trying again in %.0f s", away, _AWAY_SECONDS)
                    if self._stop.wait(_AWAY_SECONDS):
                        break
        except BaseException as error:  # noqa: BLE001 (passed to the main thread, which raises it)
            self._failure = error
        finally:
            if not loop.is_closed():
                loop.call_soon_threadsafe(done.set)
