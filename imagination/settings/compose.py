"""The command line and the YAML files as a typed configuration, and what a run folder keeps of it.

The dataclasses declare every key, its type and its default; the YAML files of ``configs/`` only select. Hydra reads the
files and the overrides, ``schema.build`` makes dataclass instances of them. Nothing here knows a particular setting.

Every mistake of the user is a ``ConfigError`` of one sentence, with the nearest valid name. Hydra is imported inside
the functions that need it, so that ``imagine --help`` answers at once.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, reduce
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args, get_origin

from imagination.settings.schema import (
    ConfigError,
    build,
    is_removed,
    schema_keys,
    typed,
    union_types,
    unknown,
    unknown_key,
)
from real_envs.files import write_atomically

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")
_RESOLVER = re.compile(r"(?<!\\)(?:\\\\)*\$\{\s*[\w.]+:")  # of OmegaConf, not behind a backslash: ${oc.env:HOME}
CONSENT = ".trust"  # a setting of that name is the user's own to give, each time
_RUN = r"\w[\w.-]*(/\w[\w.-]*)*"  # a run's name


def config_folder() -> Path:
    """The folder of the installed package ``configs``."""
    return Path(str(files("configs")))


def groups(folder: Path) -> dict[str, tuple[str, ...]]:
    """The config groups and their choices, such as ``{"algorithm": ("grpo", "ppo")}``."""
    choices: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*/**/*.yaml")):
        choices.setdefault(path.parent.relative_to(folder).as_posix(), []).append(path.stem)
    return {group: tuple(names) for group, names in choices.items()}


def named_sections(keys: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Sections whose ``name`` is a ``Literal``, with its values: ``{"algorithm": ("grpo", "ppo"), ...}``."""
    literal = {key: get_args(annotation) for key, annotation in keys.items() if get_origin(annotation) is Literal}
    return {key.removesuffix(".name"): names for key, names in literal.items() if re.fullmatch(r"\w+\.name", key)}


def _hydra_overrides(override: str, keys: Mapping[str, Any], choices: Mapping[str, tuple[str, ...]]) -> list[str]:
    """One ``key=value`` of the command line in Hydra's syntax, once its key, group and choice are known to exist.

    A section is chosen by its ``name``: ``algorithm=ppo`` is short for ``algorithm.name=ppo``, and ``env=my_world``
    of an installed package, which has no file, for ``env.name=my_world``.
    """
    key, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"'{override}' is no setting; write key=value, such as {next(iter(keys))}=...")
    if key in choices:
        if value in choices[key]:
            return [override]
        if keys.get(f"{key}.name") is not str or not re.fullmatch(r"\w+", value):
            raise unknown(key, value, choices[key])
        return [f"~{key}", f"++{key}.name={value}"]
    if names := named_sections(keys).get(key):
        if value not in names:
            raise unknown(key, value, names)
        return [f"++{key}.name={value}"]
    annotation = keys.get(key)
    if annotation is None:  # shares.dream: the key of a mapping, which the schema cannot list
        parents = [key[: dot.start()] for dot in re.finditer(r"\.", key)]
        mapping = keys.get(max((parent for parent in parents if parent in keys), key=len, default=""))
        if get_origin(mapping) is not dict:
            raise unknown_key(key, [*keys, *choices])
        annotation = get_args(mapping)[1]
    texts, plain = {*union_types(annotation)}, value[:1] not in "'\"[{" and not value.startswith("${")
    if annotation == list[str] and (items := re.fullmatch(r"\[([^\[\]{}'\"\\]*)\]", value)):
        value = listed(filter(None, map(str.strip, items[1].split(","))))  # [~/a,b=1,7] are three texts
    elif texts <= {str, Path} and os.path.exists(value):
        value = literal(value)
    elif plain and value != "null" and (texts <= {str, Path} or (str in texts and re.search(r"[^\w.+:/-]", value))):
        value = _quoted(value)  # run=007 is the text 007; a=1,b=2 is one text, not a sweep
    return [f"++{key}={value}"]


def _quoted(text: str) -> str:
    """In quotes as Hydra reads them: backslashes count only before a quote, where they are doubled."""
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)
    return f"'{text}{text[len(text.rstrip(chr(92))) :]}'"


