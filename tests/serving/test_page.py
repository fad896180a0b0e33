"""The files of the page, and what the page is told of a model. tests/browser drives it."""

import pytest
from fastapi.testclient import TestClient
from markupsafe import escape

from bd3lm.serving import Limits
from bd3lm.serving.app import build_app
from bd3lm.serving.engine import RemoteEngine
from bd3lm.serving.reference import reference_page
from bd3lm.serving.worker import Served, Worker
from tests.serving import small_model

FILES = {
    "/": "text/html",
    "/docs": "text/html",
    "/page/page.css": "text/css",
    "/page/reference.css": "text/css",
    "/page/page.js": "text/javascript",
    "/page/view.js": "text/javascript",
    "/page/film.js": "text/javascript",
    "/page/compare.js": "text/javascript",
    "/page/server.js": "text/javascript",
    "/page/icon.svg": "image/svg+xml",
}


@pytest.fixture(scope="module")
def client() -> TestClient:
    """Of a server with a key, whose model is never started."""
    return TestClient(build_app(RemoteEngine(Served("none", "none"), Limits(), notes=print), key="secret"))


@pytest.mark.parametrize("path", FILES)
def test_it_needs_no_key_and_nothing_from_elsewhere(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(FILES[path])
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
    for way_around in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way_around not in answer.text


@pytest.mark.parametrize(
    "name",
    ["__init__.py", "nothing.js", "reference.html.j2", "..%2fapp.py", "%2e%2e/app.py", "", "__pycache__"],
)
def test_nothing_else_is_given_away(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


def test_a_model_says_which_settings_mean_something() -> None:
    means = Worker(small_model(), Limits()).hello()["means"]
    assert means == {
        "block": ["lean", "speculation", "alternatives"],
        "causal": ["speculation", "alternatives"],
    }


def test_the_reference_names_every_route_field_and_limit(client: TestClient) -> None:
    page = client.get("/docs").text
    schema = client.get("/openapi.json").json()
    for path in schema["paths"]:
        assert path in page
    for asked in ("CompletionAsk", "ChatAsk"):
        for name, field in schema["components"]["schemas"][asked]["properties"].items():
            assert f"<code>{name}</code>" in page
            assert escape(field.get("description", "")) in page
    for words in ("number, more than 0, at most 1 ", "auto or off or integer", "{include_usage: boolean}"):
        assert words.strip() in page
    assert "OpenAI" in page
    assert client.get("/redoc").status_code == 404


def test_the_reference_escapes_what_a_schema_says() -> None:
    script = "<script>x</script>"
    body = {"content": {"application/json": {"schema": {"properties": {script: {"description": script}}}}}}
    operation = {"description": script, "requestBody": body, "responses": {"400": {"description": script}}}
    page = reference_page({"info": {"description": script}, "paths": {script: {"post": operation}}})
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 6
