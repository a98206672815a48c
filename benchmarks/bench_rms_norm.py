"""Times RMSNorm, forward and backward, beside Hugging Face's module, torch's fused op and the bytes that must move.

    python benchmarks/bench_rms_norm.py --out rms_norm.json
    python benchmarks/bench_rms_norm.py --sweep

bf16, llama rounding. The floor is what a copy of the same bytes takes on this device in this run: 4 bytes an element
forward (x in, y out), 6 backward (x, dy in, dx out). How times are taken is told in timing.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the repository root has to be importable, this folder need not be
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.timing import copy_bandwidth, print_table, require_gpu, rotations, time_calls, write_record

RowFunction = Callable[[torch.Tensor], torch.Tensor]
SHAPES = [(8192, 2048), (8192, 4096), (8192 * 32, 128)]
EPS = 1e-6
BYTES_PER_ELEMENT = {"forward": 4, "backward": 6}
COLUMNS = ["shape", "pass", "weight", "impl", "median_us", "lower_us", "upper_us", "host_us", "floor_us", "of_floor"]
SWEEP_WARPS = (2, 4, 8, 16, 32)
SWEEP_TILE_ELEMENTS = (1024, 2048, 4096, 8192, 16384)
SWEEP_PROGRAMS_PER_SM = (1, 2, 3, 4, 6, 8)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="file for the results as JSON")
    parser.add_argument(
        "--shape", type=int, nargs=2, action="append", metavar=("ROWS", "H"), help="instead of the usual"
    )
    parser.add_argument("--sweep", action="store_true", help="time launch configurations instead of implementations")
    parser.add_argument(
        "--top", type=int, default=6, help="configurations of the sweep to print (default: %(default)s)"
    )
    return parser.parse_args()


def hugging_face(weight: torch.nn.Parameter) -> RowFunction:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module = LlamaRMSNorm(weight.shape[0], eps=EPS)
    module.weight = weight
    return module.forward


def torch_fused(weight: torch.nn.Parameter) -> RowFunction:
    return lambda x: torch.nn.functional.rms_norm(x, tuple(weight.shape), weight, EPS)


def fastft(weight: torch.nn.Parameter) -> RowFunction:
    from fastft.ops.rms_norm import rms_norm

    return lambda x: rms_norm(x, weight, EPS)


def gradients(y: torch.Tensor, wanted: tuple[torch.Tensor, ...], dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(y, wanted, dy, retain_graph=True)


def inputs(rows: int, hidden_size: int, sets: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sets of x, which wants a gradient, and dy: random, for constant data draw less power and run faster."""
    return [
        (
            torch.randn(rows, hidden_size, device=device, dtype=torch.bfloat16).requires_grad_(),
            torch.randn(rows, hidden_size, device=device, dtype=torch.bfloat16),
        )
        for _ in range(sets)
    ]


def floor_us(rows: int, hidden_size: int, direction: str, bandwidth: float) -> float:
    return rows * hidden_size * BYTES_PER_ELEMENT[direction] / bandwidth * 1e6


def compare(rows: int, hidden_size: int, device: torch.device, bandwidth: float) -> Iterator[dict[str, Any]]:
    """One result for each pass, frozen or trained weight, and implementation."""
    data = inputs(rows, hidden_size, rotations(rows * hidden_size * 4, device), device)
    for trained, implementation in product((False, True), (fastft, hugging_face, torch_fused)):
        scale = torch.rand(hidden_size, device=device, dtype=torch.bfloat16) + 0.5
        weight = torch.nn.Parameter(scale, requires_grad=trained)
        function = implementation(weight)
        calls: dict[str, list[Callable[[], Any]]] = {
            "forward": [partial(function, x) for x, _ in data],
            "backward": [partial(gradients, function(x), (x, weight) if trained else (x,), dy) for x, dy in data],
        }
        for direction, of_direction in calls.items():
            timing = time_calls(of_direction)
            floor = floor_us(rows, hidden_size, direction, bandwidth)
            yield {
                "shape": f"{rows}x{hidden_size}",
                "pass": direction,
                "weight": "trained" if trained else "frozen",
                "impl": implementation.__name__,
                "median_us": timing.median_us,
                "lower_us": timing.lower_us,
                "upper_us": timing.upper_us,
                "host_us": timing.host_us,
                "floor_us": floor,
                "of_floor": f"{floor / timing.median_us:.0%}",
            }


