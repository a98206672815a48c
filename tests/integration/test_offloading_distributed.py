"""Offloaded layers under DDP and FSDP2: the gradients of plain checkpointing to the bit, in two processes on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from memory_cases import LAYERS, batch, model_of
from memory_machines import LateLane, machine
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fastft import patch_model, report
from fastft.modules.checkpointing import memories

WAYS = ("ddp", "ddp, adapters", "fsdp2", "fsdp2, adapters")
STEPS = 3


def wrapped(model, way):
    if way.startswith("ddp"):
        return DistributedDataParallel(model)
    for layer in model.get_submodule("base_model.model.model" if "adapters" in way else "model").layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def build(way, checkpointing):
    model = model_of("llama")
    if "adapters" in way:
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False)).train()
        model.enable_input_require_grads()
    patch_model(model, checkpointing=checkpointing)
    if checkpointing == "offload":
        (memory,) = memories(model)
        memory.machine, memory.smallest = machine(LateLane), 1
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return wrapped(model, way)


def gradients_of(model):
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
    model.zero_grad(set_to_none=True)
    return found


def work(rank, store, results):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = {}
    for way in WAYS:
        gradients = []
        for checkpointing in ("recompute", "offload"):
            model = build(way, checkpointing)
            for number in range(STEPS):
                model(**batch(seed=10 * number + rank)).loss.backward()  # each rank has rows of its own
                gradients.append(gradients_of(model))
        same = all(
            plain.keys() == other.keys() and all(torch.equal(plain[name], other[name]) for name in plain)
            for plain, other in zip(gradients[:STEPS], gradients[STEPS:], strict=True)
        )
        counters = report(model.module if way.startswith("ddp") else model).counters
        memory = memories(model)[0]
        found[way] = (same, len(gradients[0]), counters["input offloaded"], memory.host_bytes_in_use)
    torch.save(found, f"{results}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, (folder / "store", folder), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_plain_checkpointing_and_inputs_leave(found, way):
    for rank in found:
        same, count, offloaded, left = rank[way]
        assert same and count >= 2 * LAYERS
        # The last input stays, and with frozen embeddings so does the first, a leaf; behind which newer FSDP has
        # a node of its own.
        leaves = {"ddp, adapters": (LAYERS - 2,), "fsdp2, adapters": (LAYERS - 2, LAYERS - 1)}
        assert offloaded / STEPS in leaves.get(way, (LAYERS - 1,))
        assert left == 0
