package wall_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/cgroup"
	criucore "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	ghostfile "github.com/checkpoint-restore/go-criu/v7/crit/images/ghost-file"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/inventory"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/netdev"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/pidns"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/pstree"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/seccomp"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/tty"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/userns"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/utsns"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/criu/criutest"
	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/criu/wall"
	"github.com/agentbox/agentbox/criu/wall/walltest"
	"github.com/agentbox/agentbox/internal/fault"
)

// target is a fuzz target: of which images, by the names that samples gives them, and what one
// that Judge lets through holds, by another reader than Judge's.
type target struct {
	images []string
	holds  func(*testing.T, base, string)
}

var targets = map[string]target{
	"FuzzInventory":   {[]string{"inventory.img"}, holdsInventory},
	"FuzzPstree":      {[]string{"pstree.img"}, holdsPstree},
	"FuzzIds":         {[]string{"ids-1.img"}, holdsIds},
	"FuzzCore":        {[]string{"core-1.img"}, holdsCore},
	"FuzzMountpoints": {[]string{"mountpoints-1.img"}, holdsMountpoints},
	"FuzzCgroup":      {[]string{"cgroup.img"}, holdsCgroup},
	"FuzzUserns":      {[]string{"userns-1.img"}, holdsUserns},
	"FuzzSeccomp":     {[]string{"seccomp.img"}, holdsSeccomp},
	"FuzzFiles":       {[]string{"files.img"}, holdsFiles},
	"FuzzGhostFile":   {[]string{"ghost-file-1.img"}, holdsGhostFile},
	"FuzzTtyInfo":     {[]string{"tty-info.img"}, holdsTtyInfo},
	"FuzzUtsns":       {[]string{"utsns-1.img"}, holdsUtsns},
	"FuzzNetns":       {[]string{"netns-1.img"}, holdsEntries},
	"FuzzNetdev":      {[]string{"netdev-1.img"}, holdsNetdev},
	"FuzzRoutes":      {[]string{"ifaddr-1.img", "route-1.img", "route6-1.img", "rule-1.img"}, holdsMessages},
	"FuzzTracked":     {[]string{"netns-ct-1.img", "netns-exp-1.img"}, holdsMessages},
	"FuzzIptables":    {[]string{"iptables-1.img", "ip6tables-1.img"}, holdsIptables},
	"FuzzNftables":    {[]string{"nftables-1.img"}, holdsNftables},
	"FuzzTmpfs":       {[]string{"tmpfs-1.tar.gz.img", "tmpfs-dev-1.tar.gz.img"}, holdsTmpfs},
	"FuzzMm":          {[]string{"mm-1.img"}, holdsMm},
	"FuzzPidns":       {[]string{"pidns-1.img"}, holdsPidns},
	"FuzzFdinfo":      {[]string{"fdinfo-1.img"}, holdsEntries},
	"FuzzFs":          {[]string{"fs-1.img"}, holdsEntries},
	"FuzzTimens":      {[]string{"timens-1.img"}, holdsEntries},
	"FuzzIpcnsVar":    {[]string{"ipcns-var-1.img"}, holdsEntries},
	"FuzzRemapFpath":  {[]string{"remap-fpath.img"}, holdsEntries},
	"FuzzFilelocks":   {[]string{"filelocks.img"}, holdsEntries},
	"FuzzMemfd":       {[]string{"memfd.img"}, holdsEntries},
	// Refused by name, as none of the bases is as good as the host's root.
	"FuzzRooted": {[]string{
		"autofs-1.img", "binfmt-misc.img", "binfmt-misc-1.img", "bpfmap-file.img", "bpfmap-data.img",
	}, func(t *testing.T, _ base, name string) {
		t.Errorf("%s was let through", name)
	}},
	// Taken as they are.
	"FuzzUnread": {slices.Sorted(maps.Keys(unread())), func(*testing.T, base, string) {}},
}

