"""Weights, gradients and optimiser state that processes share out among them: torch's FSDP2 (``fully_shard``).

A sharded copy of a model is trained beside the plain one, which plays, is judged and is saved: ``gather`` fills it.
Gradients are sums over processes, see ``processes.sum_gradients``. All processes make the same passes.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed import checkpoint as shards
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint as recomputed

from imagination.runs.processes import count, rank
from imagination.runs.run_folder import RunFolder
from imagination.settings import UserError
from policy.lm.forward import decoder, packs

Compute = Callable[[Callable[[], Any]], Any]  # calls a function whose passes read sharded weights


def unsharded(compute: Callable[[], Any]) -> Any:
    """``Compute`` where no weights are sharded."""
    return compute()


class _Root(nn.Module):
    """What FSDP2 gathers around a computation that reads embeddings and output layer by themselves."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


def shard(run: RunFolder, plain: Any, value: nn.Module | None = None) -> tuple[Any, Compute]:
    """What a run trains, and by what its passes are computed: under ``strategy=fsdp2`` a copy of a causal LM of which
    each process has a part, else the model itself.

    Args:
        value: a critic's head, which is shared out as it is.
    """
    if run.strategy != "fsdp2":
        return plain, unsharded
    device, kind = plain.device, "cuda" if torch.cuda.is_available() else "cpu"
    model = copy.deepcopy(plain.cpu())  # blocks go to the GPU one by one, when they are shared out
    core, names = decoder(model), set(model._no_split_modules or ())
    blocks = [module for module in core.modules() if type(module).__name__ in names]
    for block in blocks if run.activation_checkpointing else ():
        again = partial(_as_before, core.config)
        block.forward = partial(recomputed, block.forward, use_reentrant=False, context_fn=again)
    heads = [] if value is None else list(value.children())  # a layer, as torch warns of a view that a head returns
    root, mesh = _Root(model, *heads), init_device_mesh(kind, (count(),))
    for part in (*blocks, *heads, root):
        part = cast(FSDPModule, fully_shard(part, mesh=mesh, reshard_after_forward=True))
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    if not rank():
        plain.to(device)  # where it plays
    root(partial(packs, model, 1))  # asked now: later, not all processes might
    return model, root


def _as_before(config: Any) -> tuple[Any, Any]:
    """Contexts of a pass and of its repetition, which computes attention as the pass did."""
    return nullcontext(), _attention(config, config._attn_implementation)


@contextmanager
def _attention(config: Any, implementation: str) -> Iterator[None]:
    before, config._attn_implementation = config._attn_implementation, implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which this process has a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """What this process has of a tensor, by reference."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """The inverse of ``whole``: what this process has of it where it has a part of ``like``."""
    if not isinstance(like, DTensor):
        return tensor.to(like.device)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def gather(sharded: nn.Module, plain: nn.Module) -> None:
    """Copies the trained weights; all processes take part."""
    for source, target in zip(sharded.parameters(), plain.parameters(), strict=True):
        if source is not target and source.requires_grad:
            target.copy_(whole(source))


# What the list of the tensors in such a folder is made of. It is a pickle, which otherwise could name any function.
_LISTED = {
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "torch": {
        "Size",
        *(str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if type(dtype) is torch.dtype),
    },
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
}


class _Listing(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _LISTED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class _Reader(shards.FileSystemReader):
    """Torch's, which would run what a list of tensors names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _Listing(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
            raise UserError(f"{path} is no list of a training state: {error}") from error
        if not isinstance(metadata, Metadata):
            raise UserError(f"{path} is no list of a training state: it holds a {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(shards.DefaultLoadPlanner):
    """Torch's, which would run what stands in place of a number."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        torch.load(value, weights_only=True)  # raises where it is more than numbers, texts and tensors
        value.seek(0)
        super().load_bytes(read_item, value)


def load_shards(state: dict[str, Any], folder: Path) -> None:
    """Fills ``state`` with what ``save_checkpoint`` wrote, whoever edited it since; all processes take part.

    Raises:
        UserError: a part of it is damaged, or names what is none.
    """
    try:
        shards.load(state, storage_reader=_Reader(folder), planner=_Planner())
    except CheckpointException as error:
        reasons = {str(reason).partition("\n")[0] for reason, _ in error.failures.values()}
        raise UserError(f"{folder} cannot be read: {'; '.join(sorted(reasons))}") from error


class Gathering(Callback):
    """Keeps the plain model as the sharded one is, from update to update."""

    def __init__(self, sharded: nn.Module, plain: nn.Module) -> None:
        self._models = sharded, plain

    def on_train_start(self, *_: Any) -> None:
        gather(*self._models)

    def on_train_batch_end(self, *_: Any) -> None:
        gather(*self._models)


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for models that are sharded already. Each process saves its part of a training state, and
    as many others as there may be can read it.
    """

    def __init__(self) -> None:
        super().__init__(data_parallel_size=count(), tensor_parallel_size=1)

    def _state(self) -> tuple[tuple[torch.optim.Optimizer, ...], dict[str, Any]]:
        assert self.model is not None
        parts = tuple(part for optimizer in self.optimizers for part in getattr(optimizer, "parts", (optimizer,)))
        model, optimizers = get_state_dict(self.model, parts)
        return parts, {"model": model, "optimizers": optimizers}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # beside the checkpoint

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes ``filepath``, and beside it a folder ``<stem>.<steps>.shards``."""
        path = Path(self.broadcast(filepath))
        checkpoint["shards"] = f"{path.stem}.{checkpoint['steps_done']}.shards"
        shards.save(self._state()[1], checkpoint_id=path.with_name(checkpoint["shards"]))
        if self.is_global_zero:
            torch.save(checkpoint, path)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        parts, state = self._state()
        load_shards(state, path.with_name(checkpoint["shards"]))
        assert self.model is not None
        set_state_dict(self.model, parts, model_state_dict=state["model"], optim_state_dict=state["optimizers"])
        for optimizer in self.optimizers:
            getattr(optimizer, "share_groups", lambda: None)()
        return checkpoint
