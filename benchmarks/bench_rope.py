"""Times RoPE of q and k, forward and backward, beside Hugging Face's eager formula and the bytes that must move.

    python benchmarks/bench_rope.py --out rope.json
    python benchmarks/bench_rope.py --sweep

bf16, half-split layout, angles as Hugging Face hands them out (bf16, the first half of a doubled table). The floor is
what these bytes take at the rate of a large copy on this device in this run: q and k read and written once, cos and
sin read once. A copy of just q and k stands beside it: a launch this short pays for its start and end as well.
A round of calls, one for each set of buffers, is timed as a whole, so that short kernels do not pay for events between
them; the rest of how times are taken is told in timing.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the repository root has to be importable, this folder need not be
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.timing import Timing, copy_bandwidth, print_table, require_gpu, rotations, time_calls, write_record

DTYPE = torch.bfloat16
TOKENS = (4096, 65536)
HEADS = ((32, 8, 128), (32, 8, 64))
COLUMNS = ["tokens", "heads", "pass", "impl", "median_us", "lower_us", "upper_us", "host_us", "floor_us", "of_floor"]
SWEEP_COLUMNS = ["tokens", "heads", "block_t", "block_hq", "block_hk", "num_warps", "median_us", "floor_us", "of_floor"]
SWEEP_TILE_PAIRS = (512, 1024, 2048, 4096)
SWEEP_WARPS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Shape:
    """T tokens of Hq + Hk heads of D."""

    tokens: int
    num_q_heads: int
    num_k_heads: int
    head_dim: int

    @property
    def heads(self) -> str:
        return f"{self.num_q_heads}+{self.num_k_heads} x {self.head_dim}"

    @property
    def rotated_bytes(self) -> int:
        """Bytes of q and k."""
        return self.tokens * (self.num_q_heads + self.num_k_heads) * self.head_dim * DTYPE.itemsize

    @property
    def moved_bytes(self) -> int:
        """q and k in and out; R/2 = D/2 angles a token, each a cosine and a sine."""
        return 2 * self.rotated_bytes + self.tokens * self.head_dim * DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class Buffers:
    """One set of inputs, upstream gradients and angles."""

    q: torch.Tensor
    k: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    cos: torch.Tensor  # [T, D], both halves alike
    sin: torch.Tensor

    def half_angles(self) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.cos.shape[-1] // 2
        return self.cos[:, :half], self.sin[:, :half]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="file for the results as JSON")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="instead of %(default)s")
    parser.add_argument("--sweep", action="store_true", help="time launch configurations instead of implementations")
    parser.add_argument(
        "--top", type=int, default=6, help="configurations of the sweep to print (default: %(default)s)"
    )
    return parser.parse_args()


def make_buffers(shape: Shape, device: torch.device) -> list[Buffers]:
    """As many sets as it takes to push each out of the cache before its next turn."""

    def random(heads: int) -> torch.Tensor:
        return torch.randn(shape.tokens, heads, shape.head_dim, dtype=DTYPE, device=device)

    angles = torch.rand(shape.tokens, shape.head_dim // 2, device=device).mul(6.3).repeat(1, 2)
    cos, sin = angles.cos().to(DTYPE), angles.sin().to(DTYPE)
    q_heads, k_heads = shape.num_q_heads, shape.num_k_heads
    return [
        Buffers(random(q_heads), random(k_heads), random(q_heads), random(k_heads), cos, sin)
        for _ in range(rotations(2 * shape.rotated_bytes, device))
    ]


def time_round(calls: Sequence[Callable[[], Any]]) -> Timing:
    """Time of one call, measured over rounds of all of them."""

    def one_round() -> list[Any]:
        return [call() for call in calls]

    timing = time_calls([one_round, one_round])
    return Timing(**{name: value / len(calls) for name, value in asdict(timing).items()})


# ------------------------------------------------------------------------------------------------ what is timed

Rope = Callable[[torch.Tensor, torch.Tensor, Buffers], tuple[torch.Tensor, torch.Tensor]]


def out_of_place(q: torch.Tensor, k: torch.Tensor, buffers: Buffers) -> tuple[torch.Tensor, torch.Tensor]:
    from fastft.ops.rope import rope_qk

    return rope_qk(q, k, *buffers.half_angles(), impl="triton")


def in_place(q: torch.Tensor, k: torch.Tensor, buffers: Buffers) -> tuple[torch.Tensor, torch.Tensor]:
    from fastft.ops.rope import rope_qk_

    return rope_qk_(q, k, *buffers.half_angles(), impl="triton")


def int64_offsets(q: torch.Tensor, k: torch.Tensor, buffers: Buffers) -> tuple[torch.Tensor, torch.Tensor]:
    from fastft.ops.rope.launch import rotate

    rotated_q, rotated_k = rotate(
        (q, k), *buffers.half_angles(), None, head_dim=None, interleaved=False, long_indexing=True
    )
    return rotated_q, rotated_k


def hugging_face(q: torch.Tensor, k: torch.Tensor, buffers: Buffers) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    # The model's own layout: [B, H, T, D] as a transposed view, angles [B, T, D].
    q, k = (x.unsqueeze(0).transpose(1, 2) for x in (q, k))
    rotated = apply_rotary_pos_emb(q, k, buffers.cos.unsqueeze(0), buffers.sin.unsqueeze(0))
    return rotated[0].transpose(1, 2)[0], rotated[1].transpose(1, 2)[0]


def forward(rope: Rope, buffers: Buffers) -> Callable[[], Any]:
    return partial(rope, buffers.q, buffers.k, buffers)


def backward(rope: Rope, buffers: Buffers) -> Callable[[], Any]:
    """Gradients of q and k alone: the edges are taken where q and k were made, before they are rotated."""
    q, k = (x.clone().requires_grad_() * 1 for x in (buffers.q, buffers.k))
    edges = [torch.autograd.graph.get_gradient_edge(x) for x in (q, k)]
    outputs = rope(q, k, buffers)
    return partial(torch.autograd.grad, outputs, edges, (buffers.dq, buffers.dk), retain_graph=True)


IMPLEMENTATIONS: dict[str, tuple[Rope, tuple[str, ...]]] = {
    "fastft out of place": (out_of_place, ("forward", "backward")),
    "fastft in place": (in_place, ("forward", "backward")),
    "fastft int64 offsets": (int64_offsets, ("forward",)),
    "hugging face": (hugging_face, ("forward", "backward")),
}


def check(buffers: Buffers) -> None:
    """A kernel that is fast and wrong has no time worth printing."""
    for got, expected in zip(
        out_of_place(buffers.q, buffers.k, buffers), hugging_face(buffers.q, buffers.k, buffers), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=0.02, atol=0.06)


def measure(shape: Shape, device: torch.device, bandwidth: float) -> list[dict[str, Any]]:
    sets = make_buffers(shape, device)
    check(sets[0])
    rows = []
    for name, (rope, passes) in IMPLEMENTATIONS.items():
        for each in passes:
            prepare = forward if each == "forward" else backward
            timing = time_round([prepare(rope, buffers) for buffers in sets])
            rows.append(row(shape, timing, bandwidth, {"pass": each, "impl": name, "buffer_sets": len(sets)}))
            torch.cuda.empty_cache()
    flat = [torch.cat([buffers.q.flatten(), buffers.k.flatten()]) for buffers in sets]
    about = {"pass": "forward", "impl": "torch copy of q and k", "buffer_sets": len(sets)}
    rows.append(row(shape, time_round([x.clone for x in flat]), bandwidth, about))
    return rows


def row(shape: Shape, timing: Timing, bandwidth: float, about: dict[str, Any]) -> dict[str, Any]:
    floor_us = shape.moved_bytes / bandwidth * 1e6
    where = {"tokens": shape.tokens, "heads": shape.heads}
    of_floor = f"{timing.median_us / floor_us:.2f}x"
    return {**where, **about, **asdict(timing), "floor_us": floor_us, "of_floor": of_floor}


def sweep(shape: Shape, device: torch.device, bandwidth: float) -> list[dict[str, Any]]:
    """Every launch configuration, best first."""
    from fastft.ops.rope.launch import rotate
    from fastft.ops.rope.triton import choose_tile

    sets = make_buffers(shape, device)
    tiles = {
        choose_tile(shape.num_q_heads, shape.num_k_heads, shape.head_dim // 2, pairs, warps)
        for pairs, warps in product(SWEEP_TILE_PAIRS, SWEEP_WARPS)
    }
    # Several tokens a program and fewer heads a tile hold as much, in another shape.
    tiles |= {
        tile._replace(block_t=2 * tile.block_t, block_hq=tile.block_hq // 2) for tile in tiles if tile.block_hq > 1
    }
    rows = []
    for tile in sorted(tiles):
        launch = partial(rotate, head_dim=None, interleaved=False, tile=tile)
        calls = [partial(launch, (b.q, b.k), *b.half_angles(), None) for b in sets]
        rows.append(row(shape, time_round(calls), bandwidth, tile._asdict()))
    return sorted(rows, key=lambda found: found["median_us"])


def main() -> None:
    arguments = parse_arguments()
    device = require_gpu("bench_rope.py")
    bandwidth = copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name(device)}: a copy moves {bandwidth / 1e12:.2f} TB/s")
    shapes = [Shape(tokens, *heads) for tokens, heads in product(arguments.tokens, HEADS)]
    results = []
    for shape in shapes:
        found = (sweep if arguments.sweep else measure)(shape, device, bandwidth)
        results += found
        print_table(SWEEP_COLUMNS if arguments.sweep else COLUMNS, found[: arguments.top] if arguments.sweep else found)
    write_record(arguments.out, "rope sweep" if arguments.sweep else "rope", device, bandwidth, results)


if __name__ == "__main__":
    main()
