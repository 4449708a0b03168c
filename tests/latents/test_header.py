"""Whatever the file holds, the answer is a header or one line that names the file."""

from __future__ import annotations

import io
import json
import os
import random
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.latents.files import KL, WAN, assemble, entry, noise, resolved, save, save_comfyui
from vaepar.errors import AmbiguousInputError, InputError
from vaepar.latents import read_header, read_latent

F32 = entry("F32", [1, 4, 2, 2], 0, 64)
BODY = bytes(64)
GOOD = assemble({"latents": F32}, BODY)


def picture(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, kind)
    return buffer.getvalue()


def archive() -> bytes:
    buffer = io.BytesIO()
    torch.save({"latents": torch.zeros(1, 4, 2, 2)}, buffer)
    assert zipfile.is_zipfile(buffer)
    return buffer.getvalue()


def two(first: Any, second: Any) -> bytes:
    return assemble({"latents": first, "more": second}, BODY + BODY)


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "is empty"),
    "shorter than a length": (b"\x10\0\0", "is truncated"),
    "header beyond the file": (assemble({"latents": F32}, length=5000), "is truncated"),
    "header cut": (GOOD[:40], "is truncated"),
    "body cut": (GOOD[:-1], "is truncated"),
    "no body": (GOOD[:-64], "is truncated"),
    "header beyond the format's bound": (assemble(b"{}", b"", length=100_000_001), "100000000 are allowed"),
    "header of 2**63 bytes": (assemble(b"{}", b"", length=2**63), "100000000 are allowed"),
    "header of no bytes": (assemble(b"", bytes(100)), "does not begin with '{'"),
    "zeros": (bytes(1000), "does not begin with '{'"),
    "not UTF-8": (assemble(b'{"\xff\xfe": 1}'), "broken header"),
    "not JSON": (assemble(b"{latents}"), "broken header"),
    "JSON cut": (assemble(b'{"latents": {'), "broken header"),
    "nested too deeply": (assemble(b'{"a":' + b"[" * 100_000), "nested too deeply"),
    "NaN in the JSON": (assemble(b'{"a": NaN}'), "broken header"),
    "a number of 5000 digits": (assemble(b'{"a": ' + b"9" * 5000 + b"}"), "broken header"),
    "key twice": (
        assemble(b'{"latents":' + json.dumps(F32).encode() + b',"latents":' + json.dumps(F32).encode() + b"}", BODY),
        "stands twice",
    ),
    "field twice": (
        assemble(b'{"latents":{"dtype":"F32","dtype":"F32","shape":[1,4,2,2],"data_offsets":[0,64]}}', BODY),
        "stands twice",
    ),
    "lone surrogate": (assemble(b'{"\\ud800": 1}'), "broken header"),
    "no tensor": (assemble({}), "holds no tensor"),
    "metadata only": (assemble({"__metadata__": {"a": "b"}}), "holds no tensor"),
    "metadata that is no table": (assemble({"__metadata__": [], "latents": F32}, BODY), "table of strings"),
    "metadata with a number": (assemble({"__metadata__": {"a": 1}, "latents": F32}, BODY), "table of strings"),
    "entry that is no table": (assemble({"latents": 7}), "needs dtype, shape and data_offsets"),
    "entry without shape": (assemble({"latents": {"dtype": "F32", "data_offsets": [0, 0]}}), "needs dtype, shape"),
    "unknown dtype": (assemble({"latents": entry("F31", [1, 4, 2, 2], 0, 64)}, BODY), "unknown dtype"),
    "dtype that is no name": (assemble({"latents": {**F32, "dtype": ["F32"]}}, BODY), "unknown dtype"),
    "negative axis": (assemble({"latents": entry("F32", [-1, 4, 2, 2], 0, 64)}, BODY), "whole numbers"),
    "fractional axis": (assemble({"latents": entry("F32", [1.0, 4, 2, 2], 0, 64)}, BODY), "whole numbers"),
    "boolean axis": (assemble({"latents": entry("F32", [True, 4, 2, 2], 0, 64)}, BODY), "whole numbers"),
    "enormous axes": (assemble({"latents": entry("F32", [2**62] * 60, 0, 64)}, BODY), "does not fill"),
    "offsets reversed": (assemble({"latents": entry("F32", [1, 4, 2, 2], 64, 0)}, BODY), "does not fill"),
    "offsets too short": (assemble({"latents": entry("F32", [1, 4, 2, 2], 0, 60)}, BODY), "does not fill"),
    "one offset": (assemble({"latents": {**F32, "data_offsets": [0]}}, BODY), "two whole numbers"),
    "offsets beyond the file": (assemble({"latents": entry("F32", [1, 4, 2, 3], 0, 96)}, BODY), "is truncated"),
    "hole at the start": (assemble({"latents": entry("F32", [1, 4, 2, 2], 8, 72)}, bytes(72)), "leaves a hole"),
    "hole in the middle": (two(F32, entry("F32", [15], 68, 128)), "leaves a hole"),
    "overlap": (two(F32, entry("F32", [17], 60, 128)), "overlaps"),
    "16 trailing bytes": (GOOD + bytes(16), "16 trailing bytes"),
    "no latent": (assemble({"image": F32}, BODY), "found image; a latent stands under latents, latent, samples"),
    "a model": (assemble({"decoder.conv_in.weight": F32}, BODY), "holds model weights"),
    "int32": (assemble({"latents": entry("I32", [1, 4, 2, 2], 0, 64)}, BODY), "has dtype I32"),
    "bool": (assemble({"latents": entry("BOOL", [1, 4, 4, 4], 0, 64)}, BODY), "has dtype BOOL"),
    "float8": (assemble({"latents": entry("F8_E4M3", [1, 4, 4, 4], 0, 64)}, BODY), "has dtype F8_E4M3"),
    "float8, the other": (assemble({"latents": entry("F8_E5M2", [1, 4, 4, 4], 0, 64)}, BODY), "has dtype F8_E5M2"),
    "complex": (assemble({"latents": entry("C64", [1, 4, 2, 1], 0, 64)}, BODY), "has dtype C64"),
    "empty axis": (assemble({"latents": entry("F32", [1, 4, 0, 2], 0, 0)}), "with an empty axis"),
    "no axes": (assemble({"latents": entry("F32", [], 0, 4)}, bytes(4)), "has 0 axes"),
    "two axes": (assemble({"latents": entry("F32", [4, 4], 0, 64)}, BODY), "has 2 axes"),
    "six axes": (assemble({"latents": entry("F32", [1, 1, 1, 4, 2, 2], 0, 64)}, BODY), "has 6 axes"),
    "PNG": (picture("PNG"), "is a PNG picture"),
    "JPEG": (picture("JPEG"), "is a JPEG picture"),
    "WebP": (picture("WEBP"), "is a WebP picture"),
    "GIF": (picture("GIF"), "is a GIF picture"),
    "a .pt file": (archive(), "is a zip archive"),
    "a pickle": (b"\x80\x04\x95" + bytes(100), "is a pickle"),
    "an MP4": (b"\0\0\0\x20ftypisom" + bytes(100), "is an MP4 video"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "text": (b"hello, I am a text, and of some length", "is not a safetensors file"),
    "JSON": (b'{"latents": []}', "is a JSON file"),
    "a web page": (b"<!DOCTYPE html><html></html>", "is a web page"),
}


