"""The plug-in's parts that need no vllm: reading a variant, its slots on a CPU, shards, and the wiring's checks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gym_quant import CodecError, kernels
from gym_quant.kernels import SignMatrix

from gym_fed.base.models import load_model
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.file import DeltaFile
from gym_fed.serving.vllm_plugin.settings import PluginSettings
from gym_fed.serving.vllm_plugin.slots import HostLayer, StepSlots, VectorSlots, sliced
from gym_fed.serving.vllm_plugin.variants import (
    PluginVariant,
    object_path,
    open_object,
    read_variant,
    require_servable,
)
from gym_fed.serving.vllm_plugin.wiring import Shard, Wiring
from tests.support.variants import Coding, write_random_delta

ROWS, COLS, SLOTS = 40, 64, 4


def matrix(seed: int, rows: int = ROWS, cols: int = COLS, group: int | None = None) -> SignMatrix:
    generator = torch.Generator().manual_seed(seed)
    delta = torch.randn(rows, cols, generator=generator)
    return SignMatrix(*kernels.encode_signs(delta, None, group), cols, group)


def decoded(signs: SignMatrix) -> torch.Tensor:
    group = signs.cols if signs.scales.ndim == 2 and signs.group_size is None else signs.group_size
    return kernels.decode_signs(signs.bits, signs.scales, signs.cols, group)


def write(folder: Path, rule: Any) -> Path:
    return write_random_delta(load_model("gym-nano").model, folder / "v.gymdelta", rule, seed=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_get_the_terms_of_their_slots(dtype: torch.dtype) -> None:
    first, second = matrix(0, 24), matrix(1, 16)
    layer = HostLayer([24, 16], COLS, SLOTS, "exact")
    layer.put(3, [layer.prepare(0, first), layer.prepare(1, second)])
    layer.put(1, [None, layer.prepare(1, first_of_second := matrix(2, 16))])
    x, y = torch.randn(4, COLS).to(dtype), torch.zeros(4, ROWS, dtype=dtype)
    step = StepSlots(8, torch.device("cpu"))
    step.update([3, -1, 1, 3], [3])
    layer.add(x, y, step.token_index)
    wanted = torch.zeros(4, ROWS)
    for row in (0, 3):
        wanted[row] = torch.cat([decoded(first) @ x[row].float(), decoded(second) @ x[row].float()])
    wanted[2, 24:] = decoded(first_of_second) @ x[2].float()
    assert torch.allclose(y.float(), wanted, atol=1e-4 if dtype == torch.float32 else 0.2)
    assert not y[1].any()


def test_emptied_slot_adds_nothing() -> None:
    layer = HostLayer([ROWS], COLS, SLOTS, "exact")
    layer.put(0, [layer.prepare(0, matrix(0))])
    layer.put(0, [None])
    y = torch.zeros(1, ROWS)
    layer.add(torch.randn(1, COLS), y, np.zeros(1, dtype=np.int64))
    assert not y.any()


def test_embedding_rows_are_those_of_the_slot() -> None:
    layer, signs = HostLayer([ROWS], COLS, SLOTS, "exact"), matrix(0)
    layer.put(2, [layer.prepare(0, signs)])
    y = torch.zeros(3, COLS)
    layer.add_rows(torch.tensor([5, 6, 7], dtype=torch.int32), y, np.array([2, -1, 2]))
    assert torch.allclose(y[[0, 2]], decoded(signs)[[5, 7]])
    assert not y[1].any()


def test_rows_beyond_the_step_have_no_slot() -> None:
    step = StepSlots(4, torch.device("cpu"))
    step.update([1, 2, 3], [1])
    step.update([0], [0])
    assert step.tokens.tolist() == [0, -1, -1, -1]
    vectors = VectorSlots(2, SLOTS, 1.0, torch.device("cpu"))
    vectors.put(0, torch.tensor([3.0, 4.0]))
    assert vectors.rows(step.tokens[:2]).tolist() == [[3.0, 4.0], [1.0, 1.0]]


@pytest.mark.parametrize("group", [None, 16, COLS])
def test_shard_is_the_part_of_the_whole(group: int | None) -> None:
    signs = matrix(0, group=group)
    part = sliced(signs, slice(8, 24), slice(32, 64))
    assert torch.equal(decoded(part), decoded(signs)[8:24, 32:64])


def test_shard_that_cuts_a_group_is_refused() -> None:
    with pytest.raises(CodecError, match="tensor_parallel_size"):
        sliced(matrix(0, group=24), slice(0, ROWS), slice(0, 32))


def wiring() -> Wiring:
    made = Wiring(StepSlots(4, torch.device("cpu")), SLOTS, "exact", True, torch.device("cpu"))
    shards = [
        Shard(slice(0, 24), slice(0, COLS), (24, COLS)),
        Shard(slice(0, 16), slice(0, COLS), (16, COLS)),
    ]
    made.add_linear("qk", ["q", "k"], shards, bias=False, adds_bias=True)
    made.add_norm("norm", torch.tensor([1.0, 2.0, 0.0]))
    return made


def variant(**more: Any) -> PluginVariant:
    return PluginVariant(**{"signs": {}, "factors": {}, "norms": {}, "biases": {}, **more})


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (variant(signs={"other": matrix(0)}), "no layer 'other'"),
        (variant(signs={"q": matrix(0)}), "q: the delta is"),
        (variant(norms={"norm": torch.tensor([0.0, 0.0, 1.0])}), "norm: a weight is 0"),
        (variant(norms={"norm": torch.ones(2)}), "norm: the delta has 2"),
        (variant(biases={"q": torch.ones(24)}), "no bias"),
    ],
)
def test_variant_that_does_not_fit_is_refused_when_it_is_loaded(found: PluginVariant, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        wiring().prepare(found)


def test_norm_becomes_a_factor_of_its_output() -> None:
    made = wiring()
    made.activate(1, made.prepare(variant(norms={"norm": torch.tensor([0.5, 1.0, 0.0])})))
    assert made.norms["norm"].factors.rows(torch.tensor([1, -1])).tolist() == [
        [1.5, 1.5, 1.0],
        [1.0, 1.0, 1.0],
    ]


def test_delta_is_read_by_module(tmp_path: Path) -> None:
    def rule(_name: str, shape: tuple[int, ...]) -> Coding:
        return ("bitdelta", {}) if len(shape) == 2 else ("dense", {})

    path = write(tmp_path, rule)
    with DeltaFile.open(path) as delta:
        require_servable(delta, 16)
        found = read_variant(delta)
        assert torch.equal(
            decoded(found.signs["model.embed_tokens"]), delta.decode("model.embed_tokens.weight")
        )
        assert torch.equal(found.norms["model.norm"], delta.decode("model.norm.weight"))
        assert found.rank == 0


def test_codec_that_vllm_cannot_multiply_is_refused_by_tensor(tmp_path: Path) -> None:
    def rule(_name: str, shape: tuple[int, ...]) -> Coding:
        return ("int4", {}) if len(shape) == 2 else None

    with (
        DeltaFile.open(write(tmp_path, rule)) as delta,
        pytest.raises(GymError, match=r"'model\.embed_tokens\.weight'.*codec int4") as error,
    ):
        require_servable(delta, 16)
    assert error.value.code is ErrorCode.MODEL_INVALID


def test_file_whose_bytes_are_not_of_its_digest_is_refused(tmp_path: Path) -> None:
    path = object_path(tmp_path, "0" * 64)
    path.parent.mkdir()
    write(tmp_path, lambda _name, shape: ("bitdelta", {}) if len(shape) == 2 else None).rename(path)
    with pytest.raises(GymError) as error:
        open_object(path)
    assert error.value.code is ErrorCode.HASH_MISMATCH


APART = Path(sys.prefix) / "triton"
"""Where `make triton` puts it."""
ON_DEVICE = """
import json, numpy, torch
from gym_quant import kernels
from gym_quant.kernels import SignMatrix
from gym_fed.serving.vllm_plugin.slots import DeviceLayer, HostLayer, StepSlots, VectorSlots

