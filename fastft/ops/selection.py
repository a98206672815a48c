"""How every op picks its implementation: one rule, so that no op falls back silently.

An op lists, in order of preference, what each of its implementations says about the case at hand (a `Verdict`).
`select` takes the first that can run under "auto", and otherwise exactly the one that was asked for, or raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..capability import GPUCapability, Verdict
from ..errors import UnsupportedOptionError

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation that was chosen, and why."""

    impl: str
    reason: str


def select(op: str, requested: str, verdicts: Mapping[str, Verdict]) -> Choice:
    """Pick an implementation of `op`.

    Args:
        op: name of the op, for messages.
        requested: "auto" or the name of one implementation.
        verdicts: implementation name -> verdict, best first.

    Returns:
        The choice. Under "auto" its reason names what was passed over.

    Raises:
        UnsupportedOptionError: `requested` is unknown, or cannot run here; the message gives the reason and
            the implementation that "auto" would take.
    """
    if requested == AUTO:
        passed_over: list[str] = []
        for impl, verdict in verdicts.items():
            if verdict:
                return Choice(impl, "; ".join([verdict.reason, *passed_over]))
            passed_over.append(f"not {impl}: {verdict.reason}")
        raise UnsupportedOptionError(f"{op}: no implementation can run here ({'; '.join(passed_over)})")
    if requested not in verdicts:
        known = ", ".join(repr(name) for name in (AUTO, *verdicts))
        raise UnsupportedOptionError(f"{op}: unknown implementation {requested!r}; choose one of {known} or False")
    verdict = verdicts[requested]
    if not verdict:
        usable = next((name for name, other in verdicts.items() if other), None)
        hint = f"use {op}={usable!r} or {op}='auto'" if usable else "nothing else can run here either"
        raise UnsupportedOptionError(f"{op}={requested!r} cannot run here: {verdict.reason}; {hint}")
    return Choice(requested, f"asked for; {verdict.reason}")


def verdict_in_fp32(capability: GPUCapability, *dtypes: torch.dtype) -> Verdict:
    """Whether Triton kernels that compute in fp32 can take tensors of these dtypes: the first reason against it."""
    verdict = capability.triton
    for dtype in dtypes:
        if dtype == torch.float64:
            return Verdict(False, "the kernels compute in fp32, which would lose the precision of fp64")
        verdict = capability.triton_for(dtype)
        if not verdict:
            return verdict
    return verdict
