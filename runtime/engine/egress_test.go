package engine_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

// filtering is a backend with or without network mode filtered; what it is
// told, or cannot be.
type filtering struct {
	runtime.Backend
	filters bool
	told    []string
	fail    error
}

func (f *filtering) Properties() runtime.Properties {
	p := f.Backend.Properties()
	p.Filters = f.filters
	return p
}

func (f *filtering) SetEgress(_ context.Context, _ string, rules []string) error {
	if f.fail != nil {
		err := f.fail
		f.fail = nil
		return err
	}
	f.told = rules
	return nil
}

func (f *filtering) EgressLog() string { return "" }

func newFiltering(t *testing.T) (*rig, *filtering) {
	t.Helper()
	f := &filtering{filters: true}
	return newRig(t, func(b runtime.Backend) runtime.Backend { f.Backend = b; return f }), f
}

func (r *rig) createFiltered(t *testing.T, p *policy.Policy, rules ...string) error {
	t.Helper()
	_, err := r.Create(ctx, runtime.CreateRequest{Policy: p, Spec: runtime.Spec{
		Name: "box", Image: "base", Args: []string{"true"},
		Network: runtime.Network{Mode: runtime.NetworkFiltered, Egress: rules},
	}})
	return err
}

func (r *rig) egress(t *testing.T, name string) []string {
	t.Helper()
	sb, err := r.Sandbox(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	return sb.Spec.Network.Egress
}

// TestFilteredNeedsABackend: a backend that cannot enforce rules gets no sandbox that needs
// them, whatever its source.
func TestFilteredNeedsABackend(t *testing.T) {
	r, f := newFiltering(t)
	f.filters = false
	if err := r.createFiltered(t, nil, "pypi.org 443"); !errors.Is(err, runtime.ErrUnsupported) {
		t.Errorf("create: %v", err)
	}
	f.filters = true
	if err := r.createFiltered(t, nil, "pypi.org http"); !errors.Is(err, runtime.ErrInvalid) {
		t.Errorf("create with a rule that is none: %v", err)
	}
	if err := r.createFiltered(t, nil, "PyPI.org 443"); err != nil {
		t.Fatal(err)
	}
	if got := r.egress(t, "box"); !slices.Equal(got, []string{"pypi.org 443"}) {
		t.Errorf("rules %q", got)
	}
	ck, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{})
	if err != nil {
		t.Fatal(err)
	}
	f.filters = false
	if _, err := r.Fork(ctx, "box", runtime.ForkOptions{Names: []string{"other"}, NoStart: true}); !errors.Is(err,
		runtime.ErrUnsupported) {
		t.Errorf("fork: %v", err)
	}
	if err := r.Remove(ctx, "box", runtime.RemoveOptions{Force: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: ck.ID}); !errors.Is(err,
		runtime.ErrUnsupported) {
		t.Errorf("restore: %v", err)
	}
	f.filters = true
	if _, err := r.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: ck.ID}); err != nil {
		t.Errorf("restore: %v", err)
	}
}

// TestUpdateEgress: rules that the backend refuses are not recorded, and rules that the policy
// does not cover are refused. A fork does not bring removed rules back.
func TestUpdateEgress(t *testing.T) {
	r, f := newFiltering(t)
	p, err := policy.Finder{}.Resolve("p.yaml",
		[]byte("network: {modes: [filtered], default: filtered, egress: [pypi.org, \"*.debian.org\"]}\n"))
	if err != nil {
		t.Fatal(err)
	}
	if err := r.createFiltered(t, p, "evil.org"); !errors.Is(err, runtime.ErrDenied) {
		t.Errorf("create: %v", err)
	}
	if err := r.createFiltered(t, p); err != nil {
		t.Fatal(err)
	}
	is := func(when string, want ...string) {
		t.Helper()
		if got := r.egress(t, "box"); !slices.Equal(got, want) {
			t.Errorf("%s: rules %q, want %q", when, got, want)
		}
	}
	is("at first", "pypi.org", "*.debian.org")
	f.fail = errors.New("the disk is full")
	if _, err := r.UpdateEgress(ctx, "box", runtime.EgressChange{Remove: []string{"pypi.org"}}); err == nil {
		t.Error("it is done, and the backend cannot")
	}
	is("after a failure", "pypi.org", "*.debian.org")
	if !slices.Equal(f.told, []string{"pypi.org", "*.debian.org"}) {
		t.Errorf("the backend keeps %q", f.told)
	}
	if _, err := r.UpdateEgress(ctx, "box",
		runtime.EgressChange{Add: []string{"evil.org"}}); !errors.Is(err, runtime.ErrDenied) {
		t.Errorf("%v", err)
	}
	if _, err := r.UpdateEgress(ctx, "box",
		runtime.EgressChange{Remove: []string{"evil.org"}}); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("%v", err)
	}
	rules, err := r.UpdateEgress(ctx, "box", runtime.EgressChange{
		Add: []string{"Deb.debian.org 80"}, Remove: []string{"*.debian.org", "pypi.org"},
	})
	if err != nil || !slices.Equal(rules, []string{"deb.debian.org 80"}) || !slices.Equal(f.told, rules) {
		t.Errorf("%q, %q, %v", rules, f.told, err)
	}
	is("changed", "deb.debian.org 80")
	if _, err := r.UpdateEgress(ctx, "box", runtime.EgressChange{Remove: rules}); err != nil {
		t.Fatal(err)
	}
	is("taken away")
	if _, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Fork(ctx, "box", runtime.ForkOptions{Names: []string{"other"}, NoStart: true}); err != nil {
		t.Fatal(err)
	}
	if got := r.egress(t, "other"); len(got) > 0 {
		t.Errorf("the fork has %q", got)
	}
}
