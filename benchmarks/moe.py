"""The experts of one sparse layer, each way to compute them: time, memory, what is saved, beside their GEMMs alone.

    python benchmarks/moe.py --model Qwen3-30B-A3B --tokens 1024 4096 8192 32768 --out moe.jsonl --routing --profile
    python benchmarks/moe.py --table moe.jsonl --plot moe.png

All ways run in one process, on one module of experts with random weights, on the same hidden states and routing: only
the experts are measured, neither the router nor what is around the block. Gradients go to the hidden states and to the
router's weights, with `--train experts` to the experts, too; Liger's kernels compute the experts' gradients always. A
way is timed only if it is right: its output and gradients are compared with eager's in a wider dtype, and may be off by
roundings or twice as far as "grouped_mm" is. Forward, backward (of one graph, again and again) and both are timed
separately, on a GPU between two events, the launches queued before; "host" is what Python needs for both. A way that
waits for the device has that in its times. The floor is the same grouped GEMMs alone, with the same rows an expert.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the repository root has to be importable, this folder need not be
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks import models, moe_results, stacks, train_step
from benchmarks.checkpointing import mark, milliseconds
from benchmarks.checkpointing_ways import Unavailable, library
from benchmarks.compare import conclude, parse_with_output
from benchmarks.meters import synchronize
from benchmarks.packing import append
from benchmarks.timing import CYCLES_PER_SECOND
from fastft.ops.moe import sort_by_expert

Line = dict[str, Any]
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

YARDSTICK = "grouped_mm"
WAYS = ("eager", YARDSTICK, "fastft", "liger")
# Launching takes less; a way that waits for the device takes longer, and gains nothing from a longer sleep.
LONGEST_SLEEP_S = 0.02
PROFILED_CALLS = 3


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sparse = [name for name, preset in models.PRESETS.items() if preset.moe]
    parser.add_argument("--model", choices=sparse, default="Qwen3-30B-A3B")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192, 32768])
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="default: all; a way named here has to be available")
    parser.add_argument("--train", choices=("nothing", "experts"), default="nothing", help="weights that are trained")
    parser.add_argument("--skew", type=float, default=0.0, help="deviation of the experts' popularity, in logits")
    parser.add_argument("--routing", action="store_true", help="time the order of tokens by expert alone, too")
    parser.add_argument("--profile", action="store_true", help="sum each way's kernel times in groups, too")
    parser.add_argument("--warmup", type=int, default=5, help="calls before the measured ones")
    parser.add_argument("--repeats", type=int, default=20, help="measured calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="draw times and saved bytes into this file")
    args = parse_with_output(parser, argv)
    if args.arguments or min(args.tokens) < 1 or min(args.warmup, args.repeats) < 2:
        parser.error("--tokens must be at least 1, --warmup and --repeats 2, and there is no train_step.py to call")
    return args


@dataclass
class Setup:
    """One model of one layer, and its experts, which every way computes with."""

    args: argparse.Namespace
    device: torch.device
    model: Any  # what fastft patches
    experts: Any
    facts: Line


@dataclass
class Case:
    """Inputs and incoming gradient of the experts, and where each expert's rows end."""

    hidden: torch.Tensor  # [T, H]
    indices: torch.Tensor  # int64 [T, K]
    weights: torch.Tensor  # [T, K]
    gradient: torch.Tensor  # [T, H]
    offsets: torch.Tensor  # int32 [E]


def build(args: argparse.Namespace, config: Any = None) -> Setup:
    """The preset with one layer, or a model of `config`."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    config = config or models.build_config(args.model, layers=1)
    model = models.build_model(config, "eager", device, args.seed).train()
    experts = next(module for name, module in model.named_modules() if name.endswith(".experts"))
    model.requires_grad_(False)
    experts.requires_grad_(args.train == "experts")
    for name, parameter in experts.named_parameters():
        if "bias" in name:  # zero at first, which would hide a bias that was left out
            torch.nn.init.normal_(parameter, std=config.initializer_range)
    facts = {
        "hardware": train_step.hardware(),
        "versions": train_step.versions(),
        "arguments": {key: value.name if isinstance(value, Path) else value for key, value in vars(args).items()},
        "experts": experts.num_experts,
        "top_k": config.num_experts_per_tok,
        "dtype": str(experts.down_proj.dtype).removeprefix("torch."),
    }
    return Setup(args, device, model, experts, facts)


def make_case(setup: Setup, tokens: int) -> Case:
    """Each token's experts are the largest of its logits; their weights a softmax over the chosen, as routers do."""
    config, dtype, number = setup.model.config, setup.experts.down_proj.dtype, setup.experts.num_experts
    generator = torch.Generator(setup.device).manual_seed(setup.args.seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=setup.device)

    hidden, gradient = (random(tokens, config.hidden_size).to(dtype) for _ in range(2))
    logits = random(tokens, number) + setup.args.skew * random(number)
    values, indices = logits.topk(config.num_experts_per_tok, dim=-1)
    weights = values.softmax(dim=-1).to(dtype)
    offsets = indices.flatten().bincount(minlength=number).cumsum(0, dtype=torch.int32)
    return Case(hidden.requires_grad_(), indices, weights.requires_grad_(), gradient, offsets)


