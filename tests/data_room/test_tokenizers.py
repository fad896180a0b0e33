"""Tokenizers: lossless, always with a mask, no special tokens from text, the same fingerprint everywhere."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from bd3lm.data import Tokenizer, byte_tokenizer, load_tokenizer, saved_tokenizer, train_bpe
from bd3lm.io.places import BOX_FOLDER
from tests.data_room.documents import random_texts, run_python

TEXTS = random_texts(80)
BYTES = byte_tokenizer()
BPE = train_bpe(TEXTS, 300)

any_text = st.text(st.characters(exclude_categories=["Cs"]))  # all except lone surrogates, which are not text


@given(any_text)
@example("<|endoftext|><|mask|>")
@example("\r\n \t \x00 \ufeff e\u0301 \u200d 👩‍👩‍👧")
@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
def test_every_text_comes_back_unchanged(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special=False) == text
    assert not {tokenizer.mask_id, tokenizer.eos_id} & set(ids)
    assert tokenizer.encode_batch([text, "x", text]) == [ids, tokenizer.encode("x"), ids]


@given(any_text)
def test_bytes_are_their_own_ids(text: str) -> None:
    assert BYTES.encode(text) == list(text.encode())


@given(any_text)
@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
def test_the_bytes_of_tokens_add_up_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    found = [tokenizer.token_bytes(token) for token in tokenizer.encode(text)]
    assert b"".join(each or b"" for each in found) == text.encode()
    assert None not in found
    assert tokenizer.token_bytes(tokenizer.mask_id) == b""


def test_other_tokenizers_give_the_bytes_of_decoded_tokens() -> None:
    backend = Backend(models.WordLevel({"[UNK]": 0, "a": 1, "été": 2, "\ufffd": 3}, unk_token="[UNK]"))
    tokenizer = Tokenizer(backend.to_str(), mask_id=4, eos_id=None, bos_id=None)
    assert [tokenizer.token_bytes(token) for token in (1, 2, 3)] == [b"a", "été".encode(), None]


def test_the_byte_tokenizer_has_256_bytes_an_end_and_a_mask() -> None:
    assert (BYTES.vocab_size, BYTES.eos_id, BYTES.bos_id, BYTES.mask_id) == (258, 256, 256, 257)
    assert load_tokenizer("bytes") == BYTES


def test_the_fingerprint_of_bytes_never_changes() -> None:
    """Shards and checkpoints record it, so a change of the library must not change it."""
    assert BYTES.fingerprint == "67620c83afe21b12bcbd976615b61645acb132e31f739dd5eeb31ee58e836c7d"


def test_a_trained_tokenizer_has_its_specials_last() -> None:
    assert BPE.vocab_size == 300
    assert (BPE.eos_id, BPE.bos_id, BPE.mask_id) == (298, 298, 299)
    assert BPE.decode([BPE.eos_id, BPE.mask_id], skip_special=False) == "<|endoftext|><|mask|>"
    assert BPE.decode([BPE.eos_id, BPE.mask_id]) == ""


def test_training_merges_what_is_frequent_and_stops_when_nothing_is() -> None:
    tokenizer = train_bpe(["aaaa bbbb " * 20], 1000)
    assert 258 < tokenizer.vocab_size < 270
    assert len(tokenizer.encode("aaaa bbbb")) == 2


def test_training_is_deterministic_across_processes() -> None:
    """The library counts in hash maps with an order that changes with every process."""
    program = (
        "from tests.data_room.documents import random_texts\n"
        "from bd3lm.data import train_bpe\n"
        "print(train_bpe(random_texts(80), 300).fingerprint)"
    )
    for _ in range(2):
        assert run_python(program).strip() == BPE.fingerprint


@pytest.mark.parametrize(
    ("vocab_size", "min_frequency", "argument"), [(257, 2, "vocab_size"), (300, 0, "min_frequency")]
)
def test_training_refuses(vocab_size: int, min_frequency: int, argument: str) -> None:
    with pytest.raises(ValueError, match=f"^{argument} must be at least"):
        train_bpe(TEXTS, vocab_size, min_frequency=min_frequency)


# --- other people's tokenizers ----------------------------------------------------------------------


def gpt_like(folder: Path, config: dict[str, Any] | None = None) -> Backend:
    """A byte-level BPE with <|endoftext|> as the last id, like GPT-2's."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=299, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_special_tokens(["<|endoftext|>"])
    return written(backend, folder, config)


