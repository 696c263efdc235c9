// Package crlog explains why a dump or restore failed: Diagnose reads CRIU's log and returns the
// cause in words, with a hint.
//
// CRIU reports errors in its log only; the RPC answer that the OCI runtime passes on is "criu
// failed: type NOTIFY errno 0". The log has several errors, most of them consequences, so a table
// ranks the known ones; a line that no rule knows is reported as it stands. The text comes from
// processes that may be hostile (paths, names), so it is bounded and made printable.
//
// It is separate from package criu because the OCI runtime wrapper needs it too, and must start
// in a few milliseconds.
package crlog

import (
	"bufio"
	"bytes"
	"io"
	"os"
	"regexp"
	"strings"
	"sync"
	"unicode"
)

// Diagnosis is the cause of a failure.
type Diagnosis struct {
	Code   string `json:"code"`             // stable, e.g. "tcp"; "unknown" when no rule knows the line
	Reason string `json:"reason,omitempty"` // words for a person; empty when the log names no error
	Line   string `json:"line,omitempty"`   // the line of the log that says so
	Hint   string `json:"hint,omitempty"`   // what to do, a sentence; may be empty
}

// Unknown is the Code of a failure that no rule knows.
const Unknown = "unknown"

const (
	maxLine = 4 << 10 // bytes of a line that are looked at
	maxSpan = 4 << 20 // bytes looked at at either end of a log
	maxText = 400     // characters of a line that are reported
)

// File diagnoses the log at path. A hanging restore can leave a log of many
// gigabytes, so only its beginning and its end are read.
func File(path string) (Diagnosis, error) {
	f, err := os.Open(path)
	if err != nil {
		return Diagnosis{Code: Unknown}, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return Diagnosis{Code: Unknown}, err
	}
	var r io.Reader = f
	if st.Size() > 2*maxSpan {
		r = io.MultiReader(io.NewSectionReader(f, 0, maxSpan), strings.NewReader("\n"),
			io.NewSectionReader(f, st.Size()-maxSpan, maxSpan))
	}
	return Diagnose(r), nil
}

// Diagnose reads a log of CRIU. It looks at the first 8 MiB only.
func Diagnose(r io.Reader) Diagnosis {
	var (
		best  Diagnosis
		rank  = len(rules()) // of best; smaller is better
		first string         // the first error that no rule knows
	)
	in := bufio.NewReaderSize(io.LimitReader(r, 2*maxSpan), maxLine)
	for {
		raw, err := in.ReadSlice('\n')
		for err == bufio.ErrBufferFull { // the rest of an overlong line
			_, err = in.ReadSlice('\n')
		}
		if line := bytes.TrimSpace(raw); interesting(line) {
			for i, rule := range rules()[:rank] {
				if m := rule.re.FindSubmatchIndex(line); m != nil {
					rank = i
					best = Diagnosis{
						Code:   rule.code,
						Reason: oneLine(rule.re.Expand(nil, []byte(rule.reason), line, m)),
						Line:   oneLine(line),
						Hint:   rule.hint,
					}
					break
				}
			}
			if first == "" && bytes.Contains(line, []byte("Error")) && !consequence(line) {
				first = oneLine(line)
			}
		}
		if err != nil {
			break
		}
	}
	if best.Code != "" {
		return best
	}
	if first != "" {
		return Diagnosis{Code: Unknown, Reason: message(first), Line: first}
	}
	return Diagnosis{Code: Unknown}
}

func interesting(line []byte) bool {
	return bytes.Contains(line, []byte("Error")) || bytes.Contains(line, []byte("Warn"))
}

// consequence reports whether an error follows from another one, or from nothing.
func consequence(line []byte) bool {
	for _, s := range []string{
		"RLIMIT_NOFILE for self", // CRIU goes on without
		"exited, status=",
		"Dump files (pid:",
		"Dump core (pid:",
		"Dumping FAILED",
		"Restoring FAILED",
		"cgroupd: recv req error",
		"Message reply from daemon is trimmed",
		"Unable to detach from",
		"Unable to open fd=",
		"Can't fixup VMA's fd",
		"Continue after SIGSTOP", // a child process that a killed CRIU has left, see package host
	} {
		if bytes.Contains(line, []byte(s)) {
			return true
		}
	}
	return false
}

// message strips time, process and source position off a line.
func message(line string) string {
	if _, after, ok := strings.Cut(line, "): "); ok {
		return after
	}
	return line
}

func oneLine(b []byte) string {
	s := strings.Map(func(r rune) rune {
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			if r == '\t' {
				return ' '
			}
			return '?'
		}
		return r
	}, string(b))
	if cut := []rune(s); len(cut) > maxText {
		s = string(cut[:maxText]) + "..."
	}
	return strings.TrimSpace(s)
}

type rule struct {
	code   string
	re     *regexp.Regexp
	reason string // $1 is what the pattern caught
	hint   string
}

// rules are compiled when first needed: the wrapper starts far more often than a restore fails.
var rules = sync.OnceValue(func() []rule {
	compiled := make([]rule, len(table))
	for i, t := range table {
		compiled[i] = rule{t[0], regexp.MustCompile(t[1]), t[2], t[3]}
	}
	return compiled
})
