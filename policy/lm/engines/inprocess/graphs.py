"""Decoding steps as CUDA graphs: what the host launches a step is one graph in place of some hundreds of kernels.

A graph has fixed shapes: one token for each slot, whether it runs or not, over as many positions as a multiple of
``_STRIDE``. Steps of other shapes (prompts, drafts) are launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from policy.lm.engines.inprocess.slots import Feed, SlotCache

_STRIDE = 128  # positions: a graph for each multiple
_WARM_UP = 2  # runs before a capture, in which libraries allocate what they need
Forward = Callable[[Tensor, Tensor, int], Tensor]


class DecodeGraphs:
    """Hidden states of steps in which every running slot reads one token.

    Args:
        forward: of ``tokens[slot]`` and ``positions[slot]`` (of idle slots ``waste_position``) over ``visible``
            positions, to hidden states ``[slot, hidden]``; the same kernels on the same addresses at each call.
        replayed: off runs ``forward`` itself, as where there is no card.
    """

    def __init__(self, forward: Forward, cache: SlotCache, replayed: bool) -> None:
        self._forward, self._cache, self._replayed = forward, cache, replayed
        self._inputs = torch.zeros(2, cache.kv.shape[2], dtype=torch.long, device=cache.kv.device)
        self._tokens, self._positions = self._inputs.unbind()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if replayed else None

    @staticmethod
    def fits(feed: Feed) -> bool:
        """Whether it is such a step."""
        return not feed.canvas and len(feed.wanted) == len(feed.slots) == len(feed.tokens)

    def hidden(self, feed: Feed) -> Tensor:
        """Final hidden states ``[slot of feed, hidden]``; writes keys and values."""
        inputs = np.zeros(self._inputs.shape, dtype=np.int64)
        inputs[1] = self._cache.waste_position
        inputs[0, feed.slots], inputs[1, feed.slots] = feed.tokens, feed.starts
        self._inputs.copy_(torch.from_numpy(inputs))
        visible = min(-(-int(feed.starts.max() + 1) // _STRIDE) * _STRIDE, self._cache.waste_position)
        if self._replayed and visible not in self._graphs:
            self._graphs[visible] = self._captured(visible)
        if self._replayed:
            graph, states = self._graphs[visible]
            graph.replay()
        else:
            states = self._forward(self._tokens, self._positions, visible)
        return states[torch.from_numpy(feed.slots).to(states.device)]  # a copy: the next step writes into ``states``

    def _captured(self, visible: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UP):
                self._forward(self._tokens, self._positions, visible)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            states = self._forward(self._tokens, self._positions, visible)
        return graph, states
