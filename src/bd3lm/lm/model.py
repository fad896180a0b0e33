"""A network with its config and tokenizer: loading, saving, generating and scoring.

This module does not use huggingface_hub's ModelHubMixin, which deletes config.json before it saves and, on
loading, passes the fields of config.json to `__init__` by name, including `network`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self, Unpack

import torch
from huggingface_hub import HfApi
from torch import Tensor

from bd3lm import interop
from bd3lm.data import Tokenizer
from bd3lm.data.tokenizers import TOKENIZER_FILE
from bd3lm.interop import HubOptions, LightningFacts, check_config
from bd3lm.io.files import local_path
from bd3lm.lm.engine import TextEngine
from bd3lm.lm.generation import Generation, build_stopping, build_writer
from bd3lm.lm.prompts import Prompts, build_requests, continued_tokens, listed, repeated, text_tokens
from bd3lm.lm.scoring import TextLikelihood, score
from bd3lm.lm.signatures import shows_settings
from bd3lm.lm.streaming import with_texts
from bd3lm.methods import LanguageModelConfig, Law, Settings, SettingsKeywords, Training
from bd3lm.models import Network, pick_device
from bd3lm.objectives import Objective, TokenBatch
from bd3lm.sampling import Event, Sample, Stopped, Writer, write


class LanguageModel:
    """A network, the method that it was trained with, and its tokenizer if it was saved with one."""

    def __init__(
        self, network: Network, config: LanguageModelConfig, tokenizer: Tokenizer | None = None
    ) -> None:
        check_config(network, config)
        if tokenizer is not None and tokenizer.vocab_size > config.network.input_vocab_size:
            raise ValueError(
                f"tokenizer must have at most {config.network.input_vocab_size} tokens, as many as the "
                f"network, got {tokenizer.vocab_size}"
            )
        if tokenizer is not None and tokenizer.mask_id != config.mask_id:
            raise ValueError(
                f"tokenizer must have the model's mask token {config.mask_id}, got {tokenizer.mask_id}"
            )
        self.network, self.tokenizer = network, tokenizer
        self.record = config
        """The model's config as it is saved."""
        self.config = config.under(config.method.default_law)
        """The config that the model writes and is scored with: the record under one of its laws."""
        self._last_writer: tuple[tuple[Settings, LanguageModelConfig], Writer] | None = None

    def __repr__(self) -> str:
        shape, parameters = self.config.network, sum(p.numel() for p in self.network.parameters())
        return (
            f"{type(self).__name__}({self.config.title}; {shape.summary}, "
            f"context {shape.context:,}, {parameters:,} parameters)"
        )

    def with_lean(self, lean: float) -> "LanguageModel":
        """The same network with another order of reveal: 0 is uniformly random, and a larger number reveals
        the left of a block earlier. The network needs no further training."""
        record = replace(self.record, method=self.record.method.with_lean(lean))
        if self.law != "block":
            raise ValueError(f"lean is for the block law, got {lean} for a model under the {self.law} law")
        return type(self)(self.network, record, self.tokenizer).with_law("block")

    @property
    def law(self) -> Law:
        """The law that the model writes and is scored under."""
        return self.config.method.default_law

    def with_law(self, law: Law) -> "LanguageModel":
        """The same network under another of its laws. A joint model has two, "block" and "causal"."""
        other = type(self)(self.network, self.record, self.tokenizer)
        other.config = self.record.under(law)
        return other

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return self.network.device

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | str | None = None) -> Self:
        """Move the network, or change the type of its weights, in place. Returns the model."""
        self.network.to(device=device, dtype=interop.floating_dtype(dtype))
        self._last_writer = None  # it keeps tensors where the network was
        return self

    def objective(self, training: Training | None = None) -> Objective:
        """The training objective of the model's method. `training` sets the method's options.

        `bd3lm.methods` has a class of options for each method, such as
        `BlockDiffusionTraining(next_token=1.0)`.
        """
        method = self.record.method
        training = method.Training() if training is None else training
        if type(training) is not method.Training:
            raise ValueError(
                f"training must be a {method.Training.__name__} for method {method.kind}, got {training!r}"
            )
        return method.objective(training, self.config.frame)

    def loss(
        self,
        batch: TokenBatch | Tensor,
        training: Training | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The mean loss of a batch in nats per token, differentiable, for your own training loop.

        A tensor (rows, length) holds token ids. All of them are predicted, except the first of each row
        unless the model predicts first tokens too.
        """
        if not isinstance(batch, Tensor | TokenBatch):
            raise ValueError(f"batch must be token ids (rows, length) or a TokenBatch, got {batch!r:.80}")
        if isinstance(batch, Tensor):
            batch = TokenBatch.of(batch, score_first=self.record.method.score_first)
        return self.objective(training)(self.network, batch, generator=generator).mean()

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        lightning: LightningFacts | None = None,
        tokenizer: str | Path | None = None,
        law: Law | None = None,
        **hub: Unpack[HubOptions],
    ) -> "LanguageModel":
        """Load a model in evaluation mode.

        `source` is a folder, a training run's folder, a hub id "owner/name", a GGUF or Lightning `.ckpt`
        file, or "box", the model that comes with this package. A checkpoint of the Llama, Mistral or Qwen
        type loads as an autoregressive model.

        - `device`: by default a GPU if there is one.
        - `dtype`: a type or its name. By default weights keep theirs, except that half precision becomes
          float32 on a CPU, where it is slow.
        - `lightning`: settings that a `.ckpt` file does not record.
        - `tokenizer`: a tokenizer for a model that was saved without one.
        - `law`: one of a joint model's two laws, as in `with_law`.
        """
        device, dtype = pick_device(device), interop.floating_dtype(dtype)  # before any download
        path = interop.resolve(source, **hub)
        network, config = interop.load(path, device=device, dtype=dtype, lightning=lightning)
        if dtype is None and network.device.type == "cpu" and network.dtype.itemsize == 2:
            network.float()
        model = cls(network, config, interop.tokenizer_for(path, config, tokenizer))
        return model if law is None else model.with_law(law)

    @shows_settings
    def generate(
        self,
        prompts: Prompts = "",
        settings: Settings | None = None,
        *,
        count: int = 1,
        seeds: Sequence[int] | None = None,
        max_new_tokens: int | None = None,
        **changes: Unpack[SettingsKeywords],
    ) -> list[Generation]:
        """Continue each prompt: a text, token ids, or a template of texts and `Gap`s to fill.

        Set options with `settings`, or with any field of `Settings` by name. Each prompt gets `count` texts,
        which are next to each other in the result. Each text has its own seed and does not depend on the
        other texts: the seed is derived from `settings.seed` and the text's place in the result, unless you
        give `seeds`.

        `length` counts the given tokens too; `max_new_tokens` instead limits the tokens after each prompt.
        """
        events = self.stream(
            prompts,
            settings,
            count=count,
            seeds=seeds,
            max_new_tokens=max_new_tokens,
            watch=Settings.of(settings, changes).alternatives is not None,
            **changes,
        )
        samples = [event.sample for event in events if isinstance(event, Stopped)]
        return [self.generation(sample) for sample in sorted(samples, key=lambda sample: sample.index)]

    @shows_settings
    def stream(
        self,
        prompts: Prompts = "",
        settings: Settings | None = None,
        *,
        count: int = 1,
        seeds: Sequence[int] | None = None,
        max_new_tokens: int | None = None,
        watch: bool = True,
        **changes: Unpack[SettingsKeywords],
    ) -> Iterator[Event]:
        """Like `generate`, but yields events while the texts are written, for one prompt or several.

        A text's events are `Started`; for each block `BlockStarted`, `TokenRevealed` (and `TokenHidden` under
        remasking) and `BlockFinished`; finally `Stopped` with the sample. `event.index` is the number of the
        text. `event.text` is the text at that time, with a sign in place of each mask. `generation` turns a
        sample into a text.

        With `watch=False` you get events only when a text stops or is drawn again. This is faster, because
        the device need not report after every pass.
        """
        if seeds is not None and "seed" in changes:
            raise ValueError(
                f"seed is for texts that have no seeds of their own, got {changes['seed']!r} with seeds"
            )
        settings = Settings.of(settings, changes)
        settings.check_floor(self.config.network.input_vocab_size)
        stopping = build_stopping(settings, self.tokenizer)
        writer = self._writer(settings)
        requests = build_requests(
            repeated(listed(prompts), count),
            seeds,
            self.config,
            self.tokenizer,
            settings,
            stopping,
            max_new_tokens=max_new_tokens,
        )
        events = write(writer, requests, batch_size=settings.batch_size, watch=watch)
        return with_texts(events, self.tokenizer, self.config.mask_id)

    def engine(self, *, seats: int = 32) -> TextEngine:
        """An engine that takes texts at any time and writes at most `seats` of them at once."""
        return TextEngine(self, seats=seats)

    def _writer(self, settings: Settings) -> Writer:
        """The last writer, if these settings would make the same one: on a GPU it keeps its recorded
        graphs."""
        alike = settings.of_writer(self.config.method.writer_draws), self.config
        last = self._last_writer
        if last is None or last[0] != alike or last[1].model is not self.network:
            last = self._last_writer = alike, build_writer(self.network, self.config, settings)
        return last[1]

    def log_likelihood(
        self,
        texts: Prompts,
        *,
        prompts: Prompts | None = None,
        given: Sequence[int] | None = None,
        estimator: str = "auto",
        samples: int | None = None,
        seed: int = 0,
        batch_size: int = 8,
    ) -> list[TextLikelihood]:
        """The likelihood of each text, up to one context long. Sharpening never applies.

        - "exact": the chain rule, or for block diffusion the sum over all orders of reveal (blocks up to 12);
        - "nelbo": the paper's bound from uniformly drawn mask rates, the mean of `samples` draws (16);
        - "nelbo:ordered": the same with rates spread over a batch in order, as the paper says; not a bound;
        - "nelbo:reference": the same with rates from 0.001 on, as in the reference implementation; not a
          bound;
        - "counts": the NELBO from masks drawn by count, with less noise;
        - "iw:K": a tighter bound, from K orders of reveal;
        - "auto": exact if that takes at most 255 passes, else counts, else the NELBO;
        - "paper": the figure that the paper prints: exact for an autoregressive model, else the NELBO.

        A text is scored from its first token on, given the tokenizer's start token. Token ids are taken as
        they are: the first one is given, unless the model was trained to predict it. The same holds for a
        text if the tokenizer has no start token.

        With `prompts`, one for each text, the result is the likelihood of each text given its prompt. Prompt
        and text are tokenized separately, as in `generate`, so a text that continues after a word must begin
        with the space. `given` does the same for texts in one piece: it is the number of leading tokens that
        are given, for each text.
        """
        several = listed(texts, argument="texts")
        if prompts is None:
            rows = text_tokens(several, self.config, self.tokenizer)
        elif given is not None:
            raise ValueError(f"give either prompts or given, not both, got {prompts!r:.80} and {given!r:.80}")
        else:
            rows, given = continued_tokens(prompts, several, self.config, self.tokenizer)
        return score(
            self.network,
            self.config,
            rows,
            given=given,
            estimator=estimator,
            samples=samples,
            seed=seed,
            batch_size=batch_size,
        )

    def generation(self, sample: Sample) -> Generation:
        """A sample with its text, cut before the string that stopped it, if one did."""
        return Generation.of(sample, self.tokenizer)

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the model in a folder, in this package's format, with its tokenizer.

        A model without a tokenizer cannot be saved next to another model's tokenizer, since it would then
        load with it. That file is not deleted, because it may belong to something else.
        """
        path = local_path(folder)
        if self.tokenizer is None and (path / TOKENIZER_FILE).exists():
            raise ValueError(
                "folder must not hold another model's tokenizer: this model has none, and would load with "
                f"that one; choose another folder or remove the file first, got {path / TOKENIZER_FILE}"
            )
        interop.save(self.network, self.record, path)
        if self.tokenizer is not None:
            self.tokenizer.save(path)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        commit_message: str = "Save with bd3lm",
    ) -> str:
        """Save the model in a hub repository, which is created if missing. Returns the commit's address."""
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            commit = api.upload_folder(
                repo_id=repo_id, folder_path=folder, revision=revision, commit_message=commit_message
            )
        return commit.commit_url


load = LanguageModel.from_pretrained
