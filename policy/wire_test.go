package policy

import (
	"encoding/json"
	"errors"
	"reflect"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

func TestPolicyAsJSON(t *testing.T) {
	for _, name := range []string{"trusted", "default", "strict"} {
		p, err := Finder{}.Find(name)
		if err != nil {
			t.Fatal(err)
		}
		data, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		var got Policy
		if err := json.Unmarshal(data, &got); err != nil {
			t.Fatal(err)
		}
		if got.Rules.Digest() != p.Rules.Digest() || !reflect.DeepEqual(got.origin, p.origin) ||
			got.Name != p.Name || got.File != p.File {
			t.Errorf("%s: %+v, want %+v", name, got, *p)
		}
	}
	if err := json.Unmarshal([]byte(`{"name":"x","rules":{"nonsense":1}}`),
		new(Policy)); !errors.Is(err, fault.ErrInvalid) {
		t.Error(err)
	}
}
