package proof

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

func sample() Record {
	return Record{Version: version, Tasks: []Task{
		{
			Pid: 1, Parent: 3, Group: 1, Session: 1, Cwd: "/", CwdIno: 2, Root: "/", Exe: "/bin/a", Umask: "0022",
			Pending: "200", Ignored: "1", Caught: "2", OOM: "0",
			Limits: []string{"Max open files 10 20 files"}, Timers: []string{"ID 0"},
			Threads: []Thread{{
				Tid: 1, Name: "a", Uids: "1 1 1 1", Gids: "2 2 2 2", Groups: "3", Caps: "0 0", NoPrivs: "1",
				Seccomp: "2 1", Blocked: "4", Pending: "8000", CPUs: "3",
				Slack: "50000", Policy: "0", Priority: "20", Nice: "0",
			}},
			FDs: []FD{{
				N: 3, Target: "pipe", Object: 1, Flags: 2, Pos: 5, Ino: 3, Owner: "0:0", Semaphore: true,
				Count: "3", Mask: "1", Clock: "1",
				Socket: &Socket{
					Options: map[string]string{"IP_TTL": "40"},
					Groups:  []Membership{{Interface: "lo", Group: netip.MustParseAddr("239.1.2.3"), Exclude: true}},
				},
			}},
			Locks: []Lock{{FD: 3, Kind: "POSIX", Write: true, Start: 1, End: 2, Path: "/x"}},
		},
		{Pid: 2, Parent: 1, Group: 1, Session: 1, Zombie: true},
	}}
}

// Compare finds a change of each field of a process, of its threads, descriptors and locks.
func TestCompare(t *testing.T) {
	if got := Compare(sample(), sample()); len(got) != 0 {
		t.Errorf("the same: %v", got)
	}
	change := func(name string, to func(*Task)) {
		got := sample()
		to(&got.Tasks[0])
		if Compare(sample(), got) == nil {
			t.Errorf("a change of %s is not found", name)
		}
	}
	each := func(of string, at func(*Task) reflect.Value, but ...string) {
		kind := at(&sample().Tasks[0]).Type()
		for i := range kind.NumField() {
			f := kind.Field(i)
			skip := !f.IsExported()
			for _, b := range but {
				skip = skip || f.Name == b
			}
			if skip {
				continue
			}
			change(of+" "+f.Name, func(task *Task) {
				switch v := at(task).Field(i); v.Kind() {
				case reflect.String:
					v.SetString(v.String() + "x")
				case reflect.Int, reflect.Int64:
					v.SetInt(v.Int() + 7)
				case reflect.Uint64:
					v.SetUint(v.Uint() + 8)
				case reflect.Bool:
					v.SetBool(!v.Bool())
				case reflect.Pointer:
					v.Set(reflect.New(v.Type().Elem()))
				case reflect.Slice:
					v.Set(reflect.Zero(v.Type()))
				default:
					t.Fatalf("field %s of kind %s", f.Name, v.Kind())
				}
			})
		}
	}
	each("a process", func(task *Task) reflect.Value { return reflect.ValueOf(task).Elem() }, "Stopped", "TTY")
	each("a thread", func(task *Task) reflect.Value { return reflect.ValueOf(&task.Threads[0]).Elem() })
	each("a descriptor", func(task *Task) reflect.Value {
		return reflect.ValueOf(&task.FDs[0]).Elem()
	}, "Watched", "TTY")
	// Which descriptor of its file a lock is shown with says nothing.
	each("a lock", func(task *Task) reflect.Value { return reflect.ValueOf(&task.Locks[0]).Elem() }, "FD")
	change("the threads", func(task *Task) { task.Threads = append(task.Threads, Thread{Tid: 9}) })
	change("the descriptors", func(task *Task) { task.FDs = append(task.FDs, FD{N: 9}) })
	change("the locks", func(task *Task) { task.Locks = append(task.Locks, Lock{Kind: "FLOCK"}) })
	for _, is := range []string{"2 0", "2 3", "0 0", "1 2", "2"} {
		change("the filters to "+is, func(task *Task) { task.Threads[0].Seccomp = is })
	}
	laid := sample()
	laid.Tasks[0].Threads[0].Seccomp = "2 2"
	if got := Compare(sample(), laid); len(got) != 0 {
		t.Errorf("a filter that a restore lays over the others: %v", got)
	}
	more := sample()
	more.Tasks = append(more.Tasks, Task{Pid: 9})
	if Compare(sample(), more) == nil || Compare(more, sample()) == nil {
		t.Error("one process more, or less, is not found")
	}
}

