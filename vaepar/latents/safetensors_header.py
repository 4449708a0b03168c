"""The header of a safetensors file, checked completely before any library touches the file.

The format: 8 bytes of little-endian length n, n bytes of JSON, then the tensors' bytes without holes. The checks are
our own because the answer must be the same one-line error for every rank and every library version, and because a
hostile length must never become an allocation.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from vaepar.errors import InputError
from vaepar.text import listed, shape_text, shown

MAX_HEADER_BYTES = 100_000_000
"""The format's own bound."""

_MAX_TENSORS = 100_000

_DTYPE_BITS: Mapping[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}

# First bytes of what people rename or pick by mistake. Looked at only when the file cannot be safetensors, for a
# header length may spell any of them.
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "a PNG picture"),
    (0, b"\xff\xd8\xff", "a JPEG picture"),
    (0, b"GIF8", "a GIF picture"),
    (8, b"WEBP", "a WebP picture"),
    (0, b"BM", "a BMP picture"),
    (0, b"II*\x00", "a TIFF picture"),
    (0, b"MM\x00*", "a TIFF picture"),
    (4, b"ftyp", "an MP4 video or an AVIF picture"),
    (0, b"\x1aE\xdf\xa3", "a Matroska or WebM video"),
    (0, b"PK\x03\x04", "a zip archive (such as a .pt or .npz file); pickled tensors are never opened"),
    (0, b"\x80\x02", "a pickle; pickled tensors are never opened"),
    (0, b"\x80\x03", "a pickle; pickled tensors are never opened"),
    (0, b"\x80\x04", "a pickle; pickled tensors are never opened"),
    (0, b"\x80\x05", "a pickle; pickled tensors are never opened"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"\x89HDF\r\n", "an HDF5 file"),
    (0, b"\x1f\x8b", "a gzip file"),
    (0, b"(\xb5/\xfd", "a zstd file"),
    (0, b"GGUF", "a GGUF model"),
    (0, b"SQLite f", "an SQLite database"),
    (0, b"version https://git-lfs", "a Git LFS pointer, not the file itself (run: git lfs pull)"),
    (0, b"<", "a web page or an XML file"),
    (0, b"{", "a JSON file"),
)


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of the header: dtype in safetensors' spelling, shape, and the range of its bytes in the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class SafetensorsHeader:
    """A header that was checked against the size of its file."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    file_bytes: int
    digest: str


def refuse(path: Path, problem: str) -> NoReturn:
    """Raise :class:`InputError`, one line that begins with the file's name."""
    raise InputError(f"{shown(path)}: {problem}")


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """Read and check the header of a safetensors file; the tensors' bytes are not read.

    Raises:
        InputError: for whatever is wrong with the file, on one line that names it.
    """
    try:
        # Opening a pipe would wait for its writer, so the kind of the file is asked before it is opened.
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            refuse(path, "is a directory; a latent file is needed")
        if not stat.S_ISREG(mode):
            refuse(path, "is not a regular file; a latent file is needed")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw = _header_bytes(path, file, size)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InputError(f"{shown(path)}: cannot be read: {shown(reason)}") from None
    table = _parse(path, raw)
    metadata = _metadata(path, table)
    tensors = {name: _entry(path, name, value) for name, value in table.items()}
    _check_ranges(path, tensors, size - 8 - len(raw))
    return SafetensorsHeader(
        tensors=tensors, metadata=metadata, file_bytes=size, digest=hashlib.sha256(raw).hexdigest()
    )


def _header_bytes(path: Path, file: BinaryIO, size: int) -> bytes:
    if size == 0:
        refuse(path, "is empty (0 bytes); a safetensors file is needed")
    start = file.read(64)
    length = int.from_bytes(start[:8], "little")
    plausible = len(start) > 8 and start[8:9] == b"{" and 2 <= length <= MAX_HEADER_BYTES
    if not plausible:
        for offset, magic, name in _MAGIC:
            if start[offset : offset + len(magic)] == magic:
                refuse(path, f"is {name}; a safetensors file of latents is needed")
    if size < 8:
        refuse(path, f"is truncated: {size} bytes, and a safetensors header alone needs 8")
    if length > MAX_HEADER_BYTES:
        refuse(
            path, f"is not a safetensors file: a header of {length} bytes is claimed, {MAX_HEADER_BYTES} are allowed"
        )
    if length > size - 8:
        refuse(path, f"is truncated: a header of {length} bytes is claimed, {size - 8} bytes follow")
    if not plausible:
        refuse(path, "is not a safetensors file: the header does not begin with '{'")
    file.seek(8)
    raw = file.read(length)
    if len(raw) != length:
        refuse(path, f"is truncated: a header of {length} bytes is claimed, {len(raw)} could be read")
    return raw


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"the key '{shown(twice, 60)}' stands twice")
        return result

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        text = raw.decode("utf-8")
        table = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
        if b"\\u" in raw:
            # A lone surrogate is JSON to Python and to nobody else, and could not be printed.
            json.dumps(table, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        refuse(path, "has a broken header: it is nested too deeply")
    except ValueError as error:
        refuse(path, f"has a broken header: {shown(error)}")
    if not isinstance(table, dict):
        refuse(path, "has a broken header: it is not a JSON object")
    if len(table) > _MAX_TENSORS:
        refuse(path, f"names {len(table)} tensors; at most {_MAX_TENSORS} are allowed")
    return table


def _metadata(path: Path, table: dict[str, Any]) -> dict[str, str]:
    metadata = table.pop("__metadata__", None)
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        refuse(path, "has a broken header: __metadata__ is not a table of strings")
    return metadata


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _entry(path: Path, name: str, value: object) -> TensorEntry:
    label = f"tensor '{shown(name, 60)}'"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        refuse(path, f"has a broken header: {label} needs dtype, shape and data_offsets, no more and no less")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        refuse(path, f"has a broken header: {label} has the unknown dtype {shown(repr(dtype), 60)}")
    if not isinstance(shape, list) or len(shape) > 64 or not all(map(_is_size, shape)):
        refuse(path, f"has a broken header: {label} has a shape that is not a list of whole numbers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        refuse(path, f"has a broken header: {label} has data_offsets that are not two whole numbers")
    begin, end = offsets
    bits = _DTYPE_BITS[dtype]
    for extent in shape:
        bits *= extent
    if begin > end or bits % 8 or bits // 8 != end - begin:
        refuse(
            path,
            f"has a broken header: {label} of dtype {dtype} and shape {shape_text(shape)} does not fill"
            f" its {end - begin} bytes",
        )
    return TensorEntry(dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def _check_ranges(path: Path, tensors: Mapping[str, TensorEntry], data_bytes: int) -> None:
    if not tensors:
        refuse(path, "holds no tensor")
    reached = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != reached:
            kind = "overlaps the tensor before it" if entry.begin < reached else "leaves a hole before it"
            refuse(path, f"has a broken header: tensor '{shown(name, 60)}' {kind} (byte {entry.begin}, not {reached})")
        reached = entry.end
    if reached > data_bytes:
        refuse(path, f"is truncated: the tensors ({listed(tensors, 3)}) need {reached} bytes, {data_bytes} are there")
    if reached < data_bytes:
        refuse(path, f"has {data_bytes - reached} trailing bytes after its tensors; a whole safetensors file has none")
