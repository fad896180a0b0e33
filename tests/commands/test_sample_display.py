"""`run_sample`: what is seen in a terminal and elsewhere, what goes to a file, and what is left of it."""

import io
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.live import Live

import bd3lm
from bd3lm import kinds
from bd3lm.commands.sample import display, run_sample
from bd3lm.commands.shared.records import check_new_file
from bd3lm.commands.shared.writing import Bar, settings_record, summary, write_texts
from bd3lm.lm import Generation, LanguageModel, Settings
from bd3lm.methods import BlockDiffusionMethod
from bd3lm.models import Transformer
from bd3lm.sampling import (
    Adaptive,
    Ancestral,
    BlockStarted,
    Drafted,
    FirstHitting,
    Remasking,
    Request,
    Sample,
    Speculation,
    Started,
    Stopped,
    TokenRevealed,
)
from tests.lm import (
    BASELINES,
    BYTES,
    CONTEXT,
    D3PM,
    SEDD,
    SSD,
    baseline,
    every_baseline,
    every_method,
    of_bytes,
    of_method,
    that_drafts,
)

pytestmark = pytest.mark.sweep(3)

MASKED = "░"
WHOLE = Settings(stop_at_eos=False)


def of_letters(block_size: int | None = 4, end_logit: float = -1e3) -> LanguageModel:
    """A model that writes letters, spaces and, if it is to, ends."""
    model = of_bytes(block_size, end_logit=end_logit)
    with torch.no_grad():
        others = [byte for byte in range(256) if chr(byte) not in "abcdefghijklmnopqrstuvwxyz "]
        model.network.output.bias[others] = -1e3
    return model


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


def terminal() -> Console:
    return Console(force_terminal=True, file=io.StringIO(), width=60, height=10)


def pipe() -> Console:
    return Console(force_terminal=False, file=io.StringIO(), width=60)


def shown(
    console: Console,
    model: LanguageModel,
    prompts: Sequence[str],
    settings: Settings = WHOLE,
    out: Path | None = None,
) -> tuple[str, list[Generation]]:
    """What a console was sent, and what was written."""
    generations = run_sample(model, prompts, settings, console=console, out=out)
    return console.file.getvalue(), generations


# --- threads ---


@pytest.mark.parametrize(
    ("texts", "limit", "threads"),
    [(1, None, 1), (2, None, 2), (1, "2", 2)],
    ids=["one", "several", "as said"],
)
def test_one_text_of_a_small_network_is_written_by_one_thread(texts, limit, threads, monkeypatch):
    if limit is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
    model, seen = of_letters(), set()
    watched = model.stream

    def stream(*args, **options):
        for event in watched(*args, **options):
            seen.add(torch.get_num_threads())
            yield event

    monkeypatch.setattr(model, "stream", stream)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        shown(pipe(), model, ["ab"] * texts)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == {threads}


# --- in a terminal ---


