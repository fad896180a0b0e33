"""A network with its config and tokenizer: from a folder, a file or the hub and back, and put to use.

huggingface_hub's ModelHubMixin is not used: it deletes config.json before it saves, and on loading hands the
fields of config.json to `__init__` by name, `network` among them. Its three methods are here instead.
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
    """A network, the method it was trained by, and its tokenizer where it was saved with one."""

    def __init__(
        self, network: Network, config: LanguageModelConfig, tokenizer: Tokenizer | None = None
    ) -> None:
        check_config(network, config)
        if tokenizer is not None and tokenizer.vocab_size > config.network.input_vocab_size:
            raise ValueError(
                f"tokenizer must have at most the network's {config.network.input_vocab_size} tokens, "
                f"got {tokenizer.vocab_size}"
            )
        if tokenizer is not None and tokenizer.mask_id != config.mask_id:
            raise ValueError(
                f"tokenizer must have the model's mask token {config.mask_id}, got {tokenizer.mask_id}"
            )
        self.network, self.tokenizer = network, tokenizer
        self.record = config
        """What the model is, as it is saved."""
        self.config = config.under(config.method.default_law)
        """What it writes and is measured by: the record's method under one of its laws."""
        self._last_writer: tuple[tuple[Settings, LanguageModelConfig], Writer] | None = None

    def __repr__(self) -> str:
        shape, parameters = self.config.network, sum(p.numel() for p in self.network.parameters())
        return (
            f"{type(self).__name__}({self.config.title}; {shape.summary}, "
            f"context {shape.context:,}, {parameters:,} parameters)"
        )

    def with_lean(self, lean: float) -> "LanguageModel":
        """The same network, writing and measured in another order of reveal: 0 is uniformly random, and with
        more the left of a block comes first. Nothing has to be trained for that."""
        record = replace(self.record, method=self.record.method.with_lean(lean))
        if self.law != "block":
            raise ValueError(f"lean is for the block law, got {lean} for a model under the {self.law} law")
        return type(self)(self.network, record, self.tokenizer).with_law("block")

    @property
    def law(self) -> Law:
        """The law that it writes and is measured in."""
        return self.config.method.default_law

    def with_law(self, law: Law) -> "LanguageModel":
        """The same network, writing and measured in another of its laws: a joint model has two, "block" and
        "causal"."""
        other = type(self)(self.network, self.record, self.tokenizer)
        other.config = self.record.under(law)
        return other

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self.network.device

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | str | None = None) -> Self:
        """Move the network, or change the type of its weights, in place; returns the model."""
        self.network.to(device=device, dtype=interop.floating_dtype(dtype))
        self._last_writer = None  # what it keeps lies where the network was
        return self

    def objective(self, training: Training | None = None) -> Objective:
        """What the model is trained with, so that it stays the model it is; `training` says how.

        `bd3lm.methods` has the options of each method, such as `BlockDiffusionTraining(next_token=1.0)`.
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
        """The mean loss of a batch in nats per token, differentiable, for a training loop of one's own.

        A tensor (rows, length) holds token ids, all of which are predicted but, unless the model predicts it
        too, the first of each row.
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
        """A saved model, in evaluation mode: a folder, a hub id "owner/name", a GGUF or a Lightning `.ckpt`
        file.

        A Llama-, Mistral- or Qwen-type checkpoint is one, as an autoregressive model. A training run's folder
        is one too, and "box" is the model that comes with this package. `lightning`
        says what a `.ckpt` leaves open. The default device is a GPU where there is one. Without a dtype
        weights keep theirs, but half precision becomes float32 on a CPU, where it is slow; one may be given
        by its name. `tokenizer` names one for a model that was saved without. `law` chooses one of a joint
        model's two, as `with_law` does.
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

        `settings`, or any field of `Settings` by name, say how. Each prompt has `count` texts, which follow
        one another. Each text has its own seed, derived from `settings.seed` and its place unless `seeds` are
        given, and does not depend on the others. In place of a `length`, which counts what is given too,
        `max_new_tokens` may say how many tokens at most follow what is given of each.
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
        """The same for one prompt, or several side by side, as events while it happens.

        `Started`, then for each block `BlockStarted`, `TokenRevealed` (and `TokenHidden` under remasking)
        and `BlockFinished`, at last `Stopped` with the sample. `event.index` says which text an event is of,
        and `event.text` what it looks like by then, with a sign in place of each mask. Without `watch` only
        when a text is stopped or drawn again, which does not hold the device up after every pass.
        `generation` gives a sample its text.
        """
        if seeds is not None and "seed" in changes:
            raise ValueError(
                f"seed is for texts without seeds of their own, got {changes['seed']!r} with seeds"
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
        """What writes texts that come and go at any time, at most `seats` side by side."""
        return TextEngine(self, seats=seats)

    def _writer(self, settings: Settings) -> Writer:
        """The last writer if these settings make the same one: on a GPU it keeps what it recorded."""
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
        """How likely each text is, up to one context long; nothing in it is sharpened.

        - "exact": the chain rule, or for block diffusion the sum over all orders of reveal (blocks up to 12);
        - "nelbo": the paper's bound from uniformly drawn mask rates, the mean of `samples` draws (16);
        - "nelbo:ordered": the same with rates spread over a batch in its order, as the paper says; no bound;
        - "nelbo:reference": so too, and with rates from 0.001 on, as the reference implementation; no bound;
        - "counts": the same bound from masks drawn by count, with less noise;
        - "iw:K": a tighter bound, from K orders of reveal;
        - "auto": exact where that takes at most 255 passes, else counts, else the NELBO;
        - "paper": what the paper prints: exact for an autoregressive model, else the NELBO.

        A text is scored from its first token on, after the token that texts begin with. Token ids are taken
        as they are: their first one is given, unless the model was trained to predict it (and so is a text's
        where the tokenizer has no token that texts begin with).

        With `prompts`, one for each text, it is the likelihood of the text as what follows its prompt. The
        two are tokenized apart, as `generate` has it, which goes on after the tokens of a prompt; a text that
        goes on after a word therefore begins with the space. `given` says the same of texts in one piece, by
        how many leading tokens of each are given.
        """
        several = listed(texts, argument="texts")
        if prompts is None:
            rows = text_tokens(several, self.config, self.tokenizer)
        elif given is not None:
            raise ValueError(
                f"either prompts or given may be given, got both: {prompts!r:.80} and {given!r:.80}"
            )
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
        """A sample with its text, which ends before the string that stopped it, where one did."""
        return Generation.of(sample, self.tokenizer)

    def save_pretrained(self, folder: str | Path) -> None:
        """Save in a folder, in our own format, the tokenizer with it.

        A model without one is not saved beside another's tokenizer, which it would be loaded with; nor is
        that deleted, since nothing says that it was ours.
        """
        path = local_path(folder)
        if self.tokenizer is None and (path / TOKENIZER_FILE).exists():
            raise ValueError(
                "folder must not hold the tokenizer of another model: this one has none, and would be loaded "
                f"with it; choose another folder or remove the file first, got {path / TOKENIZER_FILE}"
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
        """Save in a hub repository, made when it is not there; returns the address of the commit."""
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            commit = api.upload_folder(
                repo_id=repo_id, folder_path=folder, revision=revision, commit_message=commit_message
            )
        return commit.commit_url


load = LanguageModel.from_pretrained
