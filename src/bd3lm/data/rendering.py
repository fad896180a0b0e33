"""What a chat template writes: a program of whoever made a model. It is run in a process of its own
(`template.py`), which ends where it takes more than a conversation needs."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

_MOST_TEMPLATE = 1_000_000  # characters; long ones have thirty thousand
_MOST_TEXT = 1_000_000  # characters of what it writes, beside what the messages hold
_MOST_SECONDS = 2  # of computing; they take milliseconds
_MOST_BYTES = 2**29
_MOST_WAITING = 60.0  # seconds, on a machine that is busy with others
_PROGRAM = Path(__file__).with_name("template.py")
_NAMED = re.compile(r"'([^'\\]{4,})'|\"([^\"\\]{4,})\"")


def rendered(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool,
    bos_token: str = "",
    eos_token: str = "",
) -> str:
    """What a template writes of messages; a ValueError of one line where it fails or does too much."""
    if len(template) > _MOST_TEMPLATE:
        raise ValueError(
            f"a chat template must have at most {_MOST_TEMPLATE:,} characters, got {len(template):,}"
        )
    said = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    room = 4 * sum(len(message["content"]) for message in messages)
    answer = _run(template, json.dumps(said), _MOST_TEXT + (room if room > _MOST_TEXT else 0))
    if "error" in answer:
        raise ValueError(f"the chat template of the model cannot be used: {answer['error']}")
    return answer["text"]


def looks_at(template: str, contents: Sequence[str]) -> bool:
    """Whether messages hold a text that a template names, such as the tag behind thoughts, which it may look
    for: in words alone it has nothing to look for."""
    return any(name in content for name in _names(template) for content in contents)


@lru_cache(maxsize=8)
def _names(template: str) -> tuple[str, ...]:
    found = (one or other for one, other in _NAMED.findall(template))
    return tuple(
        dict.fromkeys(each for each in found if not each.replace(" ", "").replace("_", "").isalnum())
    )


@lru_cache(maxsize=1024)
def _run(template: str, said: str, characters: int) -> dict[str, str]:
    """What a template writes, or why it writes nothing. It sees signs, so that few of these runs differ."""
    limits = {"seconds": _MOST_SECONDS, "bytes": _MOST_BYTES, "characters": characters}
    asked: dict[str, Any] = {"template": template, "said": json.loads(said), **limits}
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_PROGRAM)],
            input=json.dumps(asked).encode(),
            capture_output=True,
            timeout=_MOST_WAITING,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it takes longer than {_MOST_WAITING:.0f} s"}
    if done.returncode == -signal.SIGXCPU:
        return {"error": f"it computes for more than {_MOST_SECONDS} s"}
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return {"error": f"its process ended with {done.returncode}{''.join(f': {line}' for line in last)}"}
    answer: dict[str, str] = json.loads(done.stdout)
    return answer
