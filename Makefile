# agentbox: `make demo` and `make test` work on a fresh Debian or Ubuntu, as root.

GO      ?= go
PREFIX  ?= /usr/local
DESTDIR ?=
OUT     ?= bin
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
# Not :=, as the version is git's to tell, which `deps` may have to install first.
LDFLAGS = -s -w -X main.version=$(VERSION)
TRIM = -trimpath

# Static binaries: the wrapper doubles as the init inside sandboxes of any image.
export CGO_ENABLED = 0
# Go's own stamp fails where git refuses: in a tree of another user than root.
export GOFLAGS += -buildvcs=false
# A shell that was open before Go was installed does not have it on its PATH.
export PATH := $(PATH):/usr/local/go/bin:/usr/local/sbin:/usr/sbin:/sbin

.PHONY: all build install deps test-deps demo test test-long test-race soak rounds test-vm test-fresh test-deb lint fuzz vulncheck bench man deb clean

all: build

build:
	$(GO) build $(TRIM) -ldflags '$(LDFLAGS)' -o $(OUT)/agentbox ./cmd/agentbox
	$(GO) build $(TRIM) -ldflags '$(LDFLAGS)' -o $(OUT)/agentbox-runtime ./cmd/agentbox-runtime
	$(GO) build $(TRIM) -ldflags '$(LDFLAGS)' -o $(OUT)/docker-agentbox ./cmd/docker-agentbox

install: build man
	install -D -m 0755 bin/agentbox $(DESTDIR)$(PREFIX)/bin/agentbox
	install -D -m 0755 bin/agentbox-runtime $(DESTDIR)$(PREFIX)/bin/agentbox-runtime
	install -D -m 0755 bin/docker-agentbox $(DESTDIR)$(PREFIX)/bin/docker-agentbox
	install -d $(DESTDIR)$(PREFIX)/share/man/man1
	install -m 0644 bin/man/*.1 $(DESTDIR)$(PREFIX)/share/man/man1/

man: build
	rm -rf bin/man
	bin/agentbox man bin/man
	cp dist/man/*.1 bin/man/

deps:
	scripts/install-deps.sh

# The tests run every engine.
test-deps:
	scripts/install-deps.sh --test

demo: deps build
	scripts/demo.sh

# Failpoints are compiled in, so that tests can kill agentbox at named instants.
# Three packages at a time, even on two cores: they wait for engines, too, and each
# has its containers under a root or a daemon of its own. Those that take longest
# begin first, so that none of them is what the others wait for in the end. The
# build goes without -trimpath, or everything would be compiled once more for it.
test: TRIM =
test: test-deps build
	$(GO) vet -tags failpoint ./...
	$(GO) vet -tags 'failpoint soak vm' ./test ./test/systemd
	test -z "$$(gofmt -l .)"
	scripts/failures.sh $(GO) test -vet=off -tags failpoint -p 3 -timeout 100m ./test ./test/docker ./cmd/agentbox ./overlay ./runtime/podman ./...

# The same, each failpoint in every verb that comes by it; takes about twice as long.
test-long: export AGENTBOX_LONG = 1
test-long: test

# The service, its clients and what the engine does side by side, under Go's race
# detector, which takes a C compiler: their packages, and agentbox built with it.
test-race: test-deps
	CGO_ENABLED=1 $(GO) test -race -vet=off -tags failpoint -p 2 -timeout 25m ./runtime/api/... ./runtime/audit ./runtime/engine ./internal/...
	AGENTBOX_RACE=1 $(GO) test -vet=off -tags failpoint -timeout 25m -run '^Test(Service|Group|NestedTurns|LeaseOfConnection)' ./test

# In a Debian 13 with systemd, cgroup v2 and all capabilities; see docs/testing.md.
#   make test-vm SUITES='runtime/oci overlay' VMFLAGS='-run Limit -v'
test-vm:
	$(GO) build -o bin/test-vm ./test/vm
	bin/test-vm $(VMFLAGS) $(SUITES)

# Load and faults for SOAK=10m: 200 sandboxes, 32 clients that are killed at random. Its
# figures, which docs/reliability.md has, are printed, and written to SOAK_TABLE.
SOAK ?= 10m
soak: test-deps build
	SOAK=$(SOAK) $(GO) test -vet=off -tags 'failpoint soak' -run '^TestSoak$$' -v -timeout 30m ./test

# Four programs that work without a pause, each checkpointed and restored ROUNDS times.
ROUNDS ?= 200
rounds: test-deps build
	ROUNDS=$(ROUNDS) $(GO) test -vet=off -tags 'failpoint soak' -run '^TestRounds$$' -v -timeout 3h ./test

lint: test-deps
	test -z "$$(gofmt -l .)"
	$(GO) vet -tags failpoint ./...
	GOARCH=arm64 $(GO) vet ./...
	$(GO) run honnef.co/go/tools/cmd/staticcheck@v0.8.2 -tags failpoint ./...

# Every parser of what others wrote, one after the other.
#   make fuzz FUZZTIME=10m FUZZ=FuzzManifest
fuzz: test-deps
	FUZZTIME=$(or $(FUZZTIME),90s) scripts/fuzz.sh '$(FUZZ)'

# Of what is really called. It needs the database of the Go project, and says so when that is out of reach.
vulncheck: deps
	scripts/vulncheck.sh

# bin/deb/*.deb; ARCHES='amd64 arm64' for both.
deb:
	scripts/install-deps.sh --package
	scripts/deb.sh $(ARCHES)

# The README's commands in a Debian 12 and a Debian 13 that have nothing yet; see docs/testing.md.
#   make test-fresh FRESHFLAGS="--suite trixie --command 'make demo'"
test-fresh:
	scripts/install-deps.sh --fresh
	scripts/fresh.sh $(FRESHFLAGS)

# The package: the same bytes from another directory; installed there, upgraded, removed and purged.
test-deb:
	scripts/install-deps.sh --package --fresh
	scripts/test-deb.sh $(DEBFLAGS)

bench: build
	scripts/install-deps.sh --bench
	scripts/bench.py
	scripts/bench_store.py
	scripts/bench_images.py
	scripts/bench_workspace.py

clean:
	rm -rf bin