def message(path: Path) -> str:
    """The refusal of ``read_header``, checked to be one printable line that names the file."""
    with pytest.raises(InputError) as caught:
        read_header(path)
    assert type(caught.value) in (InputError, AmbiguousInputError)
    text = str(caught.value)
    assert text.isprintable()
    assert path.name in text or len(path.name) > 100
    return text


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_on_one_line(tmp_path: Path, name: str) -> None:
    data, part = BROKEN[name]
    path = tmp_path / "broken.safetensors"
    path.write_bytes(data)
    assert part in message(path)


def test_the_good_file_that_the_broken_ones_are_made_from_is_read(tmp_path: Path) -> None:
    path = tmp_path / "good.safetensors"
    path.write_bytes(GOOD)
    header = read_header(path)
    assert (header.key, header.shape, header.dtype, header.producer) == ("latents", (1, 4, 2, 2), "F32", "plain")
    assert header.file_bytes == len(GOOD)
    facts = resolved(path, KL, state="raw")
    assert torch.equal(read_latent(facts), torch.zeros(1, 4, 2, 2))


def test_a_header_length_that_spells_a_pickle_is_still_a_safetensors_file(tmp_path: Path) -> None:
    """640 is 80 02 in little-endian, the first bytes of a pickle."""
    raw = json.dumps({"latents": F32}).encode().ljust(640)
    path = tmp_path / "x.safetensors"
    path.write_bytes(assemble(raw, BODY))
    assert path.read_bytes()[:2] == b"\x80\x02"
    assert read_header(path).shape == (1, 4, 2, 2)


