"""dxcompiler: on made-up COM objects, of Windows' layout and of older builds', and the real one where there is one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_uint64, c_void_p
from pathlib import Path

import pytest
from tests.unit.fake_com import FakeObject, FakeRuntime, device, fill, give

from xinfer import shaders
from xinfer.errors import DeviceError
from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12 import adapter, compiler, dxc, seal
from xinfer.gpu._d3d12.com import Interface
from xinfer.gpu._d3d12.compiler import Compiler
from xinfer.gpu._d3d12.dxc import Dxc
from xinfer.gpu.api import HlslSource
from xinfer.shaders.catalog import variants

SOURCE = HlslSource(name="half.hlsl", text="[numthreads(1, 1, 1)] void main() {}", defines=(("GROUP", 64), ("WAVE", 1)))
SIGNED = b"DXBC" + bytes(range(1, 17)) + b"the rest"
UNSIGNED = b"DXBC" + bytes(16) + b"the rest"
COMMIT = ctypes.create_string_buffer(b"0123456789abcdef")


class FakeDxc:
    """What DxcCreateInstance makes, and what it was asked to compile."""

    def __init__(self, code: bytes, *, said: bytes = b"", status: int = d3d.S_OK, old: bool = False) -> None:
        self.status, self.shift = status, dxc.DESTRUCTORS if old else 0
        self.outputs = {dxc.OUT_OBJECT: code, dxc.OUT_ERRORS: said}
        self.asked: list[tuple[str, list[str]]] = []
        self.made: list[FakeObject] = []
        prototype = ctypes.CFUNCTYPE(c_uint64, c_uint64, c_uint64, c_uint64)
        self._create = prototype(self._make_instance)

    def load(self, *, windows: bool = True) -> Dxc:
        address = ctypes.cast(self._create, c_void_p).value
        assert address
        return Dxc(address, windows=windows)

    def everything_is_released(self) -> bool:
        return bool(self.made) and all(item.references == 0 for item in self.made)

    def _make(self, kind: str, methods: dict[str, Callable[..., int]]) -> FakeObject:
        self.made.append(FakeObject(kind, methods, shift=self.shift))
        return self.made[-1]

    def _make_instance(self, clsid: int, iid: int, slot: int) -> int:
        assert ctypes.string_at(clsid, 16) == bytes(d3d.clsid("DxcCompiler"))
        wanted = ctypes.string_at(iid, 16)
        if wanted == bytes(d3d.iid("IDxcCompiler3")):
            return give(slot, self._make("IDxcCompiler3", {"Compile": self._compile}))
        assert wanted == bytes(d3d.iid("IDxcVersionInfo2"))
        return give(slot, self._make("IDxcVersionInfo2", {"GetVersion": _version, "GetCommitInfo": _commit}))

    def _compile(self, buffer: int, words: int, count: int, _handler: int, _iid: int, slot: int) -> int:
        text = dxc.DxcBuffer.from_address(buffer)
        assert text.Encoding == dxc.UTF8
        arguments = [ctypes.wstring_at(address or 0) for address in (c_void_p * count).from_address(words)]
        self.asked.append((ctypes.string_at(text.Ptr, text.Size).decode(), arguments))
        methods: dict[str, Callable[..., int]] = {
            "GetStatus": lambda to: fill(to, ctypes.c_uint32(self.status)),
            "GetOutput": self._output,
        }
        return give(slot, self._make("IDxcResult", methods))

    def _output(self, kind: int, _iid: int, slot: int, _name: int) -> int:
        data = ctypes.create_string_buffer(self.outputs[kind], max(1, len(self.outputs[kind])))
        size = len(self.outputs[kind])
        blob = self._make(
            "IDxcBlob", {"GetBufferPointer": lambda: ctypes.addressof(data), "GetBufferSize": lambda: size}
        )
        return give(slot, blob)


def _version(major: int, minor: int) -> int:
    fill(major, ctypes.c_uint32(1))
    return fill(minor, ctypes.c_uint32(8))


def _commit(count: int, text: int) -> int:
    fill(count, ctypes.c_uint32(4321))
    return fill(text, c_void_p(ctypes.addressof(COMMIT)))


# --- made up ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [False, True])
def test_a_shader_is_compiled_and_everything_given_back(old: bool) -> None:
    fake = FakeDxc(SIGNED, old=old)
    loaded = fake.load(windows=not old)
    assert loaded.version == "1.8.4321-012345678"
    assert loaded.compile(SOURCE, "main") == SIGNED
    ((text, arguments),) = fake.asked
    assert text == SOURCE.text
    assert arguments[:5] == ["half.hlsl", "-E", "main", "-T", "cs_6_0"]
    assert arguments[-4:] == ["-D", "GROUP=64", "-D", "WAVE=1"]
    assert fake.everything_is_released()


def test_what_it_refuses_is_told_in_its_words() -> None:
    fake = FakeDxc(b"", said=b"half.hlsl:1:2: error: no such thing\n\0", status=d3d.E_FAIL)
    with pytest.raises(DeviceError, match=r"(?s)1\.8.* cannot compile half\.hlsl:.*no such thing.*XINFER_DXC=0"):
        fake.load().compile(SOURCE, "main")
    assert fake.everything_is_released()


def test_windows_takes_only_what_is_signed_and_vkd3d_only_what_has_a_digest() -> None:
    fake = FakeDxc(UNSIGNED)  # it must outlive what it makes
    with pytest.raises(DeviceError, match=r"did not sign half\.hlsl.*dxil\.dll"):
        fake.load().compile(SOURCE, "main")
    code = fake.load(windows=False).compile(SOURCE, "main")
    assert code == seal.sealed(UNSIGNED) != UNSIGNED


@pytest.mark.parametrize(("model", "by"), [(0x51, "5.1 by D3DCompile"), (0x60, "6.0 by dxc"), (0x66, "6.0 by dxc")])
def test_it_is_used_where_the_device_takes_shader_model_6(model: int, by: str) -> None:
    def check(feature: int, target: int, _size: int) -> int:
        if feature == d3d.D3D12_FEATURE_SHADER_MODEL:
            return fill(target, ctypes.c_uint32(min(model, d3d.D3D_SHADER_MODEL_6_0)))
        return d3d.FAILURES["E_INVALIDARG"]

    made, fake = device(CheckFeatureSupport=check), FakeDxc(SIGNED)
    for loaded in (fake.load(), None):
        runtime = FakeRuntime({}, dxc=loaded)
        found = adapter._compiler(runtime, Interface(runtime.caller, "ID3D12Device", made.address))
        assert by in found.name if loaded else "5.1 by D3DCompile" in found.name


def test_what_it_made_is_kept_apart_from_what_others_make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    monkeypatch.setattr(compiler, "_d3d_compile", lambda *_: b"by D3DCompile")
    fake = FakeDxc(SIGNED)
    runtime = FakeRuntime({}, dxc=fake.load())
    with_it, without = Compiler(runtime, runtime.dxc), Compiler(runtime)
    for _ in range(2):
        assert with_it.compile(SOURCE, "main") == SIGNED
        assert without.compile(SOURCE, "main") == b"by D3DCompile"
    assert len(fake.asked) == 1
    assert tuple(fake.asked[0][1][-2:]) == ("-D", "XINFER_DXC=1")
    newer = FakeDxc(SIGNED)
    newer_dxc = newer.load()
    newer_dxc.version = "1.9"
    Compiler(runtime, newer_dxc).compile(SOURCE, "main")
    assert len(newer.asked) == 1


def test_the_sources_know_who_compiles_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """vkd3d's compiler has no globallycoherent; on Windows workgroups would not see each other's results without."""
    seen: list[tuple[tuple[str, int], ...]] = []

    def note(_runtime: object, source: HlslSource, _entry: str) -> bytes:
        seen.append(source.defines)
        return b"code"

    monkeypatch.setattr("xinfer.cache_files.cache_folder", lambda _name: None)
    monkeypatch.setattr(compiler, "_d3d_compile", note)
    for windows in (True, False):
        Compiler(FakeRuntime({}, windows=windows)).compile(SOURCE, "main")
    assert seen == [SOURCE.defines, (*SOURCE.defines, ("XINFER_VKD3D", 1))]


def test_the_variable_names_it_or_forbids_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(dxc.VARIABLE, "0")
    monkeypatch.setattr("xinfer.gpu.native.load_library", lambda *_: pytest.fail("it was looked for"))
    assert dxc.load_dxc() is None
    monkeypatch.undo()
    monkeypatch.setenv(dxc.VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(DeviceError, match=r"XINFER_DXC is .*nowhere.*: name the library or its folder, or set it to 0"):
        dxc.load_dxc()
    (tmp_path / "libdxcompiler.so").write_bytes(b"no library")
    monkeypatch.setenv(dxc.VARIABLE, str(tmp_path))
    with pytest.raises(DeviceError, match=r"libdxcompiler\.so"):
        dxc.load_dxc()


def test_the_newest_sdk_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for version in ("10.0.9.0", "10.0.22621.0", "arm64"):
        folder = tmp_path / "Windows Kits" / "10" / "bin" / version / "x64"
        folder.mkdir(parents=True)
        (folder / "dxcompiler.dll").touch()
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("PROGRAMFILES(X86)", str(tmp_path))
    found = [path.as_posix() for path in dxc._candidates("")]
    assert found[0] == "dxcompiler.dll"
    assert [path.split("/")[-3] for path in found[1:]] == ["10.0.22621.0", "10.0.9.0", "arm64"]


# --- the real one -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> Dxc:
    loaded = dxc.load_dxc()
    if loaded is None:
        pytest.skip("no dxcompiler; scripts/fetch-dxc brings one, and XINFER_DXC names it")
    return loaded


def test_the_real_one_compiles_every_variant(real: Dxc) -> None:
    assert real.version.startswith("1.")
    by = Compiler(FakeRuntime({}, windows=False), real)
    count = 0
    for variant in variants().values():
        source = shaders.hlsl(variant)
        if source is not None:
            code = by.compile(source, "main")
            assert code.startswith(b"DXBC")
            assert code[seal.DIGEST] == seal.digest(code)
            count += 1
    assert count > 100


def test_the_real_one_says_what_is_wrong_and_where(real: Dxc) -> None:
    text = '#line 1 "first.hlsl"\n\n[numthreads(1, 1, 1)] void main() { nothing_of_this_name(); }'
    with pytest.raises(DeviceError, match=r"(?s)cannot compile broken\.hlsl.*first\.hlsl:2.*nothing_of_this_name"):
        real.compile(HlslSource(name="broken.hlsl", text=text), "main")
    assert real.compile(SOURCE, "main").startswith(b"DXBC")  # and goes on
