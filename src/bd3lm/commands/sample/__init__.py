"""`bd3lm sample`: generate texts with a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, UseAppendAction, arg

from bd3lm.commands.shared.command import Command
from bd3lm.commands.shared.flags import (
    CandidatesFlag,
    ConfidenceFlag,
    DeviceFlag,
    EntropyBoundFlag,
    EntropyWindowFlag,
    LawFlag,
    LeanFlag,
    ModelOrBox,
    OptionalFile,
    OptionalFloat,
    OptionalInt,
    SamplingDTypeFlag,
    SchemeFlag,
    SeedFlag,
    SpeculationFlag,
    StepsFlag,
    StopFlag,
    TemperatureFlag,
    TokenizerFlag,
    TokensPerPassFlag,
    TopKFlag,
    TopPFlag,
    TopPRuleFlag,
    UnmaskingFlag,
    named,
)

if TYPE_CHECKING:
    from bd3lm.commands.shared.prompts import Template
    from bd3lm.commands.shared.writing import Author
    from bd3lm.io.console import Console
    from bd3lm.lm import Generation, LanguageModel, Settings
    from bd3lm.methods import Method

_NO_FLAG = 'bd3lm sample takes prompts after the model, without a flag: bd3lm sample MODEL "Once upon"'


@dataclass(frozen=True)
class Sample(Command):
    """Generate text with a model, one text per prompt.

    A terminal shows a single text while its tokens are revealed, and several texts one after the other, in
    the order of the prompts, as they finish.
    """

    kind = "sample"
    mistakes = MappingProxyType({"--prompt": _NO_FLAG, "--prompts": _NO_FLAG})

    model: ModelOrBox = None
    prompts: Positional[Annotated[tuple[str, ...], named("[PROMPT ...]")]] = ()
    """Texts to continue. Without a prompt, the model writes one text from scratch."""
    prompts_from: Annotated[
        str | None,
        named(
            "FILE",
            help="Read prompts from this file: one per line, or .jsonl with a field prompt. - reads standard "
            "input, in either format.",
        ),
    ] = None
    template: Annotated[
        str | None,
        named(
            "TEMPLATE",
            help='Fill the gaps of a text: "The {3} sat on the {2}." has gaps of 3 and 2 tokens. {{ is {.',
        ),
    ] = None
    count: int = 1
    """Texts per prompt."""
    length: Annotated[
        int | None,
        named(
            "INT",
            help="Most tokens of a text, its prompt included. Default: the context of the network. More is "
            "allowed, except for SEDD and D3PM with uniform noise.",
        ),
    ] = None
    max_new_tokens: OptionalInt = None
    """Most tokens to write after each prompt. Use it instead of --length."""
    top_p: TopPFlag = None
    top_p_rule: TopPRuleFlag = "inclusive"
    temperature: TemperatureFlag = 1.0
    top_k: TopKFlag = None
    seed: SeedFlag = 0
    batch_size: int = 32
    """Texts written in parallel. Changes speed and memory, not the texts."""
    steps: StepsFlag = None
    projection: Annotated[str, named("KIND")] = "sampling"
    """SSD-LM: how logits become almost one-hot: sampling (default), greedy or multi_hot."""
    remask: OptionalFloat = None
    """With --steps: ReMDM's eta, from 0 to 1. The share of eligible tokens that it masks again."""
    law: LawFlag = None
    lean: LeanFlag = None
    tokens_per_pass: TokensPerPassFlag = None
    confidence: ConfidenceFlag = None
    entropy_bound: EntropyBoundFlag = None
    unmasking: UnmaskingFlag = ()
    speculation: SpeculationFlag = None
    scheme: SchemeFlag = "coupled"
    candidates: CandidatesFlag = 1
    regex: Annotated[str | None, named("REGEX")] = None
    """Write only what this regular expression matches, token by token. Needs bd3lm[serve]."""
    json_schema: OptionalFile = None
    """Write JSON that follows the schema in this file, token by token. Needs bd3lm[serve]."""
    logit_bias: UseAppendAction[Annotated[tuple[str, ...], arg(metavar="ID=NUMBER")]] = ()
    """Token by token: add -100..100 to the logit of a token; -100 excludes it. Repeat for more."""
    stop_at_eos: bool = True
    """End a text at the end-of-text token."""
    eos_id: OptionalInt = None
    """Id of the end-of-text token. Default: the tokenizer's."""
    stop: StopFlag = ()
    entropy_floor: OptionalFloat = None
    """End a text when the entropy of its last tokens falls below this, in nats. 4 in the paper."""
    entropy_window: EntropyWindowFlag = 256
    redraws: int = 0
    """Draw a text that falls below --entropy-floor again, up to this many times, before ending it."""
    stride: OptionalInt = None
    """One-block models past the context: tokens written at a time. Default: half the context."""
    cache: bool = True
    """Keep a KV cache between passes."""
    fills: Annotated[
        int | None,
        named(
            "INT",
            help="With --template: fill the gaps this many times, and draw one of the fills by how well the "
            "text after the gaps follows it. 1 ignores that text. Default: 16 if the model can weigh "
            "fills.",
        ),
    ] = None
    alternatives: OptionalInt = None
    """With --out: record the log-probability of each token and of this many alternatives, 0 to 20."""
    out: OptionalFile = None
    """Write texts, tokens and costs to this new JSON lines file, in the order of the prompts."""
    film: OptionalFile = None
    """Write an animation of how a single text was revealed to this new .svg file."""
    tokenizer: TokenizerFlag = None
    device: DeviceFlag = None
    dtype: SamplingDTypeFlag = None

    def run(self) -> int:
        from bd3lm import interop
        from bd3lm.commands.sample.checks import check_film, check_numbers, check_ways, read_schema
        from bd3lm.commands.shared.models import check_models, one_model
        from bd3lm.commands.shared.records import check_new_file

        if self.count < 1:
            raise ValueError(f"--count must be at least 1, got {self.count}")
        check_ways(self)
        check_numbers(self)
        named = self.model or ""
        if any(each.isspace() for each in named) and not Path(named).exists():
            raise ValueError(
                f"MODEL must be a run, model folder, GGUF file or hub id, got {named!r}; to continue a text, "
                f'name the model first: bd3lm sample box "{named}"'
            )
        check_new_file(self.out)
        texts = [text for text in self._texts() for _ in range(self.count)]
        check_film(self.film, len(texts), self.out)
        schema = None if self.json_schema is None else read_schema(self.json_schema)
        check_models([] if self.model is None else [self.model], device=self.device, lean=self.lean)

        import torch  # the checks above do not need it, so a typing mistake is reported at once

        from bd3lm.commands.shared.prompts import parse_template
        from bd3lm.commands.shared.records import weights_digest
        from bd3lm.commands.shared.writing import Author, sampling_dtype
        from bd3lm.io.console import Console
        from bd3lm.lm import load
        from bd3lm.models.devices import pick_device

        dtype = sampling_dtype(self.dtype, self.device)
        source = interop.BOX if self.model is None else one_model(self.model)
        path = interop.BOX_FOLDER if self.model is None else interop.resolve(source)
        model = load(
            path,
            device=pick_device(self.device),
            dtype=getattr(torch, dtype) if dtype else None,
            tokenizer=self.tokenizer,
            law=self.law,
        )
        if self.lean is not None:
            model = model.with_lean(self.lean)
        run_sample(
            model,
            texts if self.template is None else [parse_template(text) for text in texts],
            self.settings_for(model.config.method, schema),
            author=Author(str(source), None if self.out is None else weights_digest(path)),
            max_new_tokens=self.max_new_tokens,
            out=self.out,
            film=self.film,
            notes=Console(stderr=True),
        )
        return 0

    def settings_for(self, method: "Method", schema: str | None = None) -> "Settings":
        """The flags as settings for a model of this method, with the JSON schema from their file."""
        from bd3lm.commands.sample.checks import bias_of
        from bd3lm.commands.sample.unmasking import speculation_of, unmasking_rule
        from bd3lm.lm import Settings

        return Settings(
            length=self.length,
            seed=self.seed,
            batch_size=self.batch_size,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            top_p_rule=self.top_p_rule,
            steps=self.steps,
            remask=self.remask,
            tokens_per_pass=self.tokens_per_pass,
            confidence=self.confidence,
            entropy_bound=self.entropy_bound,
            unmasking=unmasking_rule(self.unmasking, method),
            projection=self.projection,
            speculation=speculation_of(self.speculation, self.scheme, self.candidates),
            regex=self.regex,
            json_schema=schema,
            logit_bias=bias_of(self.logit_bias) or None,
            stop_at_eos=self.stop_at_eos,
            eos_id=self.eos_id,
            stop=self.stop,
            entropy_floor=self.entropy_floor,
            entropy_window=self.entropy_window,
            redraws=self.redraws,
            stride=self.stride,
            cache=self.cache,
            fills=self.fills,
            alternatives=self.alternatives,
        )

    def _texts(self) -> Sequence[str]:
        """The prompts, or the template, or one empty prompt to write from scratch."""
        from bd3lm.commands.shared.prompts import read_prompts
        from bd3lm.parsing import template_parts

        sources = {"PROMPTS": self.prompts, "--prompts-from": self.prompts_from, "--template": self.template}
        given = [name for name, value in sources.items() if value not in (None, ())]
        if len(given) > 1:
            raise ValueError(f"only one of {', '.join(sources)} may be given, got {' and '.join(given)}")
        if self.template is not None:
            template_parts(self.template, "--template")  # which reports what is wrong with it
            return [self.template]
        return self.prompts or ("",) if self.prompts_from is None else read_prompts(self.prompts_from)


