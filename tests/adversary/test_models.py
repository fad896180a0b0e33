"""Model folders by somebody who means harm: each is one line, in little time and little memory, or loads.

The folders are tiny, so whatever takes long or much memory takes it because the folder says so.
"""

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import bd3lm
from bd3lm.cli.errors import EXPECTED
from bd3lm.data import load_tokenizer
from bd3lm.data.guarded import check_size, is_plain, patterns
from bd3lm.interop import LightningFacts, save_reference
from bd3lm.interop.reference import to_reference_state
from bd3lm.methods import Method
from bd3lm.models import KVCache, Transformer, TransformerConfig
from bd3lm.models import devices as devices_module
from tests.adversary.confined import REFUSED, confined, outcome
from tests.interop.small import small_model
from tests.lm import of_bytes

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
CASES_TOGETHER = 50  # of a fuzzed file, in one process
EMBEDDING = "embedding.weight"

# Whatever JSON can hold, and numbers at the edges of what sizes may be.
ODD: tuple[Any, ...] = (
    *(0, -1, 1, 2, 7, 16, 257, 258, 259, 2**24, 2**24 + 1, 10**9, 2**31, 2**63, 2**64, 10**30, 10**400),
    *(0.5, 16.0, -0.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"), True, False, None),
    *("", "4", "1e9", "nan", "x" * 300, "\x1b[31m", "\ud800", [], [1], [[]], {}, {"kind": []}, {"a": 1}),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    of_bytes(4, adaln=True).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "model"))


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def use(folder: Path) -> str:
    """What whoever was given a model does with it."""
    model = bd3lm.load(folder)
    model.generate("ab", length=16, seed=0)
    try:
        model.log_likelihood("abcdefgh")
    except EXPECTED:
        return "writes"
    return "writes and scores"


# --- Fuzzed ---


def places(node: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all that JSON holds, in long lists and mappings to the first few."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for turn, (key, value) in enumerate(items):
        if turn < 20:
            yield (*before, key)
            yield from places(value, (*before, key))


def change(data: Any, path: tuple[Any, ...], draw: random.Random, value: Any) -> None:
    """Put a value in a place, or take the place away, or put it beside it."""
    for key in path[:-1]:
        data = data[key]
    act = draw.random()
    if act < 0.12:
        del data[path[-1]]
    elif act < 0.2 and isinstance(data, dict):
        data[draw.choice(["extra", "", "network", "kind", "__class__", "\x1b]0;x\x07"])] = value
    else:
        data[path[-1]] = value


def fuzzed(data: Any, draw: random.Random, value: Callable[[tuple[Any, ...]], Any]) -> Any:
    data = copy.deepcopy(data)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        if found := list(places(data)):
            path = draw.choice(found)
            change(data, path, draw, copy.deepcopy(value(path)))
    return data


def fuzz(batch: int, write: Callable[[random.Random], None], work_with: Callable[[], object]) -> None:
    """Work with what many changes wrote, one after another, in one process with a gigabyte to spare."""

    def work() -> list[str]:
        said = []
        for seed in range(batch * CASES_TOGETHER, (batch + 1) * CASES_TOGETHER):
            write(random.Random(seed))
            try:
                said.append(outcome(work_with))
            except Exception as error:
                raise AssertionError(f"seed {seed}: {type(error).__name__}: {error!s:.500}") from error
        return said

    said = confined(work)
    assert len(said) == CASES_TOGETHER
    assert any(line.startswith(REFUSED) for line in said)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("batch", range(60))
def test_fuzzed_configs(batch: int, folder: Path) -> None:
    config = read(folder, CONFIG)

    def write(draw: random.Random) -> None:
        begun = copy.deepcopy(config)
        if draw.random() < 0.4:
            begun["method"] = {"kind": draw.choice(sorted(Method.members()))}
        (folder / CONFIG).write_text(json.dumps(fuzzed(begun, draw, lambda _: draw.choice(ODD))))

    fuzz(batch, write, lambda: use(folder))


PARTS: tuple[Mapping[str, Any], ...] = (
    *(
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in ("(a+)+$", "(", r"\G(?=x)|(?<n>a\g<n>?)*", "")
    ),
    {"type": "Replace", "pattern": {"Regex": "(a|a)*b"}, "content": "a" * 20},
    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100_000},
    {"type": "Replace", "pattern": {"String": ""}, "content": "a"},
    {"type": "Prepend", "prepend": "x" * 1_000_000},
    {"type": "Precompiled", "precompiled_charsmap": "/////w=="},  # says that it has four gigabytes
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "FixedLength", "length": 0},
    {"type": "Metaspace", "replacement": "ab", "add_prefix_space": True},
    {"type": "Sequence", "pretokenizers": [], "normalizers": [], "decoders": []},
    *({"type": name} for name in ("BertNormalizer", "NFKC", "Fuse", "ByteFallback", "BertPreTokenizer")),
)
MODELS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "WordPiece",
        "vocab": {"a": 0, "b": 5},
        "unk_token": "c",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 10**9,
    },
    {"type": "WordLevel", "vocab": {}, "unk_token": "u"},
    {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 5},
    {"type": "Unigram", "vocab": [["a", float("nan")], ["", -1.0]], "unk_id": 0},
    {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": [["a", "b"]]},
    {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []},
    {"type": "BPE", "vocab": {}, "merges": []},
)
BEFORE_AND_AFTER = ("normalizer", "pre_tokenizer", "decoder")


