"""What a layer calls in place of `torch.utils.checkpoint`: the same, with its input kept where the memory plan says.

The recomputation stays torch's: early stop, random numbers, selective policies, nesting and `retain_graph` are its own.
torch saves the input of a checkpointed function as any saved tensor, so that hooks around the call get the input and
nothing else: what the layer saves inside belongs to the checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from .activations import ActivationMemory
from .offload import Group, Parked
from .policy import WrittenIntoError, checkpoint_but_products
from .schedule import KEEP, OFFLOAD, RECOMPUTE, Mode
from .tape import Level

_Place = tuple[int, torch.Size, tuple[int, ...]]  # where a tensor lies: address, size and stride


class LayerCheckpoint:
    """The checkpoint function of one layer.

    Args:
        inner: the function it takes the place of, as Hugging Face sets it: `torch.utils.checkpoint.checkpoint` with its
            options.
        memory: of the model.
        index: of the layer among those of its stack that are checkpointed.
        count: how many these are.
        planned: whether the stack is the one that the memory plan is made for.
        tells: whether the modules of the layer tell what they make.
    """

    def __init__(
        self,
        inner: Callable[..., Any],
        memory: ActivationMemory,
        index: int,
        count: int,
        planned: bool = True,
        tells: bool = True,
    ) -> None:
        self.inner = inner
        self.memory = memory
        self.index, self.count, self.planned, self.tells = index, count, planned, tells
        self._writes = ""  # how the layer writes into what its operators would keep, if it does

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerCheckpoint:
        inner, memory = deepcopy(self.inner, memo), deepcopy(self.memory, memo)
        return LayerCheckpoint(inner, memory, self.index, self.count, self.planned, self.tells)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _same, (self.inner,)  # a pickle holds the unpatched model

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not args or not isinstance(args[0], torch.Tensor):
            return self.inner(function, *args, **kwargs)
        if not torch.is_grad_enabled():
            return self.inner(function, *args, **kwargs)
        memory, problem = self.memory, self._why_aside()
        if problem:
            memory.counters[f"left alone: {problem}"] += 1
            return self.inner(function, *args, **kwargs)
        if not self.planned:
            return self._run(memory.mode, function, *args, **kwargs)
        device = args[0].device
        if self.index == 0:
            memory.begin(args[0], self.count)
        mode = memory.mode_of(args[0], self.index, self.count)
        memory.give_up(device, self.index)
        result = self._run(mode, function, *args, **kwargs)
        if self.index == self.count - 1:
            memory.give_up(device, self.count)
        return result

    def _run(self, mode: Mode, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        memory = self.memory
        options = _options_of(self.inner) if mode not in (RECOMPUTE, OFFLOAD) else {}
        if "context_fn" in options or (options.get("debug") and not self.tells):  # torch debugs no selective ones
            name = "context_fn" if "context_fn" in options else "debug"
            memory.counters[f"left alone: a checkpoint with {name} of the caller's"] += 1
            mode = RECOMPUTE
        bound = functools.partial(function, **kwargs) if kwargs else function
        if isinstance(mode, Level) and memory.planner is None and not self.tells:
            return self._kept_by_operators(options, bound, *args)
        if mode == KEEP or isinstance(mode, Level):
            return self._kept(mode, bound, *args)
        if mode == OFFLOAD:
            return self._offloaded(bound, *args)
        return self._measured(bound, *args) if self.planned and memory.is_measuring else self.inner(bound, *args)

    def _offloaded(self, function: Callable[..., Any], *args: Any) -> Any:
        """The layer checkpointed, with its input in host memory."""
        memory = self.memory
        problem = memory.why_kept(args[0])
        if problem:
            memory.counters[f"input kept: {problem}"] += 1
            return self.inner(function, *args)
        group = memory.group_of(self.index)
        # Hooks live as long as what they packed: with the input itself in them, nothing would ever leave.
        pack = functools.partial(self._pack, group, _place_of(args[0]))
        with saved_tensors_hooks(pack, memory.offloader.fetch):
            return self.inner(function, *args)

    def _kept_by_operators(self, options: dict[str, Any], function: Callable[..., Any], *args: Any) -> Any:
        """The layer run again but for products of matrices and attention; all of it where it writes into these."""
        if not self._writes:
            cpu, devices = torch.get_rng_state(), get_device_states(*args)
            try:
                result = checkpoint_but_products(function, *args, **options)
            except (WrittenIntoError, NotImplementedError) as error:  # the latter of operators that no mode can see
                self._writes = str(error).partition("\n")[0]
                torch.set_rng_state(cpu)  # it runs once more, and draws the same
                set_device_states(*devices)
            else:
                self.memory.counters["layer kept in part, by its operators"] += 1
                return result
        self.memory.counters[f"left alone: {self._writes}"] += 1
        return self.inner(function, *args)

    def _kept(self, mode: Mode, function: Callable[..., Any], *args: Any) -> Any:
        """The layer run once; checkpointed after all if memory runs out."""
        try:
            result = self._told(mode, function, *args) if isinstance(mode, Level) else function(*args)
        except torch.OutOfMemoryError:
            if self.memory.planner is None:
                raise
            self.memory.counters["out of memory, planned anew"] += 1
            self.memory.planner.tighten()
        else:
            self._watch(result)
            return result
        torch.cuda.empty_cache()  # outside of the handler, whose traceback holds the layer's tensors
        return self.inner(function, *args)

    def _told(self, level: Level, function: Callable[..., Any], *args: Any) -> Any:
        """The layer run once, with what it makes kept as the level says."""
        memory = self.memory
        tape = memory.tape_for(level, args[0], self.index, self.count)
        outer, memory.tape = memory.tape, tape
        try:
            with saved_tensors_hooks(tape.pack, tape.unpack):
                return function(*args)
        finally:
            memory.tape = outer
            memory.finished(tape, self.index)
            tape.close()

    def _measured(self, function: Callable[..., Any], *args: Any) -> Any:
        """The layer checkpointed, and timed."""
        planner = self.memory.planner
        assert planner is not None
        with planner.forward_of_a_layer():
            result = self.inner(function, *args)
        self._watch(result)
        return result

    def _watch(self, result: Any) -> None:
        """While measuring, lets the planner know when backward begins."""
        if self.index == self.count - 1 and self.memory.is_measuring and self.memory.planner is not None:
            output = result[0] if isinstance(result, tuple) else result
            planner = self.memory.planner
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(lambda _: planner.backward_begins())

    def _why_aside(self) -> str:
        # Someone else moves or recomputes saved tensors. Of two hooks only the inner one runs, so theirs would not.
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return "inside other saved-tensor hooks"
        return "" if is_torch_checkpoint(self.inner) else "a checkpoint function that is not torch's own"

    def _pack(self, group: Group, place: _Place, tensor: torch.Tensor) -> Parked:
        # Autograd may hand over another tensor object; a view of the input is not the input.
        if _place_of(tensor) == place:
            return self.memory.pack_input(tensor, group, self.index, self.count)
        return self.memory.offloader.keep(tensor, group)


def _place_of(tensor: torch.Tensor) -> _Place:
    return tensor.data_ptr(), tensor.size(), tensor.stride()


def _same(inner: Any) -> Any:
    return inner


def _options_of(function: Any) -> dict[str, Any]:
    """The keywords that a checkpoint function was given already."""
    found: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        found = {**function.keywords, **found}
        function = function.func
    return found


def is_torch_checkpoint(function: Any) -> bool:
    """Whether a checkpoint function is torch's own, with options or without."""
    while isinstance(function, functools.partial):
        function = function.func
    return function is torch.utils.checkpoint.checkpoint
