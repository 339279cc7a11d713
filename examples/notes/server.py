"""An MCP server where each session writes notes: `python server.py` over stdio, `python server.py 8000` over HTTP."""

import sys
from collections import defaultdict

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("notes", log_level="WARNING")
books: dict[str, dict[int, str]] = defaultdict(dict)


def notes_of(context: Context) -> dict[int, str]:
    return books[(context.headers or {}).get("mcp-session-id", "")]


@server.tool()
def add_note(title: str, context: Context) -> str:
    """Writes a note down."""
    notes = notes_of(context)
    number = max(notes, default=0) + 1
    notes[number] = title
    return f"Note {number}: '{title}'."


@server.tool()
def list_notes(context: Context) -> str:
    """All notes with their numbers."""
    notes = notes_of(context)
    return "\n".join(f"{number}: '{title}'" for number, title in notes.items()) or "There are no notes."


@server.tool()
def delete_note(number: int, context: Context) -> str:
    """Throws a note away."""
    notes = notes_of(context)
    if number not in notes:
        raise ToolError(f"there is no note {number}")
    return f"Deleted '{notes.pop(number)}'."


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
