package runtime

import (
	"encoding/json"
	"errors"
	"testing"

	"github.com/agentbox/agentbox/runtime/store"
)

func TestListedSpecs(t *testing.T) {
	row := func(id, text string) store.Sandbox {
		return store.Sandbox{ID: id, Spec: json.RawMessage(text)}
	}
	var s specs
	list := func(rows ...store.Sandbox) ([]Spec, []error) {
		errs := make([]error, len(rows))
		return s.of(rows, errs), errs
	}
	got, errs := list(row("a", `{"name":"x","args":["1"]}`), row("b", `{"name":"y"}`), row("c", `{"name":1}`))
	if got[0].Name != "x" || got[0].Args[0] != "1" || got[1].Name != "y" || errs[0] != nil || errs[1] != nil || !errors.Is(errs[2], ErrCorrupt) {
		t.Errorf("%+v, %v", got, errs)
	}
	first := &got[0].Args[0]
	if got, _ = list(row("a", `{"name":"x","args":["1"]}`)); &got[0].Args[0] != first {
		t.Error("it was decoded again")
	}
	if len(s.byID) != 1 {
		t.Errorf("%d are remembered of one", len(s.byID))
	}
	if got, errs = list(row("a", `{"name":"x","args":["2"]}`), row("c", `{"name":"z"}`)); got[0].Args[0] != "2" || got[1].Name != "z" || errs[1] != nil {
		t.Errorf("it has changed: %+v, %v", got, errs)
	}
}
