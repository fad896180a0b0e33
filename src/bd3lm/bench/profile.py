"""Where the time of a call goes: kernels on a GPU, operators on a CPU, grouped by name."""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.profiler import ProfilerActivity

PRODUCTS = "matrix products"
FUSED = "fused products"
ATTENTION = "attention"
LOSS = "head and loss"
DRAWING = "drawing tokens"
OPTIMIZER = "optimizer and averages"
ELEMENTWISE = "elementwise and norms"
COPIES = "copies"
LOOKUPS = "lookups and sorts"
VIEWS = "views and allocations"
COMPILED = "compiled code"
OTHER = "other"

# The functions that a pass launches; a test checks for others. Their products are of few tokens, fused with
# norm, bias, GELU, gate and residual.
OUR_KERNELS = {
    "_linear": FUSED,
    "_add_norm": ELEMENTWISE,
    "_swiglu": ELEMENTWISE,
    "_attend": ATTENTION,
    "_combine": ATTENTION,
    "_rotate": ELEMENTWISE,
    "_join": ELEMENTWISE,
    "_log_totals": LOSS,
    "_grad_logits": LOSS,
    "_score": DRAWING,
    "_settle": DRAWING,
}
# The first pattern found in a name decides. The name of a generated kernel lists the operations it was made
# from, even an added bias as "addmm", so the kind is checked before anything else.
_KERNELS = [
    (group, re.compile(pattern, re.IGNORECASE))
    for group, pattern in (
        (ATTENTION, r"^triton_tem_.*flex_(attention|decoding)"),
        (PRODUCTS, r"^triton_tem_.*mm"),
        (ATTENTION, r"^triton_tem_"),  # unnamed: templates serve either, and products name theirs
        (OPTIMIZER, r"^triton_for_"),
        (ELEMENTWISE, r"^triton_"),
        (COPIES, r"^(memcpy|memset)"),
        (ATTENTION, r"flash|fmha|sdpa|attention|flex_decoding|cudnn"),  # the only use of cuDNN's own kernels
        (OPTIMIZER, r"multi_tensor_apply|fused_?adam|foreach|lp_?norm|lerp"),
        (PRODUCTS, r"gemm|gemv|nvjet|cutlass|xmma|split_?k|cublas|dot_kernel"),
        (LOSS, r"log_?softmax|nll_loss|cross_?entropy"),
        (COPIES, r"copy_kernel|batchedcopy"),
        (LOOKUPS, r"(?<!with_)index|gather|scatter|embedding|sort|scan|topk|nonzero|deviceselect"),
        (ELEMENTWISE, r"elementwise|reduce_kernel|layer_?norm|gammabeta|softmax|gelu|dropout"),
    )
]
_OPERATORS = [
    (group, re.compile(pattern))
    for group, pattern in (
        (COMPILED, r"^## Call CompiledFxGraph|CompiledFunction|^Torch-Compiled Region|^TorchDynamo"),
        (ATTENTION, r"scaled_dot_product|ScaledDotProduct|flash_attention|flex_attention"),
        (OPTIMIZER, r"^Optimizer\.|_foreach_|_fused_adam|::lerp"),
        (LOSS, r"CrossEntropy|cross_entropy|nll_loss|log_softmax|logsumexp"),
        (PRODUCTS, r"^(mkl|mkldnn|onednn)::|::mkldnn_"),
    )
]
# torch operators by name, without the suffixes for "in place" and "backward".
_ATEN = {
    name: group
    for group, names in (
        (PRODUCTS, "mm bmm addmm _addmm_activation baddbmm addmv mv dot matmul linear einsum"),
        (COPIES, "copy _to_copy to clone contiguous cat stack"),
        (
            LOOKUPS,
            "index index_select index_add index_copy index_put _index_put_impl gather scatter scatter_add "
            "embedding embedding_dense masked_select nonzero nonzero_static sort argsort topk cumsum "
            "searchsorted randperm",
        ),
        (
            VIEWS,
            "view _unsafe_view view_as reshape as_strided transpose t numpy_T permute expand expand_as slice "
            "select narrow split split_with_sizes chunk unbind squeeze unsqueeze flatten unflatten alias "
            "detach lift_fresh resolve_conj resolve_neg real result_type empty empty_like empty_strided "
            "new_empty resize zeros zeros_like new_zeros ones ones_like full scalar_tensor",
        ),
        (
            ELEMENTWISE,
            "add sub rsub mul div addcmul addcdiv neg abs reciprocal exp exp2 log log1p sqrt rsqrt pow "
            "square cos sin tanh sigmoid gelu silu relu remainder floor_divide floor where masked_fill clamp "
            "clamp_min clamp_max maximum minimum max min amax amin argmax sum mean any all norm "
            "linalg_vector_norm layer_norm native_layer_norm softmax _softmax dropout native_dropout eq ne "
            "lt le gt ge isnan isfinite bitwise_and bitwise_or bitwise_xor bitwise_not logical_and "
            "logical_or logical_not __and__ __or__ __xor__ __rshift__ __lshift__ fill zero arange rand "
            "randint random uniform normal pad constant_pad_nd",
        ),
    )
    for name in names.split()
}
# An operator inside one of these belongs to it, except for the head's products.
_OWNERS = (ATTENTION, OPTIMIZER, LOSS)
# Spans over several kernels, and waiting, which the profiler lists like kernels.
_NO_KERNEL = re.compile(r"^(##|ProfilerStep|Torch-Compiled Region|Optimizer\.)|(^| )Sync$|^Stream Wait")
_LONGEST, _UNKNOWN, _NAME = 10, 3, 80  # kernels kept, even without a group; characters of a name


