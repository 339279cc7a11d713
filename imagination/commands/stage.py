"""A stage of the command line, as its help, its checks and its folder know it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One word of the command line.

    Attributes:
        name: ``fit-world-model``.
        summary: one line for ``imagine --help``.
        help: what it does and why, for ``imagine <stage> --help``.
        reads: files of the run folder that must be there.
        writes: files of the run folder that it makes.
        examples: two or three literal command lines.
        sections: the parts of the configuration that matter to it; its help lists their keys.
        function: ``module:name``, imported only when the stage runs.
        places: settings that bare words of the command line fill in order; the last is a list and takes the rest.
        writes_run: whether it works in the folder of a run, which then keeps its settings.
        run: the run's name where the command line gives neither that nor a preset.
        preset: of a new run where the command line gives neither that nor a world.
    """

    name: str
    summary: str
    help: str
    reads: str
    writes: str
    examples: tuple[str, ...]
    sections: tuple[str, ...]
    function: str
    run: str = ""
    preset: str = ""
    places: tuple[str, ...] = ()
    writes_run: bool = True