def test_things_that_are_no_files(tmp_path: Path) -> None:
    folder = tmp_path / "folder.safetensors"
    folder.mkdir()
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    dangling = tmp_path / "link.safetensors"
    dangling.symlink_to(tmp_path / "nowhere")
    assert "is a directory" in message(folder)
    assert "not a regular file" in message(pipe)
    assert "No such file" in message(dangling)
    assert "No such file" in message(tmp_path / "absent.safetensors")
    assert "Not a directory" in message(save(tmp_path / "f", noise(1, 4, 2, 2)) / "x")
    assert "File name too long" in message(tmp_path / ("x" * 300))
    with pytest.raises(InputError, match="cannot be read"):
        read_header("nul\0byte")


def test_a_file_without_permission(tmp_path: Path, as_nobody: Callable[[], None]) -> None:
    path = save(tmp_path / "secret.safetensors", noise(1, 4, 2, 2))
    path.chmod(0)
    as_nobody()
    assert "Permission denied" in message(path)


@pytest.fixture
def as_nobody() -> Iterator[Callable[[], None]]:
    """Root reads everything: take another user's rights for the rest of the test."""
    old = os.geteuid()

    def drop() -> None:
        if old == 0:
            os.seteuid(65534)

    yield drop
    os.seteuid(old)


@pytest.mark.parametrize("name", ["with space [16,64].safetensors", "größe 画像.latent", "-rf.safetensors", "%s{0}.x"])
def test_names_with_spaces_and_unicode_are_only_names(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name, noise(1, 4, 2, 2))
    assert torch.equal(read_latent(resolved(path, KL, state="raw")), noise(1, 4, 2, 2))


def test_escapes_in_names_keys_and_metadata_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "red\x1b[31m\nsecond line.safetensors"
    path.write_bytes(assemble({"key\x1b]0;title\x07\n": F32}, BODY))
    with pytest.raises(InputError) as caught:
        read_header(path)
    assert str(caught.value).isprintable()
    assert "\\x1b" in str(caught.value)
    undecodable = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.safetensors"))
    with pytest.raises(InputError) as caught:
        read_header(undecodable)
    str(caught.value).encode("utf-8")


