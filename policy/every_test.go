package policy

import (
	"slices"
	"strings"
	"testing"
	"time"
)

func TestParseEvery(t *testing.T) {
	for text, want := range map[string]Every{
		"":           {},
		"exec":       {Exec: true},
		"10m":        {Interval: 10 * time.Minute},
		"10m0s":      {Interval: 10 * time.Minute},
		"1s":         {Interval: time.Second},
		"exec,10m":   {true, 10 * time.Minute},
		"1d,exec":    {true, 24 * time.Hour},
		"exec,10m0s": {true, 10 * time.Minute},
	} {
		got, err := ParseEvery(text)
		if err != nil || got != want {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
		if again, err := ParseEvery(got.String()); err != nil || again != got {
			t.Errorf("%q became %q: %+v, %v", text, got.String(), again, err)
		}
	}
	for _, text := range []string{
		",", "exec,", ",exec", "exec,exec", "5m,10m", "5m,exec,5m", "0s", "999ms", "-5m", "Exec",
		"exec;5m", "exec, 5m", "never",
	} {
		if got, err := ParseEvery(text); err == nil || got != (Every{}) || !strings.Contains(err.Error(), "exec,5m") {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	if got := (Every{true, time.Hour}).Triggers(); !slices.Equal(got, []string{TriggerExec, TriggerInterval}) {
		t.Error(got)
	}
}

// TestEveryTriggers: each part has to be allowed.
func TestEveryTriggers(t *testing.T) {
	for triggers, allowed := range map[string]string{
		"": "", "exec": "exec", "interval": "5m", "exec, interval": "exec 5m exec,5m 5m,exec",
	} {
		p := resolved(t, "checkpoints: {triggers: ["+triggers+"]}")
		for _, every := range []string{"exec", "5m", "exec,5m", "5m,exec"} {
			_, findings := p.Judge(Request{Every: every})
			if ok := slices.Contains(strings.Fields(allowed), every); (Denials(findings) == nil) != ok {
				t.Errorf("triggers %q, every %q: %v", triggers, every, Denials(findings))
			}
		}
	}
	if p := resolved(t, "checkpoints: {every: '5m,exec'}"); p.Rules.Every != "exec,5m0s" {
		t.Errorf("every is %q", p.Rules.Every)
	}
}

// TestAutomaticInherited: what a policy says of the checkpoints that are kept takes
// the place of what its base says of automatic ones.
func TestAutomaticInherited(t *testing.T) {
	built := Retention{KeepLast: 100, KeepHourly: 24, KeepDaily: 7}
	for text, want := range map[string]Keeping{
		"":                                          {Automatic: built},
		"base: strict":                              {Automatic: built},
		"checkpoints: {every: 5m}":                  {Automatic: built},
		"checkpoints: {keep_last: 0}":               {Automatic: built}, // it says nothing
		"checkpoints: {keep_last: 5}":               {All: Retention{KeepLast: 5}},
		"checkpoints: {keep_last: -1}":              {All: Retention{KeepLast: -1}},
		"checkpoints: {keep_within: 1h}":            {All: Retention{KeepWithin: time.Hour}},
		"checkpoints: {max_bytes: 1g}":              {All: Retention{MaxBytes: 1 << 30}},
		"checkpoints: {automatic: {keep_last: -1}}": {Automatic: Retention{KeepLast: -1}},
		"checkpoints: {automatic: {keep_weekly: 4, keep_within: 2h}}": {Automatic: Retention{
			KeepWeekly: 4, KeepWithin: 2 * time.Hour,
		}},
		"checkpoints: {keep_daily: 3, automatic: {keep_last: 9}}": {
			All: Retention{KeepDaily: 3}, Automatic: Retention{KeepLast: 9},
		},
	} {
		p := resolved(t, text)
		if got := p.Rules.Keeping(); got != want {
			t.Errorf("%s: %+v, want %+v", text, got, want)
		}
		again, err := ParseCanonical("p", p.Rules.Canonical())
		if err != nil || again.Rules.Keeping() != want {
			t.Errorf("%s: recorded as %+v, %v", text, again.Rules.Keeping(), err)
		}
	}
	// The triggers of a sandbox that an older version has made.
	older, err := ParseCanonical("default", []byte(`{"checkpoints":{"triggers":["exec","interval"]}}`))
	if err != nil || older.Rules.Keeping() != (Keeping{}) {
		t.Errorf("%+v, %v", older, err)
	}
	for _, text := range []string{
		"checkpoints: {automatic: {keep_last: 0}}", "checkpoints: {automatic: {max_bytes: 1g}}",
		"checkpoints: {automatic: 5}",
	} {
		if _, err := (Finder{}).Resolve("p", []byte(text)); err == nil {
			t.Errorf("%s is taken", text)
		}
	}
}
