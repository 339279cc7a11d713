"""The notes of ``examples/notes/server.py`` as a real MCP server that also misbehaves on demand, over stdio or HTTP."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.subprocess_server import ROOT, Server, serving

COMMAND = f"{sys.executable} {Path(__file__)}"
TITLES = ("milk", "bread", "soap", "tea", "rice", "salt")


def write_tasks(path: Path, titles: tuple[str, ...] = TITLES) -> Path:
    checks = {"call": "list_notes()", "matches": ""}
    lines = [
        {"id": f"notes-{t}", "text": f"Write a note '{t}', then say done().", "check": {**checks, "matches": t}}
        for t in titles
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def main(port: int) -> None:
    from mcp.server.mcpserver import Image
    from starlette.requests import Request
    from starlette.responses import Response

    spec = importlib.util.spec_from_file_location("notes_server", ROOT / "examples/notes/server.py")
    assert spec is not None
    assert spec.loader is not None
    notes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(notes)

    @notes.server.tool(structured_output=False)  # type: ignore[untyped-decorator, unused-ignore]
    def misbehave(how: str) -> Any:
        """For tests."""
        if how == "hang":
            time.sleep(60)
        if how == "die":
            print("the notes burn", file=sys.stderr, flush=True)
            os._exit(1)
        return ["A picture.", Image(data=b"x", format="png"), Image(data=b"y", format="png")] if how == "show" else []

    @notes.server.custom_route("/health", ["GET"])  # type: ignore[untyped-decorator, unused-ignore]
    async def health(request: Request) -> Response:
        return Response()

    if port:
        notes.server.run("streamable-http", port=port)
    else:
        notes.server.run()


@contextmanager
def mcp_server(folder: Path, port: int = 0) -> Iterator[Server]:
    with serving("tests.support.mcp_server", [str(folder / "none")], "/health", folder, port) as server:
        yield server


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 0)
