"""Flags that several commands share: each is described here once, with its metavar."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from bd3lm.commands.shared.command import flags_of
from bd3lm.io.files import local_path
from bd3lm.io.reading import MAX_DOCUMENT

DType = Literal["float32", "bfloat16", "float64"]
DTYPES = "{float32,bfloat16,float64}"


def named(metavar: str, help: str | None = None) -> Any:
    """The metavar of a flag, and its help, without the type and the empty default that tyro would print."""
    return arg(metavar=metavar, help=help, help_behavior_hint="")


OptionalInt = Annotated[int | None, named("INT")]
OptionalFloat = Annotated[float | None, named("FLOAT")]
OptionalFile = Annotated[Path | None, named("FILE")]
OptionalFolder = Annotated[Path | None, named("FOLDER")]
Model = Positional[Annotated[str, named("MODEL", help="A run, model folder, GGUF file or hub id.")]]
ModelOrBox = Positional[
    Annotated[
        str | None,
        named(
            "[MODEL]",
            help="A run, model folder, GGUF file or hub id. Default: box, the model that comes with bd3lm.",
        ),
    ]
]
Models = Positional[
    Annotated[tuple[str, ...], named("MODEL ...", help="Runs, model folders, GGUF files or hub ids.")]
]
ModelsOrFiles = Positional[Annotated[tuple[str, ...], named("MODEL|FILE ...")]]
NewFolder = Positional[
    Annotated[Path, named("OUT", help="Folder to write. It must not exist yet, or be empty.")]
]

SeedFlag = Annotated[int, arg(help="Seed of the random numbers.")]
RecordsFlag = Annotated[
    Path | None,
    named("FILE", help="Also write the records, with all figures and settings, to this new JSON file."),
]
DeviceFlag = Annotated[
    str | None,
    named("DEVICE", help="Where to compute: cpu, cuda or cuda:N. Default: a GPU if there is one, else cpu."),
]
DTypeFlag = Annotated[
    DType | None,
    named(
        DTYPES,
        help="Precision of the network. Default: the precision of its weights; on a CPU at least float32.",
    ),
]
SamplingDTypeFlag = Annotated[
    DType | None,
    named(
        DTYPES,
        help="Precision of the network. Default: bfloat16 on a GPU; elsewhere the precision of its weights, "
        "at least float32.",
    ),
]
SavedDTypeFlag = Annotated[
    DType | None, named(DTYPES, help="Precision to write. Default: the precision of the weights.")
]
TokenizerFlag = Annotated[
    str | None,
    named(
        "TOKENIZER",
        help="Tokenizer, for a model saved without one: a folder, a run, a GGUF file, box or a hub id.",
    ),
]
FieldFlag = Annotated[
    str | None,
    named("NAME", help="Field that holds the text in .jsonl and .parquet files. Default: text."),
]
MaxDocumentFlag = Annotated[
    int | None,
    named(
        "INT",
        help=f"Longest document, or line of JSON, to accept, in characters. Default: {MAX_DOCUMENT:,}.",
    ),
]
TextsFlag = Annotated[
    tuple[str, ...],
    named(
        "DATA ...",
        help="Texts to measure on: folders of token shards, files, folders of files or named corpora. "
        "Default: the text that each run held out.",
    ),
]
SplitFlag = Annotated[
    str | None, named("SPLIT", help="Split of the data to measure on. Default: valid, else test, else all.")
]
EosFlag = Annotated[
    bool,
    arg(
        help="Put an end-of-text token after every document, if --data is text. Token shards are used as "
        "they are."
    ),
]
BosEosFlag = Annotated[
    bool,
    arg(
        help="Put BOS and EOS at the ends of each sequence. For models that were trained this way, such as "
        "the paper's for LM1B, and come without their run; a run knows how it was trained."
    ),
]
SequencesFlag = Annotated[
    int | None, named("INT", help="Measure only this many sequences, from the start of the text.")
]
EstimatorFlag = Annotated[
    str,
    arg(
        metavar="ESTIMATOR",
        help="How to compute the likelihood. auto: exact for AR models and blocks of up to 8 tokens, else "
        "counts (nelbo for networks that see the noise level). exact: AR models and blocks of up to 12 "
        "tokens. nelbo: the bound with one mask rate drawn per block; nelbo:ordered spreads the rates over "
        "the batch in order, as the paper describes; nelbo:reference does so with rates from 0.001 up, as "
        "the reference implementation does. counts: the same bound as nelbo, with less noise. iw:K: tighter, "
        "from K orders. paper: what the paper reports, exact for AR models, else nelbo.",
    ),
]
LeanFlag = Annotated[
    float | None,
    named(
        "LEAN",
        help="Reveal each block in an order that leans to the left: a token is e^LEAN times as likely to be "
        "next as its right neighbor. 0: uniformly random. Default: the lean saved with the model.",
    ),
]
LawFlag = Annotated[
    Literal["causal", "block"] | None,
    named(
        "{causal,block}",
        help="For a joint model, which has two laws: write and measure token by token (causal) or block by "
        "block (block). Default: the law saved with the model.",
    ),
]
OwnTemplateFlag = Annotated[
    str | None,
    named(
        "plain|FILE",
        help="Chat template, for a model saved without one or to replace its own: a Jinja file, or plain, "
        "which puts User: and Assistant: before the messages.",
    ),
]
TopPFlag = Annotated[
    float | None,
    named(
        "FLOAT",
        help="Draw only from the most likely tokens that together have this probability; 1 draws from all. "
        "Default: 0.9; for SEDD 0.99, for SSD-LM 0.95.",
    ),
]
TopPRuleFlag = Annotated[
    Literal["inclusive", "exclusive"],
    arg(
        help="Keep (inclusive) or drop (exclusive) the token that crosses --top-p. The reference "
        "implementation drops it."
    ),
]
TemperatureFlag = Annotated[
    float,
    arg(
        help="Sampling temperature. Below 1 likely tokens become likelier; 0 always takes the most likely "
        "one."
    ),
]
TopKFlag = Annotated[
    int | None, named("INT", help="Draw only from this many of the most likely tokens. Default: all.")
]
TokensPerPassFlag = Annotated[
    int | None,
    named(
        "INT",
        help="Reveal this many tokens per pass, in the model's order. Faster, but the texts no longer follow "
        "the model's distribution.",
    ),
]
ConfidenceFlag = Annotated[
    float | None,
    named(
        "FLOAT",
        help="In each pass, reveal all tokens drawn with at least this probability. The texts do not follow "
        "the model's distribution either.",
    ),
]
EntropyBoundFlag = Annotated[
    float | None,
    named(
        "FLOAT",
        help="In each pass, reveal tokens together as long as their entropies bound the error by this many "
        "nats.",
    ),
]
UnmaskingFlag = Annotated[
    tuple[str, ...],
    named(
        "KIND [FIELD=VALUE ...]",
        help="Unmasking rule to reveal tokens by: its kind, then its fields. A --plugin may define one.",
    ),
]
SpeculationFlag = Annotated[
    str | None,
    named(
        "auto|off|N",
        help="Write several tokens per pass: draft N tokens ahead and verify them in the next pass. The text "
        "stays the same (but see --scheme). auto picks N by what a pass costs on this machine. Default: "
        "auto for a drafter, else off.",
    ),
    arg(aliases=("--speculate",)),
]
SchemeFlag = Annotated[
    Literal["coupled", "rejection"],
    arg(
        help="How drafts are verified. coupled writes the same text as without drafts. rejection accepts "
        "more drafts and writes a different text from the same distribution."
    ),
]
CandidatesFlag = Annotated[int, arg(help="Drafts to try for each token.")]
StopFlag = UseAppendAction[
    Annotated[
        tuple[str, ...],
        arg(
            metavar="STRING",
            help="End a text before this string, if it appears after the prompt. Repeat the flag for several "
            "strings; the first one that appears ends the text.",
        ),
    ]
]
StepsFlag = Annotated[
    int | None,
    named(
        "INT",
        help="Sample with this many ancestral steps per block (5,000 in the paper) instead of first-hitting. "
        "For SEDD and D3PM the steps of a text, for SSD-LM the steps of a block.",
    ),
]
EntropyWindowFlag = Annotated[
    int, arg(help="Tokens at the end of the text whose entropy --entropy-floor checks.")
]


def check_sources(command: Any, *, for_files: Collection[str]) -> None:
    """Refuse missing or invalid sources and, if all sources are files, flags that are not in `for_files`."""
    from bd3lm.commands.shared.models import check_models, is_file_of_samples

    if not command.sources:
        raise ValueError("a source must be given: a run, a model or a file of samples")
    for each in filter(is_file_of_samples, command.sources):
        if not local_path(each).is_file():
            raise FileNotFoundError(f"there is no file {each}")
    models = [each for each in command.sources if not is_file_of_samples(each) and not Path(each).is_file()]
    check_models(models, device=command.device, lean=command.lean)
    if not all(map(is_file_of_samples, command.sources)):
        return
    for flag in flags_of(type(command)):
        if flag.field not in ("sources", *for_files) and getattr(command, flag.field) != flag.default:
            raise ValueError(f"{flag.name} needs a model that writes samples, and all sources are files")


def check_out_folder(out: Path, *, may_hold: Sequence[str] = ()) -> None:
    """Refuse an OUT whose files would be overwritten or mixed up, before there is work to lose."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"OUT must be a folder, and {out} is a file")
    others = sorted(each.name for each in out.iterdir() if each.name not in may_hold) if out.exists() else []
    if others:
        besides = ", or hold only a tokenizer" if may_hold else ""
        raise ValueError(f"OUT must be a new or empty folder{besides}, and {out} holds {others[0]}")
