"""What a batch's sequence metadata and masks cost: kernels, synchronisations and time, for all layers of a forward.

    python benchmarks/metadata.py --layers 40 --tokens 8192 --out metadata.json

Only the metadata is made, no layer runs. A row is what one forward of so many layers does to know which tokens belong
together. "cache off" is what fastft would do if each layer asked anew; with gradient checkpointing the layers ask
twice, and with a cache the second time costs nothing either. Kernels are counted by the profiler, synchronisations by
PyTorch's synchronisation debug mode; the time is the host's until the device is done.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the repository root has to be importable, this folder need not be
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.timing import copy_bandwidth, print_table, recorded_waits, require_gpu, write_record

COLUMNS = ["batch", "who", "kernels", "syncs", "ms_a_batch", "us_a_layer"]
REPEATS = 20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=40, help="of Qwen3-14B (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--out", help="file for the results as JSON")
    return parser.parse_args()


def make_batch(tokens: int, documents: int, device: torch.device) -> dict[str, Any]:
    """position_ids [1, T] that restart, and the same boundaries as TRL's collator hands them over."""
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randperm(tokens - 1, generator=generator)[: documents - 1].add(1).sort().values.tolist()
    bounds = torch.tensor([0, *cuts, tokens], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in bounds.diff().tolist()])[None]
    return {
        "position_ids": positions.to(device),
        "cu_seqlens": bounds.to(device),
        "max_seqlen": int(bounds.diff().max()),
        "embeddings": torch.zeros(1, tokens, 8, dtype=torch.bfloat16, device=device),
    }


# ------------------------------------------------------------------------------------------------ what is measured


def stock_sdpa(batch: dict[str, Any], layers: int) -> None:
    """One T x T mask, which every layer reads."""
    from transformers import LlamaConfig
    from transformers.masking_utils import create_causal_mask

    config = LlamaConfig(attn_implementation="sdpa")
    create_causal_mask(
        config=config,
        inputs_embeds=batch["embeddings"],
        attention_mask=None,
        past_key_values=None,
        position_ids=batch["position_ids"],
    )


def stock_flash(batch: dict[str, Any], layers: int) -> None:
    """Each layer looks at the positions, and works out the boundaries."""
    from transformers import modeling_flash_attention_utils as flash

    for _ in range(layers):
        if flash._is_packed_sequence(batch["position_ids"], 1):
            flash.prepare_fa_kwargs_from_position_ids(batch["position_ids"])


def positions_each_layer(batch: dict[str, Any], layers: int) -> None:
    from fastft import PackedSequences

    for _ in range(layers):
        PackedSequences.from_position_ids(batch["position_ids"])


def positions_once(batch: dict[str, Any], layers: int) -> None:
    from fastft import PackedSequences
    from fastft.packing import PackedSequenceCache

    cache, question = PackedSequenceCache(), ("positions",)
    for _ in range(layers):
        found, _ = cache.lookup(question, batch["position_ids"])
        if not found:
            packed = PackedSequences.from_position_ids(batch["position_ids"])
            cache.remember(packed, question, batch["position_ids"])


def boundaries_each_layer(batch: dict[str, Any], layers: int) -> None:
    from fastft import PackedSequences

    for _ in range(layers):
        PackedSequences.from_cu_seqlens(batch["cu_seqlens"], batch["max_seqlen"], batch["position_ids"].shape[1])


def boundaries_once(batch: dict[str, Any], layers: int) -> None:
    from fastft import PackedSequences

    PackedSequences.from_cu_seqlens(batch["cu_seqlens"], batch["max_seqlen"], batch["position_ids"].shape[1])


CASES: dict[tuple[str, str], Callable[[dict[str, Any], int], None]] = {
    ("position_ids", "stock, sdpa"): stock_sdpa,
    ("position_ids", "stock, flash attention"): stock_flash,
    ("position_ids", "fastft, cache off"): positions_each_layer,
    ("position_ids", "fastft"): positions_once,
    ("boundaries (TRL)", "fastft, cache off"): boundaries_each_layer,
    ("boundaries (TRL)", "fastft"): boundaries_once,
}


# ------------------------------------------------------------------------------------------------------- counters


def count_kernels(action: Callable[[], None]) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        action()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events())


def count_synchronisations(action: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    with recorded_waits() as waits:
        action()
    return len(waits)


def milliseconds(action: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times)


def measure(batch: dict[str, Any], layers: int) -> list[dict[str, Any]]:
    rows = []
    for (kind, who), case in CASES.items():

        def action(case: Callable[[dict[str, Any], int], None] = case) -> None:
            case(batch, layers)

        action()  # what is compiled or cached at first use
        ms = milliseconds(action)
        counts = {"kernels": count_kernels(action), "syncs": count_synchronisations(action)}
        rows.append({"batch": kind, "who": who, **counts, "ms_a_batch": ms, "us_a_layer": 1000 * ms / layers})
    return rows


def main() -> None:
    arguments = parse_arguments()
    device = require_gpu("metadata.py")
    rows = measure(make_batch(arguments.tokens, arguments.documents, device), arguments.layers)
    print(f"{arguments.layers} layers, {arguments.tokens} tokens in {arguments.documents} documents")
    print_table(COLUMNS, rows)
    sizes = {name: getattr(arguments, name) for name in ("layers", "tokens", "documents")}
    write_record(arguments.out, "metadata", device, copy_bandwidth(device), [{**sizes, **row} for row in rows])


if __name__ == "__main__":
    main()
