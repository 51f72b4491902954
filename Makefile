# Two commands for a newcomer: `make demo` and `make test`. Both set everything up in .venv first.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python

.PHONY: demo test test-slow lint bench clean

$(VENV)/.dev: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "tablefree needs Python >= 3.10; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/.text: requirements-text.txt $(VENV)/.dev
	$(RUN) -m pip install --quiet --no-deps -r requirements-text.txt
	touch $@

demo: $(VENV)/.text
	$(RUN) train.py --demo

test: $(VENV)/.dev
	$(RUN) -m pytest

test-slow: $(VENV)/.text
	$(RUN) -m pytest -m slow

lint: $(VENV)/.dev
	$(RUN) -m ruff check .

bench: $(VENV)/.dev
	$(RUN) -m pytest bench

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache
