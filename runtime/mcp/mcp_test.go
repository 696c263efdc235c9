package mcp

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"reflect"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
)

// test/mcp_test.go drives the tools against real sandboxes.

func TestEdit(t *testing.T) {
	for _, c := range []struct {
		data, old, new string
		all            bool
		want, err      string
	}{
		{data: "a b c", old: "b", new: "x", want: "a x c"},
		{data: "a b c", old: "b", new: "", want: "a  c"},
		{data: "aaa", old: "a", new: "b", all: true, want: "bbb"},
		{data: "aaa", old: "a", new: "b", err: "3 times, in line 1, 1, 1"},
		{data: "a\nb\n\na\n", old: "a\n", new: "b", err: "2 times, in line 1, 4"},
		{data: strings.Repeat("x\n", 9), old: "x", new: "y", err: "9 times, in line 1, 2, 3, 4, 5, ..."},
		{data: "a", old: "b", new: "c", err: "not in the file"},
		{data: "a\r\nb\r\n", old: "a\nb", new: "c", err: "not in the file"},
		{data: "a", old: "", new: "c", err: "old is empty"},
		{data: "a", old: "a", new: "a", err: "the same"},
		{data: strings.Repeat("a", 1<<20), old: "a", new: strings.Repeat("b", 100), all: true, err: "more than"},
	} {
		got, _, err := edit([]byte(c.data), c.old, c.new, c.all)
		if c.err == "" {
			if err != nil || string(got) != c.want {
				t.Errorf("%.20q: %q, %v; want %q", c.data, got, err, c.want)
			}
		} else if err == nil || !errors.Is(err, fault.ErrInvalid) || !strings.Contains(err.Error(), c.err) {
			t.Errorf("%.20q: %v, want %s", c.data, err, c.err)
		}
	}
	if _, _, err := edit([]byte("a\r\nb"), "a\nb", "c", false); len(fault.Hint(err)) != 1 ||
		!strings.Contains(fault.Hint(err)[0], `\r\n`) {
		t.Errorf("of line ends: %v", fault.Hint(err))
	}
}

func FuzzEdit(f *testing.F) {
	f.Add([]byte("a\nb\nc"), "b", "x", false)
	f.Add([]byte("aa\r\n\x00"), "a", "", true)
	f.Fuzz(func(t *testing.T, data []byte, old, new string, all bool) {
		before := bytes.Clone(data)
		got, n, err := edit(data, old, new, all)
		if !bytes.Equal(data, before) {
			t.Fatal("the file's content was changed in place")
		}
		if err != nil {
			if got != nil || n != 0 || !errors.Is(err, fault.ErrInvalid) {
				t.Fatalf("%q, %d, %v", got, n, err)
			}
			return
		}
		if n < 1 || n > 1 && !all || len(got) != len(data)+n*(len(new)-len(old)) {
			t.Fatalf("%d of %q replaced by %q in %q: %q", n, old, new, data, got)
		}
	})
}

func TestReadLines(t *testing.T) {
	long := strings.Repeat("x", maxLine+1) + "\n"
	huge := strings.Repeat("y", 200_000)
	for _, c := range []struct {
		data         string
		first, limit int
		text, note   string
	}{
		{data: "a\nb\nc", first: 1, limit: 10, text: "a\nb\nc"},
		{
			data: "a\nb\nc\n", first: 2, limit: 1, text: "b\n",
			note: "line 2 to 2 of a file of 6 bytes; go on with offset 3",
		},
		{data: "a\nb\nc\n", first: 3, limit: 1, text: "c\n"},
		{data: "a\nb\n", first: 4, limit: 1, note: "has only 2 lines"},
		{data: "", first: 1, limit: 1, note: "empty"},
		{data: "a\x00", first: 1, limit: 1, note: "binary"},
		{data: long + "b\n", first: 1, limit: 9, text: long[:maxLine] + "\nb\n", note: "1 lines are cut off"},
		{data: huge + "\nb", first: 2, limit: 9, text: "b"},
		{data: huge, first: 1, limit: 9, text: huge[:maxLine] + "\n", note: "1 lines are cut off"},
		{
			data: strings.Repeat("€", maxLine) + "\nb", first: 1, limit: 9,
			text: strings.Repeat("€", maxLine/3) + "\nb", note: "1 lines are cut off",
		},
	} {
		r, err := readLines(t.Context(), strings.NewReader(c.data), int64(len(c.data)), c.first, c.limit)
		if err != nil || r.text != c.text || !strings.Contains(r.note, c.note) || c.note == "" && r.note != "" {
			t.Errorf("%.10q from %d: %.40q (%d bytes), %q, %v; want %.40q (%d bytes), %q", c.data, c.first, r.text,
				len(r.text), r.note, err, c.text, len(c.text), c.note)
		}
	}
	r, err := readLines(t.Context(), strings.NewReader(strings.Repeat("0123456789\n", 10000)), 110000, 1, 1<<20)
	if err != nil || len(r.text) > maxReadText || !strings.HasSuffix(r.text, "\n") ||
		!strings.Contains(r.note, "offset 4546") {
		t.Errorf("%d bytes, %q, %v", len(r.text), r.note, err)
	}
}

