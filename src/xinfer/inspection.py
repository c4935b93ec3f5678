"""What `xinfer inspect`, `xinfer explain` and `xinfer devices` report, as plain data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from xinfer import gpu
from xinfer.checkpoint import Checkpoint, Message, check_context
from xinfer.errors import DeviceError
from xinfer.gpu_model import ModelOptions, Stages, predict
from xinfer.model.config import Qwen2Config
from xinfer.model.weights import ModelWeights
from xinfer.quarantine import Quarantine
from xinfer.tuning_file import TuningFile

PREFILL_ROWS = 512  # activation rows that a prefill works on at a time


def inspect_model(folder: Path, *, context: int | None = None) -> dict[str, Any]:
    """The configuration, size and memory needs of a checkpoint. Reads headers, not weights.

    Raises:
        CheckpointError: what `generate` would refuse is refused here too.
    """
    with ModelWeights.open(folder) as weights:
        config = weights.config
        tokens = check_context(context, config)
        return {
            "model": str(folder),
            "config": dataclasses.asdict(config),
            "parameters": config.num_parameters(),
            "tensors": len(weights.tensors),
            "bytes": weights.nbytes,
            "bytes_by_dtype": weights.bytes_by_dtype(),
            "context": tokens,
            "memory": memory_needs(config, tokens),
        }


def predict_model(
    folder: Path,
    device: str,
    options: ModelOptions | None = None,
    *,
    progress: Stages | None = None,
) -> dict[str, Any]:
    """What the model will take of a device and how fast it will be there, measured in a second or two.

    Raises:
        DeviceError: there is no such device, or it is the CPU.
        OutOfMemoryError: the model does not fit.
        RequestError: the context is longer than the model's.
    """
    options = options or ModelOptions()
    context = options.context
    on_cpu = device.strip().lower() == "cpu"
    opened = None if on_cpu else gpu.open_device(device)
    if opened is None:
        why = "" if on_cpu else f" here ({gpu.why_no_gpu()})"
        raise DeviceError(
            f"device {device!r} is the CPU{why}, and a prediction is for GPUs: leave --device out, or name one of "
            "those that xinfer devices lists, such as vulkan"
        )
    with opened, ModelWeights.open(folder) as weights:
        check_context(context, weights.config)
        kernels: dict[str, Any] = {
            "quarantine": Quarantine().variants_for(opened.info),
            "tuning": partial(TuningFile().preferred, opened.info, exact=options.exact),
        }
        found = predict(weights, opened, options, **kernels, progress=progress)
        plan = found.plan
        return {
            "device": f"{opened.info.api}:{opened.info.index} {opened.info.name}",
            "tuned": found.tuned,
            "layers": plan.config.num_hidden_layers,
            "streamed_layers": len(plan.split.streamed),
            "bytes_a_token_over_the_bus": plan.a_token,
            "read_from_disk_each_time": bool(plan.split.streamed) and not plan.split.pinned,
            "vram": {
                "weights": plan.weights,
                "kv_cache": plan.cache(plan.asked(context)),
                "kv_cache_tokens": plan.asked(context),
                "workspace": plan.workspace,
                "total": found.vram,
            },
            "ram": plan.on_host,
            "load_seconds": found.load_seconds,
            "tokens_per_second": found.tokens_per_second,
            "tokens_per_second_at_context": 1 / found.token_seconds_at_context if context else None,
            "bytes_per_second": {
                "load": found.load_speed,
                "bus": found.bus_speed,
                "memory": found.memory_speed,
            },
        }


def render_prediction(report: dict[str, Any]) -> str:
    """`predict_model`'s report for people."""
    vram, speed, streamed = report["vram"], report["bytes_per_second"], report["streamed_layers"]
    layers = f"all {report['layers']} resident"
    if streamed:
        where = "the disk" if report["read_from_disk_each_time"] else "RAM"
        a_token = _size(report["bytes_a_token_over_the_bus"])
        layers = f"{streamed} of {report['layers']} streamed from {where}, {a_token} a token"
    at_context = report["tokens_per_second_at_context"]
    rates = f"{report['tokens_per_second']:,.1f} tok/s"
    rates += f", {at_context:,.1f} at the end of the context" if at_context else ""
    kernels = "as xinfer tune has chosen them" if report["tuned"] else "by rule; xinfer tune may find faster ones"
    rows = [
        ("layers", layers),
        ("kernels", kernels),
        (
            "VRAM",
            (
                f"{_size(vram['total'])}: weights {_size(vram['weights'])}, KV cache of "
                f"{vram['kv_cache_tokens']:,} tokens {_size(vram['kv_cache'])}, to work in {_size(vram['workspace'])}"
                f"{'' if report['tokens_per_second_at_context'] else ' (the cache grows; --context foretells more)'}"
            ),
        ),
        ("RAM held for it", _size(report["ram"])),
        ("load", f"{report['load_seconds']:,.2f} s"),
        ("decode", rates),
        (
            "measured",
            f"load {_size(speed['load'])}/s, bus {_size(speed['bus'])}/s, device memory {_size(speed['memory'])}/s",
        ),
    ]
    return f"on {report['device']}, as measured now:\n{_table(rows)}"


