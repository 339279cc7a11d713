"""The command line: what a wrong word is answered, what a right one runs, and what a run folder remembers.

A stand-in of ``imagination.settings`` is used, so that these tests say nothing about particular settings; the last ones
check the real settings and files.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
import types
from dataclasses import dataclass, field, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf

from imagination import cli
from imagination import settings as real_settings
from imagination.cli import STAGES
from imagination.learning.algorithms import ALGORITHMS
from imagination.report.run_data import ReportError
from imagination.runs.worlds import world_settings
from imagination.settings import compose
from imagination.settings.models import CorpusWorld
from imagination.settings.schema import (
    ConfigError,
    build,
    explanations,
    flat_defaults,
    nearest,
    schema_keys,
    summary,
    type_name,
)
from policy.lm.backbone import CheckpointError
from policy.lm.engine import EngineUnavailable
from policy.lm.render import ChatTemplateError
from real_envs.errors import UserError
from real_envs.store import StoreError
from real_envs.world import UnknownWorld
from tests.support.refusal import mistaken, refused

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Algorithm:
    name: Literal["grpo", "ppo"] = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28


@dataclass(frozen=True)
class Train:
    """How long.

    Attributes:
        updates: how often.
        shares: of what,
            by source.
    """

    updates: int = 100
    lr: float = 1e-4
    compile: bool = False
    checkpoint: str | None = None
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    shares: dict[str, float] = field(default_factory=lambda: {"dream": 0.8, "real": 0.2})
    kind: Literal["small", "large"] = "small"
    tasks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.updates < 0:
            raise ValueError(f"updates must not be negative, got {self.updates}")


@dataclass(frozen=True)
class Compare:
    episodes: int = 3
    show: str = ""


@dataclass(frozen=True)
class Imports:
    format: str = "auto"
    files: list[str] = field(default_factory=list)
    agent: str = "log"


@dataclass(frozen=True)
class Engine:
    name: str = "inprocess"


@dataclass(frozen=True)
class Env:
    name: str = "textworld"
    options: dict[str, str | int | float | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Config:
    run: str = "unnamed"
    output: str = "outputs"
    devices: int = 0
    num_nodes: int = 1
    strategy: str = "ddp"
    activation_checkpointing: bool = False
    wait_minutes: float = 30.0
    seed: int = 0
    algorithm: Algorithm = field(default_factory=Algorithm)
    train: Train = field(default_factory=Train)
    env: Env = field(default_factory=Env)
    imports: Imports = field(default_factory=Imports)
    engine: Engine = field(default_factory=Engine)
    compare: Compare = field(default_factory=Compare)


Calls = list[tuple[Any, Path]]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    """The calls of the stage functions; outputs/ is under tmp_path."""
    calls: Calls = []
    fakes: dict[str, types.ModuleType] = {}
    for stage in STAGES.values():
        module, _, name = stage.function.partition(":")
        stages = fakes.setdefault(module, types.ModuleType(module))
        setattr(stages, name, lambda config, folder: calls.append((config, folder)))
        monkeypatch.setitem(sys.modules, module, stages)
    monkeypatch.chdir(tmp_path)
    return calls


@pytest.fixture
def ran(called: Calls, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The same with the stand-in settings, which have no presets."""
    settings = types.ModuleType("imagination.settings")
    settings.__dict__.update(Config=Config, UserError=UserError)
    monkeypatch.setitem(sys.modules, "imagination.settings", settings)
    monkeypatch.setitem(sys.modules, "imagination.settings.errors", settings)
    for name, stage in STAGES.items():
        monkeypatch.setitem(STAGES, name, dataclasses.replace(stage, preset=""))  # type: ignore[index]
    return called


def load(*overrides: str) -> Config:
    return compose.load_config(overrides, Config)


# --- stages and help