@dataclass(frozen=True)
class Kernel:
    """One kernel, or on a CPU one operator: seconds and launches per call."""

    name: str
    group: str
    seconds: float
    launches: float


@dataclass(frozen=True)
class Profile:
    """Where the time of a call goes, on average over `calls`.

    `seconds` are those of a call without the profiler. `groups` are seconds of kernels, longest first; they
    may add up to more than the call if kernels overlap. `idle` is the share of the time between the first and
    the last kernel in which the GPU ran none, while the profiler slowed the host; None on a CPU.
    """

    calls: int
    seconds: float
    groups: Mapping[str, float]
    kernels: tuple[Kernel, ...]
    idle: float | None


def profile_calls(call: Callable[[], object], *, device: torch.device, calls: int, seconds: float) -> Profile:
    """Profile calls that have run before, so nothing is compiled; without the profiler one took `seconds`."""
    if calls < 1:
        raise ValueError(f"calls must be at least 1, got {calls}")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device.type!r}")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler writes to stderr that it starts
    if device.type == "cpu":
        timed = [
            (event.name, _operator_group(event), 1e-6 * event.self_cpu_time_total)
            for event in _watched(call, calls, device).events() or []
        ]
        idle = None
    else:
        _watched(call, 1, device)  # the first launches under a profiler are slow
        watched = _watched(call, calls, device)
        kernels = [event for event in watched.events() or [] if _is_kernel(event)]
        if not kernels:
            raise OSError(
                "the profiler saw no kernel on the GPU; it may say why where KINETO_LOG_LEVEL=0 is in the "
                "environment"
            )
        timed = [
            (event.name, group_of(event.name, "cuda"), 1e-6 * event.time_range.elapsed_us())
            for event in kernels
        ]
        idle = idle_share([(event.time_range.start, event.time_range.end) for event in kernels])
    return _summed(timed, calls=calls, seconds=seconds, idle=idle)


@lru_cache(maxsize=4096)
def group_of(kernel_name: str, device_type: str) -> str:
    """The group of a kernel ("cuda") or an operator ("cpu"), by its name."""
    if device_type == "cuda":
        ours = OUR_KERNELS.get(re.sub(r"_\d\w*$", "", kernel_name))  # compilers number them
        return ours or _first(_KERNELS, kernel_name)
    group = _first(_OPERATORS, kernel_name)
    if group == OTHER:
        # Without a prefix there are only views, and backward nodes, which call operators.
        plain = re.sub(r"(_backward|_)$", "", kernel_name.removeprefix("aten::"))
        group = _ATEN.get(plain, _ATEN.get(kernel_name.removeprefix("aten::"), OTHER))
    return group


def idle_share(intervals: Iterable[tuple[float, float]]) -> float:
    """The share of the time from the first start to the last end that lies in no interval."""
    begun: float | None = None
    end = busy = 0.0
    for start, stop in sorted(intervals):
        if begun is None:
            begun = end = start
        busy += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    if begun is None or end == begun:
        return 0.0
    return max(1.0 - busy / (end - begun), 0.0)


def _watched(call: Callable[[], object], calls: int, device: torch.device) -> torch.profiler.profile:
    """A profiler that has observed some calls; on a GPU it records only kernels, to slow the host least."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(calls):
            call()
        if on_gpu:
            torch.cuda.synchronize(device)
    return profiler


def _is_kernel(event: Any) -> bool:
    """Whether it is a kernel, a copy or a fill, each counted once."""
    if event.device_type.name != "CUDA" or getattr(event, "is_user_annotation", False):
        return False
    return _NO_KERNEL.search(event.name) is None


def _operator_group(event: Any) -> str:
    own = group_of(event.name, "cpu")
    outer = event
    while outer is not None:
        group = group_of(outer.name, "cpu")
        if group in _OWNERS:
            return own if (own, group) == (PRODUCTS, LOSS) else group
        outer = outer.cpu_parent
    return own


def _summed(
    timed: Iterable[tuple[str, str, float]], *, calls: int, seconds: float, idle: float | None
) -> Profile:
    """(name, group, seconds) of each launch."""
    groups: dict[str, float] = defaultdict(float)
    totals: dict[tuple[str, str], float] = defaultdict(float)
    launches: dict[tuple[str, str], int] = defaultdict(int)
    for name, group, took in timed:
        groups[group] += took / calls
        totals[name, group] += took / calls
        launches[name, group] += 1
    by_time = sorted(totals, key=lambda key: -totals[key])
    unknown = [key for key in by_time[_LONGEST:] if key[1] == OTHER][:_UNKNOWN]
    longest = by_time[:_LONGEST] + unknown
    return Profile(
        calls=calls,
        seconds=seconds,
        groups={group: groups[group] for group in sorted(groups, key=lambda group: -groups[group])},
        kernels=tuple(
            Kernel(_shortened(key[0]), key[1], totals[key], launches[key] / calls) for key in longest
        ),
        idle=idle,
    )


def _first(rules: Iterable[tuple[str, re.Pattern[str]]], name: str) -> str:
    return next((group for group, pattern in rules if pattern.search(name)), OTHER)


def _shortened(name: str) -> str:
    name = name.removeprefix("void ")
    return name if len(name) <= _NAME else name[: _NAME - 1] + "…"
