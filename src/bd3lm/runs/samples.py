"""Sample texts that a run writes at every validation, always with the same seeds."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bd3lm.data import Tokenizer
from bd3lm.interop.weights import build
from bd3lm.io.files import write_atomically
from bd3lm.io.terminal import as_utf8, one_entry, say
from bd3lm.lm import LanguageModel
from bd3lm.lm.generation import build_stopping
from bd3lm.lm.prompts import build_requests, text_seeds
from bd3lm.methods import LanguageModelConfig, Settings
from bd3lm.runs.sections import TrackerRecipe
from bd3lm.sampling.replay import without_replays
from bd3lm.training import SampleText, Tracker, Trainer
from bd3lm.training.distributed import whole
from bd3lm.training.log_window import Metrics

_TOKENS = 128  # tokens of a text, by default


class SampleTexts:
    """A validator that measures nothing and writes texts.

    It writes with a temporary copy of the averaged weights, so nothing it does reaches the network in
    training, whether sharded, compiled or neither. The main process writes while the others wait. The texts
    are those that the model released at this step writes with these settings. If something goes wrong, a line
    says so and training continues.
    """

    def __init__(
        self,
        recipe: TrackerRecipe,
        config: LanguageModelConfig,
        tokenizer: Tokenizer,
        *,
        seed: int,
        file: Path,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        """`file` gets a line of JSON for each text. Wrong prompts are refused here."""
        context = config.network.context
        length = min(_TOKENS, context) if recipe.sample_tokens is None else recipe.sample_tokens
        if length > context:
            raise ValueError(
                f"trackers.sample_tokens must be at most the context {context:,}, got {length:,}"
            )
        prompts = recipe.sample_prompts or ("",)
        self._prompts = [prompts[index % len(prompts)] for index in range(recipe.sample_texts)]
        self._seeds = text_seeds(seed, recipe.sample_texts)
        self._settings = Settings(length=length)
        self._config, self._tokenizer = config, tokenizer
        self._file, self._trackers = file, list(trackers)
        self._is_cut = False  # whether the file has been cut to end before this run's first text
        try:
            stopping = build_stopping(self._settings, tokenizer)
            build_requests(self._prompts, self._seeds, config, tokenizer, self._settings, stopping)
        except ValueError as error:
            raise ValueError(f"trackers.sample_prompts, with sample_tokens {length}: {error}") from None

    def __call__(self, trainer: Trainer) -> Metrics:
        weights = _whole_weights(trainer)
        if trainer.engine.is_main:
            try:
                texts = self._write(weights, trainer.engine.device)
                self._keep(trainer.step, texts)
            except Exception as error:
                reason = one_entry(f"{type(error).__name__}: {error}")
                say(
                    f"no sample texts of step {trainer.step}, training continues: {reason}",
                    to=sys.stderr,
                )
            else:
                for tracker in self._trackers:
                    tracker.on_texts(trainer, texts)
        trainer.engine.barrier()
        return {}

    def _write(self, weights: Mapping[str, Tensor], device: torch.device) -> list[SampleText]:
        devices = [device] if device.type == "cuda" else []
        # Passes are not recorded: no other thread of this process may interfere with a recording, and NCCL
        # has one.
        with torch.random.fork_rng(devices=devices), without_replays():
            network = build(self._config.network, weights, device=device, dtype=None, where="the run")
            model = LanguageModel(network, self._config, self._tokenizer)
            found = model.generate(self._prompts, self._settings, seeds=self._seeds)
        given = zip(self._prompts, self._seeds, found, strict=True)
        return [
            SampleText(index, seed, prompt, str(each), len(each.tokens), each.stopped_by)
            for index, (prompt, seed, each) in enumerate(given)
        ]

    def _keep(self, step: int, texts: Sequence[SampleText]) -> None:
        """Append the texts to the file.

        A resumed run first drops the texts from this step on, and a line that a crash tore.
        """
        lines = "".join(f"{json.dumps({'step': step, **vars(text)}, ensure_ascii=False)}\n" for text in texts)
        if not self._is_cut:
            before = [json.dumps(each, ensure_ascii=False) for each in self._kept() if each["step"] < step]
            write_atomically(self._file, as_utf8("".join(f"{line}\n" for line in before) + lines))
            self._is_cut = True
            return
        with self._file.open("ab") as file:
            file.write(as_utf8(lines))

    def _kept(self) -> list[dict[str, Any]]:
        if not self._file.is_file():
            return []
        found = []
        for line in self._file.read_bytes().split(b"\n"):
            try:
                entry = json.loads(line)
            except ValueError:  # torn, or written by another program
                continue
            if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                found.append(entry)
        return found


def _whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    """The current weights of the network, on the main process. Under FSDP all processes must call this, and
    the weights are gathered on the main process's host."""
    found = {}
    for name, parameter in trainer.network.named_parameters():
        weight = whole(parameter) if trainer.engine.parallel == "fsdp" else parameter.detach()
        if trainer.engine.is_main:
            found[name] = weight
    return found
