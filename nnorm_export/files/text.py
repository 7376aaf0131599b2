"""The check that the text in a message of protobuf is UTF-8.

protobuf does not refuse other bytes in the messages of ONNX. It returns ``bytes`` where ``str`` is expected.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message


def find_undecoded(message: Message) -> tuple[str, bytes] | None:
    """Returns the name and the content of the first text field in ``message`` that is not UTF-8, or None."""
    waiting = [message]
    while waiting:
        owner = waiting.pop()
        texts, singles, lists = _fields(owner.DESCRIPTOR)
        for name, is_repeated in texts:
            value: Any = getattr(owner, name)
            for text in value if is_repeated else (value,):
                if type(text) is bytes:
                    return f"{owner.DESCRIPTOR.name}.{name}", text
        waiting += [getattr(owner, name) for name in singles if owner.HasField(name)]
        for name in lists:
            waiting += getattr(owner, name)
    return None


@cache
def _fields(descriptor: Descriptor) -> tuple[list[tuple[str, bool]], list[str], list[str]]:
    """(text fields as (name, is repeated), fields with one message, fields with several messages)."""
    texts: list[tuple[str, bool]] = []
    singles: list[str] = []
    lists: list[str] = []
    for field in descriptor.fields:
        is_repeated = _is_repeated(field)
        if field.type == FieldDescriptor.TYPE_STRING:
            texts.append((field.name, is_repeated))
        elif field.message_type is not None:
            (lists if is_repeated else singles).append(field.name)
    return texts, singles, lists


def _is_repeated(field: FieldDescriptor) -> bool:
    # protobuf 6 deprecates label in favor of is_repeated.
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == FieldDescriptor.LABEL_REPEATED
