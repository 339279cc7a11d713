"""Which optimiser trains which weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn

from imagination.learning.sharding import own_part, part_of, whole
from imagination.runs.processes import gathered


class Muon(torch.optim.Muon):
    """``torch.optim.Muon``, whose products are computed for equal matrices at once, and in fp32 on CPUs.

    torch computes them one by one: a small model on a GPU then waits for a thousand launches a step. It computes them
    in bf16, for which most CPUs have no instructions: on an AMD EPYC of the third generation such a step takes more
    than twice as long as the forward and backward pass before it.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """See ``torch.optim.Muon``; the closure is the business of ``MuonAdamW``."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[torch.Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault(p.shape, []).append(p)
            for shape, params in alike.items():
                self._update(group, shape, params)

    def _update(self, group: dict[str, Any], shape: torch.Size, params: list[torch.Tensor]) -> None:
        directions = []
        for p in params:
            assert p.grad is not None
            state = self.state[p]
            momentum = state.setdefault("momentum_buffer", torch.zeros_like(p.grad))
            momentum.lerp_(p.grad, 1 - group["momentum"])
            directions.append(whole(p.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum))
        matrices = torch.stack(directions)
        matrices = matrices if matrices.device.type == "cpu" else matrices.bfloat16()
        steps = orthogonalize(matrices, group["ns_coefficients"], group["ns_steps"], group["eps"])
        lr = group["lr"]
        scale = (
            0.2 * max(shape) ** 0.5
            if group["adjust_lr_fn"] == "match_rms_adamw"
            else max(1, shape[0] / shape[1]) ** 0.5
        )
        for p, step in zip(params, steps, strict=True):
            p.mul_(1 - lr * group["weight_decay"]).sub_(part_of(step, p), alpha=lr * scale)


def orthogonalize(
    matrices: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Nearly the nearest orthogonal matrix of each, by Newton-Schulz iteration (Jordan et al. 2024).

    ``X <- a X + (b A + c A A) X`` with ``A = X X^T``, from ``X / |X|``; singular values end between 0.7 and 1.2.

    Args:
        matrices: ``[n, rows, columns]``, of the dtype to compute in.
        coefficients: ``a, b, c``.
    """
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.flatten(1).norm(dim=1).clamp(min=eps)[:, None, None]
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices inside the layers, AdamW for all else, as one optimiser with one state.

    Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks") takes the nearest
    orthogonal matrix of the momentum as the step; ``match_rms_adamw`` scales it so that the learning rate of AdamW
    fits (Liu et al. 2025, arXiv 2502.16982, eq. 4). Embeddings, the output layer, biases and norms are no maps
    between hidden states and keep AdamW; they are recognised by their modules (``nn.Embedding``,
    ``get_output_embeddings``).
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float, betas: tuple[float, float]) -> None:
        matrices, rest = split_matrices(model)
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts.append(Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
        if rest:
            self.parts.append(torch.optim.AdamW(rest, lr=lr, weight_decay=weight_decay, betas=betas))
        super().__init__(matrices + rest, {})
        self.share_groups()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both; the closure, if given, runs once, before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if len(state_dict.get("parts", ())) != len(self.parts):
            raise ValueError("this training state is not one of MuonAdamW for this model")
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.share_groups()

    def share_groups(self) -> None:
        # A schedule writes the learning rate into our groups; the parts must read it there.
        self.param_groups = list(chain.from_iterable(part.param_groups for part in self.parts))


def drop_if_not_finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether the gradients hold NaN or an infinity; then all of them go, so that the next step changes nothing."""
    trained = [p for p in parameters if p.grad is not None]
    norms = torch._foreach_norm([own_part(p.grad) for p in trained if p.grad is not None]) if trained else ()
    finite = not norms or bool(torch.stack([norm.float() for norm in norms]).isfinite().all())
    if all(gathered([finite])):
        return False
    for p in trained:
        p.grad = None
    return True


def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> float:
    """``torch.nn.utils.clip_grad_norm_`` by the norm of whole gradients, of which processes may have parts."""
    trained = [p for p in parameters if p.grad is not None]
    norm = whole(torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None]))
    torch.nn.utils.clip_grads_with_norm_(trained, most, norm)
    return float(norm)


def split_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trained parameters: matrices that map hidden states to hidden states, and the rest."""
    ends: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            ends |= _ids(module.parameters())
        get_head = getattr(module, "get_output_embeddings", None)
        head = get_head() if callable(get_head) else None
        if isinstance(head, nn.Module):
            ends |= _ids(head.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2 and id(p) not in ends]
    chosen = _ids(matrices)
    return matrices, [p for p in trained if id(p) not in chosen]


def _ids(parameters: Iterable[nn.Parameter]) -> set[int]:
    return {id(p) for p in parameters}
