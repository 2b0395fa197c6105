# Every target does its own set-up: `make demo` and `make test` work in a fresh clone.
# Needs Debian's python3 (3.11), python3-venv, git and make. PYTHON=... picks another interpreter.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
FRAMEWORKS := .venv-frameworks
ADAPTDL := out/adaptdl
OTHERS := out/others
OMNILEARN ?= https://github.com/sahiltyagi4/OmniLearn
# Python compiles what it imports; compiling all of torch takes a minute. Frameworks are compiled: a warning of theirs would
# fail the test that imports them first.
PIP    := --quiet --disable-pip-version-check --no-compile
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
DATA   := .data/fashion-mnist
CIFAR  := .data/cifar-10
ARGS   ?=
MARK   ?= not slow

.PHONY: help venv venv-frameworks demo data data-cifar test test-slow test-frameworks gpu faults lint types docs report overhead kernel bus exchange cluster virtual adaptdl others containers dist format clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## make .venv with everything at the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) is missing or has no module venv:" \
	    "apt-get install python3-venv (Debian, Ubuntu), or name another interpreter with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch and the other packages of constraints.txt into $(VENV), once: several minutes; PyPI's torch"
	@echo "brings several GB of CUDA libraries (docs/guides/start.md says how to get the CPU build)"
	$(BIN)/python -m pip install $(PIP) -c constraints.txt hatchling editables torch
	$(BIN)/python -m pip install $(PIP) -c constraints.txt --no-build-isolation --editable '.[train,cli,test,docs,dev]'
	@touch $@

data: $(DATA)/.complete ## fetch Fashion-MNIST into .data (31 MB, hash-checked when read)

$(DATA)/.complete: deploy/fetch-fashion-mnist.sh
	sh deploy/fetch-fashion-mnist.sh $(DATA)
	@touch $@

data-cifar: $(CIFAR)/.complete ## fetch CIFAR-10 into .data (139 to 170 MB, hash-checked when read)

$(CIFAR)/.complete: deploy/fetch-cifar-10.sh | venv
	sh deploy/fetch-cifar-10.sh $(CIFAR) $(BIN)/python
	@touch $@

demo: venv data ## a real 4-process training job, left alone and then steered in two ways (ARGS="--json FILE")
	$(BIN)/dynamix demo --data $(DATA) $(ARGS)

test: venv data ## the tests; with MARK= also those that take long, as CI does (ARGS="-k name")
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist load --maxschedchunk 1 -m "$(MARK)" --ignore tests/frameworks $(ARGS)

test-slow: ## whole jobs under torchrun, all faults in small counts, the demo, small runs of the benchmarks
	$(MAKE) test MARK=slow

test-frameworks: $(FRAMEWORKS)/.installed ## what needs others' frameworks: adapters, loggers, tables; in a venv of their own
	OMP_NUM_THREADS=1 $(FRAMEWORKS)/bin/python -m pytest -n 2 --dist load --maxschedchunk 1 tests/frameworks $(ARGS)

venv-frameworks: $(FRAMEWORKS)/.installed ## make .venv-frameworks with the frameworks at the versions of constraints-frameworks.txt

# It sees what .venv has, torch above all, so that only the frameworks are installed into it.
$(FRAMEWORKS)/.installed: constraints-frameworks.txt $(STAMP)
	$(PYTHON) -m venv --clear $(FRAMEWORKS)
	echo "import site; site.addsitedir('$$($(BIN)/python $(PURELIB))')" >"$$($(FRAMEWORKS)/bin/python $(PURELIB))/base.pth"
	$(FRAMEWORKS)/bin/python -m pip install $(filter-out --no-compile,$(PIP)) -c constraints.txt -c constraints-frameworks.txt torch torchft \
	    accelerate lightning transformers wandb mlflow-skinny pandas pyarrow datasets webdataset torchdata
	@touch $@

gpu: venv ## what is marked gpu, on a machine that has one: clock, norms, half precision, memory, NCCL, torch.compile
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m gpu $(ARGS)

lint: venv ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv ## mypy --strict
	$(BIN)/mypy

# The pages stand in the site as they stand here, so that the links between them are the same.
docs: venv ## the site of all pages into out/site, with search; a broken link is an error
	rm -rf out/pages && mkdir -p out/pages
	cp -R --parents *.md bench deploy docs examples scenarios services/runtime/README.md out/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

report: venv ## figures and tables of docs/report.md, and README's summary, from docs/results
	$(BIN)/python -m docs.report