def sweep(rows: int, hidden_size: int, device: torch.device, bandwidth: float) -> Iterator[dict[str, Any]]:
    """One result for each launch configuration of each pass; programs per SM count only with a trained weight."""
    from fastft.ops.rms_norm.triton import LaunchConfig, launch_backward, launch_config, launch_forward

    data = [(x.detach(), dy) for x, dy in inputs(rows, hidden_size, rotations(rows * hidden_size * 4, device), device)]
    weight = torch.rand(hidden_size, device=device, dtype=torch.bfloat16) + 0.5
    rstd = [launch_forward(x, weight, EPS, "llama")[1] for x, _ in data]
    block_h = launch_config(hidden_size).block_h
    tiles = [tile for tile in SWEEP_TILE_ELEMENTS if tile >= block_h] or [block_h]
    for tile, num_warps, programs in product(tiles, SWEEP_WARPS, SWEEP_PROGRAMS_PER_SM):
        if tile // (32 * num_warps) not in range(4, 129):
            continue
        config = LaunchConfig(tile // block_h, block_h, num_warps, programs)
        forward = partial(launch_forward, weight=weight, eps=EPS, rounding="llama", config=config)
        backward = partial(launch_backward, weight=weight, rounding="llama", needs_dx=True, config=config)
        trained = partial(backward, needs_dweight=True)
        frozen = partial(backward, needs_dweight=False)
        gradients_of = [{"dy": dy, "x": x, "rstd": r} for (x, dy), r in zip(data, rstd, strict=True)]
        passes: dict[tuple[str, str], list[Callable[[], Any]]] = {
            ("backward", "trained"): [partial(trained, **tensors) for tensors in gradients_of]
        }
        if programs == SWEEP_PROGRAMS_PER_SM[0]:
            passes["forward", "any"] = [partial(forward, x) for x, _ in data]
            passes["backward", "frozen"] = [partial(frozen, **tensors) for tensors in gradients_of]
        for (direction, weight_state), calls in passes.items():
            timing = time_calls(calls)
            floor = floor_us(rows, hidden_size, direction, bandwidth)
            yield {
                "shape": f"{rows}x{hidden_size}",
                "pass": direction,
                "weight": weight_state,
                **config._asdict(),
                "median_us": timing.median_us,
                "floor_us": floor,
                "of_floor": f"{floor / timing.median_us:.0%}",
                "default": config._replace(programs_per_sm=0) == launch_config(hidden_size)._replace(programs_per_sm=0),
            }


def print_best(results: list[dict[str, Any]], top: int) -> None:
    columns = ["shape", "pass", "weight", "block_m", "num_warps", "programs_per_sm", "median_us", "floor_us"]
    for case in sorted({(result["pass"], result["weight"]) for result in results}):
        of_case = [result for result in results if (result["pass"], result["weight"]) == case]
        print_table([*columns, "of_floor", "default"], sorted(of_case, key=lambda result: result["median_us"])[:top])


def main() -> None:
    args = parse_arguments()
    device = require_gpu("bench_rms_norm.py")
    bandwidth = copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name(device)}: a copy moves {bandwidth / 1e12:.2f} TB/s")
    results: list[dict[str, Any]] = []
    for rows, hidden_size in args.shape or SHAPES:
        found = list((sweep if args.sweep else compare)(rows, hidden_size, device, bandwidth))
        if args.sweep:
            print_best(found, args.top)
        else:
            print_table(COLUMNS, found)
        results += found
        torch.cuda.empty_cache()
    write_record(args.out, "rms_norm_sweep" if args.sweep else "rms_norm", device, bandwidth, results)


if __name__ == "__main__":
    main()
