"""Enable the metrics and traces of the policy's ``observe`` section for `gym-client join`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from gym_client.display import Display
from gym_client.observe.metrics import MeteredDisplay, served
from gym_client.observe.policy import ObservePolicy
from gym_client.observe.spans import TracedDisplay
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.tracing import set_traceparent, start_tracing, stop_tracing


@contextmanager
def observed(policy: ObservePolicy | None, display: Display) -> Iterator[Display]:
    """Yield a display that also records metrics and traces, or the given display if the policy enables neither.

    Raises:
        GymError: ``FILE_NOT_FOUND`` if the textfile's folder is missing, ``ADDRESS_IN_USE``, ``MISSING_DEPENDENCY``.
    """
    if policy is None:
        yield display
        return
    with ExitStack() as stack:
        if policy.textfile is not None and not policy.textfile.parent.is_dir():
            raise GymError(
                ErrorCode.FILE_NOT_FOUND,
                f"observe.textfile: no folder {policy.textfile.parent}",
                "create the folder that node_exporter reads (--collector.textfile.directory)",
            )
        if policy.otlp_endpoint is not None:
            start_tracing("gym-client", policy.otlp_endpoint, "observe.otlp_endpoint")
            stack.callback(stop_tracing)
            display = traced = TracedDisplay(display)
            set_traceparent(traced.traceparent)
            stack.callback(set_traceparent, None)
        if policy.textfile is not None or policy.port is not None:
            display = metered = MeteredDisplay(display, policy.textfile)
            if policy.port is not None:
                stack.enter_context(served(metered.exposition, policy.port))
        yield display
