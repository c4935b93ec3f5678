"""A checkpoint's files in memory, and the changes that any text or JSON file can suffer."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any


@dataclass(frozen=True, slots=True)
class Special:
    """Something that is not a regular file."""

    kind: str  # "folder", "link", "fifo" or "sparse"
    target: str = ""  # of a link
    size: int = 0  # of a sparse file, in bytes


Files = dict[str, bytes | Special]  # by name inside the model's folder; `../x` lies beside it
Mutation = Callable[[Random, Files], str]  # changes the files in place and says how


@dataclass(frozen=True, slots=True)
class Raw:
    """JSON text that goes into a document as it is, valid or not."""

    text: str


class Pairs(tuple[tuple[Any, Any], ...]):
    """An object whose keys may repeat."""

    __slots__ = ()


NOT_UTF8 = (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xe4\xbd", b"\x80")
INSERTIONS = (
    b"\x00",
    b"\xef\xbb\xbf",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b"\\",
    b",",
    b":",
    b"\r\n",
    b"null",
    b"NaN",
    b"-",
    b"1e999",
    b"\\ud800",
    "\u2028\U0001f642".encode(),
    *NOT_UTF8,
)
DEEP = 50_000


def write(files: Files, folder: Path, *, originals: Files, base: Path) -> None:
    """Make the checkpoint `folder`; files that are as in `originals` become hard links to those in `base`."""
    folder.mkdir()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Special):
            _write_special(path, content)
        elif originals.get(name) is content:
            os.link(base / name, path)
        else:
            path.write_bytes(content)


def _write_special(path: Path, special: Special) -> None:
    if special.kind == "folder":
        path.mkdir()
    elif special.kind == "link":
        path.symlink_to(special.target)
    elif special.kind == "fifo":
        os.mkfifo(path)
    else:
        assert special.kind == "sparse", special
        with path.open("wb") as file:
            file.truncate(special.size)


def content_of(files: Files, name: str) -> bytes:
    """The bytes of a regular file."""
    content = files[name]
    assert isinstance(content, bytes), name
    return content


def load_json(files: Files, name: str) -> Any:
    """The document in one of the original files."""
    return json.loads(content_of(files, name))


def dump_json(value: Any) -> bytes:
    """JSON text of a document that may hold `Raw`, and be `Pairs`."""
    if not isinstance(value, Pairs):
        with contextlib.suppress(TypeError):  # the rule is a document without `Raw`, and this is fast
            return json.dumps(value).encode()
    return "".join(_pieces(value)).encode("utf-8", "surrogatepass")


def _pieces(value: Any) -> Iterator[str]:
    if isinstance(value, Raw):
        yield value.text
    elif isinstance(value, Mapping | Pairs):
        pairs = value if isinstance(value, Pairs) else value.items()
        for n, (key, inner) in enumerate(pairs):
            yield "," if n else "{"
            yield key.text if isinstance(key, Raw) else json.dumps(str(key))
            yield ":"
            yield from _pieces(inner)
        yield "}" if pairs else "{}"
    elif isinstance(value, list | tuple):
        yield "["
        for n, inner in enumerate(value):
            yield "," if n else ""
            yield from _pieces(inner)
        yield "]"
    else:
        yield json.dumps(value)


def weird(rng: Random, near: Any = None) -> Any:
    """A value that a file may hold and should not, often close to the right one."""
    kind = rng.randrange(10)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind <= 2:
        return rng.choice(
            (0, -1, 1, 2, 3, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30)
        )
    if kind == 3:
        return rng.choice((0.5, -0.5, 1e-9, 1e-320, 1e308, -1e308, 1.0000001, 3.0, -0.0))
    if kind == 4:
        return Raw(rng.choice(("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 5000, "01", "+1", "'x'", "")))
    if kind == 5:
        return rng.choice(
            ("", " ", "x", "0", "true", "null", "a" * 10_000, "\x00", "\x1b[31m", "\u202e", "你好🙂", "../x", "/etc")
        )
    if kind == 6:
        return Raw(rng.choice(('"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\\x"', '"unclosed', '"\\u12"')))
    if kind == 7:
        return rng.choice(([], {}, [[]], [None], {"a": {}}, {"": None}, [1, "x"], {"type": "Sequence"}))
    if kind == 8:
        return Raw(rng.choice(("[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "[" * DEEP)))
    return _near(rng, near)


def _near(rng: Random, value: Any) -> Any:
    """The same value in another form."""
    if isinstance(value, bool) or value is None:
        return rng.choice((not value, str(value), 1, [value]))
    if isinstance(value, int | float):
        changes = (value + 1, value - 1, -value, value * 2, value * 1000, value // 2, float(value), str(value), [value])
        return rng.choice(changes)
    if isinstance(value, str):
        return rng.choice((value + " ", value.upper(), value[:-1], value * 2, [value], {"content": value}, value[::-1]))
    if isinstance(value, list):
        return rng.choice((value[:-1], value + value, [value], {}, value[::-1], value[0] if value else 0))
    if isinstance(value, dict):
        return rng.choice((list(value), list(value.values()), [value], {str(v): k for k, v in value.items()}, "x"))
    return value


@dataclass(frozen=True, slots=True)
class Place:
    """A value inside a document: its container and its key or index there."""

    holder: Any
    key: Any
    path: str

    @property
    def value(self) -> Any:
        return self.holder[self.key]


def places(document: Any, path: str = "") -> Iterator[Place]:
    """Every value of a document, from the top down."""
    keys = document.keys() if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    for key in keys:
        where = f"{path}.{key}"[-80:]
        yield Place(document, key, where)
        yield from places(document[key], where)


def pick_place(rng: Random, document: Any) -> Place | None:
    """A value somewhere in the document; those high up, which are few and mean much, as often as those far down."""
    depths: dict[int, list[Place]] = {}
    for place in places(document):
        depths.setdefault(place.path.count("."), []).append(place)
    if not depths:
        return None
    return rng.choice(depths[rng.choice(sorted(depths))])


def change_tree(rng: Random, document: Any) -> str:
    """One change to the structure of a document, in place."""
    place = pick_place(rng, document)
    if place is None:
        return "nothing to change"
    change = rng.choice(TREE_CHANGES)
    return f"{change.__name__.strip('_')} at {place.path}: {change(rng, place, document)}"[:200]


def _replace(rng: Random, place: Place, document: Any) -> str:
    place.holder[place.key] = weird(rng, place.value)
    return repr(place.value)[:60]


def _remove(rng: Random, place: Place, document: Any) -> str:
    return repr(place.holder.pop(place.key))[:60]


def _duplicate(rng: Random, place: Place, document: Any) -> str:
    """The same key again (first or last counts, depending on the reader), or the same element again."""
    if isinstance(place.holder, list):
        place.holder.insert(place.key, place.value)
        return "twice"
    again = place.value if rng.random() < 0.3 else weird(rng, place.value)
    place.holder[place.key] = Raw(
        dump_json(place.value).decode("utf-8", "surrogatepass")
        + f",{json.dumps(str(place.key))}:"
        + dump_json(again).decode("utf-8", "surrogatepass")
    )
    return "key twice"


def _add(rng: Random, place: Place, document: Any) -> str:
    key = rng.choice(("", "x", "__class__", "type", "\x00", "你", "a" * 300))
    if isinstance(place.holder, dict):
        place.holder[key] = weird(rng)
    else:
        place.holder.append(weird(rng))
    return key[:20]


def _rename(rng: Random, place: Place, document: Any) -> str:
    if isinstance(place.holder, list):
        return "no key"
    value = place.holder.pop(place.key)
    key = rng.choice((f"{place.key} ", str(place.key).upper(), f"{place.key}2", Raw('"\\ud800"'), ""))
    place.holder[key] = value
    return str(key)[:40]


def _transplant(rng: Random, place: Place, document: Any) -> str:
    """A value from elsewhere in the document: right in form, wrong in place."""
    other = pick_place(rng, document)
    assert other is not None
    place.holder[place.key] = json.loads(json.dumps(other.value))
    return other.path


def _wrap(rng: Random, place: Place, document: Any) -> str:
    place.holder[place.key] = rng.choice(([place.value], {"value": place.value}, [[place.value]]))
    return "wrapped"


TREE_CHANGES = (_replace, _replace, _replace, _remove, _duplicate, _add, _rename, _transplant, _wrap)


def change_bytes(rng: Random, data: bytes) -> tuple[bytes, str]:
    """One change to bytes that does not know what they mean."""
    at = rng.randrange(len(data) + 1)
    kind = rng.randrange(8)
    if kind == 0 and data:
        at = rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :], f"bit flipped in byte {at}"
    if kind == 1:
        return data[:at], f"truncated to {at} bytes"
    if kind == 2:
        piece = rng.choice(INSERTIONS)
        return data[:at] + piece + data[at:], f"{piece!r} inserted at {at}"
    if kind == 3:
        length = rng.choice((1, 2, 5, 40))
        return data[:at] + data[at + length :], f"{length} bytes removed at {at}"
    if kind == 4:
        length = rng.choice((1, 5, 40, 400))
        return data[: at + length] + data[at:], f"{length} bytes repeated at {at}"
    if kind == 5:
        return rng.randbytes(rng.choice((1, 8, 100))) + data[at:], f"noise for the first {at} bytes"
    if kind == 6:
        return _recoded(rng, data)
    pieces = [data[:at], rng.randbytes(rng.randrange(1, 9)), data[at + 4 :]]
    return b"".join(pieces), f"noise at {at}"


def _recoded(rng: Random, data: bytes) -> tuple[bytes, str]:
    """The whole text in another form."""
    forms = {
        "empty": b"",
        "spaces": b" " * 100,
        "byte order mark": b"\xef\xbb\xbf" + data,
        "UTF-16": data.decode("utf-8", "replace").encode("utf-16"),
        "null": b"null",
        "empty object": b"{}",
        "twice": data + data,
        "in a list": b"[" + data + b"]",
        "as a string": json.dumps(data.decode("latin-1")).encode(),
        "deep": b"[" * DEEP,
        "a number": b"1" * 6000,
        "spaces around": b"\n\t " + data + b"\r\n",
        "NUL behind": data + b"\x00",
    }
    name = rng.choice(sorted(forms))
    return forms[name], name


def text_of(name: str) -> Mutation:
    """A change to the bytes of the file `name`."""

    def mutate(rng: Random, files: Files) -> str:
        files[name], how = change_bytes(rng, content_of(files, name))
        return f"{name}: {how}"

    return mutate


def tree_of(name: str) -> Mutation:
    """One to three changes to the structure of the JSON file `name`."""

    def mutate(rng: Random, files: Files) -> str:
        document = load_json(files, name)
        changes = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            changes.append(change_tree(rng, document))
            if any(isinstance(place.value, Raw) for place in places(document)):
                break  # what is in there now has no structure to go on with
        files[name] = dump_json(document)
        return f"{name}: " + "; ".join(changes)

    return mutate