func FuzzInventory(f *testing.F)   { fuzz(f) }
func FuzzPstree(f *testing.F)      { fuzz(f) }
func FuzzIds(f *testing.F)         { fuzz(f) }
func FuzzCore(f *testing.F)        { fuzz(f) }
func FuzzMountpoints(f *testing.F) { fuzz(f) }
func FuzzCgroup(f *testing.F)      { fuzz(f) }
func FuzzUserns(f *testing.F)      { fuzz(f) }
func FuzzSeccomp(f *testing.F)     { fuzz(f) }
func FuzzFiles(f *testing.F)       { fuzz(f) }
func FuzzGhostFile(f *testing.F)   { fuzz(f) }
func FuzzTtyInfo(f *testing.F)     { fuzz(f) }
func FuzzUtsns(f *testing.F)       { fuzz(f) }
func FuzzNetns(f *testing.F)       { fuzz(f) }
func FuzzNetdev(f *testing.F)      { fuzz(f) }
func FuzzRoutes(f *testing.F)      { fuzz(f) }
func FuzzTracked(f *testing.F)     { fuzz(f) }
func FuzzIptables(f *testing.F)    { fuzz(f) }
func FuzzNftables(f *testing.F)    { fuzz(f) }
func FuzzTmpfs(f *testing.F)       { fuzz(f) }
func FuzzMm(f *testing.F)          { fuzz(f) }
func FuzzPidns(f *testing.F)       { fuzz(f) }
func FuzzFdinfo(f *testing.F)      { fuzz(f) }
func FuzzFs(f *testing.F)          { fuzz(f) }
func FuzzTimens(f *testing.F)      { fuzz(f) }
func FuzzIpcnsVar(f *testing.F)    { fuzz(f) }
func FuzzRemapFpath(f *testing.F)  { fuzz(f) }
func FuzzFilelocks(f *testing.F)   { fuzz(f) }
func FuzzMemfd(f *testing.F)       { fuzz(f) }
func FuzzRooted(f *testing.F)      { fuzz(f) }
func FuzzUnread(f *testing.F)      { fuzz(f) }

// Each image that Judge knows of has a fuzz target, and each target is a function that
// `go test -fuzz` finds.
func TestTargets(t *testing.T) {
	of := map[string]string{}
	for name, x := range targets {
		for _, image := range x.images {
			if of[image] != "" {
				t.Errorf("%s is of %s and %s", image, of[image], name)
			}
			of[image] = name
		}
	}
	for pattern := range wall.Kinds() {
		for _, image := range samples(t, pattern) {
			if of[image] == "" {
				t.Errorf("%s has no fuzz target", image)
			}
			delete(of, image)
		}
	}
	for image, name := range of {
		t.Errorf("%s is of %s, and Judge refuses it by its name", image, name)
	}
	file, err := parser.ParseFile(token.NewFileSet(), "fuzz_test.go", nil, 0)
	must(t, err)
	funcs := map[string]bool{}
	for _, d := range file.Decls {
		if fn, is := d.(*ast.FuncDecl); is && strings.HasPrefix(fn.Name.Name, "Fuzz") {
			funcs[fn.Name.Name] = true
		}
	}
	if !slices.Equal(slices.Sorted(maps.Keys(funcs)), slices.Sorted(maps.Keys(targets))) {
		t.Errorf("functions %v, targets %v", slices.Sorted(maps.Keys(funcs)), slices.Sorted(maps.Keys(targets)))
	}
	for image, data := range seeds(t) {
		if _, judged := unread()[image]; len(data.of["dump"])+len(data.of["podman"]) == 0 && !judged &&
			!slices.Contains(targets["FuzzRooted"].images, image) && !slices.Contains(rare, image) {
			t.Errorf("%s: no container here has such an image", image)
		}
	}
}

// rare are images that need what not every host has: of those there are made ones alone.
var rare = []string{"tmpfs-1.tar.gz.img", "netns-ct-1.img", "netns-exp-1.img", "pidns-1.img"}

// unread are the images that Judge does not read.
var unread = sync.OnceValue(func() map[string]bool {
	list := map[string]bool{}
	for pattern, judged := range wall.Kinds() {
		if !judged {
			for _, name := range samples(nil, pattern) {
				list[name] = true
			}
		}
	}
	return list
})

// samples are names, one of each form, that a pattern of Kinds matches.
func samples(t testing.TB, pattern string) []string {
	re, err := syntax.Parse(pattern, syntax.Perl)
	if err != nil {
		panic(err)
	}
	list := formsOf(re)
	for _, s := range list {
		if t != nil && !regexp.MustCompile(pattern).MatchString(s) {
			t.Fatalf("%q is not matched by %s", s, pattern)
		}
	}
	slices.Sort(list)
	return slices.Compact(list)
}

func formsOf(re *syntax.Regexp) []string {
	switch re.Op {
	case syntax.OpLiteral:
		return []string{string(re.Rune)}
	case syntax.OpCharClass:
		if slices.Contains(re.Rune, '0') {
			return []string{"1"}
		}
		var list []string
		for i := 0; i < len(re.Rune); i += 2 {
			for r := re.Rune[i]; r <= re.Rune[i+1]; r++ {
				list = append(list, string(r))
			}
		}
		return list
	case syntax.OpCapture, syntax.OpPlus:
		return formsOf(re.Sub[0])
	case syntax.OpQuest:
		return append([]string{""}, formsOf(re.Sub[0])...)
	case syntax.OpAlternate:
		var list []string
		for _, sub := range re.Sub {
			list = append(list, formsOf(sub)...)
		}
		return list
	case syntax.OpConcat:
		list := []string{""}
		for _, sub := range re.Sub {
			var longer []string
			for _, begin := range list {
				for _, end := range formsOf(sub) {
					longer = append(longer, begin+end)
				}
			}
			list = longer
		}
		return list
	case syntax.OpBeginText, syntax.OpEndText, syntax.OpEmptyMatch:
		return []string{""}
	}
	panic(re.Op)
}

