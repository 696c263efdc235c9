package crlog

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"
)

// Every log in testdata is of a real failure of CRIU under runc.
var known = map[string][2]string{ // file: code, words of the reason
	"dump-bpf":           {"unsupported-file", "file descriptor 3 is a bpf-map file"},
	"dump-enospc":        {"no-space", "no space left"},
	"dump-ghost":         {"ghost-limit", "/big (314572800 bytes)"},
	"dump-hidden":        {"hidden", "first process, 13468, hides"},
	"dump-hostfile":      {"foreign-file", "file descriptor 1 is open on /srv/c1/hostout"},
	"dump-inotify":       {"inotify", "watches a file"},
	"dump-iouring":       {"io-uring", "io_uring"},
	"dump-link":          {"link-remap", "keeps /l1 open"},
	"dump-lock":          {"file-locks", "file lock"},
	"dump-mount":         {"mount", "mounted at /mm inside"},
	"dump-mptcp":         {"mptcp", "Multipath TCP"},
	"dump-netns":         {"nested-namespace", "network namespace of its own"},
	"dump-noiptables":    {"netfilter", "iptables-restore is missing"},
	"dump-perf":          {"unsupported-file", "perf_event"},
	"dump-pidns":         {"nested-namespace", "has a pid namespace of its own"},
	"dump-ptrace":        {"unseizable", "process 30815 (bad) could not be stopped: it is ending, or a debugger"},
	"dump-secret":        {"secretmem", "secret memory"},
	"dump-sockopt":       {"criu-too-old", "too old for the kernel"},
	"dump-tcp":           {"tcp", "established TCP connection"},
	"dump-uffd":          {"unsupported-file", "userfaultfd"},
	"dump-uid":           {"rlimit", "CAP_SYS_RESOURCE"},
	"dump-unixs":         {"unix-socket", "unix socket outside the sandbox"},
	"dump-userns":        {"nested-namespace", "has a user namespace of its own"},
	"dump-vsock":         {"socket", "address family 40"},
	"restore-addrinuse":  {"address-in-use", "listened on is taken"},
	"restore-badsize":    {"changed-file", "the file /bin/conn has 772842 bytes where the processes expect 772840"},
	"restore-corrupt":    {"image-damaged", "the image core-1.img is cut off"},
	"restore-lsm":        {"lsm", "another security module"},
	"restore-missing":    {"missing-file", "the file /bin/conn that a process had open cannot be opened: No such file"},
	"restore-missingimg": {"image-damaged", "damaged or incomplete"},
	"restore-tcpflag":    {"tcp", "established TCP connections"},
}

