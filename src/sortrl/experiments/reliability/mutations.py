"""Ways to damage a file, from blind bit flips to hostile edits that keep it well-formed. Each is a pure function."""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

from sortrl.experiments.reliability import hostile

Mutation = Callable[[bytes, Random], bytes]

HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2, 3.5, 10**9, 2**31, 2**40, 2**63, 10**400, 1e308, math.nan, math.inf, -math.inf),
    *("", "x", "../../../../etc/passwd", "/dev/zero", "\x1b[31m", "\ud800", "A" * 5000, "os:system-v0"),
    *(
        [],
        {},
        [[]],
        [1, [2]],
        [-1],
        [0],
        [2**40],
        [10**9] * 3,
        {"a": {}},
        [None] * 100,
        [1] * 5000,
        [[[1] * 9] * 9] * 9,
    ),
)
BYTES = (b"\x00", b"\xff", b"\x7f", b"\x80", b"{", b"[", b'"', b"\x00" * 8, b"\xff" * 8, b"\xff\xff\xff\x7f")


def known(kind: str, content: bytes = b"") -> list[bytes]:
    """The files of :mod:`~sortrl.experiments.reliability.hostile` of one kind, made once for each place where its traps leave their mark."""
    return _known(kind, content, hostile.Trap.path)


@cache
def _known(kind: str, content: bytes, _: str) -> list[bytes]:
    arguments = [_members(content)] if content else []
    return list(getattr(hostile, kind)(*arguments).values())


