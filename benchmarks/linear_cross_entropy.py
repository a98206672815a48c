"""A language model's head with its loss, each way to compute it: time, memory and error, beside its GEMMs alone.

    python benchmarks/linear_cross_entropy.py --hidden 4096 --vocab 151936 --tokens 1024 8192 32768 --out head.jsonl
    python benchmarks/linear_cross_entropy.py --table head.jsonl --plot head.png

All ways run in one process, on the same random hidden states, weight and targets, and compute the sum of the tokens'
losses over the number of targets, with its gradients by the hidden states and, with `--head trained`, by the weight.
Forward and backward are timed together, on a GPU between two events, the launches queued before; "host" is what Python
needs for them. A way that waits for the device has that in its time. The memory is the most that a call allocates over
the operands, its gradients included. A way is timed only if its loss and gradients are those of logits in a wider
dtype, as far as sums in its own can be. With `--ignored` a part of the tokens has no target: fastft is told how many
have one, which a collator knows; cut and trl drop the others, which waits for the device; eager and liger do not.

The floor is the products alone (two, with a trained head three) of the tokens with a target, and one read and write of
their logits, which is what makes gradients of them. "fastft-none" has a gradient for each token and tells entropies and
argmax, too.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

if not __package__:  # run as a script: the repository root has to be importable, this folder need not be
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.nn.functional as F

from benchmarks import linear_cross_entropy_results as results
from benchmarks import moe, moe_results, train_step
from benchmarks.checkpointing_ways import Unavailable
from benchmarks.compare import conclude, parse_with_output
from benchmarks.packing import append
from fastft.capability import probe
from fastft.ops.linear_cross_entropy import linear_cross_entropy, token_log_probs, verdicts

Line = dict[str, Any]
Loss = Callable[[], torch.Tensor]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FLOOR = "floor"
IGNORED = -100
# Logits of random tokens deviate by so much, as a trained model's roughly do.
LOGITS_DEVIATION = 3.0
# What eager needs for a logit: its log-probability and two gradients in fp32; with a softcap its tanh, too.
EAGER_BYTES, SOFTCAP_BYTES = 12, 4
# Logits that the oracle holds at a time, and rows of the weight whose gradients are compared.
ORACLE_LOGITS, COMPARED_ROWS = 2**26, 64
# Rows of the floor's logits begin at multiples of it: a GEMM that finds them unaligned is a slow one.
PADDING = 64


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096, help="size of a hidden state")
    parser.add_argument("--vocab", type=int, default=151936, help="number of logits of a token")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768])
    names = (FLOOR, *WAYS)
    parser.add_argument("--ways", nargs="+", choices=names, help="default: all; a way named here has to be available")
    parser.add_argument("--head", choices=("frozen", "trained"), default="frozen")
    parser.add_argument("--ignored", type=float, default=0.0, help="share of the tokens that have no target")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--softcap", type=float, default=0.0, help="0: none")
    parser.add_argument("--warmup", type=int, default=5, help="calls before the measured ones")
    parser.add_argument("--repeats", type=int, default=20, help="measured calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="draw times and memory into this file")
    args = parse_with_output(parser, argv)
    if args.arguments or min(args.hidden, args.vocab, *args.tokens) < 1 or min(args.warmup, args.repeats) < 2:
        parser.error("sizes must be at least 1, --warmup and --repeats 2, and there is no train_step.py to call")
    if not 0 <= args.ignored < 1 or args.softcap < 0:
        parser.error("--ignored must be from 0 to less than 1, --softcap not negative")
    return args


# --------------------------------------------------------------------------------------------------------------- inputs


@dataclass
class Setup:
    """What all numbers of tokens share."""

    args: argparse.Namespace
    device: torch.device
    weight: torch.Tensor  # [V, H], which requires a gradient if the head is trained
    facts: Line

    def for_moe(self) -> moe.Setup:
        """As moe's functions want it: those that are used here ask for arguments and device alone."""
        return cast(moe.Setup, self)


