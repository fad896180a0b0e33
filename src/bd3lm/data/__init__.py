"""Text to token batches: corpora and tokenizers in, shards on disk, batches as a function of (seed, step)."""

from bd3lm.data.answers import ChatFormat
from bd3lm.data.conversations import ConversationCorpus
from bd3lm.data.corpora import CORPORA, load_corpus
from bd3lm.data.corpus import Corpus
from bd3lm.data.files import FileCorpus
from bd3lm.data.hub import NamedCorpus
from bd3lm.data.joined import IdsOf, JoinedCorpus
from bd3lm.data.ordered import OrderedBatches
from bd3lm.data.packed import PackedConversations, Packing
from bd3lm.data.prepare import prepare
from bd3lm.data.shards import TokenShards
from bd3lm.data.stream import BatchStream
from bd3lm.data.tokenizer_files import load_tokenizer, saved_tokenizer
from bd3lm.data.tokenizers import Tokenizer, byte_tokenizer, train_bpe
from bd3lm.data.topics import PydocCorpus
from bd3lm.data.verify import Verdict, verify
from bd3lm.data.wrap import WrappedTokens

__all__ = [
    "CORPORA",
    "BatchStream",
    "ChatFormat",
    "ConversationCorpus",
    "Corpus",
    "FileCorpus",
    "IdsOf",
    "JoinedCorpus",
    "NamedCorpus",
    "OrderedBatches",
    "PackedConversations",
    "Packing",
    "PydocCorpus",
    "TokenShards",
    "Tokenizer",
    "Verdict",
    "WrappedTokens",
    "byte_tokenizer",
    "load_corpus",
    "load_tokenizer",
    "prepare",
    "saved_tokenizer",
    "train_bpe",
    "verify",
]
