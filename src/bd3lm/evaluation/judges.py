"""Judges from the Hugging Face ecosystem: any causal language model from a folder, a hub id or a GGUF file.

Nothing that can run code is loaded. Weights are safetensors or GGUF, and a model with its own code is
refused. Only hub ids are downloaded.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bd3lm.io.extras import require
from bd3lm.io.files import local_path
from bd3lm.io.hub import hub_reason, is_hub_id

DEFAULT_JUDGE = "gpt2-large"
GGUF = ".gguf"
JUDGE_SOURCES = f"a local folder, a {GGUF} file or a hub id such as {DEFAULT_JUDGE}"

_PATTERNS = ("*.json", "model*.safetensors", "*.txt", "*.model")  # the files of models and tokenizers
_POSITIONS = 64  # positions to normalize at a time: other logits stay in the judge's own precision


class HuggingFaceJudge:
    """A causal language model of `transformers`, with its tokenizer."""

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        self.model, self.tokenizer, self.name = model.eval(), tokenizer, name
        self.dtype = str(model.dtype).removeprefix("torch.")
        config = model.config.get_text_config()
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self.eos_id = _end_token(tokenizer, config.vocab_size, name)
        self._check_causal()

    @classmethod
    def load(
        cls,
        source: str | Path = DEFAULT_JUDGE,
        *,
        from_hub: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "HuggingFaceJudge":
        """The judge in a local folder, in a GGUF file or on the hub. With `from_hub` only on the hub."""
        transformers = require("transformers", "judge", "a judge")
        folder, name = _download(str(source)) if from_hub else _resolve(source)
        # A GGUF file is loaded by folder and file name; `transformers` needs two more packages to read it.
        options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
        if folder.suffix == GGUF:
            for package in ("gguf", "accelerate"):
                require(package, "judge", f"judge {str(source)!r}, a GGUF file,")
            folder, options["gguf_file"] = folder.parent, folder.name
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, **options
            )
        except Exception as error:  # each kind of model fails in its own way
            raise ValueError(
                f"judge {str(source)!r} must be a causal language model that transformers can load: "
                f"{_one_line(error)}"
            ) from error
        return cls(model.to(device), tokenizer, name)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""
        ids: list[int] = self.tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        )["input_ids"]
        return ids

    @torch.no_grad()
    def log_p(self, tokens: Tensor) -> Tensor:
        """log p of each token given those before it in its row, (rows, length); the first column is 0."""
        tokens = tokens.to(self.model.device)
        logits = self.model(input_ids=tokens, use_cache=False).logits
        found = torch.zeros(tokens.shape, dtype=torch.promote_types(logits.dtype, torch.float32))
        for start in range(1, tokens.shape[1], _POSITIONS):
            targets = tokens[:, start : start + _POSITIONS]
            part = logits[:, start - 1 : start - 1 + targets.shape[1]].to(found.dtype)
            chosen = part.gather(2, targets.unsqueeze(2)).squeeze(2)
            found[:, start : start + _POSITIONS] = (chosen - part.logsumexp(2)).cpu()
        return found

    @torch.no_grad()
    def features(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The last hidden state of the last token of each row, (rows, hidden)."""
        hidden = self.model.base_model(input_ids=tokens.to(self.model.device), use_cache=False)[0]
        return hidden[torch.arange(len(tokens)), lengths - 1].float().cpu()

    def _check_causal(self) -> None:
        """Refuse a network that looks ahead, as BERT does: it loads like any other, but sees the answers."""
        before, same = self.log_p(torch.tensor([[1, 2, 3], [1, 2, 4]]))[:, 1]
        if (before - same).abs() > max(1e-3, 32 * torch.finfo(self.model.dtype).eps):
            raise ValueError(f"judge {self.name} must be causal, got a network that looks ahead")


def _resolve(source: str | Path) -> tuple[Path, str]:
    """A folder or a GGUF file, and the name of the judge in it."""
    path = local_path(source)
    if (source != "" and path.is_dir()) or (path.is_file() and path.suffix == GGUF):
        return path, path.resolve().name
    if path.exists() or not is_hub_id(str(source)):
        raise ValueError(
            f"judge must be {JUDGE_SOURCES}, got {'the file ' if path.is_file() else ''}{str(source)!r}"
        )
    return _download(str(source))


def _download(hub_id: str) -> tuple[Path, str]:
    """Download from the hub; returns the local folder and the id."""
    if not is_hub_id(hub_id):
        raise ValueError(f"judge must be a hub id, 'owner/name' or 'name', and not a file, got {hub_id!r}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_PATTERNS))), hub_id
    except Exception as error:  # offline, not found, no access, and many others
        raise ValueError(
            f"judge {hub_id!r} could not be downloaded from the Hugging Face hub: {hub_reason(error)}. "
            f"It may be {JUDGE_SOURCES}"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _end_token(tokenizer: Any, vocab_size: int, name: str) -> int:
    """The id of the end token. A tokenizer without its files may load with almost no vocabulary."""
    if len(tokenizer) < vocab_size // 2:
        raise ValueError(
            f"judge {name} must come with its tokenizer, got one of {len(tokenizer)} tokens for a network of "
            f"{vocab_size}"
        )
    eos_id = tokenizer.eos_token_id
    if not isinstance(eos_id, int) or eos_id >= vocab_size:
        raise ValueError(f"judge {name} must have an end token below {vocab_size}, got {eos_id}")
    return eos_id
