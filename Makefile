# Everything that a contributor or CI runs. PYTHON is the interpreter of the virtual environment.
PYTHON ?= python

.PHONY: check fix test test-gpu bench docs demo

check:  ## lint, types, spelling, generated docs
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m codespell_lib README.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md docs src tests benchmarks
	$(PYTHON) -m gpuworker docs --check docs

fix:  ## what can be mended without thinking
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

test:  ## everything that runs without a GPU
	$(PYTHON) -m pytest -m "not gpu and not multi_gpu"

test-gpu:  ## what needs a CUDA device
	$(PYTHON) -m pytest -m "gpu and not multi_gpu"

bench:  ## one JSON line per figure
	$(PYTHON) -m benchmarks

docs:  ## regenerate what is derived from the tables
	$(PYTHON) -m gpuworker docs docs

demo:
	$(PYTHON) -m gpuworker demo
