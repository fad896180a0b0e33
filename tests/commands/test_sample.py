"""`bd3lm sample`: every flag is a setting, and bad news is one line."""

import json
import re
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import pytest
import torch

from bd3lm.cli import main
from bd3lm.commands.sample import Sample
from bd3lm.commands.sample.unmasking import named_rule
from bd3lm.kinds import plain
from bd3lm.lm import LanguageModel, Settings
from bd3lm.methods import BlockDiffusionMethod
from bd3lm.sampling import Ancestral, EntropyBound, FirstHitting, MostConfident, Remasking, Speculation
from tests.commands import fails
from tests.lm import (
    BYTES,
    CONTEXT,
    D3PM,
    D3PM_UNIFORM,
    SEDD,
    SEDD_UNIFORM,
    SSD,
    baseline,
    of_bytes,
    of_method,
    tokens_of,
)
from tests.serving import small_model

pytestmark = pytest.mark.sweep(3)

BASELINE_FOLDERS = {
    "sedd": SEDD,
    "sedd_uniform": SEDD_UNIFORM,
    "d3pm": D3PM,
    "d3pm_uniform": D3PM_UNIFORM,
    "ssd": SSD,
}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return of_bytes(4, end_logit=2.0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, model) -> str:
    folder = tmp_path_factory.mktemp("models")
    model.save_pretrained(folder / "model")
    of_bytes(4, end_logit=2.0, tokenizer=None).save_pretrained(folder / "bare")
    of_bytes(CONTEXT).save_pretrained(folder / "one_block")
    of_bytes(None).save_pretrained(folder / "autoregressive")
    for name, method in BASELINE_FOLDERS.items():
        baseline(method).save_pretrained(folder / name)
    BYTES.save(folder / "tokenizer")
    return str(folder / "model")


def records(out: Path) -> list[dict[str, Any]]:
    """The lines of a file, which are in the order of the prompts."""
    lines = out.read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    found = [json.loads(line) for line in lines]
    assert [record["index"] for record in found] == list(range(len(found)))
    return found


