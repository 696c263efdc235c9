#!/usr/bin/env bash
# Proves the README from nothing: in a minimal Debian 12 and Debian 13 (see fresh-root.sh), with the tree as git has it,
# its first commands as they are written there, and nothing else. What was not committed is not part of it.
# bin/fresh/SUITE.log has all they said, bin/fresh/report.md the minutes and megabytes of each.
#
# usage: fresh.sh [--suite SUITE]... [--command COMMAND]... [--mirror URL]
#   --suite     bookworm, trixie or another (default: both)
#   --command   this instead of the README's; as often as you like
set -euo pipefail
cd "$(dirname "$0")/.."

suites=() commands=() options=()
while (($#)); do
	case $1 in
	--suite) suites+=("${2:?}") && shift ;;
	--command) commands+=("${2:?}") && shift ;;
	--mirror) options+=(--mirror "${2:?}") && shift ;;
	--help | -h)
		sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
		exit 0
		;;
	*)
		echo "fresh.sh: unknown argument $1; see --help" >&2
		exit 2
		;;
	esac
	shift
done
((${#suites[@]})) || suites=(bookworm trixie)
if ((${#commands[@]} == 0)); then
	mapfile -t commands < <(awk '/^## / { exit } /^    / { sub(/ *#.*/, ""); sub(/^ */, ""); print }' README.md)
	((${#commands[@]})) || { echo "fresh.sh: the README begins with no commands" >&2 && exit 1; }
fi

mkdir -p bin/fresh
report=bin/fresh/report.md
printf '%s on %s\n\n| suite | command | result | minutes | MB |\n| --- | --- | --- | --- | --- |\n' \
	"$(git -c safe.directory="$PWD" describe --tags --always)" "$(uname -sr)" >"$report"
status=0
for suite in "${suites[@]}"; do
	echo "==> $suite: ${commands[*]}; the log is bin/fresh/$suite.log"
	scripts/fresh-root.sh --tree --report "$report" "${options[@]}" "$suite" "${commands[@]}" >"bin/fresh/$suite.log" 2>&1 || {
		status=1
		tail -n 40 "bin/fresh/$suite.log"
		echo "==> $suite: FAILED"
	}
done
cat "$report"
exit "$status"
