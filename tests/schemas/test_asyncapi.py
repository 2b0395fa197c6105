"""The published description of the bus: fresh, whole, and true of the messages as they are."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from dynamix.schemas import asyncapi
from dynamix.schemas.codec import HEADER_BYTES
from dynamix.schemas.kinds import BY_NAME, KINDS
from dynamix.schemas.subjects import token_names

ROOT = Path(__file__).parents[2]
DOCUMENT: dict[str, Any] = json.loads((ROOT / "docs" / "asyncapi.json").read_text())
GOLDEN: dict[str, str] = json.loads((ROOT / "tests" / "data" / "golden_messages.json").read_text())
NAMES = [kind.name for kind in KINDS]

REFERENCE = {"type": "object", "properties": {"$ref": {"type": "string"}}, "required": ["$ref"], "maxProperties": 1}
SHAPE = {
    "description": "Of AsyncAPI 3.0 what we use; stricter than the specification, so that a misspelt key is found.",
    "type": "object",
    "properties": {
        "asyncapi": {"const": "3.0.0"},
        "info": {
            "properties": {
                "title": {"type": "string"},
                "version": {"type": "string"},
                "description": {"type": "string"},
                "license": {"required": ["name", "url"]},
            },
            "required": ["title", "version"],
            "additionalProperties": False,
        },
        "defaultContentType": {"type": "string"},
        "servers": {"additionalProperties": {"required": ["host", "protocol"]}},
        "channels": {
            "additionalProperties": {
                "properties": {
                    "address": {"type": "string"},
                    "messages": {"additionalProperties": REFERENCE, "minProperties": 1},
                    "title": {"type": "string"},
                    "description": {"type": "string"},
                    "parameters": {"additionalProperties": {"required": ["description"], "maxProperties": 1}},
                    "servers": {"items": REFERENCE},
                },
                "required": ["address", "messages"],
                "patternProperties": {"^x-": {}},
                "additionalProperties": False,
            }
        },
        "operations": {
            "additionalProperties": {
                "properties": {
                    "action": {"enum": ["send", "receive"]},
                    "channel": REFERENCE,
                    "messages": {"items": REFERENCE, "minItems": 1},
                    "tags": {"items": {"required": ["name"]}},
                },
                "required": ["action", "channel"],
                "additionalProperties": False,
            }
        },
        "components": {
            "properties": {
                "messages": {
                    "additionalProperties": {
                        "properties": {
                            "payload": REFERENCE,
                            "headers": {"required": ["type", "properties"]},
                            **{key: {"type": "string"} for key in ("name", "title", "summary", "contentType")},
                        },
                        "required": ["payload", "contentType"],
                        "patternProperties": {"^x-": {}},
                        "additionalProperties": False,
                    }
                },
                "schemas": {"additionalProperties": {"required": ["schemaFormat", "schema"], "maxProperties": 2}},
            },
            "additionalProperties": False,
        },
    },
    "required": ["asyncapi", "info", "channels", "operations", "components"],
    "additionalProperties": False,
}


def test_the_file_is_what_the_table_says() -> None:
    """When this fails: python -m dynamix.schemas --asyncapi > docs/asyncapi.json."""
    assert asyncapi.text() == (ROOT / "docs" / "asyncapi.json").read_text()


def test_the_command_prints_it_and_refuses_what_it_does_not_know() -> None:
    command = [sys.executable, "-m", "dynamix.schemas"]
    assert (
        subprocess.run([*command, "--asyncapi"], capture_output=True, text=True, check=True).stdout == asyncapi.text()
    )
    refused = subprocess.run([*command, "--openapi"], capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stderr) == (2, "usage: python -m dynamix.schemas [--asyncapi]\n")


def test_it_has_the_shape_of_asyncapi_3() -> None:
    jsonschema.Draft202012Validator(SHAPE).validate(DOCUMENT)


def test_every_reference_leads_somewhere() -> None:
    found = list(references(DOCUMENT))
    assert len(found) > 100
    for reference in found:
        target: Any = DOCUMENT
        for token in reference.removeprefix("#/").split("/"):
            target = target[token]
        assert target


def references(part: Any) -> Iterator[str]:
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        if key == "$ref":
            yield value
        elif isinstance(value, dict | list):
            yield from references(value)


def test_every_kind_has_its_channel_with_the_tokens_of_its_subject() -> None:
    assert set(DOCUMENT["channels"]) == set(NAMES)
    for kind in KINDS:
        channel = DOCUMENT["channels"][kind.name]
        assert re.findall(r"{(\w+)}", channel["address"]) == token_names(kind) == list(channel["parameters"])
        assert channel.get("x-jetstream", {}).get("stream", "core NATS") == kind.carrier


def on_the_wire(value: Any) -> Any:
    """A decoded message as JSON Schema knows it: bytes as text of as many characters."""
    if isinstance(value, bytes):
        return value.decode("latin1")
    if isinstance(value, list):
        return [on_the_wire(item) for item in value]
    return {key: on_the_wire(item) for key, item in value.items()} if isinstance(value, dict) else value


def validator(kind: str) -> jsonschema.Draft202012Validator:
    schema = DOCUMENT["components"]["schemas"][BY_NAME[kind].struct.__name__]["schema"]
    return jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]})


@pytest.mark.parametrize("kind", NAMES)
def test_the_golden_messages_are_what_it_describes(kind: str) -> None:
    golden = bytes.fromhex(GOLDEN[kind])
    message = on_the_wire(msgspec.msgpack.decode(golden[HEADER_BYTES:]))
    assert golden[3] == DOCUMENT["components"]["messages"][BY_NAME[kind].struct.__name__]["x-dynamix-kind"]
    assert list(validator(kind).iter_errors(message)) == []
    assert list(validator(kind).iter_errors(message[:1])) != []
    assert list(validator(kind).iter_errors([{}, *message[1:]])) != []


def test_fields_have_their_names_and_digests_their_length() -> None:
    action = DOCUMENT["components"]["schemas"]["Action"]["schema"]["prefixItems"]
    fields = BY_NAME["action"].struct.__struct_fields__
    assert [item["title"] for item in action] == list(fields)
    digest = action[fields.index("previous_hash")]
    assert (digest["format"], digest["maxLength"]) == ("binary", 32)
