"""`bd3lm chat`: talk to a model in a terminal or from a script."""

import os
import sys
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated

from bd3lm.commands.shared.command import Command
from bd3lm.commands.shared.flags import (
    CandidatesFlag,
    ConfidenceFlag,
    DeviceFlag,
    EntropyBoundFlag,
    LawFlag,
    LeanFlag,
    Model,
    OptionalFile,
    OptionalInt,
    OwnTemplateFlag,
    SamplingDTypeFlag,
    SchemeFlag,
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
    from bd3lm.commands.sample import Sample

_NO_TOKENIZER = "the model was saved without a tokenizer; name one with --tokenizer"


@dataclass(frozen=True)
class Chat(Command):
    """Talk to a model, in the terminal or from a pipe.

    Each line is a message, and the answer appears as it is written. A line that begins with / is a command;
    /help lists the commands. With input from a pipe, standard output holds only the answers.
    """

    kind = "chat"

    model: Model
    """A run, model folder, GGUF file or hub id, or box, the model that comes with bd3lm."""
    system: Annotated[str | None, named("TEXT")] = None
    """System message, placed before the conversation."""
    chat_template: OwnTemplateFlag = None
    max_new_tokens: OptionalInt = None
    """Most tokens of an answer. Default: as many as the context has room for."""
    drafts: bool = False
    """In a terminal, show drafts and tokens that are not settled yet while an answer is written."""
    history: OptionalFile = None
    """Save what you type to this file, for the arrow keys next time. Default: nothing is saved."""
    seed: int = 0
    """Seed of each answer. The same conversation with the same seed gives the same answer."""
    temperature: TemperatureFlag = 1.0
    top_p: TopPFlag = None
    top_p_rule: TopPRuleFlag = "inclusive"
    top_k: TopKFlag = None
    stop: StopFlag = ()
    steps: StepsFlag = None
    law: LawFlag = None
    lean: LeanFlag = None
    tokens_per_pass: TokensPerPassFlag = None
    confidence: ConfidenceFlag = None
    entropy_bound: EntropyBoundFlag = None
    unmasking: UnmaskingFlag = ()
    speculation: SpeculationFlag = None
    scheme: SchemeFlag = "coupled"
    candidates: CandidatesFlag = 1
    tokenizer: TokenizerFlag = None
    device: DeviceFlag = None
    dtype: SamplingDTypeFlag = None

    def run(self) -> int:
        from bd3lm import interop
        from bd3lm.commands.chat.lines import PipedLines, TypedLines
        from bd3lm.commands.sample.checks import check_numbers, check_ways
        from bd3lm.commands.shared.models import check_models, one_model
        from bd3lm.data.templates import named_template
        from bd3lm.data.tokenizer_files import saved_template
        from bd3lm.data.tokenizers import TOKENIZER_FILE

        choices = self._choices()
        check_ways(choices)
        check_numbers(choices)
        if self.drafts and not sys.stdout.isatty():
            raise ValueError("--drafts needs a terminal, and standard output is not one")
        template = None if self.chat_template is None else named_template(self.chat_template)
        check_models([self.model], device=self.device, lean=self.lean)
        is_live = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
        if self.history is not None and not is_live:
            raise ValueError("--history needs a terminal, and standard input or output is not one")
        lines = TypedLines(self.history) if is_live else PipedLines()
        source = one_model(self.model)
        path = interop.resolve(source)
        if self.tokenizer is None and path.is_dir():
            if not os.path.lexists(path / TOKENIZER_FILE):
                raise ValueError(_NO_TOKENIZER)
            if template is None and saved_template(path) is None:
                raise ValueError(_no_template(self.model))

        import torch  # the checks above do not need it, so a typing mistake is reported at once

        from bd3lm.commands.chat.answers import Answerer
        from bd3lm.commands.chat.conversation import Conversation, check_template, check_text
        from bd3lm.commands.chat.session import Session
        from bd3lm.commands.shared.writing import sampling_dtype
        from bd3lm.data.templates import template_stops
        from bd3lm.io.console import Console
        from bd3lm.lm import load
        from bd3lm.models.devices import pick_device

        dtype = sampling_dtype(self.dtype, self.device)
        model = load(
            path,
            device=pick_device(self.device),
            dtype=getattr(torch, dtype) if dtype else None,
            tokenizer=self.tokenizer,
        )
        if model.tokenizer is None:
            raise ValueError(_NO_TOKENIZER)
        template = model.tokenizer.chat_template if template is None else template
        if template is None:
            raise ValueError(_no_template(self.model))
        talk = Conversation(template, model.tokenizer, model.config.network.context, self.system)
        if self.system is not None:
            check_text(self.system, "--system", talk.most_characters)
        check_template(template, self.system, model.tokenizer)
        console = Console()
        session = Session(
            Answerer(model, model.tokenizer, choices, template_stops(template)),
            talk,
            lines,
            name=PurePath(str(source)).name,
            console=console,
            notes=console if is_live else Console(stderr=True),
            drafts=self.drafts,
        )
        try:
            session.run()
        finally:
            lines.close()
        return 0

    def _choices(self) -> "Sample":
        """The flags that chat shares with `bd3lm sample`, as a `Sample`."""
        from bd3lm.commands.sample import Sample

        theirs = {each.name for each in fields(Sample)}
        return Sample(**{each.name: getattr(self, each.name) for each in fields(self) if each.name in theirs})


def _no_template(model: str) -> str:
    return (
        f"{model} must have a chat template, and its tokenizer has none: give a file with one, "
        "--chat-template FILE, or use --chat-template plain"
    )