def turn_on(setup: Setup, name: str) -> Experts:
    """Selects a way; what is returned takes hidden states, indices and weights. Raises Unavailable."""
    library().unpatch_model(setup.model)
    if name == "liger":
        return liger_experts(setup)
    if name != "fastft":
        setup.model.set_experts_implementation(name)
        return setup.experts
    setup.model.set_experts_implementation(YARDSTICK)
    library().patch_model(setup.model)
    chosen = setup.experts.config._experts_implementation
    if chosen != "fastft":
        left = {item.reason for item in library().report(setup.model).skipped if "expert" in f"{item.op} {item.reason}"}
        raise Unavailable(f"patch_model left the experts to {chosen!r}" + "".join(f"; {text}" for text in sorted(left)))
    return setup.experts


def liger_experts(setup: Setup) -> Experts:
    """The forward that Liger gives to a module of experts, bound to ours."""
    experts, activation = setup.experts, setup.model.config.hidden_act
    if importlib.util.find_spec("liger_kernel") is None:
        raise Unavailable("liger-kernel is not installed")
    if setup.device.type != "cuda":
        raise Unavailable("Liger's kernels need a GPU")
    if experts.has_bias or experts.is_transposed or not experts.is_concatenated or activation not in ("silu", "swish"):
        raise Unavailable("Liger's experts know no biases, no transposed or interleaved weights, and only SiLU")
    from liger_kernel.transformers.swiglu import LigerExperts  # type: ignore[import-not-found, unused-ignore]

    return partial(LigerExperts.forward, experts)


def wanted(setup: Setup, case: Case) -> dict[str, torch.Tensor]:
    """What gradients are computed of."""
    trained = {name: tensor for name, tensor in setup.experts.named_parameters() if tensor.requires_grad}
    return {"hidden": case.hidden, "topk_weights": case.weights, **trained}


def forward_backward(setup: Setup, case: Case, experts: Experts) -> tuple[torch.Tensor, ...]:
    output = experts(case.hidden, case.indices, case.weights)
    return output, *torch.autograd.grad(output, tuple(wanted(setup, case).values()), case.gradient)


def results(setup: Setup, case: Case, experts: Experts) -> dict[str, torch.Tensor]:
    found = forward_backward(setup, case, experts)
    return {name: x.detach() for name, x in zip(("output", *wanted(setup, case)), found, strict=True)}


def measure_errors(setup: Setup, case: Case) -> Line:
    """The truth, as eager finds it in a wider dtype, and how far the yardstick is from it."""
    turn_on(setup, "eager")
    wide = torch.float64 if case.hidden.dtype == torch.float32 else torch.float32
    exact = copy.deepcopy(setup.experts).to(wide)  # with its config, which stays "eager"
    hidden, weights, gradient = (x.detach().to(wide) for x in (case.hidden, case.weights, case.gradient))
    inputs = Case(hidden.requires_grad_(), case.indices, weights.requires_grad_(), gradient, case.offsets)
    truth = results(replace(setup, experts=exact), inputs, exact)
    found = results(setup, case, turn_on(setup, YARDSTICK))
    return {"truth": truth, "yardstick": moe_results.errors(found, truth)}


