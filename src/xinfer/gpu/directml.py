"""A matrix product through DirectML, by way of onnxruntime: for bring-up and comparison, never on a model's path.

On Windows `onnxruntime-directml` (the extra `[directml]`) runs it on the GPU; elsewhere the same graph runs on
onnxruntime's CPU provider. The graph, one MatMul, is written here as the few bytes of protobuf that it is: onnx.proto's
field numbers are part of the format and do not change.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xinfer.errors import DeviceError

Array = NDArray[np.float32]

DIRECTML, ON_CPU = "DmlExecutionProvider", "CPUExecutionProvider"
IR_VERSION, OPSET = 8, 13
FLOAT = 1  # TensorProto.DataType
LENGTH = 2  # wire type of texts and messages; that of integers is 0


def available() -> bool:
    """Whether onnxruntime is installed."""
    return importlib.util.find_spec("onnxruntime") is not None


class MatMul:
    """`a @ b` for a (m, k) and b (k, n), float32, on the best provider there is.

    Raises:
        DeviceError: onnxruntime is not installed, or it refuses.
    """

    def __init__(self, m: int, n: int, k: int) -> None:
        if not available():
            raise DeviceError("onnxruntime is not installed; on Windows: pip install 'xinfer-llm[directml]'")
        runtime: Any = importlib.import_module("onnxruntime")
        self.provider = DIRECTML if DIRECTML in runtime.get_available_providers() else ON_CPU
        options = runtime.SessionOptions()
        options.enable_mem_pattern = False  # DirectML's provider asks for both of these
        options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
        try:
            self._session = runtime.InferenceSession(matmul_graph(m, n, k), options, providers=[self.provider])
        except Exception as error:  # onnxruntime has a tree of its own
            raise DeviceError(f"onnxruntime refuses a product of {m} x {k} by {k} x {n}: {error}") from error

    def run(self, a: Array, b: Array) -> Array:
        """The product, (m, n). Raises DeviceError where the provider fails, or loses the device."""
        try:
            (product,) = self._session.run(None, {"a": a, "b": b})
        except Exception as error:
            raise DeviceError(f"{self.provider} failed: {error}") from error
        return np.asarray(product, np.float32)


def matmul_graph(m: int, n: int, k: int) -> bytes:
    """An ONNX model: c = MatMul(a, b), a (m, k), b (k, n)."""
    node = _text(1, "a") + _text(1, "b") + _text(2, "c") + _text(4, "MatMul")
    graph = _message(1, node) + _text(2, "product")
    graph += _message(11, _value("a", m, k)) + _message(11, _value("b", k, n)) + _message(12, _value("c", m, n))
    opset = _text(1, "") + _number(2, OPSET)
    return _number(1, IR_VERSION) + _text(2, "xinfer") + _message(7, graph) + _message(8, opset)


def _value(name: str, *shape: int) -> bytes:
    """A ValueInfoProto: a float tensor of this shape."""
    dims = b"".join(_message(1, _number(1, size)) for size in shape)
    tensor = _number(1, FLOAT) + _message(2, dims)
    return _text(1, name) + _message(2, _message(1, tensor))


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _text(number: int, value: str) -> bytes:
    return _message(number, value.encode())


def _message(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | LENGTH) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