func TestRealLogs(t *testing.T) {
	files, err := filepath.Glob("testdata/*.log")
	if err != nil || len(files) != len(known) {
		t.Fatalf("%d logs in testdata, %d known (%v)", len(files), len(known), err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".log")
		d, err := File(file)
		if err != nil {
			t.Fatal(err)
		}
		want := known[name]
		if d.Code != want[0] || !strings.Contains(d.Reason, want[1]) {
			t.Errorf("%s: %s: %q\n\twant %s: ...%q...\n\tline: %s", name, d.Code, d.Reason, want[0], want[1], d.Line)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if d.Line == "" || !strings.Contains(strings.ReplaceAll(string(text), "\t", " "), d.Line) {
			t.Errorf("%s: line %q is not one of the log", name, d.Line)
		}
	}
}

// Lines of CRIU's that no log in testdata has, and the words for them.
func TestLines(t *testing.T) {
	for line, want := range map[string][2]string{
		"(0) Error (compel/src/lib/infect.c:261): Unseizable non-zombie 77 found, state D, err -1/4":                         {"vfork", "process 77 waits inside the kernel"},
		"(0) Error (compel/src/lib/infect.c:261): Unseizable non-zombie 77 found, state S, err -1/10":                        {"unseizable", "process 77 could not be stopped"},
		"(0) Error (criu/pipes.c:490): The packetized mode for pipes is not supported yet":                                   {"packet-pipe", "keeps its messages apart"},
		"(0) Error (criu/sk-queue.c:144): skqueue: Control messages in queue, not supported":                                 {"instant", "its sender's credentials"},
		"(0) Error (criu/sk-netlink.c:77): netlink: The socket has data to read":                                             {"instant", "netlink socket"},
		"(0) Error (criu/sk-inet.c:504): inet: Can't dump corked dgram socket e1f70":                                         {"instant", "UDP_CORK"},
		"(0) Error (criu/filesystems.c:650): mqueue isn't empty":                                                             {"mqueue", "POSIX message queue"},
		"(0) Error (criu/pidfd.c:88): pidfd: PIDFD_THREAD flag is currently not supported":                                   {"pidfd-thread", "pidfd of a thread"},
		"(0) Error (criu/cr-dump.c:1550): Dump eventpoll (pid: 77) failed with -1":                                           {"epoll", "process 77 has an epoll"},
		"(0) Error (criu/pipes.c:425): Can't obtain piped data size":                                                         {"path-only", "O_PATH"},
		"(0) Error (criu/sockets.c:640): sockets: Can't get 1:39 opt: Bad file descriptor":                                   {"path-only", "O_PATH"},
		"(0) Error (criu/proc_parse.c:663): Can't handle non-regular mapping on 77's map 7f00":                               {"mapping", "process 77 has a device"},
		"(0) Error (criu/shmem.c:924): Can't open 0/map_files/7fe-7ff on procfs: No such file or directory":                  {"ipc", "only a part of a System V"},
		"(0) Error (criu/seize.c:952): Individually stopped threads not supported":                                           {"stopped-thread", "some threads"},
		"(0) Error (criu/pstree.c:969): Can't restore sub-task in NS (cflags 80)":                                            {"other-namespace", "another time namespace"},
		"(0) Error (criu/pstree.c:969): Can't restore sub-task in NS (cflags 4000000)":                                       {"other-namespace", "another namespace than"},
		"(0) Error (criu/sk-unix.c:506): unix: Non-empty write queue on an in-flight socket 0x35e":                           {"unix-in-flight", "has not been accepted yet and has data"},
		"(0) Error (criu/sk-unix.c:525): unix: Found a closed in-flight socket to 0x35e":                                     {"unix-in-flight", "has not been accepted yet"},
		"(0) Error (criu/sk-inet.c:185): inet: In-flight connection (l) for 35e":                                             {"tcp-in-flight", "just being opened"},
		"(0) Error (criu/sk-unix.c:874): unix: External socket is used. Consider using --ext-unix-sk option.":                {"unix-socket", "outside the sandbox"},
		"(0) Error (criu/sk-unix.c:418): unix: Unix socket 12 without peer 13":                                               {"unix-socket", "not in the checkpoint"},
		"(0) Error (criu/files-reg.c:1159): Can't link remap to /usr/lib/x.so: Invalid cross-device link":                    {"link-remap", "/usr/lib/x.so open"},
		"(0) Error (criu/files-reg.c:1444): Unaccessible path opened 1:2, need 3:4":                                          {"replaced-file", "another file's now"},
		"(0) Error (criu/servicefd.c:282): sfd: Can't chose service_fd_base: 19968 20031":                                    {"descriptors", "number that is too high"},
		"(0) Error (criu/file-lock.c:102): Unresolved lock found pid 5 ino 6":                                                {"file-locks", "locked by process 5"},
		"(0) Error (criu/file-lock.c:647): Can not set posix lock!":                                                          {"file-locks", "posix lock"},
		"(0) Error (criu/cr-dump.c:624): Failed obtaining futex robust list on 5":                                            {"robust-list", "robust mutexes of process 5"},
		"(0) Error (criu/seize.c:335): zombie 8 (comm x) found while seizing\n(1) Error (a): inet: In-flight connection (l)": {"tcp-in-flight", "just"},
	} {
		if d := Diagnose(strings.NewReader(line + "\n")); d.Code != want[0] || !strings.Contains(d.Reason, want[1]) {
			t.Errorf("%s\n\t%s: %q", line, d.Code, d.Reason)
		}
	}
}

// Every cause comes with what to do, in one sentence or a few.
func TestTableIsWhole(t *testing.T) {
	for _, r := range table {
		if r[0] == "" || r[2] == "" || !strings.HasSuffix(r[3], ".") {
			t.Errorf("%s: reason %q, hint %q", r[1], r[2], r[3])
		}
	}
}

func TestUnknownAndEmpty(t *testing.T) {
	d := Diagnose(strings.NewReader("(00.1) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n" +
		"(00.2) Error (criu/x.c:7): x: The frobnicator is gone\n(00.3) Error (criu/cr-dump.c:1975): Dumping FAILED.\n"))
	if d.Code != Unknown || d.Reason != "x: The frobnicator is gone" || !strings.Contains(d.Line, "criu/x.c:7") {
		t.Errorf("unknown error: %+v", d)
	}
	if d := Diagnose(strings.NewReader("(00.1) all is well\n")); d != (Diagnosis{Code: Unknown}) {
		t.Errorf("no error: %+v", d)
	}
	if d := Diagnose(strings.NewReader("(00.1) Error (criu/arch/x86/kerndat.c:48): Continue after SIGSTOP.. Urr what?\n")); d != (Diagnosis{Code: Unknown}) {
		t.Errorf("of an orphan: %+v", d)
	}
	if d := Diagnose(strings.NewReader("")); d != (Diagnosis{Code: Unknown}) {
		t.Errorf("empty: %+v", d)
	}
	if _, err := File("testdata/nosuch"); err == nil {
		t.Error("a log that is not there has no error")
	}
}

// A cause counts wherever it stands, and what it causes does not.
func TestCauseBeforeConsequence(t *testing.T) {
	d := Diagnose(strings.NewReader("(0) Error (a.c:1): tcp: Connected TCP socket, consider using --tcp-established option.\n" +
		"(1) Error (b.c:2): bfd: Error flushing image: No space left on device\n"))
	if d.Code != "no-space" {
		t.Errorf("got %+v", d)
	}
}

func TestHugeLogs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	// Sparse, so that the test costs nothing: the error is at the very end.
	if err := f.Truncate(20 << 30); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("\n(9) Error (criu/sk-inet.c:200): inet: Connected TCP socket in image\n"),
		20<<30); err != nil {
		t.Fatal(err)
	}
	d, err := File(path)
	if err != nil || d.Code != "tcp" {
		t.Fatalf("%+v, %v", d, err)
	}
}

