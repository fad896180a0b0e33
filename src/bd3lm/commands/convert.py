"""`bd3lm convert`: from other people's checkpoints to ours; `export` goes the other way."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional

from bd3lm.commands.shared.command import Command
from bd3lm.commands.shared.flags import DTYPES, DType, NewFolder, OptionalInt, check_out_folder, named
from bd3lm.io.terminal import say


@dataclass(frozen=True)
class Convert(Command):
    """Rewrite a checkpoint (Llama- or Qwen-type, the reference implementation's, or our own) in this
    project's format."""

    kind = "convert"

    source: Positional[Annotated[str, named("SOURCE")]]
    """A folder, a GGUF or Lightning .ckpt file, or a hub id such as owner/name."""
    out: NewFolder
    """The folder to write, a new or empty one."""
    context: OptionalInt = None
    """Context length; a .ckpt file does not say, so give it there."""
    block_size: OptionalInt = None
    """Block size, for a .ckpt of a block diffusion model; that of the context for MDLM. This and the next two
    are needed only where the file does not say its method."""
    causal: bool = False
    """Whether a .ckpt is of an autoregressive model."""
    sedd: bool = False
    """Whether a .ckpt is of SEDD, whose tensors are as MDLM's."""
    mask_id: OptionalInt = None
    """The mask of a .ckpt's vocabulary; by default the last id. 103 for bert-base-uncased."""
    time_conditioning: Annotated[bool, FlagCreatePairsOff] = False
    """The network of a .ckpt is told the noise level. A file with a noise embedding (sigma_map) does not say
    so: give this flag or the next."""
    no_time_conditioning: Annotated[bool, FlagCreatePairsOff] = False
    """It is told a constant instead, as published models are."""
    weights: Annotated[Literal["ema", "raw"] | None, named("{ema,raw}")] = None
    """Which weights of a .ckpt to take; by default the EMA's where it has them."""
    dtype: Annotated[DType | None, named(DTYPES)] = None
    """Precision to write; by default that of the weights."""

    def run(self) -> int:
        from bd3lm.commands.shared.models import check_models, one_model

        is_lightning = self.source.endswith(".ckpt")
        told_the_noise = self._is_told_the_noise()
        if is_lightning and self.context is None:
            raise ValueError("--context must be given for a .ckpt, which does not say it")
        facts = (self.context, self.block_size, self.mask_id, told_the_noise, self.weights)
        if not is_lightning and (self.causal or self.sedd or any(fact is not None for fact in facts)):
            raise ValueError(
                "--context, --block-size, --causal, --sedd, --mask-id, --[no-]time-conditioning and "
                f"--weights are for a .ckpt file, got {self.source}"
            )
        check_out_folder(self.out)
        check_models([self.source])

        import torch  # what is above needs none

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
        # Not as a model to be used, which would compute in another precision than it is stored in.
        dtype = getattr(torch, self.dtype) if self.dtype else None
        network, config = interop.load(path, lightning=lightning, dtype=dtype)
        tokenizer = interop.tokenizer_for(path, config)
        LanguageModel(network, config, tokenizer).save_pretrained(self.out)
        parameters = sum(p.numel() for p in network.parameters())
        say(f"wrote {self.out}: {config.title}, {parameters:,} parameters")
        return 0

    def _is_told_the_noise(self) -> bool | None:
        """What the two flags say; None where neither is given, which a pair of one field could not tell."""
        if self.time_conditioning and self.no_time_conditioning:
            raise ValueError("--time-conditioning and --no-time-conditioning must not both be given")
        return self.time_conditioning if self.time_conditioning or self.no_time_conditioning else None
