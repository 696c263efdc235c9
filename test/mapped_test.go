package test

import (
	"strings"
	"testing"
)

// mutexApp holds a robust mutex, and a word that the end of a thread clears, in a file that it
// has mapped; the page is dirty and stays so. It tells what unlocking and locking return.
const mutexApp = `
import ctypes, mmap, os, sys, time
libc = ctypes.CDLL(None)
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 8192)
m = mmap.mmap(fd, 8192)
os.close(fd)
attr = ctypes.create_string_buffer(64)
libc.pthread_mutexattr_init(attr)
libc.pthread_mutexattr_setpshared(attr, 1)
libc.pthread_mutexattr_setrobust(attr, 1)
lock = ctypes.byref(ctypes.c_char.from_buffer(m))
libc.pthread_mutex_init(lock, attr)
assert libc.pthread_mutex_lock(lock) == 0
m[4096:4100] = b"word"
pid = os.fork()
if pid == 0:  # shares its memory with a thread, without which nothing is cleared
    import threading
    threading.Thread(target=time.sleep, args=(100000,), daemon=True).start()
    libc.syscall(218, ctypes.byref(ctypes.c_char.from_buffer(m, 4096)))  # set_tid_address
    open("/child", "w").close()
    time.sleep(100000)
n = 0
while True:
    if os.path.exists("/ask"):
        os.remove("/ask")
        n += 1
        said = "%d unlock %d lock %d %s" % (n, libc.pthread_mutex_unlock(lock), libc.pthread_mutex_lock(lock), m[4096:4100].decode())
        open("/answer.new", "w").write(said)
        os.rename("/answer.new", "/answer")
    time.sleep(0.01)
`

// Writes of the kernel into mapped files when their processes die are in no file after a restore:
// not of the sandbox, however it was stopped, nor of one that is put back.
func TestRobustMutex(t *testing.T) {
	for _, path := range []string{"/srv/lock", "/dev/shm/lock"} {
		t.Run(path, func(t *testing.T) { robustMutex(t, path) })
	}
}

func robustMutex(t *testing.T, path string) {
	b := debianBox(t)
	name := b.start("mutex", "--network", "none", "debian", "python3", "-c", mutexApp, path)
	says := func(name, when, want string) {
		t.Helper()
		b.sh(name, "rm -f /answer; touch /ask")
		b.eventually("the program answers", func() bool {
			return b.try(nil, "exec", name, "test", "-f", "/answer").code == 0
		})
		if got := strings.TrimSpace(b.sh(name, "cat /answer")); got != want {
			t.Errorf("%s: %q, want %q", when, got, want)
		}
	}
	b.eventually("the program is ready", func() bool {
		return b.try(nil, "exec", name, "test", "-f", "/child").code == 0
	})

	ck := b.checkpoint(name)
	b.ok("restore", name, ck)
	says(name, "after a restore", "1 unlock 0 lock 0 word")
	b.ok("restore", name, ck)
	says(name, "after the second", "1 unlock 0 lock 0 word")
	b.ok("restore", "--undo", name)
	says(name, "after the undo", "2 unlock 0 lock 0 word")
	b.ok("restore", name, b.checkpoint(name, "--stop"))
	says(name, "after a stop", "3 unlock 0 lock 0 word")
	b.ok("restore", "--no-undo", name, ck)
	says(name, "without undo", "1 unlock 0 lock 0 word")

	// A restore that fails at its end puts back what was there.
	again := b.checkpoint(name)
	b.try(failpoint("restore.after-proof", "error"), "restore", name, ck)
	b.ok("restore", name, again)
	says(name, "after a restore that failed", "2 unlock 0 lock 0 word")

	// Nor does one that is killed while it puts right what the stop has written.
	if path != "/dev/shm/lock" { // which CRIU has
		r := b.try(failpoint("restore.before-mend", "kill"), "restore", name, ck)
		equal(b, "restore was killed", r.killed, true)
		b.ok("recover")
		says(name, "after a restore that was killed", "1 unlock 0 lock 0 word")
	}

	b.own("mutexfork")
	b.ok("fork", "--name", "mutexfork", name+"@"+ck)
	says("mutexfork", "in a fork", "1 unlock 0 lock 0 word")
}

// writeApp counts in the mapped part of a file, whose page stays dirty.
const writeApp = `
import mmap, os, time
fd = os.open("/srv/count", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 4096)
m = mmap.mmap(fd, 4096)
os.close(fd)
n = 0
while True:
    if os.path.exists("/ask"):
        n += 1
        m[:4] = b"%04d" % n
        os.remove("/ask")
    time.sleep(0.01)
`

// A write to a page that is dirty already changes no time of its file; checkpoints have it
// nevertheless, and so has the file after a restore.
func TestMappedWrites(t *testing.T) {
	b := debianBox(t)
	name := b.start("mapped", "--network", "none", "debian", "python3", "-c", writeApp)
	count := func() string { return b.sh(name, "head -c 4 /srv/count") }
	next := func(want string) {
		t.Helper()
		b.sh(name, "touch /ask")
		b.eventually("it is written", func() bool { return b.try(nil, "exec", name, "test", "-e", "/ask").code != 0 })
		equal(b, "the count", count(), want)
	}
	var cks []string
	for _, want := range []string{"0001", "0002", "0003", "0004"} {
		next(want)
		if want == "0003" {
			cks = append(cks, b.checkpoint(name, "--files-only"))
			continue
		}
		cks = append(cks, b.checkpoint(name))
	}
	for _, i := range []int{3, 0, 1, 3} {
		b.ok("restore", name, cks[i])
		equal(b, "restored", count(), "000"+string(rune('1'+i)))
		b.ok("restore", "--undo", name)
		b.ok("restore", "--undo", name)
		equal(b, "undone and back", count(), "000"+string(rune('1'+i)))
		if i != 2 { // its processes began anew
			next("000" + string(rune('2'+i)))
		}
	}
}