# What is measured is written to docs/results; on a machine that does something else, give ARGS="--csv out".
overhead: venv ## what a session costs the training thread, two models; 5 minutes (ARGS=--short-steps: short steps, root)
	$(BIN)/python -m bench.overhead --csv docs/results $(ARGS)
	[ -n "$(ARGS)" ] || $(BIN)/python -m bench.overhead --model large --csv out/large

kernel: venv ## what the kernel probe costs; root
	$(BIN)/python -m bench.kernel --csv docs/results $(ARGS)

bus: venv ## the bus beside the bare client, one arbitrator from 32 to 10,000 workers, replay; 10 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.bus --csv docs/results --png docs/scale.png $(ARGS)

exchange: venv data ## codecs and routes over shaped links, training steps; root, 20 minutes (ARGS="--densities 0.3,0.05,0.01")
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.exchange sums --csv docs/results $(ARGS)
	[ -n "$(ARGS)" ] || OMP_NUM_THREADS=1 $(BIN)/python -m bench.exchange steps --csv docs/results

cluster: venv data ## times to an accuracy on real clocks; root, more than four hours; killed, it goes on
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.cluster --seeds 6 --csv docs/results $(ARGS)

virtual: venv data ## experiments on virtual clusters, docs/results.md; hours; killed, it goes on (ARGS="--only heldout")
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.virtual $(ARGS)

# Two packages of others and one of ours that the product never needs, beside .venv and not in it.
$(ADAPTDL)/.installed: bench/adaptdl/requirements.txt $(wildcard bench/adaptdl/*.toml bench/adaptdl/*.py) $(STAMP)
	rm -rf $(ADAPTDL)
	$(BIN)/python -m pip install $(PIP) --target $(ADAPTDL) --no-deps \
	    --no-build-isolation -r bench/adaptdl/requirements.txt ./bench/adaptdl
	@touch $@

adaptdl: $(ADAPTDL)/.installed data ## AdaptDL's published goodput code on train scenarios, as one more arm; 15 minutes
	PYTHONPATH=$(ADAPTDL) $(BIN)/python -m bench.virtual --only adaptdl --seeds 2 $(ARGS)

# An environment that sees .venv, like the frameworks'. OmniLearn is no package: its repository at a commit.
$(OTHERS)/.installed: bench/others.txt $(wildcard bench/adaptdl/*) $(STAMP)
	$(PYTHON) -m venv --clear $(OTHERS)
	printf '%s\n' "import site; site.addsitedir('$$($(BIN)/python $(PURELIB))')" "$(CURDIR)/$(OTHERS)/omnilearn" \
	    >"$$($(OTHERS)/bin/python $(PURELIB))/base.pth"
	$(OTHERS)/bin/python -m pip install $(PIP) -c constraints.txt -r bench/others.txt torch
	$(OTHERS)/bin/python -m pip install $(PIP) --no-deps --no-build-isolation -r bench/adaptdl/requirements.txt ./bench/adaptdl
	git clone --quiet $(OMNILEARN) $(OTHERS)/omnilearn
	git -C $(OTHERS)/omnilearn checkout --quiet 7db5cb04505021e6269b0b4d8907b5253a4a5631
	@touch $@

others: $(OTHERS)/.installed data ## other people's programs on the hosts of make cluster; root, hours; killed, it goes on
	OMP_NUM_THREADS=1 $(OTHERS)/bin/python -m bench.cluster --name others --csv docs/results --seeds 6 --target 0.82 --grid 2 \
	    $(addprefix --case ,unequal-processors slow-links equal) $(addprefix --arm ,plain rule static-local rule-local adaptdl \
	    torchft-local torchft-diloco accelerate-local torch-post-local torch-powersgd omnilearn hivemind) $(ARGS)

faults: venv ## all faults at full counts, five rounds, then floods beside honest jobs; hours (ARGS="floods")
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.faults --csv out $(ARGS)

containers: venv ## the deployment in containers and under systemd for real: images, keys, crashes, an upgrade; root, podman; 15 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/deploy/test_containers.py $(ARGS)

dist: venv data ## wheel and sdist into dist/, tried in an empty environment: the demo runs from there (ARGS="--windows 5")
	sh deploy/release.sh dist $(BIN)/python $(DATA) $(ARGS)

format: venv ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what the targets made
	rm -rf $(VENV) $(FRAMEWORKS) .data out dist .pytest_cache .mypy_cache .ruff_cache