// base is a dump in which a target exchanges an image.
type base struct {
	name   string
	images string
	spec   *wall.Spec
}

// essential are the images that Judge holds against each other.
var essential = regexp.MustCompile(`^(inventory|pstree|ids-\d+|core-\d+|mountpoints-\d+|cgroup|userns-\d+|seccomp)\.img$`)

func bases(t testing.TB) (list []base) {
	t.Helper()
	for _, b := range []struct{ name, path string }{
		{"dump", "testdata/dump.tar.zst"}, {"podman", "../../runtime/portable/testdata/podman-4.3.1.tar.zst"},
	} {
		images, spec := unpacked(t, b.path)
		list = append(list, base{b.name, images, spec})
	}
	return list
}

// seed are the images of a form: those of the bases, and forged ones.
type seed struct {
	of     map[string][][]byte // by base
	forged [][]byte
}

var made map[string]seed

// seeds are the seeds of each form that samples gives names.
func seeds(t testing.TB) map[string]seed {
	t.Helper()
	if made != nil {
		return made
	}
	list := map[string]seed{}
	made = list
	var patterns []*regexp.Regexp
	var names [][]string
	for pattern := range wall.Kinds() {
		patterns, names = append(patterns, regexp.MustCompile(pattern)), append(names, samples(t, pattern))
	}
	digits := regexp.MustCompile(`\b[0-9a-f]+\b`)
	form := func(name string) string {
		for i, re := range patterns {
			if re.MatchString(name) {
				for _, s := range names[i] {
					if s == name || s == digits.ReplaceAllString(name, "1") {
						return s
					}
				}
			}
		}
		return ""
	}
	for _, all := range names {
		for _, s := range all {
			list[s] = seed{of: map[string][][]byte{}}
		}
	}
	add := func(path, base string) {
		as := form(filepath.Base(path))
		data, err := os.ReadFile(path)
		if err != nil || as == "" || len(data) > 64<<10 {
			return
		}
		s := list[as]
		if base != "" {
			s.of[base] = append(s.of[base], data)
		} else {
			s.forged = append(s.forged, data)
		}
		list[as] = s
	}
	for _, b := range bases(t) {
		entries, err := os.ReadDir(b.images)
		must(t, err)
		for _, e := range entries {
			add(filepath.Join(b.images, e.Name()), b.name)
		}
		if b.name != "dump" {
			continue
		}
		v := walltest.Victims{File: "/victim/file", Dir: "/victim", Cgroup: "/victim", Bound: "/bound"}
		for _, c := range walltest.Forgeries(v) {
			dir := filepath.Join(t.TempDir(), "images")
			must(t, os.CopyFS(dir, os.DirFS(b.images)))
			if c.Image == "" || c.Forge(dir, v) != nil {
				continue
			}
			made, err := filepath.Glob(filepath.Join(dir, strings.Trim(c.Image, `"`)+"*"))
			must(t, err)
			for _, path := range made {
				before, err := os.ReadFile(filepath.Join(b.images, filepath.Base(path)))
				if after, err2 := os.ReadFile(path); err2 == nil && (err != nil || !bytes.Equal(before, after)) {
					add(path, "")
				}
			}
		}
	}
	return list
}

// fuzz exchanges an image of a dump. An image that passes Judge is one that the spec lets a
// container have, and stays so when it is judged again.
func fuzz(f *testing.F) {
	x := targets[f.Name()]
	if x.holds == nil {
		f.Fatal("it is no target")
	}
	list := bases(f)
	all := seeds(f)
	for i, image := range x.images {
		for b := range list {
			for _, data := range slices.Concat(all[image].of[list[b].name], all[image].forged) {
				f.Add(uint8(b), uint8(i), data)
			}
			f.Add(uint8(b), uint8(i), []byte{})
		}
	}
	whole := make([]map[string][]byte, len(list))
	for i, b := range list {
		for name := range readAll(f, b.images) {
			if !essential.MatchString(name) {
				must(f, os.Remove(filepath.Join(b.images, name)))
			}
		}
		must(f, wall.Judge(b.images, b.spec, "/own"))
		whole[i] = readAll(f, b.images)
	}
	f.Fuzz(func(t *testing.T, which, form uint8, data []byte) {
		i := int(which) % len(list)
		b, image := list[i], x.images[int(form)%len(x.images)]
		if at := b.placeOf(whole[i], image); at != "" {
			image = at
		}
		must(t, os.WriteFile(filepath.Join(b.images, image), data, 0o600))
		defer func() {
			for name, is := range readAll(t, b.images) {
				if data, kept := whole[i][name]; !kept {
					must(t, os.Remove(filepath.Join(b.images, name)))
				} else if !bytes.Equal(data, is) {
					must(t, os.WriteFile(filepath.Join(b.images, name), data, 0o600))
				}
			}
		}()
		if err := wall.Judge(b.images, b.spec, "/own"); err != nil {
			if !errors.Is(err, fault.ErrDenied) && !errors.Is(err, fault.ErrCorrupt) {
				t.Errorf("%s: %v", image, err)
			}
			return
		}
		once := readAll(t, b.images)
		x.holds(t, b, image)
		if err := wall.Judge(b.images, b.spec, "/own"); err != nil {
			t.Errorf("%s: judged again: %v", image, err)
		}
		if twice := readAll(t, b.images); !maps.EqualFunc(once, twice, bytes.Equal) {
			t.Errorf("%s: it is not what it was when it is judged again", image)
		}
		for name, is := range once {
			if name != image && !rewritten.MatchString(name) && !bytes.Equal(is, whole[i][name]) {
				t.Errorf("%s: %s has changed", image, name)
			}
		}
	})
}

