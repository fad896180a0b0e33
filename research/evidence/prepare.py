"""The text of the evidence as token shards, packed into one file that is small enough to be sent anywhere.

    python -m research.evidence.prepare SHARED evidence.tar.xz

SHARED holds `data/wikipedia`, `data/zeroshot/*.jsonl.xz` and `tokenizers/gpt2`. Of a zero-shot corpus the
first documents are taken, which is more than is scored of it, with no end tokens between them.
"""

import argparse
import lzma
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bd3lm.data import PydocCorpus, detokenizers, load_corpus, load_tokenizer, prepare, train_bpe
from bd3lm.data.corpus import Corpus, digest
from research.evidence.measures import TRAINED_ON, ZERO_SHOT

_CHARACTERS = 500_000  # of a zero-shot corpus: at least 100,000 tokens, of which 65,536 are scored
_DETOKENIZERS: Mapping[str, Callable[[str], str]] = {
    "ptb": detokenizers.ptb,
    "wikitext": detokenizers.wikitext,
    "lm1b": detokenizers.lm1b,
    "lambada": detokenizers.lambada,
}
# Tokens are two bytes: a compressor that knows it makes a twentieth less of them.
_XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 1, "pb": 1}]


class Documents(Corpus):
    """Documents in memory."""

    def __init__(self, name: str, by_split: Mapping[str, Sequence[str]]) -> None:
        self.name, self._by_split = name, by_split

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._by_split)

    @property
    def fingerprint(self) -> str:
        return digest({split: list(documents) for split, documents in self._by_split.items()})

    def documents(self, split: str) -> Iterator[str]:
        self.check_split(split)
        return iter(self._by_split[split])


def prepare_shared(shared: Path, out: Path, *, workers: int) -> None:
    """Wikipedia, and the beginnings of the zero-shot corpora, as folders of shards under `out`."""
    tokenizer = load_tokenizer(shared / "tokenizers" / "gpt2")
    wikipedia = load_corpus(shared / "data" / TRAINED_ON)
    prepare(wikipedia, tokenizer, out / TRAINED_ON, workers=workers)
    for name in ZERO_SHOT:
        file = shared / "data" / "zeroshot" / f"{name}.jsonl.xz"
        texts = _beginning(load_corpus(file, held_out=0).documents("train"))
        some = Documents(name, {"test": [*map(_DETOKENIZERS.get(name, str), texts)]})
        prepare(some, tokenizer, out / name, eos_between_documents=False)


def prepare_tiny(out: Path) -> None:
    """The same folders from the documentation that comes with Python, for a try without any data."""
    texts = {split: list(PydocCorpus().documents(split)) for split in ("train", "valid")}
    tokenizer = train_bpe(texts["train"], 512)
    corpus = Documents(TRAINED_ON, {**texts, "test": texts["valid"]})
    prepare(corpus, tokenizer, out / TRAINED_ON, progress=False)
    for name in ZERO_SHOT:
        some = Documents(name, {"test": texts["valid"][:4]})
        prepare(some, tokenizer, out / name, eos_between_documents=False, progress=False)


def pack(folder: Path, file: Path) -> None:
    """Under another name until it is whole."""
    partial = file.with_name(f"{file.name}.partial")
    with lzma.open(partial, "wb", filters=_XZ) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for member in sorted(folder.rglob("*")):
            tar.add(member, member.relative_to(folder), recursive=False)
    partial.replace(file)


def unpack(file: Path, folder: Path) -> None:
    with tarfile.open(file, mode="r:xz") as tar:
        tar.extractall(folder, filter="data")


def _beginning(documents: Iterator[str]) -> Iterator[str]:
    """The first documents, until there are enough characters."""
    left = _CHARACTERS
    while left > 0 and (text := next(documents, None)) is not None:
        left -= len(text)
        yield text


def main() -> None:
    parser = argparse.ArgumentParser(description="The text of the evidence, in one file.")
    parser.add_argument("shared", type=Path, help="the folder with data/ and tokenizers/")
    parser.add_argument("out", type=Path, help="the .tar.xz to write")
    parser.add_argument("--workers", type=int, default=2, help="processes that tokenize")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        print("tokenizing, which takes half a minute", flush=True)
        prepare_shared(options.shared, Path(scratch), workers=options.workers)
        print("packing, which takes a minute", flush=True)
        pack(Path(scratch), options.out)
    print(f"wrote {options.out}: {options.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
