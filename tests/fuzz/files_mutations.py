"""Mutations of bytes, JSON, protobuf messages and zip archives, each drawn from a ``random.Random``."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

INTEGERS = (0, 1, -1, 2, 3, 7, 16, 127, 128, 255, 256, 65535, 2**31 - 1, -(2**31), 2**32, 2**40, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-5, 1.0001, 3.4e38, 1e308, float("inf"), float("-inf"), float("nan"))
STRINGS = (
    "",
    "x",
    "y",
    "a" * 5000,
    "../outside.data",
    "/dev/zero",
    "/dev/stdin",
    ".",
    "..",
    "a/../../b",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "line\nbreak\r\tand tab",
    "[bold]markup[/bold]",
    "nul\x00byte",
    "\u202eright to left",
    "\ud7ff\ue000\U0001f600",
    "nnorm",
    "ai.onnx",
    "com.microsoft",
    "BatchNormalNorm",
    "LayerNormalNorm",
    "Identity",
    "{}",
    "[]",
    "-1",
    "999999999999999999999",
    "%s%n{0}",
    '"; DROP',
)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """``data`` with some bits, blocks or numbers changed, removed or repeated."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(changed)) if changed else 0
        size = min(rng.choice((1, 2, 4, 8, 64, 512)), max(1, len(changed) - at))
        kind = rng.randrange(8)
        if kind == 0 and changed:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at : at + size] = rng.randbytes(size)
        elif kind == 2:
            del changed[at : at + size]
        elif kind == 3:
            changed[at:at] = changed[at : at + size] * rng.choice((1, 2, 50))
        elif kind == 4:
            changed[at : at + size] = bytes(size)
        elif kind == 5:
            changed[at : at + 8] = struct.pack("<q", rng.choice(INTEGERS[:-4]))
        elif kind == 6:
            del changed[at:]
        else:
            other = rng.randrange(len(changed)) if changed else 0
            changed[at : at + size] = changed[other : other + size]
    return bytes(changed)


def mutate_json(value: Any, rng: random.Random) -> Any:
    """``value`` with one of its parts replaced, removed, renamed or repeated."""
    places = list(_places(value))
    container, key = rng.choice(places) if places else (None, None)
    if container is None:
        return _any_json(rng)
    kind = rng.randrange(6)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[rng.choice(STRINGS)] = container.pop(key)
    elif kind == 2 and isinstance(container, list):
        container.extend([container[key]] * rng.choice((1, 3, 1000)))
    elif kind == 3:
        other, other_key = rng.choice(places)
        container[key] = json.loads(json.dumps(other[other_key])) if _holds(other, other_key) else None
    else:
        container[key] = _any_json(rng)
    return value


def _holds(container: Any, key: Any) -> bool:
    return key in container if isinstance(container, dict) else key < len(container)


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from _places(item)


def _any_json(rng: random.Random) -> Any:
    deep: Any = None
    for _ in range(200):
        deep = [deep]
    choices = (None, True, [], {}, [[]], {"a": 1}, deep)
    return rng.choice((rng.choice(choices), rng.choice(INTEGERS), rng.choice(FLOATS), rng.choice(STRINGS)))


def mutate_json_text(data: bytes, rng: random.Random) -> bytes:
    """JSON mutated as a value, or as bytes if it is not JSON (any more)."""
    try:
        value = json.loads(data)
    except ValueError:
        return mutate_bytes(data, rng)
    if rng.random() < 0.15:
        return mutate_bytes(data, rng)
    for _ in range(rng.choice((1, 1, 2, 4))):
        value = mutate_json(value, rng)
    return json.dumps(value).encode()


def mutate_message(message: Message, rng: random.Random) -> None:
    """Changes one field of ``message``, or of a message within it."""
    owner = rng.choice(list(_messages(message)))
    fields = [field for field, _ in owner.ListFields()] if rng.random() < 0.8 else list(owner.DESCRIPTOR.fields)
    if not fields:
        return
    field = rng.choice(fields)
    if _is_map(field):
        owner.ClearField(field.name)
    elif _is_repeated(field):
        _mutate_repeated(owner, field, rng)
    elif rng.random() < 0.2:
        owner.ClearField(field.name)
    elif field.message_type is not None:
        others = [other for other in _messages(message) if other.DESCRIPTOR is field.message_type]
        if others:
            copy = type(others[0])()
            copy.CopyFrom(rng.choice(others))
            if copy.ByteSize() < 100_000:
                getattr(owner, field.name).CopyFrom(copy)
    else:
        setattr(owner, field.name, _scalar(field, getattr(owner, field.name), rng))