def test_sample_prints_a_text_its_speed_and_its_cost(saved, model, capsys):
    assert main(["sample", saved, "hello", "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    (found,) = model.generate("hello")
    assert printed.out == f"{found.text}\n"  # the text and nothing else: it may be piped on
    written, evaluations = found.sample.written, found.sample.evaluations
    assert re.fullmatch(
        rf"{written} tokens written in [\d.]+ s: [\d.,]+ tokens/s\. {evaluations} evaluations of the "
        rf"network\. Stopped: 1 by {found.sample.stopped_by}\.",
        printed.err.removesuffix("\n"),
    )
    assert "\x1b" not in printed.out


def test_sample_without_a_prompt_starts_from_nothing(saved, model, tmp_path, capsys):
    out = tmp_path / "texts.jsonl"
    assert main(["sample", saved, "--out", str(out)]) == 0
    (record,) = records(out)
    assert (record["prompt"], record["given"]) == ("", 1)
    assert record["text"] == model.generate("")[0].text


def test_sample_writes_a_line_a_text(saved, model, tmp_path, capsys):
    out = tmp_path / "texts.jsonl"
    words = ["hello", "naïve ☂", "--count", "3", "--seed", "4", "--batch-size", "2", "--length", "20"]
    assert main(["sample", saved, *words, "--out", str(out)]) == 0
    printed, notes = capsys.readouterr()
    assert notes.endswith(f"wrote {out}\n")
    assert "wrote" not in printed
    prompts = ["hello"] * 3 + ["naïve ☂"] * 3
    settings = Settings(seed=4, batch_size=2, length=20)
    expected = model.generate(prompts, settings)
    assert len({each.text for each in expected}) == 6  # a seed of its own for each
    weights = sha256((Path(saved) / "model.safetensors").read_bytes()).hexdigest()
    for index, (record, found) in enumerate(zip(records(out), expected, strict=True)):
        assert (record["prompt"], record["text"], record["tokens"], record["seed"]) == (
            prompts[index],
            found.text,
            found.tokens,
            found.sample.seed,
        )
        assert (record["model"], record["weights"], record["dtype"]) == (saved, weights, "float64")
        assert f"text {index}: {len(found.tokens)} tokens, stopped by {found.sample.stopped_by} " in printed
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("", {}),
        ("--length 8", {"length": 8}),
        ("--length 40", {"length": 40}),
        ("--top-p 0.5", {"top_p": 0.5}),
        ("--top-p 0.5 --top-p-rule exclusive", {"top_p": 0.5, "top_p_rule": "exclusive"}),
        ("--temperature 0.7", {"temperature": 0.7}),
        ("--temperature 0", {"temperature": 0.0}),
        ("--top-k 3", {"top_k": 3}),
        ("--seed 5", {"seed": 5}),
        ("--batch-size 2", {"batch_size": 2}),
        ("--steps 5", {"unmasking": Ancestral(5)}),
        ("--steps 5 --remask 0.3", {"unmasking": Remasking(steps=5, eta=0.3)}),
        ("--steps 5 --remask 0", {"unmasking": Remasking(steps=5, eta=0.0)}),
        ("--tokens-per-pass 2", {"unmasking": FirstHitting(2)}),
        ("--confidence 0.4", {"unmasking": MostConfident(threshold=0.4)}),
        ("--entropy-bound 0", {"unmasking": EntropyBound(0.0)}),
        ("--no-stop-at-eos", {"stop_at_eos": False}),
        ("--stop a", {"stop": "a"}),
        ("--stop a --stop bc", {"stop": ("a", "bc")}),
        ("--entropy-floor 0.5 --length 300", {"entropy_floor": 0.5, "length": 300}),
        (
            "--entropy-floor 1.9 --entropy-window 8 --redraws 2",
            {"entropy_floor": 1.9, "entropy_window": 8, "redraws": 2},
        ),
        ("--no-cache", {"cache": False}),
    ],
)
def test_every_flag_is_a_setting(words, changes, saved, model, tmp_path, capsys):
    out = tmp_path / "texts.jsonl"
    assert main(["sample", saved, "ab", "--out", str(out), *words.split()]) == 0
    settings = Settings(**changes)
    (record,) = records(out)
    used = model.config.method.settled(settings)
    assert record["settings"] == {
        **asdict(used),
        "unmasking": plain(used.unmasking),
        "stop": list(used.stop),
    }
    assert record["settings"]["top_p"] == changes.get("top_p", 0.9)
    assert record["tokens"] == model.generate("ab", settings)[0].tokens


def test_sample_adds_to_the_logits_of_tokens(tmp_path, capsys):
    small_model().save_pretrained(tmp_path / "small")
    lm, out = LanguageModel.from_pretrained(tmp_path / "small", device="cpu"), tmp_path / "texts.jsonl"
    (plain,) = lm.generate("ab", length=40)
    often = max(set(plain.tokens[2:]), key=plain.tokens.count)
    command = [
        "sample",
        str(tmp_path / "small"),
        "ab",
        "--length",
        "40",
        "--out",
        str(out),
        "--device",
        "cpu",
    ]
    assert main([*command, "--logit-bias", f"{often}=-100", "--logit-bias", "120=2.5"]) == 0
    (record,) = records(out)
    assert record["tokens"] == lm.generate("ab", length=40, logit_bias={often: -100, 120: 2.5})[0].tokens
    assert often not in record["tokens"][2:]
    capsys.readouterr()
    for wrong in ("5", "5=", "a=1", "-1=1", "5=101", "5=nan", "5=1=2"):
        said = fails(capsys, *command, f"--logit-bias={wrong}")
        assert f"--logit-bias must be ID=NUMBER with a number from -100 to 100, got {wrong}" in said
    twice = fails(capsys, *command, "--logit-bias", "5=1", "--logit-bias", "5=2")
    assert "--logit-bias must name each token once, got 5 twice" in twice