func TestOutput(t *testing.T) {
	var o output
	more := o.beyond(0)
	for i := range 300_000 {
		fmt.Fprintf(&o, "%09d\n", i)
	}
	select {
	case <-more:
	default:
		t.Error("who waited for output was not told")
	}
	if o.beyond(2_999_999) != nil || o.beyond(3_000_000) == nil {
		t.Error("what is beyond the output")
	}
	text, from, end := o.page(0, 10)
	if end != 3_000_000 || from == 0 || len(o.data) > 2*keptOutput ||
		text != fmt.Sprintf("%09d\n", from/10) && from%10 == 0 {
		t.Errorf("%q from %d of %d, %d kept", text, from, end, len(o.data))
	}
	if text, _, _ := o.page(end-10, 100); text != "000299999\n" {
		t.Errorf("the end is %q", text)
	}
	if text, from, _ := o.page(end+5, 100); text != "" || from != end {
		t.Errorf("beyond the end is %q from %d", text, from)
	}
	if text, whole := o.ends("1"); whole || len(text) > maxOutput+200 || !strings.HasSuffix(text, "000299999\n") ||
		strings.Contains(text, "000000000\n") {
		t.Errorf("%d bytes, whole %v", len(text), whole)
	}
}

// A thread that acts for a user has that user's rights; no other thread does meanwhile.
func TestAs(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test acts for other users: run it as root")
	}
	// Where others than root can get to.
	dir, err := os.MkdirTemp("/dev/shm", "as")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(dir+"/roots", nil, 0o600), os.WriteFile(dir+"/groups", nil, 0o640),
		os.Chown(dir+"/groups", 0, 77), os.Mkdir(dir+"/all", 0o777), os.Chmod(dir+"/all", 0o777)); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 20 {
		uid := uint32(1000 + i)
		wg.Go(func() {
			err := as(bundle.User{UID: uid, GID: uid, Groups: []uint32{uid, 77}}, nil, func() error {
				if _, err := os.ReadFile(dir + "/roots"); !errors.Is(err, fs.ErrPermission) {
					return fmt.Errorf("root's file: %v", err)
				}
				if _, err := os.ReadFile(dir + "/groups"); err != nil {
					return err
				}
				return os.WriteFile(fmt.Sprintf("%s/all/%d", dir, uid), nil, 0o600)
			})
			if err != nil {
				t.Error(err)
			}
			if fi, err := os.Stat(fmt.Sprintf("%s/all/%d", dir, uid)); err != nil ||
				fi.Sys().(*syscall.Stat_t).Uid != uid || fi.Sys().(*syscall.Stat_t).Gid != uid {
				t.Errorf("%v, %v", fi, err)
			}
		})
		wg.Go(func() {
			if _, err := os.ReadFile(dir + "/roots"); err != nil {
				t.Error("root lost its rights:", err)
			}
		})
	}
	wg.Wait()
}

func TestOwner(t *testing.T) {
	now := ownerNow()
	part := strings.Split(now, "/")
	for owner, alive := range map[string]bool{
		now: true, part[0] + "/" + part[1] + "/1": false, "another-boot/" + part[1] + "/" + part[2]: false,
		part[0] + "/x/" + part[2]: true, "else": true,
	} {
		if ownerAlive(owner) != alive {
			t.Errorf("%s: alive is %v", owner, !alive)
		}
	}
}

func TestSurplus(t *testing.T) {
	list := func(n int, bytes, added int64) (all []runtime.Checkpoint) {
		for i := range n {
			all = append(all, runtime.Checkpoint{ID: fmt.Sprint(i), Bytes: bytes, Added: added})
		}
		return all
	}
	pinned := list(4, 10, 1)
	pinned[0].Pinned, pinned[1].Tags, pinned[2].Lease = true, []string{"good"}, "l"
	for name, c := range map[string]struct {
		all   []runtime.Checkpoint
		most  int
		bytes int64
		want  string
	}{
		"within":       {list(3, 10, 1), 3, 12, ""},
		"too many":     {list(5, 10, 1), 3, 100, "0 1"},
		"too large":    {list(5, 10, 5), 9, 20, "0 1"},
		"all but one":  {list(5, 10, 5), 9, 1, "0 1 2 3"},
		"none to take": {pinned, 1, 1, ""},
	} {
		var got []string
		for _, o := range surplus(c.all, c.all[len(c.all)-1].ID, c.most, c.bytes) {
			got = append(got, o.ID)
		}
		if s := strings.Join(got, " "); s != c.want {
			t.Errorf("%s: %q go, want %q", name, s, c.want)
		}
	}
}

// An agent grants nothing to a checkpoint from elsewhere, and has none chosen for it.
func TestNoGrants(t *testing.T) {
	for tool, want := range map[reflect.Type]int{reflect.TypeFor[restoreArgs](): 4, reflect.TypeFor[forkArgs](): 4} {
		if tool.NumField() != want {
			t.Errorf("%v has %d fields, not %d: none may be a grant", tool, tool.NumField(), want)
		}
	}
}