def memory_needs(config: Qwen2Config, context: int) -> dict[str, dict[str, int]]:
    """Bytes that running a model takes: in RAM on the CPU reference (float32), in VRAM on a GPU (16-bit weights).

    Weights, a full KV cache at `context`, and the activations of one prefill step.
    """
    parameters = config.num_parameters()
    matrix = parameters - _vector_parameters(config)
    cached = 2 * config.num_hidden_layers * config.kv_size * context  # numbers in keys and values
    activations = 4 * min(PREFILL_ROWS, context) * (3 * config.hidden_size + 3 * config.intermediate_size)
    activations += 4 * config.vocab_size  # one row of logits
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    layer = (parameters - embeddings - config.hidden_size) // config.num_hidden_layers
    return {
        "ram": {
            "weights": 4 * parameters,
            "weights_layer_by_layer": 4 * layer + 2 * embeddings,
            "kv_cache": 4 * cached,
            "activations": activations,
            "total": 4 * parameters + 4 * cached + activations,
        },
        "vram": {
            "weights": 2 * matrix + 4 * (parameters - matrix),
            "kv_cache": 2 * cached,
            "activations": activations,
            "total": 2 * matrix + 4 * (parameters - matrix) + 2 * cached + activations,
        },
    }


def _vector_parameters(config: Qwen2Config) -> int:
    """Biases and norms: the parameters that stay float32 on a GPU."""
    layer = config.q_size + 2 * config.kv_size + 2 * config.hidden_size
    return config.num_hidden_layers * layer + config.hidden_size


def render_inspection(report: dict[str, Any]) -> str:
    """`inspect_model`'s report for people."""
    config = report["config"]
    heads = f"{config['num_attention_heads']} heads, {config['num_key_value_heads']} KV heads of {config['head_dim']}"
    yarn = f", YaRN x{config['yarn']['factor']:g}" if config["yarn"] else ""
    sliding = sum(window is not None for window in config["layer_windows"])
    ram, vram = report["memory"]["ram"], report["memory"]["vram"]
    rows = [
        ("model", report["model"]),
        ("layers", f"{config['num_hidden_layers']}" + (f" ({sliding} with a sliding window)" if sliding else "")),
        ("hidden / intermediate", f"{config['hidden_size']:,} / {config['intermediate_size']:,}"),
        ("attention", heads),
        ("vocabulary", f"{config['vocab_size']:,}" + (" (tied head)" if config["tie_word_embeddings"] else "")),
        (
            "RoPE",
            f"theta {config['rope_theta']:,.0f}{yarn}",
        ),
        ("parameters", f"{report['parameters']:,} in {report['tensors']:,} tensors"),
        ("bytes", ", ".join(f"{_size(n)} {dtype}" for dtype, n in report["bytes_by_dtype"].items())),
        ("context", f"{report['context']:,} tokens"),
        ("RAM on the CPU", _needs(ram) + f" (weights layer by layer: {_size(ram['weights_layer_by_layer'])})"),
    ]
    if "prediction" not in report:  # which says it of a device
        rows.append(("VRAM on a GPU", f"{_needs(vram)} (and some 100 MB for staging; --device foretells it)"))
    return _table(rows)


