"""Where the time goes: names into groups, nothing counted twice, and the same steps as are timed."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bd3lm
from bd3lm.bench import (
    Kernel,
    SamplingCase,
    Shape,
    Timing,
    TrainingCase,
    measure_sampling,
    measure_training,
    sampling,
    training,
)
from bd3lm.bench import profile as profiling
from bd3lm.bench.profile import (
    ATTENTION,
    COMPILED,
    COPIES,
    DRAWING,
    ELEMENTWISE,
    FUSED,
    LOOKUPS,
    LOSS,
    OPTIMIZER,
    OTHER,
    OUR_KERNELS,
    PRODUCTS,
    VIEWS,
    group_of,
    idle_share,
    profile_calls,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = {"layers": 1, "hidden": 16, "heads": 2, "context": 8, "vocabulary": 11}
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, "
    "(at::native::ADAM_MODE)1, false>, float const*, double, double, double>"
)


# --- groups ---


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", PRODUCTS),
        (
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_32x1_tn_align8>",
            PRODUCTS,
        ),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute", PRODUCTS),
        ("ampere_sgemm_32x32_sliced1x4_tn", PRODUCTS),
        ("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>", PRODUCTS),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>", PRODUCTS),
        ("triton_tem_fused_addmm_view_4", PRODUCTS),
        ("triton_tem_fused_flex_attention_2", ATTENTION),
        ("triton_tem_fused_0", ATTENTION),
        ("triton_tem_fused_flex_attention_backward_7", ATTENTION),
        ("pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd>", ATTENTION),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64, 64, 256>>", ATTENTION),
        (
            "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)",
            ATTENTION,
        ),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x64", ATTENTION),
        (ADAM, OPTIMIZER),
        ("void at::native::lpnorm_cleanup<float, (at::native::NormType)1, float, float>", OPTIMIZER),
        ("triton_for_fused_0", OPTIMIZER),
        ("triton_poi_fused_add_gelu_3", ELEMENTWISE),
        ("triton_poi_fused_addmm_gelu_view_5", ELEMENTWISE),
        ("triton_poi_fused__scaled_dot_product_flash_attention_transpose_1", ELEMENTWISE),
        ("triton_red_fused_native_layer_norm_2", ELEMENTWISE),
        ("triton_per_fused_native_layer_norm_backward_9", ELEMENTWISE),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, "
            "std::array<char*, 1ul>>",
            ELEMENTWISE,
        ),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, sum_functor<float>>>",
            ELEMENTWISE,
        ),
        ("void (anonymous namespace)::elementwise_kernel_with_index<int, arange_cuda_out>", ELEMENTWISE),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>", ELEMENTWISE),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>", ELEMENTWISE),
        (
            "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, "
            "at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue>",
            LOSS,
        ),
        ("Memcpy HtoD (Pinned -> Device)", COPIES),
        ("Memset (Device)", COPIES),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda(TensorIteratorBase&)>", COPIES),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<4u>, unsigned int>", COPIES),
        ("void at::native::index_elementwise_kernel<128, 4, gpu_index_kernel<index_kernel_impl>>", LOOKUPS),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<Policy900, false, long>", LOOKUPS),
        ("_linear", FUSED),
        ("_attend", ATTENTION),
        ("_grad_logits", LOSS),
        ("_grad_logits_0", LOSS),
        ("_settle", DRAWING),
        ("a_kernel_of_tomorrow", OTHER),
    ],
)
def test_kernels_are_grouped_by_their_names(name, group):
    assert group_of(name, "cuda") == group


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("aten::mm", PRODUCTS),
        ("aten::addmm", PRODUCTS),
        ("aten::bmm", PRODUCTS),
        ("mkldnn::_linear_pointwise", PRODUCTS),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", ATTENTION),
        ("autograd::engine::evaluate_function: ScaledDotProductFlashAttentionForCpuBackward0", ATTENTION),
        ("_WeightedCrossEntropyBackward", LOSS),
        ("aten::_log_softmax", LOSS),
        ("aten::_foreach_lerp_", OPTIMIZER),
        ("aten::_fused_adamw_", OPTIMIZER),
        ("Optimizer.step#AdamW.step", OPTIMIZER),
        ("aten::copy_", COPIES),
        ("aten::cat", COPIES),
        ("aten::gelu_backward", ELEMENTWISE),
        ("aten::native_layer_norm", ELEMENTWISE),
        ("aten::__rshift__", ELEMENTWISE),
        ("aten::addcmul_", ELEMENTWISE),
        ("aten::embedding_dense_backward", LOOKUPS),
        ("aten::as_strided", VIEWS),
        ("detach", VIEWS),
        ("## Call CompiledFxGraph fkvii5r7kvz2fikkwuvrbz4zeqca2jjci7w5o2iw3l5ibipbjauq ##", COMPILED),
        ("CompiledFunctionBackward", COMPILED),
        ("MulBackward0", OTHER),
    ],
)
def test_operators_are_grouped_by_their_names(name, group):
    assert group_of(name, "cpu") == group


def launched_kernels() -> set[str]:
    """Functions of ours that are compiled by Triton and launched on a grid, from the source itself."""
    found = set()
    for path in Path(bd3lm.__file__).parent.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        compiled = {
            node.name
            for node in nodes
            if isinstance(node, ast.FunctionDef)
            and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        }
        launches = (node.func for node in nodes if isinstance(node, ast.Call))
        values = (func.value for func in launches if isinstance(func, ast.Subscript))
        found |= {value.id for value in values if isinstance(value, ast.Name)} & compiled
    return found


def test_every_kernel_of_ours_has_a_group():
    assert launched_kernels() == set(OUR_KERNELS)
    assert OTHER not in OUR_KERNELS.values()


# --- idleness ---


@pytest.mark.parametrize(
    ("intervals", "share"),
    [
        ([], 0.0),
        ([(3.0, 3.0)], 0.0),
        ([(1.0, 2.0)], 0.0),
        ([(0.0, 1.0), (3.0, 4.0)], 0.5),
        ([(3.0, 4.0), (0.0, 1.0)], 0.5),
        ([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (9.0, 10.0)], 0.4),
        ([(0.0, 2.0), (1.0, 3.0), (1.0, 3.0)], 0.0),
    ],
)
def test_idle_is_what_no_interval_covers(intervals, share):
    assert idle_share(intervals) == pytest.approx(share)


# --- profiles ---


@pytest.fixture
def watched(monkeypatch) -> list[torch.profiler.profile]:
    """The profilers that have watched calls."""
    profilers: list[torch.profiler.profile] = []
    watch = profiling._watched

    def remember(call, calls, device):
        profilers.append(watch(call, calls, device))
        return profilers[-1]

    monkeypatch.setattr(profiling, "_watched", remember)
    return profilers


@pytest.mark.parametrize("method", ["bd3lm", "ar"])
def test_a_profile_of_training_on_a_cpu_has_all_its_operators(method, watched):
    case = TrainingCase(shape=Shape(method=method, **SHAPE), batch_size=2, compile=False)
    timing = measure_training(case, device=CPU, warmup=1, steps=2, profile=True)
    assert len(timing.seconds) == 2
    profile = timing.profile
    assert (profile.calls, profile.seconds, profile.idle) == (3, timing.median, None)
    for group in (PRODUCTS, ATTENTION, LOSS, OPTIMIZER, ELEMENTWISE):
        assert profile.groups[group] > 0, group
    total = sum(event.self_cpu_time_total for event in watched[0].key_averages())
    assert sum(profile.groups.values()) == pytest.approx(1e-6 * total / 3, rel=1e-6)
    assert list(profile.groups.values()) == sorted(profile.groups.values(), reverse=True)
    assert len(profile.kernels[:10]) == 10  # and what else is of no group
    assert all(kernel.group == OTHER for kernel in profile.kernels[10:])
    # On idle cores a tenth; other work beside it may hold up any one operator.
    assert profile.groups.get(OTHER, 0.0) < 0.6 * sum(profile.groups.values())
    assert list(profile.kernels) == sorted(profile.kernels, key=lambda kernel: -kernel.seconds)


def test_without_being_asked_nothing_is_profiled(watched):
    case = TrainingCase(shape=Shape(**SHAPE), batch_size=1, compile=False)
    assert measure_training(case, device=CPU, warmup=0, steps=1).profile is None
    assert not watched


def test_a_profiled_step_must_be_finite_too(monkeypatch):
    def broken(step, **_):
        torch.nn.init.constant_(step.__self__.network.output.bias, torch.nan)
        step()

    monkeypatch.setattr(training, "profile_calls", broken)
    case = TrainingCase(shape=Shape(**SHAPE), batch_size=1, compile=False)
    with pytest.raises(FloatingPointError, match="not finite"):
        measure_training(case, device=CPU, warmup=0, steps=1, profile=True)


@pytest.mark.parametrize(("length", "profiled", "clocks"), [(8, 8, 1), (200, 128, 2)])
def test_a_profile_of_sampling_is_of_short_texts(length, profiled, clocks, timed, monkeypatch):
    """And beside it stand the seconds of texts as short."""
    seen = []

    def remember(call, *, device, calls, seconds):
        seen.append((call, calls, seconds))

    def clock(call, **options):
        timed.append(call)
        return Timing((float(len(timed)),), None)

    monkeypatch.setattr(sampling, "profile_calls", remember)
    monkeypatch.setattr(sampling, "time_calls", clock)
    case = SamplingCase(shape=Shape(**SHAPE), batch_size=2, length=length)
    timing = measure_sampling(case, device=CPU, profile=True)
    assert timing.seconds == (1.0,)
    ((call, calls, seconds),) = seen
    assert (calls, seconds, len(timed)) == (1, float(clocks), clocks)
    assert [len(text.tokens) for text in call()] == [profiled] * 2


def test_what_an_operator_does_for_the_loss_or_the_optimizer_is_theirs():
    step = SimpleNamespace(name="Optimizer.step#AdamW.step", cpu_parent=None)
    fused = SimpleNamespace(name="aten::_foreach_mul_", cpu_parent=step)
    loss = SimpleNamespace(name="_WeightedCrossEntropy", cpu_parent=None)

    def group(name, parent):
        return profiling._operator_group(SimpleNamespace(name=name, cpu_parent=parent))

    assert group("aten::mul_", fused) == group("aten::copy_", step) == OPTIMIZER
    assert group("aten::exp", loss) == LOSS
    assert group("aten::addmm", loss) == PRODUCTS
    assert group("aten::exp", None) == ELEMENTWISE


def event(name: str, start: float, end: float, device: str = "CUDA", annotation: bool = False):
    """As torch's profiler lists it, in microseconds."""
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        is_user_annotation=annotation,
        time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start),
    )


