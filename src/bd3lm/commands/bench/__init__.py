"""`bd3lm bench`: how fast this machine trains and samples, beside a baseline in the same run."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, arg, subcommand

from bd3lm.commands.shared.command import Command
from bd3lm.commands.shared.flags import DeviceFlag, OptionalFile, named


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """What every benchmark takes: the model, the device, and where to keep what was measured."""

    method: Literal["bd3lm", "joint", "mdlm", "ar"] = "bd3lm"
    """joint is in blocks, with a next-token loss on the clean text, which is causal."""
    size: Annotated[str | None, named("NAME")] = None
    """A network by the name of its size, such as smollm2-135m or qwen3-0.6b, in place of layers, hidden and
    heads."""
    block_size: int = 4
    hidden: int = 768
    heads: int = 12
    context: int = 1024
    device: DeviceFlag = None
    out: OptionalFile = None
    """Append what was measured to this file, as JSON lines."""

    def _shape(self, **more: Any) -> Any:
        from bd3lm.bench import Shape

        names = ("method", "size", "block_size", "hidden", "heads", "context")
        return Shape(**{name: getattr(self, name) for name in names}, **more)

    def _options(self) -> dict[str, Any]:
        from bd3lm.models.devices import pick_device

        return {"device": pick_device(self.device), "out": self.out}


@dataclass(frozen=True, kw_only=True)
class BenchTrain(_Bench):
    """Training steps (forward, backward, clipping, AdamW, EMA) on random tokens."""

    layers: int = 12
    vocabulary: int = 50258
    batch_size: int = 32
    dropout: float = 0.1
    steps: int = 20
    """Steps to time, after three to warm up."""
    profile: bool = False
    """Also show where the time goes, by three more steps of each variant under torch's profiler. The file
    of --out has the longest single kernels too."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether variants that do not say so are compiled; auto is on a GPU."""
    variants: Annotated[tuple[str, ...] | None, named("VARIANT ...")] = None
    """Any of compiled, eager, dense, two-pass, no-ema; the others are compared with the first. By default
    compiled on a GPU, else eager. On a CPU a dense mask is what BD3-LM has anyway."""

    def run(self) -> int:
        from bd3lm.bench import TrainingCase
        from bd3lm.commands.bench.timing import bench_training

        options = self._options()
        on_gpu = options["device"].type == "cuda"
        compile = on_gpu if self.compile == "auto" else self.compile == "on"
        shape = self._shape(layers=self.layers, vocabulary=self.vocabulary, dropout=self.dropout)
        case = TrainingCase(shape=shape, batch_size=self.batch_size, compile=compile)
        variants = self.variants if self.variants is not None else ("compiled" if compile else "eager",)
        bench_training(case, variants, steps=self.steps, profile=self.profile, **options)
        return 0


@dataclass(frozen=True, kw_only=True)
class BenchForward(_Bench):
    """The forward pass of a training step alone, without a backward pass or an optimizer."""

    layers: int = 12
    vocabulary: int = 50258
    batch_size: int = 16
    """Texts side by side; by default as in the paper (Suppl. B.7)."""
    repeats: int = 20
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether the network is compiled; auto is on a GPU."""
    variants: Annotated[tuple[str, ...] | None, named("VARIANT ...")] = None
    """Any of single-pass, two-pass, dense (one pass, with a dense mask), by default all that the method has;
    the others are compared with the first. On a CPU a dense mask is what BD3-LM has anyway."""

    def run(self) -> int:
        from bd3lm.bench import TrainingCase
        from bd3lm.commands.bench.timing import bench_forward

        options = self._options()
        on_gpu = options["device"].type == "cuda"
        compile = on_gpu if self.compile == "auto" else self.compile == "on"
        shape = self._shape(layers=self.layers, vocabulary=self.vocabulary, dropout=0.0)
        case = TrainingCase(shape=shape, batch_size=self.batch_size, compile=compile, ema=False)
        bench_forward(case, self.variants, repeats=self.repeats, **options)
        return 0


@dataclass(frozen=True, kw_only=True)
class BenchSample(_Bench):
    """Writing texts side by side by first-hitting, with random weights."""

    layers: int = 12
    vocabulary: int = 50258
    batch_size: int = 1
    length: int = 512
    top_p: float = 0.9
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the weights; auto is bfloat16 on a GPU, else float32."""
    repeats: int = 3
    profile: bool = False
    """Also show where the time goes, by one more run of each variant under torch's profiler, in which texts
    have at most 128 tokens. The file of --out has the longest single kernels too."""
    variants: Annotated[tuple[str, ...] | None, named("VARIANT ...")] = None
    """Any of cached, unreplayed (on a GPU: kernels launched one by one), unfused (plain kernels), plain
    (both) and uncached; by default cached, or uncached for MDLM, which has nothing to cache."""

    def run(self) -> int:
        from bd3lm.bench import SamplingCase
        from bd3lm.commands.bench.timing import bench_sampling

        options = self._options()
        on_gpu = options["device"].type == "cuda"
        case = SamplingCase(
            shape=self._shape(layers=self.layers, vocabulary=self.vocabulary),
            batch_size=self.batch_size,
            length=self.length,
            top_p=self.top_p,
            dtype=("bfloat16" if on_gpu else "float32") if self.dtype == "auto" else self.dtype,
        )
        bench_sampling(case, self.variants, repeats=self.repeats, profile=self.profile, **options)
        return 0


@dataclass(frozen=True, kw_only=True)
class BenchAttention(_Bench):
    """The attention of one layer under the training layout."""

    batch_size: int = 32
    repeats: int = 20
    variants: Annotated[tuple[str, ...], arg(metavar="VARIANT ...")] = ("auto", "dense")
    """Any of auto, flex, dense; those that are the same on the device are timed once."""

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
    """How fast this machine trains and samples, each variant beside its baseline."""

    kind = "bench"

    command: OmitArgPrefixes[Kinds]

    def run(self) -> int:
        return self.command.run()