def run_sample(
    model: "LanguageModel",
    prompts: "Sequence[str | Template]",
    settings: "Settings",
    *,
    author: "Author | None" = None,
    max_new_tokens: int | None = None,
    out: Path | None = None,
    film: Path | None = None,
    console: "Console | None" = None,
    notes: "Console | None" = None,
) -> "list[Generation]":
    """Write a text for each prompt or template, display them, and print the speed to `notes`.

    On a terminal, a single text is shown while it is written, masks included; several texts are shown in
    order, as they finish. `film` gets an animated SVG of how a single text was written.
    """
    from rich.text import Text

    from bd3lm.commands.sample.checks import check_film
    from bd3lm.commands.sample.display import Animation, Film, Printer
    from bd3lm.commands.shared.writing import UNNAMED, Bar, Display, write_texts
    from bd3lm.io.console import Console

    console = console or Console()
    notes = notes or console
    check_film(film, len(prompts), out)
    tokenizer, mask_id = model.tokenizer, model.config.mask_id
    displays: list[Display] = []
    if len(prompts) == 1 and console.is_terminal and tokenizer is not None:
        displays.append(Animation(console, tokenizer, mask_id))
    else:
        displays += [Bar(notes, len(prompts), device=model.device), Printer(console, len(prompts))]
    filmed = None if film is None else Film(film)
    if filmed is not None:
        displays.append(filmed)
    written = write_texts(
        model,
        prompts,
        settings,
        displays=displays,
        notes=notes,
        author=author or UNNAMED,
        max_new_tokens=max_new_tokens,
        out=out,
    )
    if filmed is not None and tokenizer is not None:
        filmed.write(tokenizer, mask_id)
        notes.print(Text(f"wrote {film}"), soft_wrap=True)
    return written