def test_sample_stops_before_a_string(saved, model, tmp_path, capsys):
    (whole,) = model.generate("ab", length=40, stop_at_eos=False)
    out, string = tmp_path / "texts.jsonl", next(c for c in whole.completion[3:] if c.isprintable())
    words = ["sample", saved, "ab", "--length", "40", "--no-stop-at-eos", "--stop", string, "--out", str(out)]
    assert main(words) == 0
    (record,) = records(out)
    assert record["stopped_by"] == "string"
    assert record["text"] == "ab" + record["completion"] == "ab" + whole.completion.partition(string)[0]
    assert whole.tokens[: record["length"]] == record["tokens"]
    printed = capsys.readouterr()
    assert printed.out == f"{record['text']}\n"
    assert printed.err.splitlines()[0].endswith("Stopped: 1 by string.")
    assert "stop must hold strings, none of them empty, got ''" in fails(
        capsys, "sample", saved, "--stop", ""
    )


@pytest.mark.parametrize(
    ("words", "unmasking"),
    [
        ("--lean 2", FirstHitting(lean=2.0)),
        ("--lean 0", FirstHitting()),
        ("--lean 2 --tokens-per-pass 2", FirstHitting(2, lean=2.0)),
    ],
)
def test_lean_is_the_order_in_which_a_block_is_written(words, unmasking, saved, model, tmp_path, capsys):
    out = tmp_path / "texts.jsonl"
    assert main(["sample", saved, "ab", "--count", "3", "--out", str(out), *words.split()]) == 0
    found = records(out)
    assert [record["settings"]["unmasking"] for record in found] == [plain(unmasking)] * 3
    texts = [record["tokens"] for record in found]
    assert texts == tokens_of(model.generate(["ab"] * 3, unmasking=unmasking))
    assert (texts == tokens_of(model.generate(["ab"] * 3))) == (words == "--lean 0")


@pytest.mark.parametrize(
    ("words", "unmasking"),
    [
        ("", FirstHitting(lean=3.0)),
        ("--lean 0", FirstHitting()),
        ("--tokens-per-pass 2", FirstHitting(2, lean=3.0)),
        ("--lean 0 --steps 5", Ancestral(5)),
        ("--lean 0 --steps 5 --remask 0.3", Remasking(steps=5, eta=0.3)),
        ("--lean 0 --confidence 0.5", MostConfident(threshold=0.5)),
        ("--unmasking ancestral steps=5 --lean 0", Ancestral(5)),
    ],
)
def test_a_model_that_leans_writes_in_its_own_order(words, unmasking, model, tmp_path, capsys):
    model.with_lean(3.0).save_pretrained(tmp_path / "model")
    out = tmp_path / "texts.jsonl"
    assert main(["sample", str(tmp_path / "model"), "ab", "--out", str(out), *words.split()]) == 0
    (record,) = records(out)
    assert record["settings"]["unmasking"] == plain(unmasking)
    assert record["tokens"] == model.generate("ab", unmasking=unmasking)[0].tokens


@pytest.mark.parametrize(
    "words",
    ["--steps 5", "--steps 5 --remask 0.3", "--confidence 0.5", "--entropy-bound 1", "--unmasking ancestral"],
)
def test_a_rule_without_a_lean_is_not_for_a_model_that_leans(words, model, tmp_path, capsys):
    model.with_lean(3.0).save_pretrained(tmp_path / "model")
    error = fails(capsys, "sample", str(tmp_path / "model"), "ab", *words.split())
    assert "has no order that leans, and the model's lean is 3: use with_lean(0), or --lean 0" in error


def test_one_token_a_pass_is_what_an_autoregressive_model_writes(saved, tmp_path, capsys):
    folder, texts = str(Path(saved).with_name("autoregressive")), []
    for index, flags in enumerate(([], ["--tokens-per-pass", "1"])):
        out = tmp_path / f"{index}.jsonl"
        assert main(["sample", folder, "ab", "--out", str(out), *flags]) == 0
        texts.append(records(out)[0]["tokens"])
    assert texts[0] == texts[1]


