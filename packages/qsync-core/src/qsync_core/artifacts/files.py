"""Artifact files: frozen objects with a header that says what they are, a schema version and a digest.

Layout (big endian)::

    offset  bytes  what
         0      8  magic: 0x89 "QSYNC" CR LF; the odd first byte and the line end show transfers that mangled the file
         8     16  kind, ASCII, padded with zero bytes ("Profile")
        24      4  schema version of that kind
        28      8  length of the content in bytes
        36     32  SHA-256 of everything else: bytes 0 to 36 and the content
        68         content: msgpack, canonical (module :mod:`qsync_core.artifacts.codec`)

Reading executes nothing, trusts no length and allocates at most a small multiple of the file's size.  Whatever is wrong gives one
:class:`~qsync_core.errors.ArtifactError`.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterable
from typing import Any, TypeVar, overload

import msgpack

from qsync_core.artifacts.atomic_file import write_or_refuse
from qsync_core.artifacts.codec import CodecError, from_plain, to_plain
from qsync_core.artifacts.schema import KINDS, migrate, schema_version, stored_as
from qsync_core.artifacts.whole_file import read_whole
from qsync_core.errors import ArtifactError

MAGIC = b"\x89QSYNC\r\n"
MAX_BYTES = 1 << 30
"""Largest artifact that is read or written; a profile of a 10,000-operator model takes about 20 MB."""

_MOST_DECODED = 6
"""Bytes of decoded values for one of the file.  A mapping takes 1 byte in a file and 60 to 200 in memory, so a file that grows by
more than artifacts do is refused while it is decoded.  The densest artifacts, timelines, take 5.3."""
_SPARE_BYTES, _SPARE_ITEMS = 1 << 18, 4096
"""Bytes and items that small artifacts may have beyond what their size allows."""
_MIN_BYTES_PER_ITEM = 32
"""The bytes of one list or mapping, at least, on the file's average: its size is known when it has been decoded."""

_FRONT = struct.Struct(">8s16sIQ")
_DIGEST_BYTES = 32
HEADER_BYTES = _FRONT.size + _DIGEST_BYTES

T = TypeVar("T")


def to_bytes(artifact: Any) -> bytes:
    """The canonical encoding: equal artifacts give equal bytes.

    Raises:
        ArtifactError: when the object is no artifact, or holds what cannot be stored (NaN, a value of another type).
    """
    kind = type(artifact).__name__
    if KINDS.get(kind) is not type(artifact):
        raise ArtifactError(f"a {kind} is not an artifact; artifacts are {', '.join(KINDS)}")
    try:
        version, plain = stored_as(kind, to_plain(artifact))
        content: bytes = msgpack.packb(plain, use_bin_type=True)
    except (CodecError, UnicodeEncodeError, OverflowError, ValueError) as error:
        raise ArtifactError(f"this {kind} cannot be stored: {error}") from None
    size = HEADER_BYTES + len(content)
    if size > MAX_BYTES:
        raise ArtifactError(f"this {kind} takes {size} bytes; artifacts have at most {MAX_BYTES}")
    front = _FRONT.pack(MAGIC, kind.encode("ascii"), version, len(content))
    return front + _sha256(front, content) + content


def digest(artifact: Any) -> str:
    """SHA-256 of the artifact's kind, schema version and content, in hexadecimal; it is what the file's header holds.

    Raises:
        ArtifactError: as :func:`to_bytes`.
    """
    return to_bytes(artifact)[_FRONT.size : HEADER_BYTES].hex()


@overload
def from_bytes(data: bytes, kind: type[T], *, name: str = ...) -> T: ...
@overload
def from_bytes(data: bytes, kind: None = None, *, name: str = ...) -> Any: ...
def from_bytes(data: bytes, kind: type[T] | None = None, *, name: str = "these bytes") -> Any:
    """The artifact that :func:`to_bytes` encoded, of any earlier schema version that can be migrated.

    Args:
        kind: the class it must be of; None takes any artifact.
        name: how error messages call the data: its file name.

    Raises:
        ArtifactError: saying what is wrong and where.
    """
    stored_kind, version, length = _read_front(data, name)
    content = memoryview(data)[HEADER_BYTES:]
    if len(content) != length:
        state = "is truncated" if len(content) < length else "has bytes after its end"
        raise ArtifactError(
            f"{name} {state}: its header announces {length} bytes of content, {len(content)} are there; {_again(stored_kind)}"
        )
    stored_digest = data[_FRONT.size : HEADER_BYTES]
    if _sha256(data[: _FRONT.size], content) != stored_digest:
        raise ArtifactError(f"{name} was altered: its content does not match its digest; {_again(stored_kind)}")
    if kind is not None and KINDS[stored_kind] is not kind:
        raise ArtifactError(f"{name} holds {_with_article(stored_kind)}, but {_with_article(kind.__name__)} is needed here")
    current = schema_version(stored_kind)
    if version > current:
        raise ArtifactError(
            f"{name} has schema version {version} of {stored_kind}, this qsync-core reads up to {current}; upgrade qsync-core"
        )
    plain = _unpack(content, name)
    try:
        migrated = migrate(stored_kind, version, plain)
        artifact: Any = from_plain(migrated, KINDS[stored_kind])
    except CodecError as error:
        raise ArtifactError(f"{name} is not a valid {stored_kind}: {error}") from None
    if version > 1 and (canonical := stored_as(stored_kind, migrated)[0]) != version:
        raise ArtifactError(f"{name} is not a valid {stored_kind}: with this content it is stored in schema version {canonical}")
    return artifact


