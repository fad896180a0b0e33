"""The entry point: what it prints, how it ends, and that bad news is one line."""

import errno
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

import bd3lm
from bd3lm.cli import main
from bd3lm.commands import every_command
from bd3lm.commands.shared.command import Command
from tests.commands import fails

pytestmark = pytest.mark.sweep(3)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"bd3lm {bd3lm.__version__}\n"


NAMES = [
    *every_command(),
    *("data prepare", "data verify", "data train-tokenizer", "data train_tokenizer"),
    *("bench train", "bench sample", "bench attention"),
]


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help_in_words(name, capsys):
    """Without what tyro makes of types and empty defaults."""
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: bd3lm {name.replace('_', '-')}")
    assert not re.search(r"\bSTR\b|\bPATH\b|\{None|default: (None)?\)|fixed to", printed)


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        ("sample", "bd3lm sample [-h] [SAMPLE OPTIONS] [MODEL] [PROMPT ...]"),
        ("eval", "bd3lm eval [-h] [EVAL OPTIONS] MODEL ..."),
        ("score", "bd3lm score [-h] [SCORE OPTIONS] MODEL FILE ..."),
        ("train", "bd3lm train [-h] [TRAIN OPTIONS] [PRESET]"),
        ("judge", "bd3lm judge [-h] [JUDGE OPTIONS] MODEL|FILE ..."),
        ("data prepare", "bd3lm data prepare [-h] [PREPARE OPTIONS] SOURCE OUT"),
        ("report", "bd3lm report [-h] [REPORT OPTIONS] RUN ..."),
        ("harness", "bd3lm harness [-h] [HARNESS OPTIONS] MODEL"),
    ],
)
def test_usage_names_what_is_asked_for(words, usage, capsys):
    with pytest.raises(SystemExit):
        main([*words.split(), "--help"])
    assert capsys.readouterr().out.splitlines()[0] == f"usage: {usage}"


def test_no_command_shows_them_all(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert re.findall(r"• (\w+)", printed) == list(every_command())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trian", "bd3lm has no command 'trian', did you mean 'train'? Its commands are train, data, sample"),
        ("xyzzy --help", "bd3lm has no command 'xyzzy'. Its commands are train, data, sample, presets, "),
        (
            "data prepre a b",
            "bd3lm data has no command 'prepre', did you mean 'prepare'? Its commands are prepare, verify, t",
        ),
        (
            "bench trian",
            "bd3lm bench has no command 'trian', did you mean 'train'? Its commands are train, f",
        ),
        ("data", "bd3lm data needs a command, prepare or verify or train-tokenizer; see bd3lm data --help"),
        (
            "bench",
            "bd3lm bench needs a command, train or forward or sample or attention; see bd3lm bench --help",
        ),
        ("sample runs/demo --prompt hello", "bd3lm sample takes prompts after the model, without a flag: "),
        ("sample runs/demo --prompts=hello", "bd3lm sample takes prompts after the model, without a flag: "),
    ],
)
def test_a_mistyped_command_is_one_line_with_the_nearest_and_all_there_are(words, said, capsys):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"bd3lm: {said}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    ["--version", "train --help", pytest.param("prove --samples 100", marks=pytest.mark.slow)],
)
def test_a_reader_that_has_seen_enough_is_no_failure(words):
    """Of plain lines, of rich's and of tyro's: the status of a closed pipe, and not a word."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "bd3lm", *words.split()], stdout=closed, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_a_pipe_that_is_not_standard_output_is_a_failure(capsys, monkeypatch):
    def torn(*_, **__):
        raise BrokenPipeError(errno.EPIPE, "the worker is gone")

    monkeypatch.setattr("bd3lm.commands.prove.run_proof", torn)
    assert "the worker is gone" in fails(capsys, "prove")


@pytest.mark.parametrize(
    "words",
    [
        "sample runs/dmo",
        "eval runs/dmo",
        "zeroshot runs/dmo --data text.txt",
        "score runs/dmo text.txt",
        "judge runs/dmo",
        "lengths runs/dmo",
        "variance runs/dmo",
        "report runs/dmo",
        "harness runs/dmo --tasks any",
        "convert runs/dmo out",
        "train demo --from runs/dmo --out out",
    ],
)
def test_a_mistyped_run_is_not_asked_of_the_hub(words, tmp_path, capsys, monkeypatch):
    if words.startswith("harness"):
        pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'bd3lm[harness]'")
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "bd3lm.interop.sources.snapshot_download", lambda *_, **__: pytest.fail("asked the hub")
    )
    assert ": there is no folder 'runs/dmo' here, did you mean 'runs/demo'? " in fails(capsys, *words.split())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
            "at 2.00 GiB more:",
        ),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "out of memory: make"),
        (
            RuntimeError("[enforce fail at x.cpp:1] DefaultCPUAllocator: can't allocate 64 bytes."),
            "at 64 bytes more: make the batch smaller (--train.micro_batch",
        ),
        (MemoryError(), "out of memory: make"),
    ],
    ids=["torch", "driver", "CPU", "Python"],
)
def test_every_kind_of_too_little_memory_is_one_line(error, said, capsys, monkeypatch):
    def run(*_: Any) -> int:
        raise error

    monkeypatch.setattr("bd3lm.commands.presets.Presets.run", run)
    assert said in fails(capsys, "presets")
    with pytest.raises(type(error)):
        main(["presets", "--debug"])


def test_another_failure_keeps_its_traceback(monkeypatch):
    def run(*_: Any) -> int:
        raise RuntimeError("a mistake of ours, not for lack of memory")

    monkeypatch.setattr("bd3lm.commands.presets.Presets.run", run)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        main(["presets"])


def test_a_second_interrupt_is_one_line(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("bd3lm.runs.train.train_stages", interrupted)
    assert main(["train", "demo"]) == 130
    assert capsys.readouterr().err == "bd3lm: interrupted\n"


def test_reading_a_command_line_is_quick():
    """Whatever brings torch is imported when a command runs."""
    code = """
