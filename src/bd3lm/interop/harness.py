"""Evaluate a model with lm-evaluation-harness (`lm_eval`, the extra `harness`).

Importing this module registers the model `bd3lm` with the harness. The harness does not look for models
outside its own package, so `python -m bd3lm.interop.harness` runs its command with our model added.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from bd3lm.diffusion import derive_seed
from bd3lm.evaluation import Figure
from bd3lm.io.console import Console
from bd3lm.lm import Gap, LanguageModel, Settings, build_estimator, load
from bd3lm.lm.generation import build_writer
from bd3lm.methods import Law
from bd3lm.models import pick_device

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"bd3lm.interop.harness needs the package lm_eval: pip install 'bd3lm[harness]' ({error})")

DTYPES = ("float32", "bfloat16", "float64")
_AUTO = "auto"  # the harness's word for a choice left to the model
_BATCH_SIZE = 8
_MAX_NEW_TOKENS = 256  # if a task does not say; the same as for the harness's own models
_OPTIONS = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "num_beams")


@dataclass(frozen=True)
class _Text:
    """Token ids. The first `given` of them are not scored."""

    tokens: list[int]
    given: int


@register_model("bd3lm")
class HarnessLM(LM):
    """A model as the harness sees it: likelihoods, exact or bounded, and continuations of contexts.

    `pretrained` is a run, model folder, GGUF file or hub id, or a loaded model. `estimator`, `samples` and
    `seed` are as in `LanguageModel.log_likelihood`, and `steps` as in `Settings`. `lean` replaces the lean of
    a block diffusion model, `law` selects the law of a joint model. A context begins like all texts of the
    model: with the BOS token if there is one. Otherwise only an empty context gets a first token, the end
    token. Tokens that do not fit into the network's context are dropped on the left. Batch size "auto" is 8,
    or `max_batch_size` if that is less; dtype "auto" is the same as None.
    """

    def __init__(
        self,
        pretrained: str | Path | LanguageModel,
        *,
        estimator: str = "auto",
        samples: int | None = None,
        law: Law | None = None,
        lean: float | None = None,
        steps: int | None = None,
        seed: int = 0,
        batch_size: int | str = _BATCH_SIZE,
        max_batch_size: int | str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        model = _open(pretrained, device, None if dtype == _AUTO else dtype, tokenizer)
        if law is not None:
            model = model.with_law(law)
        if lean is not None:
            model = model.with_lean(lean)
        if model.tokenizer is None:
            raise ValueError("the model was saved without a tokenizer; name one with tokenizer=")
        self.model, self.text_tokenizer, self.method = model, model.tokenizer, model.config.method
        self.context = model.config.network.context
        self.estimator, self.samples, self.seed = estimator, samples, seed
        self.batch_size = _batch_size(batch_size, max_batch_size)
        self.settings = Settings(steps=steps, batch_size=self.batch_size)
        self.begin = self._begin()
        build_writer(
            model.network, model.config, self.settings
        )  # refuses steps if the method does not take them
        self._figure: Figure | None = None  # SSD-LM has none
        if self.method.no_likelihood is None or estimator != "auto":
            self._figure = build_estimator(model.config, estimator).figures(model.network)[0]
        self._has_scored = self._has_written = False

    @property
    def figure(self) -> Figure | None:
        """The kind of likelihoods measured; None if there are none, for example after tasks that only
        generate texts."""
        return None if self._has_written and not self._has_scored else self._figure

    # --- the harness's interface ---

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """log p(continuation | context), and whether the continuation is what the model writes greedily.

        Greedy means the likeliest token at every position. A block diffusion model fills a block in a random
        order that follows from the seed, so its greedy text may also depend on the seed.
        """
        texts = [self._pair(*request.args) for request in requests]
        return list(zip(self._score(texts, disable_tqdm), self._are_greedy(texts), strict=True))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts, with each token scored once, in windows of the context that overlap by one
        token."""
        windows = [
            (index, window)
            for index, request in enumerate(requests)
            for window in self._windows(self.text_tokenizer.encode(request.args[0]))
        ]
        totals = [0.0] * len(requests)
        scores = self._score([window for _, window in windows], disable_tqdm)
        for (index, _), log_p in zip(windows, scores, strict=True):
            totals[index] += log_p
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations, each up to its first stop string or the end token.

        Each context has a seed of its own, whatever else is requested. Repeating a request gives it another
        seed.
        """
        self._has_written = True
        texts, seeds, repeats = [""] * len(requests), [], Counter[str]()
        alike: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            key = repr(request.args)
            seeds.append(derive_seed(self.seed, request.args[0], repeats[key]))
            repeats[key] += 1
            alike.setdefault(repr(request.args[1]), []).append(index)
        batches = [batch for indices in alike.values() for batch in self._batches(indices)]
        for some in self._track(batches, "writing texts", disable_tqdm):
            settings, until, length = self._options(requests[some[0]].args[1])
            prompts = [self._prompt(requests[index].args[0], length) for index in some]
            written = self._write(prompts, length, until, settings, [seeds[index] for index in some])
            for index, text in zip(some, written, strict=True):
                texts[index] = text
        return texts

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results next to its own settings."""
        figure = self.figure
        return {
            "model_title": self.model.config.title,
            "model_law": self.model.law,
            "model_dtype": str(self.model.network.dtype).removeprefix("torch."),
            "likelihoods": None if figure is None else figure.meaning,
            "estimator": None if figure is None else figure.name,
            "estimator_samples": self.samples,
            "estimator_seed": self.seed,
        }

    # --- tokens ---

    def _begin(self) -> list[int]:
        """The BOS token, or nothing for a model that predicts first tokens itself."""
        if self.method.score_first:
            return []
        for token in (self.text_tokenizer.bos_id, self.text_tokenizer.eos_id):
            if token is not None:
                return [token]
        raise ValueError("the tokenizer must have BOS or EOS, to begin texts with, got neither")

    def _pair(self, context: str, continuation: str) -> _Text:
        """Encode both together, and split where the context ends. Spaces at the end of the context belong to
        the continuation.

        The harness treats its own models this way.
        """
        before, begin = self.text_tokenizer.encode(context.rstrip()), self.begin
        if before and self.text_tokenizer.bos_id is None:
            begin = []
        given = begin + before
        whole = begin + self.text_tokenizer.encode(context + continuation)
        scored = whole[len(given) :]
        if not 0 < len(scored) <= self.context - len(self.begin):
            raise ValueError(
                f"a continuation must have 1 to {self.context - len(self.begin)} tokens after its context, "
                f"got {len(scored)} for {continuation!r:.80}"
            )
        tokens = [*given, *scored][-self.context :]
        return _Text(tokens, len(tokens) - len(scored))

    def _windows(self, tokens: list[int]) -> Iterator[_Text]:
        """Windows that score every token once. The last one reaches back as far as the context allows."""
        tokens, scored = [*self.begin, *tokens], len(self.begin)
        while scored < len(tokens):
            # The token before the first scored one is given, even if the text itself begins without one.
            end = min(len(tokens), self.context if scored <= len(self.begin) else scored - 1 + self.context)
            start = max(0, end - self.context)
            yield _Text(tokens[start:end], scored - start)
            scored = end

    def _prompt(self, context: str, length: int) -> list[int]:
        most = self.context if self.method.writes_past_context else self.context - length
        if most < 1:
            raise ValueError(
                f"max_gen_toks must be below {self.context}, the network's context, past which this model "
                f"does not write, got {length}"
            )
        given = self.text_tokenizer.encode(context)
        begin = [] if given and self.text_tokenizer.bos_id is None else self.begin
        return [*begin, *given][-most:]

    def _batches(self, indices: list[int]) -> list[list[int]]:
        return [indices[start : start + self.batch_size] for start in range(0, len(indices), self.batch_size)]

    def _track(self, batches: list[list[int]], what: str, disable: bool) -> Iterable[list[int]]:
        console = Console(stderr=True)
        return track(
            batches, what, console=console, transient=True, disable=disable or not console.is_terminal
        )

    # --- likelihoods ---

    def _score(self, texts: Sequence[_Text], disable_tqdm: bool) -> list[float]:
        """log p of the scored part of each text. Texts of similar lengths go together, the longest first."""
        self._has_scored = True
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index].tokens))
        scores = [0.0] * len(texts)
        for some in self._track(self._batches(order), "scoring texts", disable_tqdm):
            found = self.model.log_likelihood(
                [texts[index].tokens for index in some],
                given=[texts[index].given for index in some],
                estimator=self.estimator,
                samples=self.samples,
                seed=self.seed,
                batch_size=self.batch_size,
            )
            for index, each in zip(some, found, strict=True):
                scores[index] = each.log_p
        return scores

    def _are_greedy(self, texts: Sequence[_Text]) -> list[bool]:
        """Whether the scored part of each text is what the model writes there greedily.

        Most texts differ early, so they are compared in pieces, each twice as long as everything before it. A
        piece ends at the end of a block: what is written in a block does not depend on later blocks.
        """
        greedy, seen = [True] * len(texts), [text.given for text in texts]
        size = self.method.piece(self.context)
        while going := [i for i, text in enumerate(texts) if greedy[i] and seen[i] < len(text.tokens)]:
            ends = {}
            for i in going:
                least = seen[i] + max(1, seen[i] - texts[i].given)
                ends[i] = min(len(texts[i].tokens), -(-least // size) * size)
            written = self.model.generate(
                [[*texts[i].tokens[: seen[i]], Gap(ends[i] - seen[i])] for i in going],
                self.settings,
                seeds=[self.seed] * len(going),
                **self.method.greedy,
            )
            for i, each in zip(going, written, strict=True):
                greedy[i] = each.tokens == texts[i].tokens[: ends[i]]
                seen[i] = ends[i]
        return greedy

    # --- texts ---

    def _options(self, asked: Mapping[str, Any]) -> tuple[Settings, list[str], int]:
        """Sampling settings, stop strings and the number of tokens, from a task's generation options."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(dict(asked), _MAX_NEW_TOKENS))
        for name in options:
            if name not in _OPTIONS:
                raise ValueError(f"generation options must be among {', '.join(_OPTIONS)}, got {name}")
        if options.get("num_beams", 1) != 1:
            raise ValueError(f"num_beams must be 1 (no beam search), got {options['num_beams']}")
        if options["max_gen_toks"] < 1:
            raise ValueError(f"max_gen_toks must be at least 1, got {options['max_gen_toks']}")
        drawing, temperature = dict(self.method.greedy), options.get("temperature", 1.0)
        if options["do_sample"] and temperature:
            drawing = {
                "temperature": temperature,
                "top_k": options.get("top_k") or None,  # for Hugging Face 0 means off
                "top_p": options.get("top_p", 1.0),
            }
        return Settings.of(self.settings, drawing), options["until"], options["max_gen_toks"]

    def _write(
        self,
        prompts: Sequence[list[int]],
        length: int,
        until: list[str],
        settings: Settings,
        seeds: Sequence[int],
    ) -> list[str]:
        """The continuation of each prompt up to its stop."""
        written = self.model.generate(
            [[*prompt, Gap(length)] for prompt in prompts],
            settings,
            seeds=list(seeds),
            stop=[string for string in until if string],
        )
        return [each.completion or "" for each in written]


def _batch_size(asked: int | str, most: int | str | None) -> int:
    """The requested batch size; for "auto" or "auto:N" our own, at most `most`."""
    for name, value in (("batch_size", asked), ("max_batch_size", most)):
        automatic = name == "batch_size" and str(value).partition(":")[0] == _AUTO
        if value is not None and not automatic and not (str(value).isdecimal() and int(value) >= 1):
            also = f"; {_AUTO} is {_BATCH_SIZE}" if name == "batch_size" else ""
            raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}{also}")
    if str(asked).isdecimal():
        return int(asked)
    return _BATCH_SIZE if most is None else min(_BATCH_SIZE, int(most))


def _open(
    pretrained: str | Path | LanguageModel, device: str | None, dtype: str | None, tokenizer: str | None
) -> LanguageModel:
    if isinstance(pretrained, LanguageModel):
        if (device, dtype, tokenizer) != (None, None, None):
            raise ValueError("device, dtype and tokenizer must be None for a model that is already loaded")
        return pretrained
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return load(
        pretrained,
        device=pick_device(device),
        dtype=getattr(torch, dtype) if dtype else None,
        tokenizer=tokenizer,
    )


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
