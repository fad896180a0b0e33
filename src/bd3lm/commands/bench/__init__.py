"""`bd3lm bench`: how fast this machine trains and samples, compared with a baseline in the same run."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, arg, subcommand

from bd3lm.commands.shared.command import Command
from bd3lm.commands.shared.flags import DeviceFlag, OptionalFile, named


def _is_on(compile: Literal["auto", "on", "off"], device: Any) -> bool:
    """Whether --compile says so; auto does on a GPU."""
    return bool(device.type == "cuda") if compile == "auto" else compile == "on"


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """The flags of every benchmark: the model, the device, and the file for the results."""

    method: Literal["bd3lm", "joint", "mdlm", "ar"] = "bd3lm"
    """Method of the model. joint: bd3lm, plus a next-token loss on the clean text, which is causal."""
    size: Annotated[
        str | None,
        named(
            "NAME",
            help="Size of a known network, such as smollm2-135m or qwen3-0.6b, instead of --layers, --hidden "
            "and --heads.",
        ),
    ] = None
    block_size: int = 4
    """Tokens per block."""
    hidden: int = 768
    """Width of the network."""
    heads: int = 12
    """Attention heads per layer."""
    context: int = 1024
    """Tokens per sequence."""
    device: DeviceFlag = None
    out: OptionalFile = None
    """Append the results to this file, as JSON lines."""

    def _shape(self, **more: Any) -> Any:
        from bd3lm.bench import Shape

        names = ("method", "size", "block_size", "hidden", "heads", "context")
        return Shape(**{name: getattr(self, name) for name in names}, **more)

    def _options(self) -> dict[str, Any]:
        from bd3lm.models.devices import pick_device

        return {"device": pick_device(self.device), "out": self.out}


@dataclass(frozen=True, kw_only=True)
class _BenchNetwork(_Bench):
    """The flags of benchmarks that run a whole network."""

    layers: int = 12
    """Layers of the network."""
    vocabulary: int = 50258
    """Size of the vocabulary."""

    def _network_shape(self, **more: Any) -> Any:
        return self._shape(layers=self.layers, vocabulary=self.vocabulary, **more)


@dataclass(frozen=True, kw_only=True)
class BenchTrain(_BenchNetwork):
    """Time training steps (forward, backward, clipping, AdamW, EMA) on random tokens."""

    batch_size: int = 32
    """Texts per batch."""
    dropout: float = 0.1
    """Dropout rate."""
    steps: int = 20
    """Steps to time, after three for warm-up."""
    profile: Annotated[
        bool,
        arg(
            help="Also show where the time goes: profile three more steps of each variant. The --out file "
            "also lists the longest single kernels."
        ),
    ] = False
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the variants whose name does not decide it. auto: only on a GPU."""
    variants: Annotated[
        tuple[str, ...] | None,
        named(
            "VARIANT ...",
            help="Any of compiled, eager, dense, two-pass, no-ema; the first is the baseline. Default: "
            "compiled on a GPU, else eager. On a CPU, BD3-LM always has a dense mask.",
        ),
    ] = None

    def run(self) -> int:
        from bd3lm.bench import TrainingCase
        from bd3lm.commands.bench.timing import bench_training

        options = self._options()
        compile = _is_on(self.compile, options["device"])
        shape = self._network_shape(dropout=self.dropout)
        case = TrainingCase(shape=shape, batch_size=self.batch_size, compile=compile)
        variants = self.variants if self.variants is not None else ("compiled" if compile else "eager",)
        bench_training(case, variants, steps=self.steps, profile=self.profile, **options)
        return 0


@dataclass(frozen=True, kw_only=True)
class BenchForward(_BenchNetwork):
    """Time only the forward pass of a training step, without backward pass and optimizer."""

    batch_size: int = 16
    """Texts per batch. The default is the paper's (Suppl. B.7)."""
    repeats: int = 20
    """Runs to time."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the network. auto: only on a GPU."""
    variants: Annotated[
        tuple[str, ...] | None,
        named(
            "VARIANT ...",
            help="Any of single-pass, two-pass, dense (one pass with a dense mask); the first is the "
            "baseline. Default: all that the method has. On a CPU, BD3-LM always has a dense mask.",
        ),
    ] = None

    def run(self) -> int:
        from bd3lm.bench import TrainingCase
        from bd3lm.commands.bench.timing import bench_forward

        options = self._options()
        compile = _is_on(self.compile, options["device"])
        shape = self._network_shape(dropout=0.0)
        case = TrainingCase(shape=shape, batch_size=self.batch_size, compile=compile, ema=False)
        bench_forward(case, self.variants, repeats=self.repeats, **options)
        return 0


@dataclass(frozen=True, kw_only=True)
class BenchSample(_BenchNetwork):
    """Time first-hitting sampling of a batch of texts, with random weights."""

    batch_size: int = 1
    """Texts per batch."""
    length: int = 512
    """Tokens per text."""
    top_p: float = 0.9
    """Draw only from the most likely tokens that together have this probability."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the weights. auto: bfloat16 on a GPU, else float32."""
    repeats: int = 3
    """Runs to time."""
    profile: Annotated[
        bool,
        arg(
            help="Also show where the time goes: profile one more run of each variant, with texts of at most "
            "128 tokens. The --out file also lists the longest single kernels."
        ),
    ] = False
    variants: Annotated[
        tuple[str, ...] | None,
        named(
            "VARIANT ...",
            help="Any of cached, unreplayed (on a GPU: kernels launched one by one), unfused (plain "
            "kernels), plain (both) and uncached; the first is the baseline. Default: cached, or "
            "uncached for MDLM, which has nothing to cache.",
        ),
    ] = None

    def run(self) -> int:
        from bd3lm.bench import SamplingCase
        from bd3lm.commands.bench.timing import bench_sampling

        options = self._options()
        on_gpu = options["device"].type == "cuda"
        case = SamplingCase(
            shape=self._network_shape(),
            batch_size=self.batch_size,
            length=self.length,
            top_p=self.top_p,
            dtype=("bfloat16" if on_gpu else "float32") if self.dtype == "auto" else self.dtype,
        )
        bench_sampling(case, self.variants, repeats=self.repeats, profile=self.profile, **options)
        return 0


@dataclass(frozen=True, kw_only=True)
class BenchAttention(_Bench):
    """Time the attention of one layer, with the mask of training."""

    batch_size: int = 32
    """Texts per batch."""
    repeats: int = 20
    """Runs to time."""
    variants: Annotated[tuple[str, ...], arg(metavar="VARIANT ...")] = ("auto", "dense")
    """Any of auto, flex, dense. Variants that are the same on this device are timed once."""

    def run(self) -> int:
        from bd3lm.bench import AttentionCase
        from bd3lm.commands.bench.timing import bench_attention

        case = AttentionCase(shape=self._shape(), batch_size=self.batch_size)
        bench_attention(case, self.variants, repeats=self.repeats, **self._options())
        return 0


Kinds = (
    Annotated[BenchTrain, subcommand("train", prefix_name=False)]
    | Annotated[BenchForward, subcommand("forward", prefix_name=False)]
    | Annotated[BenchSample, subcommand("sample", prefix_name=False)]
    | Annotated[BenchAttention, subcommand("attention", prefix_name=False)]
)


@dataclass(frozen=True)
class Bench(Command):
    """Measure how fast this machine trains and samples.

    Each variant is compared with a baseline in the same run.
    """

    kind = "bench"

    command: OmitArgPrefixes[Kinds]

    def run(self) -> int:
        return self.command.run()
