"""Steps as CUDA graphs: what the host launches a step is one graph in place of some hundreds of kernels.

A graph has fixed shapes: a *width* of tokens for each slot, whether it runs or not, over as many positions as a
multiple of a stride. Width 1 decodes; wider graphs read prompts and drafts. Other steps are launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from policy.lm.engines.inprocess.slots import Feed, SlotCache

_STRIDE, _WIDE_STRIDE = 128, 256  # positions: a graph of width 1, or of another, for each multiple
_WIDTHS = (1, 16, 64)
_WARM_UP = 2  # runs before a capture, in which libraries allocate what they need
# What a card could compute while the host launches one layer: 2 ms on an H200 that computes 200 TFLOP/s
_OPERATIONS_A_LAUNCH = 4e11
Forward = Callable[[Tensor, Tensor, int], Tensor]


def affordable_widths(slots: int, layers: int, parameters: int) -> tuple[int, ...]:
    """Widths of which a step, mostly of padding, is computed faster than its kernels are launched; 1 is among them.

    Args:
        parameters: that each token is multiplied by, without embeddings.
    """
    most = layers * _OPERATIONS_A_LAUNCH / (2 * parameters * slots)
    return tuple(width for width in _WIDTHS if width == 1 or width <= most)


class StepGraphs:
    """Hidden states of steps in which no running slot reads more tokens than the widest graph has.

    Args:
        forward: of ``tokens[slot, width]`` and ``positions[slot, width]`` (of padding ``waste_position``) over
            ``visible`` positions, to hidden states ``[slot * width, hidden]``; the same kernels on the same addresses
            at each call.
        widths: ascending.
        replayed: off runs ``forward`` itself, as where there is no card.
    """

    def __init__(self, forward: Forward, cache: SlotCache, widths: tuple[int, ...], replayed: bool) -> None:
        self._forward, self._cache, self._replayed, self.widths = forward, cache, replayed, widths
        shape, device = (2, cache.kv.shape[2]), cache.kv.device
        self._inputs = {width: torch.zeros(*shape, width, dtype=torch.long, device=device) for width in widths}
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if replayed else None

    def fits(self, feed: Feed) -> bool:
        """Whether it is such a step."""
        return not feed.canvas and int(feed.counts.max()) <= self.widths[-1]

    def hidden(self, feed: Feed) -> Tensor:
        """Final hidden states ``[wanted, hidden]``; writes keys and values."""
        width = next(width for width in self.widths if width >= feed.counts.max())
        slots, positions = feed.slot_of_token(), feed.positions()
        columns = positions - np.repeat(feed.starts, feed.counts)
        inputs = np.zeros(self._inputs[width].shape, dtype=np.int64)
        inputs[1] = self._cache.waste_position
        inputs[0, slots, columns], inputs[1, slots, columns] = feed.tokens, positions
        self._inputs[width].copy_(torch.from_numpy(inputs))
        stride = _STRIDE if width == 1 else _WIDE_STRIDE
        visible = min(-(-int(positions.max() + 1) // stride) * stride, self._cache.waste_position)
        if self._replayed and (width, visible) not in self._graphs:
            self._graphs[width, visible] = self._captured(width, visible)
        if self._replayed:
            graph, states = self._graphs[width, visible]
            graph.replay()
        else:
            states = self._forward(self._inputs[width][0], self._inputs[width][1], visible)
        wanted = (slots * width + columns)[feed.wanted]
        return states[torch.from_numpy(wanted).to(states.device)]  # a copy: the next step writes into ``states``

    def _captured(self, width: int, visible: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        asked = *self._inputs[width], visible
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UP):
                self._forward(*asked)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            states = self._forward(*asked)
        return graph, states