def test_every_stage_is_there_and_runs_its_own_function(ran: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "demo demo-seeds pretrain collect panel import fit-world-model rules refine-world-model reflect relabel "
    names += "clone fit-critic digi-q learn-experience train loop evaluate audit audit-table ablate few-shot scale-sim "
    names += "compare serve report list doctor"
    assert list(STAGES) == names.split()
    assert len({stage.function for stage in STAGES.values()}) == len(STAGES)
    for name in STAGES:
        assert cli.main([name, "run=r"]) == 0
    assert len(ran) == len(STAGES)


def test_a_new_demo_has_its_preset_and_a_run_of_its_own_and_a_run_keeps_what_it_has(called: Calls) -> None:
    for words in (["demo"], ["demo-seeds"], ["demo", "env=textworld", "run=b"], ["demo", "preset=tiny"]):
        assert cli.main(words) == 0
    assert [folder.name for _, folder in called] == ["demo", "demo-seeds", "b", "tiny"]
    assert [config.games.train for config, _ in called] == [1000, 1000, 6, 1]
    assert [config.env.name for config, _ in called] == ["textworld_express"] * 2 + ["textworld"] * 2
    for words in (["train", "run=c"], ["demo", "run=c"], ["evaluate", "run=demo-seeds"], ["train"]):
        assert cli.main(words) == 0
    assert [config.games.train for config, _ in called[4:]] == [6, 6, 1000, 6]
    assert called[-1][1].name == "default"


def test_a_stage_gets_real_dataclasses_and_the_run_folder(ran: Calls) -> None:
    assert cli.main(["train", "run=mine", "algorithm=ppo", "train.updates=5"]) == 0
    config, folder = ran[0]
    assert folder == Path("outputs/mine")
    assert config == Config(run="mine", algorithm=Algorithm(name="ppo"), train=Train(updates=5))


def test_bare_words_of_an_import_are_its_format_and_files_and_are_not_remembered(ran: Calls) -> None:
    odd = "it's, [a] {file}.json"
    assert cli.main(["import", "jsonl", "imports.agent=gpt", odd, "b.json", "run=mine"]) == 0
    config, folder = ran[0]
    assert config.imports == Imports("jsonl", [odd, "b.json"], "gpt")
    assert folder == Path("outputs/mine")
    assert cli.main(["import", "auto", "run=mine"]) == 0
    assert ran[1][0].imports == Imports("auto", [], "gpt")
    for words in (["b.json"], ["run=mine", "logs/react"], ["imports.format=auto", "b"]):
        assert cli.main(["import", *words]) == 0
        assert ran[-1][0].imports.files == [words[-1]]
        assert ran[-1][0].imports.format == "auto"
    Path("react").mkdir()
    assert cli.main(["import", "react", "react"]) == 0
    assert ran[-1][0].imports == Imports("react", ["react"], ran[-1][0].imports.agent)


def test_help_teaches_stages_groups_and_examples(called: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for word in [*STAGES, "algorithm=grpo|ppo", "preset=agent_r1|alfworld|base|bfcl|demo|", "imagine train run=mine"]:
        assert word in out
    summaries = [stage.doc.summary for stage in STAGES.values()]
    assert len({line.index(s) for s in summaries for line in out.splitlines() if s in line}) == 1, "one column"
    assert "optional" in out.split("refine-world-model")[1].split()[0]
    assert called == []


@pytest.mark.parametrize("name", list(STAGES))
def test_stage_help_shows_examples_files_and_keys(name: str, called: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert 2 <= len(STAGES[name].doc.examples) <= 3
    for word in [*STAGES[name].doc.examples, "reads", "writes", "algorithm=grpo|ppo", "seed=0", "run=default"]:
        assert word in out
    assert called == []
    assert max(map(len, out.splitlines())) <= 120


def test_the_help_of_a_section_has_its_summary_and_its_keys_with_default_type_and_text() -> None:
    texts = explanations(Config)
    assert summary(Train) == "How long."
    assert texts == {"train.updates": "how often", "train.shares": "of what, by source"}
    assert flat_defaults(Config)["train.betas"] == "[0.9,0.99]"
    assert flat_defaults(Config)["train.checkpoint"] == "null"
    assert type_name(schema_keys(Config)["train.checkpoint"]) == "text or null"


def test_train_help_lists_its_keys_with_defaults_types_and_words(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["train", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    for start in ("train: ", "train.updates=24 an int; ", "algorithm.name=grpo grpo or ppo", "train.seed=null an int "):
        assert start in out


def test_the_examples_in_the_help_are_valid(called: Calls) -> None:
    for stage in STAGES.values():
        for example in stage.doc.examples:
            command, *words = example.split()
            assert command == "imagine"
            assert words[0] == stage.name
            shutil.rmtree("outputs", ignore_errors=True)  # or the run would go on with all settings of those before
            assert cli.main(words) == 0, example


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    out = capsys.readouterr().out.split()
    assert out[0] == "imagination"
    assert out[1] == version("imagination")


def test_no_word_at_all_is_a_mistake_that_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "stages:" in capsys.readouterr().err


# --- mistakes: exit code 2, one line, the nearest name


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ("trian", "'trian'; 'train'?"),
        ("fit_world_model", "'fit_world_model'; 'fit-world-model'?"),
        ("train algorithm=gpro", "algorithm 'gpro'; 'grpo'?"),
        ("train preset=dmeo", "preset 'dmeo'; 'demo'?"),
        ("train env=scienceword", "env 'scienceword'; 'scienceworld'?"),
        ("train algoritm=ppo", "key 'algoritm'; 'algorithm'?"),
        ("train algorithm.cliprange=0.1", "'algorithm.cliprange'; 'algorithm.clip_low' 'algorithm.clip_high'?"),
        ("train trian.updates=1", "'trian.updates'; 'train.updates'?"),
        ("train updates=1", "'updates'; 'train.updates'?"),
        ("train train.clip_low=1", "'train.clip_low'; 'algorithm.clip_low'?"),
        ("train +train.updates=1", "'+train.updates'; 'train.updates'?"),
        ("train train.updates=abc", "train.updates int, 'abc'"),
        ("train train.updates=1.5", "train.updates int, 1.5"),
        ("train train.updates=true", "train.updates int, True"),
        ("train train.updates=", "train.updates int, ''"),
        ("train train.updates=1,2", "train.updates list [1,2]"),
        ("train train.lr=fast", "train.lr number, 'fast'"),
        ("train train.compile=1", "train.compile true false, 1"),
        ("train train.kind=smal", "train.kind small large, 'smal'; 'small'?"),
        ("train algorithm.name=gpro", "algorithm.name grpo ppo, 'gpro'; 'grpo'?"),
        ("train train.betas=1", "train.betas list [1,2], 1"),
        ("train train.betas=[1,x]", "train.betas[1] number, 'x'"),
        ("train train.shares.dream=x", "train.shares.dream number, 'x'"),
        ("train train.updates=-1", "train: updates negative, -1"),
        ("train train=3", "train section; train.updates"),
        ("train log.json", "'log.json' key=value run="),  # a bare word is for an import alone
        ("train --lr 3", "'--lr' key=value run="),
        ("train run=../x", "run sweep/seed-1 '../x'"),
    ],
)
def test_a_mistake_is_one_line(words: str, tokens: str, ran: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    mistaken(capsys, words.split(), *tokens.split())
    assert ran == []
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("word", "bound"),
    [
        ("seed=-1", "0 or more"),
        ("train.seed=4294967296", "less than"),
        ("train.updates=-1", "0 or more"),
        ("train.lr=nan", "0 or more"),
        ("worldmodel.goal.reward=nan", "a number"),
        ("policy.heads=0", "1 or more"),
        ("clone.steps=0", "1 or more"),
        ("train.checkpoint_every=0", "1 or more"),
        ("dream.max_turns=0", "1 or more"),
        ("dream.branch=2", "in [0, 1]"),
        ("dream.min_confidence=80", "in [0, 1]"),
        ("train.self_imitation.max_age=0", "1 or more"),
        ("train.self_imitation.clip_high=0", "above 0"),
        ("train.self_imitation.share=-0.1", "0 or more"),
        ("hindsight.max_turns=-1", "0 or more"),
        ("worldmodel.code.rounds=-1", "0 or more"),
        ("algorithm.progress.steps=0", "1 or more"),
        ("audit.episodes=0", "1 or more"),
        ("audit.temperatures=[-1]", "0 or more"),
        ("refine.supervised_share=1", "in [0, 1)"),
    ],
)
def test_a_number_out_of_range_is_refused_by_its_name(word: str, bound: str) -> None:
    refused(
        lambda: compose.load_config([word], real_settings.Config),
        word.partition("=")[0].rpartition(".")[2],
        bound,
        error=ConfigError,
    )


def test_what_may_be_negative_stays_so() -> None:
    words = ["train.process_coef=-0.1", "worldmodel.goal.reward=-1", "env.options.depth=-3"]
    config = compose.load_config(words, real_settings.Config)
    assert (config.train.process_coef, config.worldmodel.goal.reward, config.env.options["depth"]) == (-0.1, -1, -3)


def test_nothing_alike_lists_what_there_is() -> None:
    names = "algorithm.name, algorithm.clip_low, algorithm.clip_high"
    refused(lambda: load("algorithm.zzz=1"), "algorithm.zzz", names, error=ConfigError)
    assert nearest("zzz", ["train"]) == []


def test_a_typing_error_in_a_file_is_found_too(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("train: {update: 3}\n")
    refused(lambda: compose.load_config([], Config, tmp_path), "'train.update'", "'train.updates'?", error=ConfigError)


def test_a_key_without_a_default_is_asked_for() -> None:
    worlds = {"a": {"share": 1.0}}
    refused(lambda: build(dict[str, CorpusWorld], worlds, "worlds"), "worlds.a.env=", error=ConfigError)


# --- typed values


def test_values_become_the_types_that_the_dataclasses_declare() -> None:
    words = "lr=3e-5 compile=true checkpoint=org/model-0.5B betas=[0,0.5] shares.dream=1 kind=large tasks=[tw-1,tw-2]"
    train = load(*(f"train.{word}" for word in words.split())).train
    assert (train.lr, train.compile, train.checkpoint) == (3e-5, True, "org/model-0.5B")
    assert (train.betas, train.shares, train.kind) == ([0.0, 0.5], {"dream": 1.0, "real": 0.2}, "large")
    assert train.tasks == ["tw-1", "tw-2"]
    assert type(train.betas[0]) is float


@pytest.mark.parametrize("name", ["007", "1e3", "true", "it's", "a=b", "x,y", "end\\", "end\\\\'", "$x", "~x", "a/~/b"])
def test_text_stays_as_it_was_typed(name: str) -> None:
    assert load(f"train.checkpoint={name}").train.checkpoint == name


def test_any_path_may_begin_at_home(monkeypatch: pytest.MonkeyPatch, ran: Calls) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = load("output=~", "train.checkpoint=~/a", "train.tasks=[~/b,~,~x]", "env.options.data=~/c")
    assert (config.output, config.train.checkpoint, config.env.options["data"]) == (
        "/home/me",
        "/home/me/a",
        "/home/me/c",
    )
    assert config.train.tasks == ["/home/me/b", "~", "~x"]
    monkeypatch.setenv("HOME", str(Path.cwd() / "home"))
    assert cli.main(["train", "run=mine", "output=~/runs", "seed=3"]) == 0
    assert cli.main(["clone", "run=mine", "output=~/runs"]) == 0
    assert (ran[-1][1], ran[-1][0].seed) == (Path.cwd() / "home/runs/mine", 3)


def test_a_setting_that_names_a_file_is_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("${seed}", "[1]", "'a'", "null"):
        Path(name).mkdir()
        assert load(f"train.checkpoint={name}").train.checkpoint == name


def test_a_list_of_texts_is_as_it_was_typed() -> None:
    texts = {
        "[tw-1, a=b,7]": ["tw-1", "a=b", "7"],
        "[]": [],
        "['a,b',\"c\"]": ["a,b", "c"],
        "[a b,true]": ["a b", "true"],
    }
    for typed, tasks in texts.items():
        assert load(f"train.tasks={typed}").train.tasks == tasks
    odd = ["it's", "a,b", "x]", "${seed}", "end\\", "", "null", "7"]
    for override in (f"train.tasks={compose.listed(odd)}", compose.override("train.tasks", odd)):
        assert load(override).train.tasks == odd


def test_null_and_quotes_and_references() -> None:
    assert load("train.checkpoint=null").train.checkpoint is None
    assert load("train.checkpoint='null'").train.checkpoint == "null"
    assert load("seed=7", "train.updates=${seed}").train.updates == 7


def test_files_beat_defaults_and_the_command_line_beats_files() -> None:
    assert load().run == "default"  # configs/config.yaml, not the dataclass's "unnamed"
    assert compose.load_config(["preset=demo"], real_settings.Config).run == "demo"
    assert compose.load_config(["preset=demo", "run=mine"], real_settings.Config).run == "mine"
    assert load("algorithm=ppo").algorithm.name == "ppo"
    assert load("seed=1", "seed=2").seed == 2


def test_a_union_keeps_an_int_an_int() -> None:
    assert type(build(int | float | None, 3)) is int
    assert build(int | float | None, 2.5) == 2.5
    assert build(str | int, 3) == 3
    assert build(str | None, None) is None
    assert build(Path, "a/b") == Path("a/b")


def test_every_key_is_known_with_its_type() -> None:
    keys = schema_keys(Config)
    assert keys["train"] is Train
    assert keys["train.updates"] is int
    assert set(flat_defaults(Config)) == {key for key, kind in keys.items() if not is_dataclass(kind)}


# --- the run folder


def test_the_resolved_config_is_written_and_can_be_read_back(ran: Calls) -> None:
    cli.main(["train", "run=mine", "train.kind=large", "train.lr=3e-5"])
    saved: Any = OmegaConf.to_container(OmegaConf.load("outputs/mine/config.yaml"))
    assert saved["train"]["kind"] == "large"
    assert build(Config, saved) == ran[0][0]
    assert list(Path("outputs/mine").glob("*.tmp")) == []


def test_the_same_run_goes_on_with_its_settings(ran: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["clone", "run=mine", "algorithm=ppo", "train.updates=5", "seed=1"])
    cli.main(["train", "run=mine", "seed=2"])
    cli.main(["report", "run=other"])
    assert ran[1][0] == Config(run="mine", seed=2, algorithm=Algorithm(name="ppo"), train=Train(updates=5))
    assert ran[2][0] == Config(run="other")
    assert "algorithm=ppo train.updates=5 run=mine seed=2" in capsys.readouterr().err
    assert json.loads(Path("outputs/mine/overrides.json").read_text())[-1] == "seed=2"


def test_an_old_run_may_name_a_setting_that_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = "worldmodel.diffusion.inverse_share"
    assert compose.load_config([f"{gone}=0.5", "seed=3"], real_settings.Config).seed == 3
    (tmp_path / "config.yaml").write_text("seed: 4\nworldmodel: {diffusion: {inverse_share: 0.5}}")
    assert compose.saved_config(tmp_path, real_settings.Config).seed == 4
    assert capsys.readouterr().err.count(gone) == 1


def test_what_is_asked_for_once_is_not_remembered(ran: Calls) -> None:
    cli.main(["compare", "run=mine", "compare.episodes=5", "compare.show=dream/train/a/0"])
    cli.main(["compare", "run=mine"])
    assert [config.compare for config, _ in ran] == [Compare(5, "dream/train/a/0"), Compare(5, "")]


def test_a_mistake_does_not_change_what_a_run_remembers(ran: Calls) -> None:
    cli.main(["train", "run=mine", "seed=1"])
    before = {path: path.read_bytes() for path in Path("outputs/mine").iterdir()}
    assert cli.main(["train", "run=mine", "seed=x"]) == 2
    assert {path: path.read_bytes() for path in Path("outputs/mine").iterdir()} == before


def test_a_refused_command_does_not_change_what_a_run_remembers(ran: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    cli.main(["train", "run=mine", "seed=1"])
    (folder := Path("outputs/mine")).joinpath("metrics.jsonl").write_text("{}")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    stage_raises(monkeypatch, UserError("seed=2 cannot be"))
    assert cli.main(["train", "run=mine", "seed=2"]) == 2
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    stage_raises(monkeypatch, ZeroDivisionError("of ours"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", "run=mine", "seed=2"])
    assert {path: path.read_bytes() for path in folder.iterdir()} == before

    def break_off(config: object, folder: Path) -> None:
        (folder / "metrics.jsonl").write_text("{}\n{}")
        raise UserError("the disk is full")

    monkeypatch.setattr(sys.modules["imagination.commands.train"], "train", break_off)
    assert cli.main(["train", "run=mine", "seed=2"]) == 2
    assert "seed=2" in compose.remembered_overrides(folder), "something was made with it"


# --- errors while a stage runs


def stage_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(config: object, folder: Path) -> None:
        raise error

    monkeypatch.setattr(sys.modules["imagination.commands.train"], "train", fail)


def test_every_error_for_the_user_is_one_line(
    ran: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Special(UserError):
        """As those of the model, of the store and of the registry."""

    for error in (ReportError, CheckpointError, EngineUnavailable, ChatTemplateError, StoreError, UnknownWorld):
        assert issubclass(error, UserError)
    monkeypatch.delenv("IMAGINE_TRACEBACK", raising=False)
    stage_raises(monkeypatch, Special("no log; run `imagine collect run=mine`"))
    assert cli.main(["train", "run=mine"]) == 2
    assert capsys.readouterr().err == "error: no log; run `imagine collect run=mine`\n"
    monkeypatch.setenv("IMAGINE_TRACEBACK", "1")
    with pytest.raises(UserError):
        cli.main(["train", "run=new"])


def test_another_error_is_ours_and_keeps_its_traceback(ran: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    stage_raises(monkeypatch, ValueError("shapes differ"))
    refused(lambda: cli.main(["train"]), "shapes differ", error=ValueError)


def test_ctrl_c_while_lightning_trains_is_ctrl_c(
    ran: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its Trainer catches KeyboardInterrupt, saves nothing more and calls sys.exit(1)."""
    stopped = SystemExit(1)
    stopped.__context__ = KeyboardInterrupt()
    stage_raises(monkeypatch, stopped)
    assert cli.main(["train", "run=mine"]) == 130
    assert capsys.readouterr().err.endswith(": imagine train run=mine\n")
    stage_raises(monkeypatch, SystemExit(3))
    refused(lambda: cli.main(["train"]), "3", error=SystemExit)


def test_ctrl_c_says_how_to_go_on(
    ran: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage_raises(monkeypatch, KeyboardInterrupt())
    assert cli.main(["train", "run=mine", "train.updates=5"]) == 130
    assert capsys.readouterr().err.endswith(": imagine train run=mine\n")
    assert cli.main(["train", "run=mine", "output=elsewhere"]) == 130
    assert capsys.readouterr().err.endswith(": imagine train run=mine output=elsewhere\n")
    assert Path("elsewhere/mine/config.yaml").exists()
    assert cli.main(["train", "run=mine", "output=my runs/a=b"]) == 130
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "to go on: " in line]
    cli.main(["clone", *shlex.split(line.partition("to go on: imagine ")[2])[1:]])
    assert ran[-1][1] == Path("my runs/a=b/mine")
    cli.main(["clone", "run=mine"])  # what was printed is enough: the settings are remembered
    assert ran[-1][0].train.updates == 5


def test_what_is_not_remembered_is_said_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(config: object, folder: Path) -> None:
        raise KeyboardInterrupt

    for module, word in (("serve", "serve.port=9000"), ("rules", "worldmodel.code.trust=true")):
        monkeypatch.setattr(f"imagination.commands.{module}.{module}", stop)
        words = [module, "run=mine", f"output={tmp_path}", word]
        assert cli.main(words) == 130
        assert capsys.readouterr().err.endswith(f": {shlex.join(['imagine', *words])}\n")


def test_a_stopped_import_says_its_files(
    ran: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(config: object, folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["imagination.commands.import_logs"], "import_logs", stop)
    assert cli.main(["import", "my log.json", "run=mine"]) == 130
    assert shlex.split(capsys.readouterr().err.partition("to go on: ")[2])[1:] == ["import", "my log.json", "run=mine"]


# --- the real settings and files


def test_help_and_mistakes_load_nothing_heavy() -> None:
    """`imagine --help` must answer at once: torch alone takes seconds."""
    code = (
        "import sys; from imagination.cli import main; "
        "[main(words) for words in (['--help'], ['train', '--help'], ['trian'])];"
        "heavy = {'torch', 'lightning', 'transformers', 'hydra', 'omegaconf', 'pyarrow', 'numpy'} & set(sys.modules);"
        "code = main(['train', 'train.nothing_like_it=1']);"
        "sys.exit(f'imported {heavy}, {code}' if heavy or code != 2 or 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "overrides",
    [[]] + [[f"{g}={name}"] for g, names in compose.groups(compose.config_folder()).items() for name in names],
    ids=" ".join,
)
def test_every_file_of_configs_composes_with_the_real_settings(overrides: list[str]) -> None:
    assert isinstance(compose.load_config(overrides, real_settings.Config), real_settings.Config)


@pytest.mark.parametrize("stage", STAGES.values(), ids=list(STAGES))
def test_every_stage_names_a_function_that_exists(stage: cli.Stage) -> None:
    module, _, name = stage.function.partition(":")
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert [arg.arg for arg in found[0].args.args][:2] == ["config", "folder"]


def test_the_help_names_only_sections_that_exist() -> None:
    named = {section for stage in STAGES.values() for section in stage.sections}
    assert named <= set(schema_keys(real_settings.Config))


def test_an_option_of_a_world_that_is_a_text_may_look_like_a_number() -> None:
    words = ["env=agentgym", "env.options.url=http://h:1", "env.options.train=0", "env.options.heldout=1"]
    config = compose.load_config(words, real_settings.Config)
    made = world_settings(config.env, config.games)
    assert (made.train, made.heldout) == ("0", "1")


def test_a_world_without_a_file_is_chosen_by_its_name_and_options_may_hold_commas() -> None:
    mine = compose.load_config(["env=my_world", "env.options.params=a=1,b=2", "env.options.rooms=3"], Config)
    assert mine.env == Env("my_world", {"params": "a=1,b=2", "rooms": 3})
    assert compose.load_config(["env=textworld_express"], Config).env.options["game"] == "coin"
    refused(lambda: compose.load_config(["engine=my_engine-2"], Config), "engine 'my_engine-2'", error=ConfigError)


def test_help_tells_the_defaults_that_algorithms_have() -> None:
    """Help is composed without torch, so it cannot ask the registry: every default stands in its words."""
    words = explanations(real_settings.Config)
    for name, member in ALGORITHMS.items():
        for key, value in member.settings.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                told = re.findall(r"\d[\d.]*", words[f"algorithm.{key}"])
                assert value in [float(number.rstrip(".")) for number in told], (name, key, value)
