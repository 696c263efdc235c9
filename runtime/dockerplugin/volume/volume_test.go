package volume_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	plugin "github.com/agentbox/agentbox/runtime/dockerplugin/volume"
	"github.com/agentbox/agentbox/runtime/volume"
)

// memory is a Store without a disk.
type memory struct {
	volumes map[string]volume.Volume
	mounts  map[string]int
}

func newMemory() *memory { return &memory{map[string]volume.Volume{}, map[string]int{}} }

func (m *memory) Create(_ context.Context, name string, opts volume.CreateOptions) error {
	if err := volume.ValidName(name); err != nil {
		return err
	}
	m.volumes[name] = volume.Volume{Name: name, From: opts.From, ReadOnly: opts.ReadOnly, Created: time.Unix(0, 0)}
	return nil
}
func (m *memory) Remove(_ context.Context, name string) error {
	delete(m.volumes, name)
	return nil
}
func (m *memory) Mount(_ context.Context, name, id string) (string, error) {
	if _, ok := m.volumes[name]; !ok {
		return "", fmt.Errorf("volume %s: %w", name, fault.ErrNotFound)
	}
	m.mounts[name+" "+id]++
	return "/mnt/" + name, nil
}
func (m *memory) Unmount(_ context.Context, name, id string) error {
	m.mounts[name+" "+id]--
	return nil
}
func (m *memory) Inspect(_ context.Context, name string) (volume.Volume, error) {
	v, ok := m.volumes[name]
	if !ok {
		return v, fmt.Errorf("volume %s: %w", name, fault.ErrNotFound)
	}
	return v, nil
}
func (m *memory) List(context.Context) (list []volume.Volume, err error) {
	for _, v := range m.volumes {
		list = append(list, v)
	}
	return list, nil
}

func call(h http.Handler, name, body string) (int, string) {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/VolumeDriver."+name, strings.NewReader(body)))
	return w.Code, strings.TrimSpace(w.Body.String())
}

// TestProtocol has each call once as dockerd makes it, and what may be wrong with it.
func TestProtocol(t *testing.T) {
	h := plugin.Handler(newMemory(), nil)
	for _, c := range []struct{ name, body, want string }{
		{"Capabilities", ``, `{"Capabilities":{"Scope":"local"},"Err":""}`},
		{"List", `{}`, `{"Err":""}`},
		{"Get", `{"Name":"ws"}`, `not found`},
		{"Create", `{"Name":"ws","Opts":{"from":"/srv","ro":""}}`, `{"Err":""}`},
		{"Create", `{"Name":"ws","Opts":{"form":"/srv"}}`, `option \"form\" is unknown`},
		{"Create", `{"Name":"ws","Opts":{"ro":"perhaps"}}`, `neither true nor false`},
		{"Create", `{"Name":"../x","Opts":null}`, `volume name`},
		{"Get", `{"Name":"ws"}`, `"Volume":{"Name":"ws","CreatedAt":"1970-01-01T00:00:00Z","Status":{"from":"/srv"`},
		{"List", ``, `"Volumes":[{"Name":"ws"`},
		{"Path", `{"Name":"ws"}`, `{"Err":""}`},
		{"Mount", `{"Name":"ws","ID":"1"}`, `{"Mountpoint":"/mnt/ws","Err":""}`},
		{"Mount", `{"Name":"no","ID":"1"}`, `not found`},
		{"Unmount", `{"Name":"ws","ID":"1"}`, `{"Err":""}`},
		{"Unmount", `{"Name":"/","ID":"1"}`, `volume name`},
		{"Remove", `{"Name":"ws"}`, `{"Err":""}`},
		{"Remove", `{"Name":"../.."}`, `volume name`},
		{"Mount", `{"Name":`, `request`},
		{"Mount", `{"Name":1}`, `request`},
		{"Mount", `{"Name":"ws"}{}`, `more than one`},
		{"Mount", `{"Name":"` + strings.Repeat("a", 2<<20) + `"}`, `too large`},
	} {
		code, got := call(h, c.name, c.body)
		if code != http.StatusOK || !strings.Contains(got, c.want) {
			t.Errorf("%s %.60s: %d %s, want %s", c.name, c.body, code, got, c.want)
		}
	}
	if code, _ := call(h, "Nonsense", ""); code != http.StatusNotFound {
		t.Errorf("an unknown call: %d", code)
	}
}

// FuzzHandler sends any body to any call of a real store: the answer is JSON,
// and nothing appears outside of the root.
func FuzzHandler(f *testing.F) {
	for _, body := range []string{
		`{"Name":"ws","Opts":{"from":"/tmp"}}`, `{"Name":"../../x"}`, `{"Name":"ws","ID":"1"}`, `{"Name":"\u0000"}`,
		`[]`, `{"Name":"a","Opts":{"ro":"1"}}`, `null`, `{"Opts":{"from":"/proc/self/cwd"}}`,
	} {
		for call := range byte(8) {
			f.Add(call, body)
		}
	}
	above, err := os.MkdirTemp("", "vf")
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = os.RemoveAll(above) })
	store, err := volume.Open(volume.Options{Root: above + "/root", Run: above + "/root/run"})
	if err != nil {
		f.Fatal(err)
	}
	h := plugin.Handler(noMounts{store}, nil)
	names := []string{"Create", "Remove", "Mount", "Unmount", "Path", "Get", "List", "Capabilities"}
	f.Fuzz(func(t *testing.T, which byte, body string) {
		code, got := call(h, names[int(which)%len(names)], body)
		var out struct{ Err *string }
		if err := json.Unmarshal([]byte(got), &out); code != http.StatusOK || err != nil || out.Err == nil {
			t.Errorf("%d %q: %v", code, got, err)
		}
		list, err := os.ReadDir(above)
		if err != nil || len(list) > 1 || len(list) == 1 && list[0].Name() != "root" {
			t.Errorf("made: %v, %v", list, err)
		}
	})
}

// noMounts keeps a fuzzer from filling the mount table, and the disk.
type noMounts struct{ *volume.Volumes }

func (n noMounts) Create(ctx context.Context, name string, opts volume.CreateOptions) error {
	if err := n.Volumes.Create(ctx, name, opts); err != nil {
		return err
	}
	return n.Remove(ctx, name)
}
