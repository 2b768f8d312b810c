"""Write TensorBoard events to the run folder with ``tensorboard``'s own writer, without TensorFlow or torch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gym_fed.tracking.trackers.base import RunInfo, Tracker

log = logging.getLogger("gym_fed")


class TensorBoard(Tracker):
    """Event files for ``tensorboard --logdir RUN``, created with the first metric."""

    package = "tensorboard"

    def open(self, run: RunInfo) -> None:
        self._folder: Path = run.folder / "tensorboard"
        self._from_step = run.from_step
        self._config: str | None = None
        self._writer: Any = None
        self._hook: Callable[[threading.ExceptHookArgs], object] = threading.excepthook

    def log_config(self, config: Mapping[str, Any]) -> None:
        import yaml

        self._config = yaml.safe_dump(dict(config), sort_keys=False)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        self._add(step=step, summary=Summary(value=values))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            threading.excepthook = self._hook

    def _add(self, **values: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            again = self._folder.exists() and any(self._folder.iterdir())
            self._hook, threading.excepthook = threading.excepthook, self._writer_failed
            self._writer = EventFileWriter(str(self._folder), flush_secs=10)
            if again and self._from_step is not None:
                # TensorBoard then ignores entries of this step and later ones in earlier files.
                start = SessionLog(status=SessionLog.START)
                self._writer.add_event(
                    Event(wall_time=time.time(), step=self._from_step + 1, session_log=start)
                )
            if self._config is not None:
                self._writer.add_event(_text_event("config", self._config))
        self._writer.add_event(Event(wall_time=time.time(), **values))

    def _writer_failed(self, failure: threading.ExceptHookArgs) -> None:
        """Report an error of the writer's thread in one line; it is raised again at the next event."""
        if type(failure.thread).__module__ == "tensorboard.summary.writer.event_file_writer":
            log.warning("%s: events cannot be written: %s", self._folder, failure.exc_value)
        else:
            self._hook(failure)


def _text_event(tag: str, text: str) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.summary_v2 import text_pb

    code = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown shows an indented block as it is
    value = text_pb(tag, code).value[0]
    return Event(wall_time=time.time(), step=0, summary=Summary(value=[value]))
