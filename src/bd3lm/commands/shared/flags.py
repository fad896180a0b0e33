"""Flags that several commands take, each described once, and what stands for their values in a help text."""

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
    """What stands for a value in a help text, where tyro would print its type and an empty default."""
    return arg(metavar=metavar, help=help, help_behavior_hint="")


OptionalInt = Annotated[int | None, named("INT")]
OptionalFloat = Annotated[float | None, named("FLOAT")]
OptionalFile = Annotated[Path | None, named("FILE")]
OptionalFolder = Annotated[Path | None, named("FOLDER")]
Model = Positional[Annotated[str, named("MODEL")]]
Models = Positional[Annotated[tuple[str, ...], named("MODEL ...")]]
ModelsOrFiles = Positional[Annotated[tuple[str, ...], named("MODEL|FILE ...")]]
Texts = Annotated[tuple[str, ...], named("DATA ...")]
NewFolder = Positional[Annotated[Path, named("OUT")]]

DeviceFlag = Annotated[
    str | None, named("DEVICE", help="cpu, cuda or cuda:1; by default a GPU where there is one.")
]
DTypeFlag = Annotated[
    DType | None,
    named(
        DTYPES, help="Precision of the network; by default that of its weights, on a CPU at least float32."
    ),
]
SamplingDTypeFlag = Annotated[
    DType | None,
    named(
        DTYPES,
        help="Precision of the network; by default bfloat16 on a GPU, elsewhere that of its weights, and at "
        "least float32.",
    ),
]
TokenizerFlag = Annotated[
    str | None,
    named(
        "TOKENIZER",
        help="For a model saved without one: a folder, a run, a GGUF file, box or a name on the hub.",
    ),
]
FieldFlag = Annotated[
    str | None, named("NAME", help="The field that holds the text, in jsonl and parquet; text by default.")
]
MaxDocumentFlag = Annotated[
    int | None,
    named(
        "INT",
        help=f"Characters that a document, or a line of JSON, may have at most; by default {MAX_DOCUMENT:,}.",
    ),
]
EstimatorFlag = Annotated[
    str,
    arg(
        metavar="ESTIMATOR",
        help="exact (AR, and blocks of at most 12), nelbo (a mask rate drawn for each block; "
        "nelbo:ordered with rates spread in the order of the batch, as the paper says; nelbo:reference so "
        "too and from 0.001 on, as the reference implementation), counts (the bound of nelbo with less "
        "noise), iw:K (tighter, from K orders), or paper (what the paper prints: exact for AR, else nelbo). "
        "By default exact up to blocks of 8, else counts, and for networks that are told the noise level "
        "nelbo.",
    ),
]
LeanFlag = Annotated[
    float | None,
    named(
        "LEAN",
        help="Reveal a block in an order that leans to the left: a token is e^LEAN times as likely to come "
        "next as its right neighbour. 0 is uniformly random; by default what the model was made with.",
    ),
]
LawFlag = Annotated[
    Literal["causal", "block"] | None,
    named(
        "{causal,block}",
        help="For a joint model, which has two laws: write and measure token after token (causal), or block "
        "after block (block); by default what the model was made with.",
    ),
]
TopPFlag = Annotated[
    float | None,
    named(
        "FLOAT",
        help="Draw from the likeliest tokens that hold this much probability; 1 is the model itself. "
        "By default 0.9, for SEDD 0.99, for SSD-LM 0.95.",
    ),
]
TopPRuleFlag = Annotated[
    Literal["inclusive", "exclusive"],
    arg(help="Whether the token that crosses --top-p is kept; the reference implementation leaves it out."),
]
TemperatureFlag = Annotated[
    float, arg(help="Below 1 likely tokens become likelier; 0 always takes the likeliest.")
]
TopKFlag = Annotated[int | None, named("INT", help="Draw from this many of the likeliest tokens.")]
TokensPerPassFlag = Annotated[
    int | None,
    named(
        "INT",
        help="Reveal this many tokens at once, in the model's order. Faster, but no longer its distribution.",
    ),
]
ConfidenceFlag = Annotated[
    float | None,
    named(
        "FLOAT",
        help="Reveal all tokens drawn with at least this probability. Not the model's distribution either.",
    ),
]
EntropyBoundFlag = Annotated[
    float | None,
    named(
        "FLOAT",
        help="Reveal tokens together as long as their entropies bound the error by this many nats.",
    ),
]
UnmaskingFlag = Annotated[
    tuple[str, ...],
    named(
        "KIND [FIELD=VALUE ...]",
        help="Reveal tokens by a rule of this kind, with these fields; a --plugin may define it.",
    ),
]
SpeculationFlag = Annotated[
    str | None,
    named(
        "auto|off|N",
        help="Write several tokens a pass, the same text: guess N ahead, and let the next pass verify them. "
        "auto chooses N by what passes cost here. By default auto for a drafter, and off for all others.",
    ),
    arg(aliases=("--speculate",)),
]
SchemeFlag = Annotated[
    Literal["coupled", "rejection"],
    arg(
        help="How guesses are verified. rejection accepts more of them, and writes another text of the same "
        "law."
    ),
]
CandidatesFlag = Annotated[int, arg(help="Guesses of each token.")]
StopFlag = UseAppendAction[
    Annotated[
        tuple[str, ...],
        arg(
            metavar="STRING",
            help="End a text before this string, where it stands after the prompt. May be given several "
            "times, each with one string: a text ends before the first of them.",
        ),
    ]
]
StepsFlag = Annotated[
    int | None,
    named(
        "INT",
        help="Ancestral steps for each block (5,000 in the paper) instead of first-hitting ones; for SEDD "
        "and D3PM the steps of a text, for SSD-LM those of a block.",
    ),
]


def check_sources(command: Any, *, for_files: Collection[str]) -> None:
    """Refuse a missing source, what is none and, where all sources are files, flags not in `for_files`."""
    from bd3lm.commands.shared.models import check_models, is_file_of_samples

    if not command.sources:
        raise ValueError("a source must be given: a run, a model, or a file of samples")
    for each in filter(is_file_of_samples, command.sources):
        if not local_path(each).is_file():
            raise FileNotFoundError(f"there is no file {each}")
    models = [each for each in command.sources if not is_file_of_samples(each) and not Path(each).is_file()]
    check_models(models, device=command.device, lean=command.lean)
    if not all(map(is_file_of_samples, command.sources)):
        return
    for flag in flags_of(type(command)):
        if flag.field not in ("sources", *for_files) and getattr(command, flag.field) != flag.default:
            raise ValueError(f"{flag.name} is for models that write, and all sources are files of samples")


def check_out_folder(out: Path, *, may_hold: Sequence[str] = ()) -> None:
    """Refuse, before there is work to lose, an OUT that holds what would be overwritten or mixed up."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"OUT must be a folder, and {out} is a file")
    others = sorted(each.name for each in out.iterdir() if each.name not in may_hold) if out.exists() else []
    if others:
        besides = ", or hold nothing but a tokenizer" if may_hold else ""
        raise ValueError(f"OUT must be a new or empty folder{besides}, and {out} holds {others[0]}")
