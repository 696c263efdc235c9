#!/usr/bin/env bash
# Runs `go test` and, when it fails, says once more at the very end which tests
# did, with the beginning of each of their messages: much is printed in between.
set -uo pipefail
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# A signal that is ignored here, as SIGHUP under nohup, would be ignored in sandboxes that tests send it to.
env --default-signal "$@" 2>&1 | tee "$log"
status=$?
[ "$status" = 0 ] || awk '
	/^ *--- (FAIL|PASS|SKIP)/ { failed = /FAIL/; left = 0 }
	failed && /^ *--- FAIL/ { print ""; print; next }
	/^panic: |^fatal error: |WARNING: DATA RACE|^# .*build failed|\[(build|setup) failed\]$/ { print; left = 6; next }
	failed && /^ +[A-Za-z0-9_]+_test\.go:[0-9]+: / { left = 4 }
	left > 0 { left--; print substr($0, 1, 500) }
	/^(FAIL|ok|\?)\t/ { failed = left = 0 }
' "$log"
exit "$status"