@pytest.mark.sweep(4)
@pytest.mark.parametrize("batch", range(60))
def test_fuzzed_tokenizers(batch: int, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begun, config = read(folder, TOKENIZER), read(folder, "tokenizer_config.json")

    def write(draw: random.Random) -> None:
        def value(path: tuple[Any, ...]) -> Any:
            if path[0] in BEFORE_AND_AFTER and draw.random() < 0.7:
                return draw.choice(PARTS)
            return draw.choice(MODELS) if path == ("model",) else draw.choice(ODD)

        said = {**config}
        if draw.random() < 0.3:
            said[draw.choice(["mask_token", "eos_token", "bos_token"])] = draw.choice(ODD)
        spec = fuzzed(dict.fromkeys(BEFORE_AND_AFTER) | begun, draw, value)
        if draw.random() < 0.5:
            spec[draw.choice(BEFORE_AND_AFTER)] = draw.choice(PARTS)
        (folder / TOKENIZER).write_text(json.dumps(spec))
        (folder / "tokenizer_config.json").write_text(json.dumps(said))

    fuzz(batch, write, lambda: use(folder))
    assert "panicked" not in capfd.readouterr().err


# --- Files that are no such files ---


def replaced(name: str, by: Callable[[Path], object]) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        (folder / name).unlink()
        by(folder / name)

    return do


def text_of(name: str, text: str | bytes) -> Callable[[Path], None]:
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / name).write_bytes(data) and None


