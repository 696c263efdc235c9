package engine

import (
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

func TestPast(t *testing.T) {
	var list []runtime.Effect
	for _, s := range strings.Fields("1 2g 3!compensated 4h 5 6g 7!unknown 8h!removed 9h!failed") {
		s, status, _ := strings.Cut(s, "!")
		f := runtime.Effect{ID: s[:1], Group: s[1:], Status: runtime.EffectOutstanding}
		if status != "" {
			f.Status = status
		}
		list = append(list, f)
	}
	for newest, want := range map[string]string{
		"":  "9476251 of 0", // groups come where their newest stands
		"2": "94765 of 0",
		"3": "94765 of 1",
		"9": " of 1",
		"x": "9476251 of 0", // of another ledger: none of these was there
	} {
		due, gone := past(list, newest)
		got := ""
		for _, f := range due {
			got += f.ID
		}
		if text := got + " of " + string(rune('0'+gone)); text != want {
			t.Errorf("after %q: %s, want %s", newest, text, want)
		}
	}
}
