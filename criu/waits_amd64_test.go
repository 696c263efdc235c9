package criu

import (
	"bytes"
	"context"
	"encoding/binary"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	corex86 "github.com/checkpoint-restore/go-criu/v7/crit/images/core-x86"
	criucore "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/siginfo"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/criu/criutest"
)

func TestWhichCallsAreMadeAgain(t *testing.T) {
	const p, q = 0x7ffc_0000_1000, 0xc000_0123_4560
	const none = uint64(0xffffffff)
	for name, c := range map[string]struct {
		wait
		nr          uint64 // 0: stays interrupted
		first, rest uint64 // by what the kernel goes on in a sandbox that lives on
	}{
		"sleep":                               {wait{35, p, p, 0, 0}, 35, 514, 514},
		"sleep, what is left is lost":         {wait{35, p, 0, 9, 9}, 35, 514, 516},
		"sleep, what is left is the caller's": {wait{35, p, q, 0, 0}, 0, 0, 516},
		"by a clock":                          {wait{230, 1, 0, p, p}, 230, 514, 514},
		"by a clock, lost":                    {wait{230, 0, 0, p, 0}, 230, 514, 516},
		"by a clock, the caller's":            {wait{230, 0, 0, p, q}, 0, 0, 516},
		"until an instant":                    {wait{230, 1, 1, p, p}, 0, 0, 0},
		"poll":                                {wait{7, p, 1, 1000, 0}, 0, 0, 516},
		"endless poll":                        {wait{7, p, 1, none, 0}, 7, 514, 514},
		"futex":                               {wait{202, p, 128, 0, q}, 0, 0, 516},
		"futex until an instant":              {wait{202, p, 137, 0, q}, 202, 514, 514},
		"another operation of futex":          {wait{202, p, 6, 0, q}, 0, 0, 0},
		"epoll_wait":                          {wait{232, 3, p, 1, 1000}, 0, 0, 0},
		"endless epoll_wait":                  {wait{232, 3, p, 1, none}, 232, 514, 514},
		"endless epoll_pwait":                 {wait{281, 3, p, 1, ^uint64(0)}, 281, 514, 514},
		"epoll_pwait2":                        {wait{441, 3, p, 1, q}, 0, 0, 0},
		"endless epoll_pwait2":                {wait{441, 3, p, 1, 0}, 441, 514, 514},
		"semop":                               {wait{65, 1, p, 1, 0}, 65, 514, 514},
		"semtimedop":                          {wait{220, 1, p, 1, q}, 0, 0, 0},
		"endless semtimedop":                  {wait{220, 1, p, 1, 0}, 220, 514, 514},
		"sigtimedwait":                        {wait{128, p, 0, q, 8}, 0, 0, 0},
		"sigwaitinfo":                         {wait{128, p, 0, 0, 8}, 128, 514, 514},
		"read":                                {wait{0, 3, p, 8, 0}, 0, 0, 0},
		"accept":                              {wait{43, 3, 0, 0, 0}, 0, 0, 0},
		"no call":                             {wait{^uint64(0), p, p, 0, 0}, 0, 0, 0},
		// A call that the kernel has resumed once has lost its number.
		"restarted sleep":                 {wait{219, p, p, 0, 0}, 35, 514, 514},
		"restarted sleep, lost":           {wait{219, p, 0, 0, 0}, 0, 0, 516},
		"restarted by a clock":            {wait{219, 0, 0, p, p}, 230, 514, 514},
		"restarted by a clock, lost":      {wait{219, 1, 0, p, 0}, 0, 0, 516},
		"restarted endless poll":          {wait{219, p, 2, none, q}, 7, 514, 514},
		"restarted poll":                  {wait{219, p, 2, 1000, q}, 0, 0, 516},
		"restarted poll or futex":         {wait{219, p, 128, none, q}, 0, 0, 516},
		"restarted poll or futex until":   {wait{219, p, 265, none, q}, 0, 0, 516},
		"restarted poll of none or sleep": {wait{219, p, 0, none, q}, 0, 0, 516},
	} {
		nr, _, ok := c.again()
		if !ok {
			nr = 0
		}
		if nr != c.nr {
			t.Errorf("%s: call %d is made, want %d", name, nr, c.nr)
		}
		for _, thread := range []struct {
			first bool
			want  uint64
		}{{true, c.first}, {false, c.rest}} {
			number := c.wait.nr
			got := c.result(thread.first, &number)
			if -got != thread.want || thread.want == 514 && number != c.nr {
				t.Errorf("%s: %d, call %d (first thread: %v), want %d", name, -got, number, thread.first, thread.want)
			}
		}
	}
}

func TestParseWait(t *testing.T) {
	w, ok := parseWait([]byte("230 0x1 0x0 0x7ffd00001000 0x7ffd00001010 0x0 0x0 0x7ffd00000ff0 0x46f2c5\n"))
	if want := (wait{230, 1, 0, 0x7ffd00001000, 0x7ffd00001010}); !ok || w != want {
		t.Errorf("%+v %v", w, ok)
	}
	for _, s := range []string{
		"", "running\n", "-1 0x7ffd00000ff0 0x46f2c5\n", "x 0x1 0x0 0x0 0x0 0x0 0x0 0x0 0x0\n",
		"-1 0x1 0x0 0x0 0x0 0x0 0x0 0x0 0x0\n",
	} {
		if w, ok := parseWait([]byte(s)); ok {
			t.Errorf("%q: %+v", s, w)
		}
	}
}

