"""Names from other libraries for our settings, flags and commands, and what to use instead.

A user of transformers, vLLM or LLaDA types `max_length` or `--num-beams`. The most similar name here often
means something else, so a suggestion by spelling would mislead. This module imports nothing, so the answer
comes at once.
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

_OURS = re.compile(r"\{(\w+)(?:=(\w+))?\}")

_SAYS = "use {%s}"
_DRAWN = "texts are sampled from the model; use {temperature=0} to take the most likely token"
_NO_SEARCH = "there is no beam search; use {temperature=0} to take the most likely token each time"
_NO_PENALTY = "there are no penalties; use {entropy_floor} to end texts that repeat themselves"
_NO_CUT = "use {top_p} or {top_k} to keep only the most likely tokens"
_NO_LEAST = (
    "there is no minimum: a text ends at the end token or at {length}; use {stop_at_eos=False} to ignore the "
    "end token"
)
_NO_PADDING = "texts of different lengths need no padding; {length} is the maximum length"
_PROMPTS = "pass prompts first, without a name; {max_new_tokens} limits the tokens after them"

_ADVICE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("max_length", "max_len", "total_length"),
            "use {length}, which counts the prompt too, or {max_new_tokens}, which does not",
        ),
        **dict.fromkeys(
            ("max_tokens", "max_gen_toks", "max_gen_len", "gen_length", "new_tokens", "num_tokens"),
            _SAYS % "max_new_tokens",
        ),
        **dict.fromkeys(
            ("num_return_sequences", "num_samples", "n", "num_sequences", "num_texts", "best_of"),
            _SAYS % "count",
        ),
        **dict.fromkeys(("min_length", "min_new_tokens", "min_tokens"), _NO_LEAST),
        **dict.fromkeys(("do_sample", "greedy", "sample"), _DRAWN),
        **dict.fromkeys(
            ("num_beams", "beam_size", "beams", "num_beam_groups", "length_penalty", "early_stopping"),
            _NO_SEARCH,
        ),
        **dict.fromkeys(
            (
                "repetition_penalty",
                "frequency_penalty",
                "presence_penalty",
                "no_repeat_ngram_size",
                "encoder_repetition_penalty",
            ),
            _NO_PENALTY,
        ),
        **dict.fromkeys(("nucleus", "nucleus_p", "topp", "p"), _SAYS % "top_p"),
        "nucleus_rule": _SAYS % "top_p_rule",
        **dict.fromkeys(("topk", "k"), _SAYS % "top_k"),
        **dict.fromkeys(("typical_p", "min_p", "top_a", "epsilon_cutoff", "eta_cutoff"), _NO_CUT),
        **dict.fromkeys(("temp", "t"), _SAYS % "temperature"),
        **dict.fromkeys(("batch", "bs", "micro_batch_size", "max_num_seqs"), _SAYS % "batch_size"),
        **dict.fromkeys(
            ("stop_strings", "stop_sequences", "stop_words", "until", "stopping_criteria"), _SAYS % "stop"
        ),
        **dict.fromkeys(("eos_token_id", "eos_token", "stop_token_ids"), _SAYS % "eos_id"),
        **dict.fromkeys(("ignore_eos", "no_eos", "eos"), _SAYS % "stop_at_eos=False"),
        **dict.fromkeys(("pad_token_id", "pad_token", "attention_mask", "padding"), _NO_PADDING),
        **dict.fromkeys(
            ("logprobs", "top_logprobs", "output_scores", "output_logits"), _SAYS % "alternatives"
        ),
        "use_cache": _SAYS % "cache",
        **dict.fromkeys(("generator", "random_seed", "manual_seed", "random_state"), _SAYS % "seed"),
        **dict.fromkeys(
            ("diffusion_steps", "num_steps", "denoising_steps", "num_inference_steps", "sampling_steps"),
            _SAYS % "steps",
        ),
        **dict.fromkeys(("threshold", "confidence_threshold"), _SAYS % "confidence"),
        **dict.fromkeys(("eta", "remasking"), "use {remask}, a share, together with {steps}"),
        **dict.fromkeys(
            ("block_length", "block_size"),
            "a model writes blocks of the size it was trained with; {tokens_per_pass} sets how many tokens "
            "are revealed at once",
        ),
        **dict.fromkeys(("prompt", "text", "texts", "inputs", "input_ids"), _PROMPTS),
    }
)


_OF_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("output", "output_file", "output_path", "save", "save_to", "outfile"), _SAYS % "out"
        ),
        **dict.fromkeys(("prompt_file", "prompts_file", "input_file", "prompt_from"), _SAYS % "prompts_from"),
        **dict.fromkeys(("gpu", "cuda"), _SAYS % "device=cuda"),
        "cpu": _SAYS % "device=cpu",
        **dict.fromkeys(("precision", "torch_dtype", "fp16", "half"), _SAYS % "dtype"),
        "bf16": _SAYS % "dtype=bfloat16",
        **dict.fromkeys(("text", "texts", "dataset", "dataset_path", "corpus"), _SAYS % "data"),
        **dict.fromkeys(("limit", "max_samples", "num_samples"), _SAYS % "sequences"),
    }
)
"""For flags that only commands have."""

_OF_RECIPES: Mapping[str, str] = MappingProxyType(
    {
        "learning_rate": "optimizer.lr",
        **dict.fromkeys(("max_steps", "num_steps", "iterations", "max_iters"), "train.steps"),
        **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "train.steps"),
        **dict.fromkeys(("batch", "batch_size", "train_batch_size"), "train.global_batch"),
        "per_device_train_batch_size": "train.micro_batch",
        "gradient_accumulation_steps": "train.micro_batch",
        "warmup": "optimizer.warmup_steps",
        **dict.fromkeys(("max_grad_norm", "grad_clip", "clip"), "optimizer.clip_norm"),
        **dict.fromkeys(("eval_steps", "eval_every", "val_every"), "train.validate_every"),
        **dict.fromkeys(("save_steps", "save_every"), "train.checkpoint_every"),
        **dict.fromkeys(("logging_steps", "log_steps"), "train.log_every"),
        **dict.fromkeys(("fp16", "bf16", "dtype"), "train.precision"),
        **dict.fromkeys(("dataset", "data_path", "data_dir", "text"), "data.path"),
        **dict.fromkeys(
            ("seq_len", "seq_length", "max_length", "max_seq_length", "block_length"), "data.context"
        ),
        **dict.fromkeys(("num_layers", "n_layer", "depth"), "network.layers"),
        **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), "network.hidden"),
        **dict.fromkeys(("num_heads", "n_head", "num_attention_heads"), "network.heads"),
        **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads"), "network.kv_heads"),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "mlp_dim"), "network.mlp_width"),
        **dict.fromkeys(("rope_theta", "rope_base"), "network.rotary_base"),
        "rms_norm_eps": "network.norm_eps",
        **dict.fromkeys(("tie_word_embeddings", "tie_embeddings"), "network.tied"),
        **dict.fromkeys(("output_dir", "output"), "out"),
        **dict.fromkeys(("model", "checkpoint", "model_name_or_path", "init_from"), "from"),
    }
)
"""Flags of other trainers, and the flag of `bd3lm train` that does the same."""

_OF_COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("generate", "write", "complete", "infer", "inference", "run"), "sample"),
        **dict.fromkeys(("talk", "converse", "interactive"), "chat"),
        **dict.fromkeys(("evaluate", "test", "perplexity", "ppl", "validate"), "eval"),
        **dict.fromkeys(("fit", "finetune", "fine-tune", "pretrain", "resume"), "train"),
        **dict.fromkeys(("prepare", "tokenize", "preprocess"), "data prepare"),
        **dict.fromkeys(("list", "ls", "recipes", "configs", "models"), "presets"),
        **dict.fromkeys(("likelihood", "logprobs", "log-likelihood"), "score"),
        **dict.fromkeys(("lm-eval", "lm_eval", "tasks"), "harness"),
        **dict.fromkeys(("import", "load"), "convert"),
        **dict.fromkeys(("save", "publish"), "export"),
        **dict.fromkeys(("benchmark", "profile", "speed"), "bench"),
        "help": "--help",
        "version": "--version",
    }
)

_OF_PYTHON: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("streamer", "stream"), "use stream(...) instead of generate(...)"),
        "lean": "it belongs to the model: use with_lean(...).generate(...)",
        **dict.fromkeys(
            ("device", "dtype", "torch_dtype"),
            "it belongs to the model: use bd3lm.load(..., device=..., dtype=...)",
        ),
    }
)


def settings_in(advice: str) -> set[str]:
    """Our settings that a piece of advice names."""
    return {found[1] for found in _OURS.finditer(advice)}


def advice_in_python(word: str) -> str | None:
    """Advice for a keyword of another library; None if it is unknown."""
    if word in _ADVICE:
        return _spelt(_ADVICE[word], lambda name, value: name if value is None else f"{name}={value}")
    return _OF_PYTHON.get(word)


def advice_in_flags(flag: str, known: set[str]) -> str | None:
    """The same for a flag such as --max-length; None also if the command lacks our flag."""
    word = flag.removeprefix("--").replace("-", "_")
    for advices in (_ADVICE, _OF_FLAGS):
        if word in advices and settings_in(advices[word]) <= known:
            return _spelt(advices[word], _flag)
    return None


def advice_in_recipes(flag: str) -> str | None:
    """Advice for a flag of other trainers; None if it is unknown."""
    field = _OF_RECIPES.get(flag.removeprefix("--").replace("-", "_"))
    return None if field is None else f"use --{field}"


def command_for(word: str) -> str | None:
    """Our command or flag that does what this command of other programs does."""
    return _OF_COMMANDS.get(word)


def _flag(name: str, value: str | None) -> str:
    shown = name.replace("_", "-")
    if value == "False":
        return f"--no-{shown}"
    return f"--{shown}" if value is None else f"--{shown} {value}"


def _spelt(advice: str, spell: Callable[[str, str | None], str]) -> str:
    return _OURS.sub(lambda found: spell(found[1], found[2]), advice)
