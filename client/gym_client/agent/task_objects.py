"""Convert tasks between wire messages and Flower, and transfer their objects within the policy's limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from flwr.app import Context, Message, Metadata, RecordDict, UserConfig

from gym_client.agent.hooks import Hooks
from gym_client.agent.kept_soups import KeptSoups
from gym_client.agent.policy import Policy
from gym_client.agent.tasks import TaskFolder
from gym_client.agent.version_sum import VersionSum
from gym_client.hub.backoff import Retry
from gym_client.hub.traffic import Traffic
from gym_client.hub.transfers import ObjectCache, download, partial_file, upload
from gym_client.hub.transport import HubClient
from gym_client.identity.home import Home
from gym_fed.config.hub.task import TaskSpec, first_summed
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import move_file
from gym_fed.core.text import readable_bytes, without_folders
from gym_fed.doctor.checks.devices import available_memory_bytes
from gym_fed.trust.identity.commitment import UploadCommitment
from gym_fed.trust.wire.limits import DELTA_STYPE
from gym_fed.trust.wire.records import GetObject, PutObject, from_wire, to_wire
from gym_fed.trust.wire.references import check_counts, references
from gym_fed.trust.wire.v1 import hub_pb2 as pb

_MAX_REASON = 2_000
_ABOUT_THE_TASK = (
    ErrorCode.POLICY_REFUSED,
    ErrorCode.TERMS_CHANGED,
    ErrorCode.TOO_LARGE,
    ErrorCode.HASH_MISMATCH,
    ErrorCode.BASE_MISMATCH,
    ErrorCode.DELTA_INVALID,
    ErrorCode.UPDATE_REFUSED,
    ErrorCode.TASKS_DIFFER,
    ErrorCode.MISSING_DEPENDENCY,
)
"""Errors whose messages describe what the hub sent. Others may quote rows: a base's chat template chooses its own."""


