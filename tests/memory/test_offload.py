"""Tensors that leave and come back: right values whenever the copies run, in the right order, and nothing kept."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from memory_machines import EarlyLane, LateLane, Pins

from fastft.memory.offload import WINDOW, Group, Offloader


def offloader_of(lane=LateLane, limit=1 << 40):
    lanes = []

    def lane_of(device):
        lanes.append(lane())
        return lanes[-1]

    return Offloader(Pins(), limit, lane_of), lanes


def send_all(offloader, tensors):
    """Each from a layer of its own."""
    parked, group = [], None
    for tensor in tensors:
        group = Group(group)
        parked.append(offloader.send(tensor, group))
    return parked


@pytest.mark.parametrize("lane", [LateLane, EarlyLane])
def test_tensors_come_back_with_their_values_sizes_and_strides(lane):
    offloader, _ = offloader_of(lane)
    base = torch.randn(6, 6)
    tensors = [torch.randn(4, 5), base.t(), base, torch.randn(2, 3, 4).permute(2, 0, 1), torch.randn(7).bfloat16()]
    expected = [tensor.clone() for tensor in tensors]
    strides = [tensor.stride() for tensor in tensors]
    parked = send_all(offloader, tensors)
    del tensors, base
    offloader.settle(torch.device("cpu"))
    for handle, value, stride in reversed(list(zip(parked, expected, strides, strict=True))):
        tensor = offloader.fetch(handle)
        assert torch.equal(tensor, value) and tensor.stride() == stride and tensor.dtype == value.dtype


def test_memory_is_given_up_after_the_window_and_not_before_the_copy():
    offloader, _ = offloader_of()
    parked = send_all(offloader, [torch.randn(8) for _ in range(6)])
    assert [handle.held is None for handle in parked] == [True] * (6 - WINDOW) + [False] * WINDOW
    offloader.settle(torch.device("cpu"))
    assert all(handle.held is None for handle in parked)


def test_a_plan_says_how_many_bytes_may_be_leaving():
    offloader, lanes = offloader_of()
    offloader.window = None
    device = torch.device("cpu")
    offloader.give_up(device, 0)  # nothing has left yet
    parked = send_all(offloader, [torch.randn(8) for _ in range(6)])
    assert all(handle.held is not None for handle in parked)
    offloader.give_up(device, 3.5 * 32)
    assert [handle.held is None for handle in parked] == [True] * 3 + [False] * 3
    assert lanes[0].log.count("wait") == 3
    offloader.give_up(device, 3 * 32)
    assert lanes[0].log.count("wait") == 3
    offloader.give_up(device, 0)
    assert all(handle.held is None for handle in parked)


@pytest.mark.parametrize(("ahead", "back"), [(None, 2), (0, 0), (31, 0), (32, 1), (63, 1), (64, 2), (96, 3), (1000, 8)])
def test_as_much_comes_back_as_there_is_room_for(ahead, back):
    """Tensor by tensor, of layers that send two of 32 bytes each."""
    offloader, _ = offloader_of()
    parked, group = [], None
    for _ in range(4):
        group = Group(group, ahead)
        parked += [offloader.send(torch.randn(8), group) for _ in range(2)]
    last = Group(group, ahead)  # sends nothing
    offloader.settle(torch.device("cpu"))
    for _ in range(2):
        offloader.approach(last)
        assert [handle.arriving is not None for handle in parked] == [False] * (8 - back) + [True] * back
    offloader.approach(group)  # all of its own, and as much again
    own_and_ahead = min(2 + (2 if ahead is None else ahead // 32), 8)
    assert sum(handle.arriving is not None for handle in parked) == max(own_and_ahead, back)


def test_backward_takes_the_memory_of_all_but_what_comes_back_soon():
    offloader, _ = offloader_of()
    offloader.window = None
    parked = send_all(offloader, [torch.randn(8) for _ in range(5)])
    last = Group(parked[-1].group, 2 * 32)
    offloader.approach(last)
    assert [handle.held is None for handle in parked] == [True] * 3 + [False] * 2
    offloader.approach(Group(None, 0))  # of another forward, of which nothing has left
    assert all(handle.held is None for handle in parked)


def test_the_older_of_two_forwards_may_be_the_first_to_run_backward():
    offloader, _ = offloader_of()
    offloader.window = None
    values = [torch.full((8,), float(number)) for number in range(6)]
    parked = []
    for forward in (values[:3], values[3:]):
        group = None
        for tensor, ahead in zip(forward, (0, 32, 1000), strict=True):
            group = Group(group, ahead)
            parked.append(offloader.send(tensor.clone(), group))
    for place in (2, 1, 0, 5, 4, 3):
        assert torch.equal(offloader.fetch(parked[place]), values[place])


def test_what_left_for_a_graph_that_is_gone_is_given_up():
    offloader, lanes = offloader_of()
    offloader.window = None
    parked = send_all(offloader, [torch.randn(8) for _ in range(3)])
    watched = weakref.ref(parked[1].held)
    del parked[1]
    offloader.forget(torch.device("cpu"))
    assert watched() is None and lanes[0].log.count("wait") == 1
    offloader.give_up(torch.device("cpu"), 32)
    assert [handle.held is None for handle in parked] == [True, False]


def test_fetching_starts_the_copy_of_the_one_before():
    offloader, lanes = offloader_of()
    parked = send_all(offloader, [torch.randn(8) for _ in range(3)])
    offloader.settle(torch.device("cpu"))
    lane = lanes[0]
    lane.log.clear()
    offloader.fetch(parked[2])
    assert lane.log == ["copy", "copy", "wait"]  # its own, the one before, and only then the wait
    assert parked[1].arriving is not None and parked[0].arriving is None
    lane.log.clear()
    offloader.fetch(parked[1])
    assert lane.log == ["copy", "wait"]


def test_at_most_two_buffers_are_on_the_device():
    offloader, _ = offloader_of()
    parked = send_all(offloader, [torch.randn(8) for _ in range(8)])
    offloader.settle(torch.device("cpu"))
    for handle in reversed(parked):
        offloader.fetch(handle)
        assert sum(other.arriving is not None for other in parked) <= 1


def test_a_tensor_that_is_still_there_is_not_copied_back():
    offloader, lanes = offloader_of()
    tensor = torch.randn(8)
    parked = offloader.send(tensor, Group())
    assert offloader.fetch(parked).data_ptr() == tensor.data_ptr()
    assert lanes[0].log == ["copy", "wait"]  # for the way out: from now on its memory may be freed


def test_fetching_again_gives_the_same_values():
    offloader, _ = offloader_of()
    tensor = torch.randn(8)
    expected = tensor.clone()
    parked = offloader.send(tensor, Group())
    offloader.settle(torch.device("cpu"))
    offloader.fetch(parked).fill_(0)
    assert torch.equal(offloader.fetch(parked), expected)


def test_an_input_that_was_written_meanwhile_raises_as_in_autograd():
    offloader, _ = offloader_of()
    tensor = torch.randn(8)
    parked = offloader.send(tensor, Group())
    tensor.add_(1)
    offloader.settle(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        offloader.fetch(parked)
    kept = offloader.keep(tensor, Group())
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        offloader.fetch(kept)


def test_a_write_after_the_copy_changes_nothing():
    offloader, _ = offloader_of()
    tensor = torch.randn(8)
    expected = tensor.clone()
    parked = offloader.send(tensor, Group())
    offloader.settle(torch.device("cpu"))
    tensor.add_(1)
    assert torch.equal(offloader.fetch(parked), expected)


def test_a_buffer_whose_graph_died_lives_until_its_copy_is_done():
    offloader, lanes = offloader_of()
    parked = send_all(offloader, [torch.randn(8) for _ in range(3)])
    offloader.settle(torch.device("cpu"))
    offloader.fetch(parked[2])
    orphans = parked[0].orphans
    del parked
    gc.collect()
    assert len(orphans) == 1
    lanes[0].log.clear()
    offloader.send(torch.randn(8), Group())
    assert not orphans and "wait" in lanes[0].log


def test_a_graph_that_dies_early_leaves_nothing():
    offloader, _ = offloader_of()
    for _ in range(5):
        send_all(offloader, [torch.randn(1000) for _ in range(3)])
    gc.collect()
    offloader.settle(torch.device("cpu"))
    assert offloader.pool.in_use == 0 and offloader.pool.capacity < 3 * 5 * 4096


def test_without_host_memory_the_tensor_stays():
    offloader, lanes = offloader_of(limit=1000)
    tensor = torch.randn(1000)
    parked = offloader.send(tensor, Group())
    assert parked.block is None and not lanes[0].log
    offloader.settle(torch.device("cpu"))
    assert offloader.fetch(parked).data_ptr() == tensor.data_ptr()


def test_buffers_are_no_inference_tensors():
    offloader, _ = offloader_of()
    with torch.inference_mode():
        with torch.inference_mode(False):
            tensor = torch.randn(8)
        parked = offloader.send(tensor, Group())
        offloader.settle(torch.device("cpu"))
        fetched = offloader.fetch(parked)
    assert not fetched.is_inference() and not parked.host.is_inference()
    fetched.add_(1)


def test_each_device_has_its_own_lane():
    offloader, lanes = offloader_of()
    offloader.send(torch.randn(8), Group())
    offloader.settle(torch.device("meta"))
    offloader.send(torch.randn(8), Group())
    assert len(lanes) == 2


def test_what_stays_needs_no_lane():
    offloader, lanes = offloader_of()
    tensor = torch.empty(0, device="meta")  # torch saves such things beside a layer's input
    assert offloader.fetch(offloader.keep(tensor, Group())) is not None and not lanes


def test_a_view_with_gaps_stays():
    offloader, _ = offloader_of(EarlyLane)
    base = torch.randn(4, 8)
    whole, part = offloader.send(base, Group()), offloader.send(base[:, :2], Group())
    expected = base.clone()
    offloader.settle(torch.device("cpu"))
    assert part.block is None and torch.equal(offloader.fetch(part), expected[:, :2])
    assert torch.equal(offloader.fetch(whole), expected)
