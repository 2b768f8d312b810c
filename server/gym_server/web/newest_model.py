"""Serve the newest version in a child process, and send it the operator's prompts after every round.

A thread watches for new versions. Failures are shown on the page and never affect the rounds. At most one additional
model is in memory, since the previous version's process ends before the next version is written and loaded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from sqlalchemy.exc import SQLAlchemyError

from gym_fed.core.child_process import background_environment
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.web.model_server import ANSWER_SECONDS, SERVED_NAME, ModelServer, refusal_of
from gym_server.rounds.recipes import LiveConfig
from gym_server.rounds.versions import Version
from gym_server.state import HubState
from gym_server.store.unavailable import StoreUnavailable
from gym_server.web.newest_answers import MAX_TOKENS, FixedAnswer, NewestAnswers
from gym_server.web.version_folder import NotWritten, VersionFolder

FOLDER_NAME = "newest-model"
"""Name of the folder in the hub's folder."""
ANSWERS_NAME = "answers.json"
_SETTINGS = ("device=cpu", "num_threads=1", "engine.max_concurrent=4", "engine.max_queued=16")
_LOOK_SECONDS = 1.0
"""Interval between checks for a newer version, in seconds."""
_POLL_SECONDS = 0.1
_JOIN_SECONDS = 5

log = logging.getLogger("gym_server")


@dataclass(frozen=True)
class _NewestState:
    """The state that pages show, immutable and replaced on every change.

    Attributes:
        phase: ``waiting``, ``writing``, ``loading``, ``answering``, ``ready`` or ``failed``.
        version: Height of the version that is served or about to be served.
        has_chat_template: True if the version is prompted in a chat.
        num_bytes: Size of its folder.
        output: The last lines that its process printed before it failed.
        since: Time of the monotonic clock at which the phase began.
    """

    phase: str = "waiting"
    version: int | None = None
    has_chat_template: bool = False
    num_bytes: int = 0
    output: tuple[str, ...] = ()
    since: float = field(default_factory=time.monotonic)


