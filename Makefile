# make demo   set up (without extras), then: tokenizer, pre-training and fine-tuning on built-in English, ending in three numbers and a picture
# make check  set up, then: lint, format check and the unit tests
# make test   set up, then: lint, format check and the whole test suite (no network, no GPU)
# make test-launchers   set up, then: every launcher x sharding x script on two processes
# make torture   set up, then: 300 kills of runs of every kind, full disks, damaged checkpoints, wrong inputs (KILLS=300);
#              and exported models under node (npm's Transformers.js)
# make findings     runs each finding of findings/ in an environment of its own (an hour, network), and prints which still hold
# make test-slurm   set up, then: the job scripts on a SLURM cluster of two nodes that the test starts on this machine
# make gpu    the first minutes on a new GPU, or one part of them (MINUTES=25 PART=headline OUTPUT=out/gpu TRAIN_FILE=my_text.txt)
# make peers  an environment in out/peers to time the published models of nanoT5 and FAT5 (python -m benchmarks step --nanot5)
# make lock   writes requirements/lock.txt, the exact environment of .venv
# make setup  the virtual environment with the pinned requirements, updated only when the requirements change (setup-core: without extras)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EVERYTHING := $(filter-out requirements/lock.txt requirements/peers.txt requirements/llama_cpp.txt,$(wildcard requirements/*.txt))
PYTEST := $(BIN)/python -m pytest
ON_TWO_CORES := -n 3 --dist loadfile --no-loadscope-reorder
DEMO := out/demo
SEEDS := 1
KILLS := 300
MINUTES := 25
TRAIN_FILE :=
PART :=
OUTPUT := out/gpu

# Python compiles a module when it first imports it, and keeps that: half a minute instead of the minute and more that
# compiling all installed modules takes. So it must be allowed to keep it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: findings setup setup-core lock check test test-slurm demo gpu peers lint clean torture test-launchers

# $(call install,FILE,its parts): what FILE requires, unless that was installed since any part changed.
define install
	@cat requirements.txt $(2) | cmp -s - $(VENV)/installed_$(notdir $(1)) || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make setup PYTHON=python3.11")' && \
	  { test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); } && \
	  echo "installing $(1) into $(VENV) (1.7 GB, with all extras 2.7 GB: a minute or two)" && \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --requirement $(1) && \
	  $(BIN)/python -m tools.keep_flags && \
	  cat requirements.txt $(2) > $(VENV)/installed_$(notdir $(1)); }
endef

setup:
	$(call install,requirements/all.txt,$(EVERYTHING))

setup-core:
	$(call install,requirements.txt)

# The exact environment of .venv; torch without the tag of the build that was at hand.
lock: setup
	{ echo "# pip install -r requirements/lock.txt: the environment that was tested, Python 3.11, Linux, written by make lock"; \
	  $(BIN)/python -m pip freeze | sed 's/+cpu$$//'; } > requirements/lock.txt

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint
	$(PYTEST) $(ON_TWO_CORES) tests/unit

test: lint
	$(PYTEST) $(ON_TWO_CORES)

test-slurm: setup
	@$(BIN)/python tests/support/slurm_cluster.py --check
	$(PYTEST) tests/slurm

# make demo SEEDS="1 2 3" fine-tunes with three seeds.
demo: setup-core
	@$(BIN)/python -m tools.demo --output $(DEMO) --seeds $(SEEDS)

PYTHON_HERE := $(firstword $(wildcard $(BIN)/python) $(PYTHON))

peers:
	$(PYTHON_HERE) -m pip install --quiet --disable-pip-version-check --upgrade --target out/peers -r requirements/peers.txt

# Any machine with torch, transformers and a GPU: nothing is installed, and what is missing is skipped by name. Stopped at
# any moment, what was measured is in OUTPUT, and the same command goes on. Without git: T5_FOUNDRY_COMMIT names the code.
gpu:
	$(PYTHON_HERE) -m benchmarks gpu --minutes $(MINUTES) --output $(OUTPUT) \
	  $(if $(PART),--part $(PART)) $(if $(TRAIN_FILE),--train_file $(TRAIN_FILE))

test-launchers: setup
	T5_ALL_LAUNCHERS=1 $(PYTEST) tests/slow/test_launchers.py

torture: setup
	$(BIN)/python tests/support/torture.py --kills $(KILLS) --output out/torture.json
	T5_SERVE_SECONDS=150 $(PYTEST) -n 0 -s tests/features/server -k of_all_kinds
	T5_TRANSFORMERS_JS=1 $(PYTEST) -n 0 tests/features/onnx -k transformers_js

findings:
	@failed=0; for file in findings/[a-z]*.sh; do \
	  echo "== $$file"; if PYTHON="$(PYTHON)" sh "$$file"; then echo "holds"; else echo "has changed"; failed=1; fi; \
	done; exit $$failed

clean:
	rm -rf out .pytest_cache .ruff_cache
