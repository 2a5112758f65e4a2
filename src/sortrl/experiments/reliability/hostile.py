"""Small files that once took minutes or gigabytes, or would have: each must be refused in a moment. Nothing here is random."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Iterable
from typing import Any

STATE = b"\x80\x02ccollections\nOrderedDict\n)R"
_TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"


class Trap:
    """Makes a file when it is unpickled: if that file exists after a campaign, something was executed."""

    path = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def number(value: int) -> bytes:
    """The opcode of an integer."""
    return b"\x8a" + bytes([size := value.bit_length() // 8 + 1]) + value.to_bytes(size, "little", signed=True)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def numbers(values: Iterable[int]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(size: bytes, stride: bytes, count: int = 1, offset: int = 0) -> bytes:
    """The opcodes of a tensor on the storage named 0."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + number(count) + b"tQ"
    return _TENSOR + b"(" + storage + number(offset) + size + stride + b"\x89ccollections\nOrderedDict\n)RtR"


def state_of(tensors: bytes, name: str = "q_net.q_net.0.weight") -> bytes:
    return STATE + text(name) + tensors + b"s."


def slow_keys(levels: int = 60) -> bytes:
    """A dictionary whose key is a tuple of tuples of tuples: years to hash."""
    nested = b"".join(b"h%ch%c\x86q%c" % (level, level, level + 1) for level in range(levels))
    return b"\x80\x02K\x01\x85q\x00" + nested + b"}h" + bytes([levels]) + b"K\x01s."


def shared_lists(levels: int = 60) -> bytes:
    """A list of lists of lists, each twice: years to write as text."""
    return b"]q\x00" + b"".join(b"0](h%ch%ceq%c" % (level, level, level + 1) for level in range(levels))


def zipped(members: Iterable[tuple[str, bytes]], packing: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", packing) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, packing)  # without the time: the same bytes every time
    return buffer.getvalue()


EMPTY_ZIP = zipped([])


def understated(members: Iterable[tuple[str, bytes]], packing: int) -> bytes:
    """The last member declares 100 bytes and unpacks to all of them."""
    content = bytearray(zipped(members, packing))
    at = content.rfind(b"PK\x01\x02") + 24
    content[at : at + 4] = struct.pack("<I", 100)
    return bytes(content)


def saved(pickled: bytes, storage: bytes = bytes(4), name: str = "data.pkl") -> bytes:
    """As ``torch.save`` lays it out."""
    return zipped([(f"archive/{name}", pickled), ("archive/data/0", storage), ("archive/version", b"3\n")])


def legacy(pickled: bytes) -> bytes:
    """As ``torch.save`` laid it out before version 1.6, with a hostile pickle in place of the tensors."""
    head = (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}})
    return b"".join(pickle.dumps(one, 2) for one in head) + pickled + pickle.dumps(["0"], 2)


def states() -> dict[str, bytes]:
    """What ``torch.load`` would read."""
    one = numbers([1])
    code = pickle.dumps(Trap(), 2)
    whole = saved(state_of(tensor(one, one)))
    return {
        "upper-case data.pkl": saved(slow_keys(), name="DATA.PKL"),
        "two data.pkl": zipped([("a/data.pkl", code), ("a/DATA.pkl", slow_keys()), ("a/data/0", bytes(4))]),
        "data.pkl in two folders": zipped([("a/data.pkl", code), ("b/data.pkl", slow_keys()), ("a/data/0", bytes(4))]),
        "legacy with an empty zip behind it": legacy(slow_keys()) + EMPTY_ZIP,
        "legacy of code with an empty zip behind it": legacy(code) + EMPTY_ZIP,
        "zip with an empty zip behind it": whole + EMPTY_ZIP,
        "zip behind a pickle": code + whole,
        "strides of 0": saved(state_of(tensor(numbers([2**14, 2**14 - 1]), numbers([0, 0])))),
        "overlapping strides": saved(state_of(tensor(numbers([2**10] * 2), numbers([1, 0]), 2**10)), bytes(2**12)),
        "strides beyond the storage": saved(state_of(tensor(numbers([2]), numbers([2**30])))),
        "negative strides": saved(state_of(tensor(numbers([2]), numbers([-1])))),
        "an offset beyond the storage": saved(state_of(tensor(one, one, offset=2**33))),
        "bytes in a shape": saved(state_of(tensor(b"(U\x01x" + number(3 * 10**9) + b"t", numbers([0, 0])))),
        "a shape of shared lists": saved(state_of(tensor(shared_lists() + b"\x85", one))),
        "a storage of terabytes": saved(state_of(tensor(one, one, 2**38))),
        "keys that are tuples": saved(STATE + b"K\x01" + b"\x85" * 90_000 + tensor(one, one) + b"s."),
        "a name of megabytes": saved(state_of(tensor(one, one), "x" * 2**21)),
        "one tensor under many names": saved(
            STATE + b"(" + b"".join(text(f"{i}") + tensor(numbers([2**14]), one, 2**14) for i in range(300)) + b"u.",
            bytes(2**16),
        ),
        "many dictionaries of one list": saved(
            b"\x80\x02](" + b"".join(text(f"{i}") + b"K\x01\x86" for i in range(5000)) + b"eq\x00"
            b"](" + b"ccollections\nOrderedDict\nh\x00\x85R" * 5000 + b"e."
        ),
        "a packed storage": zipped([("a/data.pkl", code), ("a/data/0", bytes(2**24))], zipfile.ZIP_DEFLATED),
        "an understated pickle": understated([("a/data.pkl", bytes(2**24))], zipfile.ZIP_DEFLATED),
    }


