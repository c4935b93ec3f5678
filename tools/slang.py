"""The Slang compiler inside the slangpy wheel, through its flat C API: HLSL or Slang in, SPIR-V out. Needs no GPU.

Only the build uses this; nothing at run time does. The functions are those of slangpy's `include/slang-deprecated.h`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

SLANG_SPIRV = 6
SLANG_STAGE_COMPUTE = 6
SLANG_LANGUAGE = {".slang": 1, ".hlsl": 2}
OPTIMIZATION_LEVEL = 2

_of_thread = threading.local()


class SlangError(RuntimeError):
    """The compiler is not there, or it refused a source."""


def version() -> str:
    """The compiler's version, as it goes into the manifest."""
    try:
        return "slangpy " + importlib.metadata.version("slangpy")
    except importlib.metadata.PackageNotFoundError:
        raise SlangError("the shader compiler is not installed: pip install slangpy==0.43.1") from None


@functools.cache
def _library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("slangpy")
    if spec is None or spec.origin is None:
        raise SlangError("the shader compiler is not installed: pip install slangpy==0.43.1")
    folder = Path(spec.origin).parent
    for pattern in ("libslang-compiler.so*", "slang-compiler.dll", "libslang-compiler*.dylib"):
        for path in sorted(folder.glob(pattern)):
            return _declare(ctypes.CDLL(str(path)))
    raise SlangError(f"no libslang-compiler in {folder}: reinstall slangpy==0.43.1")


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, string, integer = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    size_out = ctypes.POINTER(ctypes.c_size_t)
    signatures: dict[str, tuple[object, list[object]]] = {
        "spCreateSession": (pointer, [string]),
        "spCreateCompileRequest": (pointer, [pointer]),
        "spDestroyCompileRequest": (None, [pointer]),
        "spSetCodeGenTarget": (None, [pointer, integer]),
        "spFindProfile": (integer, [pointer, string]),
        "spSetTargetProfile": (None, [pointer, integer, integer]),
        "spFindCapability": (integer, [pointer, string]),
        "spAddTargetCapability": (None, [pointer, integer, integer]),
        "spSetOptimizationLevel": (None, [pointer, integer]),
        "spAddSearchPath": (None, [pointer, string]),
        "spAddPreprocessorDefine": (None, [pointer, string, string]),
        "spAddTranslationUnit": (integer, [pointer, integer, string]),
        "spAddTranslationUnitSourceFile": (None, [pointer, integer, string]),
        "spAddEntryPoint": (integer, [pointer, integer, string, integer]),
        "spCompile": (integer, [pointer]),
        "spGetDiagnosticOutput": (string, [pointer]),
        "spGetEntryPointCode": (pointer, [pointer, integer, size_out]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def _session() -> int:
    """This thread's session: no two threads may use one at a time."""
    session: int | None = getattr(_of_thread, "session", None)
    if session is None:
        session = _library().spCreateSession(None)
        if not session:
            raise SlangError("the shader compiler could not start a session")
        _of_thread.session = session
    return session


def compile_spirv(source: Path, *, defines: Mapping[str, str], profile: str, capabilities: Iterable[str] = ()) -> bytes:
    """One shader's entry point `main` as SPIR-V.

    Args:
        source: a .hlsl or .slang file; its #includes are looked up beside it.
        defines: preprocessor names and their values.
        profile: Slang's name of the target, such as `spirv_1_3`.
        capabilities: Slang's names of SPIR-V extensions that may be used.

    Raises:
        SlangError: the compiler is missing, or it refused the source; the message is its own.
    """
    library, session = _library(), _session()
    request = library.spCreateCompileRequest(session)
    try:
        library.spSetCodeGenTarget(request, SLANG_SPIRV)
        library.spSetTargetProfile(request, 0, library.spFindProfile(session, profile.encode()))
        for name in capabilities:
            library.spAddTargetCapability(request, 0, library.spFindCapability(session, name.encode()))
        library.spSetOptimizationLevel(request, OPTIMIZATION_LEVEL)
        library.spAddSearchPath(request, str(source.parent).encode())
        for name, value in defines.items():
            library.spAddPreprocessorDefine(request, name.encode(), value.encode())
        unit = library.spAddTranslationUnit(request, SLANG_LANGUAGE[source.suffix], b"xinfer")
        library.spAddTranslationUnitSourceFile(request, unit, str(source).encode())
        entry = library.spAddEntryPoint(request, unit, b"main", SLANG_STAGE_COMPUTE)
        if library.spCompile(request):
            raise SlangError(f"{source.name} {dict(defines)}:\n{library.spGetDiagnosticOutput(request).decode()}")
        size = ctypes.c_size_t()
        code = library.spGetEntryPointCode(request, entry, ctypes.byref(size))
        return ctypes.string_at(code, size.value)
    finally:
        library.spDestroyCompileRequest(request)