def save(artifact: Any, path: str | os.PathLike[str]) -> None:
    """Write an artifact; readers of ``path`` see the old content or the new, never a part.

    Raises:
        ArtifactError: when the object cannot be stored or the file cannot be written; what stood at ``path`` stays.
    """
    write_or_refuse(path, to_bytes(artifact), ArtifactError)


@overload
def load(path: str | os.PathLike[str], kind: type[T]) -> T: ...
@overload
def load(path: str | os.PathLike[str], kind: None = None) -> Any: ...
def load(path: str | os.PathLike[str], kind: type[T] | None = None) -> Any:
    """Read an artifact file.

    Args:
        path: the file, or a pipe (``/dev/stdin``, a FIFO that a process writes to).
        kind: the class it must be of; None takes any artifact.

    Raises:
        ArtifactError: when the file cannot be read or is not a valid artifact of that kind.
    """
    name = os.fspath(path)
    try:
        data = read_whole(path, MAX_BYTES, "artifacts")
    except OSError as error:
        raise ArtifactError(f"cannot read {name}: {error.strerror or error}") from None
    return from_bytes(data, kind, name=name)


_MADE_BY = {
    "PrecisionDag": "trace",
    "Profile": "profile",
    "Observations": "observe",
    "Sensitivity": "indicate",
    "PrecisionPlan": "plan",
    "Timeline": "replay",
    "CollectiveCosts": "communicate",
}
"""The command that makes a kind, of those that people make files of."""


def _again(kind: str = "") -> str:
    """What to do about a file that was damaged."""
    command = f", elsewhere with 'qsync {_MADE_BY[kind]}'" if kind in _MADE_BY else ""
    return f"copy the file again, or make it anew: in a run folder with 'qsync prepare'{command}"


def _with_article(kind: str) -> str:
    """``Observations`` is the name of one artifact."""
    return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"


def _sha256(front: bytes, content: bytes | memoryview) -> bytes:
    import hashlib  # here, because OpenSSL takes a tenth of the time of importing all of core

    summed = hashlib.sha256(front)
    summed.update(content)
    return summed.digest()


def _read_front(data: bytes, name: str) -> tuple[str, int, int]:
    """Kind, schema version and announced content length, the first two checked."""
    if not data:
        raise ArtifactError(f"{name} is empty; {_again()}")
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise ArtifactError(f"{name} is not a QSync artifact: it starts with {data[:8]!r} instead of {MAGIC!r}")
    if len(data) < HEADER_BYTES:
        raise ArtifactError(f"{name} is truncated: {len(data)} bytes, the header alone has {HEADER_BYTES}; {_again()}")
    _, padded_kind, version, length = _FRONT.unpack_from(data)
    kind = next((known for known in KINDS if known.encode("ascii").ljust(16, b"\0") == padded_kind), None)
    if kind is None:
        shown = padded_kind.rstrip(b"\0").decode("ascii", "backslashreplace")
        raise ArtifactError(f"{name} holds an unknown kind of artifact, {shown!r}; known are {', '.join(KINDS)}")
    if version < 1:
        raise ArtifactError(f"{name} has schema version {version} of {kind}; versions start at 1")
    return kind, version, length


def _unpack(content: memoryview, name: str) -> Any:
    """Decode msgpack: exactly one value, canonically encoded, whose lengths fit the bytes there are."""
    left = _SPARE_BYTES + _MOST_DECODED * len(content)
    most_items = _SPARE_ITEMS + len(content) // _MIN_BYTES_PER_ITEM
    keys: set[str] = set()

    def charge(container: list[Any] | dict[str, Any], values: Iterable[Any]) -> Any:
        nonlocal left
        left -= sys.getsizeof(container) + sum(sys.getsizeof(value) for value in values if type(value) in _OWN_BYTES)
        if left < sys.getsizeof(keys):
            raise ArtifactError(f"{name} holds more lists, mappings and values than an artifact of {len(content)} bytes can")
        return container

    def charge_mapping(mapping: dict[str, Any]) -> Any:
        new = mapping.keys() - keys  # the decoder keeps one of equal keys
        keys.update(new)
        return charge(mapping, (*mapping.values(), *new))

    try:
        _check_lengths(content, name)
        # Artifacts use neither extensions nor bytes; refusing them here keeps the decoder's rarer paths out of reach.
        plain = msgpack.unpackb(
            content,
            raw=False,
            strict_map_key=True,
            use_list=True,
            max_ext_len=0,
            max_bin_len=0,
            max_array_len=most_items,
            max_map_len=most_items,
            object_hook=charge_mapping,
            list_hook=lambda found: charge(found, found),
        )
        # Repeated keys, numbers in longer forms than they need and the like do not survive being written again.
        packer = msgpack.Packer(use_bin_type=True, autoreset=False, buf_size=len(content) + 1)
        packer.pack(plain)
        canonical = packer.getbuffer() == content
    except (msgpack.UnpackException, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ArtifactError(f"{name} is not valid msgpack: {str(error) or type(error).__name__}") from None
    if not canonical:
        raise ArtifactError(f"{name} is not encoded canonically (a repeated key, or a number longer than it needs)")
    return plain


_OWN_BYTES = frozenset((str, float, int))
"""Values that are objects of their own; lists and mappings are charged when they are decoded."""


def _check_lengths(content: memoryview, name: str) -> None:
    """Prove that every announced length is backed by bytes, by a pass that builds nothing.

    Without it nested arrays that each announce a million items would be allocated before the end of the data is noticed.
    """
    walker = msgpack.Unpacker(max_buffer_size=max(1, len(content)))
    walker.feed(content)
    walker.skip()
    if walker.tell() != len(content):
        raise ArtifactError(f"{name} holds {len(content) - walker.tell()} bytes after the end of its content")