class TaskObjects:
    """Transfers a task's objects one at a time, skipping those that are already at the destination.

    Args:
        home: The home with the object cache and the task folders.
        client: Client of the hub.
        policy: Limits on downloads and uploads.
        traffic: Counter of transferred bytes.
    """

    def __init__(self, home: Home, client: HubClient, policy: Policy, traffic: Traffic) -> None:
        self.cache = ObjectCache(home.objects)
        self._home, self._client, self._traffic = home, client, traffic
        self.policy = policy
        self._fetched = 0  # bytes in this run

    def temporary_files(self, task: pb.Task, spec: TaskSpec | None) -> list[Path]:
        """Return the files, complete or partial, of a task's objects that only this task needs: all but soups.

        Raises:
            GymError: ``TOO_LARGE`` if there are more references than a message may have; ``USAGE`` for a name that is
                not a SHA-256.
        """
        check_counts(task.content)
        soups = KeptSoups(self._home).names() | (
            set() if spec is None else {soup.sha256 for soup in spec.soups}
        )
        paths = [self.cache.path(ref.sha256) for ref in references(task.content) if ref.sha256 not in soups]
        return [file for path in paths for file in (path, partial_file(path))]

    def fetch(
        self, task: pb.Task, spec: TaskSpec | None, hooks: Hooks, retry: Retry, again: bool = False
    ) -> None:
        """Download the objects that a task refers to.

        Additive soups are fetched as one object: the newest soup, the sum since this machine's last version, or the
        total sum. This object and the task's soups are kept from now on, instead of those of the hub's last task.

        Args:
            task: The task on the wire.
            spec: The task of a round; None for other messages.
            hooks: Callbacks for progress and stopping.
            retry: Retries an action while the hub is unreachable.
            again: True if the hub deleted a soup during its download.

        Raises:
            GymError: ``POLICY_REFUSED`` before the download if it exceeds the policy's limits; ``TOO_LARGE`` if there
                are more references than a message may have.
        """
        check_counts(task.content)
        refs = references(task.content)
        sums = VersionSum(self._home.versions(spec.server)) if spec is not None else None
        start = end = ""
        if sums is not None and spec is not None and (summed := spec.soups[first_summed(spec.soups) :]):
            names = {soup.sha256 for soup in summed}
            refs = [ref for ref in refs if ref.sha256 not in names]
            start, end = sums.missing(spec.soups, spec.base_digest)
            if start != end:
                start, ref = self._combined(spec, start, retry)
                refs.append(ref)
                sums.drop_combined()
        if spec is not None:
            summing = {refs[-1].sha256} if start != end else set()
            KeptSoups(self._home).replace(spec.server, {soup.sha256 for soup in spec.soups} | summing)
        missing = [ref for ref in refs if not self.cache.has(ref.sha256, ref.size_bytes)]
        total = sum(ref.size_bytes for ref in missing)
        self.policy.check_download(total)
        self.policy.check_total_download(self._fetched + total)
        before = 0
        for ref in refs:  # including cached ones, which are served to other contributors

            def progress(done: int, _: int, before: int = before) -> None:
                hooks.progress("fetch", before + done, total, None)

            def fetch_object(ref: pb.ArrayRef = ref, progress: Callable[[int, int], None] = progress) -> Path:
                return download(
                    self._client,
                    self.cache,
                    ref.sha256,
                    ref.size_bytes,
                    progress,
                    hooks.should_stop,
                    self._traffic.count_down,
                    "soups" if ref.stype == DELTA_STYPE and spec is not None else None,
                )

            try:
                retry(fetch_object)
            except GymError as error:
                if error.code is not ErrorCode.NOT_FOUND or start == end or again:
                    raise
                self.fetch(task, spec, hooks, retry, again=True)
                return
            if ref in missing:
                before += ref.size_bytes
                self._fetched += ref.size_bytes
        if sums is not None and start != end:
            move_file(self.cache.path(refs[-1].sha256), sums.combined(start, end))

    def _combined(self, spec: TaskSpec, start: str, retry: Retry) -> tuple[str, pb.ArrayRef]:
        """Return the version to start from (``start`` or the first) and the object that leads to the task's version."""
        last, summed = spec.soups[-1], first_summed(spec.soups)
        parents = [spec.base_digest, *(soup.version_digest for soup in spec.soups)]
        if start == parents[-2]:
            return start, pb.ArrayRef(sha256=last.sha256, size_bytes=last.size_bytes, stype=DELTA_STYPE)
        sha256, size = last.sum_sha256, last.sum_bytes
        if start != parents[summed]:
            request = pb.GetSoupRequest(from_version=start, to_version=last.version_digest)
            try:
                found = retry(lambda: self._client.call("GetSoup", request))
                sha256, size = found.sha256, found.size_bytes
            except GymError as error:
                if (
                    error.code is not ErrorCode.NOT_FOUND
                ):  # this machine was offline for a long time: fetch the whole sum
                    raise
                start = parents[summed]
        return start, pb.ArrayRef(sha256=sha256, size_bytes=size, stype=DELTA_STYPE)

    def delete(self, paths: Iterable[Path]) -> None:
        """Delete files of a task, if they exist."""
        for path in paths:
            path.unlink(missing_ok=True)

    def reader(self) -> Callable[[pb.ArrayRef], bytes]:
        """Return a function that reads the bytes of a task's references.

        An object that a task references several times is read once and shared, so that a small task cannot exhaust
        memory.

        Raises:
            GymError: ``TOO_LARGE``, from the function, if the objects need more than half of the free memory.
        """
        held: dict[str, bytes] = {}
        free, total = available_memory_bytes(), 0

        def read(ref: pb.ArrayRef) -> bytes:
            nonlocal total
            if ref.sha256 not in held:
                path = self.cache.path(ref.sha256)
                total += path.stat().st_size
                if total > free // 2:  # the app needs the other half
                    raise GymError(
                        ErrorCode.TOO_LARGE,
                        f"the task's arrays have {readable_bytes(total)} or more, but only half of the free memory "
                        f"of {readable_bytes(free)} is for them",
                        "use a machine with more memory",
                    )
                held[ref.sha256] = path.read_bytes()
            return held[ref.sha256]

        return read

    def upload(self, task: pb.Task, request: pb.SubmitRequest, hooks: Hooks, retry: Retry) -> None:
        """Upload the objects that the reply refers to."""
        refs = references(request.content)
        self.policy.check_update(sum(ref.size_bytes for ref in refs))

        def progress(done: int, total: int) -> None:
            hooks.progress("upload", done, total, None)

        # With an upload limit, serving others would compete with the update, and their downloads would time out.
        pauses_seeding = self._client.rates.up.bytes_per_second is not None
        if pauses_seeding:
            self._client.pause_seeding("upload", True)
        try:
            for ref in refs:
                self._upload(task, ref, progress, hooks, retry)
        finally:
            if pauses_seeding:
                self._client.pause_seeding("upload", False)

    def _upload(
        self,
        task: pb.Task,
        ref: pb.ArrayRef,
        progress: Callable[[int, int], None],
        hooks: Hooks,
        retry: Retry,
    ) -> None:

        def send() -> None:
            try:
                upload(
                    self._client,
                    ref.sha256,
                    self._path(task, ref),
                    progress,
                    hooks.should_stop,
                    self._traffic.count_up,
                    lambda statement: self._keep_commitment(statement, ref.sha256),
                )
            except GymError as error:
                if error.code is not ErrorCode.LEASE_LOST:
                    raise
                # The hub still holds the stream from before the reconnect, which keeps the object locked for some time.
                raise GymError(ErrorCode.UNAVAILABLE, error.message) from error

        retry(send)

    def _keep_commitment(self, statement: str, sha256: str) -> None:
        """Verify and store the commitment that the hub signs before it receives the first byte of the update."""
        if not statement:
            return
        pin = self._client.pin
        commitment = UploadCommitment.verified(statement, bytes.fromhex(pin.ledger_key))
        if (commitment.server, commitment.contributor, commitment.sha256) != (
            pin.server,
            pin.contributor,
            sha256,
        ):
            raise GymError(
                ErrorCode.SIGNATURE_INVALID,
                f"{pin.server} commits to an upload of {commitment.sha256[:12]} by {commitment.contributor}, not to "
                f"{sha256[:12]} by {pin.contributor}",
            )
        self._home.append_receipt({"server": pin.server, "commitment": json.loads(statement)})

    def _path(self, task: pb.Task, ref: pb.ArrayRef) -> Path:
        """Return the path of an object: the task's own delta or a file in the cache."""
        own = TaskFolder(self._home.task_folder(task.message_id)).delta_path
        if ref.stype == DELTA_STYPE and own.exists() and not self.cache.has(ref.sha256, ref.size_bytes):
            return own
        return self.cache.path(ref.sha256)