def test_stride_is_for_a_model_of_one_block(saved, tmp_path, capsys):
    one_block, out = str(Path(saved).with_name("one_block")), tmp_path / "texts.jsonl"
    assert main(["sample", one_block, "ab", "--stride", "3", "--length", "30", "--out", str(out)]) == 0
    assert records(out)[0]["settings"]["stride"] == 3
    assert records(out)[0]["tokens"] == of_bytes(CONTEXT).generate("ab", stride=3, length=30)[0].tokens


@pytest.mark.parametrize("name", BASELINE_FOLDERS)
@pytest.mark.parametrize("words", ["", "--count 2 --seed 3 --top-p 0.7", "--length 9 --no-stop-at-eos"])
def test_baselines_are_sampled_from_in_their_own_steps(name, words, saved, tmp_path, capsys):
    method, out = BASELINE_FOLDERS[name], tmp_path / "texts.jsonl"
    folder = str(Path(saved).with_name(name))
    assert main(["sample", folder, "ab", "--steps", "4", "--out", str(out), *words.split()]) == 0
    changes: dict[str, Any] = {
        "": {},
        "--count 2 --seed 3 --top-p 0.7": {"seed": 3, "top_p": 0.7},
        "--length 9 --no-stop-at-eos": {"length": 9, "stop_at_eos": False},
    }[words]
    count = 2 if "--count" in words else 1
    expected = baseline(method).generate(["ab"] * count, steps=4, **changes)
    found = records(out)
    assert [record["tokens"] for record in found] == [each.tokens for each in expected]
    papers = {"score_entropy": 0.99, "simplex": 0.95}.get(method.kind, 0.9)
    for record in found:
        assert record["settings"]["steps"] == 4
        assert record["settings"]["top_p"] == changes.get("top_p", papers)
        assert record["settings"]["unmasking"] is None
    printed = capsys.readouterr()
    assert printed.out.count("text ") == (count if count > 1 else 0)
    assert len(printed.err.splitlines()) == 2


def test_d3pm_takes_as_many_steps_as_it_was_trained_for(saved, tmp_path, capsys):
    for name in ("d3pm", "d3pm_uniform"):
        out = tmp_path / f"{name}.jsonl"
        assert main(["sample", str(Path(saved).with_name(name)), "ab", "--out", str(out)]) == 0
        (record,) = records(out)
        assert record["settings"]["steps"] is None
        assert record["tokens"] == baseline(BASELINE_FOLDERS[name]).generate("ab", steps=6)[0].tokens


@pytest.mark.parametrize("projection", ["sampling", "greedy", "multi_hot"])
def test_projections_are_for_ssd_lm(projection, saved, tmp_path, capsys):
    out, folder = tmp_path / "texts.jsonl", str(Path(saved).with_name("ssd"))
    words = ["--projection", projection, "--steps", "6", "--no-cache", "--length", "20"]
    assert main(["sample", folder, "ab", "--out", str(out), *words]) == 0
    (found,) = baseline(SSD).generate("ab", projection=projection, steps=6, cache=False, length=20)
    assert records(out)[0]["tokens"] == found.tokens
    assert records(out)[0]["settings"]["projection"] == projection


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_precision_is_chosen_and_recorded(dtype, saved, tmp_path, capsys):
    out = tmp_path / "texts.jsonl"
    assert main(["sample", saved, "ab", "--dtype", dtype, "--out", str(out)]) == 0
    assert records(out)[0]["dtype"] == dtype


