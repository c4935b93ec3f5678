"""Mutations of safetensors files and of the index of a sharded checkpoint."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
from tests.fuzz.files import (
    INSERTIONS,
    Files,
    Raw,
    Special,
    change_bytes,
    change_tree,
    content_of,
    dump_json,
    load_json,
    weird,
)

INDEX = "model.safetensors.index.json"
SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4,
    "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip


@dataclass(slots=True)
class Stored:
    """A safetensors file taken apart."""

    header: dict[str, Any]
    data: bytes

    def tensors(self) -> list[str]:
        return sorted(name for name in self.header if name != "__metadata__")

    def data_of(self, name: str) -> bytes:
        begin, end = self.header[name]["data_offsets"]
        return self.data[begin:end]


def shards(files: Files) -> list[str]:
    return sorted(name for name in files if name.endswith(".safetensors"))


def parse(data: bytes) -> Stored:
    (length,) = struct.unpack("<Q", data[:8])
    return Stored(json.loads(data[8 : 8 + length]), data[8 + length :])


def build(stored: Stored, *, length: int | None = None, header: bytes | None = None) -> bytes:
    """The file again; `length` lies about the header's length."""
    text = dump_json(stored.header) if header is None else header
    return struct.pack("<Q", len(text) if length is None else length) + text + stored.data


def packed(parts: dict[str, tuple[str, Any, bytes]]) -> Stored:
    """A file that lays out tensors (dtype, shape, bytes) one after another."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, data) in parts.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    return Stored(header, b"".join(data for _, _, data in parts.values()))


def unpacked(stored: Stored) -> dict[str, tuple[str, Any, bytes]]:
    """The opposite of `packed`."""
    return {
        name: (stored.header[name]["dtype"], stored.header[name]["shape"], stored.data_of(name))
        for name in stored.tensors()
    }


def _one(rng: Random, files: Files) -> tuple[str, Stored]:
    name = rng.choice(shards(files))
    return name, parse(content_of(files, name))


# --- the header -------------------------------------------------------------------------------------------------------


def header_length(rng: Random, files: Files) -> str:
    name, stored = _one(rng, files)
    text = dump_json(stored.header)
    true = len(text)
    lies = (
        0, 1, 2, true - 1, true + 1, true // 2, true + len(stored.data), true + len(stored.data) + 1, 100_000_000,
        100_000_001, 2**31, 2**32 + true, 2**63 - 1, 2**63, 2**64 - 9, 2**64 - 8, 2**64 - 1, rng.getrandbits(64),
    )  # fmt: skip
    lie = rng.choice(lies)
    files[name] = build(stored, length=lie, header=text)
    return f"{name}: header length {lie} for {true}"


def header_text(rng: Random, files: Files) -> str:
    """The header's bytes change, and the length with them or not."""
    name, stored = _one(rng, files)
    text = dump_json(stored.header)
    changed, how = change_bytes(rng, text)
    files[name] = build(stored, header=changed, length=rng.choice((None, len(text))))
    return f"{name}: header {how}"


def header_tree(rng: Random, files: Files) -> str:
    name, stored = _one(rng, files)
    how = change_tree(rng, stored.header)
    files[name] = build(stored)
    return f"{name}: header {how}"


def header_metadata(rng: Random, files: Files) -> str:
    name, stored = _one(rng, files)
    value = rng.choice((weird(rng), {"format": weird(rng)}, {"format": "pt"}, {"a" * 5000: "b"}, {"format": "mlx"}))
    stored.header["__metadata__"] = value
    files[name] = build(stored)
    return f"{name}: metadata {value!r:.80}"


def header_names(rng: Random, files: Files) -> str:
    """A tensor under another name: unknown, harmless, without its prefix, of a layer that is not there."""
    name, stored = _one(rng, files)
    old = rng.choice(stored.tensors())
    others = (
        "", "x", old.removeprefix("model."), f"model.{old}", old.upper(), f"{old} ", old.replace(".0.", ".00."),
        old.replace(".0.", ".-1."), old.replace(".0.", ".999999999999."),
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "__metadata__", "\u202e\x1b[31m", "你" * 200, Raw('"\\ud800"'), "lm_head.weight", f"{old}_scale", "\x00",
    )  # fmt: skip
    new = rng.choice(others)
    stored.header[new] = stored.header.pop(old)  # type: ignore[index]
    files[name] = build(stored)
    return f"{name}: {old} called {new!r:.60}"


