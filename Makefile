# make run: the whole tool on the embedded model.  make test: what CI runs.  Both build .venv on first use.
PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
ARGS ?=
PYTEST_ARGS ?= -q -n auto

.PHONY: run test venv lint clean

run: venv
	$(PY) -m specgen $(ARGS)

test: lint
	TRITON_INTERPRET=1 $(PY) -m pytest $(PYTEST_ARGS)

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

venv: $(VENV)/.installed

# The stamp is made last, so an interrupted installation is done again.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "specgen needs Python 3.11 or newer and $(PYTHON) is %d.%d: make PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip -c constraints.txt
	$(PY) -m pip install --quiet -e '.[dev]' -c constraints.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
