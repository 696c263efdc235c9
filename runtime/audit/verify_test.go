package audit

import "testing"

func TestReportErr(t *testing.T) {
	for n, want := range map[int]string{1: "the audit log is corrupt: 1 finding", 2: "the audit log is corrupt: 2 findings"} {
		if got := (Report{Findings: make([]Finding, n)}).Err().Error(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
