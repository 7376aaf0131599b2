"""The messages in a protobuf message. The schema says where they may be, so that a new place in it is found too."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_M = TypeVar("_M", bound=Message)


def messages(root: Message, kind: type[_M]) -> Iterator[_M]:
    """``root`` and the messages in it, at any depth, that are of the class ``kind``; ``Message`` for all."""
    waiting = [root]
    sought = None if kind is Message else kind.DESCRIPTOR.full_name
    while waiting:
        owner = waiting.pop()
        if isinstance(owner, kind):
            yield owner
        singles, lists = _fields(owner.DESCRIPTOR, sought)
        waiting += [getattr(owner, name) for name in singles if owner.HasField(name)]
        for name in lists:
            waiting += getattr(owner, name)


@cache
def _fields(descriptor: Descriptor, sought: str | None) -> tuple[list[str], list[str]]:
    """(fields with one message, fields with several messages) that may have a message ``sought`` in them."""
    singles: list[str] = []
    lists: list[str] = []
    for field in descriptor.fields:
        if field.message_type is not None and (sought is None or _leads_to(field.message_type, sought)):
            (lists if is_repeated(field) else singles).append(field.name)
    return singles, lists


def _leads_to(descriptor: Descriptor, sought: str) -> bool:
    """Whether a message of this kind is, or may hold, one of the name ``sought``."""
    seen: set[str] = set()
    waiting = [descriptor]
    while waiting:
        kind = waiting.pop()
        if kind.full_name == sought:
            return True
        if kind.full_name not in seen:
            seen.add(kind.full_name)
            waiting += [field.message_type for field in kind.fields if field.message_type is not None]
    return False


def is_repeated(field: FieldDescriptor) -> bool:
    # protobuf 6 deprecates label in favor of is_repeated.
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == FieldDescriptor.LABEL_REPEATED