// rewritten are the images that Judge writes, whatever else is there.
var rewritten = regexp.MustCompile(`^(cgroup|core-\d+|seccomp)\.img$`)

// placeOf is the name that an image of a form has in a base, of the first process where there is a choice.
func (b base) placeOf(whole map[string][]byte, form string) string {
	begin, end, _ := strings.Cut(form, "1")
	re := regexp.MustCompile(`^` + regexp.QuoteMeta(begin) + `\d+` + regexp.QuoteMeta(end) + `$`)
	for _, name := range slices.Sorted(maps.Keys(whole)) {
		if strings.Contains(form, "1") && re.MatchString(name) {
			return name
		}
	}
	return ""
}

func readAll(t testing.TB, dir string) map[string][]byte {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	list := map[string][]byte{}
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		must(t, err)
		list[e.Name()] = data
	}
	return list
}

// decoded reads an image as CRIU's library for Go does; nil of what lacks a field, which CRIU
// refuses.
func decoded[T any, P interface {
	*T
	proto.Message
}](t *testing.T, b base, name string) (list []P) {
	t.Helper()
	raw, err := walltest.Entries(filepath.Join(b.images, name))
	must(t, err)
	for _, data := range raw {
		e := P(new(T))
		if proto.Unmarshal(data, e) != nil {
			return nil
		}
		list = append(list, e)
	}
	return list
}

// specOf is the spec as its type has it, to be read beside Judge.
func specOf(t *testing.T, b base) *specs.Spec {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(filepath.Dir(b.images), "config.json"))
	must(t, err)
	s := &specs.Spec{}
	must(t, json.Unmarshal(data, s))
	return s
}

func owns(s *specs.Spec, typ specs.LinuxNamespaceType) bool {
	return slices.ContainsFunc(s.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == typ })
}

func holdsEntries(t *testing.T, b base, name string) {
	_, err := walltest.Entries(filepath.Join(b.images, name))
	must(t, err)
}

func holdsInventory(t *testing.T, b base, name string) {
	for _, e := range decoded[inventory.InventoryEntry](t, b, name) {
		if e.GetImgVersion() != 2 || e.RootIds == nil {
			t.Errorf("%v", e)
		}
	}
	holdsIds(t, b, "")
}

func holdsPstree(t *testing.T, b base, name string) {
	first := 0
	list := decoded[pstree.PstreeEntry](t, b, name)
	for _, e := range list {
		if e.GetPpid() == 0 {
			first++
			if _, err := os.Lstat(filepath.Join(b.images, fmt.Sprintf("ids-%d.img", e.GetPid()))); err != nil {
				t.Error(err)
			}
		}
	}
	if list != nil && first != 1 {
		t.Errorf("%d first processes", first)
	}
}

// holdsIds proves that the first process has the namespaces that the spec has.
func holdsIds(t *testing.T, b base, _ string) {
	spec := specOf(t, b)
	for _, e := range decoded[pstree.PstreeEntry](t, b, "pstree.img") {
		if e.GetPpid() != 0 {
			continue
		}
		inv := decoded[inventory.InventoryEntry](t, b, "inventory.img")
		ids := decoded[criucore.TaskKobjIdsEntry](t, b, fmt.Sprintf("ids-%d.img", e.GetPid()))
		if len(inv) == 0 || len(ids) == 0 {
			return
		}
		is, out := ids[0], inv[0].GetRootIds()
		for typ, own := range map[specs.LinuxNamespaceType]bool{
			specs.PIDNamespace:     is.GetPidNsId() != out.GetPidNsId(),
			specs.NetworkNamespace: is.GetNetNsId() != out.GetNetNsId(),
			specs.IPCNamespace:     is.GetIpcNsId() != out.GetIpcNsId(),
			specs.UTSNamespace:     is.GetUtsNsId() != out.GetUtsNsId(),
			specs.MountNamespace:   is.GetMntNsId() != out.GetMntNsId(),
			specs.UserNamespace:    is.GetUserNsId() != out.GetUserNsId(),
		} {
			if has := slices.IndexFunc(spec.Linux.Namespaces, func(n specs.LinuxNamespace) bool {
				return n.Type == typ
			}); own != (has >= 0) && (has < 0 || spec.Linux.Namespaces[has].Path == "") {
				t.Errorf("%s: own: %v", typ, own)
			}
		}
	}
}