def _needs(part: dict[str, int]) -> str:
    return (
        f"{_size(part['total'])}: weights {_size(part['weights'])}, KV cache {_size(part['kv_cache'])}, "
        f"activations {_size(part['activations'])}"
    )


def explain_messages(
    model: str | Path | None, messages: str | Sequence[Message], tools: Sequence[Message] | None = None
) -> dict[str, Any]:
    """What the model is given for a conversation: text, ids, where it stops, how it samples, and who says so."""
    checkpoint = Checkpoint(model)
    prompt = checkpoint.render_chat(messages, tools=tools)
    ids = checkpoint.tokenizer.encode(prompt, add_special_tokens=False)
    sources = checkpoint.settings().sources
    stop_ids = sources.pop("stop_ids")
    return {
        "model": str(checkpoint.folder),
        "chat_template": checkpoint.require_chat_template().origin,
        "prompt": prompt,
        "token_ids": ids,
        "tokens": [checkpoint.tokenizer.token(token) for token in ids],
        "stop_ids": [{"id": token, "token": checkpoint.tokenizer.token(token)} for token in stop_ids.value],
        "stop_ids_source": stop_ids.source,
        "sampling": {name: {"value": setting.value, "source": setting.source} for name, setting in sources.items()},
    }


def render_explanation(report: dict[str, Any]) -> str:
    """`explain_messages`' report for people."""
    stops = ", ".join(f"{stop['id']} {stop['token']}" for stop in report["stop_ids"]) or "none"
    sampling = [
        (name, f"{setting['value'] if setting['value'] not in (None, (), {}) else '-'}  ({setting['source']})")
        for name, setting in report["sampling"].items()
    ]
    return "\n".join(
        (
            f"prompt, by {report['chat_template']}:",
            report["prompt"],
            "",
            f"{len(report['token_ids'])} token ids:",
            " ".join(map(str, report["token_ids"])),
            "",
            f"stop ids ({report['stop_ids_source']}): {stops}",
            "",
            "sampling:",
            _table(sampling),
        )
    )


def list_adapters() -> dict[str, Any]:
    """Every adapter, best first, the one that "auto" takes, why an API shows no GPU, and what drivers are broken."""
    found = gpu.list_devices()
    chosen = gpu.automatic(found)
    devices = [
        {
            "selector": f"{info.api}:{info.index}",
            **dataclasses.asdict(info),
            "features": sorted(info.features),
        }
        for info in sorted(found, key=lambda info: (info.kind == "cpu", info.api, info.index))
    ]
    return {
        "auto": "cpu" if chosen is None else f"{chosen.api}:{chosen.index}",
        "devices": devices,
        "missing": gpu.diagnose(),
        "notes": gpu.driver_notes(),
    }


def render_adapters(report: dict[str, Any]) -> str:
    """`list_adapters`' report for people."""
    parts = []
    for device in report["devices"]:
        kind = gpu.kind_name(device["kind"])
        if kind == "software" or device["emulated"]:
            kind += ", used only when asked for"
        subgroups = f"{device['subgroup_size_min']} to {device['subgroup_size_max']}"
        rows = [
            ("adapter", f"{device['name']} ({kind})"),
            ("driver", f"{device['driver']} {device['driver_version']}, {device['api']} {device['api_version']}"),
            ("memory", f"{_size(device['heap_bytes'])}, bindings up to {_size(device['max_storage_range'])}"),
            ("subgroups", subgroups),
            ("features", ", ".join(device["features"]) or "none"),
        ]
        parts.append(f"{device['selector']}\n" + "\n".join("  " + line for line in _table(rows).splitlines()))
    for api, reasons in report["missing"].items():
        parts.append("\n".join([f"no GPU through {api}:", *(f"  {reason}" for reason in reasons)]))
    parts += [f"note: {note}" for note in report["notes"]]
    parts.append(f"--device auto takes {report['auto']}" + (" (the reference)" if report["auto"] == "cpu" else ""))
    return "\n\n".join(parts)


def _table(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _size(n: int) -> str:
    """Bytes in the unit that people read: 1 GB is 10**9 bytes."""
    value = float(n)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
