package overlay

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/thorough"
)

// hostileNames are few, so that random operations meet on the same names.
var hostileNames = []string{
	"a", "b", "a.b", "A", ".hidden", "...", "..x", " ", "with space", "new\nline", "tab\t", "-rf", "*", "$(id)",
	"\xff\xfe", "caf\xc3\xa9", "cafe\xcc\x81", "\xe2\x80\xa8", "quote\"back\\slash", "50%3D=x", ".wh.a", ".wh..wh..opq",
	strings.Repeat("n", 255), strings.Repeat("\xfd", 255), "\x01\x7f", "PaxHeaders", "c:d,e",
}

// chaos does random things to a directory tree.
type chaos struct {
	rand *rand.Rand // of the current operation
	root string
	done map[string]int // how often each operation worked
}

func (c *chaos) name() string   { return hostileNames[c.n(len(hostileNames)-1)] }
func (c *chaos) n(most int) int { return c.rand.IntN(most + 1) }

// paths lists what there is, in an order that does not depend on the filesystem.
func (c *chaos) paths(keep func(os.FileInfo) bool) []string {
	var list []string
	_ = filepath.Walk(c.root, func(p string, info os.FileInfo, err error) error {
		if err == nil && keep(info) && strings.Count(p, "/") < strings.Count(c.root, "/")+6 {
			list = append(list, p)
		}
		return nil
	})
	sort.Strings(list)
	return list
}

func (c *chaos) pick(keep func(os.FileInfo) bool) string {
	list := c.paths(keep)
	if len(list) == 0 {
		return ""
	}
	return list[c.n(len(list)-1)]
}

func isDir(i os.FileInfo) bool  { return i.IsDir() }
func isFile(i os.FileInfo) bool { return i.Mode().IsRegular() }
func notDir(i os.FileInfo) bool { return !i.IsDir() }
func any1(os.FileInfo) bool     { return true }

func (c *chaos) fresh() string { return filepath.Join(c.pick(isDir), c.name()) }

func (c *chaos) bytes(max int) []byte {
	b := make([]byte, c.n(max))
	seed := c.n(255)
	for i := range b {
		b[i] = byte(i*7 + seed)
	}
	return b
}

