"""The generated Vulkan bindings: up to date with the registry, and laid out as a C compiler lays them out."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from xinfer.gpu._bindings import vulkan as vk

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
HEADERS = [Path("/usr/include"), Path("/usr/local/include")]


@pytest.fixture(scope="module")
def generator() -> Any:
    """The generator with everything wanted read in."""
    pytest.importorskip("vulkan_object", reason="needs the registry: pip install vulkan-object")
    module: ModuleType = pytest.importorskip("gen_vulkan_bindings")
    return module.Generator(module.read_wanted(module.WANTED))


def structs() -> dict[str, Any]:
    """Every generated struct and union by its own name."""
    return {
        name: kind
        for name, kind in vars(vk).items()
        if isinstance(kind, type)
        and issubclass(kind, ctypes.Structure | ctypes.Union)
        and kind is not vk.VkStructure
        and kind.__module__ == vk.__name__
        and kind.__name__ == name
    }


def test_the_file_is_what_the_generator_writes(generator: Any) -> None:
    found = re.search(r"vulkan-object (\S+)", vk.__doc__ or "")
    text = generator.text()
    installed = re.search(r"vulkan-object (\S+)", text)
    assert found
    assert installed
    if found[1] != installed[1]:
        pytest.skip(f"generated from vulkan-object {found[1]}, {installed[1]} is installed")
    assert Path(vk.__file__).read_text() == text, "run python tools/gen_vulkan_bindings.py"


def test_every_struct_knows_its_type(generator: Any) -> None:
    for name, kind in structs().items():
        expected = generator.vk.structs[name].sType
        if expected:
            assert generator.enum_values[expected] == kind.S_TYPE
            assert kind().sType == kind.S_TYPE


def test_commands_cover_their_prototypes(generator: Any) -> None:
    for name, (result, parameters, aliases) in vk.COMMANDS.items():
        command = generator.vk.commands[name]
        assert len(parameters) == len(command.params)
        assert (result is None) == (command.returnType == "void")
        assert all(generator.vk.commands[alias].alias == name for alias in aliases)


def test_some_values_by_the_specification() -> None:
    """Written down from the specification's text, not from its registry."""
    assert vk.VK_WHOLE_SIZE == 2**64 - 1
    assert vk.VK_QUEUE_FAMILY_IGNORED == 2**32 - 1
    assert vk.VK_ERROR_DEVICE_LOST == -4
    assert vk.VK_TIMEOUT == 2
    assert vk.RESULT_NAMES[-4] == "VK_ERROR_DEVICE_LOST"
    assert vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT == 0x20
    assert vk.VK_ACCESS_SHADER_WRITE_BIT == 0x40
    assert vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT == 0x800
    assert vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER == 7
    assert vk.VkBufferCreateInfo.S_TYPE == 12
    assert ctypes.sizeof(vk.VkPhysicalDeviceLimits) == 504
    assert ctypes.sizeof(vk.VkPhysicalDeviceProperties) == 824


def probe_source(declared: str, generator: Any) -> tuple[str, int]:
    """A C program that prints size and offsets of every struct, and how many of them the header itself declares.

    Those that an older header lacks are declared in C by the registry's own text, so that the compiler judges them too.
    """
    own, body, from_header = [], [], 0
    for name, kind in structs().items():
        struct = generator.vk.structs[name]
        known = [n for n in [name, *struct.aliases] if re.search(rf"\b{n}\b", declared)]
        from_header += bool(known)
        if not known:
            members = ";\n".join(c_member(m, declared) for m in struct.members)
            own.append(f"typedef {'union' if struct.union else 'struct'} {name} {{\n{members};\n}} {name};")
        c_name = known[0] if known else name
        body.append(f'printf("{name} %zu", sizeof({c_name}));')
        for field in kind._fields_:
            if len(field) == 3:
                continue  # bit fields have no offset in C
            body.append(f'printf(" %zu", offsetof({c_name}, {field[0]}));')
        body.append('printf("\\n");')
    includes = "#include <stddef.h>\n#include <stdio.h>\n#include <vulkan/vulkan_core.h>\n"
    return f"{includes}{chr(10).join(own)}\nint main(void) {{\n{chr(10).join(body)}\nreturn 0;\n}}\n", from_header


def c_member(member: Any, declared: str) -> str:
    """A member's C declaration; an enum that the header lacks is an int, as every Vulkan enum is."""
    text = str(member.cDeclaration).strip()
    if re.match(r"Vk\w+$", member.type) and not re.search(rf"\b{member.type}\b", declared):
        if member.type in structs():
            return text
        text = re.sub(rf"\b{member.type}\b", "int", text)
    return text


def test_layouts_are_those_of_a_c_compiler(generator: Any, tmp_path: Path) -> None:
    header = next((h / "vulkan/vulkan_core.h" for h in HEADERS if (h / "vulkan/vulkan_core.h").exists()), None)
    compiler = shutil.which("gcc") or shutil.which("cc")
    if header is None or compiler is None:
        missing = "Vulkan headers (Debian: libvulkan-dev)" if header is None else "a C compiler"
        if os.environ.get("XINFER_REQUIRE_GPU") == "1":
            pytest.fail(f"XINFER_REQUIRE_GPU=1, but there are no {missing}")
        pytest.skip(f"needs {missing}")
    source, from_header = probe_source(header.read_text(), generator)
    (tmp_path / "probe.c").write_text(source)
    subprocess.run([compiler, "-o", tmp_path / "probe", tmp_path / "probe.c"], check=True, capture_output=True)
    output = subprocess.run([tmp_path / "probe"], check=True, capture_output=True, text=True).stdout
    layouts = {line.split()[0]: [int(n) for n in line.split()[1:]] for line in output.splitlines()}
    ours = {
        name: [ctypes.sizeof(kind), *(getattr(kind, f[0]).offset for f in kind._fields_ if len(f) == 2)]
        for name, kind in structs().items()
    }
    assert layouts == ours
    assert len(ours) > 90
    assert from_header > 80
