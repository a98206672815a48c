"""Typed errors. Each message says what is wrong, why, and what to do instead."""

from __future__ import annotations


class FastftError(Exception):
    """Base of every error that fastft raises on purpose."""


class UnsupportedModelError(FastftError, TypeError):
    """The object given is not a model that fastft can patch."""


class UnsupportedOptionError(FastftError, ValueError):
    """An option was named explicitly and cannot be honoured here."""


class PatchConflictError(FastftError, RuntimeError):
    """Something else already replaced what fastft was asked to replace."""


class PackingError(FastftError, ValueError):
    """A batch whose sequence boundaries contradict its tokens."""


class KernelInputError(FastftError, ValueError):
    """Tensors that an op cannot take: shape, dtype, device or stride."""
