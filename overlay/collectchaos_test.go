package overlay

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// tricks are changes that are easily missed: they leave something as it was.
var tricks = map[string]func(c *chaos) error{
	"rewrite": func(c *chaos) error { // the same size and mtime
		p := c.pick(isFile)
		info, err := os.Lstat(p)
		if err != nil || info.Size() == 0 {
			return unix.ENODATA
		}
		f, err := os.OpenFile(p, os.O_RDWR|unix.O_NOFOLLOW, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		b := make([]byte, 1)
		at := c.rand.Int64N(info.Size())
		if _, err := f.ReadAt(b, at); err != nil {
			return err
		}
		b[0] ^= 0x55
		if _, err := f.WriteAt(b, at); err != nil {
			return err
		}
		return os.Chtimes(p, info.ModTime(), info.ModTime())
	},
	"replace": func(c *chaos) error { // another inode, all else the same
		p := c.pick(isFile)
		info, err := os.Lstat(p)
		if err != nil {
			return err
		}
		temp := filepath.Join(c.root, "temp")
		if err := create(temp, c.bytes(int(info.Size())+1)); err != nil {
			return err
		}
		_ = os.Truncate(temp, info.Size())
		_ = os.Chmod(temp, info.Mode())
		_ = os.Chtimes(temp, info.ModTime(), info.ModTime())
		return os.Rename(temp, p)
	},
	"exchange directories": func(c *chaos) error { // the files in them keep all they have
		a, b := c.pick(isDir), c.pick(isDir)
		if a == c.root || b == c.root {
			return unix.EBUSY
		}
		return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
	},
	"move directory": func(c *chaos) error {
		from := c.pick(isDir)
		if from == c.root {
			return unix.EBUSY
		}
		return unix.Rename(from, c.fresh())
	},
	"first link": func(c *chaos) error { return os.Link(c.pick(isFile), filepath.Join(c.root, "\x01first")) },
	"unlink first": func(c *chaos) error {
		return os.Remove(filepath.Join(c.root, "\x01first"))
	},
	"link into": func(c *chaos) error { return os.Link(c.pick(isFile), c.fresh()) },
	"retarget": func(c *chaos) error { // a symlink of the same length and mtime
		p := c.pick(func(i os.FileInfo) bool { return i.Mode()&os.ModeSymlink != 0 })
		info, err := os.Lstat(p)
		if err != nil {
			return err
		}
		to, err := os.Readlink(p)
		if err != nil {
			return err
		}
		b := []byte(to)
		b[len(b)-1] ^= 1
		_ = os.Remove(p)
		if err := os.Symlink(string(b), p); err != nil {
			return err
		}
		ts := unix.NsecToTimespec(info.ModTime().UnixNano())
		return unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
	},
}

// TestCollectRounds collects a tree again and again while it changes between
// the rounds, and never may anything be other than Walk sees it.
func TestCollectRounds(t *testing.T) {
	bases := []string{noDevices(t), tmpfs(t, "size=500m")}
	var rounds, known, same int64
	worked := map[string]int{}
	rapid.Check(t, func(rt *rapid.T) {
		dir, err := os.MkdirTemp(bases[rapid.IntRange(0, 1).Draw(rt, "base")], "rounds-")
		must(t, err)
		defer os.RemoveAll(dir)
		src := filepath.Join(dir, "src")
		must(t, os.Mkdir(src, 0o755))
		c := &chaos{root: src, done: worked}
		c.run(rt, 60)
		s := newShelf()
		last, lastTree := "", ""
		for round := range rapid.IntRange(2, 6).Draw(rt, "rounds") {
			if rapid.Bool().Draw(rt, "settle") {
				settle(rt)
			}
			out := filepath.Join(dir, fmt.Sprint("memory", round))
			opts := CollectOptions{
				Cache: last, Trust: rapid.Bool().Draw(rt, "trust"), Tolerant: rapid.Bool().Draw(rt, "tolerant"),
			}
			got := collectDir(rt, src, out, s, opts)
			tree := walkTree(rt, src)
			if got.Same != (tree == lastTree) {
				rt.Fatalf("Same is %v", got.Same)
			}
			rounds++
			known += got.Files - got.Read
			if got.Same {
				same++
			}
			last, lastTree = out, tree
			for i, seed := range rapid.SliceOfN(rapid.Uint64(), 0, 8).Draw(rt, "changes") {
				c.rand = rand.New(rand.NewPCG(seed, uint64(i)))
				names := trickNames
				if c.n(3) == 0 {
					names = operationNames
				}
				name := names[c.n(len(names)-1)]
				op := tricks[name]
				if op == nil {
					op = operations[name]
				}
				err := op(c)
				if err == nil {
					worked[name]++
				}
				rt.Logf("round %d: %s: %v", round, name, err)
			}
		}
	})
	t.Logf("%d rounds, %d the same, %d files not read, %v", rounds, same, known, worked)
	if rounds < 100 {
		return
	}
	if known == 0 || same == 0 {
		t.Error("nothing was ever cached")
	}
	for _, name := range trickNames {
		if worked[name] == 0 {
			t.Errorf("%q never worked", name)
		}
	}
}

var trickNames = func() (names []string) {
	for _, name := range []string{
		"rewrite", "replace", "exchange directories", "move directory", "first link", "unlink first",
		"link into", "retarget",
	} {
		if tricks[name] == nil {
			panic(name)
		}
		names = append(names, name)
	}
	return names
}()

// TestCollectWild collects a directory that changes wildly meanwhile, and then, with what that
// left behind, the directory at rest.
func TestCollectWild(t *testing.T) {
	for name, base := range map[string]string{"disk": noDevices(t), "tmpfs": tmpfs(t, "size=1g")} {
		t.Run(name, func(t *testing.T) {
			src, mem := filepath.Join(base, "src"), t.TempDir()
			must(t, os.Mkdir(src, 0o755))
			for i := range 40 {
				sub := filepath.Join(src, fmt.Sprintf("sub%02d", i))
				must(t, os.Mkdir(sub, 0o755))
				for j := range 20 {
					must(t, create(filepath.Join(sub, fmt.Sprint("f", j)), make([]byte, 100*i+j)))
				}
			}
			s := newShelf()
			last := ""
			var read, files int64
			for round := range 6 {
				stop := make(chan struct{})
				done := make(chan struct{})
				var ops atomic.Int64
				begun := make(chan struct{})
				go func() {
					defer close(done)
					wild(src, uint64(round), &ops, begun, stop)
				}()
				<-begun
				// On a disk that is busy changes come slowly.
				for i := 0; i < 5 || ops.Load() < 100 && i < 100; i++ {
					out := filepath.Join(mem, fmt.Sprintf("%d.%d", round, i))
					_, err := Collect(t.Context(), src, out, s,
						CollectOptions{Cache: last, Trust: i%2 == 0, Tolerant: true})
					if err != nil {
						close(stop)
						<-done
						t.Fatal(err)
					}
					n := 0
					must(t, Collection(out, func(e Entry) error {
						n++
						if e.Type == TypeFile && e.Digest != "" {
							if d := s.data(t, &e); digestOf(d) != e.Digest {
								t.Errorf("%q: the sink has other data", e.Path)
							}
						}
						return nil
					}))
					if n < 2 {
						t.Errorf("%d entries", n)
					}
					last = out
				}
				close(stop)
				<-done
				if ops.Load() < 100 {
					t.Errorf("only %d changes went on", ops.Load())
				}
				out := filepath.Join(mem, fmt.Sprint(round))
				got := collectDir(t, src, out, s, CollectOptions{Cache: last, Trust: true})
				read, files = read+got.Read, files+got.Files
				last = out
			}
			t.Logf("%d of %d files were read at rest", read, files)
			if read >= files/2 {
				t.Errorf("%d of %d files were read again", read, files)
			}
		})
	}
}

// wild changes things in dir until it is told to stop.
func wild(dir string, seed uint64, ops *atomic.Int64, begun, stop chan struct{}) {
	c := &chaos{root: dir, rand: rand.New(rand.NewPCG(seed, 1))}
	mapped, err := os.OpenFile(filepath.Join(dir, "mapped"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return
	}
	defer mapped.Close()
	_ = mapped.Truncate(1 << 16)
	m, err := unix.Mmap(int(mapped.Fd()), 0, 1<<16, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return
	}
	defer func() { _ = unix.Munmap(m) }()
	for i := 0; ; i++ {
		select {
		case <-stop:
			return
		default:
		}
		if i == 3 {
			close(begun)
		}
		m[c.n(1<<16-1)]++
		sub := filepath.Join(dir, fmt.Sprintf("sub%02d", c.n(3)), fmt.Sprint("f", c.n(25)))
		other := filepath.Join(dir, fmt.Sprintf("sub%02d", c.n(3)), fmt.Sprint("f", c.n(25)))
		switch c.n(12) {
		case 0:
			_ = os.Remove(sub)
		case 1:
			_ = create(sub, c.bytes(300_000))
		case 2:
			_ = os.Truncate(sub, int64(c.n(200_000)))
		case 3:
			_ = os.Rename(sub, other)
		case 4:
			_ = os.Link(sub, other)
		case 5:
			_ = os.Rename(filepath.Dir(sub), filepath.Dir(other)+"x")
			_ = os.Rename(filepath.Dir(other)+"x", filepath.Dir(sub))
		case 6:
			_ = os.RemoveAll(filepath.Dir(sub))
		case 7:
			_ = os.Mkdir(filepath.Dir(sub), 0o755)
		case 8:
			_ = os.Remove(sub)
			_ = os.Symlink("x", sub)
		case 9:
			_ = os.Remove(sub)
			_ = os.Mkdir(sub, 0o700)
		case 10:
			_ = unix.Mkfifo(sub, 0o600)
		case 11:
			_ = unix.Renameat2(unix.AT_FDCWD, sub, unix.AT_FDCWD, other, unix.RENAME_EXCHANGE)
		case 12:
			_ = unix.Lsetxattr(sub, "trusted.x", c.bytes(30), 0)
			_ = unix.Lremovexattr(other, "trusted.x")
		}
		ops.Add(1)
	}
}

// TestCollectRacy changes a file at once after it was collected, within one tick
// of the clock, with size and mtime as they were.
func TestCollectRacy(t *testing.T) {
	ram := t.TempDir()
	must(t, unix.Mount("ramfs", ram, "ramfs", unix.MS_NODEV|unix.MS_NOSUID, ""))
	t.Cleanup(func() { must(t, Unmount(ram, UnmountOptions{})) })
	// The kernel gives the newer filesystems a finer time once a file's times were read.
	for name, base := range map[string]string{
		"disk": t.TempDir(), "ticks": ram, "whole seconds": ext4(t, "20m", "-I", "128"),
	} {
		t.Run(name, func(t *testing.T) {
			src := filepath.Join(base, "src")
			must(t, os.MkdirAll(src+"/d", 0o755))
			mem := t.TempDir()
			last, equal := "", 0
			for i := range 100 {
				var before, after unix.Stat_t
				must(t, os.WriteFile(src+"/d/f", []byte{byte(i)}, 0o644))
				old := []unix.Timespec{{Sec: 1000}, {Sec: 1000}}
				must(t, unix.UtimesNanoAt(unix.AT_FDCWD, src+"/d/f", old, 0))
				must(t, unix.Lstat(src+"/d/f", &before))
				out := filepath.Join(mem, fmt.Sprint(i))
				_, err := Collect(t.Context(), src, out, nil, CollectOptions{Cache: last, Trust: true})
				must(t, err)
				must(t, os.WriteFile(src+"/d/f", []byte{^byte(i)}, 0o644))
				must(t, unix.UtimesNanoAt(unix.AT_FDCWD, src+"/d/f", old, 0))
				must(t, unix.Lstat(src+"/d/f", &after))
				if before.Ctim == after.Ctim {
					equal++
				}
				got := collectDir(t, src, out+".2", nil, CollectOptions{Cache: out, Trust: true})
				if got.Same {
					t.Fatal("not seen")
				}
				last = out + ".2"
			}
			if equal == 0 && name != "disk" {
				t.Error("every change changed the time: the test shows nothing")
			}
		})
	}
}

// TestCollectMapped writes through a mapping, which changes no time after the
// first write.
func TestCollectMapped(t *testing.T) {
	for name, base := range map[string]string{"disk": t.TempDir(), "tmpfs": tmpfs(t, "size=10m")} {
		t.Run(name, func(t *testing.T) {
			src, mem := filepath.Join(base, "src"), t.TempDir()
			must(t, os.Mkdir(src, 0o755))
			f, err := os.Create(src + "/f")
			must(t, err)
			must(t, f.Truncate(8192))
			m, err := unix.Mmap(int(f.Fd()), 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			must(t, err)
			must(t, f.Close())
			unmap := sync.OnceFunc(func() { must(t, unix.Munmap(m)) })
			defer unmap() // a mapped tmpfs cannot be unmounted
			m[5000] = 1
			settle(t)
			collectDir(t, src, mem+"/1", nil, CollectOptions{})
			var before, after unix.Stat_t
			must(t, unix.Lstat(src+"/f", &before))
			m[5000] = 2
			must(t, unix.Lstat(src+"/f", &after))
			if before.Ctim != after.Ctim {
				t.Log("the kernel saw the write: the test shows nothing")
			}
			if got := collectDir(t, src, mem+"/2", nil, CollectOptions{Cache: mem + "/1"}); got.Same || got.Read != 1 {
				t.Errorf("not seen: %+v", got)
			}
			m[5000] = 3
			unmap()
			settle(t) // where the page was written back meanwhile, the kernel saw that write
			if got := collectDir(t, src, mem+"/3", nil, CollectOptions{Cache: mem + "/2"}); got.Same || got.Read != 1 {
				t.Errorf("not seen after the mapping went: %+v", got)
			}
			if got := collectDir(t, src, mem+"/4", nil, CollectOptions{Cache: mem + "/3"}); !got.Same || got.Read != 0 {
				t.Errorf("read again without a writer: %+v", got)
			}
		})
	}
}