def bert_like(folder: Path, config: dict[str, Any] | None = None) -> Backend:
    """A lower-casing WordPiece that frames, truncates and pads what it encodes."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.enable_truncation(max_length=5)
    backend.enable_padding(length=5)
    return written(backend, folder, config)


def written(backend: Backend, folder: Path, config: dict[str, Any] | None) -> Backend:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return backend


GPT_CONFIG = {"eos_token": "<|endoftext|>", "bos_token": {"content": "<|endoftext|>", "special": True}}
BERT_CONFIG = {"sep_token": "[SEP]", "cls_token": "[CLS]", "mask_token": "[MASK]", "pad_token": "[PAD]"}


@pytest.mark.parametrize(
    "config", [None, {"model_max_length": 1024}, GPT_CONFIG], ids=["none", "bare", "full"]
)
def test_a_mask_is_appended_where_there_is_none(tmp_path: Path, config: dict[str, Any] | None) -> None:
    backend = gpt_like(tmp_path, config)
    tokenizer = load_tokenizer(tmp_path)
    assert backend.get_vocab_size() == 300
    assert (tokenizer.vocab_size, tokenizer.mask_id) == (301, 300)
    assert tokenizer.eos_id == tokenizer.bos_id == 299
    for text in TEXTS:
        assert tokenizer.encode(text) == backend.encode(text).ids


@pytest.mark.parametrize("config", [None, {"do_lower_case": True}, BERT_CONFIG], ids=["none", "bare", "full"])
def test_a_mask_is_found_where_there_is_one_and_documents_are_not_framed(
    tmp_path: Path, config: dict[str, Any] | None
) -> None:
    backend = bert_like(tmp_path, config)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id) == (2, 3, 4)
    backend.no_truncation()
    backend.no_padding()
    text = " ".join(TEXTS)
    assert len(tokenizer.encode(text)) > 5
    assert [2, *tokenizer.encode(text), 3] == backend.encode(text).ids


def test_text_that_looks_special_is_text(tmp_path: Path) -> None:
    bert_like(tmp_path)
    ids = load_tokenizer(tmp_path).encode("[MASK] [SEP] [CLS]")
    assert not {2, 3, 4} & set(ids)


def test_specials_may_be_absent(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    written(backend, tmp_path, None)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.mask_id, tokenizer.vocab_size) == (None, None, 2, 3)
    tokenizer.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy") == tokenizer


@pytest.mark.parametrize("make", [gpt_like, bert_like])
def test_saving_and_loading_keeps_value_and_fingerprint(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "theirs")
    tokenizer = load_tokenizer(tmp_path / "theirs")
    tokenizer.save(tmp_path / "ours")
    again = load_tokenizer(str(tmp_path / "ours"))
    assert again == tokenizer
    assert again.fingerprint == tokenizer.fingerprint
    again.save(tmp_path / "ours")
    assert load_tokenizer(tmp_path / "ours") == tokenizer


def test_fingerprints_tell_tokenizers_apart(tmp_path: Path) -> None:
    gpt_like(tmp_path / "gpt")
    gpt = load_tokenizer(tmp_path / "gpt")
    others = [BYTES, BPE, gpt, train_bpe(TEXTS, 299), Tokenizer(gpt.spec, gpt.mask_id, gpt.eos_id, None)]
    assert len({t.fingerprint for t in others}) == len(others)


def test_the_order_of_keys_in_the_file_does_not_matter(tmp_path: Path) -> None:
    gpt_like(tmp_path)
    before = load_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    spec = json.loads(file.read_text())
    file.write_text(json.dumps(dict(reversed(spec.items())), indent=3))
    assert load_tokenizer(tmp_path).fingerprint == before.fingerprint


def test_a_tokenizer_travels_to_another_process_as_its_value() -> None:
    BPE.encode("the library's object exists now")
    travelled = pickle.loads(pickle.dumps(BPE))
    assert travelled == BPE
    assert travelled.encode("the <|mask|> of") == BPE.encode("the <|mask|> of")
    assert "spec" not in repr(BPE)


def test_decoding_takes_lists_arrays_and_tensors() -> None:
    ids = BPE.encode("the mask of noise")
    for form in (ids, tuple(ids), np.array(ids), np.array(ids, np.uint16), torch.tensor(ids)):
        assert BPE.decode(form) == "the mask of noise"


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    BPE.save("~/tok")
    assert list(tmp_path.iterdir()) == [tmp_path / "tok"]
    assert load_tokenizer("~/tok") == load_tokenizer(Path("~/tok")) == saved_tokenizer("~/tok") == BPE


# --- errors -----------------------------------------------------------------------------------------


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no tokenizer.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "source", [Path("nowhere"), "./nowhere", "~/nowhere", "/no/where", "a/b/c", "a b", "x/tok.json"]
)
def test_a_path_is_never_asked_of_the_hub(source: str | Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no tokenizer folder"):
        load_tokenizer(source)


@pytest.mark.parametrize("text", ["", "not json", "{}", '{"model": {"type": "BPE"}}', "[]"])
def test_a_damaged_file_is_one_clear_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match="cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b"[]", r"tokenizer_config\.json of .* must hold a JSON object, got \[\]"),
        (b"{", r"tokenizer_config\.json of .* must be valid JSON"),
        (b"[" * 100_000, r"tokenizer_config\.json of .* must be valid JSON"),
        (b"\xff", r"tokenizer_config\.json must be UTF-8 text"),
        (
            b'{"eos_token": {"x": 1}}',
            r"eos_token in tokenizer_config\.json of .* must be a token, .* got {'x'",
        ),
        (
            b'{"mask_token": ["a"]}',
            r"mask_token in tokenizer_config\.json of .* must be a token, .* got \['a'",
        ),
    ],
    ids=["a list", "torn", "too deep", "bytes", "no content", "a list of tokens"],
)
def test_a_damaged_configuration_is_one_clear_line(tmp_path: Path, config: bytes, message: str) -> None:
    gpt_like(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(config)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


def test_a_file_of_other_bytes_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match=r"tokenizer\.json must be UTF-8 text"):
        load_tokenizer(tmp_path)


def test_a_special_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    gpt_like(tmp_path, {"eos_token": "<end>"})
    with pytest.raises(ValueError, match="names '<end>' as eos_token, but its vocabulary lacks it"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_with_gaps_gets_no_mask(tmp_path: Path) -> None:
    written(Backend(models.WordLevel({"a": 0, "b": 7}, unk_token="a")), tmp_path, None)
    with pytest.raises(ValueError, match="has gaps in its ids"):
        load_tokenizer(tmp_path)


# --- the hub, as far as it goes without one ---------------------------------------------------------


@pytest.fixture(autouse=True)
def _hub_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bd3lm.data.tokenizer_files.unresolved_hub", lambda: None)


def test_a_hub_name_fetches_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt_like(tmp_path, GPT_CONFIG)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    asked = []

    def download(name: str, file: str) -> str:
        asked.append((name, file))
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert load_tokenizer("someone/gpt") == load_tokenizer(tmp_path)
    names = ("tokenizer.json", "tokenizer_config.json", "config.json")
    assert asked == [("someone/gpt", name) for name in names]


def test_a_hub_tokenizer_may_lack_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import EntryNotFoundError

    gpt_like(tmp_path)

    def download(_: str, file: str) -> str:
        if file != "tokenizer.json":
            raise EntryNotFoundError("404")
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert load_tokenizer("gpt") == load_tokenizer(tmp_path)


def test_without_a_network_the_error_names_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(*_: str) -> str:
        raise LocalEntryNotFoundError("cannot reach the hub\nand many more lines")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(
        FileNotFoundError, match=r"tokenizer 'gpt2' is not a local folder.*: cannot reach the hub$"
    ):
        load_tokenizer("gpt2")


def test_a_tokenizer_in_the_cache_is_used_where_the_hub_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt_like(tmp_path, GPT_CONFIG)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')

    def download(_: str, file: str, *, local_files_only: bool) -> str:
        assert local_files_only
        return str(tmp_path / file)

    monkeypatch.setattr("bd3lm.data.tokenizer_files.unresolved_hub", lambda: "huggingface.co")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert load_tokenizer("someone/gpt") == load_tokenizer(tmp_path)


def test_the_tokenizer_of_a_run_is_that_of_its_model(tmp_path: Path) -> None:
    bytes_, words = byte_tokenizer(), train_bpe(["a cat sat", "a dog sat"] * 9, 300)
    words.save(tmp_path / "run" / "model")
    assert load_tokenizer(tmp_path / "run") == words
    for stage in ("ar", "block"):
        words.save(tmp_path / "stages" / stage / "model")
    assert load_tokenizer(tmp_path / "stages") == words
    bytes_.save(tmp_path / "stages" / "other" / "model")
    with pytest.raises(ValueError, match=r"holds models with different tokenizers: name one of .*ar/model, "):
        load_tokenizer(tmp_path / "stages")


def test_the_tokenizer_in_the_box_is_called_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer("box") == load_tokenizer(BOX_FOLDER)
    (tmp_path / "box").mkdir()
    with pytest.raises(ValueError, match=r"tokenizer 'box' is the model .* use \./box for the local one"):
        load_tokenizer("box")
