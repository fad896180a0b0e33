"""Whatever its schema allows, and much that it does not: no answer is an error of the server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.serving import Server, serving, small_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("served") / "small"
    small_model().save_pretrained(folder)
    with serving(folder, "--most-tokens", "128", "--most-seconds", "20") as found:
        yield found


def test_no_answer_is_an_error_of_the_server(server: Server) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    asked = set()

    for result in schema.get_all_operations():
        operation = result.ok()
        asked.add((operation.method.upper(), operation.path))
        modes = [schemathesis.GenerationMode.POSITIVE]
        if operation.method.upper() == "POST":  # of the others nothing can be wrong
            modes.append(schemathesis.GenerationMode.NEGATIVE)
        for mode in modes:

            @settings(
                max_examples=150,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: schemathesis.Case) -> None:
                answer = case.call(timeout=60)
                assert answer.status_code < 500, answer.text

            ask()
    assert ("POST", "/v1/completions") in asked
    assert ("POST", "/v1/chat/completions") in asked
    assert server.post(prompt="ab", max_tokens=2).status_code == 200