def test_a_tokenizer_for_a_model_saved_without_one(saved, model, tmp_path, capsys):
    bare, tokenizer = (str(Path(saved).with_name(name)) for name in ("bare", "tokenizer"))
    out = tmp_path / "texts.jsonl"
    assert "saved without a tokenizer; name one with --tokenizer" in fails(capsys, "sample", bare, "ab")
    assert main(["sample", bare, "ab", "--tokenizer", tokenizer, "--out", str(out)]) == 0
    assert records(out)[0]["text"] == model.generate("ab")[0].text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sample NOWHERE ab", "nowhere' here. It must be an existing folder, a .ckpt or .gguf file"),
        ("sample MODEL ab --tokenizer NOWHERE", "there is no tokenizer folder"),
        ("sample BARE ab", "the model was saved without a tokenizer; name one with --tokenizer"),
        (
            "sample MODEL a-prompt-longer-than-the-context",
            "prompt 0: length must be at least the prompt's 33 tokens, including the start token, got 16",
        ),
        (
            "sample MODEL a abcdef --length 5",
            "prompt 1: length must be at least the prompt's 7 tokens, including the start token, got 5",
        ),
        ("sample MODEL ab --length 0", "--length must be at least 1, got 0"),
        ("sample MODEL ab --count 0", "--count must be at least 1, got 0"),
        ("sample MODEL ab --batch-size 0", "must be a whole number, at least 1, got 0"),
        ("sample MODEL ab --top-p 2", "must lie in (0, 1], got 2.0"),
        ("sample MODEL ab --top-p 0", "must lie in (0, 1], got 0.0"),
        ("sample MODEL ab --temperature -1", "temperature must lie in [0.001, 1000], or be 0, which"),
        ("sample MODEL ab --top-k 0", "--top-k must be at least 1, got 0"),
        ("sample MODEL ab --steps 0", "steps must be at least 1, got 0"),
        (
            "sample MODEL ab --lean 2 --steps 5",
            "--lean needs an order that is drawn, and --steps has its own",
        ),
        (
            "sample MODEL ab --lean 2 --steps 5 --remask 0.5",
            "--lean needs an order that is drawn, and --steps has its own",
        ),
        (
            "sample MODEL ab --lean 2 --confidence 0.5",
            "--confidence has its own order; only --lean 0 may be given with it",
        ),
        ("sample MODEL ab --lean 2 --entropy-bound 1", "and --entropy-bound has its own"),
        ("sample MODEL ab --lean -1", "lean must be a number from 0 to 1e6, got -1.0"),
        (
            "sample AUTOREGRESSIVE ab --lean 2",
            "lean is for block diffusion, whose order can be chosen, got a",
        ),
        ("sample SEDD ab --lean 2", "lean is for block diffusion, whose order can be chosen, got score_ent"),
        ("sample MODEL ab --remask 0.5", "--remask needs --steps"),
        ("sample MODEL ab --steps 5 --remask 1.5", "must lie in [0, 1], got 1.5"),
        ("sample MODEL ab --remask 0.5 --confidence 0.5", "--remask needs --steps"),
        ("sample MODEL ab --steps 5 --confidence 0.5", "may be given, got --steps and --confidence"),
        (
            "sample MODEL ab --tokens-per-pass 2 --entropy-bound 1",
            "got --tokens-per-pass and --entropy-bound",
        ),
        ("sample MODEL ab --unmasking ancestral --steps 5", "given, got --steps and --unmasking"),
        ("sample MODEL ab --unmasking ancestral --remask 0.5", "--remask needs --steps"),
        ("sample MODEL ab --unmasking ancestrall", "got 'ancestrall', did you mean 'ancestral'?"),
        ("sample MODEL ab --lean 2 --unmasking entropy_bound bound=1", "and --unmasking has its own"),
        ("sample MODEL ab --confidence 2", "must lie in (0, 1], got 2.0"),
        ("sample MODEL ab --entropy-bound -1", "must not be negative, got -1.0"),
        ("sample MODEL ab --redraws 2", "redraws needs an entropy_floor, got 2 with none"),
        ("sample MODEL ab --entropy-floor -1", "must be finite and not negative, got -1.0"),
        (
            "sample MODEL ab --entropy-floor 9 --length 300",
            "entropy_floor must be at most 5.55, the largest entropy that 256 tokens",
        ),
        (
            "sample MODEL ab --stride 4",
            "stride must be left at its default, got 4: this model writes blocks of 4",
        ),
        ("sample ONE_BLOCK ab --no-cache", "a network of one block has nothing to cache"),
        ("sample ONE_BLOCK ab --stride 17", "stride must lie in 1..16, the context, got 17"),
        ("sample AUTOREGRESSIVE ab --steps 4", "an autoregressive model writes token by token"),
        ("sample AUTOREGRESSIVE ab --tokens-per-pass 2", "an autoregressive model writes token by token"),
        (
            "sample MODEL ab --projection greedy",
            "projection must be left at its default, got greedy: only SSD-LM has projections",
        ),
        ("sample MODEL ab --entropy-floor 4", "prompt 0: entropy_window must be at most the length 16, or"),
        ("sample MODEL ab --device nonsense", "device must be cpu, cuda or cuda:N, got 'nonsense'"),
        ("sample SEDD ab --steps 0", "--steps must be at least 1, got 0"),
        (
            "sample SEDD ab --length 24 --steps 3",
            "length must be at most 16, the network's whole context, got 24",
        ),
        (
            "sample SEDD ab --no-cache",
            "cache must be left at its default, got False: SEDD writes a whole context",
        ),
        ("sample SEDD ab --confidence 0.5", "SEDD writes a whole context"),
        ("sample D3PM ab --remask 0.5 --steps 4", "D3PM takes its own steps"),
        ("sample D3PM ab --tokens-per-pass 2", "D3PM takes its own steps"),
        (
            "sample SSD ab --top-k 3",
            "top_k must be left at its default, got 3: SSD-LM draws with its projection",
        ),
        ("sample SSD ab --temperature 0.5", "SSD-LM draws with its projection"),
        ("sample SSD ab --top-p-rule exclusive", "SSD-LM draws with its projection"),
        pytest.param(
            "sample MODEL ab --device cuda",
            "device must be cpu, because torch finds no GPU it can use, got 'cuda'",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_bad_news_is_one_line_and_nothing_is_written(words, said, saved, tmp_path, capsys):
    folder = Path(saved).parent
    places = {
        name.upper(): str(folder / name)
        for name in ("model", "bare", "one_block", "autoregressive", "sedd", "d3pm", "ssd", "nowhere")
    }
    out = tmp_path / "texts.jsonl"
    given = [places.get(word, word) for word in words.split()]
    assert said in fails(capsys, *given, "--out", str(out))
    assert list(tmp_path.iterdir()) == []


def test_where_to_write_is_checked_before_a_model_is_loaded(tmp_path, capsys):
    """Loading may take minutes; here there is no model at all."""
    (tmp_path / "there").write_text("mine")
    for out, said in (("there", "must be a new file, and "), ("no/t", "must be in an existing folder, and ")):
        assert said in fails(capsys, "sample", str(tmp_path / "no-model"), "--out", str(tmp_path / out))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("--speculation off", Speculation(drafts=0)),
        ("--speculation 2", Speculation(drafts=2)),
        ("--speculate auto", Speculation()),
        ("--candidates 2", Speculation(candidates=2)),
        (
            "--speculation 2 --scheme rejection --candidates 3",
            Speculation(drafts=2, scheme="rejection", candidates=3),
        ),
    ],
)
def test_speculation_is_asked_for_by_flags(words, asked, tmp_path, capsys):
    joint = of_method(BlockDiffusionMethod(block_size=4, causal_clean=True, joint=True, law="causal"))
    folder, out = tmp_path / "joint", tmp_path / "texts.jsonl"
    joint.save_pretrained(folder)
    assert main(["sample", str(folder), "ab", "--out", str(out), *words.split()]) == 0
    (record,) = records(out)
    assert record["settings"]["speculation"] == asdict(asked)
    (found,) = joint.generate("ab", speculation=asked)
    assert record["tokens"] == found.tokens
    if asked.drafts is not None:
        assert (record["drafted"], record["accepted"]) == (
            list(found.sample.drafted),
            list(found.sample.accepted),
        )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"top_p": 2.0}, r"--top-p must lie in \(0, 1\], got 2\.0"),
        ({"batch_size": 0}, "--batch-size must be a whole number, at least 1, got 0"),
        ({"confidence": 2.0}, r"--confidence must lie in \(0, 1\], got 2\.0"),
        ({"entropy_bound": -1.0}, r"--entropy-bound must not be negative, got -1\.0"),
        ({"entropy_bound": float("nan")}, "--entropy-bound must not be negative, got nan"),
        ({"remask": 3.0, "steps": 5}, r"--remask must lie in \[0, 1\], got 3\.0"),
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"speculation": "-1"}, "--speculation must be auto, off or a number of drafts, got '-1'"),
        ({"candidates": 0}, "--candidates must be at least 1, got 0"),
        ({"scheme": "rejection"}, "--scheme rejection needs --speculation N: .* got none"),
        (
            {"scheme": "rejection", "speculation": "auto"},
            "--scheme rejection needs --speculation N: .* got auto",
        ),
        ({"speculation": "off", "candidates": 2}, "--candidates 2 needs --speculation auto or N, got off"),
        ({"tokens_per_pass": 0}, "--tokens-per-pass must be at least 1, got 0"),
        ({"length": 10**12}, "length must be at most 134,217,728, .* got 1,000,000,000,000"),
    ],
    ids=str,
)
def test_flags_are_named_as_they_are_typed(flags, said):
    with pytest.raises(ValueError, match=f"{said}$"):
        Sample(model="box", device="cpu", **flags).run()


