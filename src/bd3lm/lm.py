"""A language model as users hold it: a network with its config, from a folder, a file or the hub and back.

huggingface_hub's ModelHubMixin is not used: it deletes config.json before it saves, and on loading hands the
fields of config.json to `__init__` by name, `network` among them. Its three methods are here instead.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Unpack

import torch
from huggingface_hub import HfApi

from bd3lm import interop
from bd3lm.config import LanguageModelConfig
from bd3lm.data import Tokenizer, saved_tokenizer
from bd3lm.interop import HubOptions, LightningFacts, check_config
from bd3lm.models import Transformer


class LanguageModel:
    """A network, the method it was trained by, and its tokenizer where it was saved with one."""

    def __init__(
        self, network: Transformer, config: LanguageModelConfig, tokenizer: Tokenizer | None = None
    ) -> None:
        check_config(network, config)
        if tokenizer is not None and tokenizer.vocab_size != config.network.vocab_size:
            raise ValueError(
                f"tokenizer must have the network's {config.network.vocab_size} tokens, "
                f"got {tokenizer.vocab_size}"
            )
        self.network, self.config, self.tokenizer = network, config, tokenizer

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        lightning: LightningFacts | None = None,
        **hub: Unpack[HubOptions],
    ) -> "LanguageModel":
        """A saved model, in evaluation mode: a folder, a hub id "owner/name" or a Lightning `.ckpt` file.

        A training run's folder is one too. `lightning` says what a `.ckpt` leaves open; without a dtype
        weights keep theirs.
        """
        path = interop.resolve(source, **hub)
        network, config = interop.load(path, device=device, dtype=dtype, lightning=lightning)
        return cls(network, config, saved_tokenizer(path))

    def save_pretrained(self, folder: str | Path) -> None:
        """Save in a folder, in our own format, the tokenizer with it."""
        interop.save(self.network, self.config, folder)
        if self.tokenizer is not None:
            self.tokenizer.save(folder)

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