// holdsCore proves that a thread has what the spec gives at most.
func holdsCore(t *testing.T, b base, name string) {
	spec := specOf(t, b)
	most, noNewPrivileges := b.spec.Limits()
	if noNewPrivileges != spec.Process.NoNewPrivileges {
		t.Fatal("another spec")
	}
	for _, e := range decoded[criucore.CoreEntry](t, b, name) {
		if state := e.GetTc().GetTaskState(); e.Tc != nil && (state == 2 || state == 6) {
			continue
		}
		c := e.GetThreadCore().GetCreds()
		if c == nil {
			t.Fatal("no credentials")
		}
		for _, set := range [][]uint32{c.GetCapInh(), c.GetCapPrm(), c.GetCapEff(), c.GetCapBnd()} {
			for i, w := range set {
				if i > 1 && w != 0 || i < 2 && uint64(w)<<(32*i)&^most != 0 {
					t.Errorf("capabilities: %x, at most %x", set, most)
				}
			}
		}
		if more := c.ProtoReflect().GetUnknown(); noNewPrivileges &&
			!bytes.Contains(more, []byte{18<<3&0x7f | 0x80, 18 >> 4, 1}) {
			t.Errorf("no_new_privs: %x", more)
		}
		if p := e.GetThreadCore().GetSchedPolicy() &^ (1 << 30); p == 1 || p == 2 || p == 6 {
			t.Errorf("sched_policy: %d", p)
		}
		if e.GetTc().GetOomScoreAdj() < min(0, oomScore(spec)) {
			t.Errorf("oom_score_adj: %d", e.GetTc().GetOomScoreAdj())
		}
		if mode := e.GetThreadCore().GetSeccompMode(); mode != 2 {
			t.Errorf("seccomp_mode: %d", mode)
		}
	}
}

func oomScore(s *specs.Spec) int32 {
	if s.Process.OOMScoreAdj != nil {
		return int32(*s.Process.OOMScoreAdj)
	}
	var n int32
	data, _ := os.ReadFile("/proc/self/oom_score_adj")
	_, _ = fmt.Sscan(string(data), &n)
	return n
}

// holdsMountpoints proves that each mount is one of the spec's, or covers a part of one.
func holdsMountpoints(t *testing.T, b base, name string) {
	spec := specOf(t, b)
	roots := 0
	for _, m := range decoded[mnt.MntEntry](t, b, name) {
		at := m.GetMountpoint()
		if path.Clean(at) != at || !path.IsAbs(at) || strings.Contains(m.GetRoot(), "/..") &&
			path.Clean(m.GetRoot()) != m.GetRoot() || m.GetWithPlugin() || m.GetExtMount() {
			t.Errorf("%v", m)
		}
		if at == "/" {
			roots++
			continue
		}
		named := slices.ContainsFunc(spec.Mounts, func(w specs.Mount) bool {
			return w.Destination == at || w.Type == "cgroup" && path.Dir(at) == w.Destination ||
				strings.HasPrefix(at, w.Destination+"/") && slices.Contains(w.Options, "rbind")
		})
		if w := slices.IndexFunc(spec.Mounts, func(w specs.Mount) bool { return w.Destination == at }); w >= 0 {
			if slices.Contains(spec.Mounts[w].Options, "ro") && m.GetFlags()&unix.MS_RDONLY == 0 &&
				m.GetSbFlags()&unix.MS_RDONLY == 0 && spec.Mounts[w].Type != "cgroup" {
				t.Errorf("%s is writable: %v", at, m)
			}
		}
		covers := (strings.HasPrefix(at, "/proc/") || strings.HasPrefix(at, "/sys/")) &&
			(m.GetFlags()&unix.MS_RDONLY != 0 || m.GetRoot() == "/null")
		device := path.Dir(at) == "/dev" && (path.Base(m.GetRoot()) == path.Base(at) || at == "/dev/console")
		if !named && !covers && !device {
			t.Errorf("%s is no mount of the spec: %v", at, m)
		}
	}
	if roots > 1 {
		t.Errorf("%d roots", roots)
	}
}