import sys
from contextlib import suppress
from bd3lm.cli import main
with suppress(SystemExit):
    main(["eval", "--help"])
print(*{"torch", "numpy", "matplotlib", "rich"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: bd3lm eval")
    assert done.stdout.splitlines()[-1] == ""


# --- plugins ---


PLUGIN = """
from dataclasses import dataclass

from bd3lm.commands.shared.command import Command


@dataclass(frozen=True)
class Shout(Command):
    \"\"\"Say it loudly.\"\"\"

    kind = "shout"

    word: str = "hello"

    def run(self) -> int:
        print(self.word.upper())
        return 0
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch) -> str:
    """A file that adds a command, for one test."""
    monkeypatch.setattr(Command, "_members", dict(Command._members))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    file = tmp_path / "loud.py"
    file.write_text(PLUGIN)
    return str(file)


@pytest.mark.parametrize(
    "words", ["--plugin FILE shout", "shout --plugin=FILE", "shout --word x --plugin FILE"]
)
def test_a_plugin_may_add_a_command(words, plugin, capsys):
    assert main(words.replace("FILE", plugin).split()) == 0
    assert capsys.readouterr().out == ("X\n" if "--word" in words else "HELLO\n")
    with pytest.raises(SystemExit):
        main(["--plugin", plugin, "--help"])
    assert "• shout" in capsys.readouterr().out


def test_plugins_are_loaded_in_turn_and_what_is_wrong_with_one_is_said(plugin, tmp_path, capsys):
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    assert fails(capsys, "shout", "--plugin", plugin, "--plugin", str(broken)) == (
        f"bd3lm: plugin {broken} could not be loaded: ZeroDivisionError: division by zero\n"
    )
    assert "plugin must be a .py file or a module, got" in fails(capsys, "presets", "--plugin", "no.py")
    assert "--plugin must be a .py file or a module, got none" in fails(capsys, "presets", "--plugin")
    assert "got none" in fails(capsys, "presets", "--plugin", "--debugged")
