GO          ?= go
ADAPTERS    := console resiliencegrpc resilienceotel resiliencepgx resilienceredis
MODULES     := . $(ADAPTERS) examples internal/benchmarks internal/integration internal/tools
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
FUZZTIME    ?= 10000x
ROUNDS      ?= 7
BENCHTIME   ?= 60ms
SOAK        ?= 60s
PKG         ?= breaker
VERSION     ?= v0.1.0

# The race detector is for the library: SQLite is C that was translated to Go, under it some
# 20 times slower, and locked by database/sql. What lint has vetted is not vetted again.
RACE := -race -vet=off -gcflags=modernc.org/...=-race=false

.PHONY: help test race lint tidy bench fuzz integration mutants soak histories prove release-check examples ci

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-14s %s\n", $$1, $$2}'

test: ## the tests of the library, as the README has it, and of the nested modules
	go test ./... $(ADAPTERS:%=./%/...)

race: ## the same under the race detector
	$(GO) test $(RACE) -timeout 25m ./... $(ADAPTERS:%=./%/...)

lint: ## gofmt, vet, staticcheck and the length of lines in every module; the root builds for 32 bits
	@unformatted=$$(gofmt -l .); if [ -n "$$unformatted" ]; then echo "gofmt would change:"; echo "$$unformatted"; exit 1; fi
	@find . -name '*.go' ! -name '*_test.go' ! -name '*.pb.go' ! -name generate.go -exec \
		awk 'length > 120 {print FILENAME ":" FNR ": longer than 120 characters"; bad = 1} END {exit bad}' {} +
	$(GO) vet $(MODULES:%=./%/...)
	$(GO) run $(STATICCHECK) $(MODULES:%=./%/...)
	GOARCH=386 $(GO) build ./...

tidy: ## go.mod and go.sum of every module are as they should be
	@set -e; for m in $(MODULES); do echo "tidy $$m"; (cd $$m && GOWORK=off $(GO) mod tidy -diff); done

bench: ## measure side by side with the peers and put the tables into docs/BENCHMARKS.md
	cd internal/benchmarks && $(GO) test -run '^TestFigures$$' -timeout 90m -figures ../../FIGURES.md -rounds $(ROUNDS) -benchtime $(BENCHTIME)
	@awk '/<!-- figures -->/ {print; while ((getline line < "FIGURES.md") > 0) print line; skip = 1} /<!-- end of figures -->/ {skip = 0} !skip' docs/BENCHMARKS.md > FIGURES.new && mv FIGURES.new docs/BENCHMARKS.md && rm FIGURES.md

# By count, since Go 1.26 fails at random what is fuzzed for a time: go.dev/issue/75804.
fuzz: ## each fuzz target for FUZZTIME inputs
	@grep -roE '^func Fuzz[A-Za-z0-9]+' --include='*_test.go' . | sort | sed -E 's|/[^/]*:func | |' | while read -r pkg target; do \
		echo "fuzz $$pkg $$target"; \
		$(GO) test -run '^$$' -fuzz "^$$target$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 100x $$pkg || exit 1; \
	done

integration: ## against real Redis, Redis Cluster, PostgreSQL, MariaDB and SQLite
	cd internal/integration && $(GO) test $(RACE) -timeout 25m ./...

release-check: ## the modules build from a local module proxy in VERSION, as a user has them
	internal/release/check.sh $(VERSION)

mutants: FOR ?= 10m
mutants: ## small faults put into PKG, one at a time, for FOR: does a test notice?
	$(GO) run ./internal/tools/mutants -for $(FOR) ./$(PKG)

soak: ## a program with every pattern through every fault, for SOAK
	cd internal/integration && $(GO) test -count=1 -run '^TestSoak' -timeout 30m -v ./soak -soak.for $(SOAK)

histories: FOR ?= 60s
histories: ## what processes did to real servers, for FOR, judged by models; and mutants of the library that the models must find
	cd internal/integration && $(GO) test -count=1 -timeout 60m -v ./history -history.for $(FOR) -history.mutants

prove: PROVE ?= 10m
prove: ## for PROVE: histories, simulations with new seeds, fuzz targets, and mutants; with ARGS=-controls known mistakes, too
	$(GO) run ./internal/tools/prove -for $(PROVE) $(ARGS)

examples: ## the tests of the examples and of the tools, and one pass of each benchmark
	cd examples && $(GO) test ./...
	cd internal/tools && $(GO) test ./...
	cd internal/benchmarks && $(GO) test -run '^$$' -bench . -benchtime 1x ./...

ci: lint test race fuzz examples integration tidy ## all of it
