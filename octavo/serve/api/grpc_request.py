"""Turns gRPC messages into requests. The fields of octavo.proto have the names of protocol.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from octavo.serve.api.api_errors import invalid_field
from octavo.serve.api.parse import Bytes, check_unknown
from octavo.serve.api.protocol import BatchGenerateRequest, GenerateRequest, RepetitionDetection
from octavo.serve.limits import Limits
from octavo.serve.proto import octavo_pb2 as pb

T = TypeVar("T", bound=msgspec.Struct)
M = TypeVar("M", bound=Message)
MESSAGES: dict[type[msgspec.Struct], type[Message]] = {
    GenerateRequest: pb.GenerateRequest,
    BatchGenerateRequest: pb.BatchGenerateRequest,
}


def read_message(data: Bytes, kind: type[T], limits: Limits) -> tuple[T, dict[str, Any]]:
    """Return the message as a `kind`, and its unknown fields by number."""
    message: Any = parse_message(data, MESSAGES[kind])
    unknown = {f"field-{field.field_number}": True for field in UnknownFieldSet(message)}
    check_unknown(unknown, limits)
    return kind(**fields(message)), unknown


def parse_message(data: Bytes, kind: type[M]) -> M:
    try:
        return kind.FromString(bytes(data))
    except DecodeError:
        raise invalid_field(
            None,
            f"the message is not a valid {kind.DESCRIPTOR.full_name}, or its text is not UTF-8",
        ) from None


def fields(message: pb.GenerateRequest | pb.BatchGenerateRequest) -> dict[str, Any]:
    """Return the fields that are set, with the names and types that a JSON request has."""
    fields_by_name = {field.name: value for field, value in message.ListFields()}
    if "structured_outputs" in fields_by_name:
        fields_by_name["structured_outputs"] = {
            field.name: plain(value) for field, value in message.structured_outputs.ListFields()
        }
    if "repetition_detection" in fields_by_name:
        parts = message.repetition_detection.ListFields()
        fields_by_name["repetition_detection"] = RepetitionDetection(
            **{field.name: value for field, value in parts}
        )
    if "logit_bias" in fields_by_name:
        fields_by_name["logit_bias"] = {
            str(token): bias for token, bias in message.logit_bias.items()
        }
    if message.early_stopping in ("true", "false"):
        fields_by_name["early_stopping"] = message.early_stopping == "true"
    return {name: plain(value) for name, value in fields_by_name.items()}


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
