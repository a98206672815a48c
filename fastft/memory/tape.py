"""What a layer tells about the tensors it makes, so that each may be kept, made again, or sent to the host.

A patched module says what it made: `tape.made(y, "norm", again, x)`. If autograd then saves `y`, or a view of it, the
plan decides by the kind: kept as it is, sent to the host, or forgotten and made again in backward from its sources,
which are such tensors themselves. Nothing is run twice that nobody asks for: where products of matrices and attention
are kept, a backward runs only norms and activations again. A tensor that nobody told of is kept, so that a module with
code of its own is never wrong, only larger.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .offload import Group, Offloader, Parked, is_held_by_autograd

Action = Literal["keep", "again", "offload"]

# What layers make, and what nobody told of. "rotated" are q and k where norms and rotation make them of "qkv" again;
# elsewhere q, k and v are the "attention input".
KINDS = (
    "residual", "norm", "qkv", "rotated", "attention input", "attention", "gate_up", "activation", "untold",
)  # fmt: skip


class Level(NamedTuple):
    """What becomes of each kind. A kind that is not named is kept."""

    name: str
    actions: Mapping[str, Action]


_CHEAP: dict[str, Action] = dict.fromkeys(("norm", "rotated", "activation"), "again")
_SENT: dict[str, Action] = dict.fromkeys(("residual", "qkv", "attention input", "attention"), "offload")

# Products of matrices and attention are kept; or the largest products are made again as well.
THIN = Level("thin", _CHEAP)
LEAN = Level("lean", {**_CHEAP, "gate_up": "again"})
# The same with the host in place of the device, for all but the largest products or for those as well.
THIN_SENT = Level("thin, sent", {**_CHEAP, **_SENT})
LEAN_SENT = Level("lean, sent", {**_CHEAP, **_SENT, "gate_up": "again"})
ALL_SENT = Level("thin, all sent", {**_CHEAP, **_SENT, "gate_up": "offload"})


class Made:
    """A tensor that a layer made, whole: contiguous, from some place of its storage on."""

    __slots__ = ("__weakref__", "held", "kind", "offset", "parked", "recipe", "value", "version")

    def __init__(self, tensor: torch.Tensor, kind: str) -> None:
        self.kind = kind
        self.offset = int(tensor.storage_offset())
        self.version = tensor._version
        self.held: torch.Tensor | None = None  # one of these three says where the tensor is
        self.parked: Parked | None = None
        self.recipe: Recipe | None = None
        self.value: torch.Tensor | None = None  # what came back

    def tensor(self, offloader: Offloader) -> torch.Tensor:
        """The tensor, there again. It stays until nothing that was saved refers to it any more."""
        if self.held is not None:
            if self.held._version != self.version:
                raise _modified(self.held, self.version)
            return self.held
        if self.value is None:
            if self.parked is not None:
                self.value = offloader.fetch(self.parked)
            else:
                assert self.recipe is not None
                self.recipe.run(offloader)
        assert self.value is not None
        return self.value


class View(NamedTuple):
    """A tensor within one that a layer made."""

    made: Made
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # from the beginning of what was made

    def tensor(self, offloader: Offloader) -> torch.Tensor:
        base = self.made.tensor(offloader)
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


class Recipe:
    """How tensors are made again, all of them in one go."""

    __slots__ = ("_again", "_outputs", "_sources", "_surroundings", "_timer")

    def __init__(
        self,
        again: Callable[..., Any],
        sources: tuple[View, ...],
        outputs: Sequence[Made],
        surroundings: Callable[[], contextlib.AbstractContextManager[None]],
        timer: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._timer = timer
        self._again, self._sources, self._surroundings = again, sources, surroundings
        # A tensor that nobody saved is not kept for the sake of the others.
        self._outputs = [weakref.ref(output) for output in outputs]

    def run(self, offloader: Offloader) -> None:
        sources = [source.tensor(offloader) for source in self._sources]
        with self._surroundings(), self._timer():
            results = self._again(*sources)
        if len(self._outputs) == 1:
            results = (results,)
        for reference, result in zip(self._outputs, results, strict=True):
            made = reference()
            if made is not None and made.value is None:
                made.value = result.contiguous()


class Saved:
    """What autograd holds in the place of a tensor: a view of what was told of, or else the tensor itself."""

    __slots__ = ("tensor", "version", "view")

    def __init__(self, tensor: torch.Tensor, view: View | None) -> None:
        self.view = view
        self.version = tensor._version
        # Without its history: an output that its own node saves would keep itself alive.
        self.tensor = tensor.detach() if view is None else None


class LayerTape:
    """What one layer made in one forward.

    Args:
        level: what becomes of it.
        offloader: by which tensors leave.
        group: of the layer, in the offloader's order.
        device: where the layer runs.
        smallest: bytes below which a tensor does not leave.
        layers_to_come: how many will send as much after this one.
        sent_before: bytes that the layer before sent.
        timer: around what makes tensors of a kind again, if that is to be timed.
    """

    def __init__(
        self,
        level: Level,
        offloader: Offloader,
        group: Group,
        device: torch.device,
        *,
        smallest: int = 0,
        layers_to_come: int = 0,
        sent_before: int = 0,
        timer: Callable[[str], contextlib.AbstractContextManager[None]] | None = None,
    ) -> None:
        self.bytes: Counter[str] = Counter()  # that backward needs, by kind, and "untold"
        self.bytes_passing = 0  # of the largest tensor that was made beside those and is gone again
        self.bytes_sent = 0
        self._level, self._offloader, self._group = level, offloader, group
        self._made: dict[int, tuple[StorageWeakRef, Made]] = {}
        self._untold: dict[int, tuple[StorageWeakRef, list[Saved]]] = {}
        self._counted: dict[int, StorageWeakRef] = {}
        self._smallest, self._layers_to_come, self._sent_before = smallest, layers_to_come, sent_before
        self._approached = False
        self._timer = timer
        # As forward ran: a recomputation happens in backward, outside of the caller's autocast.
        self._surroundings = functools.partial(_Surroundings, *_autocast_of(device.type))

    def root(self, tensor: torch.Tensor, kind: str) -> None:
        """A tensor that cannot be made again cheaply, or that came from outside. A second telling changes nothing."""
        if _is_plain(tensor) and self._find(tensor) is None:
            self._tell(tensor, kind)

    def made(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        kind: str,
        again: Callable[..., Any],
        *sources: torch.Tensor,
    ) -> None:
        """A tensor, or several, that `again(*sources)` makes once more, to the bit.

        `again` runs without gradients, under the autocast of forward. It must draw no random numbers and change
        nothing. A source that was not told of is kept.
        """
        results = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if not all(map(_is_plain, (*results, *sources))):
            return
        addresses = {source.untyped_storage()._cdata for source in sources}
        if any(each.untyped_storage()._cdata in addresses for each in results):
            return  # an identity: it would be made of itself
        outputs = [self._tell(each, kind) for each in results]
        if self._level.actions.get(kind) != "again" or any(output is None for output in outputs):
            return
        views = [self._source(source) for source in sources]
        told = [output for output in outputs if output is not None]
        timer = functools.partial(self._timer, kind) if self._timer is not None else contextlib.nullcontext
        recipe = Recipe(again, tuple(views), told, self._surroundings, timer)
        for output in told:
            output.recipe, output.held = recipe, None

    def passes(self, count: int) -> None:
        """A tensor of so many bytes is made and saved by nobody, while the large ones are there."""
        self.bytes_passing = max(self.bytes_passing, count)

    def pack(self, tensor: torch.Tensor) -> Saved | torch.Tensor:
        """What autograd saves in the place of a tensor."""
        if isinstance(tensor, torch.nn.Parameter):
            return tensor  # itself: a sharded model may put other memory under it meanwhile
        if not _is_plain(tensor):
            return Saved(tensor, None)
        view = self._view(tensor)
        saved = Saved(tensor, view)
        storage = tensor.untyped_storage()
        if view is None and not _is_weight(tensor):
            # It may be told of yet: a node saves its own output before anyone else has seen it.
            _, waiting = self._untold.setdefault(storage._cdata, (StorageWeakRef(storage), []))
            waiting.append(saved)
            self._count(tensor, "untold")
        elif view is not None:
            self._count(tensor, view.made.kind)
        return saved

    def unpack(self, saved: Saved | torch.Tensor) -> torch.Tensor:
        """The tensor again.

        Raises:
            RuntimeError: it was written in place between forward and backward.
        """
        if not self._approached:
            self._approached = True
            self._offloader.approach(self._group)
        if isinstance(saved, torch.Tensor):
            return saved
        if saved.view is not None:
            return saved.view.tensor(self._offloader)
        assert saved.tensor is not None
        if saved.tensor._version != saved.version:
            raise _modified(saved.tensor, saved.version)
        return saved.tensor

    def close(self) -> None:
        """The layer has run. What nobody saved is free."""
        self._made.clear()
        self._untold.clear()
        self._counted.clear()

    def _tell(self, tensor: torch.Tensor, kind: str) -> Made | None:
        if not tensor.is_contiguous() or tensor.numel() == 0:
            return None
        made = Made(tensor, kind)
        storage = tensor.untyped_storage()
        leaves = self._level.actions.get(kind) == "offload" and not is_held_by_autograd(tensor)
        if leaves and tensor.nbytes >= self._smallest:
            to_come = max(self._sent_before - self.bytes_sent, 0) + self._sent_before * self._layers_to_come
            made.parked = self._offloader.send(tensor, self._group, to_come)
            if made.parked.block is not None:
                self.bytes_sent += tensor.nbytes
        else:
            made.held = tensor.detach()
        self._made[storage._cdata] = (StorageWeakRef(storage), made)
        _, waiting = self._untold.pop(storage._cdata, (None, []))
        if waiting and storage._cdata in self._counted:
            self.bytes["untold"] -= storage.nbytes()
            self.bytes[kind] += storage.nbytes()
        for saved in waiting:
            if saved.tensor is not None and saved.version == made.version:
                saved.view, saved.tensor = _view_of(made, saved.tensor), None
        return made

    def _source(self, tensor: torch.Tensor) -> View:
        view = self._view(tensor)
        if view is None:
            made = Made(tensor, "untold")  # of any strides: it is never sent, and made again by nobody
            made.held = tensor.detach()
            view = View(made, tensor.size(), tensor.stride(), 0)
        return view

    def _find(self, tensor: torch.Tensor) -> Made | None:
        entry = self._made.get(tensor.untyped_storage()._cdata)
        # A tensor that was written since is another one.
        return entry[1] if entry is not None and entry[1].version == tensor._version else None

    def _view(self, tensor: torch.Tensor) -> View | None:
        made = self._find(tensor)
        return _view_of(made, tensor) if made is not None else None

    def _count(self, tensor: torch.Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._counted:
            self._counted[storage._cdata] = StorageWeakRef(storage)  # the address is not used again meanwhile
            self.bytes[kind] += storage.nbytes()


def _view_of(made: Made, tensor: torch.Tensor) -> View:
    return View(made, tensor.size(), tensor.stride(), int(tensor.storage_offset()) - made.offset)


def _autocast_of(kind: str) -> tuple[str, bool, torch.dtype | None]:
    if not torch.amp.is_autocast_available(kind):
        return kind, False, None
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of one storage, and nothing else: no DTensor, no quantized or sparse one."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _is_weight(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)


class _Surroundings(contextlib.AbstractContextManager[None]):
    """Without gradients, under a given autocast."""

    def __init__(self, kind: str, enabled: bool, dtype: torch.dtype | None) -> None:
        autocast = contextlib.nullcontext() if dtype is None else torch.autocast(kind, dtype=dtype, enabled=enabled)
        self._contexts = (torch.no_grad(), autocast)

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


def _modified(tensor: torch.Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a "
        f"{tensor.dtype} tensor of shape {tuple(tensor.shape)} is at version {tensor._version}, expected {version}"
    )
