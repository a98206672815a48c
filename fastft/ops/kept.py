"""Tensors that an autograd node keeps without saving them.

`save_for_backward` hands each tensor to whatever saved-tensor hooks are active. That is right for activations, which
checkpointing drops and offloading moves. For parameters, tables and other things that live on anyway it is only cost:
non-reentrant checkpointing runs Python for each saved tensor in forward, in recompute and in backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class KeptTensors:
    """Tensors kept by reference, with autograd's own protection against a write between forward and backward."""

    __slots__ = ("_tensors", "_versions")

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self._tensors = tuple(tensors)
        self._versions = tuple(map(_version, tensors))

    def unchanged(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors.

        Raises:
            RuntimeError: one was modified in place since, as autograd raises for a saved tensor.
        """
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if _version(tensor) != version:
                assert tensor is not None
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)} that a fastft op kept for its backward is "
                    f"at version {tensor._version}, expected {version}; step the optimizer after backward, not before"
                )
        return self._tensors


def _version(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_inference() else tensor._version