// holdsCgroup proves that all is in the container's own cgroup, and says nothing of that.
func holdsCgroup(t *testing.T, b base, name string) {
	raw, err := walltest.Entries(filepath.Join(b.images, name))
	must(t, err)
	for _, data := range raw {
		e := &cgroup.CgroupEntry{}
		must(t, proto.Unmarshal(data, e)) // it was written anew
		for _, s := range e.GetSets() {
			for _, m := range s.GetCtls() {
				if p := m.GetPath(); p != "/own" && !strings.HasPrefix(p, "/own/") || path.Clean(p) != p {
					t.Errorf("%v", m)
				}
			}
		}
		for _, c := range e.GetControllers() {
			for _, d := range c.GetDirs() {
				if d.GetDirName() != "own" || d.DirPerms != nil || len(d.GetProperties()) > 0 {
					t.Errorf("%v", d)
				}
				plain(t, d.GetChildren())
			}
		}
	}
}

func plain(t *testing.T, list []*cgroup.CgroupDirEntry) {
	for _, d := range list {
		if n := d.GetDirName(); n == "" || n == "." || n == ".." || strings.Contains(n, "/") {
			t.Errorf("%v", d)
		}
		for _, p := range d.GetProperties() {
			if n := p.GetName(); n == "release_agent" || n == "cgroup.kill" || n == "cgroup.freeze" ||
				strings.Contains(n, "/") {
				t.Errorf("%v", p)
			}
		}
		plain(t, d.GetChildren())
	}
}

func holdsUserns(t *testing.T, b base, name string) {
	spec := specOf(t, b)
	if !owns(spec, specs.UserNamespace) {
		t.Fatal("the container has none")
	}
	same := func(got []*userns.UidGidExtent, want []specs.LinuxIDMapping) bool {
		if len(got) != len(want) {
			return false
		}
		for _, g := range got {
			if !slices.Contains(want, specs.LinuxIDMapping{
				ContainerID: g.GetFirst(), HostID: g.GetLowerFirst(), Size: g.GetCount(),
			}) {
				return false
			}
		}
		return true
	}
	for _, e := range decoded[userns.UsernsEntry](t, b, name) {
		if !same(e.GetUidMap(), spec.Linux.UIDMappings) || !same(e.GetGidMap(), spec.Linux.GIDMappings) {
			t.Errorf("%v", e)
		}
	}
}

func holdsSeccomp(t *testing.T, b base, name string) {
	for _, e := range decoded[seccomp.SeccompEntry](t, b, name) {
		for i, f := range e.GetSeccompFilters() {
			if n := len(f.GetFilter()); n == 0 || n%8 != 0 || f.Prev != nil && f.GetPrev() >= uint32(i) {
				t.Errorf("filter %d: %v", i, f)
			}
		}
	}
}

func leads(name string) bool { return slices.Contains(strings.Split(name, "/"), "..") }

func holdsFiles(t *testing.T, b base, name string) {
	most, _ := b.spec.Limits()
	for _, e := range decoded[fdinfo.FileEntry](t, b, name) {
		switch {
		case leads(e.GetReg().GetName()), e.GetReg().GetExt(), leads(string(e.GetUsk().GetName())),
			leads(e.GetUsk().GetNameDir()):
			t.Errorf("%v", e)
		case e.GetType() == fdinfo.FdTypes_PACKETSK && most&(1<<unix.CAP_NET_RAW) == 0,
			e.GetType() == fdinfo.FdTypes_TUNF, e.GetType() == fdinfo.FdTypes_EXT, e.GetType() == fdinfo.FdTypes_BPFMAP:
			t.Errorf("%v", e)
		case e.GetType() == fdinfo.FdTypes_INETSK && e.GetIsk().GetType() == unix.SOCK_RAW &&
			most&(1<<unix.CAP_NET_RAW) == 0:
			t.Errorf("%v", e)
		case e.GetType() == fdinfo.FdTypes_FANOTIFY && len(e.GetFfy().GetMark()) > 0:
			t.Errorf("%v", e)
		}
	}
}

func holdsGhostFile(t *testing.T, b base, name string) {
	data, err := os.ReadFile(filepath.Join(b.images, name))
	must(t, err)
	size := int(data[8]) | int(data[9])<<8 | int(data[10])<<16 | int(data[11])<<24
	e := &ghostfile.GhostFileEntry{}
	if proto.Unmarshal(data[12:12+size], e) != nil {
		return
	}
	if mode := e.GetMode() & unix.S_IFMT; mode == unix.S_IFBLK {
		t.Errorf("%v", e)
	}
}

func holdsTtyInfo(t *testing.T, b base, name string) {
	for _, e := range decoded[tty.TtyInfoEntry](t, b, name) {
		if k := e.GetType(); k == tty.TtyType_VT || k > tty.TtyType_EXT_TTY {
			t.Errorf("%v", e)
		}
	}
}