def header_padding(rng: Random, files: Files) -> str:
    """What writers put around the header: spaces behind it are usual, anything before it is not."""
    name, stored = _one(rng, files)
    text = dump_json(stored.header)
    before, behind = rng.choice(((b"", b" " * rng.randrange(64)), (b" ", b""), (b"", b"\n\t"), (b"", b"\x00" * 8)))
    files[name] = build(stored, header=before + text + behind)
    return f"{name}: {before!r} before and {behind!r:.40} behind the header"


def header_size(rng: Random, files: Files) -> str:
    """A header with very many or very long entries."""
    name, stored = _one(rng, files)
    kind = rng.randrange(4)
    if kind == 0:
        for n in range(rng.choice((1000, 20_000, 100_000))):
            stored.header[f"extra.{n}"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    elif kind == 1:
        stored.header["n" * 1_000_000] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    elif kind == 2:
        stored.header["__metadata__"] = {str(n): "x" for n in range(20_000)}
    else:
        stored.header["__metadata__"] = Raw('{"x":[' + "{}," * rng.choice((300_000, 3_000_000)) + "0]}")
    files[name] = build(stored)
    return f"{name}: a large header of kind {kind}"


def whole_file(rng: Random, files: Files) -> str:
    """The file as a whole: cut anywhere, noise, another format."""
    name, stored = _one(rng, files)
    data = build(stored)
    forms = (
        data[: rng.randrange(8)], data[: rng.randrange(len(data))], data[:8], b"", b"\x80\x02}q\x00.", b"GGUF" + data,
        b"PK\x03\x04" + data, b"\x00" * 64, rng.randbytes(300), data + rng.choice(INSERTIONS), data * 2,
        b"version https",
    )  # fmt: skip
    kind = rng.randrange(len(forms))
    files[name] = forms[kind]
    return f"{name}: form {kind}, {len(forms[kind])} bytes of {len(data)}"


HEADER = (
    header_length,
    header_length,
    header_text,
    header_text,
    header_tree,
    header_tree,
    header_metadata,
    header_names,
    header_padding,
    header_size,
    whole_file,
)


# --- the byte ranges --------------------------------------------------------------------------------------------------


def offsets_moved(rng: Random, files: Files) -> str:
    """One range changes by a little or a lot: overlaps, holes, reversed and beyond the file."""
    name, stored = _one(rng, files)
    tensor = rng.choice(stored.tensors())
    begin, end = stored.header[tensor]["data_offsets"]
    size, total = end - begin, len(stored.data)
    ranges: tuple[Any, ...] = (
        [end, begin], [begin + 1, end], [begin, end - 1], [begin - 1, end], [begin, end + 1], [begin + 4, end + 4],
        [begin - 4, end - 4], [0, size], [total - size, total], [total, total + size], [total, total], [begin, begin],
        [-1, size], [begin, 2**63], [2**63, 2**63 + size], [2**64 - size, 2**64], [2**64 + begin, 2**64 + end],
        [begin, total], [0, total], [0, 0], [-size, 0],
    )  # fmt: skip
    stored.header[tensor]["data_offsets"] = chosen = rng.choice(ranges)
    files[name] = build(stored)
    return f"{name}: {tensor} at {chosen} instead of {begin} to {end}"


def offsets_shape(rng: Random, files: Files) -> str:
    """Offsets that are no pair of integers."""
    name, stored = _one(rng, files)
    tensor = rng.choice(stored.tensors())
    begin, end = stored.header[tensor]["data_offsets"]
    others: tuple[Any, ...] = (
        [], [begin], [begin, end, end], None, f"{begin},{end}", {"begin": begin, "end": end},
        [float(begin), float(end)],
        [str(begin), str(end)], [begin, None], [True, end], [[begin, end]], [begin, Raw("1e3")], [Raw("1" * 5000), end],
        [begin, Raw("NaN")], weird(rng, [begin, end]), [weird(rng, begin), end], [begin, weird(rng, end)],
    )  # fmt: skip
    stored.header[tensor]["data_offsets"] = chosen = rng.choice(others)
    files[name] = build(stored)
    return f"{name}: {tensor} at {chosen!r:.80}"


def offsets_swapped(rng: Random, files: Files) -> str:
    """Two tensors change places: wrong sizes, or for two of one size other weights in a file without fault."""
    name, stored = _one(rng, files)
    one, other = rng.choice(stored.tensors()), rng.choice(stored.tensors())
    first, second = stored.header[one], stored.header[other]
    first["data_offsets"], second["data_offsets"] = second["data_offsets"], first["data_offsets"]
    files[name] = build(stored)
    return f"{name}: {one} and {other} swapped"


def offsets_shifted(rng: Random, files: Files) -> str:
    """All ranges from one on move, as if something stood before them; the data moves along or not."""
    name, stored = _one(rng, files)
    entries = sorted((stored.header[tensor] for tensor in stored.tensors()), key=lambda entry: entry["data_offsets"])
    first = rng.randrange(len(entries))
    by = rng.choice((1, 2, 4, 8, 4096, -1, -4))
    at = entries[first]["data_offsets"][0]
    for entry in entries[first:]:
        entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]
    if by > 0 and rng.random() < 0.5:
        stored.data = stored.data[:at] + b"\x00" * by + stored.data[at:]
    files[name] = build(stored)
    return f"{name}: ranges from tensor {first} on moved by {by}"


