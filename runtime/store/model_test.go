package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/thorough"
)

// model is what the store must look like, kept in the simplest way.
type model struct {
	sandboxes   []Sandbox // oldest first
	checkpoints []modelCheckpoint
	intents     []Intent
}

type modelCheckpoint struct {
	c    Checkpoint
	data content
}

func (m *model) sandbox(id string) *Sandbox {
	for i := range m.sandboxes {
		if m.sandboxes[i].ID == id {
			return &m.sandboxes[i]
		}
	}
	return nil
}

// Random verbs, with the store closed and opened between them, always leave
// what the model says.
func TestModel(t *testing.T) {
	thorough.Checks(t, 40)
	ctx := context.Background()
	rapid.Check(t, func(rt *rapid.T) {
		root, err := os.MkdirTemp("", "store-model-")
		if err != nil {
			rt.Fatal(err)
		}
		defer os.RemoveAll(root)
		s, err := Open(ctx, root)
		if err != nil {
			rt.Fatal(err)
		}
		defer func() { _ = s.Close() }()
		var m model
		name := rapid.SampledFrom([]string{"a", "b", "c", "a1"})
		ckName := rapid.SampledFrom([]string{"", "x", "y"})
		anySandbox := func(rt *rapid.T) *Sandbox {
			if len(m.sandboxes) == 0 {
				rt.Skip("no sandbox")
			}
			return &m.sandboxes[rapid.IntRange(0, len(m.sandboxes)-1).Draw(rt, "sandbox")]
		}
		anyCheckpoint := func(rt *rapid.T) int {
			if len(m.checkpoints) == 0 {
				rt.Skip("no checkpoint")
			}
			return rapid.IntRange(0, len(m.checkpoints)-1).Draw(rt, "checkpoint")
		}
		want := func(rt *rapid.T, err, sentinel error) {
			if !errors.Is(err, sentinel) {
				rt.Fatalf("%v, want %v", err, sentinel)
			}
		}
		ok := func(rt *rapid.T, err error) {
			if err != nil {
				rt.Fatal(err)
			}
		}
		readyNamed := func(b, name string) bool {
			return name != "" && slices.ContainsFunc(m.checkpoints, func(x modelCheckpoint) bool {
				return x.c.SandboxID == b && x.c.Name == name && x.c.Status == Ready
			})
		}
		rt.Repeat(map[string]func(*rapid.T){
			"put": func(rt *rapid.T) {
				b := sandbox(name.Draw(rt, "name"))
				err := s.PutSandbox(ctx, b)
				if slices.ContainsFunc(m.sandboxes, func(x Sandbox) bool { return x.Name == b.Name }) {
					want(rt, err, fault.ErrExists)
					return
				}
				ok(rt, err)
				m.sandboxes = append(m.sandboxes, b)
			},
			"delete": func(rt *rapid.T) {
				b := anySandbox(rt)
				ok(rt, s.DeleteSandbox(ctx, b.ID))
				m.sandboxes = slices.DeleteFunc(m.sandboxes, func(x Sandbox) bool { return x.ID == b.ID })
			},
			"head": func(rt *rapid.T) {
				b := anySandbox(rt)
				if len(m.checkpoints) > 0 {
					b.Head = m.checkpoints[anyCheckpoint(rt)].c.ID
				}
				b.Attempt++
				ok(rt, s.SetHead(ctx, b.ID, b.Head, b.Attempt))
			},
			"checkpoint": func(rt *rapid.T) {
				b := anySandbox(rt)
				c := of(*b, ckName.Draw(rt, "name"), rapid.SampledFrom([]string{KindFiles, KindFull}).Draw(rt, "kind"))
				c.Parent = b.Head
				data := sample(rapid.Uint64().Draw(rt, "seed"), rapid.SampledFrom([]int{0, 1, 5000}).Draw(rt, "size"))
				done, err := take(ctx, s, c, data)
				if readyNamed(b.ID, c.Name) {
					want(rt, err, fault.ErrExists)
					return
				}
				ok(rt, err)
				m.checkpoints = append(m.checkpoints, modelCheckpoint{done, data})
			},
			"abort": func(rt *rapid.T) {
				b := anySandbox(rt)
				d, err := s.BeginCheckpoint(ctx, of(*b, "", KindFull))
				ok(rt, err)
				if rapid.Bool().Draw(rt, "filled") {
					ok(rt, fill(d, sample(1, 100)))
				}
				ok(rt, d.Abort(ctx, errors.New("reason")))
				c := d.row
				c.Status, c.Error = Failed, "reason"
				m.checkpoints = append(m.checkpoints, modelCheckpoint{c, content{}})
			},
			"remove": func(rt *rapid.T) {
				i := anyCheckpoint(rt)
				gone := m.checkpoints[i].c
				ok(rt, s.RemoveCheckpoint(ctx, gone.ID))
				m.checkpoints = slices.Delete(m.checkpoints, i, i+1)
				for i := range m.checkpoints {
					if m.checkpoints[i].c.Parent == gone.ID {
						m.checkpoints[i].c.Parent = gone.Parent
					}
				}
				for i := range m.sandboxes {
					if m.sandboxes[i].Head == gone.ID {
						m.sandboxes[i].Head = gone.Parent
					}
				}
			},
			"begin": func(rt *rapid.T) {
				in := Intent{Op: "op", Sandbox: NewID(), Data: []byte(`{"n":1}`)}
				in.Seq, err = s.Begin(ctx, in)
				ok(rt, err)
				m.intents = append(m.intents, in)
			},
			"update": func(rt *rapid.T) {
				if len(m.intents) == 0 {
					rt.Skip()
				}
				in := &m.intents[len(m.intents)-1]
				in.Data = []byte(fmt.Sprintf(`{"n":%d}`, rapid.Int().Draw(rt, "n")))
				ok(rt, s.Update(ctx, in.Seq, in.Data, rapid.Bool().Draw(rt, "lazy")))
			},
			"done": func(rt *rapid.T) {
				if len(m.intents) == 0 {
					rt.Skip()
				}
				ok(rt, s.Done(ctx, m.intents[0].Seq))
				m.intents = m.intents[1:]
			},
			"reopen": func(rt *rapid.T) {
				ok(rt, s.Close())
				s, err = Open(ctx, root)
				ok(rt, err)
			},
			"sweep": func(rt *rapid.T) {
				did, err := s.Sweep(ctx)
				ok(rt, err)
				if len(did) > 0 {
					rt.Fatalf("nothing was left over, yet: %v", did)
				}
			},
			"": func(rt *rapid.T) { m.check(rt, ctx, s) },
		})
	})
}

