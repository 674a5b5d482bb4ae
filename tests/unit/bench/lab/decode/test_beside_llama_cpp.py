from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from aegis.core.errors import UserError
from bench.lab.decode.beside_llama_cpp import Plan, run
from bench.lab.decode.engine_side import build
from bench.lab.decode.llama_cpp_side import FileType, write_gguf


def test_what_is_missing_is_told_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(UserError, match="llama_cpp is not installed: pip install llama-cpp-python gguf"):
        run(None, Plan())


@pytest.mark.parametrize(("kind", "off_max"), [("BF16", 0.0), ("Q8_0", 0.01), ("Q4_0", 0.15)])
def test_the_file_has_the_weights_of_the_model(
    kind: FileType, off_max: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.lab.decode.llama_cpp_side.imported", lambda: (None, gguf))
    model = build("tiny", "bfloat16")
    write_gguf(model, tmp_path / "model.gguf", kind)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in reader.tensors}
    weights = model.state_dict()
    assert len(found) == len(weights)
    up = weights["model.layers.3.mlp.up_proj.weight"].float().numpy()
    off = np.abs(found["blk.3.ffn_up.weight"] - up).max() / np.abs(up).max()
    assert off <= off_max
    query = weights["model.layers.0.self_attn.q_proj.weight"].float()
    pairs = torch.from_numpy(np.array(found["blk.0.attn_q.weight"])).view(4, 32, 2, 256)
    halves = query.view(4, 2, 32, 256).transpose(1, 2)
    assert (pairs - halves).abs().max() <= off_max * halves.abs().max()
