"""Layer 5. What a step log consists of: records, and the bytes that they become.

    file     magic (8 bytes) | format version (u32) | record ...
    record   length (u32) | crc32 (u32) | kind (u8) | payload

Integers are little-endian. length counts the payload, the checksum (zlib's crc32) covers kind
and payload. A payload is a msgpack array of the record's fields in their order; later versions
of the software may append fields, and a reader skips what it does not know. A message inside a
record is the body that travels on the wire.
"""

from __future__ import annotations

import struct
import zlib
from typing import Annotated

import msgspec

from gpuworker.config import WorkerConfig

__all__ = [
    "FILE_HEAD",
    "FORMAT_VERSION",
    "HEAD",
    "MAGIC",
    "MAX_PAYLOAD_BYTES",
    "RECORD_TYPES",
    "End",
    "EpochChange",
    "Header",
    "LoggedReply",
    "LoggedRequest",
    "ModelFingerprint",
    "Record",
    "Stopped",
    "checksum",
    "decode_record",
    "encode_record",
]

MAGIC = b"\x89GWSLOG\n"
FORMAT_VERSION = 1
FILE_HEAD = struct.Struct("<8sI")
HEAD = struct.Struct("<IIB")
"""Length of the payload, checksum, kind."""
MAX_PAYLOAD_BYTES = 64 << 20

Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Record(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    pass


class ModelFingerprint(_Record, frozen=True):
    """What can be said of a model directory without reading its weights."""

    config_sha256: str
    """Of config.json; empty when there was no such file."""
    weight_files: tuple[tuple[str, int], ...]
    """Name and bytes of each safetensors file, sorted."""


class Header(_Record, frozen=True):
    """The first record: who recorded, and with which configuration."""

    gpuworker: str
    python: str
    torch: str
    """Version; empty when it was not installed."""
    numpy: str
    machine: str
    """Architecture and name of the system's processor."""
    num_cpus: Number
    """Cores that the process may use, which decide the compute threads unless configured."""
    boot_id: str
    """As in the replies of the worker; empty when it is not known."""
    started_unix_s: float
    config: WorkerConfig
    model: ModelFingerprint | None
    """None when the model was no directory on this machine."""


class LoggedRequest(_Record, frozen=True):
    """A request that the worker accepted."""

    index: Number
    """From 0 on and without gaps."""
    body: bytes
    epoch: Number
    """Of the session that it belongs to; 0 without one."""
    seq: Number
    """Steps of the session so far, this one included; 0 for what is no step."""
    offset_s: float
    """Seconds since the header was written, on the monotonic clock."""


class LoggedReply(_Record, frozen=True):
    """What a request was answered with; in the order of the answers."""

    index: Number
    """Of the request."""
    body: bytes
    """Empty when nobody waited any more: the request was withdrawn by its sender."""
    duration_s: float
    """Seconds since the request was recorded."""


class EpochChange(_Record, frozen=True):
    """Requests belong to another session from here on."""

    epoch: Number
    offset_s: float


class Stopped(_Record, frozen=True):
    """Recording was given up here, while the worker served on."""

    reason: str


class End(_Record, frozen=True):
    """The log was closed in order."""

    num_requests: Number
    num_replies: Number
    offset_s: float


Record = Header | LoggedRequest | LoggedReply | EpochChange | Stopped | End
RECORD_TYPES: dict[int, type[Record]] = {
    1: Header,
    2: LoggedRequest,
    3: LoggedReply,
    4: EpochChange,
    5: Stopped,
    6: End,
}
_KINDS = {record: kind for kind, record in RECORD_TYPES.items()}
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[int, msgspec.msgpack.Decoder[Record]] = {
    kind: msgspec.msgpack.Decoder(record) for kind, record in RECORD_TYPES.items()
}


def checksum(kind: int, payload: bytes | memoryview) -> int:
    """Return the crc32 of a kind and a payload."""
    return zlib.crc32(payload, zlib.crc32(bytes((kind,))))


def encode_record(record: Record) -> bytes:
    """Return a record as it stands in the file.

    Raises ValueError for more than MAX_PAYLOAD_BYTES.
    """
    kind = _KINDS[type(record)]
    payload = _encoder.encode(record)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a record of {len(payload)} bytes; the limit is {MAX_PAYLOAD_BYTES}")
    return HEAD.pack(len(payload), checksum(kind, payload), kind) + payload


def decode_record(kind: int, payload: bytes | memoryview) -> Record | None:
    """Decode an intact payload; None for a kind that this version does not know.

    Raises msgspec.DecodeError, or ConfigError for a configuration that is not accepted here.
    """
    decoder = _decoders.get(kind)
    return None if decoder is None else decoder.decode(payload)
