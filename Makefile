# Everything sets itself up: `make test` and `make demo` need Python 3.11+ and, for the native code, a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: test lint types pytest browser demo docs bench attack sanitize emulate pins clean

test: lint types emulate pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

pytest: $(READY) browser
	PINSCHER_REQUIRE_NATIVE=1 $(BIN)/pytest

# The report's page is tested in Chromium. Where it cannot be installed here, those tests fail and say what is missing.
browser:
	@if ! { command -v chromium && command -v chromedriver; } >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update --quiet=2 && DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends \
			chromium chromium-driver fonts-dejavu-core || echo "chromium could not be installed"; \
	fi

demo: $(READY)
	$(BIN)/pinscher prune --overwrite

# The site, strictly: a link that leads nowhere is an error. It needs no network, neither here nor where it is read.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo build/site/index.html

bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/threshold.py --output benchmarks/results/threshold.txt
	$(BIN)/python benchmarks/step_overhead.py --output benchmarks/results/step_overhead.txt
	$(BIN)/python benchmarks/coders.py --output benchmarks/results/coders.txt
	$(BIN)/python benchmarks/storage.py --output benchmarks/results/storage.txt
	$(BIN)/python benchmarks/loading.py --output benchmarks/results/loading.txt

# Everything that may go wrong, on purpose and for longer than the tests do: mutated stored models, runs killed at every
# stage, damage to every file of a run folder, bad values of every setting.
# ATTACK_SECONDS bounds each of six attacks: about ten minutes on two cores. With 7200 all end by themselves: 10,000
# mutants, 200 kills, every file.
ATTACK_SECONDS ?= 200
attack: $(READY)
	$(BIN)/python tests/attack/everything.py --seconds $(ATTACK_SECONDS)

# The kernels and the decoder under AddressSanitizer and UBSan, then their threads under ThreadSanitizer; needs only a C++
# compiler.
CHECK = $(CXX) -std=c++17 -O1 -g -Wall -Wextra -fno-sanitize-recover=all -Inative \
	$(filter-out native/bindings%,$(wildcard native/*.cpp)) -lpthread -ldl
sanitize:
	mkdir -p build
	$(CHECK) -fsanitize=address,undefined -o build/check
	build/check
	$(CHECK) -fsanitize=thread -o build/check_threads
	build/check_threads

# The kernels of processors that this machine is not: NEON with and without dot products, and AVX2 without AVX-512 or VNNI.
# Under QEMU, whose x86_64 has no AVX-512; less than a minute in all.
FOREIGN = aarch64-linux-gnu-g++ qemu-aarch64-static qemu-x86_64-static
EMULATED = -std=c++17 -O2 -Wall -Wextra -Wno-maybe-uninitialized -Inative \
	$(filter-out native/bindings%,$(wildcard native/*.cpp)) -lpthread -ldl
emulate:
	@if ! which $(FOREIGN) >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update --quiet=2 && DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends \
			qemu-user-static g++-aarch64-linux-gnu libc6-dev-arm64-cross libstdc++-12-dev-arm64-cross; \
	fi
	@for tool in $(FOREIGN); do command -v $$tool >/dev/null || { \
		echo "$$tool is missing and could not be installed: apt-get install qemu-user-static g++-aarch64-linux-gnu"; exit 1; }; \
	done
	mkdir -p build
	aarch64-linux-gnu-g++ $(EMULATED) -o build/check_aarch64
	qemu-aarch64-static -L /usr/aarch64-linux-gnu -cpu max build/check_aarch64 quick neondot neon
	qemu-aarch64-static -L /usr/aarch64-linux-gnu -cpu cortex-a72 build/check_aarch64 quick neon
	$(CXX) $(EMULATED) -o build/check_x86_64
	qemu-x86_64-static -cpu max build/check_x86_64 quick avx2

$(READY): pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# constraints.txt anew: the newest versions that pyproject.toml's ranges allow, torch as it is. Run the tests before
# committing it.
pins:
	mkdir -p build && rm -rf build/pins && $(PYTHON) -m venv build/pins
	grep '^torch==' constraints.txt > build/torch.txt
	build/pins/bin/python -m pip install --quiet --disable-pip-version-check -c build/torch.txt -e '.[dev,bench,meteor]'
	{ sed -n '/^#/p' constraints.txt; cat build/torch.txt; \
		build/pins/bin/python -m pip freeze --exclude-editable | grep -iv '^torch=='; } > build/constraints.txt
	mv build/constraints.txt constraints.txt

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
