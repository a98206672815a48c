"""The benchmark programs on a CPU: the JSON they print, how kernels are sorted, the arithmetic of the GEMM floor."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import gemm_floor, models, profile_step, stacks, text, train_step  # noqa: E402
from benchmarks.meters import SynchronizationCounter  # noqa: E402

SENTENCE = "the cook mixes flour with eggs and milk then lets the batter rest before the pan is hot"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {"instruction": f"Tell me about step {i}.", "input": "", "output": SENTENCE[: 9 + 5 * (i % 16)] + "."}
        for i in range(120)
    ]
    path = tmp_path_factory.mktemp("data") / "rows.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "benchmarks" / "train_step.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False, timeout=300)


def tiny_run(data: Path, *arguments: str) -> dict:
    common = ["--model", "tiny", "--steps", "2", "--warmup", "1", "--length", "128", "--data", str(data)]
    finished = run_program(*common, *arguments)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout)  # stdout is one JSON line and nothing else


def test_transformers_lora_packed_prints_the_schema(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "results" / "lines.jsonl"
    result = tiny_run(data, "--stack", "transformers", "--profile", "--out", str(out))
    assert json.loads(out.read_text(encoding="utf-8")) == result
    assert len(result["step_ms"]) == len(result["tokens_per_step"]) == 2
    assert len(result["losses"]) == 1 + 2 + 3  # warm-up, measured, profiled
    assert all(0 < loss < 10 for loss in result["losses"])
    assert result["tokens_per_step"] == result["places_per_step"]  # packing leaves no padding
    assert all(n > 2 for n in result["documents_per_step"])
    assert result["real_tokens_per_s"] == pytest.approx(1000 * sum(result["tokens_per_step"]) / sum(result["step_ms"]))
    assert result["step_ms_min"] <= result["step_ms_median"]
    assert 0 < result["first_step_s"] < result["first_step_s_from_start"]
    assert 0 < result["trained_parameters"] < result["parameters"]
    assert result["peak_memory_gb"] is None and result["hardware"]["gpu"] is None
    assert result["versions"]["torch"] == metadata.version("torch")
    assert result["arguments"]["data"] == data.name
    assert result["attention"] == "sdpa"
    # A CPU run has no device timeline: the split says that all of the step is without GPU work.
    assert result["profile"]["busy_ms"] == 0
    assert "gemm_floor" not in result


def test_transformers_full_padded_counts_real_tokens_only(data: Path) -> None:
    padded = ["--no-packing", "--rows", "4"]
    result = tiny_run(data, "--stack", "transformers", "--method", "full", "--checkpointing", "off", *padded)
    assert result["trained_parameters"] == result["parameters"]
    assert result["documents_per_step"] == [4, 4]
    assert all(real < places for real, places in zip(result["tokens_per_step"], result["places_per_step"], strict=True))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stack", "unsloth"], ["--stack unsloth", "needs"]),
        (["--stack", "liger"], ["--stack liger", "needs"]),
        (["--stack", "transformers", "--method", "qlora"], ["qlora"]),
    ],
)
def test_refuses_what_is_not_there(arguments: list[str], words: list[str]) -> None:
    finished = run_program("--model", "tiny", *arguments)
    assert finished.returncode == 3
    assert finished.stdout == ""
    assert all(word in finished.stderr for word in words), finished.stderr


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stacks.NEEDED_PACKAGES, "fastft", ("no_such_package",))
    with pytest.raises(stacks.StackUnavailable, match="pip install no-such-package"):
        stacks.check_available("fastft", "lora")


def test_a_stack_that_changes_what_a_step_does_is_refused() -> None:
    asked = {name: 1 for name in train_step.SAME_WORK}
    train_step.check_same_work(asked, SimpleNamespace(**asked))
    with pytest.raises(RuntimeError, match=r"\{'gradient_accumulation_steps': 2\} where .*: 1\}"):
        train_step.check_same_work(asked, SimpleNamespace(**{**asked, "gradient_accumulation_steps": 2}))


def test_attention_starts_from_what_the_stack_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert stacks.choose_attention("transformers", "Llama-3.2-1B", None, cpu) == "sdpa"
    assert stacks.choose_attention("transformers", "Llama-3.2-1B", "eager", cpu) == "eager"
    assert stacks.choose_attention("transformers", "gpt-oss-20b", None, cpu) == "eager"
    monkeypatch.setattr(stacks.importlib.util, "find_spec", lambda name: object())  # flash_attn is installed
    assert stacks.choose_attention("transformers", "Llama-3.2-1B", None, gpu) == "flash_attention_2"
    assert stacks.choose_attention("fastft", "Llama-3.2-1B", None, gpu) == "sdpa"
    assert stacks.choose_attention("fastft", "Llama-3.2-1B", None, gpu, "packing=False") == "flash_attention_2"


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_nn_align8>(Params)", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasSplitKParams<float>)", "gemm"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<GroupProblemShape>>", "gemm"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", "attention"),
        ("_varlen_attention_forward_kernel", "attention"),
        ("_forward_kernel", "loss"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<4>>", "optimizer"),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*, unsigned char*)", "dequantize"),
        ("_rms_norm_forward_kernel", "norm"),
        ("_rope_qk_kernel", "rope"),
        ("_swiglu_backward_kernel", "activation"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel(TensorIteratorBase&)>",
            "activation",
        ),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda()>", "copy_cast"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<OpaqueType<2u>>", "copy_cast"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>", "reduce"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float>", "softmax"),
        ("void at::native::indexSelectLargeIndex<c10::BFloat16, long, unsigned int>", "index"),
        ("void somebody::unheard_of(int)", "other"),
    ],
)
def test_kernel_names_are_sorted(name: str, group: str) -> None:
    assert profile_step.classify_kernel(name) == group


def test_split_of_a_trace() -> None:
    def device(name: str, ts: float, dur: float, cat: str = "kernel") -> dict:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}

    trace = [
        device("nvjet_tst", 0, 1000),
        device("Memcpy HtoD", 500, 1000, "gpu_memcpy"),  # half of it beside the GEMM
        device("flash_fwd_kernel", 3000, 2000),
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "ts": 0, "dur": 5},
        {"ph": "X", "cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": 0, "dur": 5},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 0, "dur": 5},
        {"ph": "M", "name": "process_name"},
    ]
    split = profile_step.split_trace(trace, steps=2, wall_ms=8.0)
    assert split["groups_ms"] == {"attention": 1.0, "gemm": 0.5, "memcpy": 0.5}
    assert split["busy_ms"] == pytest.approx(1.75)  # a sum of the groups would give 2.0
    assert split["idle_ms"] == pytest.approx(4.0 - 1.75)
    assert (split["launches"], split["device_operations"], split["synchronizations"]) == (1.0, 1.5, 0.5)
    assert split["top_kernels"][0] == {"name": "flash_fwd_kernel", "group": "attention", "ms": 1.0, "count": 0.5}


def test_launches_a_layer_are_counted_from_mark_to_mark() -> None:
    def event(name: str, ts: float, tid: int = 1, cat: str = "cuda_runtime") -> dict:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "tid": tid, "dur": 1}

    def mark(name: str, ts: float, tid: int = 1) -> dict:
        return event(f"layer mark: {name}", ts, tid, "user_annotation")

    trace = [
        mark("forward 0", 10), mark("forward 1", 20), mark("forward 2", 30),
        *(event("cudaLaunchKernel", ts) for ts in (5, 11, 12, 13, 21, 22, 23, 24, 25, 35)),
        event("cudaLaunchKernel", 14, tid=2), event("cudaMemcpyAsync", 15),
        mark("backward 2", 50, tid=2), mark("backward 1", 60, tid=2),
        *(event("cuLaunchKernelEx", ts, tid=2, cat="cuda_driver") for ts in (45, 51, 52)),
        event("cudaLaunchKernel", 53),
    ]  # fmt: skip
    assert profile_step.count_layer_launches(trace) == {"forward": 4, "backward": 2}
    assert profile_step.count_layer_launches(trace[:3]) == {"forward": None, "backward": None}


def test_marks_are_set_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_models import tiny_model

    model, seen = tiny_model("llama", num_hidden_layers=3), []
    monkeypatch.setattr(profile_step, "count_layer_launches", lambda events: seen.extend(events))
    profile_step.layer_launches(model, lambda: model(torch.arange(6)[None]).logits.sum().backward())
    marks = [event["name"] for event in seen if str(event.get("name", "")).startswith("layer mark: ")]
    forward, backward = ([f"layer mark: {way} {place}" for place in range(3)] for way in ("forward", "backward"))
    assert marks == forward + backward[::-1]
    assert not model.model.layers[0]._forward_pre_hooks


def test_floor_flops_of_llama_lora() -> None:
    config = models.build_config("Llama-3.2-1B")
    flops = gemm_floor.floor_flops(config, 8192, train_weights=False, checkpointing=True)
    layers = 16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192)
    head = 2048 * 128256
    assert flops == {
        "layers forward": 2 * 8192 * layers,
        "layers dX": 2 * 8192 * layers,
        "layers recompute": 2 * 8192 * layers,
        "head forward": 2 * 8192 * head,
        "head dX": 2 * 8192 * head,
    }
    floor = sum(count for part, count in flops.items() if part != "layers recompute")
    assert floor == pytest.approx(40.5e12, rel=0.01)


def test_floor_trains_weights_only_in_full_fine_tuning() -> None:
    config = models.build_config("Qwen3-8B", 8)
    lora = gemm_floor.floor_flops(config, 100, train_weights=False, checkpointing=False)
    full = gemm_floor.floor_flops(config, 100, train_weights=True, checkpointing=False)
    assert sum(full.values()) == 1.5 * sum(lora.values())


@pytest.mark.parametrize(("name", "layers", "teraflops"), [("Qwen3-30B-A3B", 4, 17.7), ("gpt-oss-20b", 4, 35.5)])
def test_floor_counts_the_chosen_experts_only(name: str, layers: int, teraflops: float) -> None:
    flops = gemm_floor.floor_flops(models.build_config(name, layers), 8192, train_weights=False, checkpointing=False)
    assert sum(flops.values()) / 1e12 == pytest.approx(teraflops, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-3.2-1B", 1.236),
        ("Qwen3-0.6B", 0.596),
        ("Qwen3-8B", 8.19),
        ("Qwen3-14B", 14.77),
        ("Qwen3-30B-A3B", 30.53),
    ],
)
def test_presets_have_the_published_sizes(name: str, billions: float) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(models.build_config(name))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.002)


def test_tokenizer_is_deterministic_and_pads_with_an_id_of_its_own(data: Path) -> None:
    rows = text.load_rows(data, seed=0)
    first, name = text.build_tokenizer(rows, 1024, "local")
    second, _ = text.build_tokenizer(rows, 1024, "local")
    ids = first(rows[0]["output"])["input_ids"]
    assert first.get_vocab() == second.get_vocab()
    assert first.decode(ids) == rows[0]["output"]
    assert first.pad_token_id not in {first.eos_token_id, *ids} and "local" in name


def test_dataset_is_long_enough_and_changes_with_the_seed(data: Path) -> None:
    rows = text.load_rows(data, seed=0)
    tokenizer, _ = text.build_tokenizer(rows, 1024, "local")
    options: dict[str, Any] = {"batches": 9, "rows_per_batch": 2, "length": 512, "packing": True}
    first, facts = text.build_dataset(rows, tokenizer, **options, seed=0)
    other, _ = text.build_dataset(rows, tokenizer, **options, seed=1)
    assert len(first) * facts["mean_tokens"] > 9 * 2 * 512
    assert first["text"][:] != other["text"][:]


def test_report_summary_counts_by_operation() -> None:
    report = SimpleNamespace(
        replaced=[SimpleNamespace(op="rms_norm"), SimpleNamespace(op="rms_norm"), SimpleNamespace(op="rope")],
        skipped=[SimpleNamespace(op="moe")],
        counters={"rms_norm": 7},
    )
    summary = stacks.summarise_report(report)
    assert summary["replaced"] == {"rms_norm": 2, "rope": 1}
    assert summary["skipped"] == {"moe": 1}
    assert summary["counters"] == {"rms_norm": 7}


def test_what_waits_is_counted_by_its_line(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    counter = SynchronizationCounter(count_from=1)

    def waits(times):
        for _ in range(times):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    for step, times in enumerate((5, 1, 2)):
        state = SimpleNamespace(global_step=step)
        with contextlib.suppress(UserWarning):  # of the step that is not counted
            counter.on_step_begin(None, state, None)
            waits(times)
        counter.on_pre_optimizer_step(None, state, None)
    line = waits.__code__.co_firstlineno + 2
    assert counter.per_step() == {f"test_benchmarks.py:{line}": 1.5}
    assert modes == ["warn", "default"] * 2
