PYTHON ?= python3
VENV := .venv
HF4 := .venv-hf4
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

CPP := $(wildcard csrc/*.cpp csrc/*.h csrc/*.cu csrc/*.cuh tests/cpp/*.cpp tests/cpp/*.h)
BUILD_INPUTS := $(wildcard csrc/*) CMakeLists.txt setup.py pyproject.toml constraints.txt
REQUIREMENTS := constraints.txt requirements-dev.txt requirements-data.txt

DEMO_TOKENS ?= 2048
DEMO_METHODS := plain,checkpoint,checkpoint+loss,offload-tiled

.DEFAULT_GOAL := help
.PHONY: help setup build lint format test test-cpp test-gpu gpu-check test-hf4 demo clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/\1|\2/' \
		| awk -F'|' '{ printf "%-10s %s\n", $$1, $$2 }'

# torch first and alone: asked for later, another package may pull a different build of it.
$(VENV)/installed: $(REQUIREMENTS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) $(shell grep '^torch==' constraints.txt)
	$(PIP) -c constraints.txt -r requirements-dev.txt
	$(PIP) -c constraints.txt --no-deps -r requirements-data.txt
	touch $@

$(VENV)/built: $(VENV)/installed $(BUILD_INPUTS)
	$(PIP) --no-build-isolation --no-deps -e .
	touch $@

setup: $(VENV)/built ## create .venv, install the pinned packages, build the extension

build: setup ## rebuild the extension where its sources changed

lint: setup ## ruff, mypy, clang-format, pydoclint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy offload
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/pydoclint --quiet offload bench

format: setup ## let ruff and clang-format rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

test: setup ## C++ tests, then the Python tests
	bash tests/cpp/run.sh plain
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests

test-cpp: setup ## C++ tests: plain, under ThreadSanitizer, under AddressSanitizer
	for variant in plain thread address; do bash tests/cpp/run.sh $$variant || exit 1; done

test-gpu: setup ## tests that need a card; fails where there is none
	FAIL_WITHOUT_CUDA=1 $(BIN)/python -m pytest tests -m needs_cuda

gpu-check: ## build, card tests and benches, without a venv; PARTS="tests store attention step"
	bash bench/gpu_check.sh build/gpu-check "$(PARTS)"

test-hf4: ## the transformers adapter against transformers 4.57
	test -x $(HF4)/bin/python || $(PYTHON) -m venv $(HF4)
	$(HF4)/bin/python -m pip install --quiet $(shell grep '^torch==' constraints.txt)
	$(HF4)/bin/python -m pip install --quiet -r requirements-hf4.txt
	$(HF4)/bin/python -m pip install --quiet --no-build-isolation --no-deps -e .
	$(HF4)/bin/python -m pytest tests/test_transformers.py tests/test_masks.py tests/test_head.py \
		tests/test_head_training.py tests/test_tiled_options.py tests/test_tiled_fallbacks.py tests/test_shared_config.py \
		tests/test_tiled_architectures.py tests/test_tiled_promises.py

demo: setup ## LoRA on SmolLM2-135M with every method: table, demo.png, demo.jsonl
	rm -f demo.jsonl
	$(BIN)/python -m bench step --model smollm2 --tokens $(DEMO_TOKENS) --lora 8 --dtype float32 --steps 0 \
		--lr 1e-3 --tier host --methods $(DEMO_METHODS) --json demo.jsonl --plot demo.png
	@echo "Written: demo.jsonl, demo.png"

clean: ## remove everything built; keeps the virtual environments
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f demo.png demo.jsonl offload/_C*.so $(VENV)/built
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