@dataclass
class Case:
    """The operands of one number of tokens."""

    hidden: torch.Tensor  # [T, H]
    weight: torch.Tensor  # [V, H]
    targets: torch.Tensor  # int64 [T]
    num_valid: int  # targets that are not ignored
    num_items: torch.Tensor  # their number on the device, as a trainer has it
    softcap: float
    compared: torch.Tensor  # int64: rows of the weight, some of them targets, whose gradients are compared

    def wanted(self) -> dict[str, torch.Tensor]:
        """What gradients are computed of."""
        return {"hidden": self.hidden, **({"weight": self.weight} if self.weight.requires_grad else {})}

    def known(self) -> dict[str, Any]:
        """Options of fastft's functions: the number of targets is news only if some are ignored."""
        count = self.num_valid if self.num_valid < len(self.targets) else None
        return {"num_valid": count, "softcap": self.softcap}


def build(args: argparse.Namespace) -> Setup:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(args.seed)
    options: dict[str, Any] = {"generator": generator, "device": device, "dtype": DTYPES[args.dtype]}
    weight = torch.randn(args.vocab, args.hidden, **options).mul_(LOGITS_DEVIATION / math.sqrt(args.hidden))
    facts = {
        "hardware": train_step.hardware(),
        "versions": {**train_step.versions(), "cut-cross-entropy": version("cut-cross-entropy")},
        "arguments": {key: value.name if isinstance(value, Path) else value for key, value in vars(args).items()},
    }
    return Setup(args, device, weight.requires_grad_(args.head == "trained"), facts)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def make_case(setup: Setup, tokens: int) -> Case:
    args, device, weight = setup.args, setup.device, setup.weight
    generator = torch.Generator(device).manual_seed(args.seed + 1)
    hidden = torch.randn(tokens, args.hidden, generator=generator, device=device, dtype=weight.dtype)
    targets = torch.randint(args.vocab, (tokens,), generator=generator, device=device)
    num_valid = max(1, tokens - round(args.ignored * tokens))
    order = torch.randperm(tokens, generator=generator, device=device)
    targets[order[num_valid:]] = IGNORED
    spread = torch.linspace(0, args.vocab - 1, COMPARED_ROWS // 2, device=device).long()
    compared = torch.cat((spread, targets[order[: min(num_valid, COMPARED_ROWS // 2)]])).unique()
    num_items = torch.tensor(float(num_valid), device=device)
    return Case(hidden.requires_grad_(), weight, targets, num_valid, num_items, args.softcap, compared)


# ----------------------------------------------------------------------------------------------------------------- ways


def of_fastft(case: Case) -> Loss:
    options = {**case.known(), "num_items_in_batch": case.num_items}
    return partial(linear_cross_entropy, case.hidden, case.weight, case.targets, **options)


def of_fastft_none(case: Case) -> Loss:
    """The same loss as a weighted sum of log-probabilities, whose weights the function does not know to be equal."""
    weights = (-1 / case.num_items).expand(len(case.targets)).contiguous()

    def loss() -> torch.Tensor:
        log_probs, _ = token_log_probs(case.hidden, case.weight, case.targets, return_statistics=True, **case.known())
        return (log_probs * weights).sum()

    return loss


def of_liger(case: Case) -> Loss:
    functional = peer("liger_kernel.transformers.functional", "liger-kernel", case, gpu_only=True)
    call = functional.liger_fused_linear_cross_entropy
    options = {"ignore_index": IGNORED, "reduction": "sum", "softcap": case.softcap or None}
    return lambda: call(case.hidden, case.weight, case.targets, **options) / case.num_items


def of_cut(case: Case) -> Loss:
    """With its own filter, which leaves out gradients too small for the dtype."""
    call = peer("cut_cross_entropy", "cut-cross-entropy", case, gpu_only=True).linear_cross_entropy
    options = {"ignore_index": IGNORED, "reduction": "sum", "softcap": case.softcap or None}
    return lambda: call(case.hidden, case.weight, case.targets, **options) / case.num_items


def of_trl(case: Case) -> Loss:
    """As TRL's own forward calls it for a loss: tokens with a target are selected first, even if all have one."""
    function = peer("trl.kernels.chunked_logprob", "trl with trl.kernels.chunked_logprob", case).ChunkedLogProbFunction
    width = peer("trl.trainer.utils", "trl", case)._CHUNKED_LOGPROB_CHUNK_SIZE

    def loss() -> torch.Tensor:
        mask = case.targets != IGNORED
        softcap = case.softcap or None
        found = function.apply(
            case.hidden[mask], case.weight, None, case.targets[mask], 1.0, width, softcap, 1.0, ()
        )  # fmt: skip
        return -found[0].sum() / case.num_items

    return loss


def of_eager(case: Case) -> Loss:
    logits, device = len(case.targets) * len(case.weight), case.hidden.device
    needed = logits * (EAGER_BYTES + (SOFTCAP_BYTES if case.softcap else 0))
    if needed > (free := free_bytes(device)):
        raise Unavailable(f"skipped: would take about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
    return lambda: loss_of_logits(F.linear(case.hidden, case.weight).float(), case.targets, case)


def loss_of_logits(logits: torch.Tensor, targets: torch.Tensor, case: Case) -> torch.Tensor:
    if case.softcap:
        logits = torch.tanh(logits / case.softcap) * case.softcap
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum") / case.num_items


def free_bytes(device: torch.device) -> float:
    """On a GPU; a host's memory is not asked for."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf


def peer(module: str, name: str, case: Case, *, gpu_only: bool = False) -> Any:
    """Another library's module. Raises Unavailable."""
    top = module.partition(".")[0]
    if importlib.util.find_spec(top) is None:
        raise Unavailable(f"{name} is not installed")
    if gpu_only and case.hidden.device.type != "cuda":
        raise Unavailable(f"{name} has kernels for a GPU only")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(f"{name} is not there: {error}") from error


WAYS: dict[str, Callable[[Case], Loss]] = {
    "fastft": of_fastft,
    "fastft-none": of_fastft_none,
    "liger": of_liger,
    "cut": of_cut,
    "eager": of_eager,
    "trl": of_trl,
}


# -------------------------------------------------------------------------------------------------------------- measure


def forward_backward(case: Case, loss: Loss) -> tuple[torch.Tensor, ...]:
    value = loss()
    return value, *torch.autograd.grad(value, tuple(case.wanted().values()))


def gradients(case: Case, loss: Loss) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and what is compared of its gradients."""
    value, *found = forward_backward(case, loss)
    named = dict(zip(case.wanted(), found, strict=True))
    return value.item(), {name: x[case.compared] if name == "weight" else x for name, x in named.items()}


def exact(case: Case) -> tuple[float, dict[str, torch.Tensor]]:
    """The same from logits in a wider dtype, of some tokens at a time."""
    wide = torch.float64 if case.hidden.dtype == torch.float32 else torch.float32
    hidden, weight = case.hidden.detach().to(wide), case.weight.detach().to(wide)
    truth = {"hidden": torch.empty_like(hidden)}
    if case.weight.requires_grad:
        truth["weight"] = weight.new_zeros(len(case.compared), weight.shape[1])
    total = hidden.new_zeros((), dtype=torch.float64)
    rows = max(1, ORACLE_LOGITS // len(weight))
    for part in (slice(start, start + rows) for start in range(0, len(hidden), rows)):
        logits = (hidden[part] @ weight.T).requires_grad_()
        loss = loss_of_logits(logits, case.targets[part], case)
        (gradient,) = torch.autograd.grad(loss, logits)
        total += loss.detach()
        torch.mm(gradient, weight, out=truth["hidden"][part])
        if "weight" in truth:
            truth["weight"].addmm_(gradient[:, case.compared].T, hidden[part])
    return total.item(), truth


def floor_steps(case: Case) -> dict[str, Callable[[], Any]]:
    """What has to be done in any case, of the tokens with a target: products, and one pass over the logits."""
    hidden, weight = case.hidden.detach()[: case.num_valid], case.weight.detach()
    vocab = len(weight)
    padded = hidden.new_zeros(len(hidden), -(-vocab // PADDING) * PADDING)
    logits = padded[:, :vocab]
    steps: dict[str, Callable[[], Any]] = {
        "logits": partial(torch.mm, hidden, weight.T, out=logits),
        "read and write": partial(torch.neg, padded, out=padded),
        "dX": partial(torch.mm, logits, weight, out=torch.empty_like(hidden)),
    }
    if case.weight.requires_grad:
        steps["dW"] = partial(torch.mm, logits.T, hidden, out=torch.empty_like(weight))
    return steps


def measure_floor(setup: Setup, case: Case) -> Line:
    """All steps in one call, and each alone."""
    steps = floor_steps(case)
    parts = {name: moe.time_call(step, setup.for_moe())["median_ms"] for name, step in steps.items()}
    both = moe.time_call(lambda: [step() for step in steps.values()], setup.for_moe())
    one_product = 2 * case.num_valid * case.weight.numel()
    products = {name: ms for name, ms in parts.items() if name != "read and write"}
    logits_bytes = case.num_valid * len(case.weight) * case.weight.itemsize
    return {
        "both": both,
        "parts_ms": parts,
        "tflops": len(products) * one_product / sum(products.values()) / 1e9,
        "gb_per_s": 2 * logits_bytes / parts["read and write"] / 1e6,
    }


def measure_way(setup: Setup, case: Case, name: str, truth: Line, floor_ms: float | None) -> Line:
    """Everything of one way, if it is right."""
    loss = WAYS[name](case)
    value, found = gradients(case, loss)
    line: Line = {"loss": value, "errors": moe_results.errors(found, truth["gradients"])}
    if reasons := results.wrong(line, truth["loss"], case.hidden.dtype):
        return {"failure": f"wrong: {'; '.join(reasons)}", **line}
    del found
    call = partial(forward_backward, case, loss)
    both = moe.time_call(call, setup.for_moe())
    if name.startswith("fastft"):
        of_impls = verdicts(probe(setup.device), case.hidden.dtype)
        line["implementation"] = next(impl for impl, verdict in of_impls.items() if verdict)
    return {
        "both": both,
        "share_of_floor": None if floor_ms is None else floor_ms / both["median_ms"],
        "peak_bytes": moe.peak_bytes(setup.for_moe(), call),
        **line,
    }


def measure_tokens(setup: Setup, tokens: int) -> list[Line]:
    """The lines of all ways at one number of tokens, the floor's first."""
    case = make_case(setup, tokens)
    asked = setup.args.ways or (FLOOR, *WAYS)
    common = {"tokens": tokens, "num_valid": case.num_valid}
    lines: list[Line] = []

    def attempt(name: str, action: Callable[[], Line]) -> Line:
        print(f"{tokens} tokens: {name}", file=sys.stderr, flush=True)
        return moe.attempt(setup.for_moe(), action)

    floor_ms = None
    if FLOOR in asked:
        line = attempt(FLOOR, partial(measure_floor, setup, case))
        floor_ms = line["both"]["median_ms"] if "both" in line else None
        lines.append({"way": FLOOR, **line})
    truth = attempt("the exact gradients", lambda: dict(zip(("loss", "gradients"), exact(case), strict=True)))
    for name in (name for name in asked if name != FLOOR):
        if "gradients" in truth:
            line = attempt(name, partial(measure_way, setup, case, name, truth, floor_ms))
        else:
            line = {"failure": f"nothing to compare with: {truth['failure']}"}
        lines.append({"way": name, **line, "exact_loss": truth.get("loss")})
    return [{**common, **line, **setup.facts} for line in lines]


def measure_all(args: argparse.Namespace) -> int:
    """Appends the lines of every number of tokens; how many failed, or were asked for and are not there."""
    setup, failed = build(args), 0
    for tokens in args.tokens:
        for line in measure_tokens(setup, tokens):
            append(args.out, line)
            failed += "failure" in line or (args.ways is not None and "unavailable" in line)
    return failed


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.table is not None:
        return conclude(args, 0, results.table, results.plot)
    with contextlib.redirect_stdout(sys.stderr):  # the lines are in a file; what libraries print is no result
        return conclude(args, measure_all(args), results.table, results.plot)


if __name__ == "__main__":
    sys.exit(main())
