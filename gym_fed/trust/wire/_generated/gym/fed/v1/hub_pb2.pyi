from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Error(_message.Message):
    __slots__ = ("code", "message", "hint")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    hint: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., hint: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("name", "software_version", "ledger_public_key", "enrolment", "base_model", "base_digest", "version_height", "version_digest", "server_round", "round_state", "num_rounds", "num_connected", "finished", "recipe_json", "max_update_bytes", "privacy_json", "ledger_head_json", "protocol", "restored_json", "join_download_bytes", "round_download_bytes", "enrolment_work_bits", "base_json", "paused", "hub_seconds", "clock_seconds", "contributors_ahead_seconds", "num_clocks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEDGER_PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    ENROLMENT_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VERSION_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    VERSION_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SERVER_ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUND_STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    RECIPE_JSON_FIELD_NUMBER: _ClassVar[int]
    MAX_UPDATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PRIVACY_JSON_FIELD_NUMBER: _ClassVar[int]
    LEDGER_HEAD_JSON_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RESTORED_JSON_FIELD_NUMBER: _ClassVar[int]
    JOIN_DOWNLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUND_DOWNLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENROLMENT_WORK_BITS_FIELD_NUMBER: _ClassVar[int]
    BASE_JSON_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    HUB_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_AHEAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_CLOCKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    software_version: str
    ledger_public_key: bytes
    enrolment: str
    base_model: str
    base_digest: str
    version_height: int
    version_digest: str
    server_round: int
    round_state: str
    num_rounds: int
    num_connected: int
    finished: bool
    recipe_json: str
    max_update_bytes: int
    privacy_json: str
    ledger_head_json: str
    protocol: int
    restored_json: _containers.RepeatedScalarFieldContainer[str]
    join_download_bytes: int
    round_download_bytes: int
    enrolment_work_bits: int
    base_json: str
    paused: str
    hub_seconds: float
    clock_seconds: float
    contributors_ahead_seconds: float
    num_clocks: int
    def __init__(self, name: _Optional[str] = ..., software_version: _Optional[str] = ..., ledger_public_key: _Optional[bytes] = ..., enrolment: _Optional[str] = ..., base_model: _Optional[str] = ..., base_digest: _Optional[str] = ..., version_height: _Optional[int] = ..., version_digest: _Optional[str] = ..., server_round: _Optional[int] = ..., round_state: _Optional[str] = ..., num_rounds: _Optional[int] = ..., num_connected: _Optional[int] = ..., finished: _Optional[bool] = ..., recipe_json: _Optional[str] = ..., max_update_bytes: _Optional[int] = ..., privacy_json: _Optional[str] = ..., ledger_head_json: _Optional[str] = ..., protocol: _Optional[int] = ..., restored_json: _Optional[_Iterable[str]] = ..., join_download_bytes: _Optional[int] = ..., round_download_bytes: _Optional[int] = ..., enrolment_work_bits: _Optional[int] = ..., base_json: _Optional[str] = ..., paused: _Optional[str] = ..., hub_seconds: _Optional[float] = ..., clock_seconds: _Optional[float] = ..., contributors_ahead_seconds: _Optional[float] = ..., num_clocks: _Optional[int] = ...) -> None: ...

class EnrolRequest(_message.Message):
    __slots__ = ("public_key", "name", "invite", "signature", "protocol", "work")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INVITE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    name: str
    invite: str
    signature: bytes
    protocol: int
    work: bytes
    def __init__(self, public_key: _Optional[bytes] = ..., name: _Optional[str] = ..., invite: _Optional[str] = ..., signature: _Optional[bytes] = ..., protocol: _Optional[int] = ..., work: _Optional[bytes] = ...) -> None: ...

class EnrolReply(_message.Message):
    __slots__ = ("contributor",)
    CONTRIBUTOR_FIELD_NUMBER: _ClassVar[int]
    contributor: str
    def __init__(self, contributor: _Optional[str] = ...) -> None: ...

class AuthenticateRequest(_message.Message):
    __slots__ = ("contributor", "instance", "issued_at_seconds", "nonce", "signature", "protocol", "left", "clock_seconds")
    CONTRIBUTOR_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ISSUED_AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    CLOCK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    contributor: str
    instance: str
    issued_at_seconds: int
    nonce: str
    signature: bytes
    protocol: int
    left: bool
    clock_seconds: float
    def __init__(self, contributor: _Optional[str] = ..., instance: _Optional[str] = ..., issued_at_seconds: _Optional[int] = ..., nonce: _Optional[str] = ..., signature: _Optional[bytes] = ..., protocol: _Optional[int] = ..., left: _Optional[bool] = ..., clock_seconds: _Optional[float] = ...) -> None: ...

class AuthenticateReply(_message.Message):
    __slots__ = ("session", "expires_at_seconds", "node_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    session: str
    expires_at_seconds: int
    node_id: int
    def __init__(self, session: _Optional[str] = ..., expires_at_seconds: _Optional[int] = ..., node_id: _Optional[int] = ...) -> None: ...

class WorkRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkEvent(_message.Message):
    __slots__ = ("task", "notice", "keep_alive", "finished")
    TASK_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    KEEP_ALIVE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    task: Task
    notice: Notice
    keep_alive: KeepAlive
    finished: Finished
    def __init__(self, task: _Optional[_Union[Task, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., keep_alive: _Optional[_Union[KeepAlive, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("message_id", "lease_seconds", "metadata", "content")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    lease_seconds: float
    metadata: MessageMetadata
    content: Records
    def __init__(self, message_id: _Optional[str] = ..., lease_seconds: _Optional[float] = ..., metadata: _Optional[_Union[MessageMetadata, _Mapping]] = ..., content: _Optional[_Union[Records, _Mapping]] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("kind", "server_round", "message", "verdict_json")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SERVER_ROUND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    VERDICT_JSON_FIELD_NUMBER: _ClassVar[int]
    kind: str
    server_round: int
    message: str
    verdict_json: str
    def __init__(self, kind: _Optional[str] = ..., server_round: _Optional[int] = ..., message: _Optional[str] = ..., verdict_json: _Optional[str] = ...) -> None: ...

class KeepAlive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Finished(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("message_id", "phase", "done", "total")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    phase: str
    done: int
    total: int
    def __init__(self, message_id: _Optional[str] = ..., phase: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("lease_seconds",)
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    def __init__(self, lease_seconds: _Optional[float] = ...) -> None: ...

class MessageMetadata(_message.Message):
    __slots__ = ("run_id", "src_node_id", "dst_node_id", "reply_to_message_id", "group_id", "created_at_seconds", "ttl_seconds", "message_type")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SRC_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DST_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    REPLY_TO_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    run_id: int
    src_node_id: int
    dst_node_id: int
    reply_to_message_id: str
    group_id: str
    created_at_seconds: float
    ttl_seconds: float
    message_type: str
    def __init__(self, run_id: _Optional[int] = ..., src_node_id: _Optional[int] = ..., dst_node_id: _Optional[int] = ..., reply_to_message_id: _Optional[str] = ..., group_id: _Optional[str] = ..., created_at_seconds: _Optional[float] = ..., ttl_seconds: _Optional[float] = ..., message_type: _Optional[str] = ...) -> None: ...

class Records(_message.Message):
    __slots__ = ("arrays", "metrics", "configs", "order")
    class ArraysEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: ArrayRecord
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[ArrayRecord, _Mapping]] = ...) -> None: ...
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: MetricRecord
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[MetricRecord, _Mapping]] = ...) -> None: ...
    class ConfigsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: ConfigRecord
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[ConfigRecord, _Mapping]] = ...) -> None: ...
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    CONFIGS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    arrays: _containers.MessageMap[str, ArrayRecord]
    metrics: _containers.MessageMap[str, MetricRecord]
    configs: _containers.MessageMap[str, ConfigRecord]
    order: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, arrays: _Optional[_Mapping[str, ArrayRecord]] = ..., metrics: _Optional[_Mapping[str, MetricRecord]] = ..., configs: _Optional[_Mapping[str, ConfigRecord]] = ..., order: _Optional[_Iterable[str]] = ...) -> None: ...

class ArrayRecord(_message.Message):
    __slots__ = ("arrays",)
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    arrays: _containers.RepeatedCompositeFieldContainer[ArrayRef]
    def __init__(self, arrays: _Optional[_Iterable[_Union[ArrayRef, _Mapping]]] = ...) -> None: ...

class ArrayRef(_message.Message):
    __slots__ = ("name", "dtype", "shape", "stype", "sha256", "size_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    STYPE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    stype: str
    sha256: str
    size_bytes: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., stype: _Optional[str] = ..., sha256: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class Doubles(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class Integers(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[_Iterable[int]] = ...) -> None: ...

class Strings(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...

class Blobs(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, values: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Booleans(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, values: _Optional[_Iterable[bool]] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("number", "integer", "text", "blob", "boolean", "numbers", "integers", "texts", "blobs", "booleans")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    BOOLEAN_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    INTEGERS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    BOOLEANS_FIELD_NUMBER: _ClassVar[int]
    number: float
    integer: int
    text: str
    blob: bytes
    boolean: bool
    numbers: Doubles
    integers: Integers
    texts: Strings
    blobs: Blobs
    booleans: Booleans
    def __init__(self, number: _Optional[float] = ..., integer: _Optional[int] = ..., text: _Optional[str] = ..., blob: _Optional[bytes] = ..., boolean: _Optional[bool] = ..., numbers: _Optional[_Union[Doubles, _Mapping]] = ..., integers: _Optional[_Union[Integers, _Mapping]] = ..., texts: _Optional[_Union[Strings, _Mapping]] = ..., blobs: _Optional[_Union[Blobs, _Mapping]] = ..., booleans: _Optional[_Union[Booleans, _Mapping]] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: Value
    def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class MetricRecord(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    def __init__(self, entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ...) -> None: ...

class ConfigRecord(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    def __init__(self, entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ...) -> None: ...

class BeginUploadRequest(_message.Message):
    __slots__ = ("sha256", "size_bytes")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    size_bytes: int
    def __init__(self, sha256: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class UploadState(_message.Message):
    __slots__ = ("offset", "complete", "commitment_json")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    COMMITMENT_JSON_FIELD_NUMBER: _ClassVar[int]
    offset: int
    complete: bool
    commitment_json: str
    def __init__(self, offset: _Optional[int] = ..., complete: _Optional[bool] = ..., commitment_json: _Optional[str] = ...) -> None: ...

class UploadChunk(_message.Message):
    __slots__ = ("sha256", "offset", "data")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    offset: int
    data: bytes
    def __init__(self, sha256: _Optional[str] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("sha256", "offset")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    offset: int
    def __init__(self, sha256: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class DownloadChunk(_message.Message):
    __slots__ = ("size_bytes", "data")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    data: bytes
    def __init__(self, size_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class GetSoupRequest(_message.Message):
    __slots__ = ("from_version", "to_version")
    FROM_VERSION_FIELD_NUMBER: _ClassVar[int]
    TO_VERSION_FIELD_NUMBER: _ClassVar[int]
    from_version: str
    to_version: str
    def __init__(self, from_version: _Optional[str] = ..., to_version: _Optional[str] = ...) -> None: ...

class GetSoupReply(_message.Message):
    __slots__ = ("sha256", "size_bytes")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    size_bytes: int
    def __init__(self, sha256: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class SeedRequest(_message.Message):
    __slots__ = ("port", "certificate_pem", "slots", "sha256")
    PORT_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    port: int
    certificate_pem: str
    slots: int
    sha256: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, port: _Optional[int] = ..., certificate_pem: _Optional[str] = ..., slots: _Optional[int] = ..., sha256: _Optional[_Iterable[str]] = ...) -> None: ...

class SeedReply(_message.Message):
    __slots__ = ("lease_seconds", "why_not")
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    why_not: str
    def __init__(self, lease_seconds: _Optional[float] = ..., why_not: _Optional[str] = ...) -> None: ...

class FindSeederRequest(_message.Message):
    __slots__ = ("sha256", "failed", "busy", "will_not_serve")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    WILL_NOT_SERVE_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    failed: _containers.RepeatedScalarFieldContainer[str]
    busy: _containers.RepeatedScalarFieldContainer[str]
    will_not_serve: bool
    def __init__(self, sha256: _Optional[str] = ..., failed: _Optional[_Iterable[str]] = ..., busy: _Optional[_Iterable[str]] = ..., will_not_serve: _Optional[bool] = ...) -> None: ...

class FindSeederReply(_message.Message):
    __slots__ = ("seeder", "wait_seconds")
    SEEDER_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    seeder: SeederInfo
    wait_seconds: float
    def __init__(self, seeder: _Optional[_Union[SeederInfo, _Mapping]] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class SeederInfo(_message.Message):
    __slots__ = ("host", "port", "certificate_pem", "ticket_json")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    TICKET_JSON_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    certificate_pem: str
    ticket_json: str
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., certificate_pem: _Optional[str] = ..., ticket_json: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("ticket_json",)
    TICKET_JSON_FIELD_NUMBER: _ClassVar[int]
    ticket_json: str
    def __init__(self, ticket_json: _Optional[str] = ...) -> None: ...

class BaseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BasePart(_message.Message):
    __slots__ = ("files", "tensors")
    FILES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[BaseFile]
    tensors: _containers.RepeatedCompositeFieldContainer[BaseTensor]
    def __init__(self, files: _Optional[_Iterable[_Union[BaseFile, _Mapping]]] = ..., tensors: _Optional[_Iterable[_Union[BaseTensor, _Mapping]]] = ...) -> None: ...

class BaseFile(_message.Message):
    __slots__ = ("name", "size_bytes", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    sha256: str
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class BaseTensor(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: bytes
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("message_id", "content", "error")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    content: Records
    error: ReplyError
    def __init__(self, message_id: _Optional[str] = ..., content: _Optional[_Union[Records, _Mapping]] = ..., error: _Optional[_Union[ReplyError, _Mapping]] = ...) -> None: ...

class ReplyError(_message.Message):
    __slots__ = ("code", "reason")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("receipt_json",)
    RECEIPT_JSON_FIELD_NUMBER: _ClassVar[int]
    receipt_json: str
    def __init__(self, receipt_json: _Optional[str] = ...) -> None: ...

class AccountRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AccountReply(_message.Message):
    __slots__ = ("contributor", "name", "status", "balance", "verdicts_json", "rewards_json")
    CONTRIBUTOR_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    BALANCE_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_JSON_FIELD_NUMBER: _ClassVar[int]
    REWARDS_JSON_FIELD_NUMBER: _ClassVar[int]
    contributor: str
    name: str
    status: str
    balance: int
    verdicts_json: _containers.RepeatedScalarFieldContainer[str]
    rewards_json: str
    def __init__(self, contributor: _Optional[str] = ..., name: _Optional[str] = ..., status: _Optional[str] = ..., balance: _Optional[int] = ..., verdicts_json: _Optional[_Iterable[str]] = ..., rewards_json: _Optional[str] = ...) -> None: ...

class LedgerRequest(_message.Message):
    __slots__ = ("from_sequence",)
    FROM_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    from_sequence: int
    def __init__(self, from_sequence: _Optional[int] = ...) -> None: ...

class LedgerEntry(_message.Message):
    __slots__ = ("sequence", "kind", "body_json", "previous_hash", "hash")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_HASH_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    kind: str
    body_json: str
    previous_hash: str
    hash: str
    def __init__(self, sequence: _Optional[int] = ..., kind: _Optional[str] = ..., body_json: _Optional[str] = ..., previous_hash: _Optional[str] = ..., hash: _Optional[str] = ...) -> None: ...

class LedgerHeadsRequest(_message.Message):
    __slots__ = ("from_size",)
    FROM_SIZE_FIELD_NUMBER: _ClassVar[int]
    from_size: int
    def __init__(self, from_size: _Optional[int] = ...) -> None: ...

class LedgerHead(_message.Message):
    __slots__ = ("head_json",)
    HEAD_JSON_FIELD_NUMBER: _ClassVar[int]
    head_json: str
    def __init__(self, head_json: _Optional[str] = ...) -> None: ...

class LedgerProofRequest(_message.Message):
    __slots__ = ("sequence", "size")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    size: int
    def __init__(self, sequence: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class LedgerProofReply(_message.Message):
    __slots__ = ("entry", "head_json", "path")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    HEAD_JSON_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    entry: LedgerEntry
    head_json: str
    path: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, entry: _Optional[_Union[LedgerEntry, _Mapping]] = ..., head_json: _Optional[str] = ..., path: _Optional[_Iterable[str]] = ...) -> None: ...

class RotateKeyRequest(_message.Message):
    __slots__ = ("new_public_key", "statement_json", "signature", "new_signature")
    NEW_PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_JSON_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    NEW_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    new_public_key: bytes
    statement_json: str
    signature: bytes
    new_signature: bytes
    def __init__(self, new_public_key: _Optional[bytes] = ..., statement_json: _Optional[str] = ..., signature: _Optional[bytes] = ..., new_signature: _Optional[bytes] = ...) -> None: ...

class RevokeKeyRequest(_message.Message):
    __slots__ = ("contributor", "signing_key", "statement_json", "signature")
    CONTRIBUTOR_FIELD_NUMBER: _ClassVar[int]
    SIGNING_KEY_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_JSON_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    contributor: str
    signing_key: bytes
    statement_json: str
    signature: bytes
    def __init__(self, contributor: _Optional[str] = ..., signing_key: _Optional[bytes] = ..., statement_json: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class KeyReply(_message.Message):
    __slots__ = ("receipt_json",)
    RECEIPT_JSON_FIELD_NUMBER: _ClassVar[int]
    receipt_json: str
    def __init__(self, receipt_json: _Optional[str] = ...) -> None: ...

class TransferRequest(_message.Message):
    __slots__ = ("statement_json", "signature")
    STATEMENT_JSON_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    statement_json: str
    signature: bytes
    def __init__(self, statement_json: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class TransferReply(_message.Message):
    __slots__ = ("receipt_json",)
    RECEIPT_JSON_FIELD_NUMBER: _ClassVar[int]
    receipt_json: str
    def __init__(self, receipt_json: _Optional[str] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PutVariantRequest(_message.Message):
    __slots__ = ("variant_json", "readers")
    VARIANT_JSON_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    variant_json: str
    readers: Readers
    def __init__(self, variant_json: _Optional[str] = ..., readers: _Optional[_Union[Readers, _Mapping]] = ...) -> None: ...

class Readers(_message.Message):
    __slots__ = ("contributors",)
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    contributors: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, contributors: _Optional[_Iterable[str]] = ...) -> None: ...

class PutVariantReply(_message.Message):
    __slots__ = ("needs_object", "receipt_json")
    NEEDS_OBJECT_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_JSON_FIELD_NUMBER: _ClassVar[int]
    needs_object: bool
    receipt_json: str
    def __init__(self, needs_object: _Optional[bool] = ..., receipt_json: _Optional[str] = ...) -> None: ...

class GetVariantRequest(_message.Message):
    __slots__ = ("owner", "name")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    owner: str
    name: str
    def __init__(self, owner: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class VariantInfo(_message.Message):
    __slots__ = ("variant_json", "base", "key_status", "ledger_sequence", "put_at_seconds", "is_public", "num_readers", "readers")
    VARIANT_JSON_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    KEY_STATUS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PUT_AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IS_PUBLIC_FIELD_NUMBER: _ClassVar[int]
    NUM_READERS_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    variant_json: str
    base: str
    key_status: str
    ledger_sequence: int
    put_at_seconds: float
    is_public: bool
    num_readers: int
    readers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, variant_json: _Optional[str] = ..., base: _Optional[str] = ..., key_status: _Optional[str] = ..., ledger_sequence: _Optional[int] = ..., put_at_seconds: _Optional[float] = ..., is_public: _Optional[bool] = ..., num_readers: _Optional[int] = ..., readers: _Optional[_Iterable[str]] = ...) -> None: ...

class ListVariantsRequest(_message.Message):
    __slots__ = ("page", "page_size")
    PAGE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    page: str
    page_size: int
    def __init__(self, page: _Optional[str] = ..., page_size: _Optional[int] = ...) -> None: ...

class ListVariantsReply(_message.Message):
    __slots__ = ("variants", "next_page")
    VARIANTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_FIELD_NUMBER: _ClassVar[int]
    variants: _containers.RepeatedCompositeFieldContainer[VariantInfo]
    next_page: str
    def __init__(self, variants: _Optional[_Iterable[_Union[VariantInfo, _Mapping]]] = ..., next_page: _Optional[str] = ...) -> None: ...

class DeleteVariantRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteVariantReply(_message.Message):
    __slots__ = ("receipt_json",)
    RECEIPT_JSON_FIELD_NUMBER: _ClassVar[int]
    receipt_json: str
    def __init__(self, receipt_json: _Optional[str] = ...) -> None: ...
