"""A checkpoint behind OpenAI's chat completions, whole or streamed, on a free port of this machine.

``transformers serve`` does the same but ends a stream without ``[DONE]``, which strict clients take for a broken one.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer

from imagination.serving.app import listen


class Chat:
    """Samples answers one at a time."""

    def __init__(self, checkpoint: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
        self._one = threading.Lock()

    def answer(self, messages: list[dict[str, Any]], max_tokens: int) -> tuple[str, int, int]:
        """The text, and how many tokens were read and written."""
        prompt = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        read = prompt["input_ids"].shape[1]
        with self._one, torch.inference_mode():
            made = self._model.generate(
                prompt["input_ids"], attention_mask=prompt["attention_mask"], do_sample=True, max_new_tokens=max_tokens
            )[0, read:]
        return self._tokenizer.decode(made, skip_special_tokens=True), read, len(made)

    async def endpoint(self, request: Request) -> Response:
        asked = await request.json()
        most = asked.get("max_completion_tokens") or asked.get("max_tokens") or 16
        text, read, written = await asyncio.to_thread(self.answer, asked["messages"], most)
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        head = {"id": "chat", "created": int(time.time()), "model": asked["model"]}
        said = {"role": "assistant", "content": text}
        if not asked.get("stream"):
            choice = {"index": 0, "message": said, "finish_reason": "stop"}
            return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        chunk = {**head, "object": "chat.completion.chunk"}
        parts: list[dict[str, Any]] = [
            {**chunk, "choices": [{"index": 0, "delta": said, "finish_reason": None}]},
            {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {**chunk, "choices": [], "usage": usage},
        ]

        async def stream() -> AsyncIterator[str]:
            for part in [*map(json.dumps, parts), "[DONE]"]:
                yield f"data: {part}\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")


@contextmanager
def chat_endpoint(checkpoint: Path) -> Iterator[str]:
    """The address that clients of OpenAI's protocol want; the server is a thread of this process."""
    routes = [Route("/v1/chat/completions", Chat(checkpoint).endpoint, methods=["POST"])]
    listening = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="warning", access_log=False))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
