"""The agent: fetches tasks from a hub, passes each to a Flower ``ClientApp``, and returns the reply.

All state is written to disk before it is used, so an agent can be killed at any point. The next one finds the lease,
the checkpoint, the signed update and the partial upload, and resumes from there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import Context, Message, UserConfig
from flwr.clientapp import ClientApp

from gym_client.agent.account import Account
from gym_client.agent.agreement import Agreement
from gym_client.agent.data import evaluation_notes
from gym_client.agent.global_model import park_idle_model
from gym_client.agent.hooks import Hooks, TimeLimit, hooks_set
from gym_client.agent.pauses import DiskRoom, Pauses, PolicyStamp
from gym_client.agent.policy import Policy
from gym_client.agent.region import RegionalHub
from gym_client.agent.task_objects import (
    TaskObjects,
    new_context,
    task_fields,
    to_message,
    to_refusal,
    to_submit,
    to_submit_records,
)
from gym_client.agent.tasks import TaskFolder, drop_old
from gym_client.agent.work import parse_task
from gym_client.app import update_records
from gym_client.display import Display
from gym_client.hub.backoff import FATAL, GONE, TASKS_OWN, Outage, Retry, is_passing, retry_at_known_hub
from gym_client.hub.clock import ClockReport
from gym_client.hub.stream import Lease, WorkStream, heartbeats
from gym_client.hub.traffic import Traffic
from gym_client.hub.transport import HubClient
from gym_client.identity.home import Home
from gym_client.privacy.private_task import Spending, kept_here
from gym_client.privacy.secure_round import stage_of, titled
from gym_client.privacy.terms import Promises, require_as_announced, require_as_promised, require_sums
from gym_fed.config.hub.task import TaskSpec, TrainingRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.system_errors import is_disk_full
from gym_fed.privacy.secure_aggregation.messages import TRAIN, UNMASK
from gym_fed.trust.wire.v1 import hub_pb2 as pb

log = logging.getLogger("gym_client")
T = TypeVar("T")

_POLL_SECONDS = 0.2
_MAX_FAILURES_IN_A_ROW = 3


@dataclass(frozen=True)
class AgentResult:
    """The result of one run of the agent.

    Attributes:
        receipts: Receipts of all answered tasks, oldest first.
        finished: True if the hub has finished all rounds.
        balance: Balance in credits; None if the hub became unreachable before reporting it.
    """

    receipts: list[dict[str, Any]]
    finished: bool
    balance: int | None

    @property
    def num_submitted(self) -> int:
        """The number of answered tasks."""
        return len(self.receipts)


class Agent:
    """Works for one hub until the hub has finished, the agent is stopped, or ``max_rounds`` tasks are done.

    Args:
        app: Any Flower ``ClientApp``; ``gym_client.app.app`` runs gym-fed's own rounds.
        home: The contributor's home; the caller holds its lock.
        client: Client of the hub; the home must be enrolled there.
        node_config: The app's ``context.node_config``; the agent adds ``home`` and ``by-reference``.
        policy: Limits on downloads, training and uploads; read from the home if None.
        policy_stamp: Stamp of ``policy.yaml`` when ``policy`` was read; None for the current stamp.
        announced: Recipe announced before joining; tasks with weaker privacy for examples are rejected.
        agreement: Terms accepted before joining; tasks with other terms require new consent.
        promises: Privacy promises of the hub before joining; compared with its current ones before every task.
        region: The regional hub in ``node_config``; it gets a copy of the receipts of its updates.
        display: Displays events and progress.
        clock_report: Reports clock differences, without repeating earlier reports.
        stop: Event that ends the work at the next checkpoint, as ``stop()`` does.
    """

    def __init__(
        self,
        app: ClientApp,
        home: Home,
        client: HubClient,
        *,
        node_config: UserConfig | None = None,
        policy: Policy | None = None,
        policy_stamp: PolicyStamp | None = None,
        announced: TrainingRecipe | None = None,
        promises: Promises | None = None,
        agreement: Agreement | None = None,
        region: RegionalHub | None = None,
        display: Display | None = None,
        clock_report: ClockReport | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.app, self.home, self.client = app, home, client
        policy_stamp = policy_stamp or PolicyStamp.of(home)
        self.policy = policy or Policy.load(home.policy_path)
        client.rates.limit(*self.policy.rates)
        self.display = display or Display()
        self._announced, self._promises, self._agreement = announced, promises, agreement
        self._private, self._spent = False, Spending(home)
        self._evaluated_on: dict[str, str] = {}
        own: UserConfig = {"home": str(home.folder), "by-reference": True}
        self.node_config: UserConfig = {**(node_config or {}), **own}
        self._stop = stop or threading.Event()
        self._contexts: dict[int, Context] = {}
        self._outage = Outage(self.display)
        self._clock_report = clock_report or ClockReport(self.display)
        self._traffic = Traffic(home, client.pin.server)
        self._objects = TaskObjects(home, client, self.policy, self._traffic)
        self._account = Account(home, client, self.display, self._traffic, region)
        self._pauses = Pauses(
            home, self.policy, self._take_policy, self.display, self._stop, stamp=policy_stamp
        )
        self._pauses.on_pause = lambda paused: client.pause_seeding("pause", paused)
        self._room = DiskRoom(home, self.display, self._stop)
        self._failures = self._masked = 0  # _masked: updates in rounds that are not unmasked yet

    def stop(self) -> None:
        """Ask the agent to stop at the next checkpoint; safe from signal handlers and other threads."""
        self._stop.set()

    def run(self, max_rounds: int | None = None) -> AgentResult:
        """Process tasks until the hub finishes, ``max_rounds`` is reached, the account leaves or the agent is stopped.

        Args:
            max_rounds: Stop after this many answered tasks; None runs until the hub is finished.

        Raises:
            GymError: ``INTERRUPTED`` after ``stop``; an error that would affect all further tasks; or the last of
                several consecutive failures.
        """
        finished = False
        self.display.busy("fetching the verdicts on earlier updates")
        with self._account.until_left(lambda action: self._retrying(action, None)):
            self._room.needed(lambda: self._recover(self._settle()))
            if (clocks := self.client.clocks) is not None and not clocks.differ:
                drop_old(self.home.tasks)  # their age is unknown if a clock is wrong
            while not finished and not self._has_done(max_rounds):
                self._pauses.wait()
                finished = self._work(max_rounds)
        self._account.last_word()
        return AgentResult(self._account.receipts, finished, self._account.balance)

    def _work(self, max_rounds: int | None) -> bool:
        """Process events until enough tasks are done or a pause begins; return True if the hub is finished."""
        with WorkStream(self.client) as stream:
            while not self._has_done(max_rounds) and (event := self._next(stream)) is not None:
                if event.HasField("task"):
                    self._do(event.task)
                elif event.HasField("notice"):
                    self.display.report("notice", event.notice.message, kind=event.notice.kind)
                elif event.HasField("finished"):
                    self.display.report("finished", f"the server says: {event.finished.message}")
                    return True
        return False

    def _has_done(self, max_rounds: int | None) -> bool:
        return max_rounds is not None and len(self._account.receipts) - self._masked >= max_rounds

    def _take_policy(self, policy: Policy) -> None:
        """Apply a changed ``policy.yaml``."""
        self.policy = self._objects.policy = policy
        self.client.rates.limit(*policy.rates)
        if self.client.seeding is not None:
            self.client.seeding.follow(policy.seeding)

    def _next(self, stream: WorkStream) -> pb.WorkEvent | None:
        """Return the next event; None if a pause begins first."""
        waits = 0
        while not self._pauses.due():
            if self._stop.is_set():
                raise GymError(ErrorCode.INTERRUPTED, "stopped", "run the same command again to resume")
            event = stream.next(_POLL_SECONDS)
            if isinstance(event, GymError):
                if not is_passing(event):
                    raise event
                self._outage.away(event)
                continue
            if event is not None:
                self._outage.back()
                if not event.HasField("keep_alive"):
                    return event
            if not waits:
                self.display.busy("")
                self.display.report("waiting", "waiting for a task")
            waits += 1
            park_idle_model(self.home.folder, waits * _POLL_SECONDS)
        return None

    def _do(self, task: pb.Task) -> None:
        """Process a task until it is answered or the hub no longer needs the answer."""
        lease = Lease(task.message_id, task.lease_seconds)
        self._private, passing, group = False, list[Path](), task.metadata.group_id
        self._traffic.begin()
        self.display.report("task", titled(task), **task_fields(task, self.client.pin.server))
        self.display.busy("preparing the task: data, model, optimiser")
        with heartbeats(self.client, lease), hooks_set(self._hooks(lease)):
            try:
                request = self._room.needed(lambda: self._reply(task, lease, passing), lambda: lease.lost)
                self._room.needed(lambda: self._submit(request, group, lease), lambda: lease.lost)
            except GymError as error:
                if lease.lost is not None or error.code is not ErrorCode.INTERRUPTED:
                    self._objects.delete(passing)  # a hub could fill the disk with tasks that it takes back
                self._failed(task, lease, error)
                return
            finally:
                self._room.needed(self._traffic.save)
        self._failures = 0
        self._traffic.report(self.display, task.message_id)
        if self._private:
            self._spent.report(self.display)
        self._count(stage_of(task))
        self._objects.delete(passing)

    def _count(self, stage: str | None) -> None:
        """Count all stages of a secure round as one answer, which is complete after the unmask stage."""
        self._pauses.note_stage(goes_on=stage not in (None, UNMASK))
        if stage == TRAIN:
            self._masked += 1
        elif stage is not None:
            self._account.receipts.pop()
            self._masked -= stage == UNMASK

    def _hooks(self, lease: Lease) -> Hooks:
        def progress(phase: str, done: int, total: int, loss: float | None) -> None:
            lease.note(phase, done, total)
            self.display.progress(phase, done, total, loss)

        def should_stop() -> bool:
            return self._stop.is_set() or lease.lost is not None or self._pauses.interrupts()

        return Hooks(progress, should_stop, self.client.now)

    def _reply(self, task: pb.Task, lease: Lease, passing: list[Path]) -> pb.SubmitRequest:
        """Fetch inputs, call the app and upload the result; add the files to delete after the task to ``passing``."""
        self._settle()
        self._fetch(task, lease, passing)
        message = to_message(task, self._objects.reader())
        run_id = task.metadata.run_id
        context = self._contexts.setdefault(
            run_id, new_context(run_id, task.metadata.dst_node_id, self.node_config)
        )
        reply = self._call(message, context)
        request = to_submit(
            task.message_id, reply, lambda data: passing.append(self._objects.cache.put(data))
        )
        failpoint("client-before-upload")
        self._objects.upload(task, request, self._hooks(lease), self._retry(lease))
        failpoint("client-before-submit")
        return request

    def _call(self, message: Message, context: Context) -> Message:
        """Call the app; convert anything it raises to a ``GymError``."""
        try:
            return self.app(message, context)
        except GymError:
            raise
        except Exception as error:  # the app may raise any exception; the failure is reported to the hub
            if is_disk_full(error):
                raise
            log.exception("the app failed")
            raise GymError(ErrorCode.INTERNAL, f"the app failed: {type(error).__name__}: {error}") from error

    def _fetch(self, task: pb.Task, lease: Lease, passing: list[Path]) -> None:
        """Check the task against the policy, then fetch the objects it refers to."""
        spec = None
        if "task" in task.content.configs:
            for entry in task.content.configs["task"].entries:
                if entry.key == "spec":
                    spec = parse_task(entry.value.text)
                    self._check(spec, lease)
        passing.extend(self._objects.temporary_files(task, spec))
        self._objects.fetch(task, spec, self._hooks(lease), self._retry(lease))

    def _check(self, spec: TaskSpec, lease: Lease) -> None:
        self._private = spec.recipe.privacy is not None
        self.policy.check(spec)
        require_as_announced(self._announced, spec.recipe)
        if self._agreement is not None:
            self._agreement.require(spec)
        if self._promises is not None:
            status = self._retrying(self.client.status, lease)
            self._clock_report.update(self.client.clocks)
            require_as_promised(self.policy, self._promises, Promises.parse(status.privacy_json))
            require_sums(self._promises, spec.secure_aggregation)
        if spec.server != self.client.pin.server:
            raise GymError(
                ErrorCode.POLICY_REFUSED,
                f"the task is for server {spec.server}, but was sent by {self.client.pin.server}",
                "a hub may request only updates that are signed for the same hub",
            )
        if spec.evaluated_on != self._evaluated_on:
            limit = TimeLimit(self.policy, self._hooks(lease))
            phase = "checking against the hub's evaluation suites"
            for note in evaluation_notes(spec.evaluated_on, lambda: limit.require(phase)):
                self.display.report("contamination", note)
            self._evaluated_on = spec.evaluated_on

    def _submit(self, request: pb.SubmitRequest, group: str, lease: Lease | None) -> None:
        """Submit the answer. Heartbeats are stopped first, because the hub refuses heartbeats after the answer."""
        self.display.busy("waiting for the server's receipt")
        if lease is not None:
            lease.end(self.client)
        tried = False

        def send() -> Any:
            nonlocal tried
            if tried and lease is not None:
                lease.touch(self.client)
            tried = True
            return self.client.call("Submit", request)

        reply = self._retrying(send, lease)
        failpoint("client-after-submit")
        self._account.keep_receipt(request.message_id, group, reply.receipt_json)

    def _failed(self, task: pb.Task, lease: Lease, error: GymError) -> None:
        """Handle a failed task: stop the agent, drop the task, or report the failure to the hub."""
        lost = lease.lost or (error if error.code in GONE else None)
        if self._stop.is_set() and error.code is ErrorCode.INTERRUPTED:
            raise error
        if lost is None and self._pauses.interrupted and error.code is ErrorCode.INTERRUPTED:
            text = "stopped at a checkpoint; the hub takes the task back when the lease expires"
            self.display.report("stopped", text, task=task.message_id)
            return
        if lost is not None and lost.code in GONE:
            self.display.report(
                "lost", f"the server took the task back: {lost.message}", error=lost.to_dict()
            )
            if lost.code is not ErrorCode.LEASE_LOST:  # if only the lease is lost, the work may resume
                TaskFolder(self.home.task_folder(task.message_id)).drop()
            return
        if lost is not None or error.code in FATAL:
            raise lost or error
        self.display.report("failed", f"task failed: {error}", error=error.to_dict())
        self._failures += 1
        failure = kept_here() if self._private else error
        lease.end(self.client)
        try:
            self._retrying(lambda: self.client.call("Submit", to_refusal(task.message_id, failure)), None)
        except GymError as refused:
            if refused.code not in GONE:
                raise
        if self._failures >= _MAX_FAILURES_IN_A_ROW or error.code not in TASKS_OWN:
            raise error

    def _retry(self, lease: Lease) -> Retry:
        return lambda action: self._retrying(action, lease)

    def _retrying(self, action: Callable[[], T], lease: Lease | None) -> T:
        """Retry like ``retry_at_known_hub``, but stop when the lease is lost."""

        def attempt() -> T:
            if lease is not None and lease.lost is not None:
                raise lease.lost
            return action()

        return retry_at_known_hub(self.client, self._stop, self._outage, attempt)

    def _recover(self, verdicts: list[dict[str, Any]]) -> None:
        """Fetch receipts of submitted updates whose receipts were lost in a crash."""
        judged = {verdict["update"] for verdict in verdicts}
        for path in sorted(self.home.tasks.iterdir()):
            finished = TaskFolder(path).finished()
            if finished is None or finished.manifest.digest not in judged:
                continue
            records = update_records(finished, by_reference=True)
            request = to_submit_records(path.name, records, lambda data: None)
            self._submit(request, str(finished.manifest.server_round), None)

    def _settle(self) -> list[dict[str, Any]]:
        """Fetch the account and settle the residuals of judged updates."""
        return self._account.take(
            self._retrying(lambda: self.client.call("Account", pb.AccountRequest()), None)
        )
