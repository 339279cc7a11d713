"""If these fail, a user with a broken GGUF file reads a traceback out of a library."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy.lm.backbone import CheckpointError, load_checkpoint

gguf = pytest.importorskip("gguf", reason="pip install 'imagination[gguf]'")


def written(folder: Path, architecture: str = "llama") -> Path:
    """A GGUF file with a header, one number and one tensor, but no model that anybody could run."""
    file = folder / "model.gguf"
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(1)
    import numpy as np

    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("kept", [3, 20, 100])
def test_a_torn_file_is_one_line_that_names_it(tmp_path: Path, kept: int) -> None:
    file = written(tmp_path)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(str(file))
    assert str(error.value).startswith(f"{file}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("architecture", ["llama", "no-such-architecture"])
def test_a_whole_file_without_a_model_is_one_line_too(tmp_path: Path, architecture: str) -> None:
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(str(written(tmp_path, architecture)))
    assert "\n" not in str(error.value)


def test_what_is_no_gguf_at_all(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("<html>not found</html>")
    with pytest.raises(CheckpointError, match="with GGUF"):
        load_checkpoint(str(tmp_path / "model.gguf"))
    with pytest.raises(CheckpointError, match="none\\.gguf"):
        load_checkpoint(str(tmp_path / "none.gguf"))
