"""Whatever a client sends, the server answers below 500, stays up, and keeps its bits.

Bodies follow the schema that the server itself publishes, field by field, with values that the
schema allows and values that it does not.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_det.probe import run_probe

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]
# Route -> the field that bounds the answer.
ROUTES = {
    "/generate": "sampling_params",
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
    "/api/chat": "options",
    "/api/generate": "options",
}
AXES = ("run_to_run", "batch_size", "sampled")
TIMEOUT = 60  # seconds; a request that hangs is a failure
# Of SamplingParams, which the published schema does not spell out.
PARAMETERS = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), st.floats(0, 2)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), st.floats(-2, 2)),
    **dict.fromkeys(("top_k", "min_new_tokens", "n"), st.integers(-1, 3)),
    **dict.fromkeys(("ignore_eos", "no_stop_trim", "skip_special_tokens"), st.booleans()),
    "sampling_seed": st.integers(-(2**64), 2**64),
    "stop": st.one_of(st.text(max_size=3), st.lists(st.text(max_size=3), max_size=3)),
    "stop_token_ids": st.lists(st.integers(-2, 400), max_size=3),
    "logit_bias": st.dictionaries(st.integers(-2, 400).map(str), st.floats(-5, 5), max_size=3),
    "regex": st.sampled_from(["[a-c]+", "(", "a{1000000}", ""]),
    "json_schema": st.sampled_from(['{"type": "integer"}', "{", '{"$ref": "#"}', "[]"]),
    "ebnf": st.sampled_from(['root ::= "a"', "root ::= root", "x"]),
    "custom_params": st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
}
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 2**31, 2**63, 2**70, -(2**70), 1e308, float("inf"), float("nan")]),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.none()), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
SHORT = st.one_of(*[st.integers(1, 4)] * 6, st.sampled_from([0, -1, 2**70, "4", None, 1.5, [], {}]))


def _value(schema: dict[str, Any], known: dict[str, Any], depth: int = 0) -> st.SearchStrategy:
    """Values that a schema allows; at some depth anything."""
    if depth > 4:
        return JUNK
    if name := schema.get("$ref"):
        return _value(known[name.rpartition("/")[2]], known, depth + 1)
    if choices := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return st.one_of(*(_value(c, known, depth + 1) for c in choices))
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    kind = schema.get("type")
    if kind == "array":
        return st.lists(_value(schema.get("items", {}), known, depth + 1), max_size=2)
    if kind == "object":
        return _object(schema, known, depth + 1)
    plain = {"string": st.text(max_size=6), "boolean": st.booleans(), "null": st.none()}
    plain |= {"integer": st.integers(-2, 40), "number": st.floats(-1, 2)}
    return plain.get(kind, JUNK)


def _object(schema: dict[str, Any], known: dict[str, Any], depth: int) -> st.SearchStrategy:
    fields = {k: _value(v, known, depth) for k, v in schema.get("properties", {}).items()}
    needed = {k: fields.pop(k) for k in schema.get("required", ()) if k in fields}
    return st.fixed_dictionaries(needed, optional=fields)


def _bodies(route: str, schema: dict[str, Any], known: dict[str, Any]) -> st.SearchStrategy:
    """Bodies of a route: few fields of those it has, and one of them perhaps of any value."""
    if name := schema.get("$ref"):
        schema = known[name.rpartition("/")[2]]
    fields = {k: _value(v, known) for k, v in schema.get("properties", {}).items()}
    needed = [k for k in schema.get("required", ()) if k in fields]
    others = [k for k in fields if k not in needed]

    @st.composite
    def body(draw):
        chosen = draw(st.lists(st.sampled_from(others), max_size=4, unique=True)) if others else []
        found = {k: draw(fields[k]) for k in [*needed, *chosen]}
        if route == "/generate" and not {"text", "input_ids", "input_embeds"} & found.keys():
            found["text"] = draw(st.text(max_size=6))
        if fields and draw(st.integers(0, 2)) == 0:
            found[draw(st.sampled_from(sorted(fields)))] = draw(JUNK)
        _bound(draw, route, found)
        return found

    return body()


def _bound(draw, route: str, found: dict[str, Any]) -> None:
    """Few tokens, so that two thousand requests take minutes."""
    field = ROUTES[route]
    if field == "sampling_params":
        names = draw(st.lists(st.sampled_from(sorted(PARAMETERS)), max_size=4, unique=True))
        found[field] = {k: draw(PARAMETERS[k]) for k in names} | {"max_new_tokens": draw(SHORT)}
        if draw(st.integers(0, 3)) == 0:
            found[field][draw(st.sampled_from(sorted(PARAMETERS)))] = draw(JUNK)
    elif field == "options":
        found[field] = {"num_predict": draw(SHORT)}
    elif field:
        found[field] = draw(SHORT)
    found.pop("max_completion_tokens", None)
    if isinstance(found.get("rid"), str):
        del found["rid"]  # one that is in use is another test


def _problem(url: str, route: str, body: dict[str, Any]) -> str | None:
    sent = json.dumps(body)
    try:
        headers = {"content-type": "application/json"}
        answer = requests.post(url + route, sent.encode(), headers=headers, timeout=TIMEOUT)
    except requests.RequestException as error:
        return f"{route} {sent}: {type(error).__name__}"
    if answer.status_code >= 500:
        return f"{route} {sent}: {answer.status_code} {answer.text[:300]}"
    if answer.status_code >= 400 and not answer.text.strip():
        return f"{route} {sent}: {answer.status_code} without a reason"
    return None


def _fuzz(url: str, many: int) -> None:
    published = requests.get(f"{url}/openapi.json", timeout=TIMEOUT).json()
    known = published.get("components", {}).get("schemas", {})
    routes = {}
    for route in ROUTES:
        post = published["paths"].get(route, {}).get("post", {})
        content = post.get("requestBody", {}).get("content", {})
        routes[route] = _bodies(route, content.get("application/json", {}).get("schema", {}), known)
    requests_of = st.sampled_from(sorted(routes)).flatmap(
        lambda route: st.tuples(st.just(route), routes[route])
    )

    @settings(
        max_examples=many,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(requests_of)
    def every_answer_is_one(request):
        assert (problem := _problem(url, *request)) is None, problem

    before = run_probe(url, quick=True, axes=AXES, progress=False)
    every_answer_is_one()
    after = run_probe(url, quick=True, axes=AXES, progress=False)
    assert before.passed and after.passed, after.table()
    assert after.answers == before.answers


def test_no_request_ends_the_server_or_changes_bits(sgl_det_server):
    _fuzz(sgl_det_server.url, 200)


@pytest.mark.long
def test_no_request_of_thousands_ends_the_server_or_changes_bits(sgl_det_server):
    _fuzz(sgl_det_server.url, 2000)
