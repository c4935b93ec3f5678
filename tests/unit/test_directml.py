"""The DirectML product: its hand-written graph against onnx's own parser and checker, and against NumPy through
onnxruntime, each where it is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from xinfer.doctor import child
from xinfer.doctor.isolated import RIGHT, SKIPPED, WRONG
from xinfer.errors import DeviceError
from xinfer.gpu import directml
from xinfer.trials import expected
from xinfer.trials.judge import judge

SHAPES = [(5, 32, 64), (1, 1, 1), (3, 200, 129), (1, 896, 4864)]
needs_runtime = pytest.mark.skipif(not directml.available(), reason="onnxruntime is not installed")
needs_onnx = pytest.mark.skipif(importlib.util.find_spec("onnx") is None, reason="onnx is not installed")


@needs_onnx
@pytest.mark.parametrize("shape", SHAPES)
def test_onnx_reads_the_graph(shape: tuple[int, int, int]) -> None:
    onnx: Any = importlib.import_module("onnx")
    m, n, k = shape
    model = onnx.load_from_string(directml.matmul_graph(m, n, k))
    onnx.checker.check_model(model, full_check=True)
    assert (model.ir_version, model.opset_import[0].version) == (directml.IR_VERSION, directml.OPSET)
    (node,) = model.graph.node
    assert (node.op_type, list(node.input), list(node.output)) == ("MatMul", ["a", "b"], ["c"])
    sizes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }
    assert sizes == {"a": [m, k], "b": [k, n], "c": [m, n]}


def test_the_graph_is_these_bytes() -> None:
    """As onnx 1.x itself serializes this model with its helpers: checked where neither package is there."""
    assert directml.matmul_graph(5, 32, 64).hex() == (
        "0808120678696e6665723a5b0a110a01610a016212016322064d61744d756c120770726f64756374"
        "5a130a0161120e0a0c080112080a0208050a0208405a130a0162120e0a0c080112080a0208400a02"
        "082062130a0163120e0a0c080112080a0208050a02082042040a00100d"
    )
    assert directml._varint(300) == b"\xac\x02"  # protobuf's own example


@needs_runtime
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_is_numpys(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    rng = np.random.default_rng(m)
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    product = directml.MatMul(m, n, k)
    assert product.provider in (directml.DIRECTML, directml.ON_CPU)
    judged = judge(product.run(a, b), expected.linear(a, expected.Weights(b.T)))
    assert judged.right, str(judged)
    with pytest.raises(DeviceError, match=product.provider):
        product.run(a[:, :-1] if k > 1 else a[:0], b)


@needs_runtime
def test_the_doctor_tries_it() -> None:
    answer = child.try_directml()
    assert answer["outcome"] == RIGHT
    assert answer["provider"] in (directml.DIRECTML, directml.ON_CPU)


def test_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Swapped:
        provider = "DmlExecutionProvider"

        def __init__(self, *_: int) -> None:
            pass

        def run(self, a: Any, b: Any) -> Any:
            return (a @ b)[:, ::-1]

    monkeypatch.setattr(directml, "available", lambda: True)
    monkeypatch.setattr(directml, "MatMul", Swapped)
    answer = child.try_directml()
    assert answer["outcome"] == WRONG
    assert answer["detail"].startswith("M=5 N=32 K=64")


def test_without_onnxruntime_it_is_skipped_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directml, "available", lambda: False)
    answer = child.try_directml()
    assert answer["outcome"] == SKIPPED
    assert "onnxruntime" in answer["detail"]
    with pytest.raises(DeviceError, match="onnxruntime"):
        directml.MatMul(1, 1, 1)
