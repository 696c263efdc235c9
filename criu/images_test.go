package criu

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	criucore "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fown"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/pstree"
	sk_inet "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-inet"
	sk_opts "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-opts"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/criu/criutest"
	"github.com/agentbox/agentbox/internal/fault"
)

func TestImages(t *testing.T) {
	ctx := context.Background()
	b, rt := start(t, criutest.Counter, nil)
	b.Until("it counts", func() bool { return b.Count() >= 2 })
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := Dump(ctx, rt, DumpOptions{ImageDir: b.Images, WorkDir: b.Work, LeaveRunning: true}); err != nil {
		t.Fatal(err)
	}
	for name, harm := range map[string]func(dir string) error{
		"no tree":      func(d string) error { return os.Remove(filepath.Join(d, "pstree.img")) },
		"no core":      func(d string) error { return os.Remove(filepath.Join(d, "core-1.img")) },
		"cut-off tree": func(d string) error { return os.Truncate(filepath.Join(d, "pstree.img"), 13) },
		"empty tree":   func(d string) error { return os.Truncate(filepath.Join(d, "pstree.img"), 8) },
		"no magic": func(d string) error {
			return os.WriteFile(filepath.Join(d, "pstree.img"),
				[]byte("12345678"), 0o600)
		},
		"huge entry":       func(d string) error { return appendWord(filepath.Join(d, "pstree.img"), 0xfffffff0) },
		"cut-off pages":    func(d string) error { return shorten(d, "pages-*.img") },
		"cut-off page map": func(d string) error { return shorten(d, "pagemap-*.img") },
		"no pages":         func(d string) error { return os.Remove(filepath.Join(d, "pages-1.img")) },
	} {
		dir := filepath.Join(t.TempDir(), "images")
		if err := os.CopyFS(dir, os.DirFS(b.Images)); err != nil {
			t.Fatal(err)
		}
		if err := CheckImages(dir); err != nil {
			t.Fatalf("whole images: %v", err)
		}
		if err := harm(dir); err != nil {
			t.Fatal(err)
		}
		_, err := Processes(dir)
		if err := errors.Join(err, CheckImages(dir)); !errors.Is(err, fault.ErrCorrupt) &&
			!errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Processes(t.TempDir()); !errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("empty directory: %v", err)
	}
}

// For the thread of a process that was not reaped, CRIU writes any number, whatever its build
// left in memory.
func TestThreadsOfZombie(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, magic uint32, entries ...proto.Message) {
		t.Helper()
		file := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, magicCommon), magic)
		for _, e := range entries {
			data, err := proto.Marshal(e)
			if err != nil {
				t.Fatal(err)
			}
			file = append(binary.LittleEndian.AppendUint32(file, uint32(len(data))), data...)
		}
		if err := os.WriteFile(filepath.Join(dir, name), file, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	process := func(pid, ppid uint32, threads ...uint32) *pstree.PstreeEntry {
		return &pstree.PstreeEntry{Pid: &pid, Ppid: &ppid, Pgid: &pid, Sid: &pid, Threads: threads}
	}
	core := func(state uint32) *criucore.CoreEntry {
		none, no, mtype := uint32(0), uint64(0), criucore.CoreEntry_X86_64
		return &criucore.CoreEntry{Mtype: &mtype, Tc: &criucore.TaskCoreEntry{
			TaskState: &state, ExitCode: &none, Personality: &none, Flags: &none, BlkSigset: &no,
			Comm: proto.String("sleep"),
		}}
	}
	write("pstree.img", magicPstree, process(1, 0, 1, 4), process(2, 1, 2760395952), process(3, 1, 0))
	write("core-1.img", magicCore, core(1))
	write("core-4.img", magicCore, core(1))
	write("core-2.img", magicCore, core(taskDead))
	write("core-3.img", magicCore, core(taskZombie))
	list, err := Processes(dir)
	want := []Process{
		{Pid: 1, Comm: "sleep", Threads: []int{1, 4}}, {Pid: 2, Ppid: 1, Comm: "sleep", Threads: []int{2}},
		{Pid: 3, Ppid: 1, Comm: "sleep", Threads: []int{3}},
	}
	if err != nil || !reflect.DeepEqual(list, want) {
		t.Errorf("%+v, %v", list, err)
	}
	if err := ContinueWaits(dir); err != nil {
		t.Error(err)
	}
}

func appendWord(path string, w uint32) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.Write(binary.LittleEndian.AppendUint32(nil, w))
	return err
}

func shorten(dir, pattern string) error {
	files, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil {
		return err
	}
	for _, f := range files {
		st, err := os.Stat(f)
		if err != nil {
			return err
		}
		if err := os.Truncate(f, st.Size()-1); err != nil {
			return err
		}
	}
	return nil
}

func FuzzReadImage(f *testing.F) {
	head := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, magicCommon), magicPagemap)
	f.Add(head)
	f.Add(append(head, 2, 0, 0, 0, 8, 1, 3, 0, 0, 0, 16, 1, 1))
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		for _, n := range []string{"pstree.img", "core-1.img", "pagemap-1.img"} {
			if err := os.WriteFile(filepath.Join(dir, n), data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		for _, err := range []error{CheckImages(dir), func() error { _, err := Processes(dir); return err }()} {
			if err != nil && strings.Contains(err.Error(), "%!") {
				t.Fatal(err)
			}
		}
	})
}

