"""`bd3lm export`: write a model in a layout that other programs load."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from bd3lm.commands.shared.command import Command
from bd3lm.commands.shared.flags import (
    Model,
    NewFolder,
    SavedDTypeFlag,
    check_out_folder,
    named,
)
from bd3lm.io.terminal import say

if TYPE_CHECKING:
    from pathlib import Path

    from bd3lm.data import Tokenizer
    from bd3lm.methods import LanguageModelConfig, Law
    from bd3lm.models import Network

Layout = Literal["huggingface", "transformers", "sdar", "reference"]


@dataclass(frozen=True)
class Export(Command):
    """Write a model in a format that other programs load."""

    kind = "export"

    model: Model
    out: NewFolder
    to: Annotated[
        Layout,
        named(
            "{huggingface,transformers,sdar,reference}",
            help="Format. huggingface: a Llama or Qwen type checkpoint for transformers, from an "
            "autoregressive model whose network is of that type. transformers: a folder with code for "
            "its AutoModelForCausalLM, from a block diffusion model. sdar: for SGLang, LMDeploy and "
            "JetEngine, from a block diffusion model whose network is of Qwen3's type. reference: the "
            "format of the paper's published weights, for its own code.",
        ),
    ]
    dtype: SavedDTypeFlag = None

    def run(self) -> int:
        from bd3lm.commands.shared.models import check_models, one_model

        check_out_folder(self.out)
        check_models([self.model])

        from bd3lm import interop

        path = interop.resolve(one_model(self.model))
        # Not opened as a model for use, which may compute in another precision than the stored one.
        network, config = interop.load(path, dtype=self.dtype)
        tokenizer = interop.tokenizer_for(path, config)
        _WRITERS[self.to](network, config, tokenizer, self.out)
        parameters = sum(p.numel() for p in network.parameters())
        law = _LAWS.get(self.to, config.method.default_law)
        written = config.under(law) if law in config.method.laws else config
        say(f"wrote {self.out} for {self.to}: {written.title}, {parameters:,} parameters")
        return 0


def _to_huggingface(
    network: "Network", config: "LanguageModelConfig", tokenizer: "Tokenizer | None", out: "Path"
) -> None:
    from bd3lm import interop

    ids = {} if tokenizer is None else {"eos_id": tokenizer.eos_id, "bos_id": tokenizer.bos_id}
    interop.save_huggingface(network, config, out, **ids)
    if tokenizer is not None:
        tokenizer.save_for_others(out)


def _to_reference(
    network: "Network", config: "LanguageModelConfig", tokenizer: "Tokenizer | None", out: "Path"
) -> None:
    from bd3lm import interop

    interop.save_reference(network, config, out)
    if tokenizer is not None:
        tokenizer.save(out)


def _to_transformers(
    network: "Network", config: "LanguageModelConfig", tokenizer: "Tokenizer | None", out: "Path"
) -> None:
    from bd3lm import interop

    interop.save_with_code(network, config, out, tokenizer=tokenizer)


def _to_sdar(
    network: "Network", config: "LanguageModelConfig", tokenizer: "Tokenizer | None", out: "Path"
) -> None:
    from bd3lm import interop

    note = interop.save_sdar(network, config, out, tokenizer=tokenizer).note
    if note is not None:
        say(note, to=sys.stderr)


# A joint model has both laws.
_LAWS: "dict[str, Law]" = {"huggingface": "causal", "transformers": "block"}
_WRITERS = {
    "huggingface": _to_huggingface,
    "transformers": _to_transformers,
    "sdar": _to_sdar,
    "reference": _to_reference,
}