def time_call(call: Callable[[], Any], setup: Setup) -> Line:
    """Times of a call in ms: all, median, quartiles; and the host's, which of a way that waits holds the device's."""
    times, host, device = [], [], setup.device
    for _ in range(setup.args.warmup):
        synchronize(device)
        begin = time.perf_counter()
        call()
        host.append(time.perf_counter() - begin)
    host_s = statistics.median(host[1:])
    for _ in range(setup.args.repeats):
        synchronize(device)
        if device.type == "cuda":
            torch.cuda._sleep(int(min(2 * host_s + 1e-3, LONGEST_SLEEP_S) * CYCLES_PER_SECOND))
        first = mark(device)
        call()
        last = mark(device)
        synchronize(device)
        times.append(milliseconds(first, last))
    lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
    return {"ms": times, "median_ms": median, "lower_ms": lower, "upper_ms": upper, "host_ms": 1000 * host_s}


def time_way(setup: Setup, case: Case, experts: Experts) -> dict[str, Line]:
    inputs = tuple(wanted(setup, case).values())
    forward = partial(experts, case.hidden, case.indices, case.weights)
    both = partial(forward_backward, setup, case, experts)
    found = {"forward": time_call(forward, setup), "both": time_call(both, setup)}
    backward = partial(torch.autograd.grad, forward(), inputs, case.gradient, retain_graph=True)  # holds a graph: last
    return {**found, "backward": time_call(backward, setup)}


def peak_bytes(setup: Setup, action: Callable[[], Any]) -> int | None:
    """Most that an action allocates, over the state before."""
    if setup.device.type != "cuda":
        return None
    release(setup.device)
    before = torch.cuda.memory_allocated(setup.device)
    torch.cuda.reset_peak_memory_stats(setup.device)
    action()
    return torch.cuda.max_memory_allocated(setup.device) - before


def saved_bytes(setup: Setup, case: Case, experts: Experts) -> int:
    """Storages that autograd keeps for backward: each once, the inputs', too, but no parameter's."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in setup.experts.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # what is its own node's output would hold itself

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _output = experts(case.hidden, case.indices, case.weights)  # keeps them: no address is used twice
    return sum(size for address, size in kept.items() if address not in parameters)


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def profile_way(setup: Setup, case: Case, experts: Experts) -> Line | None:
    """Device time of a forward and backward by kernel; None where no device is."""
    if setup.device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_CALLS):
            forward_backward(setup, case, experts)
        torch.cuda.synchronize(setup.device)
    on_device = torch.autograd.DeviceType.CUDA
    events = [(x.name, x.time_range.elapsed_us() / 1000) for x in profiler.events() if x.device_type == on_device]
    return moe_results.group_kernels(events, PROFILED_CALLS)


def measure_floor(setup: Setup, case: Case) -> Line:
    """Each grouped GEMM alone, on random data; backward is dX of both, with dW if the experts are trained."""
    experts, rows, flops, parts = setup.experts, case.indices.numel(), 0, {}
    for name, weight in (("up", experts.gate_up_proj.detach()), ("down", experts.down_proj.detach())):
        weight = weight if experts.is_transposed else weight.transpose(1, 2)  # [E, in, out]
        x, dy = (torch.randn(rows, size, device=setup.device).to(weight.dtype) for size in weight.shape[1:])
        products = {"forward": (x, weight), "dX": (dy, weight.transpose(1, 2))}
        if setup.args.train == "experts":
            products["dW"] = (x.T, dy) if experts.is_transposed else (dy.T, x)
        for product, operands in products.items():
            parts[f"{name} {product}"] = time_call(partial(F.grouped_mm, *operands, offs=case.offsets), setup)
            flops += 2 * rows * weight.shape[1] * weight.shape[2]
    medians = {name: timing["median_ms"] for name, timing in parts.items()}
    forward = sum(ms for name, ms in medians.items() if name.endswith("forward"))
    both = sum(medians.values())
    found = {"forward_ms": forward, "backward_ms": both - forward, "both_ms": both, "tflops": flops / both / 1e9}
    return {**found, "parts": parts}


def order_of_transformers(indices: torch.Tensor, number: int) -> Any:
    """As grouped_mm does it: a sort, a histogram, its sum, and the inverse of the order."""
    experts, order = torch.sort(indices.reshape(-1))
    counts = torch.histc(experts.float() if experts.is_cpu else experts.int(), bins=number, min=0, max=number - 1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0), device=order.device)
    return order, inverse, torch.cumsum(counts, dim=0, dtype=torch.int32)


def order_of_eager(indices: torch.Tensor, number: int) -> Any:
    """As the model's own code does it: a mask of all experts, and the tokens of each expert that has some."""
    mask = F.one_hot(indices, num_classes=number).permute(2, 1, 0)
    hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    return [torch.where(mask[expert[0]]) for expert in hit]


