"""How fast and in how much memory a large log is imported, and whether broken records end an import.

``python -m tests.benchmarks.imports`` writes JSON lines of ``--mb`` megabytes, imports them in a child process of one
core and prints megabytes per second of CPU time and the peak of its memory. ``--broken N`` imports N records of all
formats of lines, most of them damaged, and compares what is kept and refused with what was written.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from imagination.runs.machine import processor

TEXT = """
the a of to and in is you see on table door key open close take room there
with from into red small old customer order account address please reservation flight airport search results page button
link price item cart total name city window garden north south east west lamp box letter number date
week report error file directory python import return value list text user message agent answer question world state
action reward
"""
WORDS = TEXT.split()
EPISODES_A_TASK = 4


def sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words)).capitalize() + "."


def episode(draw: random.Random, number: int) -> dict[str, Any]:
    """About 8 kB in ten turns, a few addresses and tokens among them; every other one is solved."""
    task = number // EPISODES_A_TASK
    own = random.Random(task)
    turns: list[dict[str, Any]] = []
    for k in range(10):
        seen = "\n".join(f"[{n}] {sentence(draw, 9)} {draw.randrange(10**6)}" for n in range(12))
        if draw.random() < 0.05:
            seen += f"\nmail {draw.choice(WORDS)}{number}@example.org, api_key={draw.getrandbits(80):x}"
        turns.append({"action": f"click[{draw.choice(WORDS)} {k}]", "observation": seen, "reward": 0.0})
    turns[-1] |= {"reward": float(number % 2), "terminated": True}
    return {"task_id": f"t{task}", "start": f"Goal {task}: {sentence(own, 30)}", "agent": "gpt", "turns": turns}


def write_log(path: Path, megabytes: int) -> int:
    """How many episodes were written."""
    draw, size, count = random.Random(0), 0, 0
    with path.open("w", encoding="utf-8") as file:
        while size < megabytes * 10**6:
            size += file.write(json.dumps(episode(draw, count)) + "\n")
            count += 1
    return count


# Valid records of every format that has one a line.
VALID: dict[str, Callable[[int], Any]] = {
    "openai": lambda k: {
        "task_id": k,
        "reward": 1.0,
        "messages": [
            {"role": "user", "content": f"Ask {k}"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "ok"},
            {"role": "assistant", "content": "Done"},
        ],
    },
    "agentgym": lambda k: {
        "item_id": f"shop_{k}",
        "conversations": [
            {"from": "human", "value": f"Buy {k}"},
            {"from": "gpt", "value": "Action: buy"},
            {"from": "human", "value": "Bought"},
        ],
    },
    "intercode": lambda k: {
        "task_id": k,
        "environment": "bash",
        "query": f"Count {k}",
        "turn_history": {"actions": ["ls"], "observations": ["a"], "rewards": [1.0], "valid_action": [True]},
        "summary": {"max_reward": 1.0},
    },
    "commands": lambda k: {"problem": f"Room {k}", "trace": "> go\nA hall.\n> take\nA key.", "reward": True},
    "jsonl": lambda k: {
        "task_id": f"t{k}",
        "start": f"Room {k}",
        "turns": [{"action": "go", "observation": "A hall.", "reward": 1.0, "terminated": True}],
    },
    "traces": lambda k: {
        "call_type": "completion",
        "id": f"call {k}",
        "messages": [{"role": "user", "content": f"Ask {k}"}],
        "response": {"choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": "Done"}}]},
    },
    "huggingface": lambda k: {
        "messages": [{"role": "user", "content": f"Hi {k}"}, {"role": "assistant", "content": "Hello"}]
    },
}
STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "\x00",
    "\ud800",
    [],
    {},
    [[]],
    {"a": 1},
    "x" * 5000,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values within a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield (*at, key)
        yield from places(below, (*at, key))


def damaged(record: Any, draw: random.Random) -> bytes:
    """A line with a key dropped, a value of another kind, or bytes that are no JSON; it may still be good."""
    record = json.loads(json.dumps(record))
    *above, key = draw.choice(list(places(record)))
    inner = record
    for step in above:
        inner = inner[step]
    kind = draw.randrange(6)
    if kind == 0:
        del inner[key]
    elif kind in (1, 2):
        inner[key] = draw.choice(STRANGE)
    line = json.dumps(record).encode()
    cut = draw.randrange(1, len(line))
    if kind == 3:
        return line[:cut]
    if kind == 4:
        return line[:cut] + draw.choice((b"\xff", b"\x00", b"\xc3\x28")) + line[cut:]
    if kind == 5:
        return draw.choice((b"[" * 3000, b"nul", b'"text"', b"7", b"{}", b"[]", line + line))
    return line


def write_broken(path: Path, name: str, count: int, seed: int) -> tuple[int, int]:
    """Every fourth record is good. How many are good, and how many were written."""
    draw, good = random.Random(f"{name}/{seed}"), 0
    with path.open("wb") as file:
        for k in range(count):
            record = VALID[name](k)
            good += k % 4 == 0
            file.write((json.dumps(record).encode() if k % 4 == 0 else damaged(record, draw)) + b"\n")
    return good, count


def broken(count: int, seed: int) -> dict[str, dict[str, int]]:
    """By format: records written, good ones among them, kept, good ones that are lost, and refused."""
    from real_envs.importers.drafts import Reading
    from real_envs.importers.formats import FORMATS, Imported, RejectedRecord, read

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in VALID:
            path = Path(folder) / f"{name}.jsonl"
            good, written = write_broken(path, name, count // len(VALID), seed)
            items = list(read(path, FORMATS[name], Reading()))
            kept = [item for item in items if isinstance(item, Imported)]
            refused = Counter(item.record for item in items if isinstance(item, RejectedRecord))
            lost = sum(f"line {k + 1}" in refused for k in range(0, written, 4))
            found[name] = {
                "written": written,
                "good": good,
                "kept": len(kept),
                "lost": lost,
                "refused": refused.total(),
            }
    return found


def run(megabytes: int) -> dict[str, float]:
    """Imports a log in a child process. CPU seconds, megabytes per second of these, and the peak memory in MB."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        episodes = write_log(path, megabytes)
        size = path.stat().st_size / 10**6
        words = ["import", "jsonl", str(path), "run=bulk", f"output={folder}/out"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1", "HYDRA_FULL_ERROR": "1"}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        code = "import sys; from imagination.cli import main; sys.exit(main(sys.argv[1:]))"
        subprocess.run([sys.executable, "-c", code, *words], check=True, env=env, stdout=sys.stderr)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return {
        "megabytes": round(size, 1),
        "episodes": episodes,
        "cpu_seconds": round(seconds, 1),
        "megabytes_per_cpu_second": round(size / seconds, 2),
        "peak_megabytes": round(used.ru_maxrss / 1024, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=1000, help="megabytes of the log; 0 writes none")
    parser.add_argument("--broken", type=int, default=0, help="records of which most are damaged")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.broken:
        print(json.dumps({"broken": broken(given.broken, given.seed)}, indent=1))
    if given.mb:
        print(json.dumps({"processor": processor(), **run(given.mb)}, indent=1))


if __name__ == "__main__":
    main()
