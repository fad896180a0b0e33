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


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_is_described_in_one_piece(name, capsys, monkeypatch):
    """tyro keeps the line breaks of a docstring below a field, which would end lines in mid-sentence."""
    monkeypatch.setenv("COLUMNS", "2000")
    with pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    *_, options = re.split(r"^ options *$", capsys.readouterr().out, flags=re.MULTILINE)
    lines = [line.rstrip() for line in options.splitlines()]
    names = [line for line in lines if line.startswith("  -")]
    helps = [line for line in lines if line.startswith("      ")]  # of names too long for the same line
    described = [line for line in names if re.match(r"  -.*\S {2,}[^ (]", line)]
    assert len(names) == len(described) + len(helps) > 0


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
    assert len(printed.splitlines()) < 50  # the details are in the help of each


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "trian",
            "bd3lm has no command 'trian', did you mean 'train'? Its commands are train, adapt, tune, data, ",
        ),
        (
            "xyzzy --help",
            "bd3lm has no command 'xyzzy'. Its commands are train, adapt, tune, data, sample, chat, ",
        ),
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
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "out of memory: use"),
        (
            RuntimeError("[enforce fail at x.cpp:1] DefaultCPUAllocator: can't allocate 64 bytes."),
            "at 64 bytes more: use a smaller batch (--train.micro_batch",
        ),
        (MemoryError(), "out of memory: use"),
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


def test_a_second_interrupt_is_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where nobody ran the demo

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("bd3lm.runs.train.train_stages", interrupted)
    assert main(["train", "demo"]) == 130
    assert capsys.readouterr().err == "bd3lm: interrupted\n"


STAND_IN = """
import os, signal, sys, time
sys.path.insert(0, ".")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have ignored it
sys.argv = ["bd3lm", *{words}]
from bd3lm.__main__ import main
sys.exit(main())
"""
SIGNALLED = "import os, signal; os.kill(os.getpid(), signal.{})"
PLACES = {  # where the signal comes, by the module that is being imported then
    "while tyro is imported": ("tyro.py", ["presets"]),
    "while torch is imported": ("torch.py", ["sample"]),
    "where exceptions get lost": ("plugin.py", ["presets", "--plugin", "plugin.py"]),
}
LOST = """
class Lost:
    def __del__(self):
        {}
        print("it went on")  # Python looks for signals before this

Lost()
import time
time.sleep(60)
"""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("name", "said", "status"),
    [("SIGINT", "bd3lm: interrupted\n", 130), ("SIGTERM", "bd3lm: terminated\n", 143)],
)
def test_a_signal_is_one_line_from_the_first_moment_on(name, said, status, place, tmp_path):
    module, words = PLACES[place]
    does = SIGNALLED.format(name)
    text = LOST.format(does) if module == "plugin.py" else f"{does}\nimport time; time.sleep(60)"
    (tmp_path / module).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", STAND_IN.format(words=words)], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stderr, done.returncode) == (said, status)


def test_what_an_interruption_became_is_told_as_one(capsys, monkeypatch):
    def run(*_: Any) -> int:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise RuntimeError("trying to pop from empty mode stack")  # noqa: B904 - as torch does

    monkeypatch.setattr("bd3lm.commands.presets.Presets.run", run)
    assert main(["presets"]) == 130
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


WRONG_AT_ONCE = {
    "sample no-such-model": "there is no folder 'no-such-model' here",
    "sample --temperature -1": "--temperature must lie in [0.001, 1000]",
    "sample --length 0": "--length must be at least 1, got 0",
    "sample --device gpu": "--device must be cpu, cuda or cuda:N, got 'gpu'",
    "sample --prompts-from no-file": "--prompts-from no-file could not be read",
    "sample --template text": "--template must contain a gap",
    "sample empty": "folder empty must hold a model.safetensors, got none",
    "eval": "models must name at least one run",
    "eval ./typo": "there is no folder './typo' here",
    "eval box --batch-size 0": "--batch-size must be at least 1, got 0",
    "eval box --lean -1": "--lean must be a number from 0 to 1e6, got -1.0",
    "eval box --data no-file": "no-file is neither a file or folder nor one of pydoc",
    "eval box --out there": "--out must be a new file, and there exists",
    "zeroshot typo --data there": "there is no folder 'typo' here",
    "zeroshot box --data no-file": "no-file is neither a file or folder nor one of pydoc",
    "score typo there": "there is no folder 'typo' here",
    "score box no-file": "there is no file or folder no-file",
    "score box there --batch-size 0": "--batch-size must be at least 1, got 0",
    "score box there --lean -1": "--lean must be a number from 0 to 1e6",
    "judge no-samples.jsonl": "there is no file no-samples.jsonl",
    "judge box --count 0": "--count must be at least 1, got 0",
    "judge box --mauve no-file": "--mauve must be a file of human texts, and no-file is not a file",
    "variance box --batches 0": "--batches must be at least 1, got 0",
    "variance box --gradients 1": "--gradients must be 0 or at least 2, got 1",
    "sample --lean -2": "--lean must be a number from 0 to 1e6",
    "lengths box --lean -2": "--lean must be a number from 0 to 1e6",
    "judge typo": "there is no folder 'typo' here",
    "lengths typo": "there is no folder 'typo' here",
    "variance typo": "there is no folder 'typo' here",
    "report run --out page.html": "--out must be the folder for report.html and report.md",
    "report typo": "there is no folder 'typo' here",
    "harness typo --tasks any": "there is no folder 'typo' here",
    "convert typo out": "there is no folder 'typo' here",
    "convert box .": "OUT must be a new or empty folder, and . holds empty",
    "train": "a preset or --config must be given",
    "train nopreset": "there is no preset 'nopreset'",
    "train --config no-file": "--config must be a YAML file, and no-file does not exist",
    "train demo --from typo": "there is no folder 'typo' here",
    "train demo --out run": "run holds a run already; use --resume to continue it",
    "train demo --out empty --resume": "--resume needs a run to continue, and empty holds none",
    "train --config there": "there must hold a mapping of settings, got NoneType",
    "train --config tagged.yaml": "tagged.yaml is not YAML: settings cannot have values of type timestamp",
    "data prepare no-file out": "no-file is neither a file or folder nor one of pydoc",
}