ORDERS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "fastft, triton": partial(sort_by_expert, impl="triton"),
    "fastft, reference": partial(sort_by_expert, impl="reference"),
    "grouped_mm": order_of_transformers,
    "eager": order_of_eager,
}


def measure_order(setup: Setup, case: Case, name: str) -> Line:
    if "triton" in name:
        if setup.device.type != "cuda":
            raise Unavailable("Triton's kernels need a GPU; times of its interpreter mean nothing")
        pairs = zip(*(ORDERS[key](case.indices, len(case.offsets)) for key in (name, "fastft, reference")), strict=True)
        if not all(torch.equal(ours, plain) for ours, plain in pairs):
            return {"failure": "wrong: another order than the reference"}
    return {"order": time_call(partial(ORDERS[name], case.indices, len(case.offsets)), setup)}


def measure_way(setup: Setup, case: Case, name: str, known: Line, floor: Line) -> Line:
    """Everything of one way, if it is right."""
    experts = turn_on(setup, name)
    found = moe_results.errors(results(setup, case, experts), known["truth"])
    if reasons := moe_results.wrong(found, known["yardstick"], case.hidden.dtype):
        return {"failure": f"wrong: {'; '.join(reasons)}", "errors": found}
    times = time_way(setup, case, experts)
    shares = {part: floor[f"{part}_ms"] / timing["median_ms"] for part, timing in times.items() if "both_ms" in floor}
    return {
        **times,
        "share_of_floor": shares,
        "peak_bytes": peak_bytes(setup, partial(forward_backward, setup, case, experts)),
        "saved_bytes_per_token": saved_bytes(setup, case, experts) / len(case.hidden),
        "errors": found,
        "profile": profile_way(setup, case, experts) if setup.args.profile else None,
        "implementation": setup.experts.config._experts_implementation if name != "liger" else "LigerExperts",
        "stack_report": stacks.summarise_report(library().report(setup.model)) if name == "fastft" else None,
    }


def attempt(setup: Setup, action: Callable[[], Line]) -> Line:
    """What an action measures, or why it measured nothing: one way's error must not cost the others their numbers."""
    try:
        return action()
    except Unavailable as error:
        return {"unavailable": str(error)}
    except Exception as error:
        if "out of memory" in str(error):
            return {"failure": "out of memory"}
        traceback.print_exc()
        return {"failure": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}
    finally:
        release(setup.device)


def measure_tokens(setup: Setup, tokens: int) -> list[Line]:
    """The lines of all ways at one number of tokens."""
    case = make_case(setup, tokens)
    floor = attempt(setup, partial(measure_floor, setup, case))
    known = attempt(setup, partial(measure_errors, setup, case))
    lines = []
    for name in setup.args.ways or WAYS:
        print(f"{tokens} tokens: {name}", file=sys.stderr, flush=True)
        if "truth" in known:
            line = attempt(setup, partial(measure_way, setup, case, name, known, floor))
        else:
            line = {"failure": f"nothing to compare with: {known['failure']}"}
        lines.append({"kind": "way", "way": name, **line, "floor": floor})
    for name in ORDERS if setup.args.routing else ():
        line = attempt(setup, partial(measure_order, setup, case, name))
        lines.append({"kind": "routing", "way": name, **line, "floor": floor})
    return [{"tokens": tokens, "load": moe_results.load_of(case.offsets), **line, **setup.facts} for line in lines]


def measure_all(args: argparse.Namespace, config: Any = None) -> int:
    """Appends the lines of every number of tokens; how many failed, or were asked for and are not there."""
    setup, failed = build(args, config), 0
    for tokens in args.tokens:
        for line in measure_tokens(setup, tokens):
            append(args.out, line)
            asked = args.ways is not None and line["kind"] == "way"
            failed += "failure" in line or (asked and "unavailable" in line)
    library().unpatch_model(setup.model)
    return failed


def main(argv: list[str] | None = None, config: Any = None) -> int:
    args = parse_arguments(argv)
    failed = measure_all(args, config) if args.out is not None else 0
    return conclude(args, failed, moe_results.table, moe_results.plot)


if __name__ == "__main__":
    sys.exit(main())