func TestFailure(t *testing.T) {
	dir := t.TempDir()
	if _, err := ReadFailure(dir); err == nil {
		t.Error("a failure that is not there has no error")
	}
	want := Failure{Diagnosis{"tcp", "reason", "line", "hint."}, "/x/restore.log"}
	if err := want.Write(dir); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadFailure(dir); err != nil || got != want {
		t.Errorf("%+v, %v", got, err)
	}
	if err := ClearFailure(dir); err != nil {
		t.Fatal(err)
	}
	if err := ClearFailure(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadFailure(dir); err == nil {
		t.Error("it is still there")
	}
}

func FuzzDiagnose(f *testing.F) {
	for name := range known {
		text, err := os.ReadFile("testdata/" + name + ".log")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(text))
	}
	f.Add("Error (x): Can't dump ghost file \x1b[31m\xff of 7 size, increase limit")
	f.Fuzz(func(t *testing.T, log string) {
		d := Diagnose(strings.NewReader(log))
		for _, s := range []string{d.Reason, d.Line} {
			if len([]rune(s)) > 2*maxText {
				t.Fatalf("%d characters", len(s))
			}
			for _, r := range s {
				if !unicode.IsPrint(r) {
					t.Fatalf("unprintable %q in %q", r, s)
				}
			}
		}
		if d.Code == "" {
			t.Fatal("no code")
		}
	})
}