def test_a_film_of_one_text_is_written_beside_it(tmp_path, capsys):
    film, words = tmp_path / "film.svg", ["sample", "box", "The city", "--length", "12", "--seed", "1"]
    assert main([*words, "--film", str(film)]) == 0
    printed = capsys.readouterr()
    assert f"wrote {film}" in " ".join(printed.err.split())
    title = ElementTree.fromstring(film.read_text("utf-8")).find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert title.text == printed.out.rstrip("\n")
    for asked, message in (
        (["--film", str(film)], f"--film must be a new file, and {film} exists"),
        (["--film", str(tmp_path / "film.gif")], "--film must be a file named .svg"),
        (["--film", str(tmp_path / "a.svg"), "--out", str(tmp_path / "a.svg")], "must be different files"),
        (["--count", "2", "--film", str(tmp_path / "two.svg")], "--film shows one text, got 2"),
    ):
        assert main([*words, *asked]) == 1
        assert message in capsys.readouterr().err


# --- rules by their kinds ---


@dataclass(frozen=True)
class Steps:
    steps: int
    eta: float = 0.5
    schedule: Literal["linear", "cosine"] = "linear"


@dataclass(frozen=True)
class Plain:
    pass


RULES = {"steps": Steps, "plain": Plain}


def test_a_rule_is_named_with_its_fields():
    assert named_rule(["plain"], RULES) == Plain()
    assert named_rule(["steps", "steps=3"], RULES) == Steps(3)
    words = ["steps", "steps=3", "eta=1e-3", "schedule=cosine"]
    assert named_rule(words, RULES) == Steps(3, 0.001, "cosine")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("stesp", "--unmasking must name one of steps, plain, got 'stesp', did you mean 'steps'?"),
        ("steps", "--unmasking steps has a problem: steps: must be given, but is missing"),
        ("steps steps=x", "steps: input should be a valid integer, .* got 'x'"),
        ("steps steps=010", "steps: must be a decimal number, got '010'"),
        ("steps steps=3 eat=1", "eat: unknown key, did you mean 'eta'\\? allowed are steps, eta, schedule"),
        ("steps steps=3 steps=4", "--unmasking steps: steps is given twice"),
        (
            "plain box",
            r"takes KIND \[field=value ...\], got 'box' after plain: put the model and prompts before",
        ),
    ],
)
def test_a_rule_that_is_none_is_refused(words, said):
    with pytest.raises(ValueError, match=said):
        named_rule(words.split(), RULES)
