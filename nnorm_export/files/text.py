"""The check that the text in a message of protobuf is UTF-8.

protobuf does not refuse other bytes in the messages of ONNX. It returns ``bytes`` where ``str`` is expected.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from nnorm_export.files.messages import is_repeated, messages


def find_undecoded(message: Message) -> tuple[str, bytes] | None:
    """Returns the name and the content of the first text field in ``message`` that is not UTF-8, or None."""
    for owner in messages(message, Message):
        for name, has_several in _texts(owner.DESCRIPTOR):
            value: Any = getattr(owner, name)
            for text in value if has_several else (value,):
                if type(text) is bytes:
                    return f"{owner.DESCRIPTOR.name}.{name}", text
    return None


@cache
def _texts(descriptor: Descriptor) -> list[tuple[str, bool]]:
    """The text fields, as (name, is repeated)."""
    return [
        (field.name, is_repeated(field)) for field in descriptor.fields if field.type == FieldDescriptor.TYPE_STRING
    ]
