GO          ?= go
MODULE      := github.com/go-resilience/resilience
ADAPTERS    := console resilienceetcd resiliencegrpc resiliencek8s resilienceotel resiliencepgx resilienceredis sagatemporal
MODULES     := . $(ADAPTERS) examples internal/benchmarks internal/integration internal/tools
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
FUZZTIME    ?= 5000x
ROUNDS      ?= 7
BENCHTIME   ?= 60ms
SOAK        ?= 60s
PKG         ?= breaker
VERSION     ?= v0.1.0

.PHONY: help test race race-soak lint tidy bench fuzz integration rest mutants soak histories engines harm prove release-check examples ci

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-14s %s\n", $$1, $$2}'

# What each rule of the library holds, with all rounds of the models and the simulations.
test: ## the tests of the library, as the README has it
	go test ./...

# Data races, with fewer rounds of what is random: a round takes ten times the CPU of a plain one. The
# adapters run here alone. resilienceetcd has no goroutine and no lock, and the server that its tests start
# takes minutes to build with the detector. TestContinuesAsNew of sagatemporal has 1,000 steps, and 200 if it is short.
race: ## under the race detector: the short tests of what has goroutines or locks, and the nested modules
	$(GO) test -race -short -timeout 25m $$(grep -rlE '"sync[/"]|httptest|\<go func' --include='*.go' . | \
		grep -vE '^\./(docs|examples|internal/(benchmarks|engines|integration|tools)|console|resilience(etcd|grpc|k8s|otel|pgx|redis)|sagatemporal)/|/testdata/' | \
		xargs -n1 dirname | sort -u) $(patsubst %,./%/...,$(filter-out resilienceetcd,$(ADAPTERS)))
	$(GO) test ./resilienceetcd/...
	$(GO) test -run '^TestContinuesAsNew$$' ./sagatemporal

# What no test sees: unused code, 32 bits. Staticcheck reads the sources of all that a package links: for the
# SDKs of the other modules, minutes.
lint: ## gofmt, the length of lines and vet in every module; staticcheck in those that are published; 32 bits
	@unformatted=$$(gofmt -l .); if [ -n "$$unformatted" ]; then echo "gofmt would change:"; echo "$$unformatted"; exit 1; fi
	@find . -name '*.go' ! -name '*.pb.go' ! -name generate.go -exec \
		awk 'length > 120 {print FILENAME ":" FNR ": longer than 120 characters"; bad = 1} END {exit bad}' {} +
	$(GO) vet $(MODULES:%=./%/...)
	$(GO) run $(STATICCHECK) ./... $(ADAPTERS:%=./%/...)
	GOARCH=386 $(GO) build -gcflags='all=-N -l' ./...

tidy: ## go.mod and go.sum of every module are as they should be
	@echo $(MODULES) | xargs -n 1 -P 4 sh -c 'cd "$$0" && GOWORK=off $(GO) mod tidy -diff || { echo "$$0 is not tidy"; exit 1; }'

bench: ## measure side by side with the peers and put the tables into docs/BENCHMARKS.md
	cd internal/benchmarks && $(GO) test -run '^TestFigures$$' -timeout 90m -figures ../../FIGURES.md -rounds $(ROUNDS) -benchtime $(BENCHTIME)
	@awk '/<!-- figures -->/ {print; while ((getline line < "FIGURES.md") > 0) print line; skip = 1} /<!-- end of figures -->/ {skip = 0} !skip' docs/BENCHMARKS.md > FIGURES.new && mv FIGURES.new docs/BENCHMARKS.md && rm FIGURES.md