def test_a_second_latent_in_the_file_is_asked_about(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(assemble({"latents": F32, "samples": entry("F32", [16], 64, 128)}, BODY + BODY))
    with pytest.raises(AmbiguousInputError, match="holds latents, samples; one latent tensor"):
        read_header(path)


def test_producers_are_known_by_their_keys(tmp_path: Path) -> None:
    x = noise(1, 4, 2, 2)
    assert read_header(save_comfyui(tmp_path / "a.latent", x)).producer == "comfyui"
    assert read_header(save_comfyui(tmp_path / "b.latent", x, version=False)).producer == "comfyui"
    assert read_header(save(tmp_path / "c", x[0], key="latent")).producer == "musubi"
    assert read_header(save(tmp_path / "d", x, key="samples")).producer == "plain"
    assert read_header(save(tmp_path / "e", x[None], key="latent")).producer == "plain"
    assert read_header(save(tmp_path / "f", x, **{"vaepar.format": "1"})).producer == "vaepar"


def test_the_digest_is_the_headers(tmp_path: Path) -> None:
    one = read_header(save(tmp_path / "one", noise(1, 4, 2, 2, seed=1)))
    two_ = read_header(save(tmp_path / "two", noise(1, 4, 2, 2, seed=2)))
    other = read_header(save(tmp_path / "other", noise(1, 4, 2, 2), note="x"))
    assert one.header_digest == two_.header_digest != other.header_digest
    assert len(one.header_digest) == 64


def test_a_sparse_giant_is_not_read(tmp_path: Path) -> None:
    """The claimed header of 99 MB is there, as a hole of zeros: refused by its first byte."""
    path = tmp_path / "giant.safetensors"
    with path.open("wb") as file:
        file.write((99_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)
    assert peak_bytes(lambda: message(path)) < 1_000_000


def peak_bytes(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --- fuzz -----------------------------------------------------------------------------------------------------------

SEEDS = 1200
_SPLICES = (b'"', b"{", b"}", b"[", b"]", b",", b":", b"-1", b"9" * 30, b"\\ud800", b"\\n", b"null", b"1e999", b"\0")


def mutate(data: bytes, draw: random.Random) -> bytes:
    """One to three small wounds, most of them in the header."""
    wounded = bytearray(data)
    end = 8 + int.from_bytes(data[:8], "little")
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(min(end, len(wounded)) or 1) if draw.random() < 0.8 else draw.randrange(len(wounded) or 1)
        kind = draw.randrange(6)
        if kind == 0 and wounded:
            wounded[at % len(wounded)] = draw.randrange(256)
        elif kind == 1:
            del wounded[at : at + draw.randint(1, 9)]
        elif kind == 2:
            wounded[at:at] = draw.choice(_SPLICES)
        elif kind == 3:
            del wounded[at:]
        elif kind == 4:
            wounded[at:at] = wounded[max(0, at - 20) : at]
        else:
            wounded[:8] = draw.choice((draw.randrange(2**64), draw.randrange(4096))).to_bytes(8, "little")
        if draw.random() < 0.5 and len(wounded) > 8 and kind in (1, 2, 4):
            grown = end - 8 + len(wounded) - len(data)  # keep the length true, so that the JSON itself is met
            wounded[:8] = max(grown, 0).to_bytes(8, "little")
    return bytes(wounded)


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    """Every mutation ends in a tensor or in an InputError of one line; nothing else, and no allocation to speak of."""
    seeds = [
        save(tmp_path / "a", noise(1, 16, 2, 2, 2), height="16", width="16", num_frames="5").read_bytes(),
        save_comfyui(tmp_path / "b", noise(1, 16, 2, 2, 2), prompt='{"1": {}}').read_bytes(),
        save(tmp_path / "c", noise(16, 2, 2, 2), key="latent", seeds="1", video_length="5").read_bytes(),
    ]
    path = tmp_path / "wounded.safetensors"
    refusals: list[InputError] = []

    def try_all() -> None:
        for seed in range(SEEDS):
            draw = random.Random(seed)
            path.write_bytes(mutate(draw.choice(seeds), draw))
            try:
                read_latent(resolved(path, WAN, state="norm"))
            except InputError as error:
                refusals.append(error.with_traceback(None))

    read_latent(resolved(save(tmp_path / "warm", noise(1, 16, 1, 2, 2)), WAN, state="norm"))  # imports are not counted
    assert peak_bytes(try_all) < 4_000_000
    for error in refusals:
        assert type(error) in (InputError, AmbiguousInputError)
        assert str(error).isprintable()
        assert "wounded.safetensors" in str(error)
    assert SEEDS // 2 < len(refusals) < SEEDS - SEEDS // 50  # some wounds do not matter, most do