def test_on_a_gpu_kernels_are_counted_and_nothing_twice(monkeypatch):
    """Not the launches on the host, nor spans over kernels, nor waiting; the first call only warms up."""
    long = "void " + "x" * 100 + "gemm"
    listed = [
        event("cudaLaunchKernel", 0.0, 50.0, device="CPU"),
        event("ProfilerStep#3", 0.0, 100.0),
        event("## Call CompiledFxGraph abc ##", 0.0, 100.0),
        event("Torch-Compiled Region: 0/0", 0.0, 100.0),
        event("mine", 0.0, 100.0, annotation=True),
        event("Context Sync", 0.0, 100.0),
        event(long, 10.0, 30.0),
        event("_attend", 20.0, 40.0),
        event("_attend", 70.0, 80.0),
        event("Memcpy DtoH (Device -> Pinned)", 80.0, 90.0),
    ]
    watched = []

    def watch(call, calls, device):
        watched.append((calls, device))
        return SimpleNamespace(events=lambda: listed)

    monkeypatch.setattr(profiling, "_watched", watch)
    found = profile_calls(lambda: None, device=CUDA, calls=2, seconds=0.25)
    assert watched == [(1, CUDA), (2, CUDA)]
    assert (found.calls, found.seconds) == (2, 0.25)
    assert found.groups == pytest.approx({ATTENTION: 15e-6, PRODUCTS: 10e-6, COPIES: 5e-6})
    assert list(found.groups) == [ATTENTION, PRODUCTS, COPIES]
    assert found.idle == pytest.approx(30 / 80)
    assert found.kernels[0] == Kernel("_attend", ATTENTION, pytest.approx(15e-6), 1.0)
    assert found.kernels[1].name == "x" * 79 + "…"

    listed[:] = listed[:6]
    with pytest.raises(OSError, match="saw no kernel on the GPU"):
        profile_calls(lambda: None, device=CUDA, calls=2, seconds=0.25)


def test_what_cannot_be_profiled_is_refused():
    with pytest.raises(ValueError, match="calls must be at least 1, got 0"):
        profile_calls(lambda: None, device=CPU, calls=0, seconds=1.0)
    with pytest.raises(ValueError, match="device must be cpu or cuda, got 'meta'"):
        profile_calls(lambda: None, device=torch.device("meta"), calls=1, seconds=1.0)
