"""A Qwen2 on a device: `QwenModel` is what the engine runs.

`layout` says where every tensor lies, `loading` reads it there, `weights` keeps it, `forward` records the ops, `model`
feeds the recordings and reads what comes out, `canary` notices a device that lost its memory and says nothing.
"""

from xinfer.gpu_model.canary import Canary, canary_ids
from xinfer.gpu_model.model import QwenModel
from xinfer.gpu_model.options import KVType, Mode, ModelOptions, OptionValues
from xinfer.gpu_model.prediction import Prediction, Stages, predict

__all__ = [
    "Canary",
    "KVType",
    "Mode",
    "ModelOptions",
    "OptionValues",
    "Prediction",
    "QwenModel",
    "Stages",
    "canary_ids",
    "predict",
]
