# SPDX-License-Identifier: Apache-2.0
# Everything happens in .venv, build and .demo of this folder. Each step runs again only if what it depends on changed.

VENV      := .venv
PY        := $(VENV)/bin/python
GGUF      := .demo/SmolLM2-135M-Instruct.Q4_1.gguf
DEMO      := .demo/SmolLM2-135M-Instruct.q8.hsr
QUESTION  ?= What is the capital of France, and what is it known for?
SOURCES   := meson.build meson.options $(shell find runtime models py tools scripts/version.sh -type f -not -name '*.pyc')
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PYTHONDONTWRITEBYTECODE = 1
# The demo model is fetched before the tests: without it they must fail, not skip.
export HSR_REQUIRE_DEMO = 1

.PHONY: help demo test check fuzz soak bench clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo    build, install into .venv, fetch and convert a small model, and ask it a question'
	@echo '             (make demo QUESTION="..." asks yours)'
	@echo 'make test    the same preparation, then all tests'
	@echo 'make check   warnings as errors with gcc and clang, sanitizers, an old processor, aarch64'
	@echo 'make fuzz    feed damaged files to the readers for a minute'
	@echo 'make soak    random sessions on a failing disk for an hour, compared with runs in memory'
	@echo '             (make soak SOAK="--minutes 5 --seed 7" passes options on)'
	@echo 'make bench   speed of the demo model, beside llama.cpp and OpenVINO where they are installed'
	@echo '             (make bench BENCH="--depths 512,2K --repeats 1" passes options on)'
	@echo 'make clean   remove .venv, build and .demo'

demo: $(DEMO)
	@hisparse-rt generate $(DEMO) -p "$(QUESTION)" --max-tokens 96

test: $(VENV)/.installed $(GGUF)
	meson test -C build/release --quiet --print-errorlogs
	$(PY) -m pytest

check: $(VENV)/.installed $(GGUF)
	scripts/check.sh

fuzz: $(VENV)/.installed
	scripts/fuzz.sh

soak: $(VENV)/.installed
	ninja -C build/release --quiet tests/soak
	build/release/tests/soak $(SOAK)

bench: $(DEMO)
	@hisparse-rt bench $(DEMO) --peers llama.cpp,openvino --peer-model $(GGUF) $(BENCH)

clean:
	rm -rf .venv build .demo

$(VENV)/.ready: scripts/bootstrap.sh pyproject.toml
	scripts/bootstrap.sh
	@touch $@

# One release build serves the installed package and the C tests; with WERROR=1, which fails where a compiler warns, "make check" too.
$(VENV)/.installed: $(VENV)/.ready $(SOURCES)
	@echo 'building and installing hisparse_rt'
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall \
	    --config-settings=build-dir=build/release $(if $(WERROR),--config-settings=setup-args=-Dwerror=true) .
	@touch $@

$(GGUF): | $(VENV)/.ready
	@$(PY) scripts/fetch_demo.py .demo

$(DEMO): $(GGUF) | $(VENV)/.installed
	@echo 'converting the model, and calibrating it, which takes minutes'
	@hisparse-rt convert $(GGUF) $(DEMO) --dtype q8
