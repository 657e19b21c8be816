"""In which turn autograd sums up gradients that one function made together.

Its queue (`ReadyQueue` in `torch/csrc/autograd/engine.cpp` of PyTorch 2.11) is a `std::priority_queue` in which all
sums are as urgent, and more so than what goes on with the gradient of the input. The turns are those of the heap that
libstdc++ has.
"""

from __future__ import annotations

from functools import lru_cache

INPUT = -1


@lru_cache(maxsize=64)
def turns(count: int) -> tuple[int, ...]:
    """Of so many parameters, in the order of a compiled block's inputs, which has its hidden states first."""
    heap = [INPUT]
    for parameter in range(count):
        heap.append(parameter)
        _rise(heap, len(heap) - 1, parameter)
    found = []
    while heap[0] != INPUT:
        found.append(heap[0])
        _take_first(heap)
    return tuple(found)


def _rise(heap: list[int], hole: int, one: int) -> None:
    """`std::__push_heap`: past the input alone."""
    while hole and heap[(hole - 1) // 2] == INPUT != one:
        heap[hole], hole = INPUT, (hole - 1) // 2
    heap[hole] = one


def _take_first(heap: list[int]) -> None:
    """`std::__adjust_heap`: what is on the right moves up, if it is not the input, and then the last one there."""
    last, hole = heap.pop(), 0
    while (right := 2 * hole + 2) < len(heap):
        child = right - 1 if heap[right] == INPUT != heap[right - 1] else right
        heap[hole], hole = heap[child], child
    if right - 1 < len(heap):
        heap[hole], hole = heap[right - 1], right - 1
    _rise(heap, hole, last)