// check compares everything that can be asked.
func (m *model) check(rt *rapid.T, ctx context.Context, s *Store) {
	list, err := s.Sandboxes(ctx)
	if err != nil || len(list) != len(m.sandboxes) {
		rt.Fatalf("%d sandboxes, want %d: %v", len(list), len(m.sandboxes), err)
	}
	for i, b := range list {
		w := m.sandboxes[len(list)-1-i]
		if b.ID != w.ID || b.Name != w.Name || b.Head != w.Head || b.Attempt != w.Attempt ||
			!b.Created.Equal(w.Created) || string(b.Spec) != string(w.Spec) || b.Labels["k"] != "v" {
			rt.Fatalf("sandbox %+v, want %+v", b, w)
		}
	}
	all, err := s.Checkpoints(ctx, Filter{All: true})
	if err != nil || len(all) != len(m.checkpoints) {
		rt.Fatalf("%d checkpoints, want %d: %v", len(all), len(m.checkpoints), err)
	}
	newest := map[string]string{}
	for i, c := range all {
		x := m.checkpoints[len(all)-1-i]
		w := x.c
		if c.ID != w.ID || c.Status != w.Status || c.Name != w.Name || c.Parent != w.Parent || c.Digest != w.Digest ||
			c.Bytes != w.Bytes || c.Error != w.Error || c.Kind != w.Kind {
			rt.Fatalf("checkpoint %+v, want %+v", c, w)
		}
		if c.Status != Ready {
			continue
		}
		if err := s.VerifyCheckpoint(ctx, c.ID); err != nil {
			rt.Fatal(err)
		}
		if m.sandbox(c.SandboxID) == nil && newest[c.SandboxName] == "" {
			newest[c.SandboxName] = c.ID
		}
		if b := m.sandbox(c.SandboxID); b != nil && c.Name != "" {
			if got, err := s.Checkpoint(ctx, b.Name+"@"+c.Name); err != nil || got.ID != c.ID {
				rt.Fatalf("%s@%s is %s: %v", b.Name, c.Name, got.ID, err)
			}
		}
	}
	for _, name := range []string{"a", "b", "c", "a1"} {
		got, err := s.NewestOfName(ctx, name, true)
		if newest[name] == "" && !errors.Is(err, fault.ErrNotFound) || got.ID != newest[name] {
			rt.Fatalf("newest of %s: %s, want %s: %v", name, got.ID, newest[name], err)
		}
	}
	intents, err := s.Intents(ctx)
	if err != nil || len(intents) != len(m.intents) {
		rt.Fatalf("%d intents, want %d: %v", len(intents), len(m.intents), err)
	}
	for i, in := range intents {
		if in.Seq != m.intents[i].Seq || string(in.Data) != string(m.intents[i].Data) {
			rt.Fatalf("intent %+v, want %+v", in, m.intents[i])
		}
	}
	dirs, err := os.ReadDir(s.checkpointsDir())
	ready := 0
	for _, x := range m.checkpoints {
		if x.c.Status == Ready {
			ready++
		}
	}
	if err != nil || len(dirs) != ready+1 {
		rt.Fatalf("%d directories for %d ready checkpoints: %v", len(dirs)-1, ready, err)
	}
}
