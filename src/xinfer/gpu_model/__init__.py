"""A Qwen2 on a device: `QwenModel` is what the engine runs.

`weights` says where every tensor lies and uploads it, `forward` records the network's ops, `model` keeps the
recordings, feeds them and reads what comes out.
"""

from xinfer.gpu_model.model import KV_TYPES, KVType, QwenModel

__all__ = ["KV_TYPES", "KVType", "QwenModel"]