class NewestModel:
    """Serves the newest version of a hub, and sends it the prompts of ``dashboard.prompts``.

    Args:
        state: The hub's state.
        live_config: The current config.
        is_running: True if the hub's rounds run in this process. If not, the hub's folder is left unchanged, and the
            version is written to a temporary folder.
        changed: Called after every change of ``facts``.
    """

    def __init__(
        self, state: HubState, live_config: LiveConfig, *, is_running: bool, changed: Callable[[], None]
    ) -> None:
        self._state, self._live_config = state, live_config
        self._changed = changed
        own = state.folder / FOLDER_NAME
        self._temporary = None if is_running else TemporaryDirectory(prefix="gym-newest-")
        root = own if self._temporary is None else Path(self._temporary.name)
        self._folder = VersionFolder(
            live_config,
            state.folder,
            state.base,
            state.round_store,
            root,
            state.store.staging if is_running else root / "staging",
        )
        prompts = [] if live_config.current.dashboard is None else live_config.current.dashboard.prompts
        self._answers = NewestAnswers(prompts, own / ANSWERS_NAME, root / ANSWERS_NAME)
        self._server: ModelServer | None = None
        self._progress = _NewestState()
        self._ended, self._woken, self._again = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="newest-model", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and its processes."""
        self._ended.set()
        self._woken.set()
        self._folder.stop()
        if (server := self._server) is not None:
            server.stop()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)
        if self._temporary is not None:
            self._temporary.cleanup()

    def again(self) -> None:
        """Write and load the newest version again after a failure."""
        self._again.set()
        self._woken.set()

    def ready(self) -> ModelServer:
        """Return the server of the newest version.

        Raises:
            GymError: ``UNAVAILABLE`` if no version is being served.
        """
        server = self._server
        if server is None or self._phase() not in ("answering", "ready"):
            raise GymError(
                ErrorCode.UNAVAILABLE, "the newest version cannot be asked now", "wait until it is loaded"
            )
        return server

    def request(self, prompt: str, max_tokens: int, *, streamed: bool) -> tuple[str, dict[str, Any]]:
        """Return path and body of a request to `gym api`: a chat, or a completion if the base has no chat template."""
        body = {"model": SERVED_NAME, "max_tokens": max_tokens, "temperature": 0, "stream": streamed}
        if self._progress.has_chat_template:
            return "/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}
        return "/completions", {**body, "prompt": prompt}

    def facts(self, is_operator: bool) -> dict[str, Any]:
        """Return the state for pages; process output and disk usage are only for the operator."""
        progress, phase, server = self._progress, self._phase(), self._server
        found = {
            "phase": phase,
            "seconds": round(time.monotonic() - progress.since, 1),
            "version": progress.version,
            "prompts": self._answers.rows(),
        }
        if not is_operator:
            return found
        output = list(progress.output)
        if phase == "failed" and not output and server is not None:
            output = server.facts()["output"]
        return {**found, "bytes": progress.num_bytes, "output": output}

    def _phase(self) -> str:
        """Return the phase, which is ``failed`` if the server exited by itself."""
        server = self._server
        is_gone = server is not None and server.status == "failed"
        return "failed" if is_gone else self._progress.phase

    def _show(self, **changes: Any) -> None:
        if "phase" in changes:
            changes["since"] = time.monotonic()
        self._progress = replace(self._progress, **changes)
        self._changed()

    def _follow(self) -> None:
        """Serve the newest version until stopped; a failed version is retried only after ``again``."""
        tried = ""
        while not self._ended.is_set():
            self._woken.clear()
            try:
                version = self._state.round_store.head()
                if version.digest != tried or self._again.is_set():
                    self._again.clear()
                    self._serve(version)
                    tried = version.digest
            except (SQLAlchemyError, StoreUnavailable) as error:
                log.debug("the newest version cannot be determined: %s", error)
            self._woken.wait(_LOOK_SECONDS)

    def _serve(self, version: Version) -> None:
        """Write and load a version and send it the prompts; a failure is shown on the page."""
        self._end_server()
        self._show(phase="writing", version=version.height, num_bytes=0, output=())
        try:
            self._write_and_ask(version)
        except (SQLAlchemyError, StoreUnavailable):
            raise
        except NotWritten as failure:
            if not self._ended.is_set():
                log.warning("version %d is not served: it could not be written", version.height)
                self._show(phase="failed", output=tuple(failure.output))
        except Exception:
            log.exception("version %d is not served", version.height)
            self._show(phase="failed", output=("The hub's log has the traceback.",))

    def _write_and_ask(self, version: Version) -> None:
        """Write a version unless its folder exists, load it, and send it the unanswered prompts."""
        missing = self._answers.begin(version)
        written = self._folder.written(version) or self._folder.write(version)
        self._show(
            phase="loading", num_bytes=self._folder.num_bytes(), has_chat_template=written.has_chat_template
        )
        if (server := self._load(version)) is None:
            return
        self._show(phase="answering")
        for prompt in missing:
            if not self._answer(server, prompt):
                break
        else:
            self._answers.save()
        self._show(phase="ready")

    def _load(self, version: Version) -> ModelServer | None:
        """Return a server that is ready; None if it failed, or on shutdown."""
        server = ModelServer(
            str(self._folder.path),
            self._folder.path.parent,
            None,
            self._changed,
            settings=_SETTINGS,
            environment=background_environment(),
            is_last=True,
        )
        self._server = server
        while server.status == "loading" and not self._ended.wait(_POLL_SECONDS):
            pass
        if self._ended.is_set():
            server.stop()
            return None
        if server.status != "ready":
            log.warning("version %d is not served: it could not be loaded", version.height)
            self._folder.remove()  # damaged files are written again at the next attempt
            self._show(num_bytes=0)
            return None
        return server

    def _answer(self, server: ModelServer, prompt: str) -> bool:
        """Send one prompt; return False if the server has ended or takes too long."""
        path, body = self.request(prompt, MAX_TOKENS, streamed=False)
        headers = {"Authorization": f"Bearer {server.key}"}
        try:
            with httpx.Client(timeout=ANSWER_SECONDS, trust_env=False, verify=False) as client:
                response = client.post(server.url + path, json=body, headers=headers)
        except httpx.TransportError:
            return False
        if response.status_code == 200:
            choice = response.json()["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            found = FixedAnswer(prompt=prompt, text=text or "", is_cut=choice["finish_reason"] == "length")
        else:
            found = FixedAnswer(prompt=prompt, text="", problem=refusal_of(response.content))
        self._answers.add(found)
        self._changed()
        return True

    def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop()
            server.wait()
