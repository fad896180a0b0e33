"""`bd3lm convert`: read checkpoints of other programs; `bd3lm export` writes them."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from bd3lm.commands.shared.command import Command
from bd3lm.commands.shared.flags import (
    NewFolder,
    OptionalInt,
    SavedDTypeFlag,
    check_out_folder,
    named,
)
from bd3lm.io.terminal import say


@dataclass(frozen=True)
class Convert(Command):
    """Convert a checkpoint to the format of bd3lm.

    Reads checkpoints of Llama and Qwen type, of the reference implementation, and of bd3lm.
    """

    kind = "convert"

    source: Positional[Annotated[str, named("SOURCE")]]
    """A folder, a GGUF or Lightning .ckpt file, or a hub id such as owner/name."""
    out: NewFolder
    context: OptionalInt = None
    """.ckpt: context length. Required, because the file does not store it."""
    block_size: Annotated[
        int | None,
        named(
            "INT",
            help=".ckpt: block size of a block diffusion model; for MDLM its context. Needed, like --causal "
            "and --sedd, only if the file does not store its method.",
        ),
    ] = None
    causal: bool = False
    """.ckpt: the model is autoregressive."""
    sedd: bool = False
    """.ckpt: the model is SEDD, which has the same tensors as MDLM."""
    mask_id: OptionalInt = None
    """.ckpt: id of the mask token, 103 for bert-base-uncased. Default: the last id."""
    time_conditioning: Annotated[
        bool,
        FlagCreatePairsOff,
        arg(
            help=".ckpt: the network gets the noise level. Give this flag or the next one if the file has a "
            "noise embedding (sigma_map): the file does not say how it was used."
        ),
    ] = False
    no_time_conditioning: Annotated[bool, FlagCreatePairsOff] = False
    """.ckpt: the network gets a constant instead of the noise level, as published models do."""
    weights: Annotated[Literal["ema", "raw"] | None, named("{ema,raw}")] = None
    """.ckpt: which weights to take. Default: the EMA weights, if the file has them."""
    dtype: SavedDTypeFlag = None

    def run(self) -> int:
        from bd3lm.commands.shared.models import check_models, one_model

        is_lightning = self.source.endswith(".ckpt")
        told_the_noise = self._is_told_the_noise()
        if is_lightning and self.context is None:
            raise ValueError("--context must be given for a .ckpt file, which does not store it")
        facts = (self.context, self.block_size, self.mask_id, told_the_noise, self.weights)
        if not is_lightning and (self.causal or self.sedd or any(fact is not None for fact in facts)):
            raise ValueError(
                "--context, --block-size, --causal, --sedd, --mask-id, --[no-]time-conditioning and "
                f"--weights are only for a .ckpt file, got {self.source}"
            )
        check_out_folder(self.out)
        check_models([self.source])

        import torch  # the checks above do not need it

        from bd3lm import interop
        from bd3lm.lm import LanguageModel

        lightning = None
        if is_lightning and self.context is not None:
            lightning = interop.LightningFacts(
                context=self.context,
                block_size=self.block_size,
                causal=self.causal,
                sedd=self.sedd,
                mask_id=self.mask_id,
                time_conditioning=told_the_noise,
                weights=self.weights,
            )
        path = interop.resolve(one_model(self.source))
        # Not opened as a model for use, which may compute in another precision than the stored one.
        dtype = getattr(torch, self.dtype) if self.dtype else None
        network, config = interop.load(path, lightning=lightning, dtype=dtype)
        tokenizer = interop.tokenizer_for(path, config)
        LanguageModel(network, config, tokenizer).save_pretrained(self.out)
        parameters = sum(p.numel() for p in network.parameters())
        say(f"wrote {self.out}: {config.title}, {parameters:,} parameters")
        return 0

    def _is_told_the_noise(self) -> bool | None:
        """The value of the two flags; None if neither is given, which one on/off flag could not express."""
        if self.time_conditioning and self.no_time_conditioning:
            raise ValueError("give only one of --time-conditioning and --no-time-conditioning")
        return self.time_conditioning if self.time_conditioning or self.no_time_conditioning else None
