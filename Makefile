# Every target does its own set-up: `make demo` and `make test` work in a fresh clone.
# Needs Debian's python3 (3.11), python3-venv, git and make. PYTHON=... picks another interpreter.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
FRAMEWORKS := .venv-frameworks
ADAPTDL := out/adaptdl
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
DATA   := .data/fashion-mnist
CIFAR  := .data/cifar-10
ARGS   ?=

.PHONY: help venv venv-frameworks demo data data-cifar test test-slow test-frameworks gpu faults failover partition floods lint types bench cluster cluster-long cluster-short cluster-equal exchange scale results heldout heldout-exchange adaptdl paper containers dist format clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## make .venv with everything at the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) is missing or has no module venv:" \
	    "apt-get install python3-venv (Debian, Ubuntu), or name another interpreter with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch and the other packages of constraints.txt into $(VENV), once: several minutes; PyPI's torch"
	@echo "brings several GB of CUDA libraries (README.md, \"Try it\", says how to get the CPU build)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt hatchling editables torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	    --no-build-isolation --editable '.[train,cli,learn,dashboard,test,dev]'
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

test: venv data ## the tests, three at a time (ARGS="-k name"); what takes long is in test-slow
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow" --ignore tests/frameworks $(ARGS)

test-slow: venv data ## whole jobs under torchrun, all faults in small counts, the demo, small runs of the benchmarks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist load --maxschedchunk 1 -m slow --ignore tests/frameworks $(ARGS)

test-frameworks: $(FRAMEWORKS)/.installed ## what needs others' frameworks: adapters, loggers, tables; in a venv of their own
	OMP_NUM_THREADS=1 $(FRAMEWORKS)/bin/python -m pytest -n 2 --dist load --maxschedchunk 1 tests/frameworks $(ARGS)

venv-frameworks: $(FRAMEWORKS)/.installed ## make .venv-frameworks with the frameworks at the versions of constraints-frameworks.txt

# It sees what .venv has, torch above all, so that only the frameworks are installed into it.
$(FRAMEWORKS)/.installed: constraints-frameworks.txt $(STAMP)
	$(PYTHON) -m venv --clear $(FRAMEWORKS)
	echo "import site; site.addsitedir('$$($(BIN)/python $(PURELIB))')" >"$$($(FRAMEWORKS)/bin/python $(PURELIB))/base.pth"
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	    -c constraints-frameworks.txt torch \
	    accelerate lightning transformers wandb mlflow-skinny pandas pyarrow datasets webdataset torchdata \
	    opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
	@touch $@

gpu: venv ## what is marked gpu, on a machine that has one: clock, norms, half precision, memory, NCCL, torch.compile
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m gpu $(ARGS)

faults: venv ## all faults at full counts, five rounds with other seeds, into out/ (ARGS="--rounds 1")
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.faults --json out/faults.json $(ARGS)

failover: venv ## a broker of three servers that loses one, 20 times each: docs/failover.json and the table of docs/failover.md; 30 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.failover --json docs/failover.json --document docs/failover.md $(ARGS)

partition: venv ## the link of a broker's leader is cut, 20 times, as root: docs/failover-partition.json, a table of docs/failover.md; 8 to 11 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.failover --fault minority-partition --json docs/failover-partition.json --document docs/failover.md $(ARGS)

floods: venv ## one client floods the broker beside honest jobs: docs/floods*.json, the tables of docs/floods.md; 30 minutes
	-OMP_NUM_THREADS=1 $(BIN)/python -m bench.floods --json docs/floods.json --document docs/floods.md $(ARGS)
	-OMP_NUM_THREADS=1 $(BIN)/python -m bench.floods --keys --json docs/floods-keys.json --document docs/floods.md $(ARGS)
	-OMP_NUM_THREADS=1 $(BIN)/python -m bench.floods --role all --json docs/floods-roles.json --document docs/floods.md $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.floods.restart --json docs/floods-restart.json --document docs/floods.md

lint: venv ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv ## mypy --strict
	$(BIN)/mypy

bench: venv ## overhead and bus benchmarks: a table and JSON each, into out/; what the kernel probe costs: as root
	$(BIN)/python -m bench.bus --json out/bus.json
	$(BIN)/python -m bench.objects --json out/objects.json
	$(BIN)/python -m bench.policies --json out/policies.json
	$(BIN)/python -m bench.virtual --json out/virtual.json
	$(BIN)/python -m bench.replay --json out/replay.json
	$(BIN)/python -m bench.overhead --json out/overhead.json
	$(BIN)/python -m bench.kernel --json out/kernel.json --png out/kernel.png || [ $$? -eq 2 ] # 2: not root, as it says
	$(BIN)/python -m bench.overhead --model large --json out/overhead-large.json

cluster: cluster-long cluster-short cluster-equal ## times to an accuracy on real clocks, first tables of docs/results.md; root, three and a half hours; killed, it goes on

cluster-long: venv data ## its three cases of half a minute a run, six seeds; two hours
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.cluster --target 0.85 --seeds 6 \
	    --case unequal-processors --case slow-link --case slow-links \
	    --output docs --json out/cluster.json --no-targets $(ARGS)