// operations are the things that can happen; their keys are checked to have
// worked at least once.
var operations = map[string]func(c *chaos) error{
	"mkdir":  func(c *chaos) error { return os.Mkdir(c.fresh(), os.FileMode(c.n(0o777))) },
	"create": func(c *chaos) error { return create(c.fresh(), c.bytes(10000)) },
	"empty":  func(c *chaos) error { return create(c.fresh(), nil) },
	"large":  func(c *chaos) error { return create(c.fresh(), c.bytes(200_000)) },
	"sparse": func(c *chaos) error {
		f, err := os.OpenFile(c.fresh(), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o640)
		if err != nil {
			return err
		}
		defer f.Close()
		for range c.n(4) {
			if _, err := f.WriteAt(c.bytes(9000), int64(c.n(40))*4096+int64(c.n(2))); err != nil {
				return err
			}
		}
		return f.Truncate(int64(c.n(50)) * 5000)
	},
	"append": func(c *chaos) error {
		f, err := os.OpenFile(c.pick(isFile), os.O_WRONLY|os.O_APPEND|unix.O_NOFOLLOW, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = f.Write(c.bytes(5000))
		return err
	},
	"truncate": func(c *chaos) error { return os.Truncate(c.pick(isFile), int64(c.n(20000))) },
	"punch": func(c *chaos) error {
		f, err := os.OpenFile(c.pick(isFile), os.O_WRONLY|unix.O_NOFOLLOW, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(c.n(5))*4096, 4096)
	},
	"unlink": func(c *chaos) error { return unix.Unlink(c.pick(notDir)) },
	"rmdir": func(c *chaos) error {
		dir := c.pick(isDir)
		if dir == c.root {
			return unix.EBUSY
		}
		return os.RemoveAll(dir)
	},
	"opaque": func(c *chaos) error { // a directory that hides the one below it
		dir := c.pick(isDir)
		if dir == c.root {
			return unix.EBUSY
		}
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
		return os.Mkdir(dir, 0o711)
	},
	"rename": func(c *chaos) error {
		from := c.pick(any1)
		if from == c.root {
			return unix.EBUSY
		}
		return unix.Rename(from, c.fresh())
	},
	"exchange": func(c *chaos) error {
		return unix.Renameat2(unix.AT_FDCWD, c.pick(notDir), unix.AT_FDCWD, c.pick(notDir), unix.RENAME_EXCHANGE)
	},
	"chmod": func(c *chaos) error {
		p := c.pick(func(i os.FileInfo) bool { return i.Mode()&os.ModeSymlink == 0 })
		return unix.Chmod(p, uint32(c.n(0o7777)))
	},
	"chown": func(c *chaos) error {
		ids := []int{0, 1, 1000, 65534, 2097151, 2097152, 4294967294}
		return unix.Lchown(c.pick(any1), ids[c.n(len(ids)-1)], ids[c.n(len(ids)-1)])
	},
	"utimens": func(c *chaos) error {
		secs := []int64{0, 1, -1, -2, 1_700_000_000, -2_000_000_000, 1<<33 - 1, 1 << 33, 15_000_000_000}
		nsec := []int64{0, 1, 500_000_000, 999_999_999, 120_000_000}
		ts := []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Sec: secs[c.n(len(secs)-1)], Nsec: nsec[c.n(len(nsec)-1)]}}
		return unix.UtimesNanoAt(unix.AT_FDCWD, c.pick(any1), ts, unix.AT_SYMLINK_NOFOLLOW)
	},
	"user xattr": func(c *chaos) error {
		p := c.pick(func(i os.FileInfo) bool { return i.IsDir() || i.Mode().IsRegular() })
		return unix.Lsetxattr(p, "user."+strings.ReplaceAll(c.name(), "\x00", "")[:1]+"=%", c.bytes(100), 0)
	},
	"trusted xattr": func(c *chaos) error {
		names := []string{
			"trusted.x", "trusted.\xff", "trusted.a=b", "trusted.50%", "trusted.new\nline", "trusted.overlay.opaque",
			"user.overlay.whiteout",
		}
		return unix.Lsetxattr(c.pick(any1), names[c.n(len(names)-1)], c.bytes(60), 0)
	},
	"security xattr": func(c *chaos) error { return unix.Lsetxattr(c.pick(any1), "security.agentbox", c.bytes(20), 0) },
	"remove xattr": func(c *chaos) error {
		// Few have it: one of these.
		has := slices.DeleteFunc(c.paths(any1), func(p string) bool {
			_, err := unix.Lgetxattr(p, "trusted.x", nil)
			return err != nil
		})
		if len(has) == 0 {
			return unix.ENODATA
		}
		return unix.Lremovexattr(has[c.n(len(has)-1)], "trusted.x")
	},
	"capability": func(c *chaos) error {
		v := make([]byte, 20) // struct vfs_cap_data, version 2, effective
		binary.LittleEndian.PutUint32(v, 0x02000001)
		binary.LittleEndian.PutUint32(v[4:], uint32(c.n(0xffff)))
		return unix.Lsetxattr(c.pick(isFile), "security.capability", v, 0)
	},
	"acl": func(c *chaos) error {
		return unix.Lsetxattr(c.pick(any1), "system.posix_acl_access", posixACL(uint16(c.n(7)), uint32(1000+c.n(3))), 0)
	},
	"default acl": func(c *chaos) error {
		return unix.Lsetxattr(c.pick(isDir), "system.posix_acl_default",
			posixACL(uint16(c.n(7)), uint32(1000+c.n(3))), 0)
	},
	"link":    func(c *chaos) error { return os.Link(c.pick(notDir), c.fresh()) },
	"symlink": func(c *chaos) error { return os.Symlink("../"+c.name()+"/\xff/etc/passwd", c.fresh()) },
	"long symlink": func(c *chaos) error {
		return os.Symlink("/"+strings.Repeat("x/", 50+c.n(1900)), c.fresh())
	},
	"fifo":   func(c *chaos) error { return unix.Mkfifo(c.fresh(), uint32(c.n(0o777))) },
	"socket": func(c *chaos) error { return unix.Mknod(c.fresh(), unix.S_IFSOCK|uint32(c.n(0o777)), 0) },
	// No driver has these numbers, and the trees lie on mounts without devices:
	// a node that a test makes must never be able to do anything.
	"char": func(c *chaos) error {
		return unix.Mknod(c.fresh(), unix.S_IFCHR|0o600, int(unix.Mkdev(uint32(3000+c.n(1095)), uint32(c.n(1<<20-1)))))
	},
	"block": func(c *chaos) error {
		return unix.Mknod(c.fresh(), unix.S_IFBLK|0o600, int(unix.Mkdev(uint32(3000+c.n(1095)), uint32(c.n(1<<20-1)))))
	},
}

// create makes a new file and never opens what is there: it may be a FIFO or a
// device.
func create(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	return errors.Join(err, f.Close())
}