def test_what_is_wrong_with_a_command_is_told_before_torch_is_loaded(tmp_path):
    """Which takes seconds. One process asks for all; in a terminal it would say `loading torch` first."""
    code = f"""
import sys
from bd3lm.cli import main
for words in {list(WRONG_AT_ONCE)}:
    sys.stderr.write(f"{{main(words.split())}} {{'torch' in sys.modules}}\\n")
"""
    (tmp_path / "there").write_text("")
    (tmp_path / "tagged.yaml").write_text("train: !!timestamp abc\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "run" / "recipe.yaml").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    lines = iter(done.stderr.splitlines())
    for words, said in WRONG_AT_ONCE.items():
        line = next(lines)
        assert line.startswith("bd3lm: "), words
        assert said in line, words
        assert next(lines) == "1 False", words
    assert list(lines) == []


WRONG_IN_A_RECIPE = {
    "train demo --train.steps x": "train.steps: input should be a valid integer",
    "train demo --train.stpes 3": "train.stpes: unknown key, did you mean 'steps'?",
    "train demo-ar --train.stpes 3 --optimizer.lr -1": "has 2 problems",
    "train demo --block.optimizer.lr -1": "lr must be positive and finite, got -1",
    "train demo --bolck.optimizer.lr 1": "bolck: unknown key, did you mean 'block'?",
    "train demo --traim.steps 3": "traim: unknown key, did you mean 'train'?",
    "train demo --lr 3": "lr: unknown key, did you mean 'optimizer.lr'?",
    "train demo --from box --ar.train.steps 3": "with --from only the stage block runs",
    "train demo --data.path no-data": "data.path must be a folder of token shards, got no-data",
    "train wikipedia-ar": "make it with `bd3lm data prepare ARTICLES data/wikipedia --tokenizer gpt2`",
    "train demo --config wrong.yaml": "preset demo with wrong.yaml (stage ar) has a problem:",
}
OF_THE_METHOD = "train demo --block.method.block_sise 3 --block.train.stpes 3 --show"


def test_what_is_wrong_with_a_recipe_whatever_its_method_is_told_before_torch_is_loaded(tmp_path):
    """What depends on the method is told with all else, by the recipe itself."""
    code = f"""
import sys
from bd3lm.cli import main
for words in {[*WRONG_IN_A_RECIPE, OF_THE_METHOD]}:
    status = main(words.split())
    sys.stderr.write(f"\\0{{status}} {{'torch' in sys.modules}}\\0")
"""
    (tmp_path / "wrong.yaml").write_text("train: {stpes: 3}\n")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    told = done.stderr.split("\0")[:-1]
    *early, late = zip(told[::2], told[1::2], strict=True)
    for (words, said), (line, how) in zip(WRONG_IN_A_RECIPE.items(), early, strict=True):
        assert said in line, words
        assert how == "1 False", words
    assert "block_sise" in late[0]
    assert "stpes" in late[0]
    assert late[1] == "1 True"


def test_presets_need_no_torch():
    code = "import sys; from bd3lm.cli import main; main(['presets']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


@pytest.mark.parametrize(("is_terminal", "said"), [(True, "loading torch ...\r\n"), (False, "")])
def test_a_terminal_is_told_that_torch_is_loading(is_terminal, said, tmp_path):
    """As it is about to be: the stand-in says when that is."""
    (tmp_path / "torch.py").write_text("import sys; print('here it is', file=sys.stderr); sys.exit(3)")
    code = (
        "import sys; sys.path.insert(0, '.'); from bd3lm.cli import main; main(['train', 'demo', '--show'])"
    )
    reading, writing = os.openpty() if is_terminal else os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as told:
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stderr=writing)
        printed = told.read(1000).decode()
        os.close(writing)
    assert done.returncode == 3
    assert printed.replace("\r", "") == f"{said}here it is\n".replace("\r", "")


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