def literal(text: str) -> str:
    """``text`` as a value of an override that is read as exactly this text, whatever it holds: ``'a=${b}'``."""
    return _quoted(re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def listed(texts: Iterable[str]) -> str:
    """A list of texts as the value of an override, ``[noisy,'a b']``; plain words are left as they are."""
    plain = re.compile(r"(?!(?:null|true|false|nan|inf)$)[a-z_][\w./-]*", re.IGNORECASE)
    return "[" + ",".join(text if plain.fullmatch(text) else literal(text) for text in texts) + "]"


def command(stage: str, config: Any, *words: str) -> str:
    """A line for the shell that works in the run of ``config``: ``imagine clone run=mine output=runs``."""
    where = [] if config.output == type(config)().output else [f"output={config.output}"]
    return shlex.join(["imagine", stage, f"run={config.run}", *where, *words])


def _at_home(plain: Any, key: str = "") -> Any:
    """The settings with paths such as ``~/runs`` and ``~me/runs`` written out; shells do so only in some places."""
    if isinstance(plain, dict):
        return {name: _at_home(value, name) for name, value in plain.items()}
    if isinstance(plain, list):
        return [_at_home(value) for value in plain]
    is_path = isinstance(plain, str) and (re.match(r"~[\w.-]*/", plain) or (key == "output" and plain == "~"))
    return os.path.expanduser(plain) if is_path else plain


def merge_overrides(earlier: Sequence[str], later: Sequence[str]) -> list[str]:
    """One override a key; the later one wins: ``(["a=1", "b=2"], ["a=3"])`` is ``["b=2", "a=3"]``."""
    last: dict[str, str] = {}
    for override in (*earlier, *later):
        key = override.partition("=")[0]
        last.pop(key, None)
        last[key] = override
    return list(last.values())


def load_config(overrides: Sequence[str], schema: type[C], folder: Path | None = None) -> C:
    """Defaults of ``schema`` < the YAML files < ``overrides``, resolved and typed.

    Args:
        overrides: such as ``["algorithm=ppo", "train.updates=20"]``; keys need no ``+``.
        folder: of ``config.yaml`` and the groups; by default the installed package ``configs``.

    Raises:
        ConfigError: anything wrong in the overrides or in the files.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    folder = folder or config_folder()
    keys, choices = schema_keys(schema), groups(folder)
    words = [word for word in merge_overrides([], overrides) if not is_removed(word.partition("=")[0])]
    checked = [override for word in words for override in _hydra_overrides(word, keys, choices)]
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(folder.absolute()), job_name="imagine"):
            composed = compose("config", overrides=checked)
        plain = OmegaConf.to_container(OmegaConf.merge(_defaults(schema), composed), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        advice = "; write a list as [1,2]" if "sweep" in str(error).lower() else ""
        raise ConfigError(f"cannot read the settings: {str(error).splitlines()[0]}{advice}") from error
    result: C = build(schema, _at_home(plain))
    return result


@cache
def _defaults(schema: type) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create(asdict(schema()))


def run_folder(run: str, root: Path) -> Path:
    """``outputs/demo``. A run has a plain name, such as ``demo`` or ``sweep/seed-1``, so it cannot leave the root."""
    if not re.fullmatch(_RUN, run):
        raise ConfigError(
            f"run wants a name such as demo or sweep/seed-1 (letters, digits, '-', '_', '.'), got '{run}'"
        )
    return root / run


def to_yaml(config: Any) -> str:
    """The configuration as a YAML document."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


def saved_config(folder: Path, schema: type[C]) -> C:
    """The configuration that a run was last used with; keys that its schema did not have yet have their defaults.
    Raises ``ConfigError``: it has a key that is not known any more, or was edited by hand into something wrong.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    path = folder / "config.yaml"
    try:
        merged = OmegaConf.merge(_defaults(schema), OmegaConf.load(path))
        plain = OmegaConf.to_container(merged)
    except (OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    result: C = build(schema, plain)
    return result


def remember_overrides(overrides: Sequence[str], folder: Path) -> None:
    """Saves the overrides in the run folder, so that ``run=<same>`` alone continues with the same settings."""
    write_atomically(folder / "overrides.json", json.dumps(list(overrides), indent=2) + "\n")


def remembered_overrides(folder: Path) -> list[str]:
    """The overrides that were saved when this run was last used; none for a new run. What allows code to run is not
    taken from a folder: it may be that of whoever wrote the code.
    Raises ``ConfigError``: the file is damaged, or one asks for something of this machine, such as a variable of the
    environment. A typed one may; but the folder may be somebody else's.
    """
    path = folder / "overrides.json"
    try:
        saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        overrides = [str(override) for override in saved]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error}; give the settings again without it") from error
    if asking := next(filter(_RESOLVER.search, overrides), None):
        raise ConfigError(f"{path}: '{asking}' would be resolved on this machine; write its value there, or remove it")
    return [override for override in overrides if not override.partition("=")[0].endswith(CONSENT)]


def _with_value(override_: str, config: Any) -> str:
    """The override with what ``${oc.env:...}`` and the like were resolved to."""
    key = override_.partition("=")[0]
    if not _RESOLVER.search(override_):
        return override_
    value: Any = asdict(config)
    for part in key.split("."):
        value = value[part]
    return override(key, value)


def load_on_top(remembered: Sequence[str], typed: Sequence[str], schema: type[C]) -> C:
    """The settings of a folder with those of a command on top. A consent counts only where the command gives it by its
    full name, however the folder has it. Raises ``ConfigError``: anything wrong in either.
    """
    config = load_config(merge_overrides(remembered, typed), schema)
    given = {word.partition("=")[0] for word in typed}
    for key in schema_keys(schema):
        *sections, name = key.split(".")
        if key.endswith(CONSENT) and key not in given:
            setattr(reduce(getattr, sections, config), name, False)
    return config


@dataclass(frozen=True)
class Resolved(Generic[C]):
    """The settings of a run, before anything is written."""

    config: C  # typed and complete
    folder: Path  # of the run
    overrides: list[str]  # of this command and of earlier ones of the same run, earlier ones first
    earlier: bool  # whether there were earlier ones

    def remember(self, transient: Collection[str] = ()) -> None:
        """Saves configuration and overrides in the run folder, except overrides of the keys in ``transient``."""
        write_atomically(self.folder / "config.yaml", to_yaml(self.config))
        kept = [o for o in self.overrides if o.partition("=")[0] not in transient]
        remember_overrides([_with_value(override, self.config) for override in kept], self.folder)

    def remembered(self) -> dict[str, str]:
        """What is saved in the run folder now."""
        files = [path for path in map(self.folder.joinpath, ("config.yaml", "overrides.json")) if path.exists()]
        return {path.name: path.read_text(encoding="utf-8") for path in files}

    def remember_again(self, saved: Mapping[str, str]) -> None:
        """Saves what ``remembered`` had returned."""
        for name, text in saved.items():
            write_atomically(self.folder / name, text)


def resolve(overrides: Sequence[str], schema: type[C]) -> Resolved[C]:
    """The settings of a run: the overrides of this command on top of those that the run was used with before.

    So ``imagine train run=mine`` after ``imagine train run=mine preset=tiny`` still has the preset. Nothing is written.
    The schema has the keys ``run`` and ``output``.

    Raises:
        ConfigError: anything wrong in the overrides or in the files.
    """
    defaults: Any = schema()
    given = dict(override.split("=", 1) for override in overrides if "=" in override)
    named = Path(_at_home(given.get("output", defaults.output), "output")) / given.get("run", "")
    earlier = remembered_overrides(named) if re.fullmatch(_RUN, given.get("run", "")) else []
    if earlier:  # merged at once: composing twice costs half a second, and the new overrides need not be valid alone
        chosen = merge_overrides(earlier, overrides)
        config: Any = load_on_top(earlier, overrides, schema)
        if run_folder(config.run, Path(config.output)) == named:  # else a file of a group sets another output
            return Resolved(config, named, chosen, True)
    config = load_config(overrides, schema)
    folder = run_folder(config.run, Path(config.output))
    earlier = remembered_overrides(folder)
    if not earlier:
        return Resolved(config, folder, list(overrides), False)
    chosen = merge_overrides(earlier, overrides)
    return Resolved(load_on_top(earlier, overrides, schema), folder, chosen, True)


def override(key: str, value: object) -> str:
    """A setting as an override: ``override("train.real_share", [[0, 0.5], [12, 0]])``. A text alone is as typed."""

    def written(item: object) -> str:
        if isinstance(item, Mapping):
            return "{" + ",".join(f"{name}:{written(part)}" for name, part in item.items()) + "}"
        if isinstance(item, list | tuple):
            return "[" + ",".join(map(written, item)) + "]"
        return listed([item])[1:-1] if isinstance(item, str) else typed(item)

    return f"{key}={value if isinstance(value, str) else written(value)}"