func holdsUtsns(t *testing.T, b base, name string) {
	for _, e := range decoded[utsns.UtsnsEntry](t, b, name) {
		if len(e.GetNodename()) > 64 || len(e.GetDomainname()) > 64 {
			t.Errorf("%v", e)
		}
	}
}

func holdsNetdev(t *testing.T, b base, name string) {
	for _, e := range decoded[netdev.NetDeviceEntry](t, b, name) {
		n := e.GetName()
		if strings.ContainsAny(n, "/ \n") || n == "." || n == ".." || n == "" ||
			e.GetType() != netdev.NdType_LOOPBACK && !strings.HasSuffix(n, "0") {
			t.Errorf("%v", e)
		}
	}
}

// holdsMessages proves that all that is there are messages of one kind.
func holdsMessages(t *testing.T, b base, name string) {
	data, err := os.ReadFile(filepath.Join(b.images, name))
	must(t, err)
	if !strings.HasPrefix(name, "netns-") && len(data) > 0 {
		data = data[4:]
	}
	for len(data) >= 16 {
		size := int(data[0]) | int(data[1])<<8 | int(data[2])<<16 | int(data[3])<<24
		switch typ := int(data[4]) | int(data[5])<<8; {
		case strings.HasPrefix(name, "ifaddr-") && typ != unix.RTM_NEWADDR && typ != unix.NLMSG_DONE,
			strings.HasPrefix(name, "rule-") && typ != unix.RTM_NEWRULE && typ != unix.NLMSG_DONE,
			strings.HasPrefix(name, "route") && typ != unix.RTM_NEWROUTE && typ != unix.NLMSG_DONE,
			strings.HasPrefix(name, "netns-") && typ != 1<<8 && typ != 2<<8:
			t.Errorf("%s: a message of type %d", name, typ)
		}
		if size = (size + 3) &^ 3; size < 16 || size > len(data) {
			return
		}
		data = data[size:]
	}
}

func holdsIptables(t *testing.T, b base, name string) {
	data, err := os.ReadFile(filepath.Join(b.images, name))
	must(t, err)
	for line := range strings.Lines(string(data)) {
		if strings.HasPrefix(line, "-") || strings.Contains(line, "--modprobe") && !strings.HasPrefix(line, "#") {
			t.Errorf("%q", line)
		}
	}
}

func holdsNftables(t *testing.T, b base, name string) {
	data, err := os.ReadFile(filepath.Join(b.images, name))
	must(t, err)
	for line := range strings.Lines(string(data)) {
		line = strings.TrimSpace(line)
		if word, _, _ := strings.Cut(line, " "); word == "include" || word == "define" || word == "add" ||
			word == "delete" || word == "table" && !strings.HasPrefix(line, "table inet CRIU-") {
			t.Errorf("%q", line)
		}
	}
}

// holdsTmpfs proves that what the archive has lies below where it is unpacked.
func holdsTmpfs(t *testing.T, b base, name string) {
	f, err := os.Open(filepath.Join(b.images, name))
	must(t, err)
	defer f.Close()
	zip, err := gzip.NewReader(f)
	if errors.Is(err, io.EOF) {
		return
	}
	must(t, err)
	links := map[string]bool{}
	for in := tar.NewReader(zip); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		must(t, err)
		at := path.Clean(h.Name)
		if !filepath.IsLocal(at) {
			t.Errorf("%q", h.Name)
		}
		for up := path.Dir(at); up != "."; up = path.Dir(up) {
			if links[up] {
				t.Errorf("%q lies behind a link", h.Name)
			}
		}
		if links[at] = links[at] || h.Typeflag == tar.TypeSymlink; h.Typeflag == tar.TypeBlock {
			t.Errorf("%q is a device", h.Name)
		}
		if h.Typeflag == tar.TypeLink && !filepath.IsLocal(path.Clean(h.Linkname)) {
			t.Errorf("%q to %q", h.Name, h.Linkname)
		}
	}
}

func holdsMm(t *testing.T, b base, name string) {
	for _, e := range decoded[mm.MmEntry](t, b, name) {
		for _, v := range e.GetVmas() {
			if v.GetStatus()&(1<<27) != 0 {
				t.Errorf("%v", v)
			}
		}
	}
}

func holdsPidns(t *testing.T, b base, name string) {
	for _, e := range decoded[pidns.PidnsEntry](t, b, name) {
		if e.ExtKey != nil {
			t.Errorf("%v", e)
		}
	}
}

var update = flag.Bool("wall.update", false, "write testdata/dump.tar.zst anew, with the CRIU of this host")