// In a real dump the sleeping threads are changed, and nothing else is.
func TestContinueWaitsInImages(t *testing.T) {
	ctx := context.Background()
	b, rt := start(t, []string{"sh", "-c", "sleep 1000 & i=1; " + criutest.Store +
		"; while :; do sleep 1000; done"}, nil)
	b.Until("it runs", func() bool { return b.Count() == 1 })
	b.Until("both sleep", func() bool {
		pids, err := Members(b.Pid())
		asleep := 0
		for _, p := range pids {
			data, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p), "syscall"))
			if w, ok := parseWait(data); ok && (w.nr == sysNanosleep || w.nr == sysClockNanosleep) {
				asleep++
			}
		}
		return err == nil && asleep == 2
	})
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	res, err := Dump(ctx, rt, DumpOptions{ImageDir: b.Images, WorkDir: b.Work, LeaveRunning: true})
	if err != nil || res.Interrupted != nil {
		t.Fatal(err, res.Interrupted)
	}
	if b.Status() != "paused" {
		t.Fatalf("it is %s", b.Status())
	}
	read := func(path string) *criucore.CoreEntry {
		t.Helper()
		c := &criucore.CoreEntry{}
		if err := readImage(path, magicCore, 1, func(data []byte) error {
			return proto.Unmarshal(data, c)
		}); err != nil {
			t.Fatal(err)
		}
		return c
	}
	list, err := filepath.Glob(filepath.Join(b.Images, "core-*.img"))
	if err != nil || len(list) != 3 {
		t.Fatal(list, err)
	}
	before := map[string]*criucore.CoreEntry{}
	for _, path := range list {
		before[path] = read(path)
	}
	for range 2 {
		if err := ContinueWaits(b.Images); err != nil {
			t.Fatal(err)
		}
		changed := 0
		for path, c := range before {
			now, want := read(path), proto.Clone(c).(*criucore.CoreEntry)
			if r := want.ThreadInfo.Gpregs; r.GetAx() == eintr {
				changed++
				*r.Ax = r.GetOrigAx()
				*r.Ip -= 2
			}
			if !proto.Equal(now, want) {
				t.Errorf("%s:\n%v\nwant\n%v", path, now, want)
			}
		}
		if changed != 2 {
			t.Errorf("%d sleep", changed)
		}
	}

	// A signal that would be taken leaves all as it was.
	path := filepath.Join(b.Images, "core-1.img")
	for name, c := range map[string]struct {
		signal  unix.Signal
		blocked uint64
		shared  bool
		left    bool
	}{
		"of the process": {unix.SIGUSR1, 0, true, true},
		"of the thread":  {unix.SIGALRM, 1 << (unix.SIGUSR1 - 1), false, true},
		"blocked":        {unix.SIGUSR1, 1 << (unix.SIGUSR1 - 1), true, false},
	} {
		for p, core := range before {
			w := proto.Clone(core).(*criucore.CoreEntry)
			w.ThreadInfo.Gpregs.Ax, w.ThreadInfo.Gpregs.OrigAx = proto.Uint64(eintr), proto.Uint64(sysNanosleep)
			w.ThreadInfo.Gpregs.Di, w.ThreadInfo.Gpregs.Si = proto.Uint64(1<<20), proto.Uint64(1<<20)
			queue := &siginfo.SignalQueueEntry{Signals: []*siginfo.SiginfoEntry{{Siginfo: binary.LittleEndian.AppendUint32(nil, uint32(c.signal))}}}
			w.ThreadCore.BlkSigset = &c.blocked
			if c.shared {
				w.Tc.SignalsS = queue
			} else {
				w.ThreadCore.SignalsP = queue
			}
			if err := writeCore(p, w); err != nil {
				t.Fatal(err)
			}
		}
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := ContinueWaits(b.Images); err != nil {
			t.Fatal(err)
		}
		now, err := os.ReadFile(path)
		if err != nil || bytes.Equal(data, now) != c.left {
			t.Errorf("%s: left as it was: %v, %v", name, bytes.Equal(data, now), err)
		}
	}

	// Registers of 32 bits mean other calls.
	native, compat := corex86.UserX86RegsMode_NATIVE, corex86.UserX86RegsMode_COMPAT
	for name, c := range map[string]struct {
		mode *corex86.UserX86RegsMode
		cs   uint64
		ax   uint64
		want bool
	}{
		"64 bits":        {&native, 0x33, eintr, true},
		"32 bits":        {&compat, 0x23, eintr, false},
		"another result": {&native, 0x33, 0, false},
	} {
		r := &corex86.UserX86RegsEntry{
			Mode: c.mode, Cs: &c.cs, Ax: &c.ax, OrigAx: proto.Uint64(35), Di: proto.Uint64(1 << 20),
			Si: proto.Uint64(0), Ip: proto.Uint64(0x401002),
		}
		if makeAgain(r) != c.want || c.want != (r.GetAx() == 35 && r.GetIp() == 0x401000) {
			t.Errorf("%s: %v", name, r)
		}
	}
}
