"""What the edge says of itself: a document that a validator of OpenAPI accepts, and that describes what really comes."""

import html

import httpx2
import jsonschema
from openapi_spec_validator import validate
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from fleet import MODEL, Up

ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


def test_the_document_is_sound_and_an_answer_has_its_shape(up: Up):
    root = up.edge.removesuffix("/v1")
    document = httpx2.get(f"{root}/openapi.json").json()
    validate(document)
    registry = Registry().with_resource("urn:edge", Resource(contents=document, specification=DRAFT202012))
    for path, name in [("/v1/chat/completions", "ChatCompletion"), ("/v1/nothing", "Error")]:
        answer = httpx2.post(f"{root}{path}", json=ASKED).json()
        jsonschema.Draft202012Validator({"$ref": f"urn:edge#/components/schemas/{name}"}, registry=registry).validate(answer)


def test_the_page_for_people_is_made_of_the_same(up: Up):
    root = up.edge.removesuffix("/v1")
    page = httpx2.get(f"{root}/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    text = html.unescape(page.text)
    for path in httpx2.get(f"{root}/openapi.json").json()["paths"]:
        assert f"<code>{path}</code>" in text
