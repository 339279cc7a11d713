"""From the command line to a typed configuration, and the folder of a run.

The dataclasses declare every key, its type and its default; the YAML files of ``configs/`` only select. Hydra reads the
files and the overrides, ``schema.build`` makes dataclass instances of them. Nothing here knows a particular setting.

Example::

    config = load_config(["algorithm=ppo", "train.updates=20"], Config)
    config.train.updates  # 20

Whatever the user wrote wrongly is a ``ConfigError`` of one sentence, with the nearest valid name. Hydra is imported
inside the functions that need it, so that ``imagine --help`` answers at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from imagination.settings.schema import (
    ConfigError,
    arms,
    build,
    schema_defaults,
    schema_keys,
    to_plain,
    typed,
    unknown,
    unknown_key,
)
from real_envs.files import write_atomically

C = TypeVar("C")
_RUN = r"\w[\w.-]*(/\w[\w.-]*)*"  # a run's name


def config_folder() -> Path:
    """The YAML files, wherever the package ``configs`` is installed."""
    return Path(str(files("configs")))


def groups(folder: Path) -> dict[str, tuple[str, ...]]:
    """The config groups and their choices, such as ``{"algorithm": ("grpo", "ppo")}``."""
    choices: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*/**/*.yaml")):
        choices.setdefault(path.parent.relative_to(folder).as_posix(), []).append(path.stem)
    return {group: tuple(names) for group, names in choices.items()}


def named_sections(keys: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Sections whose ``name`` is one of a few, with these: ``{"algorithm": ("grpo", "ppo"), ...}``."""
    literal = {key: get_args(annotation) for key, annotation in keys.items() if get_origin(annotation) is Literal}
    return {key.removesuffix(".name"): names for key, names in literal.items() if re.fullmatch(r"\w+\.name", key)}


def _checked(override: str, keys: Mapping[str, Any], choices: Mapping[str, tuple[str, ...]]) -> list[str]:
    """One ``key=value`` of the command line as Hydra wants it, after its key, group and choice were found to exist.

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
    annotation, parent = keys.get(key), key
    while annotation is None:  # shares.dream: the key of a mapping, which the schema cannot list
        parent, dot, _ = parent.rpartition(".")
        if not dot:
            raise unknown_key(key, [*keys, *choices])
        if parent in keys and issubclass(get_origin(keys[parent]) or object, Mapping):
            annotation = get_args(keys[parent])[1]
        elif parent in keys:
            raise unknown_key(key, [*keys, *choices])
    texts, plain = {*arms(annotation)}, value[:1] not in "'\"[{" and not value.startswith("${")
    if plain and value != "null" and (texts <= {str, Path} or (str in texts and re.search("[=,]", value))):
        value = "'" + value.replace("'", "\\'") + "'"  # run=007 is the text 007; a=1,b=2 is one text, not a sweep
    return [f"++{key}={value}"]


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
        schema: the root dataclass.
        folder: where ``config.yaml`` and the groups are; by default the installed package ``configs``.

    Raises:
        ConfigError: anything wrong in the overrides or in the files.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    folder = folder or config_folder()
    keys, choices = schema_keys(schema), groups(folder)
    checked = [o for override in merge_overrides([], overrides) for o in _checked(override, keys, choices)]
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(folder.absolute()), job_name="imagine"):
            composed = compose("config", overrides=checked)
        merged = OmegaConf.merge(OmegaConf.create(schema_defaults(schema)), composed)
        plain = OmegaConf.to_container(merged, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        advice = "; write a list as [1,2]" if "sweep" in str(error).lower() else ""
        raise ConfigError(f"cannot read the settings: {str(error).splitlines()[0]}{advice}") from error
    result: C = build(schema, plain)
    return result


def run_folder(run: str, root: Path) -> Path:
    """``outputs/demo``. A run has a plain name, such as ``demo`` or ``sweep/seed-1``, so it cannot leave the root."""
    if not re.fullmatch(_RUN, run):
        raise ConfigError(
            f"run wants a name such as demo or sweep/seed-1 (letters, digits, '-', '_', '.'), got '{run}'"
        )
    return root / run


def to_yaml(config: object) -> str:
    """The configuration as a YAML file has it."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(to_plain(config)))


def save_config(config: object, folder: Path) -> Path:
    """Write the resolved configuration as ``config.yaml`` in the run folder."""
    return write_atomically(folder / "config.yaml", to_yaml(config))


def saved_config(folder: Path, schema: type[C]) -> C:
    """The configuration that a run was last used with; what its schema did not have yet is as by default.

    Raises:
        ConfigError: it has a key that is not known any more, or was edited by hand into something wrong.
    """
    from omegaconf import OmegaConf

    saved = OmegaConf.load(folder / "config.yaml")
    plain = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(schema_defaults(schema)), saved))
    result: C = build(schema, plain)
    return result


def remember_overrides(overrides: Sequence[str], folder: Path) -> None:
    """Keep what the user chose beside the run, so that ``run=<same>`` alone goes on with the same settings."""
    write_atomically(folder / "overrides.json", json.dumps(list(overrides), indent=2) + "\n")


def remembered_overrides(folder: Path) -> list[str]:
    """What was chosen when this run was last used; nothing for a new run."""
    path = folder / "overrides.json"
    return [str(override) for override in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


@dataclass(frozen=True)
class Resolved(Generic[C]):
    """What a run is to do, before anything is written.

    Attributes:
        config: typed and complete.
        folder: of the run.
        overrides: all that was chosen for it, earlier choices first.
        earlier: whether some were chosen before.
    """

    config: C
    folder: Path
    overrides: list[str]
    earlier: bool

    def remember(self, passing: Collection[str] = ()) -> None:
        """Writes the configuration and the overrides into the run's folder, those of the keys ``passing`` excepted."""
        save_config(self.config, self.folder)
        remember_overrides([o for o in self.overrides if o.partition("=")[0] not in passing], self.folder)


def _named_folder(overrides: Sequence[str], schema: type[C]) -> Path | None:
    """The run's folder as far as the overrides name it: a file of a group may still say another output."""
    given = dict(override.split("=", 1) for override in overrides if "=" in override)
    output = given.get("output", schema_defaults(schema).get("output"))
    if output is None or not re.fullmatch(_RUN, given.get("run", "")):
        return None
    return Path(output) / given["run"]


def resolve(overrides: Sequence[str], schema: type[C]) -> Resolved[C]:
    """A run keeps the settings that it was started with: what is given now comes on top of what was given before.

    So ``imagine train run=mine`` goes on after ``imagine train run=mine preset=tiny`` with the preset still in force.
    Nothing is written. The schema has the keys ``run`` and ``output``.

    Raises:
        ConfigError: anything wrong in the overrides or in the files.
    """
    config: Any
    if (named := _named_folder(overrides, schema)) and (earlier := remembered_overrides(named)):
        chosen = merge_overrides(earlier, overrides)
        config = load_config(chosen, schema)  # at once: reading all settings takes a quarter of a second
        if run_folder(config.run, Path(config.output)) == named:
            return Resolved(config, named, chosen, True)
    config = load_config(overrides, schema)
    folder = run_folder(config.run, Path(config.output))
    earlier = remembered_overrides(folder)
    chosen = merge_overrides(earlier, overrides) if earlier else list(overrides)
    return Resolved(load_config(chosen, schema) if earlier else config, folder, chosen, bool(earlier))


def override(key: str, value: object) -> str:
    """A setting as the command line takes it: ``override("train.real_share", [[0, 0.5], [12, 0]])``."""
    return f"{key}={typed(to_plain(value))}"