def agents(inside: dict[str, bytes]) -> dict[str, bytes]:
    """Stable-Baselines3 zips around an intact agent's members (``policy.pth``, ``data``)."""
    policy, data = inside["policy.pth"], inside["data"]

    def written(field: str) -> bytes:
        return zipped([("policy.pth", policy), ("data", field.encode())], zipfile.ZIP_DEFLATED)

    large = 15 * 2**20
    found = {
        "nested data": written("[" * large),
        "many values": written("[" + "[]," * (large // 3) + "[]]"),
        "nested a little, many times": written("[" + ("[" * 90 + "]" * 90 + ",") * (large // 181) + "1]"),
        "an unfinished text": written('["' + '\\"' * (large // 2)),
        "a long name of an activation": written(json.dumps({"policy_kwargs": {"activation_fn": "a" * large}})),
        "data in another encoding": zipped([("policy.pth", policy), ("data", ("[" * 10**6).encode("utf-16"))]),
        "data beyond the limit": written(" " * 2**25),
        "upper-case names": zipped([("POLICY.PTH", policy), ("data", data)]),
        "a name twice": zipped([("policy.pth", policy), ("Policy.pth", policy), ("data", data)]),
        "an empty zip behind it": zipped([("policy.pth", policy), ("data", data)]) + EMPTY_ZIP,
        "bytes before it": b"x" + zipped([("policy.pth", policy), ("data", data)]),
        "many members": zipped((f"{number}", b"") for number in range(20_000)),
        "a bomb": zipped([("policy.pth", bytes(2**25))], zipfile.ZIP_DEFLATED),
        "an understated bzip2": understated([("data", data), ("policy.pth", bytes(2**25))], zipfile.ZIP_BZIP2),
        "an understated deflate": understated([("data", data), ("policy.pth", bytes(2**25))], zipfile.ZIP_DEFLATED),
    }
    return found | {name: zipped([("policy.pth", one), ("data", data)]) for name, one in states().items()}


def pickles() -> dict[str, bytes]:
    """In place of a VecNormalize: run code, take years to hash or to write as text, ask for terabytes."""
    shape = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
    plain = b"cnumpy\ndtype\n" + text("f8") + b"K\x00K\x01\x87R"

    def statistics(array: bytes) -> bytes:
        """An object with ``obs_rms.mean`` and ``obs_rms.var``."""
        rms = b"cgone\nRMS\n)\x81}(" + text("mean") + array + text("var") + array + b"ub"
        return b"\x80\x03cgone\nStatistics\n)\x81}" + text("obs_rms") + rms + b"sb."

    def array(kind: bytes, size: bytes, content: bytes) -> bytes:
        return statistics(shape + b"(K\x01" + size + kind + b"\x89" + content + b"tb")

    eight = b"C\x08" + bytes(8)
    return {
        "code": pickle.dumps(Trap(), 2),
        "code in a dictionary": pickle.dumps({"a": Trap()}, 4),
        "nested tuples": slow_keys(),
        "deep tuples": b"\x80\x02}K\x01" + b"\x85" * 90_000 + b"K\x01s.",
        "tuples as deep as allowed": b"\x80\x02}K\x01" + b"\x85" * 20_000 + b"K\x01s.",
        "a memo number": b"\x80\x02K\x01r\xff\xff\xff\x7f.",
        "a length": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
        "a frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"K\x01.",
        "an array of terabytes": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n\x8a\x06\x00\x00\x00\x00"
        b"\x00\x01\x85c_codecs\nencode\n\x87R.",
        "a bytearray of terabytes": b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.",
        "ndarray itself": b"\x80\x02cnumpy\nndarray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85\x85R.",
        "a type of shared lists": array(b"cnumpy\ndtype\n" + shared_lists() + b"\x85R", numbers([1]), eight),
        "bytes in a shape": array(plain, b"C\x01x" + number(3 * 10**9) + b"\x86", eight),
        "a shape of shared lists": array(plain, shared_lists(), eight),
        "a shape of huge numbers": array(plain, numbers([2**60] * 2 + [0]), b"C\x00"),
        "contents of shared lists": array(plain, numbers([1]), shared_lists()),
        "a clip of shared lists": b"\x80\x03cgone\nA\n)\x81}("
        + text("clip_obs")
        + shared_lists()
        + text("obs_rms")
        + b"Nub.",
        "a clip of a thousand digits": b"\x80\x03cgone\nA\n)\x81}"
        + text("clip_obs")
        + b"\x8b"
        + struct.pack("<i", 9000)
        + b"\x7f" * 9000
        + b"sb.",
        "many classes": b"\x80\x02](" + b"".join(b"cgone\nN%d\n" % name for name in range(90_000)) + b"e.",
        "one text encoded often": b"\x80\x02"
        + text("x" * 2**20)
        + b"q\x00]("
        + b"c_codecs\nencode\nh\x00\x85R" * 5000
        + b"e.",
        "one state for many objects": b"\x80\x02}("
        + b"".join(text(f"{name}") + b"K\x01" for name in range(10_000))
        + b"uq\x00]("
        + b"cgone\nA\n)\x81h\x00b" * 10_000
        + b"e.",
        "one dictionary of arguments for many": b"\x80\x04}("
        + b"".join(text(f"{name}") + b"K\x01" for name in range(10_000))
        + b"uq\x00]("
        + b"cgone\nA\n)h\x00\x92" * 10_000
        + b"e.",
        "attributes of a function": b"\x80\x02c_codecs\nencode\nN}" + text("__defaults__") + b"Ns\x86b.",
    }


def headers() -> dict[str, bytes]:
    """Safetensors files whose header is what costs."""

    def file(header: str) -> bytes:
        return len(header.encode()).to_bytes(8, "little") + header.encode()

    empty = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    metadata = json.dumps({"__metadata__": {"sortrl": "[" * 10**6}})
    values = json.dumps({"__metadata__": {"sortrl": "[" + "[]," * 10**6 + "1]"}})
    return {
        "nested header": file("[" * 10**6),
        "nested metadata": file(metadata),
        "metadata of many values": file(values),
        "many empty tensors": file("{" + ",".join(empty % number for number in range(50_000)) + "}"),
        "a header of many values": file("[" + "0," * 2**21 + "0]"),
    }


def documents() -> dict[str, bytes]:
    """JSON."""
    return {
        "nested": b"[" * 10**6,
        "nested objects": b'{"a":' * 10**6,
        "many values": b"[" + b"{}," * (5 * 2**20) + b"1]",
        "many short lists": b"[" + b"[[[[]]]]," * 2**20 + b"1]",
        "an unfinished text": b'["' + b'\\"' * 2**22,
        "another encoding": ("[" * 10**6).encode("utf-16"),
        "empty texts": b"[" + b'"",' * (5 * 2**20) + b"1]",
        "texts of backslashes": b'["' + b"\\" * (2**23) + b"[" * 2**20 + b'"]',
        "wide characters": b'["' + "\U0001f600".encode() * 2**21 + b'"',
        "long numbers": b"[" + (b"9" * 4000 + b",") * 2000 + b"1]",
    }