def offsets_order(rng: Random, files: Files) -> str:
    """The tensors in another order of data, or the header's keys in another: both without fault."""
    name, stored = _one(rng, files)
    parts = list(unpacked(stored).items())
    rng.shuffle(parts)
    stored = packed(dict(parts))
    keys = list(stored.header)
    rng.shuffle(keys)
    stored.header = {key: stored.header[key] for key in keys}
    files[name] = build(stored)
    return f"{name}: another order"


def offsets_data(rng: Random, files: Files) -> str:
    """The data is shorter or longer than its ranges."""
    name, stored = _one(rng, files)
    cut = rng.choice((1, 2, 4, 1000, len(stored.data) // 2, len(stored.data), rng.randrange(len(stored.data))))
    stored.data = stored.data[:-cut] if rng.random() < 0.6 else stored.data + b"\x00" * cut
    files[name] = build(stored)
    return f"{name}: {len(stored.data)} bytes of data, changed by {cut}"


def offsets_extra(rng: Random, files: Files) -> str:
    """One more tensor, harmless or not, in a range of its own, of another, or of none."""
    name, stored = _one(rng, files)
    extra = rng.choice(
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq", "extra", "lm_head.weight")
    )
    size = rng.choice((0, 4, 64))
    at = rng.choice((len(stored.data), 0))
    stored.header[extra] = {"dtype": "F32", "shape": [size // 4], "data_offsets": [at, at + size]}
    if at:
        stored.data += b"\x00" * size
    files[name] = build(stored)
    return f"{name}: {extra} of {size} bytes at {at}"


OFFSETS = (
    offsets_moved,
    offsets_moved,
    offsets_moved,
    offsets_shape,
    offsets_shape,
    offsets_swapped,
    offsets_shifted,
    offsets_order,
    offsets_data,
    offsets_extra,
)


# --- types, shapes and values -----------------------------------------------------------------------------------------


def dtype_named(rng: Random, files: Files) -> str:
    """Another name in the header; the bytes stay as they are."""
    name, stored = _one(rng, files)
    tensor = rng.choice(stored.tensors())
    others: tuple[Any, ...] = (
        *SIZES, "F4", "F8_E8M0", "F6_E2M3", "C64", "f32", "float32", "BF16 ", "", "x" * 5000, None, 32, ["F32"],
        Raw('"\\ud800"'), "F\x00", weird(rng),
    )  # fmt: skip
    stored.header[tensor]["dtype"] = chosen = rng.choice(others)
    files[name] = build(stored)
    return f"{name}: {tensor} of dtype {chosen!r:.60}"


def dtype_converted(rng: Random, files: Files) -> str:
    """One tensor or all in another type, with bytes to match: right for the three that are read, refused for others."""
    name, stored = _one(rng, files)
    parts = unpacked(stored)
    dtype = rng.choice((*SIZES, "F32", "F16", "BF16", "F16", "BF16"))
    chosen = stored.tensors() if rng.random() < 0.3 else [rng.choice(stored.tensors())]
    for tensor in chosen:
        old, shape, data = parts[tensor]
        parts[tensor] = (dtype, shape, _convert(data, old, dtype))
    files[name] = build(packed(parts))
    return f"{name}: {len(chosen)} tensors as {dtype}"


_NUMPY = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


def _convert(data: bytes, old: str, new: str) -> bytes:
    values = np.frombuffer(data, _NUMPY[old])
    if new in _NUMPY:
        return values.astype(_NUMPY[new]).tobytes()
    return bytes(len(values) * SIZES[new])


def shape_named(rng: Random, files: Files) -> str:
    """Another shape in the header: transposed, overflowing, empty, of many dimensions, of anything but integers."""
    name, stored = _one(rng, files)
    tensor = rng.choice(stored.tensors())
    shape = stored.header[tensor]["shape"]
    others: tuple[Any, ...] = (
        shape[::-1], [*shape, 1], [1, *shape], [], [0], [0, *shape], shape[:-1], [-n for n in shape], [2**32, 2**32],
        [2**63, 2], [2**64 - 1, 2**64 - 1], [2**62, 4, 1], [2**64], [float(n) for n in shape], [str(n) for n in shape],
        None, shape[0], {"0": shape[0]}, [shape], [1] * 1000, [1] * 17, [True, *shape[1:]], [0, 2**63],
        [n + 1 for n in shape], [shape[0] * 2, *shape[1:]], weird(rng, shape), [weird(rng, shape[0]), *shape[1:]],
    )  # fmt: skip
    stored.header[tensor]["shape"] = chosen = rng.choice(others)
    files[name] = build(stored)
    return f"{name}: {tensor} of shape {chosen!r:.80}"


def shape_rebuilt(rng: Random, files: Files) -> str:
    """Another shape, with bytes to match it."""
    name, stored = _one(rng, files)
    parts = unpacked(stored)
    tensor = rng.choice(stored.tensors())
    dtype, shape, data = parts[tensor]
    other = rng.choice(
        (shape[::-1], [n + 1 for n in shape], [n // 2 for n in shape], [0 for _ in shape], [], [1, *shape])
    )
    size = int(np.prod(other)) * SIZES[dtype]
    parts[tensor] = (dtype, other, (data * 3)[:size].ljust(size, b"\x00"))
    files[name] = build(packed(parts))
    return f"{name}: {tensor} rebuilt as {other} for {shape}"


def tensor_gone(rng: Random, files: Files) -> str:
    """Tensors missing from an otherwise sound file, or the file with none at all."""
    name, stored = _one(rng, files)
    parts = unpacked(stored)
    gone = stored.tensors() if rng.random() < 0.1 else [rng.choice(stored.tensors())]
    for tensor in gone:
        del parts[tensor]
    files[name] = build(packed(parts))
    return f"{name}: {len(gone)} tensors gone, {gone[0]} first"


def values(rng: Random, files: Files) -> str:
    """Numbers that no training leaves behind: NaN, infinities, the largest and smallest, noise."""
    name, stored = _one(rng, files)
    parts = unpacked(stored)
    chosen = stored.tensors() if rng.random() < 0.2 else [rng.choice(stored.tensors())]
    value = rng.choice((float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 6e4, 1e-45, 0.0, None))
    for tensor in chosen:
        dtype, shape, data = parts[tensor]
        array = np.frombuffer(data, _NUMPY[dtype]).copy()
        if value is None:
            array = np.frombuffer(rng.randbytes(len(data)), _NUMPY[dtype])
        else:
            with np.errstate(over="ignore"):
                array[: rng.choice((1, len(array)))] = np.float64(value).astype(_NUMPY[dtype])
        parts[tensor] = (dtype, shape, array.tobytes())
    files[name] = build(packed(parts))
    return f"{name}: {value} in {len(chosen)} tensors, {chosen[0]} first"


DTYPES = (dtype_named, dtype_named, dtype_converted, shape_named, shape_named, shape_rebuilt, tensor_gone, values)


# --- the index --------------------------------------------------------------------------------------------------------


def _index(files: Files) -> tuple[dict[str, Any], dict[str, Any]]:
    index: dict[str, Any] = load_json(files, INDEX)
    return index, index["weight_map"]


def index_file_name(rng: Random, files: Files) -> str:
    """An entry, or all of a file's, names another file: absent, outside, absolute, a pickle, no string."""
    index, weight_map = _index(files)
    tensor = rng.choice(sorted(weight_map))
    old = weight_map[tensor]
    files["../outside.safetensors"] = content_of(files, old)
    names: tuple[Any, ...] = (
        "absent.safetensors", "../outside.safetensors", "/etc/passwd", "./" + old, "../" + old, "model/../" + old, "",
        ".",
        "..", "pytorch_model.bin", "C:\\x.safetensors", "\\\\host\\x.safetensors", old.upper(), old + "\x00",
        "a" * 5000,
        "a" * 250 + ".safetensors", "你好.safetensors", Raw('"\\ud800.safetensors"'), "config.json", old + "/", "~",
        None, 1, [old], {"file": old}, True, "\x1b[31m.safetensors", " " + old, "*.safetensors", weird(rng, old),
        "file:///etc/passwd", "https://example.com/x.safetensors", "CON.safetensors", "-.safetensors", INDEX,
    )  # fmt: skip
    new = rng.choice(names)
    for key, value in list(weight_map.items()):
        if key == tensor or (value == old and rng.random() < 0.5):
            weight_map[key] = new
    files[INDEX] = dump_json(index)
    return f"{tensor} in {new!r:.80}"


def index_entries(rng: Random, files: Files) -> str:
    """Entries missing, surplus, in the wrong shard, or all in one."""
    index, weight_map = _index(files)
    tensor = rng.choice(sorted(weight_map))
    kind = rng.choice(("missing", "surplus", "wrong", "all", "none", "renamed", "many", "shuffled"))
    if kind == "missing":
        del weight_map[tensor]
    elif kind == "surplus":
        weight_map[rng.choice(("extra", "lm_head.weight", "a" * 5000, "rotary_emb.inv_freq", "\x00"))] = weight_map[
            tensor
        ]
    elif kind == "wrong":
        weight_map[tensor] = rng.choice(shards(files))
    elif kind == "all":
        index["weight_map"] = dict.fromkeys(weight_map, weight_map[tensor])
    elif kind == "none":
        weight_map.clear()
    elif kind == "renamed":
        weight_map[tensor.removeprefix("model.")] = weight_map.pop(tensor)
    elif kind == "many":
        weight_map.update({f"extra.{n}": f"x{n}.safetensors" for n in range(5000)})
    else:
        places = list(weight_map.values())
        rng.shuffle(places)
        index["weight_map"] = dict(zip(weight_map, places, strict=True))
    files[INDEX] = dump_json(index)
    return f"weight_map: {kind}"


def index_map(rng: Random, files: Files) -> str:
    """The map itself, or the metadata beside it, is something else."""
    index, weight_map = _index(files)
    changes: tuple[dict[str, Any], ...] = (
        {}, {"weight_map": weird(rng, weight_map)}, {"weight_map": list(weight_map)}, {"weight_map": [weight_map]},
        {"weight_map": {}}, weight_map, {"weight_map": None}, {**index, "metadata": weird(rng)},
        {**index, "metadata": {"total_size": weird(rng)}}, {"weight_map": weight_map}, {**index, "extra": weird(rng)},
        {"weight_map": {weight_map[key]: key for key in weight_map}}, {"weight_map": {"a": weight_map}},
    )  # fmt: skip
    kind = rng.randrange(len(changes))
    files[INDEX] = dump_json(changes[kind])
    return f"index of form {kind}"


def index_text(rng: Random, files: Files) -> str:
    files[INDEX], how = change_bytes(rng, content_of(files, INDEX))
    return f"index: {how}"


def index_tree(rng: Random, files: Files) -> str:
    index = load_json(files, INDEX)
    how = change_tree(rng, index)
    files[INDEX] = dump_json(index)
    return f"index: {how}"


def index_files(rng: Random, files: Files) -> str:
    """The index as it was, and the files around it not."""
    names = shards(files)
    one, other = rng.choice(names), rng.choice(names)
    kind = rng.choice(
        ("shard gone", "shard copied", "index gone", "single beside", "pickle", "folder", "link", "swapped")
    )
    if kind == "shard gone":
        del files[one]
    elif kind == "shard copied":
        files[one] = content_of(files, other)
    elif kind == "index gone":
        del files[INDEX]
    elif kind == "single beside":
        files["model.safetensors"] = content_of(files, one)
    elif kind == "pickle":
        del files[INDEX]
        for name in names:
            files[name.replace(".safetensors", ".bin")] = content_of(files, name)
            del files[name]
    elif kind == "folder":
        files[one] = Special("folder")
    elif kind == "link":
        files["../blob"] = content_of(files, one)  # as the hub's cache has it: without fault
        files[one] = Special("link", target=rng.choice(("../blob", "../blob", "absent", one)))
    else:
        files[one], files[other] = files[other], files[one]
    return f"{kind}: {one}"


INDEXES = (
    index_file_name,
    index_file_name,
    index_file_name,
    index_entries,
    index_entries,
    index_map,
    index_text,
    index_tree,
    index_files,
)
