#!/usr/bin/env bash
# Runs every fuzz target of the repository, or those whose name matches $1, for
# FUZZTIME each (90s), of which little goes into making inputs shorter. What
# crashes one is kept as a seed below its package's testdata/fuzz; the exit code
# is 1 then.
set -euo pipefail
cd "$(dirname "$0")/.."
export CGO_ENABLED=0 GOFLAGS="${GOFLAGS:--buildvcs=false}"
# Go ends its workers without their temporary directories.
TMPDIR=$(mktemp -d)
export TMPDIR
trap 'rm -rf --one-file-system "$TMPDIR"' EXIT
failed=0
while read -r dir name; do
	printf '%s %s\n' "$dir" "$name"
	go test -vet=off -tags failpoint -run '^$' -fuzz "^$name\$" -fuzztime "${FUZZTIME:-90s}" -fuzzminimizetime 100x "$dir" || failed=1
done < <(grep -rnoE '^func Fuzz\w+' --include='*_test.go' . | sed -E 's|/[^/]+:[0-9]+:func | |' | sort | grep -E "${1:-}")
exit "$failed"
