# `make train` and `make test` set everything up on a fresh Debian machine with Python 3.11, then run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: train test proofs check clean

train: $(STAMP)
	$(BIN)/python -m recsys_tpu.train --config configs/dlrm.yaml

test: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not long"

# what would take CI too long: the same proofs on more chips, plans and types
proofs: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m long

# what CI runs beside the tests
check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy recsys_tpu

$(STAMP): pyproject.toml packaging/fbgemm-gpu/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; give another: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "error: no venv module; on Debian: apt-get install python3-venv g++"; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check 'pip>=23.3'
	$(BIN)/pip install --quiet --disable-pip-version-check ./packaging/fbgemm-gpu -e '.[emulation,dev]'
	$(BIN)/pip check
	@touch $@

clean:
	rm -rf $(VENV) runs data-cache