# What nobody thought of: inputs that parsers and models have not seen. By count, since Go 1.26 fails at
# random what is fuzzed for a time: go.dev/issue/75804. The paths that an input takes are seen in this
# module alone: go test -fuzz would build all that it links anew.
fuzz: ## each fuzz target for FUZZTIME inputs
	@set -e; work=$$(mktemp -d); trap 'rm -r "$$work"' EXIT; \
	for dir in $$(grep -rlE '^func Fuzz' --include='*_test.go' . | xargs -n1 dirname | sort -u); do \
		$(GO) test -vet=off -c -gcflags=$(MODULE)/...=-d=libfuzzer -o "$$work/fuzz.test" $$dir; \
		for target in $$(grep -ohE '^func Fuzz[A-Za-z0-9]+' $$dir/*_test.go | cut -c6-); do \
			echo "fuzz $$dir $$target"; \
			(cd $$dir && "$$work/fuzz.test" -test.run '^$$' -test.fuzz "^$$target$$" -test.fuzztime $(FUZZTIME) \
				-test.fuzzminimizetime 100x -test.fuzzcachedir "$$work/$$target"); \
		done; \
	done

# What fakes cannot say: locks, clocks, lost connections and killed processes of real servers. The longest first: begun
# last, it would run alone at the end. TestSoak runs under the race detector, in its own target.
integration: ## against real Redis, Redis Cluster, PostgreSQL, MariaDB, SQLite and etcd; most of the time they wait
	cd internal/integration && $(GO) test -parallel 4 -timeout 25m -skip '^TestSoak$$' ./fleet ./saga ./console ./lease ./...

race-soak: ## every pattern through every fault, under the race detector
	cd internal/integration && $(GO) test -race -run '^TestSoak$$' ./soak

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

# Servers that take long to build, and that .ci/run therefore simulates. kube-apiserver is 2,000 packages: 20 minutes of
# one CPU the first time. Temporal is 1,700 packages: 16 minutes. REAL has the tests that run against kube-apiserver.
engines: REAL ?= Kubernetes
engines: APISERVER := $(CURDIR)/internal/engines/bin/kube-apiserver
engines: TEMPORAL := $(CURDIR)/internal/engines/bin/temporal
engines: ## elections on a real kube-apiserver, with the requests of client-go's leaderelection beside them; sagas on Temporal
	cd internal/engines/kubeapiserver && GOWORK=off $(GO) build -o $(APISERVER) .
	cd internal/engines/leaderelection && GOWORK=off $(GO) test -count=1 -v .
	cd internal/integration && KUBE_APISERVER=$(APISERVER) $(GO) test -count=1 -parallel 2 -timeout 20m -v -run '$(REAL)' ./lease
	cd internal/integration && KUBE_APISERVER=$(APISERVER) $(GO) test -count=1 -timeout 20m -v -run '^TestLease$$' ./history -history.for 30s
	cd internal/engines/temporal && GOWORK=off $(GO) build -o $(TEMPORAL) .
	cd sagatemporal && TEMPORAL_SERVER=$(TEMPORAL) $(GO) test -count=1 -timeout 20m -v -run '^TestServer' . -measure 500

harm: ## clients under faults, at all rates; planted mistakes; the table "Under faults" of docs/BENCHMARKS.md
	$(GO) test -count=1 -run '^TestPlantedHarms$$' ./internal/whole/harm -planted
	cd internal/benchmarks && $(GO) test -count=1 -run '^TestHarm$$' -timeout 60m . -harm ../../HARM.md
	@awk '/<!-- faults -->/ {print; while ((getline line < "HARM.md") > 0) print line; skip = 1} /<!-- end of faults -->/ {skip = 0} !skip' docs/BENCHMARKS.md > HARM.new && mv HARM.new docs/BENCHMARKS.md && rm HARM.md

prove: PROVE ?= 10m
prove: ## for PROVE: histories, simulations with new seeds, fuzz targets, and mutants; with ARGS=-controls known mistakes, too
	$(GO) run ./internal/tools/prove -for $(PROVE) $(ARGS)

# What users copy still runs, and each benchmark still compiles and ends.
examples: ## the tests of the examples and of the tools, clients under faults beside the peers, one pass of each benchmark but the longest
	$(GO) test ./examples/... ./internal/tools/...
	cd internal/benchmarks && $(GO) test -run '^TestHarm$$' .
	cd internal/benchmarks && $(GO) test -run '^$$' -bench . -skip Durable -benchtime 1x ./...

# Beside each other, tests of fleets and leases would wait for a CPU and not for their server. So integration, which
# waits most of its time, shares the CPUs only with the soak and with what depends on no clock, at the lowest priority.
ci: ## all of it; what lint vets is not vetted again
	GOFLAGS="$$($(GO) env GOFLAGS) -vet=off" $(MAKE) test race examples
	GOFLAGS="$$($(GO) env GOFLAGS) -vet=off" $(MAKE) -j3 -Otarget integration race-soak rest

rest: ## what ci runs beside integration
	nice -n 19 $(MAKE) lint fuzz tidy