def to_message(task: pb.Task, get: GetObject) -> Message:
    """Convert a task to the message for a ``ClientApp``; ``get`` provides array bytes.

    Raises:
        GymError: ``USAGE`` for a task that is not a Flower message.
    """
    meta = task.metadata
    try:
        metadata = Metadata(
            run_id=meta.run_id,
            message_id=task.message_id,
            src_node_id=meta.src_node_id,
            dst_node_id=meta.dst_node_id,
            reply_to_message_id=meta.reply_to_message_id,
            group_id=meta.group_id,
            created_at=meta.created_at_seconds,
            ttl=meta.ttl_seconds,
            message_type=meta.message_type,
        )
        # Flower's own nodes pass the metadata of incoming messages, too; the typed overloads for apps omit it.
        content = from_wire(task.content, get)
        message: Message = Message(metadata=metadata, content=content)  # type: ignore[call-overload]
        return message
    except (TypeError, ValueError, KeyError) as error:
        raise GymError(
            ErrorCode.USAGE, f"task {task.message_id!r} is not a Flower message: {error}"
        ) from error


def to_submit(message_id: str, reply: Message, put: PutObject) -> pb.SubmitRequest:
    """Convert an app's reply to the request that answers the task; ``put`` stores array bytes."""
    if reply.has_error():
        error = pb.ReplyError(code=reply.error.code, reason=(reply.error.reason or "")[:_MAX_REASON])
        return pb.SubmitRequest(message_id=message_id, error=error)
    return to_submit_records(message_id, reply.content, put)


def to_submit_records(message_id: str, records: RecordDict, put: PutObject) -> pb.SubmitRequest:
    """Convert records to the request that answers the task."""
    return pb.SubmitRequest(message_id=message_id, content=to_wire(records, put))


def to_refusal(message_id: str, error: GymError) -> pb.SubmitRequest:
    """Create the answer to a task that this machine failed or refused, without rows and folders of this machine."""
    message = "the reason stays with the contributor, because it may quote rows"
    if error.code in _ABOUT_THE_TASK:
        message = without_folders(error.message)
    reason = f"{error.code.value}: {message}"[:_MAX_REASON]
    return pb.SubmitRequest(message_id=message_id, error=pb.ReplyError(code=error.exit_code, reason=reason))


def new_context(run_id: int, node_id: int, node_config: UserConfig) -> Context:
    """Create the context of a run; its state is kept until the agent exits."""
    return Context(run_id=run_id, node_id=node_id, node_config=node_config, state=RecordDict(), run_config={})


def task_fields(task: pb.Task, server: str) -> dict[str, str]:
    """Return the fields of the event for the start of a task."""
    return {"task": task.message_id, "group": task.metadata.group_id, "server": server}
