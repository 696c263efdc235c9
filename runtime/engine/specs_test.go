package engine

import (
	"encoding/json"
	"errors"
	"testing"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

func TestListedSpecs(t *testing.T) {
	row := func(id, text string) store.Sandbox {
		return store.Sandbox{ID: id, Spec: json.RawMessage(text)}
	}
	var s specs
	list := func(rows ...store.Sandbox) ([]runtime.Spec, []error) {
		errs := make([]error, len(rows))
		return s.of(rows, errs), errs
	}
	got, errs := list(row("a", `{"name":"x","args":["1"]}`), row("b", `{"name":"y"}`), row("c", `{"name":1}`))
	if got[0].Name != "x" || got[0].Args[0] != "1" || got[1].Name != "y" || errs[0] != nil || errs[1] != nil ||
		!errors.Is(errs[2], runtime.ErrCorrupt) {
		t.Errorf("%+v, %v", got, errs)
	}
	first := &got[0].Args[0]
	if got, _ = list(row("a", `{"name":"x","args":["1"]}`)); &got[0].Args[0] != first {
		t.Error("it was decoded again")
	}
	if len(s.byID) != 1 {
		t.Errorf("%d are remembered of one", len(s.byID))
	}
	if got, errs = list(row("a", `{"name":"x","args":["2"]}`), row("c", `{"name":"z"}`)); got[0].Args[0] != "2" ||
		got[1].Name != "z" || errs[1] != nil {
		t.Errorf("it has changed: %+v, %v", got, errs)
	}
	text := `{"name":"x","security":{"seccomp":"sha256:1","seccomp_profile":"{}"},"policy":{"name":"p","digest":"sha256:2","rules":{"privileged":false}}}`
	got, _ = list(row("a", text))
	if s := got[0]; s.Policy.Name != "p" || s.Policy.Digest != "sha256:2" || s.Policy.Rules != nil ||
		s.Security.Seccomp != "sha256:1" || s.Security.SeccompProfile != "" {
		t.Errorf("a list has long texts, or lacks what is to be in it: %+v", s)
	}
	if whole, err := spec(row("a", text)); err != nil || string(whole.Policy.Rules) != `{"privileged":false}` ||
		whole.Security.SeccompProfile != "{}" {
		t.Errorf("one sandbox: %+v, %v", whole, err)
	}
}