// posixACL is an ACL as the kernel's attribute has it: version 2, then tag,
// permissions and id of each entry.
func posixACL(perm uint16, uid uint32) []byte {
	b := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range []struct {
		tag, perm uint16
		id        uint32
	}{
		{0x01, 7, ^uint32(0)}, {0x02, perm, uid}, {0x04, 5, ^uint32(0)},
		{0x10, perm | 4, ^uint32(0)}, {0x20, 1, ^uint32(0)},
	} {
		b = binary.LittleEndian.AppendUint16(b, e.tag)
		b = binary.LittleEndian.AppendUint16(b, e.perm)
		b = binary.LittleEndian.AppendUint32(b, e.id)
	}
	return b
}

var operationNames = func() (names []string) {
	for name := range operations {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}()

// run does up to most random operations. Many fail for good reasons: the name is
// taken, there is no file yet, a layer's directory cannot be renamed. Rapid
// chooses a seed for each, so that it can leave operations out when it looks for
// the shortest sequence that fails, but does not prefer small numbers inside.
func (c *chaos) run(t *rapid.T, most int) {
	for i, seed := range rapid.SliceOfN(rapid.Uint64(), most/3, most).Draw(t, "operations") {
		c.rand = rand.New(rand.NewPCG(seed, uint64(i)))
		name := operationNames[c.n(len(operationNames)-1)]
		err := operations[name](c)
		if err == nil {
			c.done[name]++
		}
		t.Logf("%s: %v", name, err)
	}
}

// TestExact takes random trees through a real overlay: what a sandbox did is
// captured, goes on changing, is applied anew, and must be the same upperdir
// and the same merged view.
func TestExact(t *testing.T) {
	thorough.Checks(t, 50)
	base := noDevices(t)
	done := map[string]int{}
	round := 0
	whiteouts, opaque := 0, 0
	rapid.Check(t, func(rt *rapid.T) {
		round++
		dir, err := os.MkdirTemp(base, "round-")
		must(t, err)
		defer os.RemoveAll(dir)
		sub := func(name string) string {
			p := filepath.Join(dir, name)
			must(t, os.Mkdir(p, 0o755))
			return p
		}
		m := Mount{Lower: []string{sub("lower")}, Upper: sub("upper"), Work: sub("work"), Target: sub("merged")}
		c := &chaos{done: map[string]int{}, root: m.Lower[0]}
		c.run(rt, 60)
		c.root, c.done = m.Target, done
		must(t, m.Mount())
		defer Unmount(m.Target, UnmountOptions{Lazy: true})
		c.run(rt, 90)

		// In this order: listing a directory of the mount can make the kernel
		// drop a trusted.overlay.impure that is no longer true.
		wantMerged := peek(rt, m.Target)
		wantUpper := peek(rt, m.Upper)
		archive, tree := captureDir(rt, m.Upper)
		samePeek(rt, "after capture", wantUpper, peek(rt, m.Upper))
		for _, s := range wantUpper {
			if strings.Contains(s, "rdev 0x0") {
				whiteouts++
			}
			if strings.Contains(s, `"trusted.overlay.opaque"="y"`) {
				opaque++
			}
		}

		c.run(rt, 30)
		must(t, Unmount(m.Target, UnmountOptions{}))

		again, applied := applyTo(rt, dir, archive)
		samePeek(rt, "applied", wantUpper, peek(rt, again))
		if string(applied) != string(tree) {
			rt.Fatalf("Apply reports another tree than Capture\n%s\n%s", applied, tree)
		}
		diffs, err := Verify(t.Context(), again, strings.NewReader(string(tree)), CompareOptions{})
		if err != nil || len(diffs) > 0 {
			rt.Fatalf("Verify: %v %v", diffs, err)
		}
		second, _ := captureDir(rt, again)
		if string(second) != string(archive) {
			rt.Fatal("a capture of what was applied is another archive")
		}
		m.Upper, m.Work = again, sub("work2")
		must(t, m.Mount())
		samePeek(rt, "merged", wantMerged, peek(rt, m.Target))
		must(t, Unmount(m.Target, UnmountOptions{}))
	})
	if t.Failed() {
		return
	}
	t.Logf("%d rounds, %d whiteouts, %d opaque directories, operations %v", round, whiteouts, opaque, done)
	if round < 50 {
		return // asked for fewer checks than it takes to see everything
	}
	for _, name := range operationNames {
		if done[name] == 0 {
			t.Errorf("%q never worked through the overlay", name)
		}
	}
	if whiteouts == 0 || opaque == 0 {
		t.Errorf("%d whiteouts and %d opaque directories: the test does not see what it is for", whiteouts, opaque)
	}
}