cluster-short: venv data ## its two cases of short runs, six seeds, finer looks; 35 to 80 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.cluster --target 0.85 --grid 0.5 --seeds 6 --case equal --case slow-down \
	    --name cluster-short --output docs --json out/cluster-short.json --no-targets $(ARGS)

cluster-equal: venv data ## its harm check, nothing slow, sixteen seeds; 25 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.cluster --target 0.85 --grid 0.5 --seeds 16 --case equal \
	    --arm plain --arm proportional --arm split --arm rule --virtual-seeds 8 \
	    --name cluster-equal --output docs --json out/cluster-equal.json --no-targets $(ARGS)

exchange: venv data ## codecs over shaped links, figures of docs/communication.md; root, 20 minutes
	mkdir -p docs/results
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.exchange --log2-elements 20 --densities 0.3,0.05,0.01 --no-targets \
	    --arms all-reduce,torch-sparse,rows,sketch,int8 \
	    --json docs/results/exchange.json --png docs/results/exchange.png $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.exchange --ranks 4,8 --servers 1,4,8 --densities 1 --log2-elements 21 \
	    --arms all-reduce,none@shares,none@servers --no-targets --json docs/results/exchange-servers.json $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.exchange.steps --no-targets \
	    --json docs/results/exchange-steps.json $(ARGS)

scale: venv ## one arbitrator from 32 to 10,000 workers: docs/scale.json, .png and the table of docs/scale.md; 8 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.scale.curve $(ARGS)

results: heldout ## docs/results.md: the held-out comparison, then the experiments (ARGS="--only static")
	$(BIN)/python -m bench.results $(ARGS)

HELDOUT_ROWS := proportional,noise-scale,doubling,omnilearn,best-static+track,static+track@64,$(\
    )goodput:hysteresis=0.05,noise_multiplier=1,track=0,$(\
    )best-static/rate=best,best-static+track/rate=best,goodput/rate=best,omnilearn/rate=best,rule/rate=best,oracle

heldout: venv data ## compare all policies on held-out scenarios, some 90 minutes on two cores; killed, it goes on
	mkdir -p out docs/results
	$(BIN)/dynamix evaluate --resume --seeds 6 --policies $(HELDOUT_ROWS) --results out/heldout.jsonl \
	    --json docs/results/heldout.json --png docs/results/heldout.png
	$(BIN)/python -m bench.results.heldout

# Accordion's milder codec is none here: bf16 of 128 virtual ranks takes more than a second a step.
EXCHANGE_STATICS := best-static+track:every=4,codec=int8,static+track:every=4,codec=int8@64
EXCHANGE_ROWS := static+track:codec=int8@64,diloco+track:codec=int8,qsr+track:codec=int8,$(\
    )adacomm+track:codec=int8,accordion+track:mild=none,gravac+track

heldout-exchange: venv data ## compare what decides how gradients travel on held-out scenarios; three hours of a core; killed, it goes on
	mkdir -p out docs/results
	$(BIN)/dynamix evaluate --resume --exchange local --policies $(EXCHANGE_ROWS) \
	    --against rule/exchange=exact,$(EXCHANGE_STATICS) --results out/heldout-exchange.jsonl \
	    --json docs/results/exchange-heldout.json --png docs/results/exchange-heldout.png $(ARGS)
	$(BIN)/python -m bench.results.exchange

# Two packages of others and one of ours that the product never needs, beside .venv and not in it.
$(ADAPTDL)/.installed: bench/adaptdl/requirements.txt $(wildcard bench/adaptdl/pyproject.toml bench/adaptdl/*/*.py) $(STAMP)
	rm -rf $(ADAPTDL)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(ADAPTDL) --no-deps \
	    --no-build-isolation -r bench/adaptdl/requirements.txt ./bench/adaptdl
	@touch $@

adaptdl: $(ADAPTDL)/.installed data ## AdaptDL's published goodput code on train scenarios, into docs/results.md; some 15 minutes
	PYTHONPATH=$(ADAPTDL) $(BIN)/python -m bench.results --only adaptdl $(ARGS)

paper: venv data-cifar ## the paper's models in full, docs/results.md; needs a text in .data/text; hours; killed, it goes on
	$(BIN)/python -m bench.results --only paper-vgg11 --only paper-resnet20 --only paper-transformer --seeds 1 $(ARGS)

containers: venv ## the deployment in containers and under systemd for real, timed: images, keys, crashes, an upgrade; root, podman; 15 minutes
	rm -f out/containers/figures.txt
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/deploy/test_containers.py $(ARGS)
	cat out/containers/figures.txt

dist: venv data ## wheel and sdist into dist/, tried in an empty environment: the demo runs from there (ARGS="--windows 5")
	sh deploy/release.sh dist $(BIN)/python $(DATA) $(ARGS)

format: venv ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what the targets made
	rm -rf $(VENV) $(FRAMEWORKS) .data out dist .pytest_cache .mypy_cache .ruff_cache