def truncate(content: bytes, rng: Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def flip_bits(content: bytes, rng: Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def overwrite(content: bytes, rng: Random) -> bytes:
    part = rng.choice(BYTES) if rng.random() < 0.7 else rng.randbytes(rng.randrange(1, 32))
    # The beginning tells readers what follows, so damage there goes furthest.
    at = rng.randrange(min(len(content), 64) if rng.random() < 0.5 else len(content))
    return content[:at] + part + content[at + len(part) :]


def rearrange(content: bytes, rng: Random) -> bytes:
    """Remove, repeat or insert a block."""
    begin, end = sorted((rng.randrange(len(content)), rng.randrange(len(content) + 1)))
    block = rng.choice((b"", content[begin:end] * 2, content[begin:end] + rng.randbytes(8)))
    return content[:begin] + block + content[end:]


def noise(content: bytes, rng: Random) -> bytes:
    return rng.randbytes(rng.randrange(200))


BLIND: dict[str, Mutation] = {
    "truncated": truncate,
    "bits flipped": flip_bits,
    "bytes overwritten": overwrite,
    "blocks rearranged": rearrange,
    "noise": noise,
}


def edit(value: Any, rng: Random, choices: tuple[Any, ...] = HOSTILE) -> Any:
    """A copy of a JSON value in which one place, anywhere, holds something hostile."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: edit(value[key], rng, choices)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], *([] if rng.random() < 0.1 else [edit(value[at], rng, choices)]), *value[at + 1 :]]
    return rng.choice(choices)


def edit_json(content: bytes, rng: Random) -> bytes:
    return json.dumps(edit(json.loads(content), rng)).encode()


def deep_json(content: bytes, rng: Random) -> bytes:
    """Nested, or of very many values: the whole document, or a value in it."""
    if rng.random() < 0.1:
        return rng.choice(known("documents"))
    depth = rng.choice((90, 101, 5000, 200_000))
    nested = rng.choice(
        ("[" * depth, "[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[[]" + ",[]" * depth + "]")
    )
    if rng.random() < 0.5:
        return nested.encode()
    return json.dumps(edit(json.loads(content), rng, ("\0nested",))).replace('"\\u0000nested"', nested).encode()


def later_version(content: bytes, rng: Random) -> bytes:
    """Formats and schemas of a version that does not exist yet."""
    text = content.replace(b"-1\\", b"-%d\\" % rng.randrange(2, 99)).replace(b'\\"format\\": 1', b'\\"format\\": 2')
    return text.replace(b'"schema": 1', b'"schema": 7').replace(b'-1"', b'-9"')


JSON: dict[str, Mutation] = {
    **BLIND,
    "hostile values": edit_json,
    "several hostile values": lambda content, rng: edit_json(edit_json(content, rng), rng),
    "nested too deeply": deep_json,
    "a later version": later_version,
}


def parse(content: bytes) -> tuple[dict[str, Any], dict[str, tuple[str, list[int], bytes]]]:
    """Metadata and tensors (type, shape, bytes) of a well-formed safetensors file."""
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    metadata = json.loads(header.pop("__metadata__", {}).get("sortrl", "{}"))
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = entry["dtype"], entry["shape"], data[begin:end]
    return metadata, tensors


def unparse(metadata: Any, tensors: dict[str, tuple[Any, Any, bytes]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"sortrl": json.dumps(metadata)}}
    at = 0
    for name, (kind, shape, data) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())


def edit_metadata(content: bytes, rng: Random) -> bytes:
    metadata, tensors = parse(content)
    return unparse(edit(metadata, rng), tensors)


def edit_header(content: bytes, rng: Random) -> bytes:
    """Types, shapes and offsets that do not fit the data, or a header length that does not fit the file."""
    size = int.from_bytes(content[:8], "little")
    if rng.random() < 0.2:
        return struct.pack("<Q", rng.choice((0, 1, size - 1, size + 1, 2**31, 2**40, 2**63, 2**64 - 1))) + content[8:]
    text = json.dumps(edit(json.loads(content[8 : 8 + size]), rng)).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def costly_header(content: bytes, rng: Random) -> bytes:
    """A header, or metadata in it, that is nested deeply or holds very many values."""
    if rng.random() < 0.1:
        return rng.choice(known("headers"))
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    if rng.random() < 0.5:
        metadata = header.get("__metadata__", {}).get("sortrl", "{}")
        header["__metadata__"] = {"sortrl": deep_json(metadata.encode(), rng).decode("utf-8", "replace")}
        text = json.dumps(header).encode()
    else:
        text = deep_json(content[8 : 8 + size], rng)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def reshape(content: bytes, rng: Random) -> bytes:
    """One tensor of another shape or type, with the bytes that belong to it: a well-formed file of the wrong contents."""
    metadata, tensors = parse(content)
    name = rng.choice(list(tensors))
    kind, shape, data = tensors[name]
    sizes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
    kind = rng.choice([kind, kind, *sizes])
    shapes: tuple[list[int], ...] = (
        [],
        [0],
        [1],
        [*shape, 1],
        shape[::-1],
        [*shape[:-1], (shape or [1])[-1] + 1],
        [2] * 6,
        [0, 2**62],
        [1] * 70,
    )
    shape = rng.choice(shapes)
    length = math.prod(shape) * sizes[kind]
    return unparse(
        metadata,
        tensors | {name: (kind, shape, (data * (length // max(1, len(data)) + 1))[:length].ljust(length, b"\0"))},
    )


def other_tensors(content: bytes, rng: Random) -> bytes:
    """Tensors missing, renamed or added."""
    metadata, tensors = parse(content)
    name = rng.choice(list(tensors))
    renamed = {(f"{n}.x" if n == name else n): tensor for n, tensor in tensors.items()}
    dropped = {n: tensor for n, tensor in tensors.items() if n != name}
    added = tensors | {rng.choice(("extra", "optimizer.99.step", "optimizer.x.y", "", "a" * 3000)): tensors[name]}
    return unparse(metadata, rng.choice((renamed, dropped, added)))


def not_numbers(content: bytes, rng: Random) -> bytes:
    """NaN, infinity or huge numbers among the weights."""
    metadata, tensors = parse(content)
    floats = [name for name, (kind, _, data) in tensors.items() if kind in ("F32", "F64") and data]
    name = rng.choice(floats)
    kind, shape, data = tensors[name]
    code, size = ("<f", 4) if kind == "F32" else ("<d", 8)
    number = struct.pack(code, rng.choice((math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-45)))
    at = rng.randrange(len(data) // size) * size
    return unparse(metadata, tensors | {name: (kind, shape, data[:at] + number + data[at + size :])})


TENSORS: dict[str, Mutation] = {
    **BLIND,
    "hostile metadata": edit_metadata,
    "hostile header": edit_header,
    "header nested too deeply": costly_header,
    "wrong shapes": reshape,
    "other tensors": other_tensors,
    "NaN and infinity": not_numbers,
    "a later version": later_version,
}


def _zipped(members: dict[str, bytes], packing: int = zipfile.ZIP_STORED) -> bytes:
    return hostile.zipped(members.items(), packing)


def _members(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def edit_member(content: bytes, rng: Random) -> bytes:
    """Damage inside a member, zipped again, so that checksums hold."""
    members = _members(content)
    name = rng.choice(("policy.pth", "policy.pth", "data"))
    mutation = edit_json if name == "data" and rng.random() < 0.7 else rng.choice(list(BLIND.values()))
    return _zipped(members | {name: mutation(members[name], rng)})


def edit_state(content: bytes, rng: Random) -> bytes:
    """Damage inside a member of what ``torch.save`` wrote, or code in place of its pickle."""
    inner = _members(content)
    name = rng.choice([name for name in inner if inner[name]])
    damaged = inner | {name: rng.choice(list(BLIND.values()))(inner[name], rng)}
    if rng.random() < 0.2:
        pickled = next(name for name in inner if name.endswith("data.pkl"))
        damaged = inner | {pickled: rng.choice(known("pickles"))}
    return _zipped(damaged)


def climb(content: bytes, rng: Random) -> bytes:
    """Members whose names lead out of the directory, or that are links."""
    members = {rng.choice(("../../", "/tmp/", "a/../../", "")) + name: data for name, data in _members(content).items()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = rng.choice((0o120777, 0o100644, 0o010644)) << 16
            archive.writestr(entry, data)
    return buffer.getvalue()


def bomb(content: bytes, rng: Random) -> bytes:
    """Members that unpack to far more than the file holds, or that declare to."""
    members = _members(content)
    if rng.random() < 0.5:
        packing = rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
        return _zipped({"data": b"{}", "policy.pth": bytes(2**20)}, packing)
    plain = bytearray(_zipped(members))
    at = plain.rfind(b"PK\x01\x02") + rng.choice((20, 24))  # compressed or plain size in the last directory entry
    plain[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 2**20, 2**31, 2**32 - 2, 2**32 - 1)))
    return bytes(plain)


def rename(content: bytes, rng: Random) -> bytes:
    """Names in another case, or the same member twice in two of them."""
    members = _members(content)
    name = rng.choice(list(members))
    other = "".join(rng.choice((letter, letter.swapcase())) for letter in name)
    rest = {one: data for one, data in members.items() if one != name or rng.random() < 0.5}
    pickled = rng.choice(known("pickles"))
    return _zipped({other: rng.choice((members[name], pickled)), **rest})


def join(content: bytes, rng: Random) -> bytes:
    """Two files in one: a zip, empty or not, a pickle, or other bytes before or behind it."""
    pickled = rng.choice(known("pickles"))
    other = rng.choice((hostile.EMPTY_ZIP, content, pickled, hostile.legacy(pickled), b"x", bytes(70_000)))
    return rng.choice((content + other, other + content, other + hostile.EMPTY_ZIP))


_ODD_SIZES = (0, 1, 2, 3, 8, 2**10, 2**14, 2**31, 2**40, 2**62, 2**63, 2**70, -1)


def views(content: bytes, rng: Random) -> bytes:
    """Tensors whose shapes, strides and offsets repeat numbers, leave their storage, or are no numbers at all."""

    def odd_tuple() -> bytes:
        if rng.random() < 0.2:
            return rng.choice((b"N", b"K\x01", hostile.shared_lists(), b"(U\x01xK\x02t", b"(\x88K\x02t", b"(](K\x01et"))
        return hostile.numbers(rng.choice(_ODD_SIZES) for _ in range(rng.choice((0, 1, 2, 2, 4, 40))))

    count = rng.choice((0, 1, 64, 2**14, 2**40))
    tensor = hostile.tensor(odd_tuple(), odd_tuple(), count, rng.choice(_ODD_SIZES))
    name = rng.choice(("q_net.q_net.0.weight", "model.0.weight", "x" * 10_000))
    return hostile.saved(hostile.state_of(tensor, name), bytes(4 * min(count, 2**14)))


def inner(mutation: Mutation) -> Mutation:
    """The same inside ``policy.pth``, which is a zip of its own."""

    def damaged(content: bytes, rng: Random) -> bytes:
        members = _members(content)
        return _zipped(members | {"policy.pth": mutation(members["policy.pth"], rng)})

    return damaged


def deep_data(content: bytes, rng: Random) -> bytes:
    members = _members(content)
    return _zipped(members | {"data": deep_json(members["data"], rng)}, zipfile.ZIP_DEFLATED)


ZIP: dict[str, Mutation] = {
    **BLIND,
    "damaged member": edit_member,
    "damaged inner member": inner(edit_state),
    "climbing names and links": climb,
    "zip bomb": bomb,
    "names in another case": rename,
    "inner names in another case": inner(rename),
    "two files in one": join,
    "two inner files in one": inner(join),
    "repeated or missing numbers": inner(views),
    "data nested too deeply": deep_data,
    "known attacks": lambda content, rng: rng.choice(known("agents", content)),
}
TORCH: dict[str, Mutation] = {
    **BLIND,
    "damaged member": edit_state,
    "climbing names and links": climb,
    "zip bomb": bomb,
    "names in another case": rename,
    "two files in one": join,
    "repeated or missing numbers": views,
    "known attacks": lambda content, rng: rng.choice(known("states")),
}


def trap(content: bytes, rng: Random) -> bytes:
    """Pickles that run code, take years to hash, or ask for terabytes."""
    return rng.choice(known("pickles"))


def insert_opcodes(content: bytes, rng: Random) -> bytes:
    part = rng.choice(
        (
            hostile.shared_lists(),
            b"(U\x01xK\x02t",
            hostile.numbers([2**40, 0]),
            b"2",
            b"0",
            b"r\xff\xff\xff\x7f",
            b"\x94",
            b"(",
            b"t",
            b"\x85",
            b"R",
            b"b",
            b"}",
            b"s",
            b"u",
            b".",
        )
    )
    at = rng.randrange(2, len(content))
    return content[:at] + part * rng.choice((1, 2, 50)) + content[at:]


PICKLE: dict[str, Mutation] = {**BLIND, "opcodes inserted": insert_opcodes, "trap": trap}