@pytest.fixture
def _every_frame(monkeypatch):
    """Draw after every event, however fast they come."""
    clock, update = itertools.count(), Live.update
    monkeypatch.setattr(display, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    monkeypatch.setattr(Live, "update", lambda live, shown, **_: update(live, shown, refresh=True))


def frames(printed: str) -> list[str]:
    """What stood on the screen, one after the other, and at last what stays there. Colours are left out."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    pieces = re.split(r"(?:\r|\x1b\[[?0-9]*[A-Za-z])+", plain)
    return [piece for piece, _ in itertools.groupby(pieces) if piece]


@pytest.mark.usefixtures("_every_frame")
@pytest.mark.parametrize(
    ("block_size", "masks"),
    [
        (None, [0, *[1, 0] * 13]),
        (4, [0, 1, 0, *[4, 3, 2, 1, 0] * 3]),
        (CONTEXT, [0, *range(13, -1, -1)]),
    ],
    ids=str,
)
def test_a_text_is_seen_being_uncovered(block_size, masks):
    printed, (found,) = shown(terminal(), of_letters(block_size), ["ab"])
    *drawn, last = frames(printed)
    counts = [frame.count(MASKED) for frame in drawn]
    assert [count for count, _ in itertools.groupby(counts)] == masks
    assert all(frame.startswith("ab") for frame in drawn)
    assert drawn[-1].rstrip("\n") == found.text
    assert last.startswith(f"{found.text}\n13 tokens written in ")
    assert MASKED not in last


@pytest.mark.usefixtures("_every_frame")
def test_revealed_tokens_are_seen_where_they_stand():
    printed, (found,) = shown(terminal(), of_letters(CONTEXT), ["ab"])
    for frame in frames(printed)[1:-1]:
        assert len(frame.strip("\n")) == len(found.text)
        assert all(sign in (MASKED, final) for sign, final in zip(frame, found.text, strict=False))


@pytest.mark.usefixtures("_every_frame")
def test_remasked_tokens_are_hidden_again():
    settings = Settings(stop_at_eos=False, unmasking=Remasking(steps=30, eta=1.0))
    printed, (found,) = shown(terminal(), of_letters(CONTEXT), ["ab"], settings)
    *drawn, last = frames(printed)
    counts = [frame.count(MASKED) for frame in drawn]
    assert any(before < after for before, after in itertools.pairwise(counts[1:]))
    assert last.startswith(f"{found.text}\n")


@pytest.mark.usefixtures("_every_frame")
@pytest.mark.parametrize("block_size", [4, CONTEXT])
def test_of_a_text_longer_than_the_screen_the_end_is_seen_and_at_last_all(block_size):
    prompt = "".join(f"line {number}\n" for number in range(30))
    settings = Settings(stop_at_eos=False, length=len(prompt) + 24)
    printed, (found,) = shown(terminal(), of_letters(block_size), [prompt], settings)
    *drawn, last = frames(printed)
    assert last.startswith(f"{found.text}\n")
    assert found.text.startswith(prompt)
    assert any(MASKED in frame for frame in drawn)
    for frame in drawn:
        assert len(frame.rstrip("\n").split("\n")) <= 9
        assert "line 29" in frame
        assert "line 3\n" not in frame


@pytest.mark.usefixtures("_every_frame")
def test_long_lines_are_wrapped_to_the_screen():
    printed, (found,) = shown(terminal(), of_letters(4), ["x" * 700], Settings(length=720, stop_at_eos=False))
    *drawn, last = frames(printed)
    assert last.replace("\n", "").startswith(found.text)  # a word that is longer than a line is broken
    assert max(map(len, last.partition("tokens written")[0].split("\n")[:-1])) <= 60
    for frame in drawn:
        lines = frame.rstrip("\n").split("\n")
        assert len(lines) <= 9
        assert max(map(len, lines)) <= 60


def test_the_last_text_is_wrapped_at_words():
    prompt = "these are words " * 12
    printed, (found,) = shown(terminal(), of_letters(4), [prompt], Settings(stop_at_eos=False, length=200))
    *lines, _, _ = frames(printed)[-1].split("\n")  # after the text how it went
    assert len(lines) == 4
    assert "".join(lines) == found.text
    assert all(len(line) <= 60 and line.endswith(" ") for line in lines[:-1])


@pytest.mark.usefixtures("_every_frame")
@every_method
def test_characters_of_several_tokens(block_size):
    """Some of the bytes of a character come before others, and some never make one."""
    prompt = "naïve ☂ 日本語 🎉"
    settings = Settings(stop_at_eos=False, length=64, top_p=1.0)
    printed, (found,) = shown(terminal(), of_bytes(block_size), [prompt], settings)
    assert found.text.startswith(prompt)
    assert "\ufffd" in found.text
    assert prompt in frames(printed)[-1]


@pytest.mark.usefixtures("_every_frame")
@pytest.mark.parametrize("block_size", [4, CONTEXT])
def test_a_character_of_several_tokens_is_seen_once_they_are_all_there(block_size):
    """The umbrella is three bytes, and given: in no frame do its bytes stand as three signs."""
    settings = Settings(stop_at_eos=False, length=16)
    printed, (found,) = shown(terminal(), of_letters(block_size), ["☂☂☂"], settings)
    *drawn, _ = frames(printed)
    assert all(frame.startswith("☂☂☂") for frame in drawn)
    assert not any("\ufffd" in frame for frame in drawn)
    assert found.text.startswith("☂☂☂")


def test_an_animation_decodes_no_more_than_a_screen_holds(monkeypatch):
    """However long a text is, what a frame costs is bounded: 2,000 finished tokens, and the open block."""
    decoded: list[int] = []
    decode = type(BYTES).decode

    def watched(tokenizer: Any, tokens: Any, **options: Any) -> str:
        decoded.append(len(tokens))
        return decode(tokenizer, tokens, **options)

    model, prompt = of_letters(4), "x" * 2500
    monkeypatch.setattr(type(BYTES), "decode", watched)
    _, (found,) = shown(terminal(), model, [prompt], Settings(stop_at_eos=False, length=2512))
    *drawn, prompt_alone, shown_whole = sorted(decoded)
    assert found.text.startswith(prompt)
    assert max(drawn) <= 2000
    assert 2000 in decoded
    assert (prompt_alone, shown_whole) == (2501, 2512)


@pytest.mark.usefixtures("_every_frame")
@every_baseline
def test_baselines_are_seen_being_written(method):
    settings = Settings(stop_at_eos=False, steps=4)
    printed, (found,) = shown(terminal(), baseline(method), ["ab"], settings)
    *drawn, last = frames(printed)
    assert found.text.startswith("ab")
    assert "13 tokens written in " in last
    if method in (SEDD, D3PM, SSD):  # under uniform noise there are no masks to see, but by chance
        assert any(MASKED in frame for frame in drawn)


@pytest.mark.usefixtures("_every_frame")
def test_a_prompt_is_shown_as_it_was_given():
    prompt = "naïve ☂ 日本語"
    printed, _ = shown(terminal(), of_letters(4), [prompt], Settings(stop_at_eos=False, length=32))
    assert all(frame.startswith(prompt) for frame in frames(printed))


@pytest.mark.usefixtures("_every_frame")
def test_a_redrawn_text_begins_anew_on_the_screen():
    settings = Settings(stop_at_eos=False, entropy_floor=math.log(4), entropy_window=4, redraws=2)
    printed, _ = shown(terminal(), of_letters(4), ["aa"], settings)
    *drawn, last = frames(printed)
    assert sum(frame.strip("\n") == "aa" for frame in drawn) == 3
    assert re.search(r"1 by entropy; 2 drawn again, [1-9]\d* passes wasted\.", last)


@every_method
def test_at_the_speed_it_has(block_size):
    """With nothing slowed down or speeded up: the text stays, once, after whatever was drawn."""
    printed, (found,) = shown(terminal(), of_letters(block_size), ["ab"])
    assert frames(printed)[-1].startswith(f"{found.text}\n13 tokens written in ")
    assert printed.rstrip().endswith("Stopped: 1 by length.")
    assert printed.count("\x1b[?25l") == printed.count("\x1b[?25h") == 1  # the cursor is back


def test_several_texts_are_shown_as_they_are_finished():
    model = of_letters(4, end_logit=3.0)
    prompts = ["one", "two", "three", "four"]
    printed, found = shown(terminal(), model, prompts, Settings(length=24, batch_size=2))
    lines = [line for frame in frames(printed) for line in frame.split("\n") if line]
    assert any(line.startswith("writing ") and "4/4 texts" in line for line in lines)
    kept = [line for line in lines if not line.startswith("writing ")]  # what stays: the bar does not
    for index, each in enumerate(found):
        title = f"text {index}: {len(each.tokens)} tokens, stopped by {each.sample.stopped_by} ─"
        (place,) = [place for place, line in enumerate(kept) if line.startswith(title)]
        assert kept[place + 1] == each.text
    assert len(kept) == 2 * len(prompts) + 1
    assert MASKED not in printed


# --- drafts ---

SPECULATED = Settings(stop_at_eos=False, speculation=3)
DRAFT = re.compile(r"\x1b\[2;3m(.*?)\x1b\[0m")  # dim and italic


def screens(printed: str) -> list[str]:
    """The same as `frames`, with colours."""
    return [each for each in re.split(r"(?:\r|\x1b\[[?0-9]*[A-LN-Za-ln-z])+", printed) if each]


@pytest.mark.usefixtures("_every_frame")
def test_drafts_stand_behind_the_text_in_a_style_of_their_own():
    model = that_drafts()
    printed, (found,) = shown(terminal(), model, ["ab"], SPECULATED)
    *drawn, last = screens(printed)
    told, now = [], ""
    for event in model.stream(["ab"], SPECULATED):
        now = BYTES.decode(event.tokens) if isinstance(event, Drafted) else now
        told += [now] if isinstance(event, Drafted) and now else []
    seen = [draft for each in drawn for draft in DRAFT.findall(each)]
    assert set(told) <= set(seen)  # while a pass is told, what it verified of them is gone already
    for each in drawn:
        text = re.sub(r"\x1b\[[0-9;]*m", "", DRAFT.sub("", each)).strip("\n")
        assert found.text.startswith(text.rstrip(MASKED))
        assert len(DRAFT.findall(each)) <= 1
        assert each.strip("\n").endswith(("\x1b[0m", text[-1]))  # nothing is behind the drafts
    assert "\x1b[2;3m" not in last
    assert re.sub(r"\x1b\[[0-9;]*m", "", last).startswith(f"{found.text}\n")


@pytest.mark.usefixtures("_every_frame")
@pytest.mark.parametrize("passes", range(3, 8))
def test_interrupted_a_text_keeps_no_drafts(passes, monkeypatch):
    calls, forward = itertools.count(), Transformer.forward

    def interrupted(*arguments: Any, **options: Any) -> torch.Tensor:
        if next(calls) == passes:
            raise KeyboardInterrupt
        return forward(*arguments, **options)

    model, console = that_drafts(), terminal()
    (whole,) = model.generate(["ab"], SPECULATED)
    monkeypatch.setattr(Transformer, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sample(model, ["ab"], SPECULATED, console=console)
    *seen, stays = screens(console.file.getvalue())
    assert any(DRAFT.search(each) for each in seen)
    assert not DRAFT.search(stays)
    assert len(stays) > len("ab\n")
    assert whole.text.startswith(stays.strip("\n"))


def test_drafts_go_on_with_the_text_where_a_character_or_a_word_is_split():
    animation = display.Animation(terminal(), BYTES, BYTES.mask_id)
    animation.event(Started(0, Request(torch.tensor(BYTES.encode("a☂")[:-1]), 0, 8)))
    animation.event(Drafted(0, (3, 4), tuple(BYTES.encode("☂b")[-2:])))
    assert animation._tail().plain == "a\ufffd☂b"  # the umbrella is seen whole, once its last byte is drafted
    animation.event(BlockStarted(0, 3, 4))
    animation.event(TokenRevealed(0, 3, BYTES.encode("☂")[-1]))
    assert animation._tail().plain == "a☂b"
    animation.event(Drafted(0, (), ()))
    assert animation._tail().plain == "a☂"


# --- elsewhere ---


@every_method
def test_a_pipe_gets_the_text_and_no_control_codes(block_size):
    printed, (found,) = shown(pipe(), of_letters(block_size), ["ab"], Settings(stop_at_eos=False, length=90))
    assert "\x1b" not in printed
    text, summary, nothing = printed.split("\n")
    assert text == found.text  # not broken to the width of the console
    assert len(text) == 89
    assert summary.startswith("87 tokens written in ")
    assert nothing == ""


def test_a_pipe_gets_several_texts_with_titles():
    printed, found = shown(pipe(), of_letters(4), ["one", "two"])
    assert "\x1b" not in printed
    lines = printed.splitlines()
    assert lines[0].startswith("text 0: 16 tokens, stopped by length ")
    assert lines[1] == found[0].text
    assert lines[2].startswith("text 1: 16 tokens, stopped by length ")
    assert lines[3] == found[1].text
    assert len(lines) == 5


def of_different_lengths() -> tuple[LanguageModel, list[str], Settings]:
    """Texts of which later ones are finished before the first."""
    return of_letters(4), ["a", "abcdefghijkl", "ab"], Settings(stop_at_eos=False, length=14, batch_size=3)


def test_a_pipe_gets_texts_in_the_order_of_the_prompts():
    model, prompts, settings = of_different_lengths()
    finished = [event.index for event in model.stream(prompts, settings) if isinstance(event, Stopped)]
    assert finished != sorted(finished)
    printed, found = shown(pipe(), model, prompts, settings)
    assert re.findall(r"^text (\d):", printed, re.M) == ["0", "1", "2"]
    assert [line for line in printed.splitlines() if line.startswith("a")] == [each.text for each in found]


def test_interrupted_a_pipe_still_gets_the_texts_that_waited_for_an_earlier_one(monkeypatch):
    model, prompts, settings = of_different_lengths()
    generation = model.generation

    def interrupted(sample: Sample) -> Generation:
        if sample.index == 0:
            raise KeyboardInterrupt
        return generation(sample)

    monkeypatch.setattr(model, "generation", interrupted)
    console = pipe()
    with pytest.raises(KeyboardInterrupt):
        run_sample(model, prompts, settings, console=console)
    assert re.findall(r"^text (\d):", console.file.getvalue(), re.M) == ["1"]


@pytest.mark.parametrize("screen", [terminal, pipe])
@pytest.mark.parametrize(
    "prompt",
    [
        "[bold]x[/bold] [/dim] [red",
        "\\[x]",
        ":smile: and :x:",
        "https://example.org 12 'quoted'",
        "back\\",
        "back\\\\",
        "back\\\\\\",
        "two\n\nlines\n",
        "  spaces  ",
    ],
)
def test_what_is_printed_is_what_was_written(prompt, screen):
    printed, (found,) = shown(screen(), of_letters(4), [prompt], Settings(stop_at_eos=False, length=48))
    assert found.text.startswith(prompt)
    assert frames(printed)[-1].startswith(f"{found.text}\n")


@pytest.mark.parametrize(
    "prompt", ["a\tb", "\tindented\n\t\tmore", "ends\r\nas on Windows\r\n", "page\x0c2"], ids=repr
)
def test_a_pipe_gets_every_character(prompt):
    """Also those that move a cursor: what is written on may be code."""
    printed, (found,) = shown(pipe(), of_letters(4), [prompt], Settings(stop_at_eos=False, length=48))
    assert found.text.startswith(prompt)
    assert printed.startswith(f"{found.text}\n")


def test_titles_and_notes_may_go_elsewhere_than_texts(tmp_path):
    """Texts alone on the console, how it went on the other."""
    for screen, prompts in (
        (pipe, ["ab"]),
        (pipe, ["one", "two"]),
        (terminal, ["ab"]),
        (terminal, ["a", "b"]),
    ):
        out = tmp_path / f"{screen.__name__}{len(prompts)}.jsonl"
        console, notes = screen(), pipe()
        found = run_sample(of_letters(4), prompts, WHOLE, console=console, notes=notes, out=out)
        printed, noted = console.file.getvalue(), notes.file.getvalue()
        plain = re.sub(r"\x1b\[[0-9;]*m", "", printed)
        assert all(each.text in plain for each in found)
        assert "tokens written" not in printed
        assert "wrote" not in printed
        summary, wrote, nothing = noted.split("\n")
        assert re.match(r"\d+ tokens written in [\d.]+ s: ", summary)
        assert (wrote, nothing) == (f"wrote {out}", "")


def test_one_text_in_a_pipe_is_all_there_is():
    console = pipe()
    (found,) = run_sample(of_letters(4), ["ab"], WHOLE, console=console, notes=pipe())
    assert console.file.getvalue() == f"{found.text}\n"


def test_the_summary_counts():
    model = of_letters(4, end_logit=1.0)
    settings = Settings(length=40, entropy_floor=1.3, entropy_window=8, redraws=1, stop="ee")
    printed, found = shown(pipe(), model, ["one", "two", "three"] * 6, settings)
    kept = [each.sample for each in found]
    summary = printed.splitlines()[-1]
    number = r"([\d,]+)"
    pattern = (
        rf"{number} tokens written in ([\d.]+) s: ([\d,.]+) tokens/s\. {number} evaluations of the network\. "
        rf"Stopped: (.+); {number} drawn again, {number} passes wasted\."
    )
    matched = re.fullmatch(pattern, summary)
    assert matched, summary
    written, _, speed, evaluations, ends, redraws, wasted = matched.groups()
    assert int(written) == sum(len(sample.tokens) - sample.given for sample in kept)
    assert float(speed.replace(",", "")) > 0
    assert int(evaluations) == sum(sample.evaluations for sample in kept)
    assert int(wasted) == sum(sample.redrawn_passes for sample in kept) > 0
    assert not any(sample.fill_passes for sample in kept)  # of which nothing is said
    assert int(redraws) == sum(sample.redraws for sample in kept) > 0
    reasons = [sample.stopped_by for sample in kept]
    rules = ("eos", "string", "entropy", "length")
    assert ends == ", ".join(f"{reasons.count(by)} by {by}" for by in rules)
    assert min(reasons.count(by) for by in rules) > 0  # otherwise this says little


@pytest.mark.parametrize(
    ("written", "fills", "said"),
    [
        (1, 0, "1 token written in 2.0 s: 0.5 tokens/s. 1 evaluation of the network. Stopped"),
        (1, 1, "1 evaluation of the network, and 1 pass to read the prompts. Stopped"),
        (1000, 2, "1,000 evaluations of the network, and 2 passes to read the prompts. Stopped"),
    ],
)
def test_the_summary_says_nothing_of_none_and_knows_one_from_many(written, fills, said):
    sample = SimpleNamespace(
        written=written,
        evaluations=written,
        fill_passes=fills,
        stopped_by="length",
        redraws=0,
        redrawn_passes=0,
        drafted=(),
        accepted=(),
        fills=1,
    )
    assert f"{said}: 1 by length." in summary([SimpleNamespace(sample=sample)], 2.0)


def test_it_returns_what_generate_does():
    model = of_letters(4, end_logit=3.0)
    prompts, settings = ["one", "two", "three", "four"] * 3, Settings(length=24, batch_size=3, seed=5)
    _, found = shown(pipe(), model, prompts, settings)
    expected = model.generate(prompts, settings)
    assert [each.text for each in found] == [each.text for each in expected]
    _, watched = shown(terminal(), model, prompts[:1], settings)
    assert watched[0].text == expected[0].text


def test_without_a_tokenizer_it_says_how_to_name_one():
    with pytest.raises(
        ValueError, match="the model was saved without a tokenizer; name one with --tokenizer"
    ):
        run_sample(of_bytes(tokenizer=None), ["a"], WHOLE, console=pipe())


# --- the file ---


@every_method
@pytest.mark.parametrize("screen", [terminal, pipe])
def test_a_line_a_text(block_size, screen, tmp_path):
    model, out = of_bytes(block_size, end_logit=4.0), tmp_path / "texts.jsonl"
    prompts = ["naïve ☂", "a", "", "a"] if screen is pipe else ["naïve ☂"]
    settings = Settings(length=24, seed=3, batch_size=2, top_k=200)
    printed, _ = shown(screen(), model, prompts, settings, out=out)
    assert printed.endswith(f"wrote {out}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").split("\n")[:-1]]
    assert sorted(record["index"] for record in records) == list(range(len(prompts)))
    expected = model.generate(prompts, settings)
    for record in records:
        found = expected[record["index"]]
        sample = found.sample
        assert record == {
            "index": sample.index,
            "prompt": prompts[sample.index],
            "text": found.text,
            "completion": found.text.removeprefix(prompts[sample.index]),
            "documents": [found.text] if found.text else [],
            "tokens": found.tokens,
            "length": len(found.tokens),
            "given": sample.given,
            "evaluations": sample.evaluations,
            "fill_passes": sample.fill_passes,
            "drafted": [],
            "accepted": [],
            "fills": 1,
            "effective_fills": 1.0,
            "stopped_by": sample.stopped_by,
            "redraws": 0,
            "redrawn_passes": 0,
            "entropy": pytest.approx(found.entropy, abs=1e-6),
            "seed": sample.seed,
            "template": None,
            "model": None,
            "weights": None,
            "bd3lm": bd3lm.__version__,
            "dtype": "float64",
            "law": "block" if block_size else "causal",
            "settings": {
                **asdict(settings),
                "top_p": 0.9,
                "unmasking": {"kind": "first_hitting", "tokens_per_pass": 1, "lean": 0.0}
                if block_size
                else None,
                "stop": [],
            },
        }
        again = model.generate([record["prompt"]], settings, seeds=[record["seed"]])
        assert again[0].text == record["text"]


def test_lines_are_in_the_order_of_the_prompts_whichever_text_is_finished_first(tmp_path):
    """Texts with more of their length given need fewer blocks, and wait until those before them are shown."""
    out, prompts = tmp_path / "texts.jsonl", ["a", "a\u2028", "a" * 30, "a" * 20]
    printed, found = shown(terminal(), of_letters(), prompts, Settings(length=40, stop_at_eos=False), out=out)
    titles = [int(index) for index in re.findall(r"text (\d+): ", "\n".join(frames(printed)))]
    assert titles == [0, 1, 2, 3]
    events = of_letters().stream(prompts, length=40, stop_at_eos=False, watch=False)
    finished = [event.index for event in events]
    assert finished != sorted(finished)
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [record["index"] for record in records] == [0, 1, 2, 3]
    assert [record["text"] for record in records] == [each.text for each in found]
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]


def test_documents_are_the_text_cut_at_its_end_tokens(tmp_path):
    """Where a text is not ended, its end tokens leave no trace in the text."""
    model = of_letters(end_logit=3.0)
    shown(pipe(), model, ["one", "two"], Settings(stop_at_eos=False, length=64), out=tmp_path / "texts.jsonl")
    for line in (tmp_path / "texts.jsonl").read_text().splitlines():
        record = json.loads(line)
        marked = BYTES.decode(record["tokens"], skip_special=False)
        assert record["documents"] == [part for part in marked.split("<|endoftext|>") if part]
        assert len(record["documents"]) > 1
        assert "".join(record["documents"]) == record["text"]


def test_documents_end_before_a_stop_string_as_the_text_does(tmp_path):
    """Also where end tokens stand inside the string, which the text does not show."""
    model, out = of_letters(end_logit=3.0), tmp_path / "texts.jsonl"
    settings = Settings(stop_at_eos=False, length=64, seed=1)
    whole = model.generate(["one", "two"], settings)
    marked = [BYTES.decode(each.tokens, skip_special=False) for each in whole]
    across = [re.search(r"(\w)(?:<\|endoftext\|>)+(\w)", each.split("e", 1)[1]) for each in marked]
    strings = [whole[0].completion[5:7], *("".join(found.groups()) for found in across)]
    cut = 0
    for string in strings:
        shown(pipe(), model, ["one", "two"], replace(settings, stop=(string,)), out=out)
        for line in out.read_text().splitlines():
            record = json.loads(line)
            end = BYTES.decode(record["tokens"]).find(string, len(record["prompt"]))
            assert record["stopped_by"] == ("length" if end < 0 else "string")
            assert record["text"] == BYTES.decode(record["tokens"])[: None if end < 0 else end]
            assert "".join(record["documents"]) == record["text"] == record["prompt"] + record["completion"]
            assert all(record["documents"])
            cut += end >= 0
        out.unlink()
    assert cut >= 3  # otherwise this says little


def test_with_a_bar_alone_only_the_speed_is_said(tmp_path):
    for console in (pipe(), terminal()):
        out = tmp_path / f"{console.is_terminal}.jsonl"
        bar = Bar(console, 1)
        (found,) = write_texts(of_letters(), ["ab"], WHOLE, out=out, displays=[bar], notes=console)
        printed = console.file.getvalue()
        assert found.text not in printed
        assert MASKED not in printed
        assert "tokens/s" in printed
        assert json.loads(out.read_text())["text"] == found.text


def test_the_nucleus_that_was_used_is_recorded(tmp_path):
    for name, method in BASELINES.items():
        out = tmp_path / f"{name}.jsonl"
        shown(pipe(), baseline(method), ["a"], Settings(steps=2), out=out)
        recorded = json.loads(out.read_text())["settings"]
        assert recorded["top_p"] == {"score_entropy": 0.99, "simplex": 0.95}.get(method.kind, 0.9)
        assert (recorded["steps"], recorded["projection"], recorded["eos_id"]) == (2, "sampling", None)
    shown(pipe(), of_bytes(), ["a"], Settings(top_p=0.3), out=tmp_path / "asked.jsonl")
    assert json.loads((tmp_path / "asked.jsonl").read_text())["settings"]["top_p"] == 0.3


@pytest.mark.parametrize("screen", [terminal, pipe])
def test_a_record_is_written_before_its_text_is_shown(screen, tmp_path, monkeypatch):
    """What cannot be shown is not lost."""
    prompts = ["one", "two"] if screen is pipe else ["one"]

    def broken(*_: Any, **__: Any) -> None:
        raise UnicodeEncodeError("ascii", "☂", 0, 1, "ordinal not in range")

    monkeypatch.setattr(display, "print_text", broken)
    with pytest.raises(UnicodeEncodeError):
        run_sample(of_letters(), prompts, WHOLE, out=tmp_path / "texts.jsonl", console=screen())
    (left,) = tmp_path.iterdir()
    assert left.name == "texts.jsonl.partial"
    first = json.loads(left.read_text().split("\n")[0])
    assert first["text"] == of_letters().generate(prompts, WHOLE)[first["index"]].text


def test_characters_are_written_as_themselves(tmp_path):
    shown(pipe(), of_bytes(), ["naïve ☂"], out=tmp_path / "texts.jsonl")
    assert "naïve ☂" in (tmp_path / "texts.jsonl").read_text(encoding="utf-8")


@dataclass(frozen=True)
class OneByOne(Adaptive):
    kind = "one_by_one"

    def choose(self, log_p: torch.Tensor, drawn: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden).scatter(1, hidden.int().argmax(1, keepdim=True), True) & hidden


def test_settings_with_a_rule_of_ones_own_are_recorded_by_its_kind():
    assert settings_record(Settings(unmasking=OneByOne()))["unmasking"] == "one_by_one"


@pytest.mark.parametrize("unmasking", [FirstHitting(2), Ancestral(7), Remasking(steps=5, eta=0.5)], ids=str)
def test_the_rule_is_recorded_by_its_name_and_values(unmasking, tmp_path):
    settings = Settings(length=8, unmasking=unmasking)
    shown(pipe(), of_bytes(), ["a"], settings, out=tmp_path / "texts.jsonl")
    record = json.loads((tmp_path / "texts.jsonl").read_text())
    assert record["settings"]["unmasking"] == kinds.plain(unmasking)


def test_redraws_are_recorded(tmp_path):
    settings = Settings(length=24, stop_at_eos=False, entropy_floor=math.log(8), entropy_window=8, redraws=2)
    shown(pipe(), of_bytes(), ["aa"], settings, out=tmp_path / "texts.jsonl")
    record = json.loads((tmp_path / "texts.jsonl").read_text())
    assert (record["redraws"], record["stopped_by"], record["length"]) == (2, "entropy", 3)
    assert record["given"] == 3  # which count in the window and are never dropped
    assert record["redrawn_passes"] == 2 * (record["evaluations"] + record["fill_passes"]) > 0


def test_a_text_of_which_nothing_is_left_is_recorded_too(tmp_path):
    settings = Settings(entropy_floor=math.log(8), entropy_window=8)
    shown(pipe(), of_bytes(score_first=True), [""], settings, out=tmp_path / "texts.jsonl")
    record = json.loads((tmp_path / "texts.jsonl").read_text())
    assert (record["text"], record["tokens"], record["stopped_by"]) == ("", [], "entropy")


def test_a_path_is_printed_as_it_is(tmp_path):
    out = tmp_path / "[bold]:x:.jsonl"
    printed, _ = shown(pipe(), of_letters(), ["ab"], out=out)
    assert printed.endswith(f"wrote {out}\n")


def test_an_existing_file_is_left_alone(tmp_path):
    out = tmp_path / "texts.jsonl"
    out.write_text("mine")
    with pytest.raises(ValueError, match=rf"--out must be a new file, and {re.escape(str(out))} exists"):
        run_sample(of_bytes(), ["a"], WHOLE, out=out, console=pipe())
    assert out.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]


def test_what_another_run_left_is_kept(tmp_path, capsys):
    out, partial = tmp_path / "texts.jsonl", tmp_path / "texts.jsonl.partial"
    run_sample(of_bytes(), ["a", "b"], WHOLE, out=out, console=pipe())
    expected = out.read_text()
    theirs = expected.replace('"seed": 0', '"seed": 1')
    for line in ("theirs\n", theirs, theirs.splitlines(keepends=True)[1]):
        out.unlink()
        partial.write_text(line)
        run_sample(of_bytes(), ["a", "b"], WHOLE, out=out, console=pipe())
        assert out.read_text() == expected
        kept = tmp_path / "texts.jsonl.partial.1"
        assert kept.read_text() == line
        assert f"{partial} is kept as {kept}: its lines come from other texts" in capsys.readouterr().err
        kept.unlink()
        assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]


@pytest.mark.parametrize("lines", [1, 2, 3])
def test_the_same_command_goes_on_with_what_it_wrote_before_it_was_stopped(lines, tmp_path, capsys):
    out, partial = tmp_path / "texts.jsonl", tmp_path / "texts.jsonl.partial"
    model, prompts, settings = of_different_lengths()
    run_sample(model, prompts, settings, out=out, console=pipe())
    expected = out.read_text()
    first = sorted(expected.splitlines(keepends=True), key=len)[:lines]
    out.unlink()
    partial.write_text("".join(first) + expected[:40])  # the last line was torn
    console = pipe()
    texts = run_sample(model, prompts, replace(settings, batch_size=5), out=out, console=console)
    assert f"continuing after {lines} lines of {partial}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["text"] for line in written] == [json.loads(line)["text"] for line in expected.splitlines()]
    assert [text.sample.index for text in texts] == [
        index for index in range(3) if not any(f'"index": {index},' in line for line in first)
    ]


def test_a_folder_must_be_there(tmp_path):
    with pytest.raises(ValueError, match=r"--out must be in an existing folder, and .*nowhere is not one"):
        run_sample(of_bytes(), ["a"], WHOLE, out=tmp_path / "nowhere" / "texts.jsonl", console=pipe())
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--out must be in an existing folder, and .*file is not one"):
        check_new_file(tmp_path / "file" / "texts.jsonl")
    with pytest.raises(ValueError, match=r"--out must be a new file, and .* exists"):
        check_new_file(tmp_path)
    check_new_file(tmp_path / "texts.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # asking makes nothing


@pytest.mark.parametrize("prompts", [["x" * 20], []], ids=["too long", "none"])
def test_bad_prompts_leave_no_file(prompts, tmp_path):
    console = pipe()
    with pytest.raises(ValueError, match="prompt"):
        run_sample(of_bytes(), prompts, WHOLE, out=tmp_path / "texts.jsonl", console=console)
    assert list(tmp_path.iterdir()) == []
    assert console.file.getvalue() == ""


@pytest.mark.parametrize("screen", [terminal, pipe])
def test_interrupted_it_keeps_what_was_finished(screen, tmp_path, monkeypatch):
    out, partial = tmp_path / "texts.jsonl", tmp_path / "texts.jsonl.partial"
    model, prompts, settings = of_letters(), ["one", "two", "three", "four"], Settings(batch_size=1)
    forward = Transformer.forward

    def interrupted(*arguments: Any, **options: Any) -> torch.Tensor:
        if partial.exists() and partial.read_text().count("\n") == 2:
            raise KeyboardInterrupt
        return forward(*arguments, **options)

    monkeypatch.setattr(Transformer, "forward", interrupted)
    console = screen()
    with pytest.raises(KeyboardInterrupt):
        run_sample(model, prompts, settings, out=out, console=console)
    monkeypatch.undo()
    assert not out.exists()
    kept = [json.loads(line) for line in partial.read_text().splitlines()]
    expected = model.generate(prompts, settings)
    assert [record["text"] for record in kept] == [each.text for each in expected[:2]]
    printed = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())
    assert re.findall(r"text (\d): ", printed) == ["0", "1"]
    assert console.file.getvalue().count("\x1b[?25l") == console.file.getvalue().count("\x1b[?25h")


def test_interrupted_while_a_text_is_watched_the_terminal_is_put_right(monkeypatch):
    calls, forward = itertools.count(), Transformer.forward

    def interrupted(*arguments: Any, **options: Any) -> torch.Tensor:
        if next(calls) == 6:
            raise KeyboardInterrupt
        return forward(*arguments, **options)

    monkeypatch.setattr(Transformer, "forward", interrupted)
    console = terminal()
    with pytest.raises(KeyboardInterrupt):
        run_sample(of_letters(), ["ab"], WHOLE, console=console)
    assert console.file.getvalue().count("\x1b[?25l") == console.file.getvalue().count("\x1b[?25h") == 1
    assert "tokens written" not in console.file.getvalue()


@pytest.mark.usefixtures("_every_frame")
@pytest.mark.parametrize("block_size", [None, 4, CONTEXT])
def test_interrupted_a_text_that_is_watched_stays_on_the_screen(block_size, monkeypatch):
    """What of it was there by then: masks stand only before what was uncovered after them."""
    calls, forward = itertools.count(), Transformer.forward

    def interrupted(*arguments: Any, **options: Any) -> torch.Tensor:
        if next(calls) == 8:
            raise KeyboardInterrupt
        return forward(*arguments, **options)

    model, console = of_letters(block_size), terminal()
    (whole,) = model.generate(["ab"], WHOLE)
    monkeypatch.setattr(Transformer, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sample(model, ["ab"], WHOLE, console=console)
    *_, seen, stays = frames(console.file.getvalue())
    assert stays.endswith("\n")
    assert stays == seen.strip("\n").rstrip(MASKED) + "\n"
    assert len(stays) > len("ab\n")
    assert all(sign in (MASKED, final) for sign, final in zip(stays[:-1], whole.text, strict=False))


def test_the_summary_counts_drafts_by_their_places():
    model = of_method(BlockDiffusionMethod(block_size=4, causal_clean=True, joint=True)).with_law("causal")
    settings = Settings(length=40, speculation=Speculation.of(2), stop_at_eos=False)
    printed, found = shown(pipe(), model, ["one", "two"], settings)
    samples = [each.sample for each in found]
    written, passes = (sum(getattr(each, name) for each in samples) for name in ("written", "evaluations"))
    drafted, right = (
        [sum(x) for x in zip(*(getattr(s, n) for s in samples), strict=True)] for n in ("drafted", "accepted")
    )
    shares = ", ".join(f"{a / b:.0%}" for a, b in zip(right, drafted, strict=True))
    assert f": {written / passes:.2f} tokens per pass; of {sum(drafted):,} drafts " in printed
    assert f" drafts {sum(right):,} were accepted, by position {shares}. Stopped: " in printed
