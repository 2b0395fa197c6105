"""The AsyncAPI 3.0 document of the bus: `python -m dynamix.schemas --asyncapi > docs/asyncapi.json`.

Made from the table that the code itself reads, and from the Structs. Messages travel as arrays in field order
(`prefixItems`), in msgpack behind the codec's header; JSON Schema describes their content, a reader of ours enforces
more: see `codec`.
"""

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.inspect import BytesType, StructType, Type

from .codec import HEADER_BYTES, MAGIC, MAX_MESSAGE_BYTES, VERSION
from .kinds import KINDS, SERVICES, WATCHER, Kind
from .messages import Message
from .messages.fields import TOKEN_PATTERN
from .subjects import ROOT, template, token_names

ASYNCAPI_VERSION = "3.0.0"
CONTENT_TYPE = "application/x-msgpack"
SCHEMA_DIALECT = "application/schema+json;version=draft-2020-12"
"""JSON Schema 2020-12 must be named: AsyncAPI assumes draft 7, which has no `prefixItems`."""
REFERENCE = "#/components/schemas/{name}/schema"

_DESCRIPTION = f"""Generated from `dynamix.schemas`; do not edit.

A payload is {HEADER_BYTES} bytes of header and then msgpack. The header: the two bytes `{MAGIC.decode()}`, the codec's
version ({VERSION}), the kind (`x-dynamix-kind`). msgpack holds an array of the fields in order; those at its end that
have a default may be left out. At most {MAX_MESSAGE_BYTES >> 10} KiB in all; every float is finite. The identity in the
subject counts: a message that says another goes to `{ROOT}.dead`."""

_ENDING = re.compile(r"\\Z\Z")
_PATTERN = _ENDING.sub("$", TOKEN_PATTERN)
_OF_JOB = {
    "name": "Of the message's `job`, what precedes the last dash",
    "run": "Of the message's `job`, what follows the last dash, or `_`",
}
_SHOWN = ("max_age_s", "max_bytes", "max_messages_per_subject", "duplicate_window_s", "deny_delete", "discard")
_HEADERS = {
    "type": "object",
    "properties": {
        "Nats-Msg-Id": {
            "type": "string",
            "description": "Equal for equal content: within its window the stream keeps one of equal messages.",
        }
    },
}


def document() -> dict[str, Any]:
    """Build the AsyncAPI document from plain dicts, lists and numbers."""
    return {
        "asyncapi": ASYNCAPI_VERSION,
        "info": {
            "title": "DYNAMIX",
            "version": f"{VERSION}.0.0",
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": CONTENT_TYPE,
        "servers": {
            "nats": {"host": "127.0.0.1:4222", "protocol": "nats", "description": "JetStream; see DYNAMIX_NATS_URL"}
        },
        "channels": {kind.name: _channel(kind) for kind in KINDS},
        "operations": _operations(),
        "components": {"messages": {kind.struct.__name__: _message(kind) for kind in KINDS}, "schemas": _schemas()},
    }


def text() -> str:
    """The text of docs/asyncapi.json."""
    return msgspec.json.format(msgspec.json.encode(document()), indent=1).decode() + "\n"


def _channel(kind: Kind) -> dict[str, Any]:
    channel: dict[str, Any] = {
        "address": template(kind, "{{{}}}".format),
        "messages": {kind.struct.__name__: {"$ref": f"#/components/messages/{kind.struct.__name__}"}},
        "title": kind.meaning,
        "description": f"From {kind.sent_by} to {kind.read_by}; carried by {kind.carrier}.",
        "parameters": {
            token: {"description": _OF_JOB.get(token, f"The message's own `{token}`") + f"; matches {_PATTERN}"}
            for token in token_names(kind)
        },
        "servers": [{"$ref": "#/servers/nats"}],
    }
    if kind.name == "dead":
        channel["parameters"] = {
            "kind": {"description": "The kind of message that could not be used, or `unknown`."},
            "name": {"description": "The name of its job, or `unknown`."},
            "run": {"description": "The run of its job, or `_`."},
        }
    if kind.stream is not None:
        channel["x-jetstream"] = {"stream": kind.stream.name} | {name: getattr(kind.stream, name) for name in _SHOWN}
    return channel


def _operations() -> dict[str, Any]:
    sent = [("send", name, kind) for name in SERVICES for kind in KINDS if name in kind.senders]
    read = [("receive", name, kind) for name in SERVICES for kind in KINDS if name in kind.receivers]
    read += [("receive", WATCHER, kind) for kind in KINDS]
    return {
        f"{application}-{action}s-{kind.name}": {
            "action": action,
            "channel": {"$ref": f"#/channels/{kind.name}"},
            "messages": [{"$ref": f"#/channels/{kind.name}/messages/{kind.struct.__name__}"}],
            "tags": [{"name": application}],
        }
        for action, application, kind in sent + read
    }


def _message(kind: Kind) -> dict[str, Any]:
    name = kind.struct.__name__
    message: dict[str, Any] = {
        "name": kind.name,
        "title": name,
        "summary": kind.meaning,
        "contentType": CONTENT_TYPE,
        "payload": {"$ref": f"#/components/schemas/{name}"},
        "x-dynamix-kind": kind.code,
    }
    return message if kind.name == "live" else message | {"headers": _HEADERS}


def _schemas() -> dict[str, Any]:
    """A schema for each Struct that a message holds or is."""
    structs = [kind.struct for kind in KINDS]
    _, schemas = msgspec.json.schema_components(structs, ref_template=REFERENCE)
    for name, struct in _held(structs).items():
        for item, field in zip(schemas[name]["prefixItems"], struct.fields, strict=True):
            item |= {"title": field.name, **_as_in_msgpack(field.type)}
    return {name: {"schemaFormat": SCHEMA_DIALECT, "schema": _portable(schema)} for name, schema in schemas.items()}


def _held(structs: Iterable[type[Message]]) -> dict[str, StructType]:
    """Find these Structs and all that they contain, by name."""
    found: dict[str, StructType] = {}
    waiting: list[Any] = [msgspec.inspect.type_info(struct) for struct in structs]
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, StructType) and kind.cls.__name__ not in found:
            found[kind.cls.__name__] = kind
            waiting += [field.type for field in kind.fields]
        for inner in ("item_type", "types", "value_type"):
            held = getattr(kind, inner, ())
            waiting += held if isinstance(held, tuple) else [held]
    return found


def _as_in_msgpack(kind: Type) -> dict[str, Any]:
    """JSON has no bytes and msgspec describes base64; on the wire they are msgpack's own."""
    if not isinstance(kind, BytesType):
        return {}
    limit = {} if kind.max_length is None else {"maxLength": kind.max_length}
    return {"format": "binary", "contentEncoding": "binary", **limit}


def _portable(schema: Any) -> Any:
    """Regular expressions of JSON Schema are JavaScript's, where the end is `$`."""
    if isinstance(schema, dict):
        return {key: _ENDING.sub("$", value) if key == "pattern" else _portable(value) for key, value in schema.items()}
    return [_portable(item) for item in schema] if isinstance(schema, list) else schema