func TestOpenFiles(t *testing.T) {
	if list, err := OpenFiles(t.TempDir()); len(list) > 0 || err != nil {
		t.Errorf("no images: %v, %v", list, err)
	}
	ctx := context.Background()
	b, rt := start(t, []string{"sh", "-c",
		`exec 3>/tmp/kept 4>/tmp/deleted 5>>/tmp/log; echo hello >&3; echo bye >&4; rm /tmp/deleted
mkdir /tmp/in /tmp/left; (cd /tmp/in; exec sleep 1000) & (cd /tmp/left; rmdir /tmp/left; exec sleep 1000) & ` +
			criutest.Counter[2]}, nil)
	b.Until("it counts", func() bool { return b.Count() >= 2 })
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := Dump(ctx, rt, DumpOptions{ImageDir: b.Images, WorkDir: b.Work, LeaveRunning: true}); err != nil {
		t.Fatal(err)
	}
	list, err := OpenFiles(b.Images)
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]OpenFile{}
	for _, f := range list {
		have[f.Path] = f
	}
	for path, want := range map[string]OpenFile{
		"/tmp/kept": {Size: 6, HasSize: true, Mode: 0o100644, HasMode: true},
		"/tmp/log":  {Mode: 0o100644, HasMode: true}, // appended to: it may grow
		"/tmp/in":   {Mode: 0o040755, HasMode: true},
	} {
		if want.Path = path; have[path] != want {
			t.Errorf("%+v, want %+v", have[path], want)
		}
	}
	for _, gone := range []string{"/tmp/deleted", "/tmp/left"} {
		if f, ok := have[gone]; ok {
			t.Errorf("listed although CRIU brings it itself: %+v", f)
		}
	}
	for name, harm := range map[string]func(path string) error{
		"cut off":  func(p string) error { return os.Truncate(p, 13) },
		"no magic": func(p string) error { return os.WriteFile(p, []byte("12345678"), 0o600) },
		"huge":     func(p string) error { return os.Truncate(p, maxFileBytes+1) },
		"entry":    func(p string) error { return appendWord(p, 0xfffffff0) },
	} {
		for _, image := range []string{"files.img", "remap-fpath.img"} {
			dir := filepath.Join(t.TempDir(), "images")
			if err := os.CopyFS(dir, os.DirFS(b.Images)); err != nil {
				t.Fatal(err)
			}
			if err := harm(filepath.Join(dir, image)); err != nil {
				t.Fatal(err)
			}
			if _, err := OpenFiles(dir); !errors.Is(err, fault.ErrCorrupt) {
				t.Errorf("%s of %s: %v", name, image, err)
			}
		}
	}
}

// The addresses of sockets are told as they are, those that every network has
// and those of connections that are closed aside.
func TestAddresses(t *testing.T) {
	dir := t.TempDir()
	socket := func(family, proto, state uint32, address ...byte) proto.Message {
		var words []uint32
		for ; len(address) > 0; address = address[4:] {
			words = append(words, binary.LittleEndian.Uint32(address))
		}
		word := func(n uint32) *uint32 { return &n }
		return &fdinfo.FileEntry{Type: fdinfo.FdTypes_INETSK.Enum(), Id: word(1), Isk: &sk_inet.InetSkEntry{
			Id: word(1), Ino: word(1), Family: &family, Type: word(1), Proto: &proto, State: &state, SrcPort: word(80),
			DstPort: word(0), Flags: word(0), Backlog: word(0),
			SrcAddr: words, Fown: &fown.FownEntry{
				Uid: word(0), Euid: word(0), Signum: word(0), PidType: word(0), Pid: word(0),
			}, Opts: &sk_opts.SkOptsEntry{
				SoSndbuf: word(0), SoRcvbuf: word(0), SoSndTmoSec: new(uint64), SoSndTmoUsec: new(uint64),
				SoRcvTmoSec: new(uint64), SoRcvTmoUsec: new(uint64),
			}}}
	}
	mapped := netip.MustParseAddr("::ffff:192.0.2.3").As16()
	six := netip.MustParseAddr("2001:db8::1").As16()
	local := netip.MustParseAddr("fe80::1").As16()
	var file []byte
	for _, word := range []uint32{magicCommon, magicFiles} {
		file = binary.LittleEndian.AppendUint32(file, word)
	}
	for _, m := range []proto.Message{
		socket(2, 6, 10, 0, 0, 0, 0), socket(2, 6, 10, 127, 0, 0, 1), socket(2, 6, tcpListen, 192, 0, 2, 1),
		socket(2, 6, 1, 192, 0, 2, 2), socket(2, 6, 1, 192, 0, 2, 1),
		socket(10, 6, 1, mapped[:]...), socket(10, 17, 7, six[:]...), socket(10, 17, 7, local[:]...),
		&fdinfo.FileEntry{Type: fdinfo.FdTypes_REG.Enum(), Id: new(uint32)},
	} {
		data, err := proto.MarshalOptions{AllowPartial: true}.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		file = append(binary.LittleEndian.AppendUint32(file, uint32(len(data))), data...)
	}
	if err := os.WriteFile(filepath.Join(dir, "files.img"), file, 0o600); err != nil {
		t.Fatal(err)
	}
	for tcp, want := range map[string]string{
		"": "[192.0.2.1 192.0.2.2 192.0.2.3 2001:db8::1]", TCPClose: "[192.0.2.1 2001:db8::1]",
	} {
		if got, err := Addresses(dir, tcp); err != nil || fmt.Sprint(got) != want {
			t.Errorf("with %q: %v, %v; want %s", tcp, got, err, want)
		}
	}
	if got, err := Addresses(t.TempDir(), ""); err != nil || got != nil {
		t.Errorf("of no files: %v, %v", got, err)
	}
	if err := os.Truncate(filepath.Join(dir, "files.img"), 11); err != nil {
		t.Fatal(err)
	}
	if _, err := Addresses(dir, ""); !errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("cut off: %v", err)
	}
}
