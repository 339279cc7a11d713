"""Files of strangers: if these fail, opening a checkpoint, a run folder or a log runs the code that somebody put there,
or hands out what this machine holds.
"""

from __future__ import annotations

import importlib.metadata
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.distributed import checkpoint as shards

from imagination.cli import main
from imagination.learning.sharding import load_shards
from imagination.runs.lifecycle import resume_from
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config
from imagination.settings.compose import remember_overrides, remembered_overrides, resolve, run_folder, saved_config
from policy.lm.backbone import CheckpointError, build_model, load_checkpoint, load_tokenizer, save_checkpoint
from policy.lm.render import ChatFormat
from policy.lm.settings import ModelSettings
from policy.lm.tokenizer import train_tokenizer
from real_envs.errors import UserError, printable
from real_envs.files import CHECKSUMS, write_atomically
from real_envs.importers.drafts import Reading
from real_envs.importers.formats import LogFile, log_files, read
from real_envs.world import GROUP, find_world, world_names
from tests.support.refusal import refused
from worldmodel.rules.rule_set import FILE, RuleSet, RulesInvalid

EPISODE = {
    "task_id": "a",
    "start": "s",
    "turns": [{"action": "x", "observation": "y", "reward": 1, "terminated": True}],
}
CODE = (
    "open({trace!r}, 'w')\nfrom transformers import LlamaConfig as C, LlamaForCausalLM as M, TokenizersBackend as T\n"
)


