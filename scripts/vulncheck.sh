#!/usr/bin/env bash
# Known vulnerabilities in what agentbox calls, by the Go project's govulncheck and its database.
#
# usage: vulncheck.sh [--help]
#   GOVULNDB   another copy of the database (a URL; file:// is one, too)
#
# Ends with 0: none is known. 3: there are some. 8: the database is out of reach, and nothing was checked.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
'') ;;
--help | -h)
	sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
	exit 0
	;;
*)
	echo "vulncheck.sh: unknown argument $1; see --help" >&2
	exit 2
	;;
esac

govulncheck=golang.org/x/vuln/cmd/govulncheck@v1.9.0
db=${GOVULNDB:-https://vuln.go.dev}
if ! curl -fsS --retry 2 --max-time 30 -o /dev/null "${db%/}/index/db.json"; then
	echo "vulncheck.sh: NOT CHECKED: the database at $db is out of reach (GOVULNDB names another copy)" >&2
	exit 8
fi
work=$(mktemp -d "${TMPDIR:-/tmp}/agentbox-vulncheck.XXXXXX")
trap 'rm -rf -- "$work"' EXIT
# Built first: `go run` ends with 1 whatever the program ends with.
GOBIN=$work go install "$govulncheck"
status=0
"$work/govulncheck" -db "$db" ./cmd/... || status=$?
exit "$status"