torch.manual_seed(0)
cpu, step = torch.device("cpu"), StepSlots(8, torch.device("cpu"))
layers = HostLayer([24, 16], 64, 4, "exact"), DeviceLayer([24, 16], 64, 4, cpu)
tables = HostLayer([40], 64, 4, "exact"), DeviceLayer([40], 64, 4, cpu)
bias = VectorSlots(40, 4, 0.0, cpu)
bias.put(1, torch.randn(40))
for slot, group in ((3, None), (1, 64)):
    parts = [SignMatrix(*kernels.encode_signs(torch.randn(n, 64), None, group), 64, group) for n in (24, 16, 40)]
    for layer, table in zip(layers, tables):
        layer.put(slot, [layer.prepare(0, parts[0]), layer.prepare(1, parts[1]) if group else None])
        table.put(slot, [table.prepare(0, parts[2])])

def device_step(x, ids, y, rows):
    slots = step.tokens[: x.shape[0]]
    layers[1].add(x, y, slots)
    tables[1].add_rows(ids, rows, slots)
    return y + bias.rows(slots)

compiled = torch.compile(device_step, fullgraph=True, backend="eager")
apart = []
for used in ([3, -1, 1, 3], [1, 1, -1, 3]):  # the second runs the same graph with other slots
    step.update(used, used)
    x, ids = torch.randn(4, 64), torch.randint(40, (4,), dtype=torch.int32)
    y, rows, expected, expected_rows = torch.zeros(4, 40), torch.zeros(4, 64), torch.zeros(4, 40), torch.zeros(4, 64)
    found = compiled(x, ids, y, rows)
    layers[0].add(x, expected, step.token_index)
    tables[0].add_rows(ids, expected_rows, step.token_index)
    expected += bias.rows(step.tokens[:4])
    apart += [float((found - expected).abs().max()), float((rows - expected_rows).abs().max())]
    assert expected.abs().max() > 1
print(json.dumps([apart, torch._dynamo.utils.counters["stats"]["unique_graphs"]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not (importlib.util.find_spec("triton") or APART.is_dir()), reason="Triton is not here: make triton"
)
def test_static_buffers_in_one_compiled_graph_give_the_terms_of_the_cpu() -> None:
    path = os.pathsep.join([*sys.path, str(APART)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", ON_DEVICE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    apart, graphs = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    assert max(apart) < 1e-4
    assert graphs == 1


def test_settings_survive_the_environment() -> None:
    settings = PluginSettings(Path("/a/objects"), "lookup")
    assert PluginSettings.read(settings.environment()) == settings
    assert PluginSettings.read({}) == PluginSettings(None)