func TestReadWrite(t *testing.T) {
	dir := t.TempDir()
	if _, err := Read(dir); !errors.Is(err, fault.ErrNotFound) {
		t.Errorf("none: %v", err)
	}
	want := sample()
	want.Queues.Datagrams = []Datagram{{
		Pid: 1, FD: 2, From: netip.MustParseAddrPort("127.0.0.1:1"),
		To: netip.MustParseAddrPort("[::1]:2"), Data: []byte{0, 255},
	}}
	if err := want.Write(dir); err != nil {
		t.Fatal(err)
	}
	if got, err := Read(dir); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("read %+v, %v; want %+v", got, err, want)
	}
	for _, text := range []string{"", "{", `{"version":9}`, `{"version":1,"tasks":[{"pid":"x"}]}`} {
		if err := os.WriteFile(filepath.Join(dir, File), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Read(dir); !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// Locks are shown by the kernel at each descriptor of their file; the one kept is one
// by which they can be had again.
func TestAddLocks(t *testing.T) {
	task := Task{}
	line := []string{"1: POSIX  ADVISORY  WRITE 7 00:27:9 5 14"}
	task.addLocks(FD{N: 3, Target: "/x", Flags: 0}, line)
	task.addLocks(FD{N: 4, Target: "/x", Flags: 2}, line)
	task.addLocks(FD{N: 5, Target: "/x", Flags: 0}, line)
	task.addLocks(FD{N: 6, Target: "/y", Flags: 0}, []string{"1: POSIX  ADVISORY  READ 7 00:27:10 0 EOF"})
	want := []Lock{{4, "POSIX", true, 5, 14, "/x"}, {6, "POSIX", false, 0, -1, "/y"}}
	if !reflect.DeepEqual(task.Locks, want) {
		t.Errorf("%+v, want %+v", task.Locks, want)
	}
}

func TestProcAddr(t *testing.T) {
	for text, want := range map[string]string{
		"0100007F:1F90":                         "127.0.0.1:8080",
		"00000000000000000000000001000000:0016": "[::1]:22",
		"0000000000000000FFFF00000100007F:0050": "127.0.0.1:80",
	} {
		if got := procAddr(text).String(); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}

// The checksum of a datagram together with itself is 0.
func TestChecksum(t *testing.T) {
	d := Datagram{From: netip.MustParseAddrPort("[::1]:1"), To: netip.MustParseAddrPort("[::1]:2"), Data: []byte("odd")}
	p := d.packet6()
	sum := append(append([]byte{}, p[8:40]...), 0, 0, 0, byte(len(p)-40), 0, 0, 0, 17)
	if got := checksum(append(sum, p[40:]...)); got != 0xffff && got != 0 {
		t.Errorf("%#x", got)
	}
}

// FuzzRead has a record that comes from anywhere neither crash nor hang.
func FuzzRead(f *testing.F) {
	f.Add([]byte(`{"version":1,"tasks":[{"pid":1,"fds":[{"n":1}]}],"queues":{"datagrams":[{"from":"1.2.3.4:5","to":"[::]:1"}]}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, File), data, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := Read(dir)
		if err == nil {
			Compare(r, sample())
			Compare(sample(), r)
			r.Lost()
			for _, d := range r.Queues.Datagrams {
				if d.From.IsValid() && d.To.IsValid() {
					d.packet6()
				}
			}
		}
	})
}
