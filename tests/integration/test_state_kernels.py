"""Layers that carry a state, where kernels are installed that stop at the boundaries of packed documents."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_families import tiny_decoder, why_stock
from packed_cases import LENGTHS, counters, differences, evaluate, inputs, leaks, separately
from padded_cases import DROPPED, padded, train_once

from fastft import patch_model
from fastft.errors import PackingError

TESTS = Path(__file__).resolve().parent.parent
FAMILIES = ["falcon_h1", "granitemoehybrid", "lfm2", "qwen3_next"]
WITHOUT = ["jamba", "mamba"]  # whose scans take no boundaries, whatever is installed
MERGED = (5, 22, 7)


def results(family: str, folder: Path) -> dict[str, Any]:
    """In a process where the kernels are found."""
    model = patch_model(tiny_decoder(family), lora=False)
    found: dict[str, Any] = {"why_stock": why_stock(model)}
    if found["why_stock"]:
        return found
    expected = torch.load(folder / f"{family}.pt")
    for name, told in (("right", None), ("mutant", MERGED)):
        given = inputs(LENGTHS, "position_ids", told=told)
        found[name] = {
            "leaks": leaks(model, given, LENGTHS, rounding=1e-4),
            "differences": differences(evaluate(model, given, LENGTHS), expected, rtol=1e-4, atol=1e-5),
        }
    for way in ("cu_seq_lens", "packed_sequences"):
        found[way] = differences(evaluate(model, inputs(LENGTHS, way), LENGTHS), expected, rtol=1e-4, atol=1e-5)
    try:
        model(**inputs(LENGTHS, "position_ids", rows=2))
    except PackingError as error:
        found["rows"] = str(error)
    ids = inputs((12, 12), "position_ids")["input_ids"].view(2, 12)
    ends = torch.tensor([0, 12, 24], dtype=torch.int32)
    told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 12, "max_length_k": 12}
    whole = [model(input_ids=row[None], use_cache=False).logits for row in ids]
    found["a document a row"] = torch.allclose(model(input_ids=ids, **told).logits, torch.cat(whole), atol=1e-5)
    return found


@pytest.fixture(scope="module")
def with_kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    for family in FAMILIES:  # here, where the stock model computes without kernels
        alone = separately(tiny_decoder(family), inputs(LENGTHS, "position_ids"), LENGTHS)
        torch.save(alone, folder / f"{family}.pt")
    paths = [TESTS.parent, TESTS, TESTS / "integration", TESTS / "state_kernels"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_are_as_if_alone(with_kernels, family):
    found = with_kernels[family]
    assert found["why_stock"] == ""
    assert found["right"] == {"leaks": [], "differences": []}
    assert found["cu_seq_lens"] == found["packed_sequences"] == []
    assert found["mutant"]["leaks"] and found["mutant"]["differences"]
    assert "in one packed row, not in 2" in found["rows"] and found["a document a row"]


@pytest.mark.parametrize("family", WITHOUT)
def test_kernels_that_take_no_boundaries_are_not_trusted(with_kernels, family):
    assert "takes no boundaries" in with_kernels[family]["why_stock"]


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_is_kept(family):
    stock = tiny_decoder(family)
    model = patch_model(copy.deepcopy(stock), lora=False, experts=False)
    expected = train_once(stock, padded("right"))
    assert differences(train_once(model, padded("right")), expected, rtol=0.0, atol=0.0) == []
    assert DROPPED not in counters(model)


if __name__ == "__main__":
    print(json.dumps({family: results(family, Path(sys.argv[1])) for family in FAMILIES + WITHOUT}))
