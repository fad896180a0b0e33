"""Two servers behind nginx, with the configuration of the page."""

import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from bd3lm.lm import LanguageModel
from tests.serving import serving, small_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx"),
]
PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def test_two_servers_behind_one_address(tmp_path: Path) -> None:
    """Both write the same text of a seed, streamed text does not wait, and one is enough."""
    folder = tmp_path / "small"
    small_model().save_pretrained(folder)
    (block,) = re.findall(r"```nginx\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    port = free_port()
    with serving(folder) as one, serving(folder) as other:
        for name, url in (("8001", one.url), ("8002", other.url)):
            block = block.replace(f"127.0.0.1:{name}", url.removeprefix("http://"))
        block = block.replace("listen 8000", f"listen 127.0.0.1:{port}")
        config = tmp_path / "nginx.conf"
        config.write_text(
            f"daemon off; pid {tmp_path}/pid; error_log stderr;\nevents {{}}\nhttp {{ access_log off; "
            f"client_body_temp_path {tmp_path}/body; proxy_temp_path {tmp_path}/proxy;\n{block}}}\n"
        )
        nginx = subprocess.Popen(
            ["nginx", "-c", str(config), "-p", str(tmp_path)], stderr=subprocess.PIPE, text=True
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                end = time.monotonic() + 20
                while True:
                    try:
                        http.get("/health")
                        break
                    except httpx.ConnectError:
                        assert nginx.poll() is None, nginx.communicate()
                        assert time.monotonic() < end
                        time.sleep(0.1)
                body = {"prompt": "ab", "max_tokens": 24, "seed": 3}
                (expected,) = LanguageModel.from_pretrained(folder, device="cpu").generate(
                    "ab", seed=3, max_new_tokens=24
                )
                for _ in range(6):
                    answer = http.post("/v1/completions", json=body)
                    assert answer.json()["choices"][0]["text"] == expected.completion
                counts = [
                    float(
                        re.findall(
                            r'bd3lm_answers_total\{status="200"\} (\S+)',
                            httpx.get(f"{each.url}/metrics").text,
                        )[0]
                    )
                    for each in (one, other)
                ]
                assert sum(counts) == 6
                assert min(counts) > 0
                with http.stream(
                    "POST", "/v1/completions", json=body | {"max_tokens": 2000, "stream": True}
                ) as answer:
                    arrived = [time.monotonic() for line in answer.iter_lines() if line.startswith("data: {")]
                assert len(arrived) > 3
                assert arrived[-1] - arrived[0] > 0.02  # not all at once
                one.stop(signal.SIGTERM)
                for _ in range(4):
                    assert http.post("/v1/completions", json=body).status_code == 200
        finally:
            nginx.terminate()
            nginx.communicate(timeout=20)