class Planted:
    """Makes a file where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._trace), "w")


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[Path]:
    """What planted code writes; it must not be there in the end."""
    path = tmp_path / "trace"
    yield path
    assert not path.exists(), "planted code has run"


def test_a_planted_pickle_would_leave_its_trace(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Planted(tmp_path / "trace"))).close()
    assert (tmp_path / "trace").exists()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = ModelSettings()
    settings.hidden, settings.layers, settings.heads, settings.kv_heads = 16, 1, 2, 2
    settings.mlp, settings.context = 32, 64
    tokenizer = train_tokenizer(["a b c"] * 5, 300)
    folder = tmp_path_factory.mktemp("checkpoint") / "good"
    save_checkpoint(build_model(settings, tokenizer, 0), tokenizer, folder)
    (folder / CHECKSUMS).unlink()  # whoever edits a checkpoint removes them
    return folder


def edited(checkpoint: Path, to: Path, file: str = "config.json", **values: Any) -> Path:
    shutil.copytree(checkpoint, to)
    content = json.loads((to / file).read_text())
    (to / file).write_text(json.dumps(content | values))
    return to


def test_code_beside_the_weights_is_neither_run_nor_offered(
    checkpoint: Path, tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    auto_map = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": [None, "evil.T"]}
    known = edited(checkpoint, tmp_path / "known", auto_map=auto_map)
    unknown = edited(checkpoint, tmp_path / "unknown", auto_map=auto_map, model_type="evil")
    tokenizer = edited(
        checkpoint, tmp_path / "tokenizer", "tokenizer_config.json", auto_map=auto_map, tokenizer_class="Evil"
    )
    for folder in (known, unknown, tokenizer):
        (folder / "evil.py").write_text(CODE.format(trace=str(trace)))
    load_checkpoint(str(known))  # transformers knows the type without the code
    for folder in (unknown, tokenizer):
        refused(lambda folder=folder: load_checkpoint(str(folder)), str(folder), error=CheckpointError)
    with pytest.raises(ValueError, match="custom code"):
        load_tokenizer(tokenizer)
    assert "y/N" not in capsys.readouterr().out


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_attention_that_is_code_of_a_repository_is_refused(key: str, checkpoint: Path, tmp_path: Path) -> None:
    folder = edited(checkpoint, tmp_path / "it", **{key: "evil/kernels"})
    refused(lambda: load_checkpoint(str(folder)), "evil/kernels", error=CheckpointError)


@pytest.mark.parametrize("write", [lambda it, to: to.write_bytes(pickle.dumps(it)), lambda it, to: torch.save(it, to)])
def test_pickles_in_place_of_weights_and_of_a_training_state_are_not_opened(
    write: Callable[[object, Path], None], checkpoint: Path, tmp_path: Path, trace: Path
) -> None:
    folder = edited(checkpoint, tmp_path / "it")
    (folder / "model.safetensors").unlink()
    write({"a": Planted(trace)}, folder / "pytorch_model.bin")
    refused(lambda: load_checkpoint(str(folder)), str(folder), error=CheckpointError)
    run = RunFolder(tmp_path / "run", 0)
    run.training_state("train").parent.mkdir()
    write({"settings": "", "steps_done": 3, "a": Planted(trace)}, run.training_state("train"))
    refused(lambda: resume_from(run, "train"), "train.ckpt")


@pytest.mark.parametrize("place", ["list", "value"])
def test_a_sharded_training_state_runs_nothing(tmp_path: Path, trace: Path, place: str) -> None:
    """Its list of tensors is a pickle, and so is what stands in place of a number."""
    folder = tmp_path / "train.4.shards"
    good: dict[str, Any] = {"weights": torch.ones(3), "lr": 0.5}
    shards.save(good, checkpoint_id=folder)
    state: dict[str, Any] = {"weights": torch.zeros(3), "lr": 0.0}
    load_shards(state, folder)
    assert (state["weights"].tolist(), state["lr"]) == ([1.0, 1.0, 1.0], 0.5)
    if place == "list":
        (folder / ".metadata").write_bytes(pickle.dumps(Planted(trace)))
    else:
        shards.save({"weights": torch.ones(3), "lr": Planted(trace)}, checkpoint_id=folder)
    with pytest.raises(UserError, match=r"train\.4\.shards"):
        load_shards(state, folder)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch {trace}') }}",
        "{{ messages|attr('__class__') }}",
        "{{ self._TemplateReference__context }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_chat_template_stays_in_its_sandbox(template: str, checkpoint: Path, tmp_path: Path, trace: Path) -> None:
    folder = edited(checkpoint, tmp_path / "it")
    (folder / "chat_template.jinja").write_text(template.replace("{trace}", str(trace)))
    refused(lambda: ChatFormat(load_tokenizer(folder)), "chat template")


def test_the_configuration_of_a_run_is_plain_values(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", "hunter2")
    file = tmp_path / "config.yaml"
    file.write_text(f"run: !!python/object/apply:builtins.open ['{trace}', w]\n")
    refused(lambda: saved_config(tmp_path, Config), "config.yaml", "python/object")
    file.write_text("env: {_target_: os.system, name: textworld}\n")
    refused(lambda: saved_config(tmp_path, Config), "env._target_")
    file.write_text("env: {name: '${oc.env:PLANTED}'}\n")
    assert saved_config(tmp_path, Config).env.name == "${oc.env:PLANTED}"


@pytest.mark.parametrize(
    "override",
    ["env.name=${oc.env:PLANTED}", "env.options.url='http://x/?${oc.env:PLANTED}'", "run=${ hydra:runtime.cwd}"],
)
def test_the_overrides_of_a_run_ask_nothing_of_this_machine(override: str, tmp_path: Path) -> None:
    (tmp_path / "it").mkdir()
    remember_overrides([override], tmp_path / "it")
    refused(lambda: resolve(["run=it", f"output={tmp_path}"], Config), "overrides.json", override)


def test_a_typed_variable_is_remembered_as_its_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED", "a b")
    typed = ["run=it", f"output={tmp_path}", "env.options.url=${oc.env:PLANTED}", r"env.name='\${oc.env:x}'"]
    resolve(typed, Config).remember()
    again = resolve(["run=it", f"output={tmp_path}"], Config)
    assert again.config.env.options == {"url": "a b"}
    assert again.config.env.name == "${oc.env:x}"
    assert "PLANTED" not in "".join(remembered_overrides(tmp_path / "it"))


def imported(file: Path, format: str = "auto") -> list[str]:
    """What becomes of the records of a file; raises ``UserError`` where it is refused as a whole."""
    (one,) = log_files(format, file)
    assert isinstance(one, LogFile)
    return [str(item) for item in read(one.path, one.format, Reading())]


def test_logs_are_read_as_data(tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED", "hunter2")
    planted = pickle.dumps(Planted(trace))
    pickled = pa.field("messages", pa.binary(), metadata={
        b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": planted,
    })  # fmt: skip
    pq.write_table(pa.table([pa.array([planted])], pa.schema([pickled])), tmp_path / "a.parquet")
    np.save(tmp_path / "a.npy", np.array([Planted(trace)], dtype=object), allow_pickle=True)
    (tmp_path / "a.pkl").write_bytes(planted)
    assert "messages" in imported(tmp_path / "a.parquet")[0]
    for name in ("a.npy", "a.pkl"):
        refused(lambda name=name: imported(tmp_path / name), name)
    words = "{{ ''.__class__ }} ${oc.env:PLANTED} !!python/object/apply:os.system [x]"
    (tmp_path / "b.jsonl").write_text(json.dumps(EPISODE | {"start": words, "_target_": "os.system"}))
    (episode,) = imported(tmp_path / "b.jsonl")
    assert words in episode.replace("\\'", "'")
    assert "hunter2" not in episode


def test_rules_and_tensorboard_files_are_read_as_data_or_not_at_all(tmp_path: Path, trace: Path) -> None:
    (tmp_path / FILE).write_bytes(pickle.dumps(Planted(trace)))
    refused(lambda: RuleSet.load(tmp_path), FILE, error=RulesInvalid)
    (tmp_path / FILE).write_text(json.dumps({"version": 1, "rules": [{"__reduce__": ["os.system", ["x"]]}]}))
    refused(lambda: RuleSet.load(tmp_path), FILE, error=RulesInvalid)
    (tmp_path / "out" / "it" / "tensorboard").mkdir(parents=True)
    (tmp_path / "out" / "it" / "tensorboard" / "events.out.tfevents.1").write_bytes(pickle.dumps(Planted(trace)))
    assert main(["list", f"output={tmp_path / 'out'}"]) == 0


def test_only_the_entry_point_that_was_asked_for_is_imported(monkeypatch: pytest.MonkeyPatch, trace: Path) -> None:
    planted = [importlib.metadata.EntryPoint(name, "evil_module:World", GROUP) for name in ("evil", "textworld")]
    asked: list[str] = []

    def load(name: str) -> Any:
        asked.append(name)
        raise ImportError(name)

    monkeypatch.setattr("real_envs.world.entry_points", lambda group: planted)
    monkeypatch.setattr("real_envs.world.importlib.import_module", load)
    assert "evil" in world_names()
    assert asked == []
    for name, module in (("textworld", "real_envs.worlds.textworld"), ("evil", "evil_module")):
        refused(lambda name=name: find_world(name), name)
        assert asked.pop() == module  # what comes with the package cannot be replaced


NAME = "a\nerror: it is\x1b[2J\x1b]0;evil\x07\u202e.jsonl"


def test_names_and_contents_of_logs_do_not_reach_the_terminal_as_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / NAME
    words = ["import", "jsonl", str(file), "run=it", f"output={tmp_path / 'out'}"]
    file.write_text("nonsense\n")
    assert main(words) == 2
    file.write_text(json.dumps(EPISODE | {"\x1b[2Jkey": ["x"]}) + "\n\x1b[2J\n" + json.dumps({"task_id": "\x1b[2J"}))
    assert main(words) == 0
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert not {"\x1b", "\x07", "\u202e"} & set(text)
        assert "\\x1b[2J" in text
        assert not any(line.startswith("error: it is") for line in text.splitlines())


def test_plain_lines_are_printed_as_they_are() -> None:
    line = "Größe 日本 🙂 <b> \\n"
    assert printable(line) == line


def test_links_in_a_run_of_a_stranger_lead_no_write_outside(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "run"
    outside.write_text("mine")
    folder.mkdir()
    for name in ("summary.json.tmp", "config.yaml", "metrics.jsonl", "rollouts.jsonl"):
        (folder / name).symlink_to(outside)
    run = RunFolder(folder, 0)
    run.update({"a": 1})
    write_atomically(folder / "config.yaml", "run: it\n")
    refused(lambda: run.record("train", 1, {"loss": 0.5}), "metrics.jsonl")
    refused(lambda: run.add_rollouts("train", []), "rollouts.jsonl")
    assert outside.read_text() == "mine"
    assert run.summary["a"] == 1


def test_a_run_has_a_name_and_no_path(tmp_path: Path) -> None:
    for name in ("../x", "/etc/x", "a/../../x", "a\n", ".."):
        with pytest.raises(UserError):
            run_folder(name, tmp_path)
