"""What can be an id of the hub, and the one line that is told of its errors."""

import socket

import pytest

from bd3lm.io.hub import hub_reason, is_hub_id, unresolved_hub


@pytest.mark.parametrize("text", ["gpt2", "bert-base-uncased", "EleutherAI/pythia-1.4b", "a/b_c.d-e"])
def test_names_with_and_without_an_owner_are_ids(text):
    assert is_hub_id(text)
    assert is_hub_id(text, needs_owner=True) == ("/" in text)


@pytest.mark.parametrize(
    "text",
    ["", "~/tok", "./tok", "../tok", "/tok", "a/b/c", "a//b", "a/", "/b", "a b", "hf://a/b", "a/.b", "-a"],
)
def test_paths_are_no_ids(text):
    assert not is_hub_id(text)


@pytest.mark.parametrize(
    "file", ["judge.gguf", "run/model.safetensors", "a/b.ckpt", "a/config.json", "x.bin"]
)
def test_files_of_weights_are_no_ids(file):
    assert not is_hub_id(file)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Exception("\n offline\nand a page more"), "offline"),
        (TimeoutError(), "TimeoutError"),
        (OSError(" \n"), "OSError"),
    ],
)
def test_an_error_is_told_in_one_line(error, told):
    assert hub_reason(error) == told


def test_a_name_that_does_not_resolve_is_known_at_once_unless_a_proxy_resolves_it(monkeypatch):
    def resolved(host, port):
        asked.append(host)
        if "nowhere" in host:
            raise socket.gaierror(-2, "Name or service not known")
        return []

    asked: list[str] = []
    monkeypatch.setattr("bd3lm.io.hub.socket.getaddrinfo", resolved)
    monkeypatch.setattr("bd3lm.io.hub.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.nowhere:443/mirror")
    assert unresolved_hub() == "hub.nowhere"
    monkeypatch.setattr("bd3lm.io.hub.getproxies", lambda: {"no": "localhost"})
    assert unresolved_hub() == "hub.nowhere"
    monkeypatch.setattr("bd3lm.io.hub.getproxies", lambda: {"https": "http://proxy:3128"})
    assert unresolved_hub() is None
    monkeypatch.setattr("bd3lm.io.hub.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.here")
    assert unresolved_hub() is None
    assert asked == ["hub.nowhere", "hub.nowhere", "hub.here"]
