"""Fifty JSON schemas of the kinds that are found in JSONSchemaBench: function calls, configurations, records, unions,
references, patterns and numbers within bounds. Texts and lists are bounded, so that small models come to an end."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def record(_required: list[str] | None = None, **properties: Any) -> Schema:
    """An object with these properties, all required unless some are named."""
    required = list(properties) if _required is None else _required
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def text(most: int = 6, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def number(low: int, high: int, kind: str = "integer") -> Schema:
    return {"type": kind, "minimum": low, "maximum": high}


def some(item: Any, most: int = 3, least: int = 0) -> Schema:
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


FLAG: Schema = {"type": "boolean"}
NOTHING: Schema = {"type": "null"}
POINT = record(x=number(-9, 9), y=number(-9, 9))
SHORT = number(0, 99)

SCHEMAS: dict[str, Schema] = {
    "an integer": number(0, 500),
    "a flag": FLAG,
    "nothing": NOTHING,
    "a constant": {"const": {"version": 2}},
    "one of some words": one_of("red", "green", "blue"),
    "values of several kinds": one_of(1, "one", None, True),
    "a short text": text(8),
    "a text of some length": text(8, minLength=4),
    "a number with a fraction": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    "a multiple": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 7},
    "bounds that are excluded": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "a negative number": number(-20, -10),
    "a postal code": {"type": "string", "pattern": "^[0-9]{5}$"},
    "a plate": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
    "a version": {"type": "string", "pattern": "^v[0-9]\\.[0-9]{1,2}\\.[0-9]$"},
    "a date": {"type": "string", "format": "date"},
    "a time stamp": {"type": "string", "format": "date-time", "maxLength": 32},
    "an address of four numbers": {"type": "string", "format": "ipv4"},
    "an identifier": {"type": "string", "format": "uuid"},
    "a list of numbers": some(SHORT, 4, 2),
    "a list of words": some(one_of("a", "b", "c"), 5, 1),
    "a list of flags": some(FLAG, 3, 3),
    "a pair": {"type": "array", "prefixItems": [SHORT, FLAG], "items": False, "minItems": 2},
    "a matrix": some(some(number(0, 9), 2, 2), 2, 2),
    "an empty object": record(),
    "a point": POINT,
    "a person": record(name=text(), age=number(0, 120), member=FLAG),
    "some of the properties": record(["id"], id=SHORT, note=text(), flag=FLAG),
    "an object in an object": record(place=record(city=text(), position=POINT)),
    "a list of points": some(POINT, 2, 1),
    "a call of a function": record(name={"const": "add"}, arguments=record(a=SHORT, b=SHORT)),
    "one of two calls": {
        "anyOf": [
            record(name={"const": "add"}, arguments=record(a=SHORT, b=SHORT)),
            record(name={"const": "say"}, arguments=record(text=text())),
        ]
    },
    "a number or nothing": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    "one of several types": {"anyOf": [SHORT, text(), some(FLAG, 2)]},
    "a shape by its kind": {
        "oneOf": [
            record(kind={"const": "circle"}, radius=SHORT),
            record(kind={"const": "box"}, width=SHORT, height=SHORT),
        ]
    },
    "both of two parts": {"allOf": [{"type": "integer", "minimum": 4}, {"maximum": 8}]},
    "a reference": {
        "$defs": {"point": POINT},
        **record(begin={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "a tree of two levels": {
        "$defs": {"leaf": record(value=number(0, 9))},
        **record(value=number(0, 9), children=some({"$ref": "#/$defs/leaf"}, 2)),
    },
    "a list that refers to itself": {
        "$defs": {"node": record(value=number(0, 9), next={"anyOf": [NOTHING, {"$ref": "#/$defs/node"}]})},
        "$ref": "#/$defs/node",
    },
    "settings": record(
        log=one_of("debug", "info", "error"), workers=number(1, 64), cache=record(size=number(0, 4096), on=FLAG)
    ),
    "an order": record(
        id={"type": "string", "pattern": "^[0-9]{4}$"}, items=some(record(sku=text(4), n=number(1, 9)), 2, 1)
    ),
    "a measurement": record(
        unit=one_of("m", "kg", "s"), value={"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.5}
    ),
    "an answer with steps": record(steps=some(text(10), 2, 1), answer=number(-999, 999)),
    "entities": some(record(label=one_of("person", "place"), begin=SHORT, end=SHORT), 2, 1),
    "a sentiment": record(
        label=one_of("positive", "negative"),
        score={"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
    ),
    "keys of a pattern": {"type": "object", "patternProperties": {"^[a-f]{1,3}$": number(0, 9)}, "maxProperties": 2,
                          "minProperties": 1, "additionalProperties": False},
    "a title and descriptions": {"title": "A thing", "description": "of some kind",
                                 **record(label={"type": "string", "maxLength": 5, "description": "its name"})},
    "keys with other signs": record(**{"a-b": SHORT, "c d": FLAG, "e\"f": NOTHING}),
    "letters beyond ASCII": one_of("größer", "naïve", "日本"),
    "a deep object": record(a=record(b=record(c=record(d=record(e=FLAG))))),
}  # fmt: skip