// TestDump takes the dump that the seeds are of: a container with a user namespace and one of each
// thing that CRIU writes an image of. Without -wall.update it proves that Judge takes the one that
// is kept.
func TestDump(t *testing.T) {
	if !*update {
		images, spec := unpacked(t, "testdata/dump.tar.zst")
		must(t, wall.Judge(images, spec, ""))
		return
	}
	const ids = 524288
	bound := t.TempDir()
	b := criutest.New(t, []string{"hold", "all"}, func(s *specs.Spec) {
		s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
		s.Linux.UIDMappings = []specs.LinuxIDMapping{{ContainerID: 0, HostID: ids, Size: 65536}}
		s.Linux.GIDMappings = s.Linux.UIDMappings
		s.Mounts = append(s.Mounts, specs.Mount{
			Destination: "/tmp", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev"},
		},
			specs.Mount{
				Destination: "/bound", Type: "bind", Source: bound, Options: []string{"rbind", "ro", "rprivate"},
			})
		s.Process.Env = append(s.Process.Env, "GODEBUG=multipathtcp=0")
		s.Linux.Seccomp = &specs.LinuxSeccomp{
			DefaultAction: specs.ActAllow, Architectures: []specs.Arch{specs.ArchX86_64, specs.ArchX86, specs.ArchX32},
			Syscalls: []specs.LinuxSyscall{{Names: []string{"mount", "unshare", "bpf"}, Action: specs.ActErrno}},
		}
	})
	installed(t, b.Files)
	must(t, filepath.WalkDir(b.Bundle, func(p string, _ os.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(p, ids, ids))
	}))
	for dir := b.Bundle; dir != "/"; dir = filepath.Dir(dir) {
		must(t, os.Chmod(dir, 0o755))
	}
	if err := b.Cmd(nil, "create", "--bundle", b.Bundle, b.ID).Run(); err != nil {
		t.Fatal(err)
	}
	must(t, exec.Command("nsenter", "-n", "-t", fmt.Sprint(b.Pid()), "ip", "link", "set", "lo", "up").Run())
	if text, err := b.Do("start", b.ID); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	b.Until("it is up", func() bool {
		_, err := os.Stat(filepath.Join(b.Files, "up"))
		if why, _ := os.ReadFile(filepath.Join(b.Files, "failed")); len(why) > 0 || b.Status() == "stopped" {
			t.Fatal(string(why))
		}
		return err == nil
	})
	if text, err := b.Do("checkpoint", "--leave-running", "--file-locks", "--tcp-established", "--image-path", b.Images,
		"--work-path", b.Work, b.ID); err != nil {
		log, _ := os.ReadFile(filepath.Join(b.Work, "dump.log"))
		t.Fatalf("checkpoint: %v: %s\n%s", err, text, log)
	}
	bare := dumpNetwork(t)
	must(t, os.CopyFS(b.Images, os.DirFS(bare)))
	file, err := os.Create("testdata/dump.tar.zst")
	must(t, err)
	zip, err := zstd.NewWriter(file, zstd.WithEncoderLevel(zstd.SpeedBestCompression))
	must(t, err)
	w := tar.NewWriter(zip)
	add := func(name string, data []byte) {
		must(t, w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o600, Size: int64(len(data))}))
		_, err := w.Write(data)
		must(t, err)
	}
	config, err := os.ReadFile(filepath.Join(b.Bundle, "config.json"))
	must(t, err)
	add("spec.dump", config)
	all := readAll(t, b.Images)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if !strings.HasPrefix(name, "pages-") && !strings.HasSuffix(name, ".log") && name != "descriptors.json" {
			add("checkpoint/"+name, all[name])
		}
	}
	must(t, errors.Join(w.Close(), zip.Close(), file.Close()))
}

// dumpNetwork dumps a network namespace, which the OCI runtime leaves out.
func dumpNetwork(t *testing.T) (images string) {
	t.Helper()
	cmd := exec.Command("unshare", "-n", "sh", "-c",
		"ip link set lo up; ip link add dummy0 type dummy; ip rule add from 10.1.2.3 lookup 7; exec sleep 1000")
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	must(t, cmd.Start())
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	criutest.Until(t, "it sleeps", func() bool {
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", cmd.Process.Pid))
		return string(name) == "sleep\n"
	})
	all := t.TempDir()
	criu, err := host.Find("criu", nil)
	must(t, err)
	if out, err := exec.Command(criu, "dump", "--leave-running", "-D", all, "-t",
		fmt.Sprint(cmd.Process.Pid)).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	images = t.TempDir()
	for name, data := range readAll(t, all) {
		if regexp.MustCompile(`^(netns|netdev|ifaddr|route6?|rule|netns-.*|ip6?tables|nftables|pidns)-\d+\.img$`).MatchString(name) {
			must(t, os.WriteFile(filepath.Join(images, name), data, 0o600))
		}
	}
	return images
}