def _is_repeated(field: Any) -> bool:
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == Field.LABEL_REPEATED


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _mutate_repeated(owner: Message, field: Any, rng: random.Random) -> None:
    values = getattr(owner, field.name)
    kind = rng.randrange(6)
    if kind == 0 and len(values):
        del values[rng.randrange(len(values))]
    elif kind == 1 and len(values):
        del values[:]
    elif kind == 2 and len(values) > 1:
        order = list(range(len(values)))
        rng.shuffle(order)
        copies = list(values) if field.message_type is None else [_copy(value) for value in values]
        del values[:]
        values.extend(copies[index] for index in order)
    elif field.message_type is not None:
        if len(values) and values[0].ByteSize() < 100_000:
            values.extend([_copy(rng.choice(list(values)))])
        else:
            values.add()
    elif len(values) and kind < 5:
        index = rng.randrange(len(values))
        values[index] = _scalar(field, values[index], rng)
    else:
        values.extend([_scalar(field, values[0] if len(values) else None, rng)] * rng.choice((1, 1, 40)))


def _copy(message: Message) -> Message:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def _messages(message: Message) -> Any:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None and not _is_map(field):
            for item in value if _is_repeated(field) else [value]:
                yield from _messages(item)


def _scalar(field: Any, value: Any, rng: random.Random) -> Any:
    if field.type == Field.TYPE_STRING:
        if value and rng.random() < 0.3:
            at = rng.randrange(len(value))
            return value[:at] + rng.choice(STRINGS) + value[at + 1 :]
        return rng.choice(STRINGS)
    if field.type == Field.TYPE_BYTES:
        return mutate_bytes(bytes(value or b""), rng)
    if field.type in (Field.TYPE_FLOAT, Field.TYPE_DOUBLE):
        return rng.choice((rng.choice(FLOATS[:8]), (value or 0.0) * 1.01))
    if field.type == Field.TYPE_BOOL:
        return not value
    if field.type == Field.TYPE_ENUM:
        return rng.choice([number.number for number in field.enum_type.values])
    bits = 32 if field.type in (Field.TYPE_INT32, Field.TYPE_UINT32, Field.TYPE_SINT32) else 64
    fitting = [number for number in INTEGERS if -(2 ** (bits - 1)) <= number < 2 ** (bits - 1)]
    chosen = rng.choice((rng.choice(fitting), (value or 0) + rng.choice((-1, 1))))
    return min(
        max(chosen, 0 if field.type in (Field.TYPE_UINT32, Field.TYPE_UINT64) else -(2 ** (bits - 1))),
        2 ** (bits - 1) - 1,
    )


def mutate_zip(data: bytes, rng: random.Random, kept: tuple[str, ...] = ()) -> bytes:
    """A zip archive with an entry changed, dropped, renamed, repeated or blown up; or its own bytes mutated.

    With ``kept``, the archive stays one, and so do the entries whose names end with one of these.
    """
    if not kept and rng.random() < 0.3:
        return mutate_bytes(data, rng)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    index = rng.choice([i for i, (name, _) in enumerate(entries) if not (kept and name.endswith(kept))])
    name, contents = entries[index]
    kind = rng.randrange(8)
    compression = zipfile.ZIP_STORED
    if kind == 0:
        del entries[index]
    elif kind == 1:
        entries[index] = (rng.choice((*STRINGS[3:6], name + "x", "/" + name, name.upper())), contents)
    elif kind == 2:
        entries.append((name, mutate_bytes(contents, rng)))
    elif kind == 3:
        compression = zipfile.ZIP_DEFLATED
        entries[index] = (name, bytes(rng.choice((10**5, 3 * 10**7))))
    elif kind == 4:
        entries[index] = (name, b"")
    elif name.endswith("json") or contents[:1] in (b"{", b"["):
        entries[index] = (name, mutate_json_text(contents, rng))
    else:
        entries[index] = (name, mutate_bytes(contents, rng))
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as archive:
        for entry, contents in entries:
            archive.writestr(zipfile.ZipInfo(entry), contents, compression)
    return target.getvalue()


def mutate_safetensors(data: bytes, rng: random.Random) -> bytes:
    """The header's JSON mutated, its length kept true or not; or the bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    (length,) = struct.unpack("<Q", data[:8])
    header = mutate_json_text(data[8 : 8 + length], rng)
    stated = len(header) if rng.random() < 0.8 else abs(rng.choice(INTEGERS[:-1]))
    return struct.pack("<Q", stated) + header + data[8 + length :]
