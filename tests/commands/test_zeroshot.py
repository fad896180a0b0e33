"""`bd3lm zeroshot`: a table of models against corpora, and what one that fails costs the others."""

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bd3lm.cli import main
from bd3lm.commands.shared.subjects import Subject
from bd3lm.commands.zeroshot import ZeroShot, report_zero_shot
from bd3lm.data import train_bpe
from bd3lm.data.tokenizers import SMALLEST_BPE
from bd3lm.reports import perplexity_text
from tests.commands import documents, saved
from tests.data_room.documents import random_texts
from tests.lm import BYTES, of_bytes


def test_zero_shot_is_a_table_of_models_against_corpora(tmp_path, capsys):
    for name, seed in (("one", 1), ("two", 2)):
        saved(of_bytes(2, seed=seed), tmp_path / name)
    for name, number in (("news", 8), ("novels", 12)):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(random_texts(number)), encoding="utf-8")
    files = [str(tmp_path / f"{name}.txt") for name in ("news", "novels")]
    out = tmp_path / "records.json"
    models = [str(tmp_path / "one"), str(tmp_path / "two")]
    assert main(["zeroshot", *models, "--data", *files, "--out", str(out), "--device", "cpu"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    records = json.loads(out.read_text())
    assert [(each["model"], each["settings"]["data"]) for each in records] == [
        (model, file) for file in files for model in models
    ]
    assert all(not each["settings"]["eos_between_documents"] for each in records)
    assert "news" in printed
    assert all(perplexity_text(each["result"]["figures"][0]) in printed for each in records)


def test_a_table_of_corpora_names_the_lean(tmp_path, capsys):
    models = [
        str(saved(model, tmp_path / name))
        for name, model in {"ar": of_bytes(None), "two": of_bytes(2)}.items()
    ]
    words = ["zeroshot", *models, "--data", str(documents(tmp_path)), "--sequences", "4", "--device", "cpu"]
    for flags, leans in (([], False), (["--lean", "2"], True)):
        assert main([*words, *flags]) == 0
        printed = capsys.readouterr().out
        assert ("exact, lean 2" in printed) == ("lean: docs/sampling.md" in printed) == leans


def test_a_table_says_that_sequences_are_framed_and_cuts_no_name_of_an_estimator(tmp_path):
    folder, text = str(saved(of_bytes(2), tmp_path / "model")), str(documents(tmp_path))
    for framed in (False, True):
        screen = Console(file=io.StringIO(), width=60)
        flags = ZeroShot(estimator="paper", data=(text,), sequences=4, bos_eos=framed, models=(folder,))
        report_zero_shot(flags.subjects(), flags, console=screen)
        names, estimators = (
            " ".join(cell.strip() for cell in cells if cell.strip())
            for cells in zip(
                *(row.split("│")[1:3] for row in screen.file.getvalue().splitlines() if "│" in row),
                strict=True,
            )
        )
        assert ("in sequences with BOS and EOS" in names) == framed
        assert "nelbo, the paper's" in estimators
        assert "…" not in screen.file.getvalue()


def test_bits_per_byte_stand_beside_perplexities_and_different_tokenizers_are_named(tmp_path, capsys):
    """By hand: of a text of 256 characters ☂ a model by bytes that knows nothing pays 8 bits a byte or a
    little more, whatever its context; one whose token is the whole character pays a third of that."""
    text = tmp_path / "text.txt"
    text.write_text("☂" * 256, encoding="utf-8")
    merged = train_bpe(["☂" * 40] * 3, SMALLEST_BPE + 2)
    assert len(merged.encode("☂" * 4)) == 4
    models = {"bytes": BYTES, "same": BYTES, "merged": merged}
    for name, tokenizer in models.items():
        model = of_bytes(None, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
        with torch.no_grad():
            model.network.output.weight.zero_()
            model.network.output.bias.zero_()
        saved(model, tmp_path / name)
    words = ["--data", str(text), "--device", "cpu", "--out"]
    out = tmp_path / "records.json"
    assert main(["zeroshot", str(tmp_path / "bytes"), str(tmp_path / "merged"), *words, str(out)]) == 0
    printed = capsys.readouterr().out
    assert "Tokenizers differ, so perplexities per token cannot be compared" in printed
    by_bytes, by_characters = json.loads(out.read_text())
    assert by_bytes["settings"]["tokenizer"] != by_characters["settings"]["tokenizer"]
    # 768 tokens are 48 sequences of 16, and 256 are 16 of them; the first token of each is given.
    scored = (by_bytes["result"], 48 * 15, 48 * 15, 257), (by_characters["result"], 16 * 15, 16 * 15 * 3, 259)
    for result, tokens, size, choices in scored:
        assert (result["tokens"], result["bytes"]) == (tokens, size)
        (figure,) = result["figures"]
        bits = math.log2(choices) * tokens / size
        assert figure["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
        assert f"{bits:.2f} bits/byte" in printed
        assert f"{size:,} bytes" in printed
    assert main(["zeroshot", str(tmp_path / "bytes"), str(tmp_path / "same"), *words[:-1]]) == 0
    printed = capsys.readouterr().out
    assert "bits/byte" in printed
    assert "Tokenizers differ" not in printed
    assert "unequal parts" not in printed
    few = ["--sequences", "4", *words[:-1]]  # of 15 bytes, and of 45
    assert main(["zeroshot", str(tmp_path / "bytes"), str(tmp_path / "merged"), *few]) == 0
    assert "The models scored unequal parts of text.txt, from 60 to 180 bytes" in capsys.readouterr().out


def test_one_bad_corpus_does_not_lose_the_others(tmp_path, capsys):
    folder = saved(of_bytes(2), tmp_path / "model")
    short = tmp_path / "short.txt"
    short.write_text("too short")
    good = documents(tmp_path)
    assert main(["zeroshot", str(folder), "--data", str(short), str(good)]) == 1
    printed, error = capsys.readouterr()
    assert error == "bd3lm: 1 of 2 figures could not be measured\n"
    assert "  scored" in printed
    assert f"– {folder} on {short}: {short} must hold at least one sequence of 16 tokens" in printed


def test_a_model_that_a_corpus_is_too_short_for_does_not_lose_the_figures_of_others(tmp_path, capsys):
    small, large = (
        str(saved(of_bytes(2, context=context), tmp_path / name))
        for name, context in (("small", 8), ("large", 64))
    )
    short, out = tmp_path / "short.txt", tmp_path / "records.json"
    short.write_text("twenty bytes of text")
    words = ["--data", str(short), str(documents(tmp_path)), "--out", str(out), "--device", "cpu"]
    assert main(["zeroshot", small, large, *words]) == 1
    printed = capsys.readouterr().out
    records = json.loads(out.read_text())
    assert [(each["model"], Path(each["settings"]["data"]).stem) for each in records] == [
        (small, "short"),
        (small, "text"),
        (large, "text"),
    ]
    assert all(perplexity_text(each["result"]["figures"][0]) in printed for each in records)
    (line,) = (line for line in printed.splitlines() if line.startswith("– "))
    assert line.startswith(f"– {large} on {short}: {short} must hold at least one sequence of 64 tokens")


def test_zero_shot_without_a_figure_fails_with_each_reason_once(tmp_path, capsys):
    models = [
        str(saved(of_bytes(2, context=context), tmp_path / name))
        for name, context in (("one", 64), ("two", 64), ("three", 32))
    ]
    short = tmp_path / "short.txt"
    short.write_text("twenty bytes of text")
    assert main(["zeroshot", *models, "--data", str(short), "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"bd3lm: {models[0]}, {models[1]} on {short}: ")
    assert error.count("must hold at least one sequence of") == 2
    assert main(["zeroshot", *models, "--data", str(short), "--batch-size", "0", "--device", "cpu"]) == 1
    assert capsys.readouterr().err == "bd3lm: --batch-size must be at least 1, got 0\n"


def test_corpora_of_one_name_are_told_apart(tmp_path):
    subject = Subject.open(saved(of_bytes(2), tmp_path / "model"), device="cpu")
    files = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        files.append(str(documents(tmp_path / place)))
    console = Console(file=io.StringIO(), width=400)
    report_zero_shot([subject], ZeroShot(data=tuple(files)), console=console)
    assert all(file in console.file.getvalue() for file in files)