def with_config(edit: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    return lambda folder: (folder / CONFIG).write_text(json.dumps(edit(read(folder, CONFIG)))) and None


def with_header(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Weights with another header, which `edit` changes in place or gives the text of."""

    def do(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        given = edit(header)
        text = given.encode() if isinstance(given, str) else json.dumps(header).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    return do


def with_field(name: str, field: str, value: Any) -> Callable[[Path], None]:
    return with_header(lambda header: header[name].update({field: value}))


def with_tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        edit(tensors)
        save_file(tensors, folder / WEIGHTS)

    return do


def cut(name: str, end: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:end]) and None


def with_length(length: int) -> Callable[[Path], None]:
    """Weights whose header is said to have so many bytes."""

    def do(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes((length % 2**64).to_bytes(8, "little") + data[8:])

    return do


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a config of two megabytes": (text_of(CONFIG, " " * 2_000_000), "at most 1,000,000 bytes, got 2,000,000"),
    "a config nested deeply": (text_of(CONFIG, '{"format":' * 100_000), "must be valid JSON"),
    "a config nested five hundred times": (
        text_of(CONFIG, '{"format": "bd3lm", "version": 1, "network": ' + "[" * 500 + "]" * 500 + "}"),
        r"network: must be a kind, or a mapping with one, got \[\[",
    ),
    "a list nested as deeply": (text_of(CONFIG, "[" * 500 + "]" * 500), "must hold a JSON object"),
    "a config of many keys": (
        with_config(lambda config: config | {f"k{i}": 1 for i in range(60_000)}),
        "25 problems",
    ),
    "a network of many keys": (
        with_config(lambda c: c | {"network": c["network"] | {f"hiddn{i}": 1 for i in range(40_000)}}),
        "25 problems",
    ),
    "a key without end": (with_config(lambda config: config | {"x" * 500_000: 1}), "x…: unknown key"),
    "a kind without end": (
        with_config(lambda config: config | {"method": {"kind": "x" * 500_000}}),
        "x…, did|must be one of .* got 'x+…",
    ),
    "a number without end": (text_of(CONFIG, '{"format": ' + "9" * 5000 + "}"), "must be valid JSON"),
    "a type without end": (
        with_config(lambda _: {"model_type": "x" * 500_000, "architectures": ["y" * 400_000]}),
        "holds a model of type 'x+… .y+., which bd3lm does not load",
    ),
    "fields without end": (with_config(lambda _: {"x" * 900_000: 1}), "got the fields: x{100}$"),
    "a plugin": (
        with_config(lambda c: c | {"method": {"kind": "evil"}, "plugins": {"evil": "/evil.py"}}),
        "give --plugin",
    ),
    "no text": (text_of(CONFIG, b"\xff\xfe"), "must be UTF-8 text"),
    "nothing": (text_of(CONFIG, ""), "must be valid JSON"),
    **{
        f"{what} for {name}": (replaced(name, by), message)
        for what, by in {
            "a folder": Path.mkdir,
            "a loop of links": lambda path: path.symlink_to(path),
            "a pipe": os.mkfifo,
            "a device": lambda path: path.symlink_to("/dev/zero"),
        }.items()
        for name, message in {
            CONFIG: r"must hold a config\.json, got none",
            WEIGHTS: r"must hold a model\.safetensors, got none",
            TOKENIZER: r"tokenizer\.json must be a file",
        }.items()
    },
    "only an index of weights": (
        replaced(WEIGHTS, lambda path: Path(f"{path}.index.json").write_text('{"weight_map": {"a": "/x"}}')),
        r"must hold a model\.safetensors, got none",
    ),
    "weights of nothing": (text_of(WEIGHTS, ""), "readable safetensors file"),
    "weights of seven bytes": (text_of(WEIGHTS, "1234567"), "readable safetensors file"),
    "weights of zeros": (text_of(WEIGHTS, b"\0" * 64), "readable safetensors file"),
    "a header of 2^63 bytes": (with_length(2**63), "header must have at most 16,777,216 bytes"),
    "a header of −1 bytes": (with_length(-1), "header must have at most 16,777,216 bytes"),
    "a header of 90 megabytes": (with_length(90_000_000), "header must have at most 16,777,216 bytes"),
    "weights cut at the end": (cut(WEIGHTS, -1), "readable safetensors file"),
    "weights cut in the header": (cut(WEIGHTS, 100), "readable safetensors file"),
    "negative offsets": (with_field(EMBEDDING, "data_offsets", [-1, 5]), "readable safetensors file"),
    "offsets past the end": (with_field(EMBEDDING, "data_offsets", [2**62, 2**62 + 8]), "readable safete"),
    "overlapping tensors": (
        with_header(lambda h: h[EMBEDDING].update(data_offsets=h["output.weight"]["data_offsets"])),
        "readable safetensors file",
    ),
    "a shape that overflows": (with_field(EMBEDDING, "shape", [2**32, 2**32]), "readable safetensors file"),
    "a negative shape": (with_field(EMBEDDING, "shape", [-1, 16]), "readable safetensors file"),
    "a shape of many dimensions": (
        with_field(EMBEDDING, "shape", [1] * 100_000),
        "readable safetensors file",
    ),
    "an unknown type": (with_field(EMBEDDING, "dtype", "F4"), "readable safetensors file"),
    "integers": (
        with_tensors(lambda t: t.update({EMBEDDING: t[EMBEDDING].int()})),
        "one floating-point type",
    ),
    "a nested header": (with_header(lambda _: '{"a":' * 50_000), "readable safetensors file"),
    "a tensor named twice": (
        with_header(
            lambda h: f"{json.dumps(h)[:-1]}, {json.dumps({EMBEDDING: {**h[EMBEDDING], 'shape': [1]}})[1:]}"
        ),
        "readable safetensors file",
    ),
    "many tensors": (
        with_header(lambda header: header.update({f"t{i}": EMPTY for i in range(50_000)})),
        "unexpected: t0, .* and 49995 more",
    ),
    "a name without end": (
        with_header(lambda header: header.update({"x" * 10**6: EMPTY})),
        "unexpected: xxx",
    ),
    "a tensor missing": (with_tensors(lambda tensors: tensors.pop(EMBEDDING)), f"missing: {EMBEDDING}"),
    "a tensor more": (with_tensors(lambda t: t.update(more=torch.zeros(1))), "unexpected: more"),
    "no tensors": (with_tensors(lambda tensors: tensors.clear()), "it has 2 layers, got 0 tensors"),
    "weights that are no numbers": (
        with_tensors(lambda tensors: tensors[EMBEDDING].fill_(torch.nan)),
        "probabilities are not finite",
    ),
    "a tokenizer without end": (
        lambda folder: os.truncate(folder / TOKENIZER, 2 * 10**8),
        "at most 100,000,000 bytes",
    ),
    "a tokenizer cut short": (cut(TOKENIZER, 500), "cannot be read as a tokenizer"),
    "a tokenizer nested deeply": (
        text_of(TOKENIZER, '{"a":' * 50_000),
        "cannot be read as a tokenizer",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_folder_is_one_line(case: str, folder: Path) -> None:
    hurt, message = HOSTILE[case]
    hurt(folder)
    line = confined(lambda: outcome(lambda: use(folder)), megabytes=600, seconds=20)
    assert line.startswith(REFUSED)
    with pytest.raises(ValueError, match=message):
        raise ValueError(line)


# --- Sizes ---


@pytest.mark.parametrize(
    "size",
    [
        *({name: 10**9} for name in ("vocab_size", "layers", "hidden", "heads", "mlp_width", "context")),
        {"hidden": 4 * 10**9, "heads": 4},
        {"adaln": True, "conditioning_dim": 10**19},
    ],
    ids=str,
)
def test_a_network_of_any_size_is_refused_before_it_takes_memory(size: dict[str, Any], folder: Path) -> None:
    with_config(lambda config: config | {"network": config["network"] | size})(folder)
    line = confined(lambda: outcome(lambda: use(folder)), megabytes=100, seconds=20)
    (name,) = [name for name, value in size.items() if value >= 10**9][:1]
    assert f"{name} must be at most" in line


@pytest.mark.parametrize("kind", ["autoregressive", "block_diffusion", "d3pm", "score_entropy", "simplex"])
def test_memory_follows_the_text_and_not_the_context(kind: str, folder: Path) -> None:
    """At the largest context that a config may say. What works on a whole context at once is told so."""
    block = {"block_size": 4} if kind != "autoregressive" else {}
    network = {"context": 2**24, "time_conditioning": kind not in ("autoregressive", "block_diffusion")}
    with_config(lambda c: c | {"network": c["network"] | network, "method": {"kind": kind, **block}})(folder)

    def work() -> str:
        steps = {} if kind in ("autoregressive", "block_diffusion") else {"steps": 2}
        return str(len(bd3lm.load(folder).generate("ab", length=16, seed=0, **steps)[0].tokens) <= 16)

    assert confined(lambda: outcome(work), megabytes=200) == "True"


@pytest.mark.parametrize("kind", ["block_diffusion", "d3pm", "score_entropy"])
def test_a_whole_context_that_no_memory_holds_is_refused(kind: str, folder: Path) -> None:
    with_config(lambda c: c | {"network": c["network"] | {"context": 2**20}, "method": {"kind": kind}})(
        folder
    )

    def work() -> str:
        devices_module.memory_of.cache_clear()
        devices_module.memory_of = lambda device: 2**28
        return use(folder)

    line = confined(lambda: outcome(work), megabytes=100)
    assert "a pass over 1 x 1,048,576 tokens must fit in memory: it needs at least" in line


def test_a_cache_that_no_memory_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="a cache of 1,000 texts of 1,000,001 tokens must fit in memory"):
        KVCache(layers=10**3, rows=10**3, heads=8, head_dim=64, window=10**6, segment=1)


def test_the_room_that_a_pass_must_have_is_less_than_it_takes() -> None:
    """Or a pass that would do is refused."""
    shape = TransformerConfig(vocab_size=8, layers=1, hidden=512, heads=8, context=2048, dropout=0.0)
    network = Transformer(shape).eval()
    told: list[int] = []

    def measured() -> list[int]:
        from bd3lm.models import Causal
        from bd3lm.models import transformer as module

        module.require_room = lambda least, *_, **__: told.append(least)
        with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
            network(torch.zeros(1, 2048, dtype=torch.long), layout=Causal(2048))
        held, most = 0, 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        return [told[0], most]

    least, most = confined(measured, megabytes=4000)
    assert 0.2 * most < least < most


# --- Patterns ---

CATASTROPHIC = {
    r"(a+)+$": "a" * 40 + " !",
    r"(?:\w|\w)*[!?]": "a" * 40 + " !",
    r"\w*\w*[!?]": "a" * 3000 + " !",
}


def with_pattern(folder: Path, pattern: str, place: str = "pre_tokenizer") -> None:
    spec = read(folder, TOKENIZER)
    part = {"type": "Split", "behavior": "Isolated", "invert": False}
    if place != "pre_tokenizer":
        part = {"type": "Replace", "content": "b"}
    spec[place] = {**part, "pattern": {"Regex": pattern}}
    (folder / TOKENIZER).write_text(json.dumps(spec))


@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer"])
@pytest.mark.parametrize("pattern", CATASTROPHIC)
def test_a_pattern_that_backtracks_for_ever_is_one_line(
    pattern: str, place: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with_pattern(folder, pattern, place)

    def work() -> str:
        from bd3lm.data import guarded

        guarded._SECONDS = 0.5
        return str(load_tokenizer(folder).encode(CATASTROPHIC[pattern]))

    line = confined(lambda: outcome(work), seconds=30)
    assert line.startswith(REFUSED)
    assert "retry-limit-in-match over" in line or "took longer than 1 s for 3,002 characters" in line
    assert f"(the patterns in its tokenizer.json: {pattern})" in line
    assert capfd.readouterr().err == ""  # no trace of the library's panic


def test_a_pattern_that_is_quick_splits_as_it_should(folder: Path) -> None:
    plain = load_tokenizer(folder).encode("hello world")
    with_pattern(folder, r"\s+|\w+")
    tokenizer = load_tokenizer(folder)
    assert not is_plain(json.loads(tokenizer.spec))
    assert list(patterns(json.loads(tokenizer.spec))) == [r"\s+|\w+"]
    assert tokenizer.encode("helloworld") == plain[:5] + plain[6:]
    assert tokenizer.encode_batch(["hello", ""]) == [plain[:5], []]


def test_what_others_write_to_standard_error_meanwhile_is_not_lost(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from bd3lm.data.guarded import panics_unsaid

    with panics_unsaid(), panics_unsaid():
        os.write(2, b"a warning\n")
    assert capfd.readouterr().err == "a warning\n"


def test_replacements_that_lengthen_each_other_are_refused() -> None:
    part = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    check_size({"normalizer": {"type": "Sequence", "normalizers": [part] * 3}})
    with pytest.raises(ValueError, match=r"at most 1,000 times, got 10\^4"):
        check_size({"normalizer": {"type": "Sequence", "normalizers": [part] * 4}})


# --- Models of others ---


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    save_reference(*small_model(adaln=True), folder)
    return folder


@pytest.mark.sweep(2)
@pytest.mark.parametrize("batch", range(20))
def test_fuzzed_configs_of_the_reference(batch: int, reference: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(reference, tmp_path / "model"))
    config = read(folder, CONFIG)

    def write(draw: random.Random) -> None:
        (folder / CONFIG).write_text(json.dumps(fuzzed(config, draw, lambda _: draw.choice(ODD))))

    fuzz(batch, write, lambda: bd3lm.load(folder).generate([[1, 2]], length=16)[0].text)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("batch", range(20))
def test_damaged_lightning_checkpoints(batch: int, tmp_path: Path) -> None:
    network, _ = small_model(adaln=True)
    file = tmp_path / "last.ckpt"
    torch.save({"state_dict": to_reference_state(network), "hyper_parameters": {}}, file)
    data = file.read_bytes()
    facts = LightningFacts(context=16, block_size=4, time_conditioning=False)

    def write(draw: random.Random) -> None:
        hurt = bytearray(data)
        match draw.choice(["flipped", "flipped", "cut", "in the pickle"]):
            case "flipped":
                for _ in range(draw.choice([1, 3, 20])):
                    hurt[draw.randrange(len(hurt))] ^= 1 << draw.randrange(8)
            case "cut":
                del hurt[draw.randrange(len(hurt)) :]
            case "in the pickle":
                begin = draw.randrange(3000)
                hurt[begin : begin + draw.randrange(60)] = draw.randbytes(draw.randrange(60))
        file.write_bytes(hurt)

    fuzz(batch, write, lambda: bd3lm.load(file, lightning=facts))
